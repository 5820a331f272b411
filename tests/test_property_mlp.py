# SPDX-License-Identifier: Apache-2.0
"""Random MLPs: rewritten equals original, or is skipped with a reason; and corrupted
rewrites are noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlps
import pytest
import ranks
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import sp_passes
from sp_passes import PlacementError, ShardingError

FP32 = 1e-5
ours = torch.ops.sp_passes

specs = st.builds(
    mlps.Spec,
    hidden=st.integers(1, 7),
    width=st.integers(1, 24).map(lambda n: 2 * n),
    form=st.sampled_from(["merged", "merged", "separate", "single"]),
    split=st.sampled_from(sorted(mlps.SPLITS)),
    act=st.sampled_from(sorted(mlps.ACTS)),
    bias1=st.booleans(),
    bias2=st.booleans(),
    in_first=st.booleans(),
    rows=st.sampled_from(["", "", "inside", "after", "both"]),
    vector=st.booleans(),
)


def inputs_for(spec: mlps.Spec, rows: int, tp: int) -> list[Tensor]:
    return [mlps.tokens(spec, r, rows) for r in range(tp)]


def compare(module: nn.Module, tp: int, inputs: list[Tensor]) -> sp_passes.Report:
    gm = sp_passes.trace(module, inputs[0])
    report = sp_passes.rewrite(gm, mlps.config(tp_size=tp))
    assert report.decisions, f"neither rewritten nor skipped with a reason: {report}"
    assert all(d.applied or d.reason for d in report.decisions)
    for x, y in zip(inputs, ranks.lockstep(gm, tp, [[v] for v in inputs]), strict=True):
        assert mlps.worst_error(y, mlps.exact(module, x)) < FP32, report
    if report.applied:
        sp_passes.check(gm, mlps.config(tp_size=tp))
    return report


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    spec=specs,
    tp=st.sampled_from([1, 2, 3, 4, 8]),
    rows=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 9),
)
def test_random_mlps(spec: mlps.Spec, tp: int, rows: int, seed: int) -> None:
    module = mlps.MLP(spec, seed)
    report = compare(module, tp, inputs_for(spec, rows, tp))
    unclear = spec.form == "merged" and spec.split in ("quarters", "lane_select", "view_select")
    if tp > 1 and not unclear:
        divisible = spec.width % tp == 0 and spec.width > tp
        assert [d.applied for d in report.decisions] == [divisible], report


class Segments(nn.Module):
    """Any number of logical matrices merged in one weight, in any order, combined by a chain."""

    def __init__(self, sizes: list[int], use: list[tuple[int, int]], ops: list[int]) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(5)
        self.sizes, self.use, self.ops = sizes, use, ops
        width = sum(end - start for start, end in use) if not ops else use[0][1] - use[0][0]
        self.first = nn.Parameter(torch.randn(sum(sizes), 4, generator=made), requires_grad=False)
        self.second = nn.Parameter(torch.randn(3, width, generator=made), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        z = F.linear(x, self.first)
        parts = [z[..., a:b] for a, b in self.use]
        if not self.ops:
            return F.linear(torch.cat([F.silu(p) for p in parts], -1), self.second)
        h = F.silu(parts[0])
        for part, op in zip(parts[1:], self.ops, strict=True):
            h = h * part if op else h + part
        return F.linear(h, self.second)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), tp=st.sampled_from([2, 3, 4]))
def test_random_segments(data: st.DataObject, tp: int) -> None:
    """Slices of one product in any order, joined by cat, or by products and sums."""
    size = data.draw(st.sampled_from([tp, 2 * tp, 3 * tp, 2 * tp + 1]))
    count = data.draw(st.integers(1, 4))
    sizes = [size] * count
    bounds = [(i * size, (i + 1) * size) for i in range(count)]
    order = data.draw(st.permutations(bounds))
    if data.draw(st.booleans()):
        order = order[: data.draw(st.integers(1, count))]
    ops = data.draw(
        st.one_of(
            st.just([]),
            st.lists(st.integers(0, 1), min_size=len(order) - 1, max_size=len(order) - 1),
        )
    )
    module = Segments(sizes, list(order), ops)
    made = torch.Generator().manual_seed(6)
    inputs = [torch.randn(3, 4, generator=made) * (r + 1) for r in range(tp)]
    compare(module, tp, inputs)


# --- mutations ------------------------------------------------------------------------------


def rewritten(spec: mlps.Spec, tp: int) -> tuple[nn.Module, fx.GraphModule, list[Tensor]]:
    module = mlps.MLP(spec)
    inputs = inputs_for(spec, 4, tp)
    gm = sp_passes.trace(module, inputs[0])
    assert sp_passes.rewrite(gm, mlps.config(tp_size=tp)).applied
    return module, gm, inputs


def only(gm: fx.GraphModule, op: Any) -> fx.Node:
    (node,) = gm.graph.find_nodes(op="call_function", target=op)
    return node


def edit(node: fx.Node, at: int, value: Any) -> None:
    args = list(node.args)
    args[at] = value
    node.args = tuple(args)


def swap_segments(gm: fx.GraphModule) -> None:
    """One layout, as if the merged weight were a single matrix."""
    node = only(gm, ours.ag_gemm.default)
    edit(node, 3, ["S0[48]"])


def uneven_segments(gm: fx.GraphModule) -> None:
    edit(only(gm, ours.ag_gemm.default), 3, ["S0[16,32]"])


def many_segments(gm: fx.GraphModule) -> None:
    edit(only(gm, ours.ag_gemm.default), 3, ["S0[" + ",".join(["8"] * 6) + "]"])


def segments_of_second(gm: fx.GraphModule) -> None:
    edit(only(gm, ours.gemm_rs.default), 3, "S1[12,12]")


def slices(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)


def both_slices_of_gate(gm: fx.GraphModule) -> None:
    first, second = slices(gm)
    second.args = first.args


def shifted_slice(gm: fx.GraphModule) -> None:
    first, _ = slices(gm)
    first.args = (*first.args[:2], 1, first.args[3] + 1, *first.args[4:])  # type: ignore[operator]


def exchanged_slices(gm: fx.GraphModule) -> None:
    first, second = slices(gm)
    first.args, second.args = second.args, first.args


def interleaved_slices(gm: fx.GraphModule) -> None:
    first, second = slices(gm)
    end = second.args[3]
    first.args, second.args = (*first.args[:2], 0, end, 2), (*second.args[:2], 1, end, 2)


def plain_product_instead_of_reduction(gm: fx.GraphModule) -> None:
    """The weight's own part times the local activation, and nothing is summed."""
    node = only(gm, ours.gemm_rs.default)
    x, weight, _, layout = node.args[:4]
    with gm.graph.inserting_before(node):
        tail = node.args[-2:]
        part = gm.graph.call_function(ours.local_shard.default, (weight, layout, *tail))
        turned = gm.graph.call_function(torch.ops.aten.t.default, (part,))
        product = gm.graph.call_function(torch.ops.aten.mm.default, (x, turned))
        rows = node.meta["val"].shape[0]
        mine = gm.graph.call_function(torch.ops.aten.slice.Tensor, (product, 0, 0, rows))
    for new, like in zip((part, turned, product, mine), fakes(node), strict=True):
        new.meta["val"] = like
    node.replace_all_uses_with(mine)
    gm.graph.erase_node(node)


