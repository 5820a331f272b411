# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Small graphs after the rewrite by ``latent_projection`` and the patterns beside it, as text.

``EXPECTTEST_ACCEPT=1 pytest tests/test_latent_projection_golden.py`` rewrites the texts.
"""

from __future__ import annotations

from typing import Any

import mlps
import projections
import torch
import torch.nn.functional as F
from expecttest import TestCase
from projections import GATHERED, LOCAL, Net

import sp_passes
from sp_passes import SPConfig

PATTERNS = ("late_gather", "latent_projection", "replicated_mlp", "shared_gather")


def before_and_after(
    fn: Any, tokens: str = "sharded", dtype: Any = torch.float32
) -> tuple[str, str]:
    gm = sp_passes.trace(Net(fn, "", 4, dtype), projections.tokens(0, 3, dtype))
    before = mlps.show(gm)
    sp_passes.rewrite(gm, SPConfig(tp_size=4, patterns=PATTERNS), tokens=tokens)
    return before, mlps.show(gm)


class Golden(TestCase):
    maxDiff = None

    def test_whole_tokens(self) -> None:
        before, after = before_and_after(LOCAL["merged"], "replicated")
        self.assertExpectedInline(
            before,
            """\
x : [3, 16]
merged : [20, 16]
t = t(merged) : [16, 20]
mm = mm(x, t) : [3, 20]
split_with_sizes = split_with_sizes(mm, [14, 6], -1) : [3, 14], [3, 6]
getitem = getitem(split_with_sizes, 0) : [3, 14]
getitem_1 = getitem(split_with_sizes, 1) : [3, 6]
relu = relu(getitem) : [3, 14]
sigmoid = sigmoid(getitem_1) : [3, 6]
return [relu, sigmoid]
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 16]
merged : [20, 16]
prepare = prepare([merged], ['S0[20]'], ['merged'], plan, True, '', 4) : [0]
gemm_gather = gemm_gather(x, merged, None, 'S0[20]', prepare, '', 4, barrier=True) : [3, 20]
slice = slice(gemm_gather, 1, 0, 14) : [3, 14]
slice_1 = slice(gemm_gather, 1, 14, 20) : [3, 6]
relu = relu(slice) : [3, 14]
sigmoid = sigmoid(slice_1) : [3, 6]
return [relu, sigmoid]
""",
        )

    def test_sharded_tokens_narrow_products_travel(self) -> None:
        before, after = before_and_after(LOCAL["bias"])
        self.assertExpectedInline(
            before,
            """\
x : [3, 16]
down : [8, 16]
bias : [8]
t = t(down) : [16, 8]
addmm = addmm(bias, x, t) : [3, 8]
return addmm
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 16]
down : [8, 16]
bias : [8]
prepare = prepare([down], ['S1[16]'], ['down', 'bias'], plan, True, '', 4, proven=[bias]) : [0]
token_to_feature = token_to_feature(x, '', 4) : [12, 4]
gemm_rs = gemm_rs(token_to_feature, down, bias, 'S1[16]', prepare, '', 4) : [3, 8]
return gemm_rs
""",
        )

    def test_sharded_tokens_wide_products_stay(self) -> None:
        before, after = before_and_after(LOCAL["wide"])
        self.assertExpectedInline(
            before,
            """\
x : [3, 16]
wide : [96, 16]
t = t(wide) : [16, 96]
mm = mm(x, t) : [3, 96]
return mm
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 16]
wide : [96, 16]
prepare = prepare([wide], ['S0[96]'], ['wide'], plan, True, '', 4) : [0]
ag_gemm = ag_gemm(x, [wide], [None], ['S0[96]'], prepare, '', 4) : [12, 24]
getitem = getitem(ag_gemm, 0) : [12, 24]
feature_to_token = feature_to_token(getitem, 'S1[96]', '', 4) : [3, 96]
return feature_to_token
""",
        )

    def test_an_addend_is_added_to_own_tokens(self) -> None:
        before, after = before_and_after(lambda s, x: torch.addmm(x, x[:, :8], s.up.t()))
        self.assertExpectedInline(
            before,
            """\
x : [3, 16]
up : [16, 8]
slice = slice(x, 1, 0, 8) : [3, 8]
t = t(up) : [8, 16]
addmm = addmm(x, slice, t) : [3, 16]
return addmm
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 16]
up : [16, 8]
prepare = prepare([up], ['S0[16]'], ['up'], plan, True, '', 4) : [0]
slice = slice(x, 1, 0, 8) : [3, 8]
ag_gemm = ag_gemm(slice, [up], [None], ['S0[16]'], prepare, '', 4) : [12, 4]
getitem = getitem(ag_gemm, 0) : [12, 4]
feature_to_token = feature_to_token(getitem, 'S1[16]', '', 4) : [3, 16]
add = add(feature_to_token, x) : [3, 16]
return add
""",
        )

    def test_gather_behind_norm_and_projection(self) -> None:
        before, after = before_and_after(GATHERED["behind a norm"])
        self.assertExpectedInline(
            before,
            """\
