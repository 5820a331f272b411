# SPDX-License-Identifier: Apache-2.0
"""Every door to the pass: stock torch.compile, the named backend, options, warm caches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlps
import pytest
import ranks
import torch
from ranks import Rank
from test_compile_ranks import leaks
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.tensor.placement_types import Replicate, Shard

import sp_passes
from sp_passes import SequenceParallelPass, SPConfig, SPError, _private
from sp_passes.backend import Input
from sp_passes.ops import symmetric

FP32 = 1e-5


def setup(at: Rank, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    module = mlps.MLP(mlps.BASE, seed)
    x = mlps.tokens(mlps.BASE, at.rank)
    return module, x, mlps.exact(module, x)


def released(module: nn.Module) -> bool:
    return module.down_weight.untyped_storage().nbytes() == 0  # type: ignore[union-attr,operator]


# --- stock routes ---------------------------------------------------------------------------


def stock_pass(at: Rank) -> tuple[float, bool, list[str]]:
    module, x, wanted = setup(at)
    the_pass = SequenceParallelPass(mlps.config(group=at.group))
    with torch._inductor.config.patch(post_grad_custom_post_pass=the_pass), torch.no_grad():
        run = torch.compile(module)
        error = max(mlps.worst_error(run(x), wanted) for _ in range(2))
    return error, released(module), [str(r) for r in the_pass.reports]


def named_backend(at: Rank) -> tuple[float, bool]:
    module, x, wanted = setup(at)
    config = mlps.config(group=at.group)
    run = torch.compile(module, backend="sp_passes", options={"config": config})
    with torch.no_grad():
        error = max(mlps.worst_error(run(x), wanted) for _ in range(2))
    return error, released(module)


def named_backend_without_config(at: Rank) -> tuple[float, bool]:
    """The default process group is the tensor-parallel group."""
    module, x, wanted = setup(at)
    with torch.inference_mode():
        error = mlps.worst_error(torch.compile(module, backend="sp_passes")(x), wanted)
    return error, released(module)


def named_backend_with_all_options(at: Rank) -> tuple[float, bool]:
    module, x, wanted = setup(at)
    options = {
        "config": mlps.config(group=at.group),
        "tokens": "sharded",
        "placements": {"down_weight": Shard(1)},
        "max_autotune": False,
    }
    with torch.no_grad():
        error = mlps.worst_error(
            torch.compile(module, backend="sp_passes", options=options)(x), wanted
        )
    return error, not released(module)


@pytest.mark.multirank
@pytest.mark.parametrize("job", [named_backend, named_backend_with_all_options])
def test_named_backend(on_ranks: Any, job: Any) -> None:
    for error, as_wanted in on_ranks(job, 2):
        assert error < FP32 and as_wanted


@pytest.mark.multirank
def test_named_backend_takes_the_default_group(on_ranks: Any) -> None:
    for error, sharded in on_ranks(named_backend_without_config, ranks.POOL_SIZE):
        assert error < FP32 and sharded


@pytest.mark.multirank
def test_stock_post_grad_pass(on_ranks: Any) -> None:
    for error, sharded, reports in on_ranks(stock_pass, 2):
        assert error < FP32 and sharded
        assert len(reports) == 1 and "1 of 1 sites applied" in reports[0]


# --- options pass through -------------------------------------------------------------------


class Counting(CustomGraphPass):
    """A user's own pass."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        ours = [n for n in graph.nodes if "sp_passes" in str(n.target)]
        self.seen.append(len(ours))

    def uuid(self) -> Any:
        return "counting"


def own_pass(at: Rank, by: str) -> tuple[float, list[int], bool]:
    module, x, wanted = setup(at)
    mine = Counting()
    given = {"post_grad_custom_post_pass": mine}
    options, patch = (given, {}) if by == "options" else ({}, given)
    run = sp_passes.compile(module, mlps.config(group=at.group), options=options)
    with torch._inductor.config.patch({"force_disable_caches": True, **patch}):
        error = mlps.worst_error(run(x), wanted)
    return error, mine.seen, released(module)


@pytest.mark.multirank
@pytest.mark.parametrize("by", ["options", "config"])
def test_a_users_own_pass_still_runs(on_ranks: Any, by: str) -> None:
    for error, seen, sharded in on_ranks(own_pass, 2, by):
        assert error < FP32 and sharded
        assert len(seen) == 1


KWARGS: list[dict[str, Any]] = [
    {"mode": "max-autotune-no-cudagraphs"},
    {"mode": "default", "dynamic": False},
    {"options": {"max_autotune": False, "triton.cudagraphs": False}},
    {"fullgraph": True, "dynamic": True},
]


def with_kwargs(at: Rank, kwargs: dict[str, Any]) -> tuple[float, bool]:
    module, x, wanted = setup(at)
    run = sp_passes.compile(module, mlps.config(group=at.group), **kwargs)
    return mlps.worst_error(run(x), wanted), released(module)


