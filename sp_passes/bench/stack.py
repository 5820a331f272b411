# SPDX-License-Identifier: Apache-2.0
"""Full-width layers of Kimi-K3: step time and memory, replicated against rewritten.

    python -m sp_passes.bench.stack --layers 8 --out FILE      a GPU a rank, NCCL
    python -m sp_passes.bench.stack --toy --ranks 2            a dry run, on a CPU too

Layers are those of ``short_context``: no routed experts, a context of one token. Times are
medians of replayed CUDA graphs on the slowest rank. Each variant has ranks of its own, which make
the same weights; so what one leaves behind is in no other's memory. ``pair`` is one MLP of the
shared experts alone, for few to many tokens, in every form the ops have.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import SPConfig, compile, resident_bytes
from .._private import constant_floats, drop_cublas_workspaces
from ..errors import SPError
from ..models import KimiK3Config, load_config, shrunken_config
from ..models.layers import TP, Made
from ..ranks import run_ranks
from ..report import GIB
from . import mlp_pair
from .devices import Place, collectives, environment, join, will_share
from .parts import Watchdog, hearing, tell_result
from .short_context import Layers
from .steps import REPLICATED, crossover, own_rows, step_us
from .timing import relative_error, versions

TOKENS = (8, 64, 256, 1024, 4096, 8192)
MOST_COMPARED = 1024
"""Tokens up to which results are compared with replicated ones."""


@dataclass(frozen=True)
class Asked:
    """What to measure.

    Attributes:
        layers: 0: the pair alone.
        tokens: global tokens of a step.
        kernels: variants of the rewritten layers: kernels at every legal site, or, as
            ``auto@64``, at those that the cost model picks for 1 to 64 tokens.
        pair: measure the pair too.
        toy: toy widths and few rounds, to try the bench itself.
        limit: seconds after which a variant of the layers counts as hanging.
    """

    layers: int = 8
    tokens: tuple[int, ...] = TOKENS
    kernels: tuple[str, ...] = ("auto", "unfused", "auto@64")
    pair: bool = True
    toy: bool = False
    limit: float = 120.0

    def config(self) -> KimiK3Config:
        return (
            shrunken_config(self.layers)
            if self.toy
            else load_config("kimi-k3").with_layers(self.layers)
        )


# --- layers -----------------------------------------------------------------------------


def measure_layers(place: Place, asked: Asked, variant: str) -> dict[str, Any]:
    """The layers replicated, or rewritten in one way, in ranks that have run nothing else.

    Returns:
        ``us``: of a step, for each of ``asked.tokens``; ``memory`` (:func:`memory`); of a rewritten
        variant also what its report says and its ``error_against_replicated``.
    """
    config = asked.config()
    tp = TP(place.size, place.rank, str(place.pg.group_name))
    module = Layers(config, tp, Made(torch.bfloat16, place.device))
    inputs = {m: own_rows(place, m, config.hidden_size) for m in asked.tokens}
    compared = [] if variant == REPLICATED else [m for m in inputs if m <= MOST_COMPARED]
    wanted = {m: module(inputs[m]) for m in compared}
    errors = {}
    start = time.perf_counter()
    model = _model(place, module, variant, asked)
    for m in sorted(inputs, reverse=True):  # so that shared buffers are made once
        with constant_floats():
            out = model(inputs[m])
        if m in wanted:
            errors[m] = relative_error(out, wanted.pop(m))
    seconds = time.perf_counter() - start
    place.say(f"{variant}: {seconds:.0f} s to the first results")
    del out
    us = [step_us(place, partial(model, x)) for x in inputs.values()]
    most = inputs[max(inputs)]
    found = {"us": us, "seconds": round(seconds, 1), "memory": memory(place, module, model, most)}
    if variant == REPLICATED:
        return found
    report = model.report
    return found | {
        "sites": len(report.applied), "report_saves": report.bytes_saved_per_rank,
        "error_against_replicated": max(errors.values(), default=None), "report": str(report),
    }  # fmt: skip


def _model(place: Place, module: Layers, variant: str, asked: Asked) -> Any:
    if variant == REPLICATED:  # a dry run saves itself this compile
        return module if asked.toy else torch.compile(module, dynamic=True)
    kernels, _, most = variant.partition("@")
    config = SPConfig(
        group=place.pg, kernels=kernels, max_tokens=max(asked.tokens),
        token_range=(1, int(most)) if most else None,
    )  # fmt: skip
    return compile(module, config, dynamic=True)


def memory(
    place: Place, module: torch.nn.Module, model: Callable[[Tensor], Any], x: Tensor
) -> dict[str, int]:
    """Bytes of this rank.

    ``parameters``: weights and shards. ``peak``: most that PyTorch gave out during a step, weights
    and all. ``outside``: on the GPU and not of PyTorch's allocator: symmetric memory, NCCL, code,
    the context. What peak and outside leave of a GPU is a KV cache's; vLLM counts so too.
    """
    gc.collect()
    found = {"parameters": resident_bytes(module)}
    if place.cuda:
        place.meet()
        drop_cublas_workspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(place.device)
        model(x)
        place.meet()
        found["peak"] = torch.cuda.max_memory_allocated(place.device)
        free, total = torch.cuda.mem_get_info(place.device)
        found["outside"] = total - free - torch.cuda.memory_reserved(place.device)
    return found


def combined(asked: Asked, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One result of those of the variants that are there, the replicated one among them."""
    config = asked.config()
    times = {name: dict(zip(asked.tokens, one["us"], strict=True)) for name, one in found.items()}
    variants = {
        name: {key: value for key, value in one.items() if key not in ("us", "memory")}
        | {"after": one["memory"], "crossover": crossover(times[REPLICATED], times[name])}
        for name, one in found.items() if name != REPLICATED
    }  # fmt: skip
    return {
        "layers": list(config.layer_types), "hidden_size": config.hidden_size,
        "left_out": "no routed experts; attention has a context of one token",
        "rows": [{"tokens": m, "us": {v: t[m] for v, t in times.items()}} for m in asked.tokens],
        "before": found[REPLICATED]["memory"], "variants": variants,
    }  # fmt: skip


