# SPDX-License-Identifier: Apache-2.0
"""Random programs on simulated ranks: what propagate says of a value is what the ranks hold.

The traced graph runs once for each rank on its local inputs, and once as the logical
program on whole inputs, its literal sizes and slice bounds made global. Wherever a value
has a placement, the ranks' values put together by it must be the logical one.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_placement_rules import state, trace
from torch import fx

from sp_passes.placement import State, propagate

aten = torch.ops.aten
SEEN: Counter[str] = Counter()


# --- putting the ranks' values together, and taking them apart ---------------------------


def segments_of(s: State, local: int, tp: int) -> tuple[int, ...]:
    return s.segments or (local * tp,)


def assemble(s: State, locals_: list[torch.Tensor]) -> torch.Tensor:
    if s.is_partial:
        return torch.stack(locals_).sum(0)
    if s.dim is None:
        for other in locals_[1:]:
            torch.testing.assert_close(other, locals_[0], equal_nan=True)
        return locals_[0]
    tp = len(locals_)
    sizes = [n // tp for n in segments_of(s, locals_[0].shape[s.dim], tp)]
    parts = [x.split(sizes, s.dim) for x in locals_]
    return torch.cat([p[i] for i in range(len(sizes)) for p in parts], s.dim)


def distribute(s: State, local: tuple[int, ...], tp: int) -> list[torch.Tensor]:
    if s.is_replicate:
        return [torch.randn(local, dtype=torch.float64)] * tp
    return [torch.randn(local, dtype=torch.float64) for _ in range(tp)]


# --- the logical program ----------------------------------------------------------------


def global_edge(segments: tuple[int, ...], tp: int, local: int) -> int:
    """A local position along a sharded dimension, whole segments plus an offset, made global."""
    start = total = 0
    for n in segments:
        if start + n // tp > local:
            break
        start, total = start + n // tp, total + n
    return total + (local - start)


def logical_args(node: fx.Node, states: dict[fx.Node, Any], tp: int) -> tuple[Any, ...]:
    """The node's arguments with sizes of the whole value for those of a rank's."""
    args = list(node.args)
    target = node.target
    if target in (aten.view.default, aten._unsafe_view.default, aten.expand.default):
        shape, found = list(node.meta["val"].shape), states[node]
        if found.dim is not None:
            local = shape[found.dim]
            shape[found.dim] = sum(segments_of(found, local, tp))
        args[1] = shape
        return tuple(args)
    source = args[0] if args and isinstance(args[0], fx.Node) else None
    found = states.get(source) if source is not None else None
    if not isinstance(found, State) or found.dim is None:
        return tuple(args)
    size = source.meta["val"].shape[found.dim]  # type: ignore[union-attr]
    segments = segments_of(found, size, tp)
    if target is aten.slice.Tensor and (args[1] if len(args) > 1 else 0) == found.dim:
        step = args[4] if len(args) > 4 else 1
        end = args[3] if len(args) > 3 else sys.maxsize
        args[2] = global_edge(segments, tp, args[2])
        if end < size:
            args[3] = global_edge(segments, tp, end + (-end % step if step > 1 else 0))
        else:
            args[3] = sys.maxsize
    if target is aten.split.Tensor and (args[2] if len(args) > 2 else 0) == found.dim:
        pieces = [piece.shape[found.dim] for piece in node.meta["val"]]
        edges = [global_edge(segments, tp, sum(pieces[:i])) for i in range(len(pieces))]
        sizes = [b - a for a, b in zip(edges, [*edges[1:], sum(segments)], strict=True)]
        args[1] = sizes
    return tuple(args)


def run_rank(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> dict[str, Any]:
    values: dict[str, Any] = {}

    class Record(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n.name] = super().run_node(n)
            return values[n.name]

    Record(gm).run(*inputs)
    return values


def compare(gm: fx.GraphModule, given_states: list[State], tp: int) -> None:
    """Every value with a placement equals the logical program's."""
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    states = propagate(gm.graph, tp, dict(zip(nodes, given_states, strict=True)))
    shapes = [tuple(n.meta["val"].shape) for n in nodes]
    parts = [distribute(s, shape, tp) for s, shape in zip(given_states, shapes, strict=True)]
    ranks = [run_rank(gm, [p[r] for p in parts]) for r in range(tp)]
    logical: dict[fx.Node, Any] = {}
    for node, part in zip(nodes, parts, strict=True):
        logical[node] = assemble(states[node], part)
    for node in gm.graph.nodes:
        found = states[node]
        if node.op != "call_function":
            continue
        flat = found if isinstance(found, tuple) else (found,)
        if any(s.placement is None for s in flat):
            SEEN["refused"] += 1
            continue
        if any(n not in logical for n in node.all_input_nodes):
            continue
        args = fx.node.map_arg(logical_args(node, states, tp), logical.__getitem__)
        target = node.target
        if target is aten.split.Tensor and isinstance(args[1], list):
            target = aten.split_with_sizes.default
        if target is aten.view.default:
            target = aten.reshape.default
        logical[node] = whole = target(*args, **node.kwargs)
        mine = [r[node.name] for r in ranks]
        if isinstance(found, tuple):
            pairs = [(s, [m[i] for m in mine], whole[i]) for i, s in enumerate(found)]
        else:
            pairs = [(found, mine, whole)]
        for s, locals_, expected in pairs:
            text = f"{node.format_node()} is {s}\n{gm.graph}"
            got = assemble(s, locals_)
            assert got.shape == expected.shape, text
            torch.testing.assert_close(got, expected, equal_nan=True, msg=lambda m, t=text: m + t)
            SEEN[type(s.placement).__name__] += 1


