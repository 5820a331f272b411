# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""A merged weight of which some matrices are whole on every rank and others sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlps
import pytest
import ranks
import torch
from expecttest import TestCase
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Rank
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn.functional import linear

import sp_passes
from sp_passes import ReplicationError, ShardingError, SPConfig, declare_segments
from sp_passes.graph.traffic import bytes_sent
from sp_passes.layout import ShardLayout
from sp_passes.ops.features import put_together

H = 16
Q, KV, GATE = (16, True), (8, True), (12, False)
"""Size on each rank, and whether the matrix is whole there: as in ``fused_qkv_a_g_proj``."""
Kinds = tuple[tuple[int, bool], ...]


def parts(kinds: Kinds, tp: int, bias: bool) -> list[list[Tensor]]:
    """Each segment, whole or by rank; the last column is the bias."""
    made = torch.Generator().manual_seed(5)
    width = H + bias
    return [
        [torch.randn(n, width, generator=made)] * tp
        if whole
        else [torch.randn(n, width, generator=made) for _ in range(tp)]
        for n, whole in kinds
    ]


class Merged(nn.Module):
    """One product; each segment is used by itself."""

    def __init__(
        self,
        kinds: Kinds,
        rank: int,
        tp: int,
        group: str = "",
        bias: bool = False,
        out_first: bool = True,
        declared: bool = True,
    ) -> None:
        super().__init__()
        self.sizes, self.group, self.tp = [n for n, _ in kinds], group, tp
        self.out_first = out_first
        merged = torch.cat([by_rank[rank] for by_rank in parts(kinds, tp, bias)])
        weight = merged[:, :H] if out_first else merged[:, :H].t()
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        self.bias = nn.Parameter(merged[:, H].clone(), requires_grad=False) if bias else None
        named = [(n, Replicate() if whole else Shard(0)) for n, whole in kinds]
        for held, dim in ((self.weight, 0 if out_first else 1), (self.bias, 0)):
            if declared and held is not None:
                on_dim = [(n, p if p == Replicate() else Shard(dim)) for n, p in named]
                declare_segments(held, *on_dim, dim=dim)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.tp > 1:
            x = torch.ops.sp_passes.all_gather(x, self.group, self.tp)
        if self.out_first:
            y = linear(x, self.weight, self.bias)
        else:
            y = x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)
        return tuple(part.relu() for part in (y * 2).split(self.sizes, -1))


def wanted(kinds: Kinds, rank: int, tp: int, bias: bool, xs: list[Tensor]) -> list[Tensor]:
    x = torch.cat(xs).double()
    rows = [by_rank[rank].double() for by_rank in parts(kinds, tp, bias)]
    add = [w[:, H] if bias else 0 for w in rows]
    return [(2 * (x @ w[:, :H].t() + b)).relu() for w, b in zip(rows, add, strict=True)]


def tokens(rank: int, rows: int = 3) -> Tensor:
    return torch.randn(rows, H, generator=torch.Generator().manual_seed(40 + rank)) * (1 + rank)


def traced(module: nn.Module, rows: int = 3, **options: Any) -> tuple[Any, Any]:
    tp: Any = module.tp
    gm = sp_passes.trace(module, tokens(0, rows))
    options.setdefault("tp_size", None if "group" in options else tp)
    return gm, sp_passes.rewrite(gm, SPConfig(**options))


# --- the graph ----------------------------------------------------------------------------


