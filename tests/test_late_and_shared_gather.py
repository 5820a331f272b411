# SPDX-License-Identifier: Apache-2.0
"""``late_gather`` and ``shared_gather``: what they take, what they leave, and numbers."""

from __future__ import annotations

from typing import Any

import mlps
import projections
import pytest
import ranks
import torch
import torch.nn.functional as F
from projections import LATENT, H, Net, rms
from torch import Tensor

import sp_passes
from sp_passes import SPConfig
from sp_passes.graph.collectives import count, op_name
from sp_passes.layout import LocalPart

LATE = ("late_gather",)
SHARED = ("latent_projection", "replicated_mlp", "shared_gather")
BF16 = torch.bfloat16


def rewritten(fn: Any, patterns: Any, dtype: Any = torch.float32, rows: int = 3) -> Any:
    gm = sp_passes.trace(Net(fn, "", 4, dtype), projections.tokens(0, rows, dtype))
    config = SPConfig(tp_size=4, patterns=patterns)
    report = sp_passes.rewrite(gm, config)
    sp_passes.check(gm, config)
    return gm, report


def gathered(gm: Any) -> list[tuple[torch.Size, torch.dtype]]:
    found = [n.meta["val"] for n in gm.graph.nodes if op_name(n) == "sp_passes::all_gather"]
    return [(v.shape, v.dtype) for v in found]


def same(gm: Any, fn: Any, rows: int = 3) -> None:
    inputs = [projections.tokens(r, rows) for r in range(4)]
    wanted = mlps.exact(Net(fn), torch.cat(inputs))
    for y in ranks.lockstep(gm, 4, [[x] for x in inputs]):
        assert mlps.worst_error(y, wanted) < 1e-5


MOVED: dict[str, Any] = {
    "norm": lambda s, x: rms(s, s.gather(x)).cumsum(0),
    "softmax": lambda s, x: s.gather(x).softmax(-1).cumsum(0),
    "two readers that meet": lambda s, x: (lambda g: (g.sin() * g.cos()).cumsum(0))(s.gather(x)),
    "row statistics only": lambda s, x: s.gather(x).mean(-1).cumsum(0),
}
STAYS: dict[str, Any] = {
    "another reader": lambda s, x: (lambda g: rms(s, g) * g.cumsum(0))(s.gather(x)),
    "mixes rows": lambda s, x: s.gather(x).cumsum(0),
    "mean over rows": lambda s, x: s.gather(x).mean(0),
    "rows of a whole value": lambda s, x: s.gather(x) * torch.ones(12, 1).cumsum(0),
    "a constant of all rows": lambda s, x: (lambda g: (g + torch.full((len(g), H), 2.0)).cumsum(0))(
        s.gather(x)
    ),
    "a row repeated for all rows": lambda s, x: (
        lambda g: (g + s.norm.expand(len(g), H)).cumsum(0)
    )(s.gather(x)),
    "two results": lambda s, x: (lambda g: g.sin().cumsum(0) + g.cos().cumsum(0))(s.gather(x)),
    "wider": lambda s, x: s.gather(x).double().cumsum(0),
}


@pytest.mark.parametrize("name", MOVED)
def test_row_wise_work_moves_before_the_gather(name: str) -> None:
    gm, report = rewritten(MOVED[name], LATE)
    assert len(report.applied) == 1 and len(gathered(gm)) == 1
    assert report.applied[0].collectives_removed == {"all_gather": 1}
    same(gm, MOVED[name])


@pytest.mark.parametrize("rows", [3, 1])
@pytest.mark.parametrize("name", STAYS)
def test_the_gather_stays(name: str, rows: int) -> None:
    if name == "rows of a whole value" and rows != 3:
        pytest.skip("written for 12 rows")
    gm, report = rewritten(STAYS[name], LATE, rows=rows)
    assert report.decisions == []
    assert gathered(gm) == [(torch.Size([4 * rows, H]), torch.float32)]
    same(gm, STAYS[name], rows)


def quantised(s: Any, x: Any) -> Any:
    """Numbers of one byte, and a scale a token that the next product needs as well."""
    g = rms(s, s.gather(x))
    scale = g.abs().amax(-1, keepdim=True) / 127
    q = (g / scale).round().clamp(-127, 127).to(torch.int8)
    return q.cumsum(0) * scale


def test_quantised_rows_and_their_scales_are_gathered() -> None:
    gm, report = rewritten(quantised, LATE)
    sent = {(torch.Size([12, 1]), torch.float32), (torch.Size([12, H]), torch.int8)}
    assert len(gathered(gm)) == 2 and set(gathered(gm)) == sent
    (decision,) = report.applied
    assert (decision.collectives_added, decision.collectives_removed) == (
        {"all_gather": 2},
        {"all_gather": 1},
    )
    xs = [projections.tokens(r, 3) for r in range(4)]
    wanted = quantised(Net(quantised), torch.cat(xs))
    for y in ranks.lockstep(gm, 4, [[x] for x in xs]):
        assert mlps.worst_error(y, wanted) < 1e-5


def test_the_smaller_dtype_is_gathered() -> None:
    gm, _ = rewritten(lambda s, x: s.gather(x).to(BF16).cumsum(0), LATE)
    assert gathered(gm) == [(torch.Size([12, H]), BF16)]


def test_gathers_of_the_same_rows_become_one() -> None:
    fn = lambda s, x: s.gather(x).cumsum(0) + s.gather(x).cumsum(1)  # noqa: E731
    gm, report = rewritten(fn, ("shared_gather",))
    assert count(gm.graph) == {"all_gather": 1}
    assert report.applied[0].collectives_removed == {"all_gather": 1}
    same(gm, fn)


