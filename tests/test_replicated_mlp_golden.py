# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Small graphs before and after the rewrite, as text.

``EXPECTTEST_ACCEPT=1 pytest tests/test_replicated_mlp_golden.py`` rewrites the texts.
"""

from __future__ import annotations

import mlps
import torch
from expecttest import TestCase

import sp_passes


def before_and_after(spec: mlps.Spec, rows: int = 3) -> tuple[str, str]:
    module = mlps.MLP(mlps.with_(spec, hidden=4, width=8))
    gm = sp_passes.trace(module, torch.empty(rows, 4))
    before = mlps.show(gm)
    sp_passes.rewrite(gm, mlps.config(tp_size=4))
    return before, mlps.show(gm)


class Golden(TestCase):
    maxDiff = None

    def test_merged(self) -> None:
        before, after = before_and_after(mlps.BASE)
        self.assertExpectedInline(
            before,
            """\
x : [3, 4]
gate_up_weight : [16, 4]
down_weight : [4, 8]
t = t(gate_up_weight) : [4, 16]
mm = mm(x, t) : [3, 16]
split = split(mm, 8, -1) : [3, 8], [3, 8]
getitem = getitem(split, 0) : [3, 8]
getitem_1 = getitem(split, 1) : [3, 8]
silu = silu(getitem) : [3, 8]
mul = mul(silu, getitem_1) : [3, 8]
t_1 = t(down_weight) : [8, 4]
mm_1 = mm(mul, t_1) : [3, 4]
return mm_1
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 4]
gate_up_weight : [16, 4]
down_weight : [4, 8]
prepare = prepare([gate_up_weight, down_weight], ['S0[8,8]', 'S1[8]'], ['gate_up_weight', 'down_weight'], plan, True, '', 4) : [0]
ag_gemm = ag_gemm(x, [gate_up_weight], [None], ['S0[8,8]'], prepare, '', 4) : [12, 4]
getitem = getitem(ag_gemm, 0) : [12, 4]
slice = slice(getitem, 1, 0, 2, 1) : [12, 2]
slice_1 = slice(getitem, 1, 2, 4, 1) : [12, 2]
silu = silu(slice) : [12, 2]
mul = mul(silu, slice_1) : [12, 2]
gemm_rs = gemm_rs(mul, down_weight, None, 'S1[8]', prepare, '', 4) : [3, 4]
return gemm_rs
""",
        )

    def test_separate(self) -> None:
        before, after = before_and_after(mlps.Spec(form="separate"))
        self.assertExpectedInline(
            before,
            """\
x : [3, 4]
gate_weight : [8, 4]
up_weight : [8, 4]
down_weight : [4, 8]
t = t(gate_weight) : [4, 8]
mm = mm(x, t) : [3, 8]
t_1 = t(up_weight) : [4, 8]
mm_1 = mm(x, t_1) : [3, 8]
silu = silu(mm) : [3, 8]
mul = mul(silu, mm_1) : [3, 8]
t_2 = t(down_weight) : [8, 4]
mm_2 = mm(mul, t_2) : [3, 4]
return mm_2
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 4]
gate_weight : [8, 4]
up_weight : [8, 4]
down_weight : [4, 8]
prepare = prepare([gate_weight, up_weight, down_weight], ['S0[8]', 'S0[8]', 'S1[8]'], ['gate_weight', 'up_weight', 'down_weight'], plan, True, '', 4) : [0]
ag_gemm = ag_gemm(x, [gate_weight, up_weight], [None, None], ['S0[8]', 'S0[8]'], prepare, '', 4) : [12, 2], [12, 2]
getitem = getitem(ag_gemm, 0) : [12, 2]
getitem_1 = getitem(ag_gemm, 1) : [12, 2]
silu = silu(getitem) : [12, 2]
mul = mul(silu, getitem_1) : [12, 2]
gemm_rs = gemm_rs(mul, down_weight, None, 'S1[8]', prepare, '', 4) : [3, 4]
return gemm_rs
""",
        )

    def test_single(self) -> None:
        before, after = before_and_after(mlps.Spec(form="single", act="relu2"))
        self.assertExpectedInline(
            before,
            """\