def fakes(node: fx.Node) -> list[Tensor]:
    x, weight = (a.meta["val"] for a in node.args[:2])  # type: ignore[union-attr]
    with node.meta["val"].fake_mode:
        part = weight.new_empty((weight.shape[0], x.shape[1]))
        product = x @ part.t()
        return [part, part.t(), product, product[: node.meta["val"].shape[0]]]


def no_gather(gm: fx.GraphModule) -> None:
    """Both projections cut, but the tokens stay local: every rank adds other rows."""
    node = only(gm, ours.ag_gemm.default)
    first = next(iter(node.users))
    x, (weight,), _, (layout,) = node.args[:4]
    tail = node.args[-2:]
    with gm.graph.inserting_before(node):
        part = gm.graph.call_function(ours.local_shard.default, (weight, layout, *tail))
        turned = gm.graph.call_function(torch.ops.aten.t.default, (part,))
        product = gm.graph.call_function(torch.ops.aten.mm.default, (x, turned))
        tall = gm.graph.call_function(torch.ops.aten.repeat.default, (product, [tail[1], 1]))
    value = first.meta["val"]
    with value.fake_mode:
        local = value[: x.meta["val"].shape[0]].clone()  # type: ignore[union-attr]
        shard = weight.meta["val"].new_empty((value.shape[1], weight.meta["val"].shape[1]))  # type: ignore
        part.meta["val"], turned.meta["val"] = shard, shard.t()
        product.meta["val"], tall.meta["val"] = local, value
    first.replace_all_uses_with(tall)
    gm.graph.erase_node(first)
    gm.graph.erase_node(node)