class Golden(TestCase):
    maxDiff = None

    def test_only_what_is_whole_is_cut(self) -> None:
        module = Merged((Q, KV, GATE), 0, 4)
        gm = sp_passes.trace(module, tokens(0))
        before = mlps.show(gm)
        report = sp_passes.rewrite(gm, SPConfig(tp_size=4))
        self.assertExpectedInline(
            before,
            """\
x : [3, 16]
weight : [36, 16]
all_gather = all_gather(x, '', 4) : [12, 16]
t = t(weight) : [16, 36]
mm = mm(all_gather, t) : [12, 36]
mul = mul(mm, 2) : [12, 36]
split_with_sizes = split_with_sizes(mul, [16, 8, 12], -1) : [12, 16], [12, 8], [12, 12]
getitem = getitem(split_with_sizes, 0) : [12, 16]
getitem_1 = getitem(split_with_sizes, 1) : [12, 8]
getitem_2 = getitem(split_with_sizes, 2) : [12, 12]
relu = relu(getitem) : [12, 16]
relu_1 = relu(getitem_1) : [12, 8]
relu_2 = relu(getitem_2) : [12, 12]
return [relu, relu_1, relu_2]
""",
        )
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [3, 16]
weight : [36, 16]
prepare = prepare([weight], ['S0[24,=12]'], ['weight'], plan, True, '', 4) : [0]
all_gather = all_gather(x, '', 4) : [12, 16]
gemm_gather = gemm_gather(all_gather, weight, None, 'S0[24,=12]', prepare, '', 4, barrier=True) : [12, 36]
mul = mul(gemm_gather, 2) : [12, 36]
slice = slice(mul, 1, 0, 16) : [12, 16]
slice_1 = slice(mul, 1, 16, 24) : [12, 8]
slice_2 = slice(mul, 1, 24, 36) : [12, 12]
relu = relu(slice) : [12, 16]
relu_1 = relu(slice_1) : [12, 8]
relu_2 = relu(slice_2) : [12, 12]
return [relu, relu_1, relu_2]
""",
        )
        (decision,) = report.applied
        assert decision.bytes_saved_per_rank == 24 * H * 4 * 3 // 4
        # Of the product 24 of 36 features travel.
        gather = 3 * 3 * H * 4
        assert bytes_sent(gm.graph, 4) == {"all_gather": gather + 12 * 24 * 4 * 3 // 4}


segment = st.tuples(st.integers(1, 3).map(lambda n: 4 * n), st.booleans())


@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(segment, min_size=2, max_size=5)
    .filter(lambda k: len({whole for _, whole in k}) == 2)
    .map(tuple),
    tp=st.sampled_from([2, 4]),
    rows=st.sampled_from([0, 1, 3]),
    bias=st.booleans(),
    out_first=st.booleans(),
)
def test_any_order_of_segments(
    kinds: Kinds, tp: int, rows: int, bias: bool, out_first: bool
) -> None:
    modules = [Merged(kinds, r, tp, "", bias, out_first) for r in range(tp)]
    gm, report = traced(modules[0], rows)
    whole = sum(n for n, is_whole in kinds if is_whole)
    assert report.bytes_saved_per_rank == whole * (H + bias) * 4 // tp * (tp - 1)
    own = {n: [m.state_dict()[n] for m in modules] for n in modules[0].state_dict()}
    xs = [tokens(r, rows) for r in range(tp)]
    for rank, found in enumerate(ranks.lockstep(gm, tp, [[x] for x in xs], own)):
        for a, b in zip(found, wanted(kinds, rank, tp, bias, xs), strict=True):
            assert mlps.worst_error(a, b) < 1e-5


# --- what is left alone -------------------------------------------------------------------


def skipped(kinds: Kinds = (Q, GATE), tp: int = 4, fn: Any = None) -> str:
    module = Merged(kinds, 0, tp)
    if fn is not None:
        module.forward = lambda x: fn(module, x)  # type: ignore[method-assign]
    gm, report = traced(module, patterns=("latent_projection",))
    assert not report.applied and "prepare" not in str(gm.graph)
    return report.skipped[0].reason


def test_named_skips() -> None:
    gathered = torch.ops.sp_passes.all_gather
    assert skipped(((18, True), GATE)) == (
        "not divisible: 18 whole output features of weight by tp_size 4"
    )
    assert skipped(fn=lambda s, x: linear(x, s.weight)).startswith("tokens sharded: each rank")
    assert skipped(fn=lambda s, x: linear(gathered(x, "", 4), s.weight, s.weight[:, 0])).startswith(
        "bias sharded"
    )
    assert "weight used elsewhere" in skipped(
        fn=lambda s, x: (linear(gathered(x, "", 4), s.weight), s.weight + 1)
    )


def test_what_stays_whole_may_be_fused_with_its_gather() -> None:
    gm, report = traced(Merged(((18, True), GATE), 0, 4))
    assert [d.pattern for d in report.applied] == ["ag_gemm"], report
    sp_passes.check(gm, SPConfig(tp_size=4))


def test_a_bias_that_was_not_declared_is_named() -> None:
    module = Merged((GATE,), 0, 4, bias=True)
    del module.bias._sp_passes_placement
    _, report = traced(module)
    assert [d.reason[:30] for d in report.decisions] == ["product unknown: addmm (aten::"], report


def test_ops_that_would_mix_whole_and_sharded_are_refused() -> None:
    """A sum over the features would count those that every rank has once for each rank."""
    cut, gather = torch.ops.sp_passes.local_shard, torch.ops.sp_passes.all_gather
    wrong: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "may mix": lambda y, w: y.sum(-1),
        "may mix the two": lambda y, w: gather(y, "", 4),
        "both sharded along": lambda y, w: y @ w[:28, None],
        "count its whole part": lambda y, w: y @ cut(w, "S0[112]", "", 4)[:, None],
        "splits or joins": lambda y, w: y.view(-1, 2, 14).relu(),
        "same parts whole": lambda y, w: y + cut(w, "S0[112]", "", 4),
    }
    for meaning, use in wrong.items():
        module = Merged((Q, GATE), 0, 4)
        module.other = nn.Parameter(torch.randn(112))
        module.forward = lambda x, s=module, use=use: use(  # type: ignore[method-assign]
            linear(torch.ops.sp_passes.all_gather(x, "", 4), s.weight), s.other
        )
        gm = sp_passes.trace(module, tokens(0))
        with pytest.raises(sp_passes.PlacementError, match=meaning):
            sp_passes.check(gm, SPConfig(tp_size=4))


def test_declarations_are_checked() -> None:
    weight = torch.empty(28, H)
    for segments in (((16, Replicate()),), ((16, Replicate()), (12, Shard(1)))):
        with pytest.raises(ShardingError, match="segment"):
            declare_segments(weight, *segments)
    declare_segments(weight, (16, Replicate()), (12, Replicate()))
    assert sp_passes.declared_placement(weight) == Replicate()
    declare_segments(weight, (8, Replicate()), (8, Replicate()), (12, Shard(-2)), dim=-2)
    assert str(sp_passes.declared_placement(weight)) == "S0[16,=12]"


# --- on ranks -----------------------------------------------------------------------------


def compiled(rank: Rank, bias: bool) -> None:
    kinds, tp = (Q, GATE, KV), rank.world
    module = Merged(kinds, rank.rank, tp, rank.group.group_name, bias)
    plain = {name: value.clone() for name, value in module.state_dict().items()}
    model = sp_passes.compile(module, SPConfig(group=rank.group), dynamic=False)
    xs = [tokens(r) for r in range(tp)]
    cells = 4 * (H + bias)

    def check(scale: float = 1.0) -> None:
        want = wanted(kinds, rank.rank, tp, bias, [scale * x for x in xs])
        for a, b in zip(model(xs[rank.rank]), want, strict=True):
            assert mlps.worst_error(a, b) < 1e-5
        assert sp_passes.resident_bytes(module) == cells * (24 // tp + 12)

    check()
    assert [d.pattern for d in model.report.applied] == ["latent_projection"]
    assert model.report.bytes_saved_per_rank == cells * 24 // tp * (tp - 1)
    sp_passes.load_full_state_dict(module, {n: 3 * v for n, v in plain.items()})
    if not bias:
        check(3.0)
    wrong = {n: v.clone() for n, v in plain.items()}
    wrong["weight"][17] += rank.rank  # its own gate
    sp_passes.load_full_state_dict(module, wrong)
    wrong["weight"][30] += rank.rank
    with pytest.raises(ReplicationError, match=r"weight\[28:36\]"):
        sp_passes.load_full_state_dict(module, wrong)
    sp_passes.load_full_state_dict(module, plain)
    check()
    assert sp_passes.unshard(module) == list(plain)
    for name, value in module.state_dict().items():
        assert torch.equal(value, plain[name]), name


@pytest.mark.multirank
def test_compiled(on_ranks: Any) -> None:
    on_ranks(compiled, 2, True)


def rewritten(rank: Rank) -> None:
    kinds, tp = (GATE, Q, GATE, KV), rank.world
    module = Merged(kinds, rank.rank, tp, rank.group.group_name, out_first=False)
    gm, report = traced(module, group=rank.group)
    assert report.bytes_saved_per_rank == 24 * H * 4 // tp * (tp - 1)
    want = wanted(kinds, rank.rank, tp, False, [tokens(r) for r in range(tp)])
    for a, b in zip(gm(tokens(rank.rank)), want, strict=True):
        assert mlps.worst_error(a, b) < 1e-5


@pytest.mark.multirank
def test_four_ranks(on_ranks: Any) -> None:
    on_ranks(rewritten, 4)


def undeclared(rank: Rank) -> str:
    module = Merged((Q, KV, GATE), rank.rank, 2, rank.group.group_name, declared=False)
    model = sp_passes.compile(module, SPConfig(group=rank.group), dynamic=False)
    with pytest.raises(ReplicationError) as error:
        model(tokens(rank.rank))
    assert sp_passes.resident_bytes(module) == 36 * H * 4
    return str(error.value)


@pytest.mark.multirank
def test_undeclared_the_error_says_what_to_declare(on_ranks: Any) -> None:
    for text in on_ranks(undeclared, 2):
        assert "declare_segments(parameter, (24, Replicate()), (12, Shard(0)))" in text, text


def test_features_of_another_geometry_are_refused(solo: Any) -> None:
    layout = ShardLayout(0, (24, 12), (1,))
    with pytest.raises(ShardingError, match="needs 36 features at tp_size 1"):
        put_together(torch.ones(2, 30), layout, solo, 1)
