# SPDX-License-Identifier: Apache-2.0
"""The benches of whole models, on a CPU: what they judge, draw and count; toy sizes, 2 ranks."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import sp_passes
from sp_passes.backend import _without_keywords
from sp_passes.bench import models, soak, soak_calls, stack, steps
from sp_passes.bench.devices import Place
from sp_passes.bench.model_check import EXPECTED, LAUNCHERS, DecodeMLPs, Errors
from sp_passes.bench.short_context import Layers, first_kda, first_mla
from sp_passes.cli.main import app
from sp_passes.models import load_config
from sp_passes.models.layers import TP, Made
from sp_passes.models.ops import situ
from sp_passes.ops import kernels, mlp
from sp_passes.ranks import RankError

BF16 = torch.bfloat16
ALONE = Place(0, 1, None, torch.device("cpu"))


# --- where sharding stops paying --------------------------------------------------------


def test_crossover_lies_between_the_counts_around_it() -> None:
    whole = {64: 100.0, 256: 100.0, 1024: 100.0}
    found = steps.crossover(whole, {64: 50.0, 256: 50.0, 1024: 200.0})
    assert found == pytest.approx(512.0)  # as much slower at 1,024 as faster at 256


@pytest.mark.parametrize(("times", "expected"), [((50.0, 60.0), None), ((200.0, 120.0), 0.0)])
def test_no_crossover(times: tuple[float, float], expected: float | None) -> None:
    assert (
        steps.crossover({8: 100.0, 64: 100.0}, dict(zip((8, 64), times, strict=True))) == expected
    )


# --- a context of one token -------------------------------------------------------------


def test_first_kda_is_kda_of_one_token() -> None:
    torch.manual_seed(0)
    heads, dim = 3, 8
    qkv, beta = torch.randn(4, 3 * heads * dim), torch.randn(4, heads)
    conv, decay = torch.randn(3 * heads * dim, 4), torch.randn(4, heads * dim)
    a_log, dt_bias = torch.randn(heads), torch.randn(heads * dim)
    core = torch.ops.sp_passes_models.kda_attention
    each = [
        core(qkv[t : t + 1], decay[t : t + 1], beta[t : t + 1], conv, a_log, dt_bias, -5.0)
        for t in range(4)
    ]
    torch.testing.assert_close(first_kda(qkv, beta, conv), torch.cat(each))


def test_first_mla_is_mla_of_one_token() -> None:
    torch.manual_seed(0)
    nope, rope, v, heads = 8, 4, 6, 3
    q, kv, k_pe = (torch.randn(4, n) for n in (heads * (nope + rope), heads * (nope + v), rope))
    core = torch.ops.sp_passes_models.mla_attention
    each = [core(q[t : t + 1], kv[t : t + 1], k_pe[t : t + 1], nope, v) for t in range(4)]
    torch.testing.assert_close(first_mla(kv, nope, v), torch.cat(each))


# --- what is judged ---------------------------------------------------------------------


def row(**changes: Any) -> dict[str, Any]:
    errors = {"eager": Errors(1e-4, 1.0), "replayed": Errors(1e-4, 1.0)}
    good = {"dtype": "bf16", "own": Errors(1e-4, 1.0), "errors": errors, "wrong": 0}
    return {**good, **changes}


BAD: dict[str, dict[str, Any]] = {
    "far": {"errors": {"eager": Errors(1.0, 1.0), "replayed": Errors(1e-4, 1.0)}},
    "nan": {"errors": {"eager": Errors(1e-4, 1.0), "replayed": Errors(math.nan, 1.0)}},
    "never replayed": {"errors": {"eager": Errors(1e-4, 1.0), "replayed": Errors()}},
    "a replay differs": {"wrong": 1},
    "kernel not used": {"never_called": ["triton ag_gemm"]},
    "float32 as far as bf16": {"dtype": "fp32"},
}


def test_good_rows_pass() -> None:
    assert models.judged([row(), row()])["ok"]


@pytest.mark.parametrize("name", BAD)
def test_one_bad_rank_fails(name: str) -> None:
    good = row(**{key: value for key, value in BAD[name].items() if key == "dtype"})
    assert not models.judged([good, row(**BAD[name])])["ok"]


# --- random calls -----------------------------------------------------------------------


def drawn(op: str) -> soak_calls.Drawn:
    number = next(n for n in range(500) if soak_calls.draw(ALONE, 1, n, True).op == op)
    return soak_calls.draw(ALONE, 1, number, True)


def test_draws_repeat_and_differ() -> None:
    calls = [soak_calls.draw(ALONE, 3, number, True) for number in range(40)]
    assert calls == [soak_calls.draw(ALONE, 3, number, True) for number in range(40)]
    assert len({(c.op, c.rows, c.n, c.k, c.dtype) for c in calls}) > 30


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_gather"])
def test_a_wrong_kernel_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = drawn(op)
    good = soak_calls.run_one(ALONE, call, 1)
    assert max(good) < soak_calls.BOUNDS[call.dtype]
    inner = kernels._TABLE[op, call.kernel]

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out = inner.run(*args, **kwargs)
        return [part * 1.1 for part in out] if isinstance(out, list) else out * 1.1

    changed = kernels.Kernel(inner.name, op, wrong, inner.why_not)
    monkeypatch.setitem(kernels._TABLE, (op, call.kernel), changed)
    failures: list[str] = []
    soak._count({}, failures, call, soak_calls.run_one(ALONE, call, 1), 1)
    assert len(failures) == 1 and f"--seed 1 --first {call.number}" in failures[0]


@pytest.mark.multirank
def test_soak_on_ranks() -> None:
    """Every op is among the first calls of this seed: on a slow machine there are no more."""
    found = CliRunner().invoke(app, ["bench", "soak", "--minutes", "0.01", "--seed", "3", "--json"])
    result = json.loads(found.stdout)
    assert found.exit_code == 0 and result["failures"] == []
    assert {name.split()[0] for name in result["counts"]} == set(soak_calls.OPS)


@pytest.mark.multirank
def test_a_call_that_hangs_is_named() -> None:
    heard: list[str] = []
    with pytest.raises(RankError):
        soak.run(2, 0.1, seed=5, small=True, limit=1e-4, notify=lambda r, text: heard.append(text))
    assert any(text.startswith("HANGS") and "--seed 5 --first" in text for text in heard)


# --- models and layers ------------------------------------------------------------------


def test_an_mlp_with_a_residual_is_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor adds a residual inside the product; ``gemm_rs`` has it then, the one op not."""
    monkeypatch.setattr(mlp, "unmeasured", lambda device, tp_size: None)
    full, tokens = load_config("kimi-k3"), torch.empty(8, 7168, dtype=BF16, device="meta")
    module = DecodeMLPs(full, 1, Made(BF16, "meta"))
    monkeypatch.setattr(module, "forward", lambda x: _added(module, x))
    graph = sp_passes.trace(module, tokens)
    config = sp_passes.SPConfig(tp_size=2, token_range=(1, 128), policy="memory")
    report = sp_passes.rewrite(graph, config)
    assert [d.pattern for d in report.applied] == ["replicated_mlp", "ag_mlp_rs"], str(report)
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert calls[-2:] == ["sp_passes.ag_mlp_rs.default", "aten.add.Tensor"]


