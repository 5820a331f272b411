# SPDX-License-Identifier: Apache-2.0
"""A shrunken Kimi-K3 on local ranks: replicated beside rewritten, each rank its own tokens."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import compile, resident_bytes
from .._private import inductor_config
from ..config import SPConfig
from ..errors import SPError
from ..models import KimiK3Config, KimiK3Model, init_weights, shrunken_config
from ..ranks import tell

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Largest difference, relative to the largest value of the reference.
FP32_TOLERANCE = 1e-5
# bfloat16 is held against float32: over all ranks the rewritten model may be no further from
# it than the replicated one, but for this factor. Two correct roundings differ by about as
# much, since a last bit can send a token to another expert; a wrong rewrite is off by 1.
BF16_SLACK = 1.25


@dataclass(frozen=True)
class Timed:
    """One rank's part of the demo; bytes of resident weights, seconds, relative error."""

    applied: int
    error: float
    bytes_before: int
    bytes_after: int
    compile_seconds: dict[str, float]
    step_seconds: dict[str, float]


@dataclass(frozen=True)
class Compared:
    """One token count of ``verify``, on one rank or merged over ranks.

    ``error`` and ``own_error`` are those of the rewritten and of the replicated model
    against the reference: float32, which for fp32 is the replicated model itself.
    """

    rows: int
    error: float
    own_error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


def token_ids(rank: int, rows: int, vocab: int) -> Tensor:
    """Token ids of one rank; every rank and every count has its own."""
    draw = torch.Generator().manual_seed(1009 * rows + rank)
    return torch.randint(0, vocab, (rows,), generator=draw)


def build(
    config: KimiK3Config, rank: int, world: int, dtype: torch.dtype = torch.float32
) -> KimiK3Model:
    """This rank's model with weights that depend on their names alone."""
    assert dist.group.WORLD is not None
    group = str(dist.group.WORLD.group_name)
    return init_weights(KimiK3Model(config, world, rank, group, dtype=dtype))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value."""
    return ((found.float() - expected.float()).abs().max() / expected.abs().max()).item()


def _rms_error(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm()).item()


def quiet_inductor() -> None:
    """Compile in this process: with a pool of workers each, the ranks would crowd the CPU."""
    inductor_config().compile_threads = 1


def run_both(rank: int, world: int, layers: int, rows: int, steps: int) -> Timed:
    """Compile the model replicated and rewritten, compare and time them. Runs in a rank."""
    quiet_inductor()
    config = shrunken_config(layers)
    ids = token_ids(rank, rows, config.vocab_size)
    replicated, rewritten = build(config, rank, world), build(config, rank, world)
    before = resident_bytes(rewritten)
    plain = torch.compile(replicated, dynamic=False)
    ours = compile(rewritten, SPConfig(group=dist.group.WORLD), dynamic=False)
    compiling, stepping = {}, {}
    with torch.no_grad():
        outputs = {}
        for name, model in (("replicated", plain), ("rewritten", ours)):
            _say(rank, f"compiling the {name} model")
            start = time.perf_counter()
            outputs[name] = model(ids)
            compiling[name] = time.perf_counter() - start
        _say(rank, "timing")
        for name, model in (("replicated", plain), ("rewritten", ours)):
            stepping[name] = _median_seconds(lambda model=model: model(ids), steps)  # type: ignore[misc]
    assert ours.report is not None
    return Timed(
        len(ours.report.applied),
        relative_error(outputs["rewritten"], outputs["replicated"]),
        before,
        resident_bytes(rewritten),
        compiling,
        stepping,
    )


def _say(rank: int, text: str) -> None:
    if rank == 0:
        tell(text)


def _median_seconds(step: Callable[[], Any], steps: int) -> float:
    seconds = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def compare(
    rank: int, world: int, layers: int, counts: Sequence[int], dtype_name: str
) -> list[Compared]:
    """Rewritten (compiled) against replicated (eager) for each count of local rows.

    Runs in a rank. Weights are drawn in the tested dtype; the reference is float32.
    """
    quiet_inductor()
    dtype, config = DTYPES[dtype_name], shrunken_config(layers)
    replicated, rewritten = (build(config, rank, world, dtype) for _ in range(2))
    reference = replicated
    if dtype != torch.float32:
        reference = build(config, rank, world, dtype).float()
    ours = compile(rewritten, SPConfig(group=dist.group.WORLD), dynamic=True)
    out = []
    with torch.no_grad():
        for rows in counts:
            _say(rank, f"{rows} rows on each rank")
            ids = token_ids(rank, rows, config.vocab_size)
            expected, own, found = reference(ids), replicated(ids), ours(ids)
            out.append(_judge(rows, expected, own, found, dtype))
    if ours.report is None or not ours.report.applied:
        raise SPError(f"nothing was rewritten, so there is nothing to compare: {ours.report}")
    return out


def _judge(rows: int, expected: Tensor, own: Tensor, found: Tensor, dtype: torch.dtype) -> Compared:
    if dtype == torch.float32:
        return Compared(rows, relative_error(found, expected), 0.0, FP32_TOLERANCE)
    allowed = _rms_error(own, expected)
    return Compared(rows, _rms_error(found, expected), allowed, allowed * BF16_SLACK)


def merged(per_rank: Sequence[Sequence[Compared]], dtype_name: str) -> list[Compared]:
    """One row for each token count: the worst rank in fp32, all ranks together in bf16."""
    merge = max if dtype_name == "fp32" else _root_mean_square
    return [
        Compared(ranks[0].rows, *(merge([getattr(c, f) for c in ranks]) for f in _MERGED))
        for ranks in zip(*per_rank, strict=True)
    ]


_MERGED = ("error", "own_error", "limit")


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(v * v for v in values) / len(values))
