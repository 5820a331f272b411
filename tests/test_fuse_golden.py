# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Small graphs before and after fusing collectives with products, and why sites are skipped.

``EXPECTTEST_ACCEPT=1 pytest tests/test_fuse_golden.py`` rewrites the texts.
"""

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

TP = 4
FUSIONS = ("ag_gemm", "gemm_rs")


def before_and_after(spelling: str, fn: Callable[..., Any] | None = None) -> tuple[str, str]:
    gm = sp_passes.trace(Block(Comm(TP, group="tp"), spelling, fn), torch.empty(3, blocks.HIDDEN))
    before = mlps.show(gm)
    report = sp_passes.rewrite(gm, SPConfig(tp_size=TP, patterns=FUSIONS))
    assert report.applied and not report.skipped, report
    return before, mlps.show(gm)


class Golden(TestCase):
    maxDiff = None

    def test_ours(self) -> None:
        before, after = before_and_after("ours")
        self.assertExpectedInline(
            before,
            """\
x : [3, 8]
q : [4, 8]
k : [4, 8]
v : [4, 8]
o : [8, 4]
norm : [8]
mul = mul(x, norm) : [3, 8]
all_gather = all_gather(mul, 'tp', 4) : [12, 8]
t = t(q) : [8, 4]
mm = mm(all_gather, t) : [12, 4]
silu = silu(mm) : [12, 4]
t_1 = t(k) : [8, 4]
mm_1 = mm(all_gather, t_1) : [12, 4]
mul_1 = mul(silu, mm_1) : [12, 4]
t_2 = t(v) : [8, 4]
mm_2 = mm(all_gather, t_2) : [12, 4]
add = add(mul_1, mm_2) : [12, 4]
t_3 = t(o) : [4, 8]
mm_3 = mm(add, t_3) : [12, 8]
reduce_scatter = reduce_scatter(mm_3, 'tp', 4) : [3, 8]
add_1 = add(x, reduce_scatter) : [3, 8]
return add_1
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 8]
q : [4, 8]
k : [4, 8]
v : [4, 8]
o : [8, 4]
norm : [8]
mul = mul(x, norm) : [3, 8]
ag_gemm = ag_gemm(mul, [q, k, v], [None, None, None], ['L0', 'L0', 'L0'], None, '', 4) : [12, 4], [12, 4], [12, 4]
getitem = getitem(ag_gemm, 0) : [12, 4]
getitem_1 = getitem(ag_gemm, 1) : [12, 4]
getitem_2 = getitem(ag_gemm, 2) : [12, 4]
silu = silu(getitem) : [12, 4]
mul_1 = mul(silu, getitem_1) : [12, 4]
add = add(mul_1, getitem_2) : [12, 4]
gemm_rs = gemm_rs(add, o, None, 'L1', None, '', 4) : [3, 8]
add_1 = add(x, gemm_rs) : [3, 8]
return add_1
""",
        )

    def test_torch(self) -> None:
        before, after = before_and_after("torch")
        self.assertExpectedInline(
            before,
            """\
x : [3, 8]
q : [4, 8]
k : [4, 8]
v : [4, 8]
o : [8, 4]
norm : [8]
mul = mul(x, norm) : [3, 8]
all_gather_into_tensor = all_gather_into_tensor(mul, 4, 'tp') : [12, 8]
wait_tensor = wait_tensor(all_gather_into_tensor) : [12, 8]
t = t(q) : [8, 4]
mm = mm(wait_tensor, t) : [12, 4]
silu = silu(mm) : [12, 4]
t_1 = t(k) : [8, 4]
mm_1 = mm(wait_tensor, t_1) : [12, 4]
mul_1 = mul(silu, mm_1) : [12, 4]
t_2 = t(v) : [8, 4]
mm_2 = mm(wait_tensor, t_2) : [12, 4]
add = add(mul_1, mm_2) : [12, 4]
t_3 = t(o) : [4, 8]
mm_3 = mm(add, t_3) : [12, 8]
reduce_scatter_tensor = reduce_scatter_tensor(mm_3, 'sum', 4, 'tp') : [3, 8]
wait_tensor_1 = wait_tensor(reduce_scatter_tensor) : [3, 8]
add_1 = add(x, wait_tensor_1) : [3, 8]
return add_1
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 8]
q : [4, 8]
k : [4, 8]
v : [4, 8]
o : [8, 4]
norm : [8]
mul = mul(x, norm) : [3, 8]
ag_gemm = ag_gemm(mul, [q, k, v], [None, None, None], ['L0', 'L0', 'L0'], None, '', 4) : [12, 4], [12, 4], [12, 4]
getitem = getitem(ag_gemm, 0) : [12, 4]
getitem_1 = getitem(ag_gemm, 1) : [12, 4]
getitem_2 = getitem(ag_gemm, 2) : [12, 4]
silu = silu(getitem) : [12, 4]
mul_1 = mul(silu, getitem_1) : [12, 4]
add = add(mul_1, getitem_2) : [12, 4]
gemm_rs = gemm_rs(add, o, None, 'L1', None, '', 4) : [3, 8]
add_1 = add(x, gemm_rs) : [3, 8]
return add_1
""",
        )

    def test_padding_and_trailing_slice(self) -> None:
        """Rows are dropped and added after the product instead."""
        before, after = before_and_after("padded")
        self.assertExpectedInline(
            before,
            """\