# --- the run ----------------------------------------------------------------------------


PAIR = "the MLP pair"


def work(rank: int, size: int, asked: Asked, part: str) -> None:
    """The pair, or one variant of the layers, in one rank."""
    place = join(rank, size)
    if not place.cuda:
        from ..demo.shrunken import quiet_inductor

        quiet_inductor()
    place.say(f"{part}: starting")
    Watchdog(asked.limit).start(part)
    tell = partial(tell_result, place)
    with torch.no_grad(), collectives(place):
        if part == PAIR:
            mlp_pair.measure(place, asked.toy, lambda found: tell({**versions(), "found": found}))
        else:
            tell({**versions(), "found": measure_layers(place, asked, part)})


def run(
    ranks: int,
    asked: Asked,
    timeout: float = 500,
    notify: Callable[[int, str], None] | None = None,
    save: Path | None = None,
) -> dict[str, Any]:
    """Measure on ``ranks`` local processes: new ones for each part, so that none finds what
    another left behind.

    Args:
        timeout: seconds for everything.
        notify: called with (rank, text) for progress.
        save: a file for the result as JSON, written whenever there is more of it.

    Returns:
        ``stack`` and ``pair``: rows ``{"tokens", "us": {variant: µs}}`` and the ``crossover`` in
        tokens; ``stack["variants"]`` has bytes of rank 0 and what each report says was saved.

    Raises:
        SPError: there is not a GPU for each rank, and this is no dry run.
        RankError: a rank failed, a variant took more than ``asked.limit`` seconds, or everything
            more than ``timeout``.
    """
    if not asked.toy and (not torch.cuda.is_available() or will_share(ranks)):
        raise SPError(
            f"full-width layers on {ranks} ranks need {ranks} GPUs, torch sees "
            f"{torch.cuda.device_count()}; give fewer ranks, or --toy to try the command"
        )
    if asked.toy:
        asked = replace(asked, tokens=tuple(m for m in asked.tokens if m <= 64))
    result: dict[str, Any] = {"ranks": ranks, "asked": asdict(asked)}
    layers: dict[str, dict[str, Any]] = {}

    def more(part: str, told: dict[str, Any]) -> None:
        found = told.pop("found")
        if part == PAIR:
            result.update(told, pair=found)
        else:
            layers[part] = found
            result.update(told, stack=combined(asked, layers))
        if save is not None:
            save.write_text(json.dumps(result, indent=1))

    end = time.monotonic() + timeout
    parts = [PAIR] * asked.pair + [REPLICATED, *asked.kernels] * bool(asked.layers)
    for part in parts:
        with environment(ranks):
            left = max(end - time.monotonic(), 1.0)
            run_ranks(
                work, ranks, asked, part, timeout=left, notify=hearing(partial(more, part), notify)
            )
    return result


