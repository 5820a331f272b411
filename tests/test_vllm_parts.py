# SPDX-License-Identifier: Apache-2.0
"""Parts of the vLLM glue by themselves: names of weights, spellings, reports. No engine."""

from __future__ import annotations

import operator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.fx.experimental.symbolic_shapes import ShapeEnv

pytest.importorskip("vllm")

from sp_passes import SPConfig, SPError, declare_placement, declared_placement, residents, store
from sp_passes.placement import State
from sp_passes.report import Decision, Report
from sp_passes.vllm import _private, graph_pass, names, reports, spelling
from sp_passes.vllm.config import Options
from sp_passes.vllm.session import Session, report_key

# --- which weight a graph input is ------------------------------------------------------


class Linear(nn.Module):
    def __init__(self, out: int, width: int, logical: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out, width))
        self.bias = nn.Parameter(torch.zeros(out))
        self.output_size, self.input_size = logical


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Linear(8, 4, (8, 4)), Linear(8, 4, (8, 4))])
        shared = self.layers[1]
        self.runner = lambda: shared  # reached through a closure, as vLLM's shared experts are
        self.do_not_compile = False


def _input(value: torch.Tensor, *stack: str, kind: type | None = None) -> fx.Node:
    """A placeholder that is used in the code of the modules ``stack``, outermost first."""
    graph = fx.Graph()
    node = graph.placeholder("arg0_1")
    node.meta["val"] = value
    user = graph.call_function(torch.ops.aten.relu.default, (node,))
    user.meta["nn_module_stack"] = {str(at): (source, kind) for at, source in enumerate(stack)}
    return node


@pytest.mark.parametrize(
    ("stack", "shape", "wanted"),
    [
        (["L['self'].layers.1"], (8, 4), "layers.1.weight"),
        (["L['self']", "L['self'].layers.0"], (8,), "layers.0.bias"),
        (["L['self'].runner.__closure__[0].cell_contents"], (8, 4), "layers.1.weight"),
        (["L['self']._modules['layers']._modules['0']"], (8, 4), "layers.0.weight"),
        (["G['x']._forward_context.no_compile_layers['moe'].inner"], (8, 4), "layers.0.weight"),
        (["G['x']._forward_context.no_compile_layers['gone'].inner"], (8, 4), None),
        (["L['self'].layers.1"], (4, 8), None),
        (["L['self'].gone"], (8, 4), None),
        ([], (8, 4), None),
    ],
)
def test_a_graph_input_is_found_by_its_users_module(
    stack: list[str], shape: tuple[int, ...], wanted: str | None
) -> None:
    model = Model()
    wrapped = nn.ModuleDict({"model": model})
    layer: Any = nn.Module()
    layer.inner = model.layers[0]
    found = names.Names(wrapped, layers={"moe": layer}).of(_input(torch.zeros(shape), *stack))
    assert (found and found.fqn) == (wanted and f"model.{wanted}")


def test_a_draft_models_layer_is_not_taken_for_the_models_own() -> None:
    """Its source is the same, ``L['self'].layers.0``, and so is the shape of its weight."""

    class DraftLinear(Linear):
        pass

    found = names.Names(nn.ModuleDict({"model": Model()}))
    value, source = torch.zeros(8, 4), "L['self'].layers.0"
    assert found.of(_input(value, source, kind=Linear)) is not None
    assert found.of(_input(value, source, kind=DraftLinear)) is None


def test_two_weights_alike_in_one_module_are_not_guessed() -> None:
    model = Linear(8, 4, (8, 4))
    model.other = nn.Parameter(torch.zeros(8, 4))
    assert names.Names(model).of(_input(torch.zeros(8, 4), "L['self']")) is None


@pytest.mark.parametrize(
    ("held", "logical", "placement"),
    [
        ((8, 4), (8, 4), None),
        ((4, 4), (8, 4), Shard(0)),
        ((8, 2), (8, 4), Shard(1)),
    ],
)
def test_a_smaller_weight_is_this_ranks_part(held: Any, logical: Any, placement: Any) -> None:
    layer = Linear(*held, logical)
    names.declare(layer)
    assert declared_placement(layer.weight) == placement
    assert declared_placement(layer.bias) == (placement if placement == Shard(0) else None)