x : [3, 8]
q : [4, 8]
k : [4, 8]
v : [4, 8]
o : [8, 4]
norm : [8]
mul = mul(x, norm) : [3, 8]
all_gather = all_gather(mul, 'tp', 4) : [12, 8]
slice = slice(all_gather, 0, 0, -1) : [11, 8]
t = t(q) : [8, 4]
mm = mm(slice, t) : [11, 4]
silu = silu(mm) : [11, 4]
t_1 = t(k) : [8, 4]
mm_1 = mm(slice, t_1) : [11, 4]
mul_1 = mul(silu, mm_1) : [11, 4]
t_2 = t(v) : [8, 4]
mm_2 = mm(slice, t_2) : [11, 4]
add = add(mul_1, mm_2) : [11, 4]
t_3 = t(o) : [4, 8]
mm_3 = mm(add, t_3) : [11, 8]
constant_pad_nd = constant_pad_nd(mm_3, [0, 0, 0, 1], 0.0) : [12, 8]
reduce_scatter = reduce_scatter(constant_pad_nd, 'tp', 4) : [3, 8]
add_1 = add(x, reduce_scatter) : [3, 8]
return add_1
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 8]
q : [4, 8]
k : [4, 8]
v : [4, 8]
o : [8, 4]
norm : [8]
mul = mul(x, norm) : [3, 8]
ag_gemm = ag_gemm(mul, [q, k, v], [None, None, None], ['L0', 'L0', 'L0'], None, '', 4) : [12, 4], [12, 4], [12, 4]
getitem = getitem(ag_gemm, 0) : [12, 4]
getitem_1 = getitem(ag_gemm, 1) : [12, 4]
getitem_2 = getitem(ag_gemm, 2) : [12, 4]
slice = slice(getitem, 0, 0, -1) : [11, 4]
silu = silu(slice) : [11, 4]
slice_1 = slice(getitem_1, 0, 0, -1) : [11, 4]
mul_1 = mul(silu, slice_1) : [11, 4]
slice_2 = slice(getitem_2, 0, 0, -1) : [11, 4]
add = add(mul_1, slice_2) : [11, 4]
constant_pad_nd = constant_pad_nd(add, [0, 0, 0, 1], 0.0) : [12, 4]
gemm_rs = gemm_rs(constant_pad_nd, o, None, 'L1', None, '', 4) : [3, 8]
add_1 = add(x, gemm_rs) : [3, 8]
return add_1
""",
        )

    def test_slices_and_cat(self) -> None:
        """The gather's blocks are put together from slices of the product."""

        def fn(s: Any, x: Tensor) -> Tensor:
            return F.linear(s.gather(x), s.q)

        before, after = before_and_after("reassembled", fn)
        self.assertExpectedInline(
            before,
            """\
x : [3, 8]
q : [4, 8]
all_gather = all_gather(x, 'tp', 4) : [12, 8]
slice = slice(all_gather, 0, 0, 2) : [2, 8]
slice_1 = slice(all_gather, 0, 3, 5) : [2, 8]
slice_2 = slice(all_gather, 0, 6, 8) : [2, 8]
slice_3 = slice(all_gather, 0, 9, 11) : [2, 8]
cat = cat([slice, slice_1, slice_2, slice_3]) : [8, 8]
t = t(q) : [8, 4]
mm = mm(cat, t) : [8, 4]
return mm
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 8]
q : [4, 8]
ag_gemm = ag_gemm(x, [q], [None], ['L0'], None, '', 4, barrier=True) : [12, 4]
getitem = getitem(ag_gemm, 0) : [12, 4]
slice = slice(getitem, 0, 0, 2) : [2, 4]
slice_1 = slice(getitem, 0, 3, 5) : [2, 4]
slice_2 = slice(getitem, 0, 6, 8) : [2, 4]
slice_3 = slice(getitem, 0, 9, 11) : [2, 4]
cat = cat([slice, slice_1, slice_2, slice_3]) : [8, 4]
return cat
""",
        )

    def test_view_that_hides_the_dtype(self) -> None:
        def fn(s: Any, x: Tensor) -> Any:
            return F.linear(s.gather(x), s.q)

        before, after = before_and_after("hidden", fn)
        self.assertExpectedInline(
            before,
            """\
x : [3, 8]
q : [4, 8]
view = view(x, torch.uint8) : [3, 32]
detach = detach(view) : [3, 32]
all_gather = all_gather(detach, 'tp', 4) : [12, 32]
view_1 = view(all_gather, torch.float32) : [12, 8]
detach_1 = detach(view_1) : [12, 8]
t = t(q) : [8, 4]
mm = mm(detach_1, t) : [12, 4]
return mm
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 8]
q : [4, 8]
ag_gemm = ag_gemm(x, [q], [None], ['L0'], None, '', 4, barrier=True) : [12, 4]
getitem = getitem(ag_gemm, 0) : [12, 4]
return getitem
""",
        )

    def test_gathered_rows_wanted_elsewhere(self) -> None:
        def fn(s: Any, x: Tensor) -> Any:
            g = s.gather(x)
            return F.linear(g, s.q), F.linear(g, s.k), torch.relu(g)

        before, after = before_and_after("ours", fn)
        self.assertExpectedInline(
            before,
            """\
x : [3, 8]
q : [4, 8]
k : [4, 8]
all_gather = all_gather(x, 'tp', 4) : [12, 8]
t = t(q) : [8, 4]
mm = mm(all_gather, t) : [12, 4]
t_1 = t(k) : [8, 4]
mm_1 = mm(all_gather, t_1) : [12, 4]
relu = relu(all_gather) : [12, 8]
return [mm, mm_1, relu]
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 8]
q : [4, 8]
k : [4, 8]
ag_gemm = ag_gemm(x, [q, k], [None, None], ['L0', 'L0'], None, '', 4, gathered=True, barrier=True) : [12, 4], [12, 4], [12, 8]
getitem = getitem(ag_gemm, 0) : [12, 4]
getitem_1 = getitem(ag_gemm, 1) : [12, 4]
getitem_2 = getitem(ag_gemm, 2) : [12, 8]
relu = relu(getitem_2) : [12, 8]
return [getitem, getitem_1, relu]
""",
        )


