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
from projections import H, Net, rms
from torch import Tensor

import sp_passes
from sp_passes import SPConfig
from sp_passes.graph.collectives import count, op_name

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
    "two results": lambda s, x: (lambda g: g.sin().cumsum(0) + g.cos().cumsum(0))(s.gather(x)),
    "wider": lambda s, x: s.gather(x).double().cumsum(0),
}


@pytest.mark.parametrize("name", MOVED)
def test_row_wise_work_moves_before_the_gather(name: str) -> None:
    gm, report = rewritten(MOVED[name], LATE)
    assert len(report.applied) == 1 and len(gathered(gm)) == 1
    assert report.applied[0].collectives_removed == {"all_gather": 1}
    same(gm, MOVED[name])


@pytest.mark.parametrize("name", STAYS)
def test_the_gather_stays(name: str) -> None:
    gm, report = rewritten(STAYS[name], LATE)
    assert report.decisions == []
    assert gathered(gm) == [(torch.Size([12, H]), torch.float32)]


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
