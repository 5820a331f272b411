# SPDX-License-Identifier: Apache-2.0
"""``sp-passes report`` and ``verify`` in this process: output, figures, wrong arguments."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sp_passes.cli.main import app
from sp_passes.demo.full_size import reasons
from sp_passes.models.config import PACKAGED
from sp_passes.report import Decision
from sp_passes.version import __version__

GIB, MIB = 1 << 30, 1 << 20
REPORT = ("report", "--model", "kimi-k3")


def call(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


def test_json_has_the_documented_form() -> None:
    result = call("report", "--model", "kimi-k3", "--tp", "8", "--layers", "2", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["tp_size"] == 8 and data["model"] == "kimi-k3, 2 layers"
    assert data["tokens"] == 64 and data["local_tokens"] == 8
    applied = [s for s in data["sites"] if s["decision"] == "applied"]
    by_name = {s["name"]: s for s in applied if s["pattern"] == "replicated_mlp"}
    dense = by_name["layers.0.mlp"]
    shared = by_name["layers.1.block_sparse_moe.shared_experts"]
    assert round(dense["bytes_saved_per_rank"] / GIB, 3) == 1.184
    assert round(shared["bytes_saved_per_rank"] * 92 / GIB, 2) == 19.81
    assert dense["weights"] == ["layers.0.mlp.gate_up_proj.weight", "layers.0.mlp.down_proj.weight"]
    assert shared["collectives_added"] == {"all_gather": 1, "reduce_scatter": 1}
    total = sum(s["bytes_saved_per_rank"] for s in applied)
    assert data["totals"]["bytes_saved_per_rank"] == total
    assert sum(data["totals"]["by_pattern"].values()) == total
    assert {"trace", "rewrite", "check placements"} <= data["seconds"].keys()


def test_json_says_what_traffic_the_memory_costs() -> None:
    """The dense layer alone, 8 rows of 7168 bfloat16 on each of 8 ranks, one pattern."""
    pattern = ("--pattern", "replicated_mlp")
    data = json.loads(call(*REPORT, "--layers", "1", *pattern, "--json").stdout)
    before, after = data["collectives"]["before"], data["collectives"]["after"]
    assert after == {kind: n + 1 for kind, n in before.items()}
    assert data["layers"] == 1 and data["collectives_per_layer"]["after"] == after
    rows = 7 * 8 * 7168 * 2
    sent = data["bytes_sent_by_kind"]
    for kind in ("all_gather", "reduce_scatter"):
        assert sent["after"][kind] == sent["before"][kind] + rows
    for when, total in data["bytes_sent_per_step"].items():
        assert total == sum(sent[when].values())


@pytest.mark.slow
def test_figures_of_the_whole_model_at_tp8() -> None:
    data = json.loads(call(*REPORT, "--json").stdout)
    assert round(data["totals"]["bytes_saved_per_rank"] / GIB, 2) == 31.32
    assert data["collectives"] == {
        "before": {"all_gather": 94, "reduce_scatter": 94},
        "after": {"all_gather": 372, "reduce_scatter": 187, "all_to_all": 276},
    }
    assert data["collectives_per_layer"]["after"] == {
        "all_gather": 4.0,
        "reduce_scatter": 2.0,
        "all_to_all": 3.0,
    }
    added = Counter[str]()
    for site in data["sites"]:
        added.update(site["collectives_added"])
        added.subtract(site["collectives_removed"])
    for kind, n in added.items():
        now = data["collectives"]["after"][kind]
        assert now - data["collectives"]["before"].get(kind, 0) == n

    latent = [s for s in data["sites"] if s["pattern"] == "latent_projection"]
    assert len(latent) == 24 + 69 + 92 * 3 and all(s["decision"] == "applied" for s in latent)

    def saved(name: str) -> int:
        return sum(s["bytes_saved_per_rank"] for s in latent if name in s["name"])

    assert round(saved("fused_qkv_a_proj") / GIB, 3) == 0.592
    assert saved("routed_expert") / GIB == pytest.approx(7.70, abs=0.005)
    assert round(saved("f_a_proj") / MIB, 1) == 105.7
    assert saved("gate") == 92 * 896 * 7168 * 4 * 7 // 8
    gathers = [s for s in data["sites"] if s["pattern"] == "shared_gather"]
    assert [s["collectives_removed"] for s in gathers if s["decision"] == "applied"] == [
        {"all_gather": 2}
    ] * 92


def test_tables() -> None:
    result = call("report", "--model", "kimi-k3", "--layers", "1", "--tp", "4", "--tokens", "5")
    assert result.exit_code == 0, result.output
    assert "replicated_mlp" in result.stdout and "1.015" in result.stdout
    assert "kimi-k3, 1 layers, TP4, 5 tokens (2 a rank)" in result.stdout
    assert "already sharded" in result.stdout
    assert "Collectives of one step of 5 tokens" in result.stdout


@pytest.mark.parametrize("width", [100, 80, 30])
def test_tables_fit_the_page(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    result = call(*REPORT, "--layers", "2")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= width
    if width < 80:
        return
    for name in ("latent_projection", "replicated_mlp", "ag_gemm", "gemm_rs", "shared_gather"):
        assert any(line.startswith(f"│ {name} ") for line in lines), name
    (gemm,) = [line for line in lines if line.startswith("│ ag_gemm ")]
    assert gemm.split("│")[6].strip() == "-" and "0.000" not in result.stdout


def test_weights_are_those_that_save_bytes_most_first() -> None:
    result = call(*REPORT, "--layers", "2")
    _, _, weights = result.stdout.partition("Weights of one rank")
    weights, _, rest = weights.partition("Skipped with nothing to do: ")
    assert rest.startswith("5 (4 already sharded by the model, 1 rewritten"), rest
    rows = [line.split("│")[1:5] for line in weights.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["layers.*.mlp", "1", "1.354 GiB", "1.184 GiB"],
        ["layers.*.block_sparse_moe.shared_experts", "1", "0.246 GiB", "0.215 GiB"],
        ["layers.*.block_sparse_moe.routed_expert_down_proj", "1", "49.0 MiB", "42.9 MiB"],
        ["layers.*.block_sparse_moe.routed_expert_up_proj", "1", "49.0 MiB", "42.9 MiB"],
        ["layers.*.block_sparse_moe.gate", "1", "24.5 MiB", "21.4 MiB"],
        ["layers.*.self_attn.f_a_proj", "2", "3.5 MiB", "3.1 MiB"],
        ["all", "7", "1.723 GiB", "1.507 GiB"],
    ]


def test_a_stage_of_a_pipeline() -> None:
    args = (*REPORT, "--layers", "4", "--pp", "2", "--stage", "1")
    result = call(*args)
    assert result.exit_code == 0, result.output
    assert "kimi-k3, stage 1 of 2, layers 2-3, TP8, 64 tokens (8 a rank)" in result.stdout
    _, _, boundary = result.stdout.partition("Pipeline boundary")
    cells = [line.split("│") for line in boundary.splitlines() if "hidden_states" in line]
    assert [c.strip() for c in cells[0][1:4]] == ["hidden_states", "896.00 KiB", "112.00 KiB"]
    data = json.loads(call(*args, "--json").stdout)
    assert (data["pp_size"], data["stage"], data["layers"], data["tokens"]) == (2, 1, 2, 64)
    moved = {s["name"]: s["bytes_moved"] for s in data["sites"] if s["pattern"] == "pp_send"}
    assert moved["residual"] == {"before": 917_504, "after": 114_688, "tokens": 64}
    # Two layers: of each an attention's gather and reduce-scatter, and the last gather.
    assert data["collectives"]["before"] == {"all_gather": 3, "reduce_scatter": 2}
    # Gathers that pp_send spares a receiver are the transport's, not the stage's own.
    mine = [s for s in data["sites"] if s["pattern"] != "pp_send"]
    added = sum(sum(s["collectives_added"].values()) for s in mine)
    gone = sum(sum(s["collectives_removed"].values()) for s in mine)
    total = {when: sum(kinds.values()) for when, kinds in data["collectives"].items()}
    assert total["after"] == total["before"] + added - gone
    assert data["bytes_sent_per_step"]["after"] > data["bytes_sent_per_step"]["before"]
    assert "Collectives of one step of 64 tokens" in boundary


def test_a_stage_whose_boundaries_stay_whole() -> None:
    args = ("--layers", "2", "--pp", "2", "--stage", "0", "--pattern", "replicated_mlp")
    result = call(*REPORT, *args)
    assert result.exit_code == 0 and "Pipeline boundary" not in result.stdout


def test_a_path_is_a_model_too() -> None:
    result = call("report", "--model", str(PACKAGED["kimi-k3"]), "--layers", "1", "--json")
    assert result.exit_code == 0, result.output


def test_skips_are_grouped_by_what_comes_before_the_colon() -> None:
    found = reasons(
        [
            Decision("p", "a", False, "not local: mul_1"),
            Decision("p", "b", False, "not local: mul_2"),
            Decision("p", "c", False, "mul_3 is wide"),
            Decision("p", "d", False, "mul_14 is wide"),
            Decision("p", "e", True),
        ]
    )
    assert [(r.category, r.count, r.example) for r in found] == [
        ("not local", 2, "a: not local: mul_1"),
        ("mul is wide", 2, "c: mul_3 is wide"),
    ]


BAD = {
    "no pattern": ((*REPORT, "--pattern", "replicated_mpl"), "did you mean 'replicated_mlp'?"),
    "tp 7": ((*REPORT, "--tp", "7"), "96 linear attention heads are not divisible by tp_size 7"),
    "tp 0": ((*REPORT, "--tp", "0"), "--tp must be at least 1, got 0"),
    "tp 1": ((*REPORT, "--tp", "1"), "nothing to shard on fewer than 2 ranks"),
    "pp alone": ((*REPORT, "--pp", "2"), "--pp needs --stage"),
    "stage alone": ((*REPORT, "--stage", "0"), "--stage needs --pp"),
    "no such stage": (
        (*REPORT, "--pp", "2", "--stage", "2"),
        "stage 2 of pp_size 2 with 93 layers",
    ),
    "stage -1": ((*REPORT, "--pp", "2", "--stage", "-1"), "stages go from 0 to pp_size - 1"),
    "pp 0": ((*REPORT, "--pp", "0", "--stage", "0"), "stage 0 of pp_size 0"),
    "many stages": (
        (*REPORT, "--layers", "2", "--pp", "3", "--stage", "0"),
        "stage 0 of pp_size 3 with 2 layers",
    ),
    "no layers": ((*REPORT, "--layers", "0"), "--layers must be at least 1, got 0"),
    "negative tokens": ((*REPORT, "--tokens", "-3"), "--tokens must be at least 1"),
    "no step": ((*REPORT, "--tokens", f"1:{1 << 90}"), "--tokens may be at most"),
    "no memory": ((*REPORT, "--gpu-memory", "nan"), "--gpu-memory must be a number of at least 0"),
    "no ep": ((*REPORT, "--gpu-memory", "9", "--ep", "0"), "--ep must be a number of at least 1"),
    "memory of a stage": (
        (*REPORT, "--pp", "2", "--stage", "0", "--gpu-memory", "9"),
        "--gpu-memory is of a whole model",
    ),
    "odd digit": ((*REPORT, "--shard-group", "²"), "use 'node' or a number of ranks"),
    "wrong path": (("report", "--model", "no/such.json"), "there is no file 'no/such.json'"),
    "verify tp 1": (("verify", "--tp", "1"), "nothing to shard on fewer than 2 ranks"),
    "verify tp 3": (("verify", "--tp", "3"), "8 linear attention heads are not divisible"),
    "verify tokens": (("verify", "--tokens", "0"), "--tokens must be at least 1"),
    "verify dtype": (("verify", "--dtype", "fp8"), "--dtype 'fp8' is unknown; use fp32 or bf16"),
    "verify layers": (("verify", "--layers", "0"), "--layers must be at least 1, got 0"),
    "verify model": (("verify", "--model", "kimi-k3"), "verify runs --model shrunk only"),
    "soak time": (("bench", "soak", "--minutes", "nan"), "--minutes nan: give a time above 0"),
    "soak ranks": (("bench", "soak", "--ranks", "-3"), "--ranks -3: needs at least 1"),
    "stack kernels": (("bench", "stack", "--toy", "--kernels", "auto@x"), "--kernels 'auto@x'"),
    "stack layers": (("bench", "stack", "--toy", "--layers", "-1"), "--layers -1: give at least"),
    "stack out": (
        ("bench", "stack", "--toy", "--out", "no/such/x"),
        "there is no folder 'no/such'",
    ),
    "strict": (
        (*REPORT, "--layers", "2", "--pattern", "replicated_mlp", "--strict"),
        "strict: replicated_mlp at layers.1.block_sparse_moe is skipped: not feature-local",
    ),
}


@pytest.mark.parametrize(("args", "message"), BAD.values(), ids=BAD)
def test_a_wrong_argument_is_one_line(args: tuple[str, ...], message: str) -> None:
    result = call(*args)
    assert result.exit_code == 2
    (line,) = [x for x in result.stderr.splitlines() if "error" in x]
    assert line.startswith("sp-passes: error: ") and message in line
    assert "Traceback" not in result.output and not result.stdout


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "llama"}'])
def test_a_file_that_is_no_config(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    result = call("report", "--model", str(path))
    assert result.exit_code == 2 and str(path) in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("repot",),
        ("report",),
        (*REPORT, "--tokens", "many"),
        (*REPORT, "--lairs", "3"),
        ("bench", "kernels"),
    ],
)
def test_usage_errors(args: tuple[str, ...]) -> None:
    result = call(*args)
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_help_and_version() -> None:
    assert call("--version").stdout.strip() == f"sp-passes {__version__}"
    for command in ("demo", "report", "verify", "bench passes"):
        result = call(*command.split(), "--help")
        assert result.exit_code == 0 and "--json" in result.stdout, command