Mutation = Callable[[fx.GraphModule], None]

CAUGHT_BY_CHECK: list[Mutation] = [
    swap_segments,
    uneven_segments,
    many_segments,
    segments_of_second,
    both_slices_of_gate,
    shifted_slice,
    interleaved_slices,
    plain_product_instead_of_reduction,
    no_gather,
]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("mutate", CAUGHT_BY_CHECK, ids=lambda f: f.__name__)
def test_check_catches(mutate: Mutation, tp: int) -> None:
    module, gm, inputs = rewritten(mlps.BASE, tp)
    mutate(gm)
    gm.graph.lint()
    gm.recompile()
    wrong = not numbers_hold(module, gm, inputs, tp)
    if mutate is both_slices_of_gate:
        # Placed like the right program, feature for feature: only the numbers tell.
        assert wrong
        return
    with pytest.raises((PlacementError, ShardingError)):
        sp_passes.check(gm, mlps.config(tp_size=tp))
    assert wrong or mutate is segments_of_second


def numbers_hold(module: nn.Module, gm: fx.GraphModule, inputs: list[Tensor], tp: int) -> bool:
    try:
        found = ranks.lockstep(gm, tp, [[x] for x in inputs])
        return all(
            mlps.worst_error(y, mlps.exact(module, x)) < FP32
            for x, y in zip(inputs, found, strict=True)
        )
    except (RuntimeError, AssertionError):
        return False


def test_exchanged_slices_change_numbers() -> None:
    module, gm, inputs = rewritten(mlps.BASE, 4)
    exchanged_slices(gm)
    gm.recompile()
    assert not numbers_hold(module, gm, inputs, 4)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    spec=st.builds(
        mlps.Spec,
        split=st.sampled_from(["chunk", "swapped", "strided", "lane_unbind", "view_unbind"]),
        bias1=st.booleans(),
        form=st.sampled_from(["merged", "merged", "separate"]),
    ),
    tp=st.sampled_from([2, 4]),
    data=st.data(),
)
def test_no_corrupted_layout_goes_unnoticed(spec: mlps.Spec, tp: int, data: st.DataObject) -> None:
    """Any other segments of a first weight: `check` raises, or the numbers are still right."""
    module, gm, inputs = rewritten(spec, tp)
    node = only(gm, ours.ag_gemm.default)
    layouts = list(node.args[3])  # type: ignore[arg-type]
    at = data.draw(st.integers(0, len(layouts) - 1))
    size = sum(map(int, layouts[at][3:-1].split(",")))
    pieces = data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if size // tp % n == 0]))
    corrupted = f"S0[{','.join([str(size // pieces)] * pieces)}]"
    assume(corrupted != layouts[at])
    layouts[at] = corrupted
    edit(node, 3, layouts)
    gm.recompile()
    if numbers_hold(module, gm, inputs, tp):
        return
    with pytest.raises((PlacementError, ShardingError)):
        sp_passes.check(gm, mlps.config(tp_size=tp))
