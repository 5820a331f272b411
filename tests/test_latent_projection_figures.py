# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3 at full width: which weights are sharded, and the bytes that saves (DESIGN §7).

Here are the first four layers, which are all kinds that there are; all 93 of them are in
``test_cli_report``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sp_passes
from sp_passes import SPConfig, SPError
from sp_passes.models import KimiK3Model, load_config
from sp_passes.report import Report

GIB, MIB = 1 << 30, 1 << 20


def traced(tp: int) -> Any:
    config = load_config("kimi-k3").with_layers(4)
    model = KimiK3Model(config, tp_size=tp, dtype=torch.bfloat16, device="meta")
    return sp_passes.trace(model, torch.zeros(4, dtype=torch.int64, device="meta"))


def saved(report: Report, *names: str) -> int:
    return sum(
        d.bytes_saved_per_rank
        for d in report.applied
        if d.pattern == "latent_projection" and any(n in d.name for n in names)
    )


FIGURES = {4: (0.508, 6.60, 90.6), 8: (0.592, 7.70, 105.7), 16: (0.634, 8.25, 113.2)}


@pytest.mark.parametrize("tp", FIGURES)
def test_figures(tp: int) -> None:
    """Three KDA layers stand for 69, one MLA layer for 24, three MoE layers for 92."""
    gm = traced(tp)
    report = sp_passes.rewrite(gm, SPConfig(tp_size=tp))
    sp_passes.check(gm, SPConfig(tp_size=tp))
    q_a, routed, f_a = FIGURES[tp]
    assert round(saved(report, "fused_qkv_a_proj") * 24 / GIB, 3) == q_a
    assert saved(report, "routed_expert") / 3 * 92 / GIB == pytest.approx(routed, abs=0.005)
    assert round(saved(report, "f_a_proj") / 3 * 69 / MIB, 1) == f_a
    assert saved(report, "gate") == 3 * 896 * 7168 * 4 * (tp - 1) // tp
    latent = [d for d in report.decisions if d.pattern == "latent_projection"]
    assert len(latent) == 1 + 3 + 3 * 3 and all(d.applied for d in latent)
    shared = [d for d in report.applied if d.pattern == "shared_gather"]
    assert [d.collectives_removed for d in shared] == [{"all_gather": 2}] * 3


def test_tp12_shards_what_it_divides_and_names_the_rest() -> None:
    """One layer of each kind: 2112 rows divide by 12; 128, and 3584 by 7168, do not."""
    gm = traced(12)
    report = sp_passes.rewrite(gm, SPConfig(tp_size=12))
    sp_passes.check(gm, SPConfig(tp_size=12))
    latent = {d.name: d for d in report.decisions if d.pattern == "latent_projection"}
    assert latent["layers.3.self_attn.fused_qkv_a_proj"].applied
    assert latent["layers.0.self_attn.f_a_proj"].reason == (
        "not divisible: 128 output features of layers.0.self_attn.f_a_proj.weight by tp_size 12"
    )
    down = latent["layers.1.block_sparse_moe.routed_expert_down_proj"].reason
    assert down.startswith("not divisible: neither 3584 output nor 7168 input features")
    with pytest.raises(SPError, match=r"strict: latent_projection at .*f_a_proj.*not divisible"):
        sp_passes.rewrite(traced(12), SPConfig(tp_size=12, strict=True))
