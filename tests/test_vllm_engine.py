# SPDX-License-Identifier: Apache-2.0
"""The whole-graph route in real vLLM engines: 2 workers on the CPU, small random models.

Five engines are started in all. On the CPU platform vLLM traces once and calls Inductor, whose
cache is what a second start meets; vLLM's own compile mode is in ``test_vllm_modes.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm_engine
from vllm_models import MODELS

pytestmark = [pytest.mark.multirank, pytest.mark.slow, pytest.mark.timeout(900)]

# Float32. The largest difference seen is 3e-6; a wrong shard makes it larger than 1.
TOLERANCE = 1e-4
DEEPSEEK = MODELS["deepseek_v2"]
LATENT_BYTES = (
    (DEEPSEEK["q_lora_rank"] + DEEPSEEK["kv_lora_rank"] + DEEPSEEK["qk_rope_head_dim"])
    * DEEPSEEK["hidden_size"]
    * 4
)
ROUTER_BYTES = DEEPSEEK["n_routed_experts"] * DEEPSEEK["hidden_size"] * 4


def assert_same(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Greedy tokens are equal, and so are the likeliest tokens' logprobs at every step."""
    assert [out["tokens"] for out in got] == [out["tokens"] for out in wanted]
    assert len({tuple(out["tokens"]) for out in wanted}) > 2  # the model is no constant
    for mine, other in zip(got, wanted, strict=True):
        for step, reference in zip(mine["logprobs"], other["logprobs"], strict=True):
            for token in step.keys() & reference.keys():
                assert abs(step[token] - reference[token]) < TOLERANCE


def worker_lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if "sp_passes: rank" in line and "sites" in line]


# --- DeepSeek-V2-shaped: latent projections and routers ---------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """vLLM without sp_passes.

    Compiled as well: with ``enforce_eager`` vLLM 0.32 on a CPU does not even say the same of a
    prompt alone and in a batch for this model.
    """
    return vllm_engine.start(folder, "alone", "deepseek_v2", None)


def _start(folder: Path, name: str) -> dict[str, Any]:
    env = {"VLLM_USE_AOT_COMPILE": "0", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    dump = {"debug_dump_path": str(folder / name)}
    found = vllm_engine.start(
        folder, name, "deepseek_v2", {"routes": ["graph"]}, env, compilation_config=dump
    )
    files = [folder / name / f"rank_{rank}_dp_0" / "sp_passes.json" for rank in range(2)]
    return {**found, "reports": [json.loads(file.read_text()) for file in files]}


@pytest.fixture(scope="module")
def first(folder: Path) -> dict[str, Any]:
    return _start(folder, "first")


@pytest.fixture(scope="module")
def second(folder: Path, first: dict[str, Any]) -> dict[str, Any]:
    return _start(folder, "second")


def test_deepseek_says_the_same(first: dict[str, Any], alone: dict[str, Any]) -> None:
    assert_same(first["outputs"], alone["outputs"])


def test_deepseek_holds_less_by_what_is_reported(
    first: dict[str, Any], alone: dict[str, Any]
) -> None:
    saved = (2 * LATENT_BYTES + ROUTER_BYTES) // 2
    for rank, report in enumerate(first["reports"]):
        assert report["totals"]["bytes_saved_per_rank"] == saved
        held = first["workers"][rank]["resident"]
        assert alone["workers"][rank]["resident"] - held == saved
        assert (report["bytes_loaded"], report["bytes_resident"]) == (held + saved, held)


def test_deepseek_ran_on_every_rank_and_says_so(first: dict[str, Any]) -> None:
    layers = [f"model.layers.{at}" for at in range(2)]
    wanted = {f"{layer}.self_attn.fused_qkv_a_proj.weight" for layer in layers}
    wanted |= {f"{layer}.mlp.gate.weight" for layer in layers[1:]}
    for rank, report in enumerate(first["reports"]):
        applied = [site for site in report["sites"] if site["decision"] == "applied"]
        assert {weight for site in applied for weight in site["weights"]} == wanted
        assert report["rank"] == rank and not report["from_cache"]
        assert all(site["reason"] for site in report["sites"] if site not in applied)
    lines = worker_lines(first["log"])
    assert len(lines) == 2
    for rank in range(2):
        assert any(f"rank {rank} of tp_size 2: 3 sites applied" in line for line in lines)


def test_deepseek_second_start_compiles_nothing(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    assert_same(second["outputs"], first["outputs"])
    for rank, report in enumerate(second["reports"]):
        worker = second["workers"][rank]
        compiled = first["workers"][rank]["fxgraph_cache_miss"]
        assert compiled > 0
        assert worker["fxgraph_cache_hit"] == compiled and "fxgraph_cache_miss" not in worker
        assert report["from_cache"]
        assert report["sites"] == first["reports"][rank]["sites"]
        assert worker["resident"] == first["workers"][rank]["resident"]
    assert all(
        "the compile that made the cached artifact" in x for x in worker_lines(second["log"])
    )


def test_vllm_alone_does_not_mention_sp_passes(alone: dict[str, Any]) -> None:
    assert "sp_passes:" not in alone["log"]


# --- the others: whole weights and eager code in the same engine are the reference ------


def test_llama_with_sharded_tokens(folder: Path) -> None:
    patterns = ["sequence_parallel", "ag_gemm", "gemm_rs", "dead_collectives"]
    options = {"routes": ["graph"], "patterns": patterns, "report_dir": str(folder / "llama_rep")}
    found = vllm_engine.start(folder, "llama_sp", "llama", options, restore=True)
    assert_same(found["outputs"], found["eager"])
    for rank in range(2):
        file = folder / "llama_rep" / f"rank_{rank}_dp_0" / "sp_passes.json"
        applied = [s for s in json.loads(file.read_text())["sites"] if s["decision"] == "applied"]
        sharded = [s for s in applied if s["pattern"] == "sequence_parallel"]
        # The embedding's sum, and two in each layer.
        assert sum(s["collectives_removed"].get("all_reduce", 0) for s in sharded) == 5
        assert {s["pattern"] for s in applied} >= {"sequence_parallel", "ag_gemm"}


def test_qwen_moe_shards_its_router(folder: Path) -> None:
    """In workers that are spawned: they load the plugin themselves."""
    found = vllm_engine.start(folder, "qwen", "qwen3_moe", {}, restore=True, fork=False)
    assert_same(found["outputs"], found["eager"])
    gates = ["model.layers.0.mlp.gate.weight"]
    for worker, line in zip(found["restored"], worker_lines(found["log"]), strict=True):
        assert worker == {"restored": gates, "wrong": []}
        assert "1 sites applied" in line
