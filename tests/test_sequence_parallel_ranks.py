# SPDX-License-Identifier: Apache-2.0
"""Plain tensor-parallel models with a sharded residual, on real ranks, against one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dense
import mlps
import pytest
import torch
import torch.nn.functional as F
from blocks import Comm, part, weight
from torch import Tensor, nn

import sp_passes
from sp_passes import SPConfig
from sp_passes.graph.collectives import count
from sp_passes.placement import declare_op, row_wise

PATTERNS = ("sequence_parallel", "ag_gemm", "gemm_rs")
MODELS: dict[str, tuple[dense.Shape, int, int]] = {
    "llama": (dense.Shape(layers=3), 8, 6),
    "llama of vLLM's ops": (dense.Shape(reduce="vllm"), 8, 4),
    "llama, 7 tokens": (dense.Shape(), 7, 4),
    "qwen": (dense.Shape(qwen=True), 8, 4),
    "moe": (dense.Shape(moe=True), 8, 4),
    "moe, 9 tokens": (dense.Shape(moe=True), 9, 4),
    "layer norm": (dense.Shape(norm="layer"), 8, 4),
    "fused norm": (dense.Shape(norm="fused"), 8, 4),
    "vendor norm": (dense.Shape(norm="vendor v1"), 8, 4),
    "vendor norm, 7 tokens": (dense.Shape(norm="vendor v2"), 7, 4),
    "vLLM's norm": (dense.Shape(norm="vllm v1"), 8, 4),
    "vLLM's norm, 9 tokens": (dense.Shape(norm="vllm v2"), 9, 4),
}


def run_all(rank: Any) -> dict[str, Any]:
    """Per model: errors against one rank and against the graph as it was, and collectives."""
    declare_op("sp_test_norm::add_rms_norm", row_wise())
    dense.register_vendor_norms()
    out: dict[str, Any] = {}
    config = SPConfig(group=rank.group, patterns=PATTERNS)
    for name, (shape, rows, _) in MODELS.items():
        if shape.norm.startswith("vllm") and not dense.has_vllm():
            continue
        x = dense.rows(rows)
        whole = dense.Dense(Comm(1), shape)(x)
        gm = sp_passes.trace(dense.Dense(Comm.of(rank), shape), x)
        with torch.no_grad():
            before = gm(x)
            report = sp_passes.rewrite(gm, config, tokens="replicated")
            after = gm(x)
        if not shape.moe:  # which experts are whose, its slices do not say
            sp_passes.check(gm, config, tokens="replicated")
        errors = (mlps.worst_error(after, whole), mlps.worst_error(after, before))
        out[name] = (errors, count(gm.graph), str(report))
    return out


@pytest.mark.multirank
@pytest.mark.parametrize("world", [2, 4])
def test_numbers(on_ranks: Callable[..., Any], world: int) -> None:
    for found in on_ranks(run_all, world):
        assert len(found) == len(MODELS) - (0 if dense.has_vllm() else 2)
        for name, (errors, left, text) in found.items():
            sums = MODELS[name][2]
            assert max(errors) < 1e-5, (name, errors)
            wanted = {"reduce_scatter": sums, "all_gather": sums}
            assert left == wanted, (name, left, text)


class TwoMLPs(nn.Module):
    """Two residual MLPs with norms, spelled out and by kernels: a model that compiles fast."""

    def __init__(self, c: Comm) -> None:
        super().__init__()
        self.c = c
        for i in range(2):
            setattr(self, f"up{i}", part(c, weight((32, dense.H), 2 * i), 0))
            setattr(self, f"down{i}", part(c, weight((dense.H, 32), 2 * i + 1), 1))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            y = F.linear(F.silu(F.linear(x, getattr(self, f"up{i}"))), getattr(self, f"down{i}"))
            y = self.c.torch_reduce(y) if self.c.size > 1 else y
            if i:
                scale = torch.ones(dense.H, dtype=x.dtype)
                y, x = dense.vendor_norm("vendor", y, x, scale)
                x = dense.vendor_norm("vendor", x + y, None, scale)[0]
            else:
                x = x + y
                x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return x


def compiled(rank: Any) -> tuple[list[float], str]:
    """Errors for numbers of tokens that one dynamic graph serves; 9 and 11 are padded."""
    dense.register_vendor_norms()
    config = SPConfig(group=rank.group, patterns=PATTERNS)
    model = sp_passes.compile(TwoMLPs(Comm.of(rank)), config, tokens="replicated", dynamic=True)
    errors = []
    for rows in (9, 8, 11):
        x = dense.rows(rows)
        errors.append(mlps.worst_error(model(x), mlps.exact(TwoMLPs(Comm(1)), x)))
    return errors, str(model.report)


@pytest.mark.multirank
def test_one_graph_for_any_number_of_tokens(on_ranks: Callable[..., Any]) -> None:
    for errors, text in on_ranks(compiled, 2):
        assert max(errors) < 1e-5, errors
        assert "applied  sequence_parallel" in text and "skipped" not in text, text