def test_a_gather_joins_the_products_of_the_same_rows() -> None:
    def fn(s: Any, x: Tensor) -> Tensor:
        return s.gather(x).cumsum(0) + s.gather(projections.mlp(s, x))

    gm, report = rewritten(fn, SHARED)
    (shared,) = [d for d in report.applied if d.pattern == "shared_gather"]
    assert shared.collectives_removed == {"all_gather": 1}
    (call,) = [n for n in gm.graph.nodes if op_name(n) == "sp_passes::ag_gemm"]
    assert len(call.meta["val"]) == 2
    same(gm, fn)


def test_other_rows_stay_apart() -> None:
    fn = lambda s, x: s.gather(x).cumsum(0) + s.gather(x + 1).cumsum(0)  # noqa: E731
    gm, report = rewritten(fn, ("shared_gather",))
    assert report.decisions == [] and count(gm.graph) == {"all_gather": 2}


def test_a_cost_model_does_not_judge_them() -> None:
    """They only take away; there is no weight to weigh."""
    fn = lambda s, x: s.gather(rms(s, x)).cumsum(0) + s.gather(rms(s, x)).sin().cumsum(0)  # noqa: E731
    gm = sp_passes.trace(Net(fn, "", 4), projections.tokens(0, 3))
    config = SPConfig(tp_size=4, patterns=LATE, token_range=(1, 1 << 20))
    assert [d.applied for d in sp_passes.rewrite(gm, config).decisions] == [True]


def test_projections_that_read_one_gather_share_what_replaces_it() -> None:
    fn = lambda s, x: (lambda g: F.linear(g, s.four) * F.linear(g, s.four2))(s.gather(x))  # noqa: E731
    gm, _ = rewritten(fn, SHARED)
    assert count(gm.graph) == {"all_to_all": 1, "reduce_scatter": 2, "all_gather": 2}
    same(gm, fn)


# --- calls that are spelled otherwise ------------------------------------------------------


def ag_gemm(s: Any, x: Tensor, weight: Tensor, *options: Any) -> list[Tensor]:
    """A call as a graph may hold it that was rewritten before, options by position."""
    given = (x, [weight], [None], [str(LocalPart(0))], None, s.group, s.tp)
    return torch.ops.sp_passes.ag_gemm(*given, *options)


def merged_calls(fn: Any, kernels: str) -> tuple[Any, list[Any]]:
    gm = sp_passes.trace(Net(fn, "", 4), projections.tokens(0, 3))
    config = SPConfig(tp_size=4, patterns=("shared_gather",), kernels=kernels)
    report = sp_passes.rewrite(gm, config)
    return report, [n for n in gm.graph.nodes if op_name(n) == "sp_passes::ag_gemm"]


@pytest.mark.parametrize("kernels", ["auto", "unfused"])
@pytest.mark.parametrize("given", [(), ("unfused",), ("unfused", True), ("auto", True)])
def test_the_merged_call_keeps_the_options(kernels: str, given: tuple[Any, ...]) -> None:
    def fn(s: Any, x: Tensor) -> Tensor:
        one = ag_gemm(s, x, s.down, *given)
        two = ag_gemm(s, x, s.odd, *given)
        return [value.relu() for value in (*one, *two)]

    report, calls = merged_calls(fn, kernels)
    assert len(report.applied) == 1 and len(calls) == 1, report
    options = dict(zip(("kernel", "gathered"), given, strict=False))
    assert calls[0].kwargs.get("kernel", "auto") == options.get("kernel", "auto")
    assert calls[0].kwargs.get("gathered", False) == options.get("gathered", False)
    items = {n.args[1]: n.meta["val"].shape[-1] for n in calls[0].users}
    assert items == {0: LATENT, 1: 10, **({2: H} if options.get("gathered") else {})}


def test_calls_of_different_kernels_stay_apart() -> None:
    def fn(s: Any, x: Tensor) -> Tensor:
        one, two = ag_gemm(s, x, s.four, "unfused"), ag_gemm(s, x, s.four2)
        return one[0] + two[0]

    report, calls = merged_calls(fn, "auto")
    assert [d.reason.partition(":")[0] for d in report.decisions] == ["kernels differ"]
    assert len(calls) == 2


def test_calls_that_wait_for_different_shards_stay_apart() -> None:
    """A graph that was rewritten twice has two nodes that make shards ready."""

    def fn(s: Any, x: Tensor) -> Tensor:
        layout = str(LocalPart(0))
        ready = [torch.empty(0, dtype=torch.int8), torch.empty(0, dtype=torch.int8)]
        one, two = (
            torch.ops.sp_passes.ag_gemm(x, [w], [None], [layout], r, s.group, s.tp)
            for w, r in zip((s.four, s.four2), ready, strict=True)
        )
        return one[0] + two[0]

    report, calls = merged_calls(fn, "auto")
    assert [d.reason.partition(":")[0] for d in report.decisions] == ["shards"]
    assert len(calls) == 2


@pytest.mark.parametrize("kernels", ["auto", "unfused"])
def test_products_of_one_pass_merge_for_a_named_kernel(kernels: str) -> None:
    def fn(s: Any, x: Tensor) -> Tensor:
        return s.gather(x).cumsum(0) + s.gather(projections.mlp(s, x))

    gm = sp_passes.trace(Net(fn, "", 4), projections.tokens(0, 3))
    sp_passes.rewrite(gm, SPConfig(tp_size=4, patterns=SHARED, kernels=kernels))
    (call,) = [n for n in gm.graph.nodes if op_name(n) == "sp_passes::ag_gemm"]
    assert call.kwargs.get("kernel", "auto") == kernels and len(call.args) == 7
    same(gm, fn)
