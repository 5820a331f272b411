# SPDX-License-Identifier: Apache-2.0
"""What a rewrite does to one rank's memory, against the measured figures of a served Kimi-K3."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sp_passes.cli.main import app
from sp_passes.demo import full_size
from sp_passes.models import KimiK3Config, KimiK3Model, load_config
from sp_passes.ops import symmetric
from sp_passes.policy import memory
from sp_passes.policy.memory import GIB, Budget, Serving
from sp_passes.report import Decision

DATA: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "published.json").read_text())
MEASURED = DATA["gb200_memory"]
SERVING = Serving(
    capacity=186 * GIB,
    tp_size=MEASURED["ranks"],
    ep_size=MEASURED["ep"],
    utilization=MEASURED["utilization"],
    experts=MEASURED["experts"],
)


@pytest.fixture(scope="module")
def model() -> tuple[KimiK3Model, KimiK3Config]:
    config = load_config("kimi-k3")
    return full_size.rank_model(config, SERVING.tp_size), config


def mlps_sharded(model: KimiK3Model, form: str = "sharded") -> list[Decision]:
    """The dense MLP and the shared experts, which the measured patch shards."""
    found: dict[str, dict[str, int]] = {}
    for name, weight in model.named_parameters():
        if memory.class_of(name) in ("dense MLP", "shared experts"):
            size = weight.numel() * weight.element_size()
            found.setdefault(name.rsplit(".", 2)[0], {})[name] = size
    return [
        Decision(
            "replicated_mlp", site, True, weights=tuple(weights),
            bytes_saved_per_rank=sum(weights.values()) // 4 * 3, form=form,
        )
        for site, weights in found.items()
    ]  # fmt: skip


def budget(model: tuple[KimiK3Model, KimiK3Config], **changes: Any) -> Budget:
    one, config = model
    return memory.budget(one, config, mlps_sharded(one), replace(SERVING, **changes))


def test_weights_and_what_sharding_frees(model: Any) -> None:
    found = budget(model)
    wanted = {when: gib * GIB for when, gib in MEASURED["weights_gib"].items()}
    assert found.before == pytest.approx(wanted["replicated"], abs=1.0 * GIB)
    assert found.before - found.after == pytest.approx(
        wanted["replicated"] - wanted["sharded"], abs=0.1 * GIB
    )
    assert set(found.weights) >= {"routed experts", "shared experts", "dense MLP", "attention"}
    assert found.weights["shared experts"] / GIB == pytest.approx(22.64, abs=0.01)


def test_tokens_of_kv_cache(model: Any) -> None:
    found = budget(model)
    before, after = MEASURED["kv_tokens"]["replicated"], MEASURED["kv_tokens"]["sharded"]
    assert found.per_token == 24 * 576 * 2
    assert found.tokens(False) == pytest.approx(before, rel=0.03)
    assert found.gain == pytest.approx(after / before - 1, abs=0.02)
    assert budget(model, kv_bytes=1).tokens(True) == pytest.approx(2 * found.tokens(True), rel=1e-6)


def test_states_of_sequences_leave_fewer_tokens(model: Any) -> None:
    found, full = budget(model), budget(model, sequences=128)
    state = 69 * (24 * 128 * 128 * 4 + 3 * 24 * 128 * 3 * 2)
    assert found.per_sequence == state
    assert found.tokens(True) - full.tokens(True) == pytest.approx(128 * state / 27648, abs=1)


def test_gathered_weights_need_room(model: Any) -> None:
    one, config = model
    found = memory.budget(one, config, mlps_sharded(one, "weight_gather"), SERVING)
    dense, shared = 3 * 7168 * 33792 * 2, 3 * 7168 * 6144 * 2
    assert found.workspaces == 2 * dense + shared
    assert found.cache(True) == budget(model).cache(True) - found.workspaces


def test_shared_buffers_need_room(model: Any) -> None:
    one, config = model
    found = memory.budget(one, config, mlps_sharded(one), SERVING, {"hopper": GIB, "one_shot": 5})
    assert found.cache(True) == budget(model).cache(True) - GIB - 5
    assert found.cache(False) == budget(model).cache(False)


def test_the_report_counts_the_shared_buffers_of_its_steps() -> None:
    args = ["report", "--model", "kimi-k3", "--layers", "1", "--tp", "8", "--tokens", "8192"]
    args += ["--gpu-memory", "0"]
    data = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)
    held = data["memory"]["shared_buffers"]
    assert held == {"copy engine": symmetric.buffer_bytes(8, 8192 * 7168 * 2)}
    table = CliRunner().invoke(app, args).stdout
    assert "shared buffers, copy engine" in table and "112.0 MiB" in table


def test_a_model_that_does_not_fit(model: Any) -> None:
    found = budget(model, capacity=80 * GIB)
    assert found.cache(True) < 0 and found.tokens(True) == 0 and found.gain is None


def test_the_command_prints_ranges_and_memory(tmp_path: Path) -> None:
    picture = tmp_path / "crossover.png"
    pytest.importorskip("matplotlib")
    args = ["report", "--model", "kimi-k3", "--layers", "4", "--tp", "4", "--hardware", "gb200"]
    args += ["--tokens", "1:65536", "--gpu-memory", "0", "--ep", "8", "--plot", str(picture)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    for words in ("replicated_mlp", "1-294 sharded", "295-65536", "pure_tp", "KV cache"):
        assert words in result.stdout, words
    data = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)
    assert data["hardware"] == "gb200" and data["token_range"] == [1, 65536]
    (shared,) = [k for k in data["kinds"] if k["name"].endswith("shared_experts")]
    assert [r["form"] for r in shared["ranges"]] == ["sharded", "replicated"]
    assert shared["crossover_tokens"] == shared["ranges"][1]["low"] == 295
    curve = data["step_seconds"]
    assert curve["1"]["sharded"] < curve["1"]["replicated"]
    assert curve["65536"]["replicated"] < curve["65536"]["weight_gather"]
    assert curve["65536"]["weight_gather"] < curve["65536"]["sharded"]
    assert all(
        times["best"] <= min(times["replicated"], times["sharded"]) for times in curve.values()
    )
    assert data["memory"]["kv_tokens"]["before"] > 0
    assert data["memory"]["shared_buffers"] == {}, "nothing was measured on GB200"


@pytest.mark.parametrize(
    "args, words",
    [
        (["--tokens", "8:4"], "low to high"),
        (["--tokens", "few"], "1:65536"),
        (["--plot", "x.png"], "give a range"),
        (["--policy", "latency", "--need-gib", "1"], "leave one out"),
        (["--gpu-memory", "80", "--utilization", "2"], "--utilization"),
        (["--hardware", "tpu", "--tokens", "1:2"], "neither a profile"),
    ],
)
def test_wrong_arguments(args: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["report", "--model", "kimi-k3", "--layers", "1", *args])
    assert result.exit_code == 2 and words in result.stderr, result.stderr