def _added(module: DecodeMLPs, x: torch.Tensor) -> torch.Tensor:
    inner = module.mlps[0]
    gate, up = inner.gate_up_proj(module.norms[0](x)).chunk(2, dim=-1)
    hidden = situ(gate, up, inner.beta, inner.linear_beta)
    return torch.addmm(x, hidden, inner.down_proj.weight.t())


@pytest.mark.multirank
def test_the_pair_on_ranks() -> None:
    found = CliRunner().invoke(app, ["bench", "stack", "--toy", "--layers", "0", "--json"])
    pair = json.loads(found.stdout)["pair"]
    assert found.exit_code == 0 and [row["tokens"] for row in pair["rows"]] == [8, 64]
    for row in pair["rows"]:
        assert set(row["us"]) >= {"replicated", "unfused"} and row["best"] in row["errors"]
        assert max(row["errors"].values()) < 0.02


@pytest.mark.parametrize("claimed", [30, 31])
def test_the_stack_holds_reports_to_what_was_freed(claimed: int) -> None:
    after = {"parameters": 70, "peak": 8 << 30, "outside": 3 << 30}
    one = {"after": after, "report_saves": claimed, "sites": 1, "crossover": None}
    before = {"parameters": 100, "peak": 10 << 30, "outside": 2 << 30}
    found = {"before": before, "variants": {"auto": one}, "rows": [{"tokens": 64}]}
    one["error_against_replicated"] = 0.01
    assert stack.agrees(found) == (claimed == 30)
    (text,) = stack.summaries(found)
    assert ("equal" in text) == (claimed == 30)
    assert "steps of up to 64 tokens 1.000 GiB more for a KV cache (outside PyTorch +1.000)" in text


def test_layers_of_the_stack_are_rewritten() -> None:
    layers = Layers(load_config("kimi-k3").with_layers(4), TP(2), Made(BF16, "meta"))
    graph = sp_passes.trace(layers, torch.empty(8, 7168, dtype=BF16, device="meta"))
    report = sp_passes.rewrite(graph, sp_passes.SPConfig(tp_size=2, kernels="unfused"))
    wide, hidden, latent = 33792, 7168, 3584
    mlps = 3 * hidden * (wide + 3 * 6144) * 2  # bytes: a dense MLP, and shared experts of 3 layers
    latents = 3 * 2 * hidden * latent * 2 + 3 * 896 * hidden * 4  # and the routers, in float32
    heads = 3 * 128 * hidden * 2 + 2112 * hidden * 2  # f_a of 3 layers, q_a and kv_a of one
    assert report.bytes_saved_per_rank == (mlps + latents + heads) // 2
    named = [n for n in graph.graph.nodes if "kernel" in n.kwargs]
    assert named
    _without_keywords(graph.graph)  # Inductor takes a keyword ``kernel`` for its own
    for node in named:
        where = [a.name for a in node.target._schema.arguments].index("kernel")
        assert not node.kwargs and node.args[where] == "unfused"


def test_full_width_needs_gpus() -> None:
    found = CliRunner().invoke(app, ["bench", "stack", "--ranks", "2"])
    assert found.exit_code == 2 and "need 2 GPUs" in found.stderr


def test_what_is_counted_is_what_the_kernels_call() -> None:
    """Else a run on a GPU counts no call of a kernel that ran."""
    for kernel, names in EXPECTED.items():
        for name in names:
            owner, launcher = LAUNCHERS[name]
            run = kernels._TABLE[name.removeprefix(f"{kernel} "), kernel].run
            assert launcher in run.__code__.co_names and run.__globals__[launcher] is getattr(
                owner, launcher
            )
