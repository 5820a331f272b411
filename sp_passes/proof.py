# SPDX-License-Identifier: Apache-2.0
"""What the ranks compare before anything is rewritten for good.

Two questions, each one small all-gather over the tensor-parallel group: did every rank
decide the same (``agree``), and does every rank hold the same weights (``prove``). Both
raise on every rank together, because every rank sees every answer.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from . import _private
from .errors import ReplicationError, ShardingError, SPError
from .layout import ShardLayout

T = TypeVar("T")
log = logging.getLogger("sp_passes")

_CHUNK = 1 << 20
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
_ODD = 0xBF58476D1CE4E5B9 - (1 << 64)


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """64-bit hash of a tensor's shape, dtype and bytes, as an int64 scalar on its device.

    The sum of the elements' bit patterns, each times an odd number that depends on its
    position, modulo 2**64: a change of one element always changes it. Works chunk by chunk, so
    the extra memory is 32 MiB however large the tensor is (a non-contiguous tensor is
    copied first).
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    words = flat.view(_WORDS[flat.element_size()])
    at = torch.arange(min(_CHUNK, words.numel()), device=words.device) * _MIX
    weights = ((at ^ (at >> 29)) * _ODD) | 1
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for index, chunk in enumerate(words.split(_CHUNK)):
        mine = (chunk.to(torch.int64) * weights[: chunk.numel()]).sum()
        total += mine * _signed((index * _MIX) | 1)
    return total + _text_hash(f"{tensor.dtype}{list(tensor.shape)}")


