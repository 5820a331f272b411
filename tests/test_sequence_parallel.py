# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""A residual sharded by tokens: the graph before and after, and why it stays as it is.

``EXPECTTEST_ACCEPT=1 pytest tests/test_sequence_parallel.py`` rewrites the texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dense
import mlps
import pytest
import torch
import torch.nn.functional as F
from blocks import FUNCTIONAL, Comm, part, weight
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import sp_passes
from sp_passes import SPConfig
from sp_passes.graph.collectives import count
from sp_passes.report import Report

TP = 4
ONLY = ("sequence_parallel",)


class MLPs(nn.Module):
    """``fn(self, x)`` over column-parallel ``up*`` and row-parallel ``down*`` weights."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn, self.c = fn, Comm(TP, group="tp")
        for i in range(2):
            setattr(self, f"up{i}", part(self.c, weight((32, dense.H), 2 * i), 0))
            setattr(self, f"down{i}", part(self.c, weight((dense.H, 32), 2 * i + 1), 1))

    def mlp(self, x: Tensor, i: int) -> Tensor:
        y = F.linear(F.relu(F.linear(x, getattr(self, f"up{i}"))), getattr(self, f"down{i}"))
        return self.c.torch_reduce(y)

    def forward(self, x: Tensor) -> Any:
        return self.fn(self, x)


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True))


def two_layers(s: Any, x: Tensor) -> Tensor:
    x = x + s.mlp(x, 0)
    return norm(x + s.mlp(norm(x), 1))


def rewritten(
    fn: Callable[..., Any], rows: int = 8, tokens: str = "replicated", **options: Any
) -> tuple[Any, Report]:
    gm = sp_passes.trace(MLPs(fn), torch.empty(rows, dense.H))
    config = SPConfig(tp_size=TP, **{"patterns": ONLY, **options})
    return gm, sp_passes.rewrite(gm, config, tokens=tokens)


class Golden(TestCase):
    maxDiff = None

    def test_two_layers(self) -> None:
        gm = sp_passes.trace(MLPs(two_layers), torch.empty(8, dense.H))
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [8, 16]
up0 : [8, 16]
down0 : [16, 8]
up1 : [8, 16]
down1 : [16, 8]
t = t(up0) : [16, 8]
mm = mm(x, t) : [8, 8]
relu = relu(mm) : [8, 8]
t_1 = t(down0) : [8, 16]
mm_1 = mm(relu, t_1) : [8, 16]
all_reduce = all_reduce(mm_1, 'sum', 'tp') : [8, 16]
wait_tensor = wait_tensor(all_reduce) : [8, 16]
add = add(x, wait_tensor) : [8, 16]
pow = pow(add, 2) : [8, 16]
mean = mean(pow, [-1], True) : [8, 1]
rsqrt = rsqrt(mean) : [8, 1]
mul = mul(add, rsqrt) : [8, 16]
t_2 = t(up1) : [16, 8]
mm_2 = mm(mul, t_2) : [8, 8]
relu_1 = relu(mm_2) : [8, 8]
t_3 = t(down1) : [8, 16]
mm_3 = mm(relu_1, t_3) : [8, 16]
all_reduce_1 = all_reduce(mm_3, 'sum', 'tp') : [8, 16]
wait_tensor_1 = wait_tensor(all_reduce_1) : [8, 16]
add_1 = add(add, wait_tensor_1) : [8, 16]
pow_1 = pow(add_1, 2) : [8, 16]
mean_1 = mean(pow_1, [-1], True) : [8, 1]
rsqrt_1 = rsqrt(mean_1) : [8, 1]
mul_1 = mul(add_1, rsqrt_1) : [8, 16]
return mul_1
""",
        )
        gm, _ = rewritten(two_layers)
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [8, 16]
up0 : [8, 16]
down0 : [16, 8]
up1 : [8, 16]
down1 : [16, 8]
permute = permute(up0, [1, 0]) : [16, 8]
mm = mm(x, permute) : [8, 8]
relu = relu(mm) : [8, 8]
gemm_rs = gemm_rs(relu, down0, None, 'L1', None, '', 4, barrier=True) : [2, 16]
token_shard = token_shard(x, '', 4) : [2, 16]
add = add(token_shard, gemm_rs) : [2, 16]
pow = pow(add, 2) : [2, 16]
mean = mean(pow, [-1], True) : [2, 1]
rsqrt = rsqrt(mean) : [2, 1]
mul = mul(add, rsqrt) : [2, 16]
ag_gemm = ag_gemm(mul, [up1], [None], ['L0'], None, '', 4) : [8, 8]
getitem = getitem(ag_gemm, 0) : [8, 8]
relu_1 = relu(getitem) : [8, 8]
gemm_rs_1 = gemm_rs(relu_1, down1, None, 'L1', None, '', 4) : [2, 16]
add_1 = add(add, gemm_rs_1) : [2, 16]
pow_1 = pow(add_1, 2) : [2, 16]
mean_1 = mean(pow_1, [-1], True) : [2, 1]
rsqrt_1 = rsqrt(mean_1) : [2, 1]
mul_1 = mul(add_1, rsqrt_1) : [2, 16]
all_gather = all_gather(mul_1, '', 4) : [8, 16]
return all_gather
""",
        )

    def test_rows_that_do_not_divide(self) -> None:
        """Padded before each sum, trimmed after each gather."""
        gm, _ = rewritten(two_layers, rows=7)
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [7, 16]
up0 : [8, 16]
down0 : [16, 8]
up1 : [8, 16]
down1 : [16, 8]
permute = permute(up0, [1, 0]) : [16, 8]
mm = mm(x, permute) : [7, 8]
relu = relu(mm) : [7, 8]
constant_pad_nd = constant_pad_nd(relu, [0, 0, 0, 1], 0.0) : [8, 8]
gemm_rs = gemm_rs(constant_pad_nd, down0, None, 'L1', None, '', 4, barrier=True) : [2, 16]
token_shard = token_shard(x, '', 4) : [2, 16]
add = add(token_shard, gemm_rs) : [2, 16]
pow = pow(add, 2) : [2, 16]
mean = mean(pow, [-1], True) : [2, 1]
rsqrt = rsqrt(mean) : [2, 1]
mul = mul(add, rsqrt) : [2, 16]
ag_gemm = ag_gemm(mul, [up1], [None], ['L0'], None, '', 4) : [8, 8]
getitem = getitem(ag_gemm, 0) : [8, 8]
slice = slice(getitem, 0, 0, 7) : [7, 8]
relu_1 = relu(slice) : [7, 8]
constant_pad_nd_1 = constant_pad_nd(relu_1, [0, 0, 0, 1], 0.0) : [8, 8]
gemm_rs_1 = gemm_rs(constant_pad_nd_1, down1, None, 'L1', None, '', 4) : [2, 16]
add_1 = add(add, gemm_rs_1) : [2, 16]
pow_1 = pow(add_1, 2) : [2, 16]
mean_1 = mean(pow_1, [-1], True) : [2, 1]
rsqrt_1 = rsqrt(mean_1) : [2, 1]
mul_1 = mul(add_1, rsqrt_1) : [2, 16]
all_gather = all_gather(mul_1, '', 4) : [8, 16]
slice_1 = slice(all_gather, 0, 0, 7) : [7, 16]
return slice_1
""",
        )