@pytest.mark.multirank
@pytest.mark.parametrize("kwargs", KWARGS, ids=str)
def test_torch_compile_arguments(on_ranks: Any, kwargs: dict[str, Any]) -> None:
    for error, sharded in on_ranks(with_kwargs, 2, kwargs):
        assert error < FP32 and sharded


def placements_by_name(at: Rank) -> tuple[float, str, float, str]:
    module, x, wanted = setup(at)
    config = mlps.config(group=at.group)
    whole = sp_passes.compile(module, config, placements={"x": Replicate()})
    first = mlps.worst_error(whole(x), wanted)
    other, _, _ = setup(at)
    part = sp_passes.compile(other, config, placements={"down_weight": Shard(1)})
    second = mlps.worst_error(part(x), wanted)
    return first, str(whole.report), second, str(part.report)


@pytest.mark.multirank
def test_placements_by_name(on_ranks: Any) -> None:
    for first, whole, second, part in on_ranks(placements_by_name, 2):
        assert first < FP32 and "tokens not sharded" in whole
        assert second < FP32 and "already sharded: down_weight" in part


# --- caches ---------------------------------------------------------------------------------


def cached(at: Rank, kept: bool, odd: int) -> dict[str, Any]:
    """One process of a serving job; ``odd`` is the rank whose weight differs."""
    counters.clear()
    module, x, wanted = setup(at)
    if at.rank == odd:
        module.down_weight.view(-1)[0] += 1  # type: ignore[union-attr,operator]
    runs: list[int] = []
    from sp_passes import passes

    original = passes.run
    passes.run = lambda *args: runs.append(1) or original(*args)  # type: ignore[func-returns-value]
    config = mlps.config(group=at.group, release_weights=not kept, max_tokens=640)
    run = sp_passes.compile(module, config)
    out: dict[str, Any] = {}
    try:
        out["error"] = mlps.worst_error(run(x), wanted)
        out["from_cache"], out["report"] = run.report.from_cache, str(run.report)
        out["names"] = [w for d in run.report.applied for w in d.weights]
    except SPError as err:
        out["raised"] = str(err)
    out["released"], out["passes"] = released(module), len(runs)
    out["hits"] = int(counters["inductor"]["fxgraph_cache_hit"])
    out["room"] = symmetric._most_tokens.get(at.group.group_name)
    return out