def _slices_hash(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """A 64-bit hash of each slice of ``tensor`` along ``dim``, as int64 on the CPU."""
    slices = tensor.detach().movedim(dim, 0).unbind(0)
    return torch.stack([fingerprint(one).to("cpu") for one in slices])


def _signed(value: int) -> int:
    """``value`` modulo 2**64, as int64 holds it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _text_hash(text: str) -> int:
    value = 0
    for char in text.encode():
        value = (value * 1099511628211 + char + 1) % (1 << 63)
    return value


def _device(pg: Any) -> torch.device:
    """A device that the group's backend can send from."""
    if "cpu" in _private.device_types(pg) or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def _say_when_slow(pg: Any, what: str) -> Iterator[None]:
    """One warning line when the other ranks have not arrived after ten seconds."""
    warn = threading.Timer(
        10.0,
        log.warning,
        ("rank %d waits for the other ranks of group %s to %s", pg.rank(), pg.group_name, what),
    )
    warn.daemon = True
    warn.start()
    try:
        yield
    finally:
        warn.cancel()


def _exchange(values: torch.Tensor, pg: Any, what: str) -> list[list[int]]:
    """Every rank's int64 ``values``, by rank; all ranks must send the same number."""
    mine = values.to(_device(pg))
    out = mine.new_empty((pg.size(), mine.numel()))
    with _say_when_slow(pg, what):
        _private.all_gather_into(out.view(-1), mine, pg)
        return out.tolist()


def said(value: T, pg: Any, what: str) -> list[T]:
    """Every rank's small picklable ``value``, by rank. Collective; ``what`` it is for."""
    if pg.size() == 1:
        return [value]
    everyone: list[Any] = [None] * pg.size()
    with _say_when_slow(pg, what):
        dist.all_gather_object(everyone, value, group=pg)
    return everyone


def agree(plan: str, count: int, summary: str, pg: Any) -> None:
    """Raise on every rank unless all bring the same ``plan`` and number of weights.

    Args:
        plan: hexadecimal digest of the decisions (at most 64 bits).
        count: weights this rank is about to shard.
        summary: what this rank decided, for the error message.
        pg: the tensor-parallel group.

    Raises:
        SPError: the ranks decided differently.
    """
    number = int(plan, 16)
    mine = [number >> 32, number & 0xFFFFFFFF, count]
    rows = _exchange(torch.tensor(mine, dtype=torch.int64), pg, f"reach plan {plan}")
    if all(row == mine for row in rows):
        return
    texts = said(summary, pg, "say what they decided")
    lines = [
        f"  rank {rank}: plan {row[0]:08x}{row[1]:08x}, {row[2]} weights to shard; {text}"
        for rank, (row, text) in enumerate(zip(rows, texts, strict=True))
    ]
    raise SPError(
        "the ranks of one tensor-parallel group decided differently, so nothing was run:\n"
        + "\n".join(lines)
        + "\ngive every rank the same model, SPConfig and sp_passes version"
    )


def all_well(problem: Exception | None, pg: Any) -> None:
    """Raise on every rank when one of them has a problem, so that none waits for it.

    Raises:
        SPError: this rank's own problem, or that another rank has one.
    """
    rows = _exchange(torch.tensor([problem is not None], dtype=torch.int64), pg, "report problems")
    if problem is not None:
        raise problem
    bad = [rank for rank, row in enumerate(rows) if row[0]]
    if bad:
        raise SPError(
            f"rank {', '.join(map(str, bad))} refused; nothing was changed, see its own error"
        )


def same_rows(rows: int, name: str, pg: Any) -> None:
    """Raise on every rank unless all bring the same number of local rows.

    Raises:
        ShardingError: names every rank's number.
    """
    found = [row[0] for row in _exchange(torch.tensor([rows]), pg, f"reach {name}")]
    if len(set(found)) > 1:
        raise ShardingError(
            f"the ranks bring {found} rows to {name}: every rank must hold the same number of "
            "tokens; pad them (sp_passes.local_rows says to how many)"
        )


def whole_parts(
    weight: torch.Tensor, layout: ShardLayout, name: str
) -> list[tuple[torch.Tensor, str]]:
    """What of ``weight`` every rank must hold alike, with its name: not its kept segments."""
    if not layout.kept:
        return [(weight, name)]
    before = ":, " * layout.dim
    return [
        (weight.narrow(layout.dim, start, length), f"{name}[{before}{start}:{start + length}]")
        for start, length in layout.cut_ranges
    ]


def differing(weights: Sequence[torch.Tensor], names: Sequence[str], pg: Any) -> list[str]:
    """Names of the ``weights`` that are not bit-identical on every rank. Collective."""
    mine = torch.stack([fingerprint(w).to("cpu") for w in weights])
    columns = zip(*_exchange(mine, pg, f"compare {len(names)} weights"), strict=True)
    return [name for name, column in zip(names, columns, strict=True) if len(set(column)) > 1]


def prove(weights: Sequence[torch.Tensor], names: Sequence[str], pg: Any) -> None:
    """Raise on every rank unless all ranks hold bit-identical ``weights``.

    Raises:
        ReplicationError: names the first weight that differs and the ranks that hold
            something else than the majority.
    """
    if not weights:
        return
    mine = torch.stack([fingerprint(w).to("cpu") for w in weights])
    rows = _exchange(mine, pg, f"prove {names[0]} and {len(weights) - 1} more replicated")
    bad: list[str] = []
    differing: list[torch.Tensor] = []
    for index, name in enumerate(names):
        column = [row[index] for row in rows]
        common, _ = Counter(column).most_common(1)[0]
        odd = [rank for rank, value in enumerate(column) if value != common]
        if odd:
            bad.append(f"{name} (rank {', '.join(map(str, odd))} differs)")
            differing.append(weights[index])
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise ReplicationError(
            f"weight {bad[0]}{more} is not the same on every rank of group {pg.group_name}: it "
            "cannot be sharded as a replicated weight, and nothing was freed. If it is already "
            "one rank's part, say so with sp_passes.declare_placement(parameter, Shard(dim)); "
            f"{_whole_in_part(differing[0], pg)}if it should be replicated, load the same "
            "checkpoint on every rank"
        )


_FEW = 8


def _whole_in_part(weight: torch.Tensor, pg: Any) -> str:
    """What to declare of a weight that differs in some segments only. Collective.

    Every rank comes here with the same weight, after an exchange that all of them saw.
    """
    sizes = [*weight.shape[:2], 0, 0][:2]
    found = _exchange(torch.tensor(sizes), pg, "compare shapes")
    if weight.ndim not in (1, 2) or any(row != found[0] for row in found):
        return ""
    for dim in range(weight.ndim):
        rows = _exchange(_slices_hash(weight, dim), pg, "find what differs")
        alike = [len(set(column)) == 1 for column in zip(*rows, strict=True)]
        runs = [(whole, len(list(group))) for whole, group in groupby(alike)]
        if 1 < len(runs) <= _FEW:
            said = ", ".join(f"({n}, {'Replicate()' if w else f'Shard({dim})'})" for w, n in runs)
            along = f", dim={dim}" if dim else ""
            return (
                f"the ranks agree on part of it, as on a merged weight of which one matrix is "
                f"sharded: then declare sp_passes.declare_segments(parameter, {said}{along}); "
            )
    return ""