def test_what_the_report_says() -> None:
    """An all-reduce of each layer becomes two collectives; the fusions have rows of their own."""
    gm, report = rewritten(two_layers)
    rows = [(d.pattern, d.name, d.collectives_added, d.collectives_removed) for d in report.applied]
    gone = {"all_reduce": 1}
    assert rows[:2] == [
        ("sequence_parallel", "down0", {"reduce_scatter": 1, "all_gather": 2}, gone),
        ("sequence_parallel", "down1", {"reduce_scatter": 1}, gone),
    ]
    assert {p for p, *_ in rows[2:]} == {"ag_gemm", "gemm_rs"}
    assert count(gm.graph) == {"reduce_scatter": 2, "all_gather": 2}
    assert report.bytes_saved_per_rank == 0


@pytest.mark.parametrize("shape", [dense.Shape(), dense.Shape(qwen=True), dense.Shape(moe=True)])
def test_models(shape: dense.Shape) -> None:
    """The first layer reads whole tokens; each later norm is gathered once, the end once."""
    gm = sp_passes.trace(dense.Dense(Comm(TP, group="tp"), shape), dense.rows(8))
    config = SPConfig(tp_size=TP, patterns=ONLY)
    report = sp_passes.rewrite(gm, config, tokens="replicated")
    assert count(gm.graph) == {"reduce_scatter": 4, "all_gather": 4}, report
    assert not [d for d in report.skipped if d.pattern == "sequence_parallel"], report


# --- skips ------------------------------------------------------------------------------


def cut_after_a_layer(s: Any, x: Tensor) -> Any:
    x = x + s.mlp(x, 0)
    return F.linear(norm(x), s.up1), x


def one_sum(s: Any, x: Tensor) -> Tensor:
    return norm(x + s.mlp(x, 0))


def straight_on(s: Any, x: Tensor) -> Tensor:
    return s.mlp(s.mlp(x, 0), 1)


