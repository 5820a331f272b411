# SPDX-License-Identifier: Apache-2.0
"""Every form of ``latent_projection`` on small graphs, all ranks in this process."""

from __future__ import annotations

from typing import Any

import mlps
import projections
import pytest
import ranks
import torch
import torch.nn.functional as F
from projections import GATHERED, LOCAL, H, Net
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import sp_passes
from sp_passes import ShardingError, SPConfig, SPError, declare_placement
from sp_passes.graph.collectives import count, op_name

ONLY = ("latent_projection",)


def rewritten(fn: Any, tp: int, rows: int = 5, dtype: Any = torch.float32, **options: Any) -> Any:
    module = Net(fn, "", tp, dtype)
    gm = sp_passes.trace(module, projections.tokens(0, rows, dtype))
    where = {k: options.pop(k) for k in ("tokens", "placements") if k in options}
    report = sp_passes.rewrite(gm, SPConfig(tp_size=tp, **options), **where)
    sp_passes.check(gm, SPConfig(tp_size=tp), **where)
    return module, gm, report


def called(gm: Any) -> list[str]:
    names = [op_name(n).partition("::")[2] for n in gm.graph.nodes if "sp_passes::" in op_name(n)]
    return [name for name in names if name != "prepare"]


def reasons(report: Any) -> list[str]:
    return [d.reason.partition(":")[0] for d in report.decisions]