def lines(result: dict[str, Any]) -> list[str]:
    """The result as text."""
    out = [f"{result['device']}, {result['ranks']} ranks, {result['date']}"]
    pair, stack = result.get("pair"), result.get("stack")
    if pair is not None:
        out.append(f"MLP {' → '.join(map(str, pair['widths']))}, µs; best form, its gain")
        for row in pair["rows"]:
            us = "  ".join(f"{name} {t:.1f}" for name, t in row["us"].items())
            gain = row["us"][REPLICATED] / row["us"][row["best"]]
            out.append(f"{row['tokens']:6}  {us}  ({row['best']} {gain:.2f}x)")
        out.append(f"crossover: {tokens_text(pair['crossover'])}")
    if stack is not None:
        out.append(f"{len(stack['layers'])} layers, {stack['left_out']}; µs a step (gain)")
        for row in stack["rows"]:
            whole = row["us"][REPLICATED]
            us = "  ".join(f"{n} {t:.0f} ({whole / t:.2f}x)" for n, t in row["us"].items())
            out.append(f"{row['tokens']:6}  {us}")
        out += summaries(stack)
    return out


def freed(stack: dict[str, Any], variant: str) -> int:
    """Bytes of weights that a rank no longer holds, as counted; see ``report_saves``."""
    after = stack["variants"][variant]["after"]
    count: int = stack["before"]["parameters"] - after["parameters"]
    return count


def agrees(stack: dict[str, Any]) -> bool:
    """Whether every report claimed the bytes that were freed."""
    found = stack["variants"]
    return all(freed(stack, name) == one["report_saves"] for name, one in found.items())


def room(stack: dict[str, Any], variant: str) -> int | None:
    """Bytes that a rank has more for its KV cache than replicated; see :func:`memory`."""
    before, after = stack["before"], stack["variants"][variant]["after"]
    if "peak" not in before:
        return None
    return sum(before[what] - after[what] for what in ("peak", "outside"))


def summaries(stack: dict[str, Any]) -> list[str]:
    """Of each variant: where it crosses over, what it freed, and what is left of that."""
    before, most = stack["before"], max((row["tokens"] for row in stack["rows"]), default=0)
    whole = before["parameters"] / GIB
    out = []
    for name, one in stack["variants"].items():
        gone, saves, more = freed(stack, name), one["report_saves"], room(stack, name)
        agree = "equal" if gone == saves else f"DIFFERENT by {gone - saves} bytes"
        text = f"{name}: {one['sites']} sites, crossover {tokens_text(one['crossover'])}; "
        text += f"weights of a rank {whole:.3f} GiB, freed {gone / GIB:.3f}, the report says "
        text += f"{saves / GIB:.3f}: {agree}"
        if more is not None:
            outside = (one["after"]["outside"] - before["outside"]) / GIB
            text += f"; with steps of up to {most} tokens {more / GIB:.3f} GiB more for a KV cache "
            text += f"(outside PyTorch {outside:+.3f})"
        if one["error_against_replicated"] is not None:
            text += f"; {one['error_against_replicated']:.1e} from the replicated results"
        out.append(text)
    return out


def tokens_text(found: float | None) -> str:
    if found is None:
        return "none, sharded is faster at every count"
    return f"{found:.0f} tokens" if found else "sharded is faster at no count"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--layers", type=int, default=8, help="0: the pair alone")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--kernels", default="auto,unfused,auto@64")
    parser.add_argument("--no-pair", action="store_true")
    parser.add_argument("--toy", action="store_true", help="toy widths: a dry run")
    parser.add_argument("--limit", type=float, default=Asked.limit, help="seconds for a variant")
    parser.add_argument("--timeout", type=float, default=500, help="seconds for everything")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    asked = Asked(
        args.layers, tuple(map(int, args.tokens.split(","))), tuple(args.kernels.split(",")),
        not args.no_pair, args.toy, args.limit,
    )  # fmt: skip

    def progress(rank: int, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    result = run(args.ranks, asked, args.timeout, progress, args.out)
    print("\n".join(lines(result)))
    stack = result.get("stack")
    return int(stack is not None and not agrees(stack))


if __name__ == "__main__":
    sys.exit(main())