def largest(s: Any, x: Tensor) -> Tensor:
    y = F.linear(F.relu(F.linear(x, s.up0)), s.down0)
    y = FUNCTIONAL.wait_tensor(FUNCTIONAL.all_reduce(y, "max", s.c.group))
    return F.linear(norm(x + y), s.up1)


def across_experts(s: Any, x: Tensor) -> Tensor:
    y = torch.ops.vllm.all_reduce(F.linear(F.relu(F.linear(x, s.up0)), s.down0), "ep:0")
    return F.linear(norm(x + y), s.up1)


SKIPS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "cut": (cut_after_a_layer, {}, "piece boundary: add leaves the graph and is used in it"),
    "one sum": (one_sum, {}, "no linear: no linear reads what becomes of wait_tensor"),
    "straight on": (straight_on, {}, "nothing row-wise behind the sum: its users need all rows"),
    "largest": (largest, {}, "reduction: all_reduce reduces by max, not sum"),
    "experts": (across_experts, {}, "other group: all_reduce is over 'ep:0'"),
    "one token": (two_layers, {"rows": 1}, "few tokens: 1 rows for 4 ranks"),
    "sharded tokens": (
        two_layers,
        {"tokens": "sharded"},
        "nothing row-wise behind the sum: add: found x, which is Shard(0)",
    ),
    "few tokens of a range": (two_layers, {"token_range": (1, 64)}, "slower: estimated"),
}


@pytest.mark.parametrize("name", SKIPS)
def test_skips(name: str) -> None:
    fn, options, reason = SKIPS[name]
    gm, report = rewritten(fn, **options)
    mine = [d for d in report.decisions if d.pattern == "sequence_parallel"]
    assert mine and mine[0].reason.startswith(reason), report
    assert len({d.reason.partition(":")[0] for d in mine}) == 1, report
    assert count(gm.graph).keys() == {"all_reduce"}


def test_many_tokens_pay() -> None:
    """The row-wise work saved outgrows the latency of one more collective for each sum."""
    _, report = rewritten(two_layers, token_range=(1 << 22, 1 << 22))
    assert {d.pattern for d in report.applied} == {"sequence_parallel", "ag_gemm", "gemm_rs"}


def test_by_default_only_with_a_token_range() -> None:
    _, report = rewritten(two_layers, patterns=None)
    assert not report.applied, report
    _, report = rewritten(two_layers, patterns=None, token_range=(1 << 22, 1 << 22))
    assert [d.pattern for d in report.applied][:2] == ["sequence_parallel"] * 2


def test_a_widening_cast_comes_behind_the_gather() -> None:
    """The router's float32 rows are not gathered beside the rows of the experts."""

    def fn(s: Any, x: Tensor) -> Any:
        y = norm(x + s.mlp(x, 0))
        return F.linear(y, s.up1), F.linear(y.double(), s.up1.double())

    gm, _ = rewritten(fn)
    assert count(gm.graph) == {"reduce_scatter": 1, "all_gather": 1}


def test_a_declared_boundary_is_no_obstacle() -> None:
    """What leaves in rows needs no gather; here both outputs do."""
    gm = sp_passes.trace(dense.Dense(Comm(TP), dense.Shape(layers=1), cut=True), dense.rows(8))
    both = {"0": Shard(0), "1": Shard(0)}
    config = SPConfig(tp_size=TP, patterns=(*ONLY, "pp_send"), stage_outputs=both)
    report = sp_passes.rewrite(gm, config, tokens="replicated")
    assert count(gm.graph) == {"reduce_scatter": 2, "all_gather": 1}, report
    assert [d.name for d in report.applied[:2]] == ["layers.0.o", "layers.0.down"]
    sp_passes.check(gm, config, tokens="replicated")


def test_own_rows_of_a_sum_are_a_reduce_scatter() -> None:
    def fn(s: Any, x: Tensor) -> Tensor:
        return torch.ops.sp_passes.token_shard(s.mlp(x, 0), s.c.group, TP) * 2

    gm, report = rewritten(fn)
    assert count(gm.graph) == {"reduce_scatter": 1}, report


# --- kernels that write into their arguments ------------------------------------------------


def kernel_norms(version: str) -> Callable[..., Any]:
    def fn(s: Any, x: Tensor) -> Tensor:
        h, _ = dense.vendor_norm(f"vendor {version}", x, None, x[0])
        h, residual = dense.vendor_norm(f"vendor {version}", s.mlp(h, 0), x, x[0])
        return dense.vendor_norm(f"vendor {version}", residual + s.mlp(h, 1), None, x[0])[0]

    return fn