x : [3, 4]
up_weight : [8, 4]
down_weight : [4, 8]
t = t(up_weight) : [4, 8]
mm = mm(x, t) : [3, 8]
ones_like = ones_like(mm, pin_memory=False) : [3, 8]
relu = relu(mm) : [3, 8]
pow = pow(relu, 2) : [3, 8]
mul = mul(pow, ones_like) : [3, 8]
t_1 = t(down_weight) : [8, 4]
mm_1 = mm(mul, t_1) : [3, 4]
return mm_1
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 4]
up_weight : [8, 4]
down_weight : [4, 8]
prepare = prepare([up_weight, down_weight], ['S0[8]', 'S1[8]'], ['up_weight', 'down_weight'], plan, True, '', 4) : [0]
ag_gemm = ag_gemm(x, [up_weight], [None], ['S0[8]'], prepare, '', 4) : [12, 2]
getitem = getitem(ag_gemm, 0) : [12, 2]
ones_like = ones_like(getitem, pin_memory=False) : [12, 2]
relu = relu(getitem) : [12, 2]
pow = pow(relu, 2) : [12, 2]
mul = mul(pow, ones_like) : [12, 2]
gemm_rs = gemm_rs(mul, down_weight, None, 'S1[8]', prepare, '', 4) : [3, 4]
return gemm_rs
""",
        )

    def test_interleaved(self) -> None:
        before, after = before_and_after(mlps.Spec(split="lane_unbind"))
        self.assertExpectedInline(
            before,
            """\
x : [3, 4]
gate_up_weight : [16, 4]
down_weight : [4, 8]
t = t(gate_up_weight) : [4, 16]
mm = mm(x, t) : [3, 16]
view = view(mm, [3, 8, 2]) : [3, 8, 2]
unbind = unbind(view, -1) : [3, 8], [3, 8]
getitem = getitem(unbind, 0) : [3, 8]
getitem_1 = getitem(unbind, 1) : [3, 8]
silu = silu(getitem) : [3, 8]
mul = mul(silu, getitem_1) : [3, 8]
t_1 = t(down_weight) : [8, 4]
mm_1 = mm(mul, t_1) : [3, 4]
return mm_1
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 4]
gate_up_weight : [16, 4]
down_weight : [4, 8]
prepare = prepare([gate_up_weight, down_weight], ['S0[16]', 'S1[8]'], ['gate_up_weight', 'down_weight'], plan, True, '', 4) : [0]
ag_gemm = ag_gemm(x, [gate_up_weight], [None], ['S0[16]'], prepare, '', 4) : [12, 4]
getitem = getitem(ag_gemm, 0) : [12, 4]
reshape = reshape(getitem, [-1, 2, 2]) : [12, 2, 2]
select = select(reshape, 2, 0) : [12, 2]
select_1 = select(reshape, 2, 1) : [12, 2]
silu = silu(select) : [12, 2]
mul = mul(silu, select_1) : [12, 2]
gemm_rs = gemm_rs(mul, down_weight, None, 'S1[8]', prepare, '', 4) : [3, 4]
return gemm_rs
""",
        )

    def test_biases_and_residual(self) -> None:
        before, after = before_and_after(mlps.Spec(bias1=True, residual=True))
        self.assertExpectedInline(
            before,
            """\
