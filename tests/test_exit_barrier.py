# SPDX-License-Identifier: Apache-2.0
"""Overlapped ops that nothing keeps apart get ``barrier=True``; those that are proven do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
import torch.nn.functional as F
from blocks import FUNCTIONAL, Block, Comm
from torch import Tensor

import sp_passes
from sp_passes import SPConfig
from sp_passes.barriers import counts
from sp_passes.graph.collectives import op_name
from sp_passes.ops import kernels, unfused
from sp_passes.report import Report

TP = 4
FUSIONS = ("ag_gemm", "gemm_rs")


def barriers(fn: Callable[..., Any] | None, spelling: str = "ours") -> tuple[list[Any], Report]:
    """``(op, barrier)`` of each overlapped op, in graph order."""
    module = Block(Comm(TP, group="tp"), spelling, fn)
    gm = sp_passes.trace(module, torch.empty(TP, blocks.HIDDEN))
    report = sp_passes.rewrite(gm, SPConfig(tp_size=TP, patterns=FUSIONS))
    nodes = [n for n in gm.graph.nodes if op_name(n).rpartition(":")[2] in FUSIONS]
    names = [op_name(n).rpartition(":")[2] for n in nodes]
    assert list(report.barriers) and {n.name for n in nodes} == set(report.barriers)
    return [
        (op, n.kwargs.get("barrier", False)) for op, n in zip(names, nodes, strict=True)
    ], report


def own_rows(s: Any, x: Tensor) -> Tensor:
    return torch.ops.sp_passes.token_shard(x, s.c.group, s.c.size)


def half(s: Any, x: Tensor) -> Tensor:
    """Own rows of a product with a whole weight: ``[m, 8]`` -> ``[m, 6]`` -> ``[m, 8]``."""
    return F.pad(own_rows(s, F.linear(s.gather(x), s.whole)), (0, 2))


def ends(s: Any, x: Tensor) -> Tensor:
    return s.scatter(F.linear(F.silu(F.linear(s.gather(x), s.q)), s.o))


def test_a_layer_needs_none() -> None:
    """Each op lies between two uses of the other's workspace, in this graph and the next."""
    found, report = barriers(lambda s, x: ends(s, x + ends(s, x)))
    assert found == [("ag_gemm", False), ("gemm_rs", False)] * 2
    assert counts(report.barriers) == {"proven": 4, "set": 0}
    names = list(report.barriers)
    assert report.barriers["ag_gemm_default"].startswith("gemm_rs_default"), names
    assert report.barriers["gemm_rs_default_1"].startswith("ag_gemm_default_1")


def test_back_to_back() -> None:
    """The second gather may overwrite what the first product still reads on a slow rank."""
    found, report = barriers(lambda s, x: ends(s, half(s, x)))
    assert found == [("ag_gemm", True), ("ag_gemm", False), ("gemm_rs", False)]
    reason = "barrier: nothing lies between it and ag_gemm_default_1"
    assert report.barriers["ag_gemm_default"] == reason


def test_a_collective_in_between() -> None:
    def fn(s: Any, x: Tensor) -> Tensor:
        return ends(s, own_rows(s, s.c.torch_reduce(half(s, x).repeat(TP, 1))))

    found, _ = barriers(fn)
    assert found == [("ag_gemm", False), ("ag_gemm", False), ("gemm_rs", False)]


def test_a_collective_beside_them_proves_nothing() -> None:
    """It does not depend on the first op, so a scheduler may run it before both."""

    def fn(s: Any, x: Tensor) -> Tensor:
        beside = own_rows(s, s.c.torch_reduce(x.repeat(TP, 1)))
        return ends(s, half(s, x) + beside)

    found, _ = barriers(fn)
    assert found == [("ag_gemm", True), ("ag_gemm", False), ("gemm_rs", False)]


def test_a_collective_of_other_ranks_proves_nothing() -> None:
    def fn(s: Any, x: Tensor) -> Tensor:
        return ends(s, torch.ops.vllm.all_reduce(half(s, x), "dp:0"))

    found, _ = barriers(fn)
    assert found == [("ag_gemm", True), ("ag_gemm", False), ("gemm_rs", False)]


def test_an_all_to_all_may_be_empty_between_two_ranks() -> None:
    def fn(s: Any, x: Tensor) -> Tensor:
        sent = FUNCTIONAL.all_to_all_single(half(s, x), [1] * TP, [1] * TP, s.c.group)
        return ends(s, FUNCTIONAL.wait_tensor(sent))

    found, _ = barriers(fn)
    assert found == [("ag_gemm", True), ("ag_gemm", False), ("gemm_rs", False)]


def test_two_ops_in_no_order_both_get_one() -> None:
    def fn(s: Any, x: Tensor) -> Tensor:
        a, b = F.linear(s.gather(x), s.q), F.linear(s.gather(x * 2), s.k)
        return s.scatter(F.linear(a * b, s.o))

    found, _ = barriers(fn)
    assert found == [("ag_gemm", True), ("ag_gemm", True), ("gemm_rs", False)]


def test_the_third_op_of_a_row_is_kept_from_the_first_by_the_second() -> None:
    def fn(s: Any, x: Tensor) -> Tensor:
        return ends(s, half(s, half(s, x)))

    found, report = barriers(fn)
    assert [b for _, b in found] == [True, True, False, False]
    assert "ag_gemm_default_1" in report.barriers["ag_gemm_default"]


def test_the_ends_of_a_graph() -> None:
    """Nothing is known of the graphs before and after."""
    found, report = barriers(lambda s, x: F.linear(s.gather(x), s.q))
    assert found == [("ag_gemm", True)]
    assert list(report.barriers.values()) == [
        "barrier: no collective of this graph is sure to run after it"
    ]
    found, report = barriers(lambda s, x: s.scatter(F.linear(x.repeat(1, 2)[:, :4], s.o)))
    assert found == [("gemm_rs", True)]
    assert list(report.barriers.values()) == [
        "barrier: no collective of this graph is sure to run before it"
    ]


@pytest.mark.parametrize("spelling", ["torch", "vllm", "padded"])
def test_other_spellings(spelling: str) -> None:
    found, _ = barriers(None, spelling)
    assert found == [("ag_gemm", False), ("gemm_rs", False)]


@pytest.mark.parametrize("barrier", [False, True])
def test_the_kernel_is_told(solo: Any, monkeypatch: pytest.MonkeyPatch, barrier: bool) -> None:
    seen: list[dict[str, Any]] = []

    def spy(run: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*args: Any, **options: Any) -> Any:
            seen.append(options)
            return run(*args, **options)

        return kernel

    for op, run in (("ag_gemm", unfused.ag_gemm), ("gemm_rs", unfused.gemm_rs)):
        row = kernels.Kernel("spy", op, spy(run), lambda call: None)
        monkeypatch.setitem(kernels._TABLE, (op, "spy"), row)
    kernels.choose.cache_clear()
    tail = (None, solo.group_name, 1, "spy")
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    (y,) = torch.ops.sp_passes.ag_gemm(x, [w], [None], ["L0"], *tail, barrier=barrier)
    z = torch.ops.sp_passes.gemm_rs(y, w, None, "L0", *tail, barrier=barrier)
    kernels.choose.cache_clear()
    assert seen == [{"barrier": True} if barrier else {}] * 2
    assert torch.allclose(z, x @ w.t() @ w)
