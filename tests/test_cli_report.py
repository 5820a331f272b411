# SPDX-License-Identifier: Apache-2.0
"""``sp-passes report`` and ``verify`` in this process: output, figures, wrong arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sp_passes.cli.main import app
from sp_passes.demo.full_size import reasons
from sp_passes.models.config import PACKAGED
from sp_passes.report import Decision
from sp_passes.version import __version__

GIB = 1 << 30


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


def test_tables() -> None:
    result = call("report", "--model", "kimi-k3", "--layers", "1", "--tp", "4", "--tokens", "5")
    assert result.exit_code == 0, result.output
    assert "replicated_mlp" in result.stdout and "1.015" in result.stdout
    assert "kimi-k3, 1 layers, TP4, 5 tokens (2 a rank)" in result.stdout
    assert "already sharded" in result.stdout


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


REPORT = ("report", "--model", "kimi-k3")
BAD = {
    "no pattern": ((*REPORT, "--pattern", "replicated_mpl"), "did you mean 'replicated_mlp'?"),
    "tp 7": ((*REPORT, "--tp", "7"), "96 linear attention heads are not divisible by tp_size 7"),
    "tp 0": ((*REPORT, "--tp", "0"), "--tp must be at least 1, got 0"),
    "no layers": ((*REPORT, "--layers", "0"), "--layers must be at least 1, got 0"),
    "negative tokens": ((*REPORT, "--tokens", "-3"), "--tokens must be at least 1"),
    "wrong path": (("report", "--model", "no/such.json"), "there is no file 'no/such.json'"),
    "verify tp 1": (("verify", "--tp", "1"), "nothing to shard on fewer than 2 ranks"),
    "verify tp 3": (("verify", "--tp", "3"), "8 linear attention heads are not divisible"),
    "verify tokens": (("verify", "--tokens", "0"), "--tokens must be at least 1"),
    "verify dtype": (("verify", "--dtype", "fp8"), "--dtype 'fp8' is unknown; use fp32 or bf16"),
    "verify layers": (("verify", "--layers", "0"), "--layers must be at least 1, got 0"),
    "verify model": (("verify", "--model", "kimi-k3"), "verify runs --model shrunk only"),
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