def test_latents_with_a_sharded_gate_are_whole_in_part() -> None:
    class KimiK3MergedQKVGateLinear(Linear):
        output_partition_sizes = (4, 2, 2)

    layer = KimiK3MergedQKVGateLinear(8, 4, (16, 4))
    names.declare(layer)
    declared: Any = declared_placement(layer.weight)
    assert declared not in (None, Shard(0), Replicate())
    assert (declared.segments, declared.kept) == ((6, 2), (1,))


# --- the CPU build's all-reduce ---------------------------------------------------------


def _shm_graph(handle: int) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(
        torch.ops.higher_order.auto_functionalized,
        (_private.shm_all_reduce(),),
        {"handle": handle, "data": x},
    )
    out = graph.call_function(operator.getitem, (call, 1))
    x.meta["val"] = out.meta["val"] = torch.zeros(2, 3)
    call.meta["val"] = (None, torch.zeros(2, 3))
    graph.output((out,))
    return graph


def test_shared_memory_all_reduce_is_respelled_and_back() -> None:
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    graph = _shm_graph(handle=7)
    before = str(graph)
    assert spelling.to_common(graph, 8, SPConfig(tp_size=2)) == 0  # another group's
    assert str(graph) == before
    assert spelling.to_common(graph, 7, SPConfig(tp_size=2)) == 1
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [
        torch.ops.sp_passes.all_reduce.default
    ]
    spelling.to_vendor(graph, 7)
    targets = [n.target for n in graph.nodes if n.op == "call_function"]
    assert targets == [torch.ops.higher_order.auto_functionalized, operator.getitem]
    call = next(n for n in graph.nodes if n.op == "call_function")
    assert call.kwargs["handle"] == 7 and call.args == (_private.shm_all_reduce(),)


# --- reports ----------------------------------------------------------------------------


def _site(name: str, applied: bool, reason: str = "") -> Decision:
    return Decision("latent_projection", name, applied, reason, (f"{name}.weight",), 64)


def _session() -> Session:
    return Session(SimpleNamespace(), SimpleNamespace(), Options())


def test_pieces_that_decide_alike_keep_their_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, Report] = {}
    monkeypatch.setattr(store, "save", lambda report: kept.__setitem__(report.plan, report))
    monkeypatch.setattr(store, "find", kept.get)
    monkeypatch.setattr(Session, "model_name", "Model")
    session = _session()
    weights = [torch.zeros(1), torch.zeros(2)]
    for at in range(2):
        session.keep(Report(2, [_site(f"layers.{at}", True)], plan="ab"), [f"layers.{at}.weight"])
    assert len(kept) == 2
    for at, weight in enumerate(weights):
        session.note_start("ab", [weight], [f"layers.{at}.weight"])
    own = [weight for _, weight in session.started]
    assert own == [(f"weight of shape [{n}]",) for n in (1, 2)]
    assert len(reports.of_worker(session).applied) == 2


def test_a_graph_is_not_run_for_a_layer_that_is_excluded() -> None:
    session = Session(SimpleNamespace(), SimpleNamespace(), Options(exclude=["layers.1.*"]))
    weight = torch.zeros(3)
    residents.remember_name(weight, "layers.1.weight")
    with pytest.raises(SPError, match=r"layers\.1\.weight is excluded, but vLLM runs the graph"):
        session.note_start("ab", [weight], ["layers.0.weight"])
    declared = declare_placement(torch.zeros(4), Shard(0))
    with pytest.raises(SPError, match=r"is sharded by its layer, but vLLM runs the graph"):
        session.note_start("ab", [declared], ["layers.0.weight"])