# --- skips ------------------------------------------------------------------------------


def bias_before_the_sum(s: Any, x: Tensor) -> Tensor:
    return s.scatter(F.linear(F.linear(s.gather(x), s.q), s.o, s.o_bias))


def addend_before_the_sum(s: Any, x: Tensor) -> Tensor:
    g = s.gather(x)
    return s.scatter(torch.addmm(g, F.linear(g, s.q), s.o.t()))


def partial_used_elsewhere(s: Any, x: Tensor) -> Any:
    y = F.linear(F.linear(s.gather(x), s.q), s.o)
    return s.scatter(y), y * 2


def data_parallel(s: Any, x: Tensor) -> Tensor:
    return F.linear(torch.ops.vllm.all_gather(x, 0, TP, "dp:0"), s.q)


def averaged(s: Any, x: Tensor) -> Tensor:
    y = F.linear(F.linear(s.gather(x), s.q), s.o)
    op = torch.ops._c10d_functional
    return op.wait_tensor(op.reduce_scatter_tensor(y, "avg", TP, "tp"))


def computed_bias(s: Any, x: Tensor) -> Tensor:
    return F.linear(s.gather(x), s.q, s.q_bias * 2)


def summed_in_float64(s: Any, x: Tensor) -> Tensor:
    return s.scatter(F.linear(F.linear(s.gather(x), s.q), s.o).double())


