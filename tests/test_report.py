# SPDX-License-Identifier: Apache-2.0
"""The report: its JSON contract, its totals, and its text."""

from __future__ import annotations

import json

import mlps
import torch
from torch import Tensor, nn

import sp_passes
from sp_passes import Report
from sp_passes.report import Decision, format_bytes, merge

H, W, TP = 8, 24, 4
SITE = {
    "pattern", "name", "decision", "reason", "weights", "bytes_saved_per_rank",
    "collectives_added", "collectives_removed",
}  # fmt: skip


class Two(nn.Module):
    """One MLP that is rewritten and one whose width does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.good = mlps.MLP(mlps.Spec(hidden=H, width=W, bias1=True))
        self.odd = mlps.MLP(mlps.Spec(hidden=H, width=10))

    def forward(self, x: Tensor) -> Tensor:
        return self.good(x) + self.odd(x)


def made(**options: object) -> Report:
    gm = sp_passes.trace(Two(), torch.randn(3, H))
    return sp_passes.rewrite(gm, mlps.config(tp_size=TP, **options))  # type: ignore[arg-type]


def test_json_contract() -> None:
    report = made()
    data = json.loads(report.to_json())
    assert {"model", "tp_size", "sites", "totals"} <= set(data)
    assert data["tp_size"] == TP
    assert set(data["totals"]) >= {"bytes_saved_per_rank", "by_pattern"}
    good, odd = data["sites"]
    assert set(good) == set(odd) and set(good) >= SITE
    whole = 4 * (2 * W * H + 2 * W + W * H)
    assert {key: good[key] for key in SITE} == {
        "pattern": "replicated_mlp",
        "name": "good",
        "decision": "applied",
        "reason": "",
        "weights": ["good.gate_up_weight", "good.gate_up_bias", "good.down_weight"],
        "bytes_saved_per_rank": whole * (TP - 1) // TP,
        "collectives_added": {"all_gather": 1, "reduce_scatter": 1},
        "collectives_removed": {},
    }
    assert odd["decision"] == "skipped" and odd["reason"].startswith("not divisible: ")
    assert odd["weights"] == ["odd.gate_up_weight", "odd.down_weight"]
    assert odd["bytes_saved_per_rank"] == 0 and odd["collectives_added"] == {}
    assert data["totals"] == {
        "bytes_saved_per_rank": good["bytes_saved_per_rank"],
        "by_pattern": {"replicated_mlp": good["bytes_saved_per_rank"]},
    }


def test_properties_agree_with_json() -> None:
    report = made()
    assert [d.name for d in report.applied] == ["good"]
    assert [d.name for d in report.skipped] == ["odd"]
    assert report.applied + report.skipped == report.decisions
    assert report.bytes_saved_per_rank == sum(d.bytes_saved_per_rank for d in report.decisions)
    assert Report.from_json(report.to_json()).decisions == report.decisions
    assert Report.from_json(report.to_json(), from_cache=True).from_cache


def test_text() -> None:
    text = str(made())
    assert "1 of 2 sites applied" in text and "tp_size 4" in text
    assert "applied  replicated_mlp  good" in text and "+1 all_gather +1 reduce_scatter" in text
    assert "skipped  replicated_mlp  odd: not divisible" in text
    assert text.count("\n") == 2


def test_no_pattern_is_reported_as_nothing_done() -> None:
    report = made(patterns=[])
    assert report.decisions == [] and "no site found" in str(report)
    data = json.loads(report.to_json())
    assert data["sites"] == [] and data["totals"] == {"bytes_saved_per_rank": 0, "by_pattern": {}}


def decision(name: str, weights: tuple[str, ...], saved: int, applied: bool = True) -> Decision:
    return Decision("replicated_mlp", name, applied, "" if applied else "why", weights, saved)


def test_merge_counts_a_site_of_two_graphs_once() -> None:
    a, b = decision("a", ("a.w",), 10), decision("b", ("b.w",), 5)
    both = merge([Report(4, [a], plan="1"), Report(4, [a, b], plan="2")])
    assert both is not None
    assert [d.name for d in both.decisions] == ["a", "b"]
    assert both.bytes_saved_per_rank == 15
    assert merge([]) is None


def test_renamed_for_another_layer() -> None:
    report = Report(4, [decision("layers.0.mlp", ("layers.0.mlp.up", "layers.0.mlp.down"), 1)])
    names = {"layers.0.mlp.up": "layers.7.mlp.up", "layers.0.mlp.down": "layers.7.mlp.down"}
    (renamed,) = report.renamed(names).decisions
    assert renamed.name == "layers.7.mlp"
    assert renamed.weights == ("layers.7.mlp.up", "layers.7.mlp.down")


def test_bytes_are_binary_units() -> None:
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(1 << 20) == "1.00 MiB"
    assert format_bytes(3 << 29) == "1.50 GiB"


def test_a_skip_leaves_the_weights_of_the_graph_alone() -> None:
    module = Two()
    gm = sp_passes.trace(module, torch.randn(3, H))
    sp_passes.rewrite(gm, mlps.config(7))
    assert dict(gm.named_parameters()).keys() == dict(module.named_parameters()).keys()
    assert gm.get_parameter("odd.down_weight") is module.odd.down_weight
