# SPDX-License-Identifier: Apache-2.0
"""``sp_passes.compile`` on real ranks: numbers, compile counts, caches, what is left unchanged."""

from __future__ import annotations

import copy
from typing import Any

import mlps
import pytest
import ranks
import torch
from ranks import Rank
from torch import Tensor, nn
from torch._dynamo.utils import counters

import sp_passes

pytestmark = pytest.mark.multirank
FP32 = 1e-5


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def compiled_error(at: Rank, name: str, rows: int) -> tuple[float, int, int, str]:
    spec = mlps.ZOO[name]
    module = mlps.MLP(spec)
    x = mlps.tokens(spec, at.rank, rows)
    wanted = mlps.exact(module, x)
    whole = sp_passes.resident_bytes(module)
    run = sp_passes.compile(module, mlps.config(group=at.group))
    error = mlps.worst_error(run(x), wanted)
    error = max(error, mlps.worst_error(run(x), wanted))
    return error, whole, sp_passes.resident_bytes(module), str(run.report)


COMPILED = [
    ("merged", 2, 5), ("gpt_oss", 2, 5), ("interleaved_view", 2, 3), ("both_biases_separate", 2, 4),
    ("situ", 4, 3), ("batched_biases", 2, 3), ("in_first_biases", 2, 3), ("residual", 2, 4),
    ("rows_inside", 2, 1), ("rows_inside", 4, 3), ("vector", 4, 1), ("gelu_tanh", 2, 2),
    ("cast", 2, 7), ("relu2_single", 2, 3), ("swapped", 2, 3),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name, world, rows", COMPILED)
def test_compiled_zoo(on_ranks: Any, name: str, world: int, rows: int) -> None:
    for error, whole, kept, report in on_ranks(compiled_error, world, name, rows):
        assert error < FP32, report
        assert "1 of 1 sites applied" in report
        assert kept < whole


def eager_error(at: Rank, names: list[str]) -> dict[str, float]:
    out = {}
    for name in names:
        spec = mlps.ZOO[name]
        module = mlps.MLP(spec)
        for rows in (1, 3):
            if (name, rows) == ("batched", 1):
                continue
            x = mlps.tokens(spec, at.rank, rows)
            wanted = mlps.exact(copy.deepcopy(module), x)
            gm = sp_passes.trace(module, x)
            report = sp_passes.rewrite(gm, mlps.config(group=at.group))
            assert len(report.applied) == 1, report
            with torch.no_grad():
                out[f"{name}, {rows} rows"] = mlps.worst_error(gm(x), wanted)
            sp_passes.unshard(module)
    return out


@pytest.mark.parametrize("world", [2, 4])
def test_traced_and_rewritten_zoo_runs_eagerly(on_ranks: Any, world: int) -> None:
    for errors in on_ranks(eager_error, world, list(mlps.ZOO)):
        assert len(errors) == 2 * len(mlps.ZOO) - 1
        assert {name: e for name, e in errors.items() if not e < FP32} == {}


def bfloat16_errors(at: Rank) -> tuple[float, float]:
    spec = mlps.with_(mlps.ZOO["gpt_oss"], hidden=64, width=256)
    module = mlps.MLP(spec, dtype=torch.bfloat16)
    x = mlps.tokens(spec, at.rank, 16, torch.bfloat16)
    wanted = mlps.exact(module, x, dtype=torch.float32)
    plain = torch.compile(copy.deepcopy(module))(x)
    run = sp_passes.compile(module, mlps.config(group=at.group))
    return mlps.rms_error(run(x), wanted), mlps.rms_error(plain, wanted)


def test_bfloat16_is_no_worse_than_replicated(on_ranks: Any) -> None:
    """RMS over both ranks; 2 % slack, as both errors are sums of random roundings."""
    found = on_ranks(bfloat16_errors, 2)
    sharded, replicated = (sum(e**2 for e in kind) ** 0.5 for kind in zip(*found, strict=True))
    assert sharded <= 1.02 * replicated


def dynamic_rows(at: Rank) -> tuple[list[float], list[int]]:
    counters.clear()
    spec = mlps.ZOO["gpt_oss"]
    module = mlps.MLP(spec)
    wide = copy.deepcopy(module)
    run = sp_passes.compile(module, mlps.config(group=at.group), dynamic=True)
    errors, counts = [], []
    for rows in (5, 2, 8, 33, 5, 7, 1, 0, 3, 1):
        x = mlps.tokens(spec, at.rank, rows)
        errors.append(mlps.worst_error(run(x), mlps.exact(wide, x)))
        counts.append(graphs())
    return errors, counts


def test_one_compilation_serves_every_token_count(on_ranks: Any) -> None:
    """Sizes 0 and 1 are torch's own special cases: one graph more each at most."""
    for errors, counts in on_ranks(dynamic_rows, 2):
        assert max(errors) < FP32
        assert counts[:6] == [1] * 6
        assert counts[-1] <= 3


def automatic_dynamic_rows(at: Rank) -> tuple[float, int]:
    """Without ``dynamic=``: a static graph, then one for all sizes; both keep the shards."""
    counters.clear()
    module = mlps.MLP(mlps.BASE)
    wide = copy.deepcopy(module)
    run = sp_passes.compile(module, mlps.config(group=at.group))
    worst = 0.0
    for rows in (4, 6, 9, 2, 1):
        x = mlps.tokens(mlps.BASE, at.rank, rows)
        worst = max(worst, mlps.worst_error(run(x), mlps.exact(wide, x)))
    return worst, graphs()


def test_automatic_dynamic_shapes(on_ranks: Any) -> None:
    for error, count in on_ranks(automatic_dynamic_rows, 2):
        assert error < FP32
        assert count <= 3


class Layers(nn.Module):
    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlps.MLP(mlps.BASE, seed) for seed in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def regional(at: Rank) -> tuple[float, int, list[str]]:
    counters.clear()
    model = Layers(3)
    wide = copy.deepcopy(model)
    config = mlps.config(group=at.group)
    for index, layer in enumerate(model.layers):
        model.layers[index] = sp_passes.compile(layer, config)
    worst = 0.0
    for rows in (4, 4):
        x = mlps.tokens(mlps.BASE, at.rank, rows)
        worst = max(worst, mlps.worst_error(model(x), mlps.exact(wide, x)))
    names = [d.name for layer in model.layers for d in layer.report.decisions]  # type: ignore
    return worst, graphs(), names


def test_layers_of_one_shape_share_one_compiled_graph(on_ranks: Any) -> None:
    for error, count, names in on_ranks(regional, 2):
        assert error < FP32
        assert count == 1
        assert len(names) == 3


def whole_model(at: Rank) -> tuple[float, list[str], int, int]:
    model = Layers(3)
    x = mlps.tokens(mlps.BASE, at.rank, 4)
    wanted, whole = mlps.exact(model, x), sp_passes.resident_bytes(model)
    run = sp_passes.compile(model, mlps.config(group=at.group))
    error = mlps.worst_error(run(x), wanted)
    saved = run.report.bytes_saved_per_rank
    return (
        error,
        [d.name for d in run.report.applied],
        saved,
        whole - sp_passes.resident_bytes(model),
    )


def test_report_of_a_whole_model_says_what_happened(on_ranks: Any) -> None:
    for error, names, saved, freed in on_ranks(whole_model, 4):
        assert error < FP32
        assert names == ["layers.0", "layers.1", "layers.2"]
        assert saved == freed


def two_of_everything(at: Rank) -> dict[str, float]:
    """Two models and two configs in one process, called in turn."""
    inductor = torch._inductor.config
    before = inductor.save_config_portable()
    dynamo = torch._dynamo.config.save_config_portable()
    small, large = mlps.MLP(mlps.BASE), mlps.MLP(mlps.with_(mlps.ZOO["situ"], width=48), 1)
    kept = mlps.MLP(mlps.BASE, 2)
    whole = sp_passes.resident_bytes(kept)
    modules = {"small": small, "large": large, "kept": kept}
    wide = copy.deepcopy(modules)
    config = mlps.config(group=at.group)
    runs = {
        "small": sp_passes.compile(small, config),
        "large": sp_passes.compile(large, config),
        "kept": sp_passes.compile(kept, mlps.config(group=at.group, release_weights=False)),
    }
    worst = dict.fromkeys(modules, 0.0)
    for rows in (3, 4, 3):
        for name, run in runs.items():
            x = mlps.tokens(mlps.BASE, at.rank, rows)
            error = mlps.worst_error(run(x), mlps.exact(wide[name], x))
            worst[name] = max(worst[name], error)
    assert inductor.save_config_portable() == before, "torch._inductor.config changed"
    assert torch._dynamo.config.save_config_portable() == dynamo, "torch._dynamo.config changed"
    assert inductor.post_grad_custom_post_pass is None
    assert sp_passes.resident_bytes(kept) >= whole, "release_weights=False released"
    plain = torch.compile(copy.deepcopy(wide["small"]))
    x = mlps.tokens(mlps.BASE, at.rank)
    worst["plain"] = mlps.worst_error(plain(x), mlps.exact(wide["small"], x))
    return worst


def test_two_models_and_two_configs_in_one_process(on_ranks: Any) -> None:
    for errors in on_ranks(two_of_everything, 2):
        assert max(errors.values()) < FP32


def replicated_tokens(at: Rank) -> tuple[float, str, bool]:
    module = mlps.MLP(mlps.BASE)
    x = mlps.tokens(mlps.BASE, 0)
    wanted = mlps.exact(module, x)
    run = sp_passes.compile(module, mlps.config(group=at.group), tokens="replicated")
    error = mlps.worst_error(run(x), wanted)
    return error, str(run.report), module.down_weight.untyped_storage().nbytes() > 0


def test_replicated_tokens_are_left_alone(on_ranks: Any) -> None:
    for error, report, whole in on_ranks(replicated_tokens, 2):
        assert error < FP32 and "tokens not sharded" in report and whole


def padded_rows(at: Rank) -> float:
    """3 tokens on 4 ranks: the last rank holds nothing but a NaN row."""
    module = mlps.MLP(mlps.ZOO["gpt_oss"])
    wide = copy.deepcopy(module)
    x = mlps.tokens(mlps.BASE, at.rank, 1)
    if at.rank == at.world - 1:
        x.fill_(float("nan"))
    y = sp_passes.compile(module, mlps.config(group=at.group))(x)
    return 0.0 if at.rank == at.world - 1 else mlps.worst_error(y, mlps.exact(wide, x))


def test_fewer_tokens_than_ranks(on_ranks: Any) -> None:
    assert max(on_ranks(padded_rows, 4)) < FP32


class Leaks(nn.Module):
    """With ``more`` a second graph uses a weight whole that the first one sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlps.MLP(mlps.BASE)

    def forward(self, x: Tensor, more: bool) -> Tensor:
        y = self.mlp(x)
        return y + self.mlp.down_weight.sum(1) if more else y


def leaks(at: Rank, order: list[bool]) -> list[float | str]:
    module = Leaks()
    wide = copy.deepcopy(module)
    run = sp_passes.compile(module, mlps.config(group=at.group))
    x = mlps.tokens(mlps.BASE, at.rank)
    out: list[float | str] = []
    for more in order:
        try:
            out.append(mlps.worst_error(run(x, more), mlps.exact(wide, x, more)))
        except sp_passes.SPError as err:
            out.append(str(err))
    return out


def test_a_later_graph_that_needs_the_weight_whole_is_refused(on_ranks: Any) -> None:
    for first, refused, again in on_ranks(leaks, 2, [False, True, False]):
        assert first < FP32 and again < FP32
        assert "was sharded and released by another compiled graph" in refused


def test_an_earlier_graph_that_needs_the_weight_whole(on_ranks: Any) -> None:
    """It was compiled when the weight was whole: right numbers or an error, no freed memory."""
    for found in ranks.run_fresh(leaks, 2, [True, False, True, False]):
        assert found[0] < FP32 and found[1] < FP32 and found[3] < FP32, found
        assert isinstance(found[2], str) or found[2] < FP32, found