def added_rows_and_bias(s: Any, x: Tensor) -> Tensor:
    return F.linear(F.pad(s.gather(x), (0, 0, 0, 1)), s.q, s.q_bias)


SKIPS: list[tuple[Callable[..., Any], str]] = [
    (bias_before_the_sum, "bias: addmm adds o_bias on every rank, before the sum"),
    (addend_before_the_sum, "addend: addmm adds all_gather before the sum"),
    (partial_used_elsewhere, "used elsewhere: mm_1, before the sum"),
    (data_parallel, "other group: all_gather is over 'dp:0', not ''"),
    (averaged, "reduction: reduce_scatter_tensor reduces by avg, not sum"),
    (computed_bias, "bias computed: mul of addmm is no weight"),
    (summed_in_float64, "dtype: mm_1 and its sum over ranks have torch.float32, torch.float64"),
    (added_rows_and_bias, "padding: rows are added before addmm, which has a bias"),
]


@pytest.mark.parametrize(("fn", "reason"), SKIPS, ids=[fn.__name__ for fn, _ in SKIPS])
def test_skips(fn: Callable[..., Any], reason: str) -> None:
    gm = sp_passes.trace(Block(Comm(TP, group="tp"), fn=fn), torch.empty(3, blocks.HIDDEN))
    report = sp_passes.rewrite(gm, SPConfig(tp_size=TP, patterns=FUSIONS))
    assert [d.reason for d in report.skipped] == [reason], report


def test_a_linear_that_does_not_fit_reads_the_gathered_rows() -> None:
    def fn(s: Any, x: Tensor) -> Any:
        g = s.gather(x)
        return F.linear(g, s.q), F.linear(g, s.k, s.q_bias * 2)

    gm = sp_passes.trace(Block(Comm(TP), fn=fn), torch.empty(3, blocks.HIDDEN))
    report = sp_passes.rewrite(gm, SPConfig(tp_size=TP, patterns=FUSIONS))
    assert [d.weights for d in report.applied] == [("q",)], report
    assert "ag_gemm(x, [q], [None], ['L0'], None, '', 4, gathered=True" in mlps.show(gm)


def test_what_the_report_says() -> None:
    """A fused collective still runs: it is neither added nor removed, and saves no memory."""
    gm = sp_passes.trace(Block(Comm(TP)), torch.empty(3, blocks.HIDDEN))
    report = sp_passes.rewrite(gm, SPConfig(tp_size=TP, patterns=FUSIONS))
    rows = [(d.pattern, d.weights, d.fused) for d in report.decisions]
    assert rows == [
        ("ag_gemm", ("q", "k", "v"), {"all_gather": 1}),
        ("gemm_rs", ("o",), {"reduce_scatter": 1}),
    ]
    for d in report.decisions:
        assert (d.bytes_saved_per_rank, d.collectives_added, d.collectives_removed) == (0, {}, {})
        assert type(d).from_dict(d.to_dict()) == d
    assert "1 all_gather fused" in str(report)


def test_one_rank_has_nothing_to_fuse() -> None:
    def fn(s: Any, x: Tensor) -> Tensor:
        return s.scatter(F.linear(F.linear(torch.ops.sp_passes.all_gather(x, "", 1), s.q), s.o))

    gm = sp_passes.trace(Block(Comm(1), fn=fn), torch.empty(3, blocks.HIDDEN))
    report = sp_passes.rewrite(gm, SPConfig(tp_size=1, patterns=FUSIONS))
    assert {d.reason.partition(":")[0] for d in report.decisions} == {"one rank"}


def test_a_token_range_does_not_stop_a_fusion() -> None:
    """No memory is bought with traffic, so there is nothing for the cost model to weigh."""
    gm = sp_passes.trace(Block(Comm(TP)), torch.empty(3, blocks.HIDDEN))
    config = SPConfig(tp_size=TP, patterns=FUSIONS, token_range=(1, 8))
    assert len(sp_passes.rewrite(gm, config).applied) == 2
