# SPDX-License-Identifier: Apache-2.0
"""The whole-graph pass in vLLM's own compile mode, and its caches: 2 gloo ranks, no engine.

Piecewise graphs, Inductor's partition and one whole graph, each compiled for two ranges of
token counts by vLLM's backend. Then the same in new processes on the same cache folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ranks

pytest.importorskip("vllm")

import vllm_ranks
import vllm_toy

pytestmark = [pytest.mark.multirank, pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = ("down", "up", "mlp.gate_up", "mlp.down")
WEIGHTS = sorted(f"layers.{at}.{name}.weight" for at in range(vllm_toy.LAYERS) for name in NAMES)
# Half of every weight, float32.
SAVED = vllm_toy.LAYERS * vllm_toy.HIDDEN * (2 * vllm_toy.LATENT + 3 * vllm_toy.INNER) * 4 // 2


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("vllm")
    return {
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A machine where only bytes cost: few tokens move, for many it is the weights."""
    points = [[1, 1e-3], [1e9, 1e6]]
    profile = {
        **{"name": "slow", "capacity": 1e9, "hbm": 1e12, "rates": [[1, 1e12]], "ramp_us": 0},
        **{"launch_us": 0, "ranks_per_node": 8, "one_shot": None},
        "collectives": dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), points),
        "copy_engine": {"bytes_per_s": 1e9, "latency_us": 0},
        "network": {"bytes_per_s": 1e9, "latency_us": 0},
    }
    path = tmp_path_factory.mktemp("hardware") / "slow.json"
    path.write_text(json.dumps(profile))
    return {"routes": ["graph"], "hardware": str(path)}


@pytest.fixture(scope="module")
def first(cache: dict[str, str], options: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Each mode's results, by rank."""
    plan = [(mode, options) for mode in vllm_toy.MODES]
    found = ranks.run_fresh(
        vllm_toy.starts, 2, plan, env=cache, timeout=300, modules=vllm_ranks.MODULES
    )
    return {mode: [rank[at] for rank in found] for at, mode in enumerate(vllm_toy.MODES)}


@pytest.fixture(scope="module")
def second(
    cache: dict[str, str], options: dict[str, Any], first: dict[str, list[dict[str, Any]]]
) -> dict[str, list[dict[str, Any]]]:
    """The same in new processes, and once with another option."""
    names = [*vllm_toy.MODES, "changed"]
    plan = [(mode, options) for mode in vllm_toy.MODES]
    plan.append(("piecewise", {**options, "exclude": ["layers.1.*"]}))
    found = ranks.run_fresh(
        vllm_toy.starts, 2, plan, env=cache, timeout=300, modules=vllm_ranks.MODULES
    )
    return {mode: [rank[at] for rank in found] for at, mode in enumerate(names)}


@pytest.mark.parametrize("mode", vllm_toy.MODES)
def test_every_mode_shards_and_computes_the_same(mode: str, first: Any) -> None:
    for rank in first[mode]:
        assert rank["error"] < 1e-5
        assert rank["applied"] == WEIGHTS
        assert rank["saved"] == rank["freed"] == SAVED
        assert rank["passes"] > 0 and not rank["from_cache"]


def test_ranges_choose_the_form_and_share_the_layout(first: Any) -> None:
    """Few tokens are gathered themselves, for many the weight is; the shard is the same."""
    for mode in vllm_toy.MODES:
        for rank in first[mode]:
            assert rank["forms"] == ["sharded", "weight_gather"]
            assert rank["freed"] == SAVED  # two layouts of one weight would keep it whole


@pytest.mark.parametrize("mode", vllm_toy.MODES)
def test_a_second_start_compiles_nothing_and_shards(mode: str, second: Any) -> None:
    for rank in second[mode]:
        assert rank["passes"] == 0 and rank["compilations"] == 0
        assert rank["from_cache"]
        assert rank["applied"] == WEIGHTS
        assert rank["saved"] == rank["freed"] == SAVED
        assert rank["error"] < 1e-5


def test_another_option_compiles_another_graph(second: Any) -> None:
    for rank in second["changed"]:
        assert rank["passes"] > 0 and not rank["from_cache"]
        assert rank["applied"] == [w for w in WEIGHTS if not w.startswith("layers.1.")]
        assert rank["skipped"] == ["excluded"]
        assert rank["freed"] == SAVED * (vllm_toy.LAYERS - 1) // vllm_toy.LAYERS
        assert rank["error"] < 1e-5