class GoldenKernels(TestCase):
    maxDiff = None

    def test_a_buffer_is_made_with_own_rows(self) -> None:
        dense.register_vendor_norms()
        gm, report = rewritten(kernel_norms("v2"))
        assert report.applied and not report.skipped, report
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [8, 16]
up0 : [8, 16]
down0 : [16, 8]
up1 : [8, 16]
down1 : [16, 8]
select = select(x, 0, 0) : [16]
empty = empty([8, 16], dtype=torch.float32, device=device(type='cpu'), pin_memory=False) : [8, 16]
auto_functionalized_v2 = auto_functionalized_v2(<OpOverload(op='sp_test_norm.rms_norm', overload='default')>, weight=select, epsilon=1e-05, input=x, _out_base_index=0, _all_bases=[empty]) : -, [8, 16]
getitem = getitem(auto_functionalized_v2, 1) : [8, 16]
permute = permute(up0, [1, 0]) : [16, 8]
mm = mm(getitem, permute) : [8, 8]
relu = relu(mm) : [8, 8]
gemm_rs = gemm_rs(relu, down0, None, 'L1', None, '', 4, barrier=True) : [2, 16]
select_1 = select(x, 0, 0) : [16]
token_shard = token_shard(x, '', 4) : [2, 16]
auto_functionalized_v2_1 = auto_functionalized_v2(<OpOverload(op='sp_test_norm.fused_add_rms_norm', overload='default')>, weight=select_1, epsilon=1e-05, _input_base_index=0, _residual_base_index=1, _all_bases=[gemm_rs, token_shard]) : -, [2, 16], [2, 16]
getitem_1 = getitem(auto_functionalized_v2_1, 1) : [2, 16]
ag_gemm = ag_gemm(getitem_1, [up1], [None], ['L0'], None, '', 4) : [8, 8]
getitem_2 = getitem(ag_gemm, 0) : [8, 8]
getitem_3 = getitem(auto_functionalized_v2_1, 2) : [2, 16]
relu_1 = relu(getitem_2) : [8, 8]
gemm_rs_1 = gemm_rs(relu_1, down1, None, 'L1', None, '', 4) : [2, 16]
add = add(getitem_3, gemm_rs_1) : [2, 16]
select_2 = select(x, 0, 0) : [16]
empty_1 = empty([2, 16], dtype=torch.float32, device=device(type='cpu'), pin_memory=False) : [2, 16]
auto_functionalized_v2_2 = auto_functionalized_v2(<OpOverload(op='sp_test_norm.rms_norm', overload='default')>, weight=select_2, epsilon=1e-05, input=add, _out_base_index=0, _all_bases=[empty_1]) : -, [2, 16]
getitem_4 = getitem(auto_functionalized_v2_2, 1) : [2, 16]
all_gather = all_gather(getitem_4, '', 4) : [8, 16]
return all_gather
""",
        )


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_rules_of_kernels_that_norm(version: str) -> None:
    dense.register_vendor_norms()
    kind, cut = f"vendor {version}", torch.ops.sp_passes.token_shard
    weight = lambda x: x[0]  # noqa: E731
    wrong: dict[str, Callable[[Any, Tensor], Any]] = {
        "other ranks' rows": lambda s, x: dense.vendor_norm(kind, cut(x, "", TP), x[:2], weight(x)),
        "a part of the features": lambda s, x: dense.vendor_norm(
            kind, F.linear(x, s.up0), None, weight(x)[:8]
        ),
        "a part of the scales": lambda s, x: dense.vendor_norm(kind, x[:, :8], None, s.up0[:, 0]),
        "addends": lambda s, x: dense.vendor_norm(
            kind, F.linear(F.linear(x, s.up0), s.down0), None, weight(x)
        ),
    }
    for fn in wrong.values():
        gm = sp_passes.trace(MLPs(fn), torch.empty(8, dense.H))
        with pytest.raises(sp_passes.PlacementError, match=r"whole rows|different ranks"):
            sp_passes.check(gm, SPConfig(tp_size=TP), tokens="replicated")


def test_a_kernel_that_writes_into_a_view_is_not_read() -> None:
    wrapper, op = dense.HOPS.auto_functionalized_v2, torch.ops.sp_test_norm.rms_norm.default
    dense.register_vendor_norms()

    def fn(s: Any, x: Tensor) -> Tensor:
        y = s.mlp(x, 0)
        base = torch.empty(8, 2 * dense.H)
        view = {"_out_base_index": 0, "_out_slice_dim": 1, "_out_slice_start": 0}
        view |= {"_out_slice_end": dense.H}
        given = {"input": y, "weight": None, "epsilon": 1e-5, **view}
        return F.linear(wrapper(op, **given, _all_bases=[base])[1][:, :16], s.up1)

    _, report = rewritten(fn)
    assert not report.applied and "writes into a view" in str(report), str(report)