@pytest.mark.multirank
@pytest.mark.slow
def test_a_warm_start_runs_no_pass_but_shards_proves_and_reports(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def start(kept: bool = False, odd: int = -1) -> list[dict[str, Any]]:
        return ranks.run_fresh(cached, 2, kept, odd, env=env)

    for out in start():
        assert out["error"] < FP32 and out["released"]
        assert not out["from_cache"] or not out["passes"]
    for out in start():
        assert out["error"] < FP32 and out["released"], "a warm start must still shard"
        assert out["passes"] == 0 and out["from_cache"]
        assert out["room"] == 640, "a warm start must still size the workspaces"
        assert "1 of 1 sites applied" in out["report"] and "cached" in out["report"]
        assert out["names"] == ["gate_up_weight", "down_weight"]
    for out in start(odd=1):
        assert out["passes"] == 0 and not out["released"]
        assert "down_weight (rank" in out["raised"], "a warm start must still prove"
    for out in start(kept=True):
        assert out["error"] < FP32 and not out["released"], "a stale artifact was used"


def uuid(**changes: Any) -> Any:
    given: dict[str, Any] = {"tokens": "sharded", "inputs": None, "after": None, **changes}
    config = SPConfig(**{"tp_size": 4, **given.pop("options", {})})
    return SequenceParallelPass(config, given["tokens"], given["inputs"], given["after"]).uuid()


INPUT = Input("x", False, None)


@pytest.mark.parametrize(
    "change",
    [
        {"options": {"tp_size": 8}},
        {"options": {"token_range": (1, 64)}},
        {"options": {"patterns": []}},
        {"options": {"release_weights": False}},
        {"options": {"strict": True}},
        {"options": {"max_tokens": 8}},
        {"tokens": "replicated"},
        {"inputs": [INPUT]},
        {"after": Counting()},
    ],
    ids=lambda change: " ".join(change.get("options", change)),
)
def test_uuid_tells_what_decides_the_rewrite(change: dict[str, Any]) -> None:
    assert uuid(**change) != uuid()


def test_uuid_tells_placements_and_ranks_and_no_names() -> None:
    one = [Input("x", False, None), Input("a.weight", True, None)]
    other = [Input("x", False, None), Input("b.weight", True, None)]
    cut = [Input("x", False, None), Input("a.weight", True, Shard(0))]
    dim = [Input("x", False, None), Input("a.weight", True, Shard(1))]
    assert uuid(inputs=one) == uuid(inputs=other), "layers of one shape share an artifact"
    assert uuid(inputs=one) != uuid(inputs=cut) != uuid(inputs=dim)
    assert uuid(options={"tp_rank": 3}) != uuid(), "what a slice means may depend on the rank"


# --- refusals -------------------------------------------------------------------------------


def test_gradients(solo: Any) -> None:
    run = sp_passes.compile(mlps.MLP(mlps.BASE), mlps.config(group=solo))
    x = mlps.tokens(mlps.BASE, 0).requires_grad_()
    with pytest.raises(SPError, match=r"requires grad.*inference"):
        run(x)
    with torch.no_grad():
        assert not run(x).requires_grad
    trainable = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    assert not sp_passes.compile(trainable, mlps.config(group=solo))(
        torch.randn(2, 4)
    ).requires_grad
    with pytest.raises(Exception, match="inference"):
        torch.compile(copy.deepcopy(trainable), backend="sp_passes")(torch.randn(2, 4))


WRONG: dict[str, tuple[Any, list[str]]] = {
    "no group": (
        lambda m, g: sp_passes.compile(m, SPConfig(tp_size=4)),
        ["4 ranks", "SPConfig(group=...)", "trace and rewrite"],
    ),
    "no module": (lambda m, g: sp_passes.compile(m.forward, g), ["expected Module"]),
    "no config": (lambda m, g: sp_passes.compile(m, {"tp_size": 4}), ["expected SPConfig", "dict"]),
    "unknown tokens": (
        lambda m, g: sp_passes.compile(m, g, tokens="split"),
        ["tokens='split'", "'sharded' or 'replicated'"],
    ),
    "its own backend": (
        lambda m, g: sp_passes.compile(m, g, backend="inductor"),
        ["own backend"],
    ),
    "unknown argument": (
        lambda m, g: sp_passes.compile(m, g, placements={"y": Shard(0)}),
        ["'y'", "x"],
    ),
    "no placement": (
        lambda m, g: sp_passes.compile(m, g, placements={"x": 0}),
        ["expected Placement", "int"],
    ),
    "a pass without a config": (
        lambda m, g: SequenceParallelPass({"tp_size": 4}),  # type: ignore[arg-type]
        ["needs an SPConfig", "dict"],
    ),
    "a pass with unknown tokens": (
        lambda m, g: SequenceParallelPass(g, tokens="all"),
        ["tokens='all'"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(solo: Any, name: str) -> None:
    call, words = WRONG[name]
    with pytest.raises(SPError) as error:
        call(mlps.MLP(mlps.BASE), mlps.config(group=solo))
    for word in words:
        assert word in str(error.value)


def test_the_named_backend_needs_a_group() -> None:
    run = torch.compile(mlps.MLP(mlps.BASE), backend="sp_passes")
    with torch.no_grad(), pytest.raises(Exception, match="needs a tensor-parallel group"):
        run(mlps.tokens(mlps.BASE, 0))


def test_one_rank_runs_and_says_so(solo: Any) -> None:
    module = mlps.MLP(mlps.BASE)
    x = mlps.tokens(mlps.BASE, 0)
    wanted = mlps.exact(module, x)
    run = sp_passes.compile(module, mlps.config(group=solo))
    assert run.report is None
    assert mlps.worst_error(run(x), wanted) < FP32
    assert run.report is not None and "tp_size 1" in str(run.report)
    assert not released(module)
    assert run.down_weight is module.down_weight, "attributes are the module's own"


def test_reset_reaches_captured_graphs(solo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's groups wait at their end for graphs that captured them; Inductor's backend resets."""
    reset: list[str] = []
    monkeypatch.setattr(_private, "reset_graph_trees", lambda: reset.append("trees"))
    sp_passes.compile(nn.ReLU(), mlps.config(group=solo))(torch.zeros(2))
    torch.compiler.reset()
    assert reset


def test_a_module_without_linears(solo: Any) -> None:
    run = sp_passes.compile(nn.ReLU(), mlps.config(group=solo))
    assert run(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]
    assert "no site found" in str(run.report)


def test_strict_reaches_the_caller_as_it_is(solo: Any) -> None:
    run = sp_passes.compile(mlps.MLP(mlps.BASE), mlps.config(group=solo, strict=True))
    with pytest.raises(SPError, match="strict: replicated_mlp"):
        run(mlps.tokens(mlps.BASE, 0))


@pytest.mark.multirank
@pytest.mark.slow
def test_warm_artifacts_that_use_one_weight_differently(tmp_path: Path) -> None:
    """One cached graph shards a weight, another reads it whole: each was made alone."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ranks.run_fresh(leaks, 2, [False], env=env)
    ranks.run_fresh(leaks, 2, [True], env=env)
    for found in ranks.run_fresh(leaks, 2, [True, False, True], env=env):
        assert all(isinstance(e, str) or e < FP32 for e in found), found
