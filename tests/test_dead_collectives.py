# SPDX-License-Identifier: Apache-2.0
"""Collectives that bring nothing new go away, and only those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import mlps
import pytest
import torch
import torch.nn.functional as F
from blocks import FUNCTIONAL, Block, Comm
from expecttest import TestCase
from torch import Tensor
from torch.distributed.tensor import Replicate

import sp_passes
from sp_passes import SPConfig
from sp_passes.graph.collectives import count

TP = 4
ONLY = ("dead_collectives",)
WHOLE = {"x": Replicate()}


def twice(s: Any, x: Tensor) -> Any:
    return F.linear(s.c.gather(x), s.q), torch.relu(s.c.gather(x))


def twice_by_torch(s: Any, x: Tensor) -> Any:
    return F.linear(s.c.torch_gather(x), s.q), torch.relu(s.c.torch_gather(x))


def sum_twice(s: Any, x: Tensor) -> Any:
    y = F.linear(F.linear(s.c.gather(x), s.q), s.o)
    return s.c.torch_reduce(y) + s.c.torch_reduce(y).relu()


def there_and_back(s: Any, x: Tensor) -> Tensor:
    g = s.c.gather(x)
    return torch.ops.sp_passes.token_shard(g, s.c.group, s.c.size) * 2


def there_and_back_by_layout(s: Any, x: Tensor) -> Tensor:
    g = s.c.gather(x)
    return torch.ops.sp_passes.local_shard(g, f"S0[{g.shape[0]}]", s.c.group, s.c.size) * 2


def there_and_half_back(s: Any, x: Tensor) -> Any:
    g = s.c.gather(x)
    return torch.ops.sp_passes.token_shard(g, s.c.group, s.c.size), g * 2


def back_and_there(s: Any, x: Tensor) -> Tensor:
    return s.c.gather(torch.ops.sp_passes.token_shard(x, s.c.group, s.c.size)) * 2


def of_whole_rows(s: Any, x: Tensor) -> Tensor:
    return s.c.gather(x)[x.shape[0] : 2 * x.shape[0]] * 2


def same_slice_on_every_rank(s: Any, x: Tensor) -> Tensor:
    """Of sharded rows a slice is the own block on one rank only."""
    return s.c.gather(x)[: x.shape[0]] * 2


def different_groups(s: Any, x: Tensor) -> Any:
    ops = torch.ops.vllm
    return ops.all_gather(x, 0, TP, "tp:0"), ops.all_gather(x, 0, TP, "dp:0")


def different_values(s: Any, x: Tensor) -> Any:
    return s.c.gather(x), s.c.gather(x * 2)


def two_blocks_and_back(s: Any, x: Tensor) -> Tensor:
    """The gathered rows lie rank by rank, those of each rank in two blocks."""
    g = s.c.gather(torch.cat([x, x * 2]))
    return torch.ops.sp_passes.token_shard(g, s.c.group, s.c.size) * 2


def twice_and_back(s: Any, x: Tensor) -> Any:
    g = s.c.gather(x)
    back = torch.ops.sp_passes.token_shard(s.c.gather(x), s.c.group, s.c.size)
    return g.relu(), back * 2


PROGRAMS: dict[str, tuple[Callable[..., Any], bool, dict[str, int]]] = {
    "twice": (twice, False, {"all_gather": 1}),
    "twice by torch": (twice_by_torch, False, {"all_gather": 1}),
    "sum twice": (sum_twice, False, {"all_gather": 1, "all_reduce": 1}),
    "there and back": (there_and_back, False, {}),
    "there and back by layout": (there_and_back_by_layout, False, {}),
    "there and half back": (there_and_half_back, False, {"all_gather": 1}),
    "back and there": (back_and_there, True, {}),
    "of whole rows": (of_whole_rows, True, {}),
    "same slice on every rank": (same_slice_on_every_rank, False, {"all_gather": 1}),
    "different groups": (different_groups, False, {"all_gather": 2}),
    "different values": (different_values, False, {"all_gather": 2}),
    "twice and back": (twice_and_back, False, {"all_gather": 1}),
    "two blocks and back": (two_blocks_and_back, False, {"all_gather": 1}),
}


def rewritten(name: str, comm: Comm, x: Tensor, config: SPConfig) -> tuple[Any, Any, dict]:
    fn, whole, _ = PROGRAMS[name]
    gm = sp_passes.trace(Block(comm, fn=fn), x)
    before = count(gm.graph)
    report = sp_passes.rewrite(gm, config, WHOLE if whole else None)
    return gm, report, before


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_left(name: str) -> None:
    x = torch.empty(TP, blocks.HIDDEN)
    gm, report, before = rewritten(name, Comm(TP), x, SPConfig(tp_size=TP, patterns=ONLY))
    left = count(gm.graph)
    assert left == PROGRAMS[name][2], report
    gone = {kind: before[kind] - left.get(kind, 0) for kind in before}
    said = [d.collectives_removed for d in report.applied]
    assert {k: sum(row.get(k, 0) for row in said) for k in gone} == gone, report
    assert not report.skipped and all(d.weights == () for d in report.decisions)


def run_all(rank: Any) -> dict[str, bool]:
    """Whether each program gives the same bits as before."""
    out = {}
    comm, config = Comm.of(rank), SPConfig(group=rank.group, patterns=ONLY)
    for name, (fn, whole, _) in PROGRAMS.items():
        if name == "different groups":
            continue
        x = blocks.tokens(0 if whole else rank.rank, TP)
        old = Block(comm, fn=fn)(x)
        gm, _, _ = rewritten(name, comm, x, config)
        new = gm(x)
        pairs = zip(*(v if isinstance(v, tuple) else (v,) for v in (old, new)), strict=True)
        out[name] = all(torch.equal(a, b) for a, b in pairs)
    return out


@pytest.mark.multirank
def test_the_same_bits(on_ranks: Callable[..., Any]) -> None:
    for found in on_ranks(run_all, TP):
        assert all(found.values()), found


class Golden(TestCase):
    maxDiff = None

    def test_twice_and_back(self) -> None:
        x = torch.empty(TP, blocks.HIDDEN)
        gm = sp_passes.trace(Block(Comm(TP), fn=twice_and_back), x)
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [4, 8]
all_gather = all_gather(x, '', 4) : [16, 8]
all_gather_1 = all_gather(x, '', 4) : [16, 8]
token_shard = token_shard(all_gather_1, '', 4) : [4, 8]
relu = relu(all_gather) : [16, 8]
mul = mul(token_shard, 2) : [4, 8]
return [relu, mul]
""",
        )
        sp_passes.rewrite(gm, SPConfig(tp_size=TP, patterns=ONLY))
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [4, 8]
all_gather = all_gather(x, '', 4) : [16, 8]
relu = relu(all_gather) : [16, 8]
mul = mul(x, 2) : [4, 8]
return [relu, mul]
""",
        )


def test_merged_before_they_are_fused() -> None:
    """Two gathers of the same rows end as one op with both products."""

    def fn(s: Any, x: Tensor) -> Any:
        return F.linear(s.c.gather(x), s.q), F.linear(s.c.gather(x), s.k)

    gm = sp_passes.trace(Block(Comm(TP), fn=fn), torch.empty(TP, blocks.HIDDEN))
    sp_passes.rewrite(gm, SPConfig(tp_size=TP, patterns=(*ONLY, "ag_gemm")))
    assert "ag_gemm(x, [q, k]" in mlps.show(gm)


def test_a_reduction_of_another_kind_stays() -> None:
    def fn(s: Any, x: Tensor) -> Tensor:
        y = F.linear(F.linear(s.c.gather(x), s.q), s.o)
        low = FUNCTIONAL.wait_tensor(FUNCTIONAL.all_reduce(y, "min", s.c.group))
        return s.c.torch_reduce(y) + low

    gm = sp_passes.trace(Block(Comm(TP), fn=fn), torch.empty(TP, blocks.HIDDEN))
    sp_passes.rewrite(gm, SPConfig(tp_size=TP, patterns=ONLY))
    assert count(gm.graph)["all_reduce"] == 2
