# SPDX-License-Identifier: Apache-2.0
"""Shapes that were not measured: what the cost model picks, and that it picks no slower kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sp_passes import bench
from sp_passes.ops import estimated, tuned
from sp_passes.ops.kernels import Call, choose
from sp_passes.policy.hardware import hardware

SOURCE = json.loads(tuned.SHIPPED.read_text())[0]["source"].rpartition(", ")[2]
RESULTS = Path(bench.__file__).parent / "results" / SOURCE
# K3's shared experts' first product at TP4; the model gives 1.70 to 1.77.
CALL = Call("ag_gemm", "cuda", torch.bfloat16, 3072, 7168, 9000, 4)


def on(call: Call, **changes: Any) -> Call:
    return call._replace(**changes)


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuned, "capability", lambda: (9, 0))
    monkeypatch.setattr(estimated, "device_name", lambda: "NVIDIA H200")
    choose.cache_clear()
    yield
    choose.cache_clear()


def measured() -> list[tuple[Call, float, float]]:
    """The rows where the model is used, with the measured µs unfused and by the copy engine."""
    return [
        (
            Call(row["op"], "cuda", torch.bfloat16, *(row[k] for k in ("n", "k", "tokens")), 2),
            row["us"]["unfused"],
            row["us"]["copy_engine"],
        )
        for row in json.loads(RESULTS.read_text())["rows"]
        if row["op"] in ("ag_gemm", "gemm_rs") and row["tokens"] in estimated.EDGES
    ]


def test_the_margin_covers_every_known_error() -> None:
    rows = measured()
    assert len(rows) == 28
    for call, unfused, fused in rows:
        found = estimated.seconds(call.op, call.n, call.k, call.tokens, 2, hardware("h200"))
        assert found is not None
        assert 0.87 < found[1] * 1e6 / fused < 1.02, call
        assert found[0] / found[1] < 1.205 * unfused / fused, call
    assert estimated.MARGIN > 1 + 2 * 0.205


def test_measured_shapes_are_not_estimated_and_would_be_estimated_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    picked = [(unfused, fused) for call, unfused, fused in measured() if estimated.winner(call)]
    assert picked and all(fused < 0.98 * unfused for unfused, fused in picked)
    monkeypatch.setattr(estimated, "winner", lambda call: pytest.fail("a measured key"))
    assert tuned.winner(measured()[0][0]) is not None
    assert tuned.winner(on(measured()[0][0], tokens=1 << 20)) is None


def test_an_unmeasured_shape() -> None:
    assert tuned.winner(CALL) == "copy_engine"
    assert tuned.winner(on(CALL, dtype=torch.float16)) == "copy_engine"


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 4095}, {"tokens": 32769}, {"dtype": torch.float32}, {"op": "gemm_gather"},
        {"tp_size": 16}, {"tp_size": 1}, {"n": 16896, "tokens": 20000},
        {"n": 384, "k": 768},  # shorter than the calls take on the host
    ],
)  # fmt: skip
def test_where_the_error_is_unknown_or_the_win_is_small(changes: dict[str, Any]) -> None:
    assert tuned.winner(on(CALL, **changes)) is None


def test_other_machines_run_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVIDIA H200 NVL", "NVIDIA B200", "NVIDIA H100 80GB HBM3"):
        monkeypatch.setattr(estimated, "device_name", lambda name=name: name)
        assert tuned.winner(CALL) is None


def test_decided_once_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = estimated.seconds

    def counting(op: str, n: int, k: int, tokens: int, *rest: Any) -> Any:
        asked.append(tokens)
        return real(op, n, k, tokens, *rest)

    monkeypatch.setattr(estimated, "seconds", counting)
    estimated._wins.cache_clear()
    for tokens in (8200, 9000, 16384, 9000):
        choose(on(CALL, tokens=tokens), "auto")
    assert asked == [8192, 16384]