x : [3, 16]
down : [8, 16]
norm : [16]
all_gather = all_gather(x, '', 4) : [12, 16]
pow = pow(all_gather, 2) : [12, 16]
mean = mean(pow, [-1], True) : [12, 1]
add = add(mean, 1e-05) : [12, 1]
rsqrt = rsqrt(add) : [12, 1]
mul = mul(all_gather, rsqrt) : [12, 16]
mul_1 = mul(mul, norm) : [12, 16]
t = t(down) : [16, 8]
mm = mm(mul_1, t) : [12, 8]
return mm
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 16]
down : [8, 16]
prepare = prepare([down], ['S1[16]'], ['down'], plan, True, '', 4) : [0]
norm : [16]
pow = pow(x, 2) : [3, 16]
mean = mean(pow, [-1], True) : [3, 1]
add = add(mean, 1e-05) : [3, 1]
rsqrt = rsqrt(add) : [3, 1]
mul = mul(x, rsqrt) : [3, 16]
mul_1 = mul(mul, norm) : [3, 16]
token_to_feature = token_to_feature(mul_1, '', 4) : [12, 4]
gemm_rs = gemm_rs(token_to_feature, down, None, 'S1[16]', prepare, '', 4) : [3, 8]
all_gather = all_gather(gemm_rs, '', 4) : [12, 8]
return all_gather
""",
        )

    def test_a_cast_to_a_smaller_dtype_is_gathered(self) -> None:
        fn = lambda s, x: s.gather(x).to(torch.bfloat16) + 1  # noqa: E731
        before, after = before_and_after(fn)
        self.assertExpectedInline(
            before,
            """\
x : [3, 16]
all_gather = all_gather(x, '', 4) : [12, 16]
_to_copy = _to_copy(all_gather, dtype=torch.bfloat16) : [12, 16]
add = add(_to_copy, 1) : [12, 16]
return add
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 16]
_to_copy = _to_copy(x, dtype=torch.bfloat16) : [3, 16]
add = add(_to_copy, 1) : [3, 16]
all_gather = all_gather(add, '', 4) : [12, 16]
return all_gather
""",
        )

    def test_router_latent_and_mlp_share_a_gather(self) -> None:
        fn = lambda s, x: (  # noqa: E731
            F.linear(x.to(s.router.dtype), s.router), F.linear(x, s.down), projections.mlp(s, x)
        )  # fmt: skip
        before, after = before_and_after(fn, dtype=torch.bfloat16)
        self.assertExpectedInline(
            before,
            """\
x : [3, 16]
down : [8, 16]
router : [12, 16]
gate_up : [24, 16]
mlp_down : [16, 12]
_to_copy = _to_copy(x, dtype=torch.float32) : [3, 16]
t = t(router) : [16, 12]
mm = mm(_to_copy, t) : [3, 12]
t_1 = t(down) : [16, 8]
mm_1 = mm(x, t_1) : [3, 8]
t_2 = t(gate_up) : [16, 24]
mm_2 = mm(x, t_2) : [3, 24]
split = split(mm_2, 12, -1) : [3, 12], [3, 12]
getitem = getitem(split, 0) : [3, 12]
getitem_1 = getitem(split, 1) : [3, 12]
silu = silu(getitem) : [3, 12]
mul = mul(silu, getitem_1) : [3, 12]
t_3 = t(mlp_down) : [12, 16]
mm_3 = mm(mul, t_3) : [3, 16]
return [mm, mm_1, mm_3]
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 16]
router : [12, 16]
down : [8, 16]
gate_up : [24, 16]
mlp_down : [16, 12]
prepare = prepare([router, down, gate_up, mlp_down], ['S0[12]', 'S0[8]', 'S0[12,12]', 'S1[12]'], ['router', 'down', 'gate_up', 'mlp_down'], plan, True, '', 4) : [0]
ag_gemm = ag_gemm(x, [router, down, gate_up], [None, None, None], ['S0[12]', 'S0[8]', 'S0[12,12]'], prepare, '', 4) : [12, 3], [12, 2], [12, 6]
getitem = getitem(ag_gemm, 0) : [12, 3]
getitem_1 = getitem(ag_gemm, 1) : [12, 2]
getitem_2 = getitem(ag_gemm, 2) : [12, 6]
feature_to_token = feature_to_token(getitem, 'S1[12]', '', 4) : [3, 12]
feature_to_token_1 = feature_to_token(getitem_1, 'S1[8]', '', 4) : [3, 8]
slice = slice(getitem_2, 1, 0, 3, 1) : [12, 3]
slice_1 = slice(getitem_2, 1, 3, 6, 1) : [12, 3]
silu = silu(slice) : [12, 3]
mul = mul(silu, slice_1) : [12, 3]
gemm_rs = gemm_rs(mul, mlp_down, None, 'S1[12]', prepare, '', 4) : [3, 16]
return [feature_to_token, feature_to_token_1, gemm_rs]
""",
        )

    def test_router_and_latent_share_a_gather(self) -> None:
        fn = lambda s, x: (F.linear(x.to(s.router.dtype), s.router), F.linear(x, s.down))  # noqa: E731
        before, after = before_and_after(fn, dtype=torch.bfloat16)
        self.assertExpectedInline(
            before,
            """\
x : [3, 16]
down : [8, 16]
router : [12, 16]
_to_copy = _to_copy(x, dtype=torch.float32) : [3, 16]
t = t(router) : [16, 12]
mm = mm(_to_copy, t) : [3, 12]
t_1 = t(down) : [16, 8]
mm_1 = mm(x, t_1) : [3, 8]
return [mm, mm_1]
""",
        )
        self.assertExpectedInline(
            after,
            """\
x : [3, 16]
router : [12, 16]
down : [8, 16]
prepare = prepare([router, down], ['S0[12]', 'S0[8]'], ['router', 'down'], plan, True, '', 4) : [0]
ag_gemm = ag_gemm(x, [router, down], [None, None], ['S0[12]', 'S0[8]'], prepare, '', 4) : [12, 3], [12, 2]
getitem = getitem(ag_gemm, 0) : [12, 3]
getitem_1 = getitem(ag_gemm, 1) : [12, 2]
feature_to_token = feature_to_token(getitem, 'S1[12]', '', 4) : [3, 12]
feature_to_token_1 = feature_to_token(getitem_1, 'S1[8]', '', 4) : [3, 8]
return [feature_to_token, feature_to_token_1]
""",
        )