# --- random programs --------------------------------------------------------------------


def matrices(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A product without vectors, whose traces reshape in place."""
    if min(x.ndim, y.ndim) < 2:
        raise ValueError("a vector")
    return torch.matmul(x, y)


Step = Callable[[list[torch.Tensor]], torch.Tensor]
UNARY = [
    torch.neg, torch.tanh, torch.relu, torch.nn.functional.silu, lambda x: x * 2, lambda x: x + 1,
    lambda x: x.clone(), lambda x: x.t() if x.ndim == 2 else x.transpose(0, -1),
    lambda x: x.unsqueeze(0), lambda x: x.unsqueeze(-1), lambda x: x.squeeze(),
]  # fmt: skip
BINARY = [torch.add, torch.sub, torch.mul, matrices, matrices, lambda x, y: matrices(x, y.t()),
          lambda x, y: x / (y.abs() + 1), lambda x, y: torch.where(x > 0, x, y)]  # fmt: skip
ALONG = [
    lambda x, d: x.sum(d), lambda x, d: x.sum(d, keepdim=True), lambda x, d: x.mean(d, True),
    lambda x, d: x.amax(d), lambda x, d: x.softmax(d), lambda x, d: x.cumsum(d),
    lambda x, d: x.flip(d), lambda x, d: x.select(d, 0), lambda x, d: x.roll(1, d),
    lambda x, d: x.topk(1, d)[0], lambda x, d: x.sort(d)[0], lambda x, d: x.movedim(d, 0),
    lambda x, d: x.unbind(d)[-1],
]  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[State], int, list[Step]]:
    tp = draw(st.sampled_from([2, 3]))
    k = draw(st.sampled_from([4, 8]))
    shapes = [(4, k), (4, k), (k, k), (k,)]
    kinds = [["R", "P", "S0", "S1"], ["R", "P", "S0", "S1"], ["R", "S0", "S1"], ["R", "S0"]]
    states = []
    for shape, options in zip(shapes, kinds, strict=True):
        text = draw(st.sampled_from(options))
        if text.startswith("S"):
            size = shape[int(text[1])]
            cuts = [(), (size,), (size // 2, size // 2), (size // 4, size - size // 4)]
            cut = draw(st.sampled_from(cuts))
            if cut:
                text += f"[{','.join(str(n * tp) for n in cut)}]"
        states.append(state(text))
    values = [torch.randn(s, dtype=torch.float64) for s in shapes]
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 7))):
        step = draw_step(draw, values)
        try:
            value = step(values)
        except (RuntimeError, IndexError, ValueError):
            continue
        if value.numel() and value.numel() <= 4096 and value.ndim <= 4:
            values.append(value)
            steps.append(step)
    return shapes, states, tp, steps


def draw_step(draw: st.DrawFn, values: list[torch.Tensor]) -> Step:
    at = draw(st.integers(0, len(values) - 1))
    shape = values[at].shape
    kind = draw(
        st.sampled_from(["unary", "binary", "binary", "along", "slice", "view", "split", "cat"])
    )
    if kind == "unary":
        fn: Any = draw(st.sampled_from(UNARY))
        return lambda v: fn(v[at])
    if kind == "binary":
        fn, other = draw(st.sampled_from(BINARY)), draw(st.integers(0, len(values) - 1))
        return lambda v: fn(v[at], v[other])
    dim = draw(st.integers(0, max(len(shape) - 1, 0)))
    size = shape[dim] if shape else 1
    if kind == "along":
        fn = draw(st.sampled_from(ALONG))
        return lambda v: fn(v[at], dim)
    if kind == "cat":
        other = draw(st.integers(0, len(values) - 1))
        return lambda v: torch.cat([v[at], v[other]], dim)
    if kind == "split":
        parts, which = draw(st.sampled_from([2, 4])), draw(st.integers(0, 1))
        return lambda v: v[at].chunk(parts, dim)[which]
    if kind == "slice":
        start, step = draw(st.integers(0, size)), draw(st.sampled_from([1, 1, 2]))
        stop = draw(st.sampled_from([size, size, draw(st.integers(0, size))]))
        return lambda v: aten.slice(v[at], dim, start, stop, step)
    target = draw(st.sampled_from(views_of(tuple(shape))))
    return lambda v: v[at].reshape(target)


def views_of(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Merges of neighbours and splits of one dimension by 2."""
    found: list[tuple[int, ...]] = [shape]
    for d in range(len(shape) - 1):
        found.append((*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :]))
    for d, n in enumerate(shape):
        if n % 2 == 0:
            found.append((*shape[:d], 2, n // 2, *shape[d + 1 :]))
            found.append((*shape[:d], n // 2, 2, *shape[d + 1 :]))
    return found


def build(shapes: list[tuple[int, ...]], steps: list[Step]) -> fx.GraphModule:
    def fn(*inputs: torch.Tensor) -> torch.Tensor:
        values = list(inputs)
        for step in steps:
            values.append(step(values))
        return values[-1]

    return trace(fn, *[torch.randn(s, dtype=torch.float64) for s in shapes])


@settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(programs())
def test_placements_are_true(program: Any) -> None:
    shapes, states, tp, steps = program
    if steps:
        compare(build(shapes, steps), states, tp)


def test_random_programs_reach_every_placement() -> None:
    """Runs after the property: had it refused everything, it would have shown nothing."""
    assert all(SEEN[kind] > 50 for kind in ("Shard", "Partial", "Replicate", "refused")), SEEN


def test_a_false_claim_is_found() -> None:
    """The comparison itself fails on a value whose claimed placement is not the real one."""
    gm = build([(4, 8)], [lambda v: v[0].flip(1)])
    nodes = list(gm.graph.nodes)
    real = [torch.randn(4, 8, dtype=torch.float64) for _ in range(2)]
    whole = assemble(state("S1"), real).flip(1)
    mine = [run_rank(gm, [r])[nodes[1].name] for r in real]
    assert not torch.equal(assemble(state("S1"), mine), whole)
    assert torch.equal(assemble(state("S0"), mine), assemble(state("S0"), real).flip(1))