def flat(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


# --- numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [5, 1, 0])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("patterns", [None, ONLY])
@pytest.mark.parametrize("name", LOCAL)
def test_sharded_tokens(name: str, patterns: Any, tp: int, rows: int) -> None:
    _, gm, report = rewritten(LOCAL[name], tp, rows, patterns=patterns)
    assert report.applied and not {d.pattern for d in report.skipped} - {"replicated_mlp"}, report
    inputs = [projections.tokens(r, rows) for r in range(tp)]
    for x, y in zip(inputs, ranks.lockstep(gm, tp, [[x] for x in inputs]), strict=True):
        for a, b in zip(flat(y), flat(mlps.exact(Net(LOCAL[name]), x)), strict=True):
            assert mlps.worst_error(a, b) < 1e-5


@pytest.mark.parametrize("rows", [5, 1, 0])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", GATHERED)
def test_gathered_tokens(name: str, tp: int, rows: int) -> None:
    _, gm, report = rewritten(GATHERED[name], tp, rows)
    assert "latent_projection" in {d.pattern for d in report.applied}, report
    inputs = [projections.tokens(r, rows) for r in range(tp)]
    wanted = flat(mlps.exact(Net(GATHERED[name]), torch.cat(inputs)))
    for y in ranks.lockstep(gm, tp, [[x] for x in inputs]):
        for a, b in zip(flat(y), wanted, strict=True):
            assert mlps.worst_error(a, b) < 1e-5


@pytest.mark.parametrize("tp", [2, 4])
def test_replicated_tokens_of_a_plain_module(tp: int) -> None:
    """A drafter's context projection: no collective before, every rank has all tokens."""
    _, gm, report = rewritten(LOCAL["narrow"], tp, tokens="replicated")
    assert called(gm) == ["gemm_gather"] and len(report.applied) == 1
    x = projections.tokens(0)
    for y in ranks.lockstep(gm, tp, [[x]] * tp):
        assert mlps.worst_error(y, mlps.exact(Net(LOCAL["narrow"]), x)) < 1e-5


# --- which form ---------------------------------------------------------------------------


def test_rows_travel_where_products_are_narrow_and_tokens_where_they_are_wide() -> None:
    _, gm, _ = rewritten(LOCAL["narrow"], 4)
    assert called(gm) == ["token_to_feature", "gemm_rs"]
    _, gm, report = rewritten(LOCAL["wide"], 4)
    assert called(gm) == ["ag_gemm", "feature_to_token"]
    assert report.applied[0].collectives_added == {"all_gather": 1, "all_to_all": 1}


def test_a_gather_moves_behind_a_narrow_projection_only() -> None:
    _, gm, report = rewritten(GATHERED["behind a gather"], 4)
    assert called(gm) == ["token_to_feature", "gemm_rs", "all_gather"]
    assert report.applied[0].collectives_removed == {"all_gather": 1}
    (gather,) = [n for n in gm.graph.nodes if op_name(n).endswith("::all_gather")]
    assert gather.meta["val"].shape == (20, 8)
    _, gm, _ = rewritten(GATHERED["wide behind a gather"], 4)
    assert called(gm) == ["all_gather", "gemm_gather"]


def test_a_gather_with_other_users_stays() -> None:
    _, gm, _ = rewritten(GATHERED["f_a"], 4)
    assert called(gm) == ["all_gather", "gemm_gather"]


def test_a_norm_is_done_before_the_gather() -> None:
    _, gm, report = rewritten(GATHERED["behind a norm"], 4)
    assert called(gm) == ["token_to_feature", "gemm_rs", "all_gather"]
    assert [d.pattern for d in report.applied] == ["late_gather", "latent_projection"]


@pytest.mark.parametrize(
    "tokens, late", [(None, True), ((1 << 24, 1 << 24), True), ((8, 8), False)]
)
def test_the_cost_model_chooses_the_form_of_a_token_range(tokens: Any, late: bool) -> None:
    """Three small collectives cost more than two that move more; three large ones do not."""
    options = {"token_range": tokens, "policy": "memory"} if tokens else {}
    _, gm, _ = rewritten(GATHERED["behind a gather"], 4, patterns=ONLY, **options)
    assert ("gemm_rs" in called(gm)) is late, called(gm)


def test_torchs_own_gather_moves_too() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(H, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            g = torch.ops._c10d_functional.all_gather_into_tensor(x, 4, "0")
            return self.down(torch.ops._c10d_functional.wait_tensor(g))

    gm = sp_passes.trace(Own(), projections.tokens(0))
    report = sp_passes.rewrite(gm, SPConfig(tp_size=4))
    assert count(gm.graph) == {"all_to_all": 1, "reduce_scatter": 1, "all_gather": 1}
    assert report.applied[0].collectives_removed == {"all_gather": 1}


def test_one_gather_serves_router_latent_and_shared_experts() -> None:
    module, gm, report = rewritten(LOCAL["moe"], 4, dtype=torch.bfloat16)
    gathers = [n for n in gm.graph.nodes if op_name(n) == "sp_passes::ag_gemm"]
    assert [len(n.args[1]) for n in gathers] == [3, 1]
    assert gathers[0].args[0].meta["val"].dtype == torch.bfloat16
    shared = next(d for d in report.applied if d.pattern == "shared_gather")
    assert shared.collectives_removed == {"all_gather": 2} and not shared.bytes_saved_per_rank
    assert "-2 all_gather" in str(report)
    inputs = [projections.tokens(r, dtype=torch.bfloat16) for r in range(4)]
    for x, y in zip(inputs, ranks.lockstep(gm, 4, [[x] for x in inputs]), strict=True):
        wanted = mlps.exact(module, x, dtype=torch.float32)
        assert y.dtype == torch.bfloat16
        assert mlps.rms_error(y, wanted) <= 1.5 * mlps.rms_error(module(x), wanted)


def test_logits_stay_float32_while_the_rows_travel_in_bfloat16() -> None:
    """In both forms: alone (rows) and beside what gathers the same rows (columns)."""
    for fn in (
        LOCAL["router"],
        lambda s, x: (F.linear(x.to(s.router.dtype), s.router), projections.mlp(s, x)),
    ):
        module, gm, _ = rewritten(fn, 4, dtype=torch.bfloat16)
        inputs = [projections.tokens(r, dtype=torch.bfloat16) for r in range(4)]
        for node in gm.graph.nodes:
            if op_name(node) in ("sp_passes::ag_gemm", "sp_passes::token_to_feature"):
                assert node.args[0].meta["val"].dtype == torch.bfloat16
        for x, y in zip(inputs, ranks.lockstep(gm, 4, [[x] for x in inputs]), strict=True):
            assert flat(y)[0].dtype == torch.float32
            torch.testing.assert_close(flat(y)[0], flat(module(x))[0], rtol=1e-5, atol=1e-5)


def test_bytes_saved_and_the_mlp_keeps_its_linears() -> None:
    _, _, report = rewritten(LOCAL["moe"], 4)
    owners = {w: d.pattern for d in report.applied if d.bytes_saved_per_rank for w in d.weights}
    assert owners == {
        **dict.fromkeys(("gate_up", "mlp_down"), "replicated_mlp"),
        **dict.fromkeys(("router", "down", "up"), "latent_projection"),
    }
    assert report.by_pattern()["latent_projection"] == (12 * 16 + 2 * 8 * 16) * 4 * 3 // 4


# --- what is left alone -------------------------------------------------------------------


SKIPS: dict[str, tuple[Any, int, str]] = {
    "features of neither side": (lambda s, x: F.linear(x[:, :6], s.odd_both), 4, "not divisible"),
    "used elsewhere": (lambda s, x: F.linear(x, s.down) + s.down.sum(), 4, "weight used elsewhere"),
    "returned": (lambda s, x: (F.linear(x, s.down), s.down), 4, "weight returned"),
    "one rank": (lambda s, x: F.linear(x, s.down), 1, "one rank"),
    "wanted in two ways": (
        lambda s, x: F.linear(x, s.up.t()) + F.linear(F.linear(x, s.up.t()).sin(), s.up)[:, :8],
        4,
        "two layouts",
    ),
}


@pytest.mark.parametrize("name", SKIPS)
def test_named_skip(name: str) -> None:
    fn, tp, reason = SKIPS[name]
    module, gm, report = rewritten(fn, tp, patterns=ONLY)
    assert set(reasons(report)) == {reason}, report
    assert called(gm) == [] and not report.applied and report.bytes_saved_per_rank == 0
    inputs = [projections.tokens(r) for r in range(tp)]
    for x, y in zip(inputs, ranks.lockstep(gm, tp, [[x] for x in inputs]), strict=True):
        for a, b in zip(flat(y), flat(module(x)), strict=True):
            torch.testing.assert_close(a, b)


def test_one_output_feature_cannot_be_divided() -> None:
    _, _, report = rewritten(lambda s, x: F.linear(x, s.one), 4, tokens="replicated")
    assert report.skipped[0].reason == "not divisible: 1 output features of one by tp_size 4"


def test_a_weight_that_saves_less_than_a_token_moves_is_too_small() -> None:
    """Half of 16 numbers saved, 8 + 1 moved for a token."""
    _, gm, report = rewritten(lambda s, x: F.linear(x, s.one), 2)
    (decision,) = report.skipped
    assert (
        decision.reason == "too small: one would save 32 bytes, and move 36 bytes for every token"
    )
    assert called(gm) == []


def test_tp12_refuses_f_a_and_strict_makes_it_an_error() -> None:
    module = nn.Linear(7168, 128, bias=False, device="meta")
    x = torch.empty(24, 7168, device="meta")
    gm = sp_passes.trace(module, x)
    report = sp_passes.rewrite(gm, SPConfig(tp_size=12), tokens="replicated")
    (decision,) = report.skipped
    assert decision.reason == "not divisible: 128 output features of weight by tp_size 12"
    with pytest.raises(SPError, match=r"strict: latent_projection at .*not divisible: 128"):
        sp_passes.rewrite(
            sp_passes.trace(module, x), SPConfig(tp_size=12, strict=True), tokens="replicated"
        )


def test_segments_need_not_divide_one_by_one() -> None:
    """20 = 14 + 6 features over 4 ranks: rank 2's five are q's last four and kv's first."""
    _, _, report = rewritten(GATHERED["merged behind a gather"], 4)
    assert report.applied and not report.skipped


def test_a_declared_shard_is_no_site() -> None:
    module = Net(LOCAL["narrow"])
    declare_placement(module.down, Shard(0))
    gm = sp_passes.trace(module, projections.tokens(0))
    assert sp_passes.rewrite(gm, SPConfig(tp_size=4), tokens="replicated").decisions == []


def test_tokens_sharded_by_features() -> None:
    fn = LOCAL["narrow"]
    gm = sp_passes.trace(Net(fn), projections.tokens(0))
    report = sp_passes.rewrite(gm, SPConfig(tp_size=4), placements={"x": Shard(1)})
    assert reasons(report) == ["tokens not sharded"]


def test_an_mlp_that_is_skipped_is_not_taken_apart() -> None:
    _, _, report = rewritten(projections.mlp, 4, tokens="replicated")
    assert [d.pattern for d in report.decisions] == ["replicated_mlp"] and not report.applied
    _, _, report = rewritten(projections.mlp, 4, tokens="replicated", patterns=ONLY)
    assert len(report.applied) == 2


@pytest.mark.parametrize("odd", [False, True])
def test_a_linear_right_behind_an_mlp_is_not_lost_to_its_overlap(odd: bool) -> None:
    """up -> act -> down is an MLP, down -> lone would be another one; lone is then alone.

    Where the first MLP is skipped (10 features) the second is rewritten and ``up`` stays.
    """
    tp = 4

    def fn(s: Any, x: Tensor) -> Tensor:
        up = s.odd[:, :H] if odd else s.gate_up
        down = s.odd_down if odd else s.mlp_down2
        return F.linear(F.linear(F.linear(x, up).relu(), down), s.wide)

    made = torch.Generator().manual_seed(9)
    module = Net(fn)
    module.mlp_down2 = nn.Parameter(torch.randn(H, 24, generator=made) / 5)
    module.odd_down = nn.Parameter(torch.randn(H, 10, generator=made) / 3)
    gm = sp_passes.trace(module, projections.tokens(0))
    report = sp_passes.rewrite(gm, SPConfig(tp_size=tp))
    shards = {w: d.pattern for d in report.applied if d.bytes_saved_per_rank for w in d.weights}
    mlp, lone = "replicated_mlp", "latent_projection"
    if odd:
        assert shards == {"odd_down": mlp, "wide": mlp}, report
    else:
        assert shards == {"gate_up": mlp, "mlp_down2": mlp, "wide": lone}, report
    inputs = [projections.tokens(r) for r in range(tp)]
    for x, y in zip(inputs, ranks.lockstep(gm, tp, [[x] for x in inputs]), strict=True):
        with torch.no_grad():
            wanted = module.double()(x.double())
        module.float()
        assert mlps.worst_error(y, wanted) < 1e-5


@pytest.mark.parametrize("tokens, applied", [((1, 64), True), ((1 << 18, 1 << 19), False)])
def test_cost_model(tokens: tuple[int, int], applied: bool) -> None:
    module = nn.Linear(7168, 28672, bias=False, device="meta", dtype=torch.bfloat16)
    x = torch.empty(8, 7168, device="meta", dtype=torch.bfloat16)
    gm = sp_passes.trace(module, x)
    (decision,) = sp_passes.rewrite(gm, SPConfig(tp_size=8, token_range=tokens)).decisions
    assert decision.applied == applied, decision
    assert applied or "slower" in decision.reason


# --- the checker --------------------------------------------------------------------------


def test_the_checker_refuses_wrong_uses_of_the_ops() -> None:
    ops = torch.ops.sp_passes
    wrong = {
        "gemm_gather of sharded tokens": lambda s, x: ops.gemm_gather(
            x, s.down, None, "S0[8]", None, "", 4
        ),
        "feature_to_token of sharded tokens": lambda s, x: ops.feature_to_token(x, "S1[64]", "", 4),
        "segments differ": lambda s, x: ops.feature_to_token(
            ops.token_to_feature(x, "", 4), "S1[8,8]", "", 4
        ),
        "two gathers": lambda s, x: ops.token_to_feature(ops.all_gather(x, "", 4), "", 4),
    }
    for fn in wrong.values():
        gm = sp_passes.trace(Net(fn), projections.tokens(0, 4))
        with pytest.raises(sp_passes.PlacementError):
            sp_passes.check(gm, SPConfig(tp_size=4))


def test_fake_ops_refuse_wrong_geometry() -> None:
    ops = torch.ops.sp_passes
    wrong = [
        lambda s, x: ops.gemm_gather(x, s.up, None, "S0[16]", None, "", 4),
        lambda s, x: ops.gemm_gather(x, s.down, None, "S0[12]", None, "", 4),
        lambda s, x: ops.gemm_gather(x, s.odd, None, "S0[10]", None, "", 4),
        lambda s, x: ops.feature_to_token(x, "S1[16]", "", 4),
        lambda s, x: ops.feature_to_token(x, "S1[64]", "", 4),
        lambda s, x: ops.token_to_feature(x, "", 3),
    ]
    for fn in wrong:
        with pytest.raises((ShardingError, SPError)):
            sp_passes.trace(Net(fn), projections.tokens(0))
