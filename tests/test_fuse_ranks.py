# SPDX-License-Identifier: Apache-2.0
"""Fused graphs on real ranks, different tokens on each, against the graph as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import mlps
import pytest
import torch
import torch.nn.functional as F
from blocks import Block, Comm
from torch import Tensor

import sp_passes
from sp_passes import SPConfig
from sp_passes.graph.collectives import count, op_name

FUSIONS = ("ag_gemm", "gemm_rs")


def wanted_elsewhere(s: Any, x: Tensor) -> Any:
    g = s.gather(x)
    return s.scatter(F.linear(F.linear(g, s.q), s.o)), g.amax(0)


def with_biases(s: Any, x: Tensor) -> Tensor:
    g = s.gather(x)
    return F.silu(F.linear(g, s.q, s.q_bias)) * torch.addmm(s.q_bias, g, s.qt)


def transposed_weights(s: Any, x: Tensor) -> Tensor:
    return s.scatter(F.silu(s.gather(x) @ s.qt) @ s.ot)


def whole_weight(s: Any, x: Tensor) -> Tensor:
    return F.linear(s.gather(x), s.whole)


def batched(s: Any, x: Tensor) -> Tensor:
    flat = s.gather(x).view(-1, blocks.HIDDEN)
    mixed = F.silu(F.linear(flat, s.q))
    return s.scatter(F.linear(mixed, s.o).view(-1, 2, blocks.HIDDEN))


def cast_after_the_gather(s: Any, x: Tensor) -> Tensor:
    return F.linear(s.gather(x.double()).float(), s.q)


def hidden_and_raw(s: Any, x: Tensor) -> Any:
    raw = s.c.gather(x.view(torch.uint8))
    return F.linear(raw.view(x.dtype), s.q), raw.sum()


PROGRAMS: dict[str, tuple[str, Callable[..., Any] | None, dict[str, int]]] = {
    **{name: (name, None, {"ag_gemm": 1, "gemm_rs": 1}) for name in blocks.SPELLINGS},
    "reassembled": ("reassembled", None, {"ag_gemm": 1}),
    "wanted elsewhere": ("ours", wanted_elsewhere, {"ag_gemm": 1, "gemm_rs": 1}),
    "biases": ("ours", with_biases, {"ag_gemm": 1}),
    "transposed weights": ("torch", transposed_weights, {"ag_gemm": 1, "gemm_rs": 1}),
    "whole weight": ("ours", whole_weight, {"ag_gemm": 1}),
    "batched": ("ours", batched, {"ag_gemm": 1, "gemm_rs": 1}),
    "cast": ("ours", cast_after_the_gather, {"ag_gemm": 1}),
    "hidden and raw": ("ours", hidden_and_raw, {"ag_gemm": 1}),
}


def run_all(rank: Any) -> dict[str, Any]:
    """For each program: which ops were fused, and the largest relative error."""
    out: dict[str, Any] = {}
    comm, config = Comm.of(rank), SPConfig(group=rank.group, patterns=FUSIONS)
    for name, (spelling, fn, _) in PROGRAMS.items():
        module = Block(comm, spelling, fn)
        x = blocks.tokens(rank.rank, 3, *([2] if name == "batched" else []))
        gm = sp_passes.trace(module, x)
        before = count(gm.graph)
        with torch.no_grad():
            old = gm(x)
            report = sp_passes.rewrite(gm, config)
            new = gm(x)
        pairs = zip(*(v if isinstance(v, tuple) else (v,) for v in (old, new)), strict=True)
        ops = [op_name(n).rpartition(":")[2] for n in gm.graph.nodes]
        fused = {op: ops.count(op) for op in FUSIONS if op in ops}
        errors = [mlps.worst_error(b.double(), a.double()) for a, b in pairs]
        out[name] = (fused, max(errors), before == count(gm.graph), str(report))
        sp_passes.check(gm, config)
    return out


@pytest.mark.multirank
@pytest.mark.parametrize("world", [2, 4])
def test_fused_is_unfused(on_ranks: Callable[..., Any], world: int) -> None:
    PROGRAMS_HERE = PROGRAMS
    if 16 % world:
        pytest.skip("widths do not divide")
    for found in on_ranks(run_all, world):
        for name, (_, _, fused) in PROGRAMS_HERE.items():
            ops, error, same, text = found[name]
            assert ops == fused, (name, text)
            assert error < 1e-5, (name, error)
            assert same, (name, "a mere fusion adds and removes no collective")


def compiled(rank: Any) -> tuple[float, str]:
    """Through torch.compile, with every default pattern and torch's own collectives."""
    comm = Comm.of(rank)
    x = blocks.tokens(rank.rank)
    old = Block(comm, "torch")(x)
    model = sp_passes.compile(Block(comm, "torch"), SPConfig(group=rank.group))
    return mlps.worst_error(model(x), old), str(model.report)


@pytest.mark.multirank
def test_compiled(on_ranks: Callable[..., Any]) -> None:
    for error, text in on_ranks(compiled, 2):
        assert error < 1e-5, text
        assert "applied  ag_gemm" in text and "applied  gemm_rs" in text, text