x : [3, 4]
gate_up_weight : [16, 4]
gate_up_bias : [16]
down_weight : [4, 8]
t = t(gate_up_weight) : [4, 16]
addmm = addmm(gate_up_bias, x, t) : [3, 16]
split = split(addmm, 8, -1) : [3, 8], [3, 8]
getitem = getitem(split, 0) : [3, 8]
getitem_1 = getitem(split, 1) : [3, 8]
silu = silu(getitem) : [3, 8]
mul = mul(silu, getitem_1) : [3, 8]
t_1 = t(down_weight) : [8, 4]
addmm_1 = addmm(x, mul, t_1) : [3, 4]
return addmm_1
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 4]
gate_up_weight : [16, 4]
gate_up_bias : [16]
down_weight : [4, 8]
prepare = prepare([gate_up_weight, gate_up_bias, down_weight], ['S0[8,8]', 'S0[8,8]', 'S1[8]'], ['gate_up_weight', 'gate_up_bias', 'down_weight'], plan, True, '', 4) : [0]
ag_gemm = ag_gemm(x, [gate_up_weight], [gate_up_bias], ['S0[8,8]'], prepare, '', 4) : [12, 4]
getitem = getitem(ag_gemm, 0) : [12, 4]
slice = slice(getitem, 1, 0, 2, 1) : [12, 2]
slice_1 = slice(getitem, 1, 2, 4, 1) : [12, 2]
silu = silu(slice) : [12, 2]
mul = mul(silu, slice_1) : [12, 2]
gemm_rs = gemm_rs(mul, down_weight, x, 'S1[8]', prepare, '', 4) : [3, 4]
return gemm_rs
""",
        )

    def test_second_bias_and_row_factor(self) -> None:
        before, after = before_and_after(mlps.Spec(form="single", bias2=True, rows="inside"))
        self.assertExpectedInline(
            before,
            """\
x : [3, 4]
up_weight : [8, 4]
down_weight : [4, 8]
down_bias : [4]
t = t(up_weight) : [4, 8]
mm = mm(x, t) : [3, 8]
ones_like = ones_like(mm, pin_memory=False) : [3, 8]
silu = silu(mm) : [3, 8]
mul = mul(silu, ones_like) : [3, 8]
pow = pow(x, 2) : [3, 4]
mean = mean(pow, [-1], True) : [3, 1]
add = add(mean, 0.001) : [3, 1]
rsqrt = rsqrt(add) : [3, 1]
mul_1 = mul(mul, rsqrt) : [3, 8]
t_1 = t(down_weight) : [8, 4]
addmm = addmm(down_bias, mul_1, t_1) : [3, 4]
return addmm
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 4]
up_weight : [8, 4]
down_weight : [4, 8]
down_bias : [4]
prepare = prepare([up_weight, down_weight], ['S0[8]', 'S1[8]'], ['up_weight', 'down_weight', 'down_bias'], plan, True, '', 4, proven=[down_bias]) : [0]
pow = pow(x, 2) : [3, 4]
mean = mean(pow, [-1], True) : [3, 1]
add = add(mean, 0.001) : [3, 1]
rsqrt = rsqrt(add) : [3, 1]
ag_gemm = ag_gemm(x, [up_weight], [None], ['S0[8]'], prepare, '', 4) : [12, 2]
getitem = getitem(ag_gemm, 0) : [12, 2]
all_gather = all_gather(rsqrt, '', 4) : [12, 1]
ones_like = ones_like(getitem, pin_memory=False) : [12, 2]
silu = silu(getitem) : [12, 2]
mul = mul(silu, ones_like) : [12, 2]
mul_1 = mul(mul, all_gather) : [12, 2]
gemm_rs = gemm_rs(mul_1, down_weight, down_bias, 'S1[8]', prepare, '', 4) : [3, 4]
return gemm_rs
""",
        )

    def test_skipped_graph_is_only_respelled(self) -> None:
        """tp_size 3 does not divide 8: no weight, size or collective changes."""
        module = mlps.MLP(mlps.Spec(hidden=4, width=8))
        gm = sp_passes.trace(module, torch.empty(3, 4))
        sp_passes.rewrite(gm, mlps.config(tp_size=3))
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [3, 4]
gate_up_weight : [16, 4]
down_weight : [4, 8]
permute = permute(gate_up_weight, [1, 0]) : [4, 16]
mm = mm(x, permute) : [3, 16]
slice = slice(mm, 1, 0, 8) : [3, 8]
slice_1 = slice(mm, 1, 8, 16) : [3, 8]
silu = silu(slice) : [3, 8]
mul = mul(silu, slice_1) : [3, 8]
permute_1 = permute(down_weight, [1, 0]) : [8, 4]
mm_1 = mm(mul, permute_1) : [3, 4]
return mm_1
""",
        )
