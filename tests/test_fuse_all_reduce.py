# SPDX-License-Identifier: Apache-2.0
"""A reduce-scatter and the gather behind it become one all-reduce, where few tokens gain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import dense
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


def own(s: Any, whole: Tensor) -> Tensor:
    return torch.ops.sp_passes.token_shard(whole, s.c.group, s.c.size)


def attended(s: Any, x: Tensor, up: str = "q") -> Tensor:
    return s.scatter(F.linear(F.linear(x, getattr(s, up)), s.o))


def layers(s: Any, x: Tensor) -> Any:
    """A residual that is cut from a whole value, then handed on from layer to layer."""
    whole = s.gather(x)
    residual = own(s, whole) + attended(s, whole)
    residual = residual + attended(s, s.gather(norm(residual) * s.norm), "k")
    return s.gather(norm(residual)), residual


def fused_norms(s: Any, x: Tensor) -> Any:
    whole = s.gather(x)
    y, residual = dense.vendor_norm("vendor v2", attended(s, whole), own(s, whole), s.norm)
    y = dense.vendor_norm("vendor v2", y * 2, None, s.norm)[0]
    return s.gather(y), residual


def side_work(s: Any, x: Tensor) -> Any:
    """What is not gathered stays on own rows."""
    y = attended(s, s.gather(x))
    return s.gather(norm(y)), (y + x).exp()


def kept_sharded(s: Any, x: Tensor) -> Any:
    y = s.scatter(F.linear(F.linear(s.gather(x), s.q), s.o))
    return s.gather(norm(y)), y


def stacked_rows(s: Any, x: Tensor) -> Tensor:
    """The gather brings rank after rank, not all of the first half and then the second."""
    y = attended(s, s.gather(x))
    return s.gather(torch.cat([y, y * 2]))


def rows_of_heads(s: Any, x: Tensor) -> Tensor:
    y = attended(s, s.gather(x))
    return s.gather(norm(y.reshape(2 * y.shape[0], -1)).reshape(y.shape[0], -1))


def padded_residual(s: Any, x: Tensor) -> Any:
    """Own rows of a number of tokens that tp_size does not divide."""
    whole = s.gather(x)[:-1]
    y = F.linear(F.linear(whole, s.q), s.o)
    residual = own(s, whole) + s.scatter(F.pad(y, (0, 0, 0, 1)))
    return s.gather(norm(residual))[:-1]


PROGRAMS: dict[str, tuple[Callable[..., Any], bool]] = {
    "normed": (normed, True),
    "at once": (at_once, True),
    "reshaped": (reshaped, True),
    "with a constant of own rows": (with_constant, True),
    "with a row repeated for own rows": (with_row, False),
    "with random numbers": (with_noise, False),
    "with residual": (with_residual, False),
    "kept sharded": (kept_sharded, True),
    "layers": (layers, True),
    "fused norms": (fused_norms, True),
    "side work": (side_work, True),
    "rows of heads": (rows_of_heads, False),
    "padded residual": (padded_residual, True),
}


REFUSED = ("with residual", "with random numbers")


def rewritten(fn: Callable[..., Any], tokens: tuple[int, int] | None = FEW) -> tuple[Any, Any]:
    gm = sp_passes.trace(Block(Comm(TP), fn=fn), torch.empty(2, blocks.HIDDEN))
    config = SPConfig(tp_size=TP, patterns=ONLY, token_range=tokens)
    return gm, sp_passes.rewrite(gm, config)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_joined(name: str) -> None:
    dense.register_vendor_norms()
    fn, joined = PROGRAMS[name]
    gm, report = rewritten(fn)
    before = count(sp_passes.trace(Block(Comm(TP), fn=fn), torch.empty(2, blocks.HIDDEN)).graph)
    assert bool(report.applied) == joined, report
    # The first gather, of x, has no sum before it.
    wanted = {"all_gather": 1, "all_reduce": before["reduce_scatter"]} if joined else before
    assert count(gm.graph) == wanted, report
    reasons = [d.reason.partition(":")[0] for d in report.skipped]
    assert reasons == (["residual sharded"] if name in REFUSED else []), report
    sp_passes.check(gm, SPConfig(tp_size=TP))


def test_rows_in_two_blocks_are_left() -> None:
    gm, report = rewritten(stacked_rows)
    assert not report.applied
    assert count(gm.graph) == {"all_gather": 2, "reduce_scatter": 1}


def test_many_tokens_and_no_token_range() -> None:
    _, report = rewritten(normed, MANY)
    assert [d.reason.partition(":")[0] for d in report.decisions] == ["slower"]
    _, report = rewritten(normed, None)
    assert [d.reason.partition(":")[0] for d in report.decisions] == ["no token range"]


def flat(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def run_all(rank: Any) -> dict[str, float]:
    out = {}
    dense.register_vendor_norms()
    config = SPConfig(group=rank.group, patterns=ONLY, token_range=FEW)
    for name, (fn, joined) in PROGRAMS.items():
        if joined:
            x = blocks.tokens(rank.rank, 2)
            gm = sp_passes.trace(Block(Comm.of(rank), fn=fn), x)
            old = gm(x)
            assert sp_passes.rewrite(gm, config).applied
            pairs = zip(flat(gm(x)), flat(old), strict=True)
            out[name] = max(mlps.worst_error(a, b) for a, b in pairs)
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
