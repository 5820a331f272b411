# SPDX-License-Identifier: Apache-2.0
"""``latent_projection`` and its ops on real ranks, each with tokens of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlps
import projections
import pytest
import torch
import torch.nn.functional as F
from projections import GATHERED, LOCAL, Net
from ranks import Rank
from torch import Tensor

import sp_passes
from sp_passes import ShardingError, SPConfig, SPError
from sp_passes.layout import ShardLayout
from sp_passes.models import KimiK3Model, init_weights, shrunken_config
from sp_passes.ops import features, unfused
from sp_passes.ops.kernels import _TABLE, choose, register_kernel

pytestmark = pytest.mark.multirank
OnRanks = Callable[..., list[Any]]


# --- whole graphs -------------------------------------------------------------------------


def _flat(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def run_graphs(rank: Rank, rows: int, dtype: torch.dtype) -> dict[str, float]:
    """Largest error of each graph against float64, or for bfloat16 the excess over its own."""
    config = SPConfig(group=rank.group)
    inputs = [projections.tokens(r, rows, dtype) for r in range(rank.world)]
    out = {}
    for name, fn in {**LOCAL, **GATHERED}.items():
        module = Net(fn, rank.group.group_name, rank.world, dtype)
        gm = sp_passes.trace(module, inputs[rank.rank])
        report = sp_passes.rewrite(gm, config)
        assert "latent_projection" in {d.pattern for d in report.applied}, (name, report)
        x = torch.cat(inputs) if name in GATHERED else inputs[rank.rank]
        whole = Net(fn, dtype=dtype)
        with torch.no_grad():
            found, plain = _flat(gm(inputs[rank.rank])), _flat(whole(x))
        wide = torch.float64 if dtype == torch.float32 else torch.float32
        for a, b, p in zip(found, _flat(mlps.exact(whole, x, dtype=wide)), plain, strict=True):
            assert a.dtype == p.dtype and a.is_contiguous(), (name, a.dtype, a.stride())
            if dtype == torch.float32:
                error = mlps.worst_error(a, b)
            else:
                error = mlps.rms_error(a, b) / max(mlps.rms_error(p, b), 1e-3)
            out[name] = max(out.get(name, 0.0), error)
    return out


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("rows", [5, 1, 0])
def test_graphs_in_float32(on_ranks: OnRanks, world: int, rows: int) -> None:
    for errors in on_ranks(run_graphs, world, rows, torch.float32):
        assert max(errors.values()) < 1e-5, errors


def test_graphs_in_bfloat16_are_no_worse_than_replicated(on_ranks: OnRanks) -> None:
    """Addends that are rounded once more may cost half as much again."""
    for errors in on_ranks(run_graphs, 4, 16, torch.bfloat16):
        assert max(errors.values()) < 1.5, errors


def compiled_moe(rank: Rank, rows: int) -> tuple[float, list[str], int, int]:
    module = Net(LOCAL["moe"])
    model = sp_passes.compile(module, SPConfig(group=rank.group), dynamic=False)
    before = sp_passes.resident_bytes(module)
    x = projections.tokens(rank.rank, rows)
    found = model(x)
    wanted = mlps.exact(Net(LOCAL["moe"]), x)
    patterns = sorted({d.pattern for d in model.report.applied})
    return mlps.worst_error(found, wanted), patterns, before, sp_passes.resident_bytes(module)


def test_compiled_with_every_pattern(on_ranks: OnRanks) -> None:
    for error, patterns, before, after in on_ranks(compiled_moe, 2, 6):
        assert error < 1e-5
        assert {"latent_projection", "replicated_mlp", "shared_gather"} <= set(patterns)
        sharded = 4 * (12 * 16 + 2 * 8 * 16 + 24 * 16 + 16 * 12)
        assert after == before - sharded // 2


def shrunken_model(rank: Rank, rows: int) -> tuple[float, dict[str, int], Any]:
    config = replace(shrunken_config(), layer_types=("kda", "kda", "mla"))
    make = lambda: init_weights(  # noqa: E731
        KimiK3Model(config, rank.world, rank.rank, rank.group.group_name, dtype=torch.float32)
    )
    draw = torch.Generator().manual_seed(17 + rank.rank)
    ids = torch.randint(0, config.vocab_size, (rows,), generator=draw)
    with torch.no_grad():
        wanted = make()(ids)
    model = sp_passes.compile(make(), SPConfig(group=rank.group), dynamic=False)
    found = model(ids)
    report = model.report
    applied = Counter(d.pattern for d in report.applied)
    return mlps.worst_error(found, wanted), dict(applied), report.by_pattern()


@pytest.mark.slow
def test_shrunken_kimi_k3_with_every_pattern(on_ranks: OnRanks) -> None:
    """A dense MLP after KDA, a mixture of experts after KDA and after MLA."""
    for error, applied, saved in on_ranks(shrunken_model, 4, 6, timeout=280.0):
        assert error < 1e-5
        assert applied["replicated_mlp"] == 3 and saved["latent_projection"] > 0
        # One in each attention; router, down and up in each of two MoE layers.
        assert applied["latent_projection"] == 3 + 2 * 3
        assert applied["shared_gather"] == 2


# --- the ops ------------------------------------------------------------------------------


def checked_ops(rank: Rank) -> None:
    name, tp = rank.group.group_name, rank.world
    x = torch.randn(4, 8)
    for dtype in (torch.float32, torch.bfloat16):
        w, b = torch.eye(8).to(dtype), torch.ones(8).to(dtype)
        ops, rows = torch.ops.sp_passes, x.to(dtype)
        for op, args in (
            (ops.gemm_gather, (rows, w, None, "S0[8]", None, name, tp)),
            (ops.gemm_gather, (rows, w, b, "S1[4,4]", None, name, tp)),
            (ops.gemm_gather, (rows[:0], w, None, "S0[8]", None, name, tp)),
            (ops.feature_to_token, (rows, f"S1[{8 * tp}]", name, tp)),
            (ops.feature_to_token, (rows, f"S1[{4 * tp},{4 * tp}]", name, tp)),
            (ops.token_to_feature, (rows, name, tp)),
            (ops.token_to_feature, (rows[:0], name, tp)),
        ):
            torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("world", [1, 2])
def test_opcheck(on_ranks: OnRanks, world: int) -> None:
    on_ranks(checked_ops, world)


def features_and_back(rank: Rank) -> None:
    ops, where = torch.ops.sp_passes, (rank.group.group_name, rank.world)
    x = projections.tokens(rank.rank, 3)
    parts = ops.token_to_feature(x, *where)
    whole = torch.cat([projections.tokens(r, 3) for r in range(rank.world)])
    assert torch.equal(parts, whole.chunk(rank.world, -1)[rank.rank])
    assert torch.equal(ops.feature_to_token(parts, "S1[16]", *where), x)
    segments = ShardLayout(1, (12, 4))
    mine = segments.take(whole, rank.rank, rank.world)
    assert torch.equal(ops.feature_to_token(mine, str(segments), *where), x)
    square = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    product = ops.gemm_gather(whole, square, None, "S0[12,4]", None, *where)
    torch.testing.assert_close(product, whole @ square.t())
    for wrong in (
        lambda: ops.feature_to_token(mine, "S1[20]", *where),
        lambda: ops.feature_to_token(mine[1:], str(segments), *where),
        lambda: ops.token_to_feature(x[:, 1:], *where),
        lambda: ops.gemm_gather(whole, square, None, "S0[12,4]", None, where[0], 3),
        lambda: ops.gemm_gather(whole[:, 1:], square, None, "S0[12,4]", None, *where),
    ):
        with pytest.raises(ShardingError):
            wrong()
    with pytest.raises(SPError, match="no gradient"):
        ops.token_to_feature(x.requires_grad_(), *where).sum().backward()


@pytest.mark.parametrize("world", [2, 4])
def test_features_travel_and_come_back(on_ranks: OnRanks, world: int) -> None:
    on_ranks(features_and_back, world)


def truncated(rank: Rank) -> None:
    """A gather that brings too few rows, or one that forgets a rank."""
    where = (rank.group.group_name, rank.world)
    x, w = torch.randn(4, 8), torch.eye(8)

    def short(x: Tensor, *rest: Any) -> Tensor:
        return features.gemm_gather(x, *rest)[:-1]

    def missing(
        x: Tensor, w: Tensor, b: Any, first: bool, segments: Any, pg: Any, tp: int
    ) -> Tensor:
        parts = unfused.all_gather(F.linear(x, w).unsqueeze(0), pg, tp)
        return features.restore(parts[:-1], segments, tp)

    for name, kernel in (("short", short), ("missing", missing)):
        register_kernel(name, "gemm_gather", kernel)
        try:
            with pytest.raises(ShardingError, match="gathered"):
                torch.ops.sp_passes.gemm_gather(x, w, None, "S0[8]", None, *where, name)
        finally:
            del _TABLE["gemm_gather", name]
            choose.cache_clear()


def test_a_gather_of_the_wrong_geometry_is_an_error(on_ranks: OnRanks) -> None:
    on_ranks(truncated, 2)


@pytest.mark.parametrize("shape", [(2, 3, 4), (4, 3, 3), (4, 8), (3, 4, 3, 4)])
def test_restore_refuses_parts_that_are_not_one_a_rank(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShardingError, match="do not make up segments"):
        features.restore(torch.empty(shape), (12, 4), 4)
