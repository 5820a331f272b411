# SPDX-License-Identifier: Apache-2.0
"""Rewriting is linear in the size of the graph: counted in Python calls, not in seconds."""

from __future__ import annotations

import cProfile
import pstats
from dataclasses import replace

import torch
from torch import fx

import sp_passes
from sp_passes import SPConfig
from sp_passes.bench.dense import Dense, Sizes
from sp_passes.demo import full_size
from sp_passes.models import load_config
from sp_passes.models.layers import TP, Made

RANKS = 4


def dense(layers: int) -> fx.GraphModule:
    sizes = Sizes(layers, hidden=32, heads=4, kv_heads=4, head=8, inner=32)
    model = Dense(sizes, TP(RANKS), Made(torch.bfloat16, "meta"))
    return sp_passes.trace(model, torch.empty(64, 32, dtype=torch.bfloat16, device="meta"))


def kimi(layers: int) -> fx.GraphModule:
    """Without its dense first layer, so that every fourth layer is like every other fourth."""
    config = replace(load_config("kimi-k3").with_layers(layers), first_k_dense_replace=0)
    return full_size.trace_rank(full_size.rank_model(config, RANKS), 64).graph


def calls(graph: fx.GraphModule, config: SPConfig, tokens: str, layers: int) -> int:
    profile = cProfile.Profile()
    report = profile.runcall(sp_passes.rewrite, graph, config, tokens=tokens)
    assert len(report.applied) >= 2 * layers, report
    return pstats.Stats(profile).total_calls


def test_as_many_more_calls_for_each_further_layer() -> None:
    """With every pattern: for so many tokens the residual is sharded too.

    The first run fills caches.
    """
    config = SPConfig(tp_size=RANKS, token_range=(1 << 18, 1 << 18))
    two, four, eight = [calls(dense(n), config, "replicated", n) for n in (2, 2, 4, 8)][1:]
    assert eight - four <= 2.05 * (four - two), (two, four, eight)


def test_four_times_the_layers_of_kimi() -> None:
    config = SPConfig(tp_size=RANKS)
    few, many = (calls(kimi(n), config, "sharded", n) for n in (2, 8))
    assert many <= 4.4 * few, (few, many)
