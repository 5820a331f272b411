# SPDX-License-Identifier: Apache-2.0
"""Collectives, whole programs, the wrong designs, and what the errors say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from test_placement_rules import place, result, show, state, trace
from torch import fx, nn
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import sp_passes.ops  # noqa: F401
from sp_passes.declare import declare_placement
from sp_passes.errors import PlacementError
from sp_passes.graph import params
from sp_passes.placement import check, input_states, propagate

TP, M, H, N = 4, 6, 8, 16
CONFIG = SimpleNamespace(tp_size=TP)
C10D = torch.ops._c10d_functional
OURS = torch.ops.sp_passes


def ag(x: torch.Tensor) -> torch.Tensor:
    return C10D.wait_tensor(C10D.all_gather_into_tensor(x, TP, "tp"))


def rs(x: torch.Tensor, how: str = "sum") -> torch.Tensor:
    return C10D.wait_tensor(C10D.reduce_scatter_tensor(x, how, TP, "tp"))


def ar(x: torch.Tensor) -> torch.Tensor:
    return C10D.wait_tensor(C10D.all_reduce(x, "sum", "tp"))


ROWS: tuple[int, ...] = (M, H)
LONG: tuple[int, ...] = (TP * M, H)
VLLM = torch.library.Library("vllm", "FRAGMENT")
if not hasattr(torch.ops.vllm, "all_gather"):
    VLLM.define("all_gather(Tensor tensor, int dim, int world_size, str group_name) -> Tensor")
    VLLM.define("reduce_scatter(Tensor tensor, int dim, int world_size, str group_name) -> Tensor")
    VLLM.define("all_reduce(Tensor tensor, str group_name) -> Tensor")
    VLLM.impl("all_gather", lambda x, d, n, g: torch.cat([x] * n, d), "CompositeExplicitAutograd")
    VLLM.impl(
        "reduce_scatter", lambda x, d, n, g: x.chunk(n, d)[0].clone(), "CompositeExplicitAutograd"
    )
    VLLM.impl("all_reduce", lambda x, g: x.clone(), "CompositeExplicitAutograd")

COLLECTIVES: list[tuple[str, Any, list[tuple[Any, str]], str]] = [
    ("gather tokens", ag, [(ROWS, "S0")], "R"),
    ("gather whole", ag, [(ROWS, "R")], "! .*every rank's copy"),
    ("gather features", ag, [(ROWS, "S1[32]")], "! .*dimension 0"),
    ("gather addends", ag, [(ROWS, "P")], "! .*not summed"),
    ("gather segments", ag, [((8,), "S0[16,16]")], "! .*rank by rank"),
    ("gather feature rows", ag, [((8, M), "S0[32]")], "R"),
    ("scatter addends", rs, [(LONG, "P")], "S0"),
    ("scatter whole", rs, [(LONG, "R")], r"! .*multiplies by tp_size \(4\)"),
    ("scatter rows", rs, [(LONG, "S0")], "! .*different rows"),
    ("scatter the mean of addends", lambda x: rs(x, "avg"), [(LONG, "P")], "! .*avg"),
    ("reduce addends", ar, [(ROWS, "P")], "R"),
    ("reduce whole", ar, [(ROWS, "R")], "! .*multiplies by tp_size"),
    ("other group", lambda x: C10D.all_gather_into_tensor(x, 2, "dp"), [(ROWS, "S0")],
     "! .*a group of 2 ranks"),
    ("all to all", lambda x: C10D.all_to_all_single(x, [M], [M], "tp"), [(ROWS, "S0")],
     "! .*which rows"),
    ("vllm gather", lambda x: torch.ops.vllm.all_gather(x, -1, TP, "tp"), [(ROWS, "S1[32]")], "R"),
    ("vllm gather rows", lambda x: torch.ops.vllm.all_gather(x, 0, TP, "tp"), [(ROWS, "S0")], "R"),
    ("vllm gather wrong", lambda x: torch.ops.vllm.all_gather(x, 1, TP, "tp"), [(ROWS, "S0")],
     r"! .*needed Shard\(1\)"),
    ("vllm scatter", lambda x: torch.ops.vllm.reduce_scatter(x, 0, TP, "tp"), [(LONG, "P")], "S0"),
    ("vllm reduce", lambda x: torch.ops.vllm.all_reduce(x, "tp"), [(ROWS, "P")], "R"),
    ("own gather", lambda x: OURS.all_gather(x, "", TP), [(ROWS, "S0")], "R"),
    ("own scatter", lambda x: OURS.reduce_scatter(x, "", TP), [(LONG, "P")], "S0"),
    ("local shard", lambda x: OURS.local_shard(x, "S1[4,4]", "", TP), [(ROWS, "R")], "S1[4,4]"),
    ("local shard of rows", lambda x: OURS.local_shard(x, "S1[4,4]", "", TP), [(ROWS, "S0")],
     "! .*whole"),
]  # fmt: skip


def up(x: Any, *w: Any, layout: str = f"S0[{N},{N}]", gathered: bool = False) -> Any:
    return OURS.ag_gemm(x, list(w), [None] * len(w), [layout] * len(w), None, "", TP,
                        gathered=gathered)  # fmt: skip


def down(x: Any, w: Any, bias: Any = None, layout: str = f"S1[{N}]") -> Any:
    return OURS.gemm_rs(x, w, bias, layout, None, "", TP)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, other = x.chunk(2, -1)
    return F.silu(gate) * other


W1, W2 = (2 * N, H), (H, N)
FUSED: list[tuple[str, Any, list[tuple[Any, str]], str]] = [
    ("up", up, [(ROWS, "S0"), (W1, "R")], "S1[16,16]"),
    ("up and gathered", lambda x, w: up(x, w, gathered=True), [(ROWS, "S0"), (W1, "R")],
     "S1[16,16] R"),
    ("up of whole", up, [(ROWS, "R"), (W1, "R")], "! "),
    ("up of part", up, [(ROWS, "S0"), (W1, "S0[32]")], "! .*whole logical weight"),
    ("mlp", lambda x, a, b: down(swiglu(up(x, a)[0]), b),
     [(ROWS, "S0"), (W1, "R"), (W2, "R")], "S0"),
    ("mlp, gate and up apart",
     lambda x, a, b, c: down(torch.mul(*up(x, a, b, layout=f"S0[{N}]")), c),
     [(ROWS, "S0"), ((N, H), "R"), ((N, H), "R"), (W2, "R")], "S0"),
    ("mlp, interleaved",
     lambda x, a, b: down((h := up(x, a, layout=f"S0[{2 * N}]")[0])[:, ::2] * h[:, 1::2], b),
     [(ROWS, "S0"), (W1, "R"), (W2, "R")], "S0"),
    ("merged as one segment", lambda x, a, b: down(swiglu(up(x, a, layout=f"S0[{2 * N}]")[0]), b),
     [(ROWS, "S0"), (W1, "R"), (W2, "R")], "! .*through a sharded segment"),
    ("segment order", lambda x, a, b: down(up(x, a, layout="S0[4,12]")[0], b, layout="S1[12,4]"),
     [(ROWS, "S0"), ((N, H), "R"), (W2, "R")], r"! .*\[4, 12\].*\[12, 4\]"),
    ("down of whole", down, [((LONG[0], N // TP), "R"), (W2, "R")], r"! .*Shard\(1\)"),
    ("down bias", down, [((LONG[0], N // TP), "S1[16]"), (W2, "R"), ((H,), "R")], "S0"),
    ("down bias part", down, [((LONG[0], N // TP), "S1[16]"), (W2, "R"), ((H,), "S0[8]")],
     "! .*added once"),
    ("norm over the part",
     lambda x, a, b: down(F.rms_norm(up(x, a, layout=f"S0[{N}]")[0], (4,)), b),
     [(ROWS, "S0"), ((N, H), "R"), (W2, "R")], "! "),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "inputs", "expected"), [pytest.param(*r[1:], id=r[0]) for r in COLLECTIVES + FUSED]
)
def test_collective(fn: Any, inputs: list[tuple[Any, str]], expected: str) -> None:
    """Strict: a failed rule is the error, not what the collective would give anyway."""
    tensors = [t if isinstance(t, torch.Tensor) else torch.randn(*t) for t, _ in inputs]
    gm = trace(fn, *tensors)
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    placements: Any = {n: state(s) for n, (_, s) in zip(names, inputs, strict=True)}
    output = next(n for n in gm.graph.nodes if n.op == "output")
    try:
        check(gm, CONFIG, placements)
    except PlacementError as error:
        assert expected.startswith("!"), error
        assert re.match(expected[2:], str(error), re.S), error
        return
    states = propagate(gm.graph, TP, input_states(gm, placements))
    assert " ".join(show(states[n]) for n in output.all_input_nodes) == expected


def test_exchange_of_dimensions() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(8, 2)
    y = graph.call_function(torch.ops._dtensor.shard_dim_alltoall.default, (x, 1, 0, "tp"))
    y.meta["val"] = torch.empty(2, 8)
    for before, after in (("S1[8]", "S0"), ("S0", "! .*gathers that"), ("S1[4,4]", "! ")):
        found = show(propagate(graph, TP, {x: state(before)})[y])
        assert re.match(after, found), found


def test_collectives_have_a_result_after_an_unknown_value() -> None:
    for fn, after in ((ag, "R"), (rs, "S0"), (ar, "R")):
        found = result(lambda x, fn=fn: fn(x.flip(0)), [((TP * M, H), "S0")])
        assert show(found) == after
        assert show(result(fn, [((TP * M, H), "S1[32]")])) == after


# --- the wrong designs ------------------------------------------------------------------


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=TP, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


class WrongMLP(nn.Module):
    """Both projections cut by output features, their feature slices gathered, no reduction."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = group
        self.up = nn.Parameter(torch.randn(N // TP, H))
        self.down = nn.Parameter(torch.randn(H // TP, N))

    def gather(self, h: torch.Tensor) -> torch.Tensor:
        if self.group is not None:
            return fc.all_gather_tensor(h, gather_dim=1, group=self.group)
        return torch.cat(ag(h).chunk(TP, 0), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.gather(F.linear(x, self.up)))
        return self.gather(F.linear(h, self.down))


def traced(module: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    """Parameters first, then the input, named as in the module."""
    params = dict(module.named_parameters())

    def fn(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        named = dict(zip(params, values, strict=True))
        return torch.func.functional_call(module, named, (x,))

    gm = trace(fn, x, *params.values())
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, name in zip(nodes, ["x", *params], strict=True):
        node.target = node.name = name.replace(".", "_")
    return gm


CUT = {"up": Shard(0), "down": Shard(0)}


@pytest.mark.parametrize("functional", [False, True])
def test_wrong_design_of_sharded_tokens(functional: bool, group: Any) -> None:
    gm = traced(WrongMLP(group if functional else None), torch.randn(M, H))
    with pytest.raises(PlacementError, match="all-gather the tokens first") as error:
        check(gm, CONFIG, CUT)
    assert "Shard(0)" in str(error.value) and "mm" in str(error.value)


@pytest.mark.parametrize("functional", [False, True])
def test_gathered_feature_slices_are_refused(functional: bool, group: Any) -> None:
    """The same collective on values whose features are sharded is refused by itself."""
    gm = traced(WrongMLP(group if functional else None), torch.randn(M, H))
    with pytest.raises(PlacementError, match="stacks the ranks' parts along dimension 0"):
        check(gm, CONFIG, CUT, tokens="replicated")


def test_wrong_design_is_unknown_when_lenient() -> None:
    gm = traced(WrongMLP(), torch.randn(M, H))
    states = propagate(gm.graph, TP, input_states(gm, CUT))
    product = next(n for n in gm.graph.nodes if "mm" in n.name)
    assert show(states[product]).startswith("! mm")


def test_right_design_passes() -> None:
    def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return x + rs(F.linear(F.silu(F.linear(ag(x), up)), down))

    gm = trace(mlp, torch.randn(M, H), torch.randn(N // TP, H), torch.randn(H, N // TP))
    x, w1, w2 = (n.name for n in gm.graph.nodes if n.op == "placeholder")
    found = check(gm, CONFIG, {w1: Shard(0), w2: Shard(1)})
    assert found[x] == Shard(0)
    kinds = [found[n] for n in gm.graph.nodes if n.target is torch.ops.aten.mm.default]
    assert kinds == [Shard(1), Partial()]
    assert found["output"] == (Shard(0),)


# --- messages ---------------------------------------------------------------------------


def test_error_names_node_found_needed_and_line() -> None:
    gm = trace(lambda x, w: F.linear(x, w), torch.randn(M, H), torch.randn(N, H))
    node = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.mm.default)
    node.meta["stack_trace"] = (
        '  File "model.py", line 3, in outer\n    y = self.mlp(x)\n'
        '  File "mlp.py", line 12, in forward\n    return F.linear(x, self.up)\n'
    )
    x, w = (n.name for n in gm.graph.nodes if n.op == "placeholder")
    with pytest.raises(PlacementError) as error:
        check(gm, CONFIG, {w: Shard(0)})
    text = str(error.value)
    assert text.startswith(f"{node.name} (aten::mm.default): found {x} is Shard(0)")
    assert "needed" in text
    assert text.endswith("at mlp.py:12, in forward: return F.linear(x, self.up)")


def test_partial_output() -> None:
    gm = trace(lambda x: x.sum(0), torch.randn(M, H))
    with pytest.raises(PlacementError, match="leaves the graph without a reduction"):
        check(gm, CONFIG)


def test_stray_names_list_the_inputs() -> None:
    gm = trace(lambda x, w: x @ w, torch.randn(M, H), torch.randn(H, H))
    with pytest.raises(PlacementError, match=r"names weight, .*inputs are arg0_1, arg1_1"):
        check(gm, CONFIG, {"weight": Shard(0)})


# --- inputs -----------------------------------------------------------------------------


def attributes() -> fx.GraphModule:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(H, H, bias=False)
            self.cut = nn.Linear(H, H, bias=False)
            declare_placement(self.cut.weight, Shard(0))

    root = Block()
    graph = fx.Graph(root)
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(M, H)
    n = graph.placeholder("n")
    n.meta["val"] = 3
    scale = graph.placeholder("scale")
    scale.meta["val"] = torch.empty(())
    weight = graph.placeholder("w")
    weight.meta["val"] = torch.empty(H)
    params.mark(weight, "norm.weight")
    given = graph.placeholder("given")
    given.meta.update(val=torch.empty(M, H), sp_placement=Shard(-1))
    for name in ("proj.weight", "cut.weight"):
        graph.get_attr(name).meta["val"] = torch.empty(H, H)
    graph.output(x)
    return fx.GraphModule(root, graph)


def test_default_inputs() -> None:
    states = {n.name: show(s) for n, s in input_states(attributes()).items()}
    assert states == {
        "x": "S0",
        "n": "R",
        "scale": "R",
        "w": "R",
        "given": "S1[]",
        "proj_weight": "R",
        "cut_weight": "S0[]",
    }
    assert show(next(iter(input_states(attributes(), tokens="replicated").values()))) == "R"


@pytest.mark.parametrize(
    ("name", "node"),
    [("proj.weight", "proj_weight"), ("proj_weight", "proj_weight"), ("norm.weight", "w")],
)
def test_placements_by_fully_qualified_name(name: str, node: str) -> None:
    found = check(attributes(), CONFIG, {name: Shard(0), "x": Replicate()})
    assert found[node] == Shard(0)
    assert found["x"] == Replicate()


def test_unknown_tokens_word() -> None:
    with pytest.raises(PlacementError, match="'sharded' or 'replicated'"):
        input_states(attributes(), tokens="rows")


def test_states_of_every_node() -> None:
    gm = trace(lambda x: x.relu(), torch.randn(M, H))
    assert set(place(gm, ["S0"])) == set(gm.graph.nodes)
