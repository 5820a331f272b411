# SPDX-License-Identifier: Apache-2.0
"""``sp-passes vllm survey`` on a few of vLLM's models; the full set is a command."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import vllm_ranks

from sp_passes.errors import SPError

# In a process of its own: it makes a process group that stands for ranks which do not exist.
_RUN = "import sys; from sp_passes.cli.main import main; sys.argv[0] = 'sp-passes'; main()"


def setup_module() -> None:
    vllm_ranks.needs_vllm()


def command(*args: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", _RUN, "vllm", "survey", *args]
    return subprocess.run(line, capture_output=True, text=True, timeout=240, check=False)


def applied(report: dict[str, Any]) -> dict[str, str]:
    return {s["name"]: s["pattern"] for s in report["sites"] if s["decision"] == "applied"}


@pytest.mark.slow
def test_survey_of_three_cases() -> None:
    """Plain tensor parallelism leaves nothing; latent projections; shared experts under SP."""
    ran = command("--model", "llama", "--model", "deepseek_v2", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["tp_size"] == 2
    rows = {(row["model"], row["sequence_parallel"]): row for row in found["models"]}
    assert list(rows) == [("llama", False), ("deepseek_v2", False), ("deepseek_v2", True)]
    for row in rows.values():
        assert row["error"] == ""
        assert row["nodes"] > 100
        for route in ("graph", "regional"):
            report = row[route]
            assert all(s["reason"] or s["decision"] == "applied" for s in report["sites"])
            assert report["sites"] or report["nearest"]

    llama = rows["llama", False]["graph"]
    assert not applied(llama)
    assert {s["reason"].partition(":")[0] for s in llama["sites"]} == {"already sharded"}
    assert [s["name"] for s in llama["sites"]][:2] == [
        "model.layers.0.self_attn",
        "model.layers.0.mlp",
    ]

    latents = {f"model.layers.{i}.self_attn.fused_qkv_a_proj" for i in (0, 1)}
    plain, sharded = rows["deepseek_v2", False], rows["deepseek_v2", True]
    assert latents == {n for n, p in applied(plain["graph"]).items() if p == "latent_projection"}
    assert latents <= applied(sharded["graph"]).keys()
    # 672 x 256 in bfloat16, one half of two layers
    assert plain["graph"]["totals"]["by_pattern"]["latent_projection"] == 672 * 256 * 2
    assert plain["regional"]["sites"] == []
    experts = "model.layers.1.mlp.shared_experts"  # inside vLLM's opaque op
    assert applied(sharded["regional"]) == {experts: "replicated_mlp"}
    assert sharded["regional"]["totals"]["bytes_saved_per_rank"] == 3 * 256 * 256 * 2 // 2


def test_an_unknown_model_is_named() -> None:
    from sp_passes.vllm import survey, tiny

    with pytest.raises(SPError, match="unknown model 'llamma'; there are llama, llama4"):
        survey.cases(["llamma"])
    assert len({tiny.config(name)["architectures"][0] for name in tiny.MODELS}) >= 8
    assert [c.label for c in survey.cases(["qwen3_moe"])] == ["qwen3_moe", "qwen3_moe SP"]


def test_norms_of_vllms_ir_keep_rows_where_they_are() -> None:
    """They stand in the graphs that passes see, wrapped and not; both have rules."""
    import torch
    import vllm.ir.ops  # noqa: F401
    from torch import nn
    from torch.distributed.tensor import Shard

    import sp_passes

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            normed = torch.ops.vllm_ir.rms_norm(x, self.weight, 1e-6)
            out, _ = torch.ops.vllm_ir.fused_add_rms_norm(normed, x, self.weight, 1e-6)
            return out

    graph = sp_passes.trace(Norms(), torch.randn(4, 8))
    placed = sp_passes.check(graph, sp_passes.SPConfig(tp_size=2))
    assert [n.target.name() for n in graph.graph.nodes if "norm" in n.name] == [
        "vllm_ir::rms_norm",
        "vllm_ir::fused_add_rms_norm",
    ]
    assert placed["rms_norm"] == Shard(0)
    assert placed["fused_add_rms_norm"] == (Shard(0), Shard(0))