def test_pieces_without_names_share_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, Report] = {}
    monkeypatch.setattr(store, "save", lambda report: kept.__setitem__(report.plan, report))
    session = _session()
    for at in range(2):
        session.keep(Report(2, [_site(f"layers.{at}", False, "why")], plan="ab"), [])
    assert [d.name for d in kept[report_key("ab", [])].decisions] == ["layers.0", "layers.1"]
    assert len(session.reports["graph"]) == 1


def test_a_cached_graph_without_its_report_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "find", lambda plan: None)
    monkeypatch.setattr(Session, "model_name", "Model")
    monkeypatch.setattr(Session, "tp_size", 2)
    monkeypatch.setattr(reports, "released_bytes", lambda weight: weight.nbytes // 2)
    session = _session()
    weight = torch.zeros(6)
    residents.remember_name(weight, "a.weight")
    model = SimpleNamespace(named_parameters=lambda: [("a.weight", weight)])
    monkeypatch.setattr(Session, "model", model)
    session.note_start("ab", [weight], ["compiled.weight"])
    found = reports.of_worker(session)
    assert found.from_cache and found.bytes_saved_per_rank == 12
    assert [(d.name, "is gone" in d.detail) for d in found.applied] == [("a.weight", True)]
    reports.enforce(found)


def test_a_report_is_read_from_the_folder_that_its_graph_was_loaded_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM sets Inductor's folder for each model that it loads, a draft model's last."""
    folder = {"plan": Report(2, [_site("a", True)], plan="plan", from_cache=True)}
    monkeypatch.setattr(store, "find", lambda plan: folder.get("plan"))
    monkeypatch.setattr(Session, "model_name", "Model")
    session = _session()
    session.note_start("ab", [torch.zeros(6)], ["a.weight"])
    folder.clear()
    assert [d.pattern for d in reports.of_worker(session).applied] == ["latent_projection"]


def test_the_model_is_not_the_wrapper_for_its_cuda_graphs() -> None:
    model = Model()
    wrapper = SimpleNamespace(unwrap=lambda: model)
    for held in (model, wrapper):
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=held))
        session = Session(worker, SimpleNamespace(), Options())
        assert session.model is model and session.model_name == "Model"


def test_nothing_applied_names_the_nearest_site_and_the_condition() -> None:
    report = Report(2, [_site("a.gate", False, "indivisible: 3 rows")])
    assert reports.nothing_applied(report) == (
        "no site was rewritten; the nearest is latent_projection at a.gate, skipped: "
        "indivisible: 3 rows"
    )
    assert "no linear" in reports.nothing_applied(Report(2, nearest="no linear layer"))


def test_strict_is_about_weights_that_could_be_sharded() -> None:
    reports.enforce(Report(2, [_site("a", True), _site("b", False, "already sharded: b")]))
    reports.enforce(Report(2, [_site("a", True), _site("a", False, "overlap: ...")]))
    alone = _site("b", False, "a lone projection: name it in include to shard it")
    reports.enforce(Report(2, [_site("a", True), alone]))
    with pytest.raises(SPError, match=r"strict: latent_projection at b is skipped: indivisible"):
        reports.enforce(Report(2, [_site("a", True), _site("b", False, "indivisible: 3 rows")]))
    with pytest.raises(SPError, match="strict: no site was found: no linear layer"):
        reports.enforce(Report(2, nearest="no linear layer"))


@pytest.mark.parametrize(
    ("rows", "placement", "refused"),
    [("dynamic", Shard(0), True), ("dynamic", Replicate(), False), (6, Shard(0), False)],
    ids=["own rows", "all rows", "heads in front"],
)
def test_a_piece_that_hands_on_own_rows_is_refused(
    rows: Any, placement: Any, refused: bool
) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    value = mode.from_tensor(torch.empty(6, 4), static_shapes=rows != "dynamic")
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.relu.default, (x,))
    x.meta["val"] = y.meta["val"] = value
    graph.output((y,))
    within = pytest.raises(SPError, match="one rank's rows") if refused else nullcontext()
    with within:
        graph_pass._refuse_own_rows(graph, SPConfig(tp_size=2), {x: State(placement)})
