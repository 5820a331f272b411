# SPDX-License-Identifier: Apache-2.0
"""A reduce-scatter and the gather behind it become one all-reduce, where few tokens gain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import mlps
import pytest
import torch
import torch.nn.functional as F
from blocks import Block, Comm
from expecttest import TestCase
from torch import Tensor

import sp_passes
from sp_passes import SPConfig
from sp_passes.graph.collectives import count

TP = 4
ONLY = ("join_all_reduce",)
FEW, MANY = (1, 64), (1 << 20, 1 << 20)


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True))


def normed(s: Any, x: Tensor) -> Tensor:
    y = s.scatter(F.linear(F.linear(s.gather(x), s.q), s.o))
    return F.linear(s.gather(norm(y) * s.norm), s.k)


def at_once(s: Any, x: Tensor) -> Tensor:
    return s.gather(s.scatter(F.linear(F.linear(s.gather(x), s.q), s.o)))


def reshaped(s: Any, x: Tensor) -> Tensor:
    y = s.scatter(F.linear(F.linear(s.gather(x), s.q), s.o))
    return s.gather(norm(y.view(y.shape[0], 2, -1)).reshape(y.shape[0], -1))


def with_constant(s: Any, x: Tensor) -> Tensor:
    y = s.scatter(F.linear(F.linear(s.gather(x), s.q), s.o))
    return s.gather(norm(y + torch.full(y.shape, 2.0)))


def with_row(s: Any, x: Tensor) -> Tensor:
    y = s.scatter(F.linear(F.linear(s.gather(x), s.q), s.o))
    return s.gather(norm(y + s.norm.expand(y.shape)))


def with_noise(s: Any, x: Tensor) -> Tensor:
    y = s.scatter(F.linear(F.linear(s.gather(x), s.q), s.o))
    return s.gather(y + torch.rand_like(y))


def with_residual(s: Any, x: Tensor) -> Tensor:
    return s.gather(norm(x + s.scatter(F.linear(F.linear(s.gather(x), s.q), s.o))))


def kept_sharded(s: Any, x: Tensor) -> Any:
    y = s.scatter(F.linear(F.linear(s.gather(x), s.q), s.o))
    return s.gather(norm(y)), y


PROGRAMS: dict[str, tuple[Callable[..., Any], bool]] = {
    "normed": (normed, True),
    "at once": (at_once, True),
    "reshaped": (reshaped, True),
    "with a constant of own rows": (with_constant, False),
    "with a row repeated for own rows": (with_row, False),
    "with random numbers": (with_noise, False),
    "with residual": (with_residual, False),
    "kept sharded": (kept_sharded, False),
}


def rewritten(fn: Callable[..., Any], tokens: tuple[int, int] | None = FEW) -> tuple[Any, Any]:
    gm = sp_passes.trace(Block(Comm(TP), fn=fn), torch.empty(2, blocks.HIDDEN))
    config = SPConfig(tp_size=TP, patterns=ONLY, token_range=tokens)
    return gm, sp_passes.rewrite(gm, config)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_joined(name: str) -> None:
    fn, joined = PROGRAMS[name]
    gm, report = rewritten(fn)
    assert bool(report.applied) == joined and not report.skipped, report
    assert (count(gm.graph).get("all_reduce", 0) == 1) == joined
    sp_passes.check(gm, SPConfig(tp_size=TP))


def test_many_tokens_and_no_token_range() -> None:
    _, report = rewritten(normed, MANY)
    assert [d.reason.partition(":")[0] for d in report.decisions] == ["slower"]
    _, report = rewritten(normed, None)
    assert [d.reason.partition(":")[0] for d in report.decisions] == ["no token range"]


def run_all(rank: Any) -> dict[str, float]:
    out = {}
    config = SPConfig(group=rank.group, patterns=ONLY, token_range=FEW)
    for name, (fn, joined) in PROGRAMS.items():
        if joined:
            x = blocks.tokens(rank.rank, 2)
            gm = sp_passes.trace(Block(Comm.of(rank), fn=fn), x)
            old = gm(x)
            assert sp_passes.rewrite(gm, config).applied
            out[name] = mlps.worst_error(gm(x), old)
    return out


@pytest.mark.multirank
def test_numbers(on_ranks: Callable[..., Any]) -> None:
    for found in on_ranks(run_all, TP):
        assert max(found.values()) < 1e-5, found


class Golden(TestCase):
    maxDiff = None

    def test_normed(self) -> None:
        gm = sp_passes.trace(Block(Comm(TP), fn=normed), torch.empty(2, blocks.HIDDEN))
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [2, 8]
q : [4, 8]
k : [4, 8]
o : [8, 4]
norm : [8]
all_gather = all_gather(x, '', 4) : [8, 8]
t = t(q) : [8, 4]
mm = mm(all_gather, t) : [8, 4]
t_1 = t(o) : [4, 8]
mm_1 = mm(mm, t_1) : [8, 8]
reduce_scatter = reduce_scatter(mm_1, '', 4) : [2, 8]
pow = pow(reduce_scatter, 2) : [2, 8]
mean = mean(pow, [-1], True) : [2, 1]
rsqrt = rsqrt(mean) : [2, 1]
mul = mul(reduce_scatter, rsqrt) : [2, 8]
mul_1 = mul(mul, norm) : [2, 8]
all_gather_1 = all_gather(mul_1, '', 4) : [8, 8]
t_2 = t(k) : [8, 4]
mm_2 = mm(all_gather_1, t_2) : [8, 4]
return mm_2
""",
        )
        gm, _ = rewritten(normed)
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [2, 8]
q : [4, 8]
k : [4, 8]
o : [8, 4]
norm : [8]
all_gather = all_gather(x, '', 4) : [8, 8]
permute = permute(q, [1, 0]) : [8, 4]
mm = mm(all_gather, permute) : [8, 4]
permute_1 = permute(o, [1, 0]) : [4, 8]
mm_1 = mm(mm, permute_1) : [8, 8]
all_reduce = all_reduce(mm_1, '', 4) : [8, 8]
pow = pow(all_reduce, 2) : [8, 8]
mean = mean(pow, [-1], True) : [8, 1]
rsqrt = rsqrt(mean) : [8, 1]
mul = mul(all_reduce, rsqrt) : [8, 8]
mul_1 = mul(mul, norm) : [8, 8]
permute_2 = permute(k, [1, 0]) : [8, 4]
mm_2 = mm(mul_1, permute_2) : [8, 4]
return mm_2
""",
        )
