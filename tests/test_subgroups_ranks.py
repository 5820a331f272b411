# SPDX-License-Identifier: Apache-2.0
"""Four ranks, other tokens on each: weights over parts of the group, and weights that travel."""

from __future__ import annotations

from typing import Any

import mlps
import pytest
import torch
from ranks import Rank
from torch import Tensor, nn

import sp_passes
from sp_passes import SPConfig, SPError
from sp_passes.bench import calibrate
from sp_passes.policy.hardware import hardware, parse, raw

RANKS, PART = 4, 2
FP32 = 1e-5
MANY = (1 << 22, 1 << 22)


class Pair(nn.Module):
    """Two MLPs after each other, with rows added in between."""

    def __init__(self, spec: mlps.Spec) -> None:
        super().__init__()
        self.one, self.two = mlps.MLP(spec, 1), mlps.MLP(spec, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(x + self.one(x))


def measure(module: nn.Module, rank: Rank, spec: mlps.Spec, **options: Any) -> dict[str, Any]:
    """Error of this rank against float64, and what it holds afterwards."""
    config = SPConfig(group=rank.group, **options)
    x = mlps.tokens(spec, rank.rank)
    wanted = mlps.exact(module, x)
    plain = module(x)
    whole = sp_passes.resident_bytes(module)
    graph = sp_passes.trace(module, x)
    report = sp_passes.rewrite(graph, config)
    sp_passes.check(graph, config)
    found = graph(x)
    return {
        "error": mlps.worst_error(found, wanted),
        "repeats": torch.equal(found, graph(x)),
        "same_bits": torch.equal(found, plain),
        "share": sp_passes.resident_bytes(module) / whole,
        "forms": [d.form for d in report.applied if d.bytes_saved_per_rank],
        "saved": report.bytes_saved_per_rank / whole,
        "added": [dict(d.collectives_added) for d in report.applied],
    }


def over_parts(rank: Rank, name: str) -> dict[str, Any]:
    spec = mlps.with_(mlps.ZOO[name], hidden=16)
    return measure(Pair(spec), rank, spec, shard_group=PART)


@pytest.mark.multirank
@pytest.mark.parametrize("name", ["merged", "gpt_oss"])
def test_over_parts_of_two_ranks(on_ranks: Any, name: str) -> None:
    for found in on_ranks(over_parts, RANKS, name):
        assert found["error"] < FP32 and found["repeats"]
        assert len(found["forms"]) == 2
        # All weights but the vectors that are kept whole: half of them, not a quarter.
        assert found["share"] == pytest.approx(1 / PART, abs=0.05)
        assert found["saved"] == pytest.approx(1 / PART, abs=0.05)


def travelling(rank: Rank, name: str, part: int | None) -> dict[str, Any]:
    spec = mlps.with_(mlps.ZOO[name], hidden=16)
    options = {"policy": "memory", "token_range": MANY, "shard_group": part}
    return measure(Pair(spec), rank, spec, **options)


@pytest.mark.multirank
@pytest.mark.parametrize(
    "name, part", [("merged", None), ("in_first_biases", None), ("separate", PART)]
)
def test_weights_that_travel(on_ranks: Any, name: str, part: int | None) -> None:
    size = part or RANKS
    for found in on_ranks(travelling, RANKS, name, part):
        assert found["forms"] == ["weight_gather"] * 2
        assert found["error"] < FP32 and found["repeats"]
        assert found["share"] == pytest.approx(1 / size, abs=0.05)
        assert all(added.keys() == {"all_gather"} for added in found["added"])


def two_kinds(rank: Rank) -> dict[str, Any]:
    """One module, traced for few tokens and compiled for many: only the form changes."""
    spec = mlps.with_(mlps.BASE, hidden=16)
    module = mlps.MLP(spec)
    x = mlps.tokens(spec, rank.rank)
    wanted = mlps.exact(module, x)
    graph = sp_passes.trace(module, x)
    few = sp_passes.rewrite(graph, SPConfig(group=rank.group))
    before = mlps.worst_error(graph(x), wanted)
    config = SPConfig(group=rank.group, policy="memory", token_range=MANY)
    compiled = sp_passes.compile(module, config, dynamic=False)
    error = mlps.worst_error(compiled(x), wanted)
    forms = [d.form for d in (*few.applied, *compiled.report.applied)]
    return {"errors": (before, error), "forms": forms}


@pytest.mark.multirank
def test_one_set_of_shards_serves_both_forms(on_ranks: Any) -> None:
    for found in on_ranks(two_kinds, PART):
        assert max(found["errors"]) < FP32
        assert found["forms"] == ["sharded", "weight_gather"]


def rehearse(rank: Rank) -> dict[str, Any]:
    return calibrate.measure(rank.rank, rank.world, raw("gb200"), "here", rank.group)


@pytest.mark.multirank
def test_calibrate_measures_collectives(on_ranks: Any) -> None:
    profile, _ = on_ranks(rehearse, PART)
    found = parse(profile, "here")
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        assert len(found.points(kind)) == len(calibrate.TOY_SIZES)
        assert "2 ranks" in profile["sources"][f"collectives.{kind}"]
    assert found.one_shot is None and found.copies == hardware("gb200").copies


def parts_differ(rank: Rank) -> None:
    """Each part agrees within itself, but not with the other."""
    spec = mlps.with_(mlps.BASE, hidden=16, width=24 if rank.rank < PART else 48)
    module = mlps.MLP(spec)
    config = SPConfig(group=rank.group, shard_group=PART)
    sp_passes.compile(module, config)(mlps.tokens(spec, rank.rank))


@pytest.mark.multirank
def test_parts_that_decide_differently_are_an_error_on_every_rank(on_ranks: Any) -> None:
    for found in on_ranks(parts_differ, RANKS, check=False):
        assert SPError.__name__ in found.bases and "decided differently" in found.text
