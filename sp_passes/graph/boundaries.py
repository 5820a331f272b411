# SPDX-License-Identifier: Apache-2.0
"""What crosses a pipeline boundary in a graph, and what cuts a whole tensor into rows.

sends      sp_passes.pp_send(x, dst, tag, group), _c10d_functional.isend [+ wait_tensor]
receives   sp_passes.pp_recv(size, …), _c10d_functional.irecv(buffer, …) [+ wait_tensor]
inputs     sp_passes.stage_input(x, name, …): a graph input that arrives in rows
outputs    sp_passes.stage_output(x, name, …): a graph output that leaves in rows
cuts       sp_passes.token_shard(x), vllm.sequence_parallel_chunk_impl(x), and rows
           [rank * m, (rank + 1) * m) of a received tensor by slice, chunk or narrow,
           after padding to tp_size * m rows; these become token_shard
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..config import SPConfig
from ..errors import SPError
from ..ops.p2p import local_rows
from ..placement.sizes import equal, static, to_the_end
from .collectives import op_name, read_collective
from .values import args, copy_origin, fake_mode, is_tensor, set_value, shape, value

aten = torch.ops.aten
ops = torch.ops.sp_passes
_WAIT = "_c10d_functional::wait_tensor"


@dataclass(frozen=True)
class Boundary:
    """One tensor at a pipeline boundary.

    Attributes:
        node: the call.
        kind: ``send``, ``recv``, ``input`` or ``output``.
        x: what is sent, returned, or comes in as rows; None for a receive.
        result: the usable value: the ``wait_tensor`` behind an asynchronous call.
        name: for the report.
        peer, tag, group: of a send or receive.
        checked: both sides compare shapes before the data travels.
        is_whole: the whole tensor crosses, as far as the graph says.
    """

    node: fx.Node
    kind: str
    x: fx.Node | None
    result: fx.Node
    name: str
    peer: int = -1
    tag: int = -1
    group: str = ""
    checked: bool = True
    is_whole: bool = True


@dataclass(frozen=True)
class _Row:
    """Positions of the arguments of a send or receive."""

    kind: str
    x: int | None
    peer: int
    checked: bool


_P2P: dict[str, _Row] = {
    "sp_passes::pp_send": _Row("send", 0, 1, True),
    "sp_passes::pp_recv": _Row("recv", None, 3, True),
    "_c10d_functional::isend": _Row("send", 0, 1, False),
    "_c10d_functional::irecv": _Row("recv", None, 1, False),
}
_NAMED = {"sp_passes::stage_input": "input", "sp_passes::stage_output": "output"}
CUTS = ("sp_passes::token_shard", "vllm::sequence_parallel_chunk_impl")
BATCHED = "_c10d_functional::batch_p2p_ops"


def read_boundary(node: fx.Node) -> Boundary | None:
    """``node`` as a tensor that crosses a pipeline boundary, or None."""
    if node.op != "call_function":
        return None
    spelled = op_name(node)
    if spelled in _NAMED:
        x, name = args(node)[:2]
        return Boundary(node, _NAMED[spelled], x, node, name)
    row = _P2P.get(spelled)
    if row is None:
        return None
    peer, tag, group = args(node)[row.peer : row.peer + 3]
    options = _arguments(node)
    return Boundary(
        node=node,
        kind=row.kind,
        x=None if row.x is None else args(node)[row.x],
        result=_awaited(node),
        name=f"{row.kind} {tag} {'to' if row.kind == 'send' else 'from'} stage {peer}",
        peer=peer,
        tag=tag,
        group=group,
        checked=row.checked and options.get("check", True),
        is_whole=options.get("placement", "R") == "R",
    )


def _arguments(node: fx.Node) -> dict[str, Any]:
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _awaited(node: fx.Node) -> fx.Node:
    waits = [u for u in node.users if op_name(u) == _WAIT]
    return waits[0] if len(waits) == 1 and len(node.users) == 1 else node


def boundaries(graph: fx.Graph) -> list[Boundary]:
    """Every boundary tensor of the graph, in graph order."""
    return [b for node in graph.nodes if (b := read_boundary(node)) is not None]


def is_cut(node: fx.Node) -> bool:
    """Whether ``node`` is this rank's rows of its first argument."""
    return op_name(node) in CUTS


# --- rows cut by slices -----------------------------------------------------------------


def read_cuts(graph: fx.Graph, rank: int, group: str, tp_size: int) -> None:
    """Respell slices that cut this rank's rows of what crossed a boundary.

    A slice of rows does not say whether it is another one on each rank. One that is right
    for ``rank`` and begins at a boundary is taken for it: the ranks compare their decisions
    before anything runs, and a slice of the same rows on every rank fits one rank only.
    """
    arriving = [b for b in boundaries(graph) if b.kind in ("recv", "input")]
    if tp_size == 1 or not arriving:
        return
    graph.eliminate_dead_code()  # the other parts of a chunk, which are read nowhere
    for boundary in arriving:
        if boundary.result._erased:
            continue
        for node, source in _row_slices(boundary.result, tp_size):
            if not _is_cut_for(node, source, rank, tp_size):
                continue
            whole = _unpadded(source, tp_size)
            with graph.inserting_before(node):
                new = graph.call_function(ops.token_shard.default, (whole, group, tp_size))
            copy_origin(new, node)
            node.replace_all_uses_with(set_value(new, fake_mode(graph)))
            graph.erase_node(node)
            if source is not whole and not source.users:
                graph.erase_node(source)


def _row_slices(start: fx.Node, tp_size: int) -> list[tuple[fx.Node, fx.Node]]:
    """Slices along dimension 0 of values that still have the rows of ``start``, or padding."""
    rows = local_rows(shape(start)[0], tp_size)
    todo, seen, found = [start], {start}, []
    while todo:
        source = todo.pop()
        for node in source.users:
            if node in seen or not is_tensor(node) or not shape(node):
                continue
            if is_cut(node) or read_collective(node) is not None:
                continue
            seen.add(node)
            if _is_row_slice(node):
                found.append((node, source))
            if equal(local_rows(shape(node)[0], tp_size), rows):
                todo.append(node)
    return found


def _is_cut_for(node: fx.Node, source: fx.Node, rank: int, tp_size: int) -> bool:
    """Whether a slice of rows takes the part of ``rank``, of as many parts as ranks."""
    rows = shape(source)[0]
    each = local_rows(rows, tp_size)
    start, stop = _bounds(node, rows)
    whole = equal(rows, tp_size * each) and equal(shape(node)[0], each)
    return whole and equal(start, rank * each) and equal(stop, (rank + 1) * each)


def _is_row_slice(node: fx.Node) -> bool:
    if node.target is aten.slice.Tensor:
        return (args(node)[1:2] or (0,))[0] == 0 and (args(node)[4:] or (1,))[0] == 1
    return node.target is aten.narrow.default and args(node)[1] == 0


def _bounds(node: fx.Node, rows: Any) -> tuple[Any, Any]:
    given = [value(a) for a in args(node)[2:4]]
    if node.target is aten.narrow.default:
        return given[0], given[0] + given[1]
    start = given[0] if given and given[0] is not None else 0
    stop = given[1] if len(given) > 1 else None
    return start, rows if to_the_end(stop, rows) else stop


def _pads(node: fx.Node) -> bool:
    """Whether ``node`` is its first tensor with zeros behind its last row."""
    if node.target is aten.constant_pad_nd.default:
        pad = [value(p) for p in args(node)[1]]
        rows = len(shape(node)) * 2 - 2
        others = [p for i, p in enumerate(pad) if i != rows + 1]
        return len(pad) == rows + 2 and all(static(p) == 0 for p in others) and _fill(node, 2) == 0
    if node.target is aten.cat.default and (args(node)[1:] or (0,))[0] == 0:
        parts = args(node)[0]
        return len(parts) == 2 and _is_zeros(parts[1])
    return False


def _fill(node: fx.Node, at: int) -> Any:
    return (args(node)[at:] or (0,))[0]


def _is_zeros(node: fx.Node) -> bool:
    name = op_name(node)
    if name in ("aten::zeros", "aten::new_zeros", "aten::zeros_like"):
        return True
    at = 2 if name == "aten::new_full" else 1
    return name in ("aten::full", "aten::new_full", "aten::full_like") and _fill(node, at) == 0


def _unpadded(node: fx.Node, tp_size: int) -> fx.Node:
    """What was padded to a multiple of ``tp_size`` rows, or the node itself."""
    if not _pads(node):
        return node
    source: fx.Node = args(node)[0][0] if node.target is aten.cat.default else args(node)[0]
    fits = equal(shape(node)[0], tp_size * local_rows(shape(source)[0], tp_size))
    return source if fits else node


# --- boundaries by name -----------------------------------------------------------------


def mark(graph: fx.Graph, config: SPConfig) -> None:
    """Make the config's stage inputs and outputs those of a traced graph.

    The graph was traced on whole tensors ``[M, …]``. A named input then takes this rank's
    ``[local_rows(M), …]``, a named output gives it.

    Raises:
        SPError: a name is no input or output of the graph.
    """
    assert config.tp_size is not None
    inputs, outputs = dict(config.stage_inputs or ()), dict(config.stage_outputs or ())
    if not inputs and not outputs:
        return
    group = (config.group_name, config.tp_size)
    places = {str(n.target): n for n in graph.find_nodes(op="placeholder")}
    _known("stage_inputs", inputs, places)
    mode = fake_mode(graph)
    first = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    for name in inputs:
        _mark_input(graph, places[name], first, name, group, mode)
    output = graph.find_nodes(op="output")[0]
    leaves = dict(named_leaves(output.args[0]))
    _known("stage_outputs", outputs, leaves, or_any=len(leaves) == 1)
    for name in outputs:
        node = leaves.get(name) or next(iter(leaves.values()))
        with graph.inserting_before(output):
            new = graph.call_function(ops.stage_output.default, (node, name, *group))
        copy_origin(new, node)
        set_value(new, mode)
        output.args = (_swapped(output.args[0], node, new),)


def _mark_input(
    graph: fx.Graph, node: fx.Node, first: fx.Node, name: str, group: tuple[str, int], mode: Any
) -> None:
    whole = value(node)
    rows = local_rows(whole.shape[0], group[1])
    users = list(node.users)
    with mode:
        node.meta["val"] = whole.new_empty((rows, *whole.shape[1:]))
    node.meta.pop("tensor_meta", None)
    with graph.inserting_before(first):
        new = graph.call_function(ops.stage_input.default, (node, name, *group))
        set_value(new, mode)
        if not equal(shape(new)[0], whole.shape[0]):
            new = graph.call_function(aten.slice.Tensor, (new, 0, 0, whole.shape[0]))
            set_value(new, mode)
    for user in users:
        user.replace_input_with(node, new)


def _known(
    what: str, asked: Mapping[str, Any], found: Mapping[str, Any], or_any: bool = False
) -> None:
    for name in asked:
        if name not in found and not (or_any and len(asked) == 1):
            known = ", ".join(found) or "none"
            raise SPError(f"{what} names {name!r}; this graph has {known}")


def named_leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Nodes of an output by key, or by position in a tuple."""
    if isinstance(tree, fx.Node):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from named_leaves(item, str(key))
    elif isinstance(tree, (tuple, list)):
        names = getattr(tree, "_fields", range(len(tree)))
        for key, item in zip(names, tree, strict=True):
            yield from named_leaves(item, str(key))


def _swapped(tree: Any, old: fx.Node, new: fx.Node) -> Any:
    return fx.map_arg(tree, lambda n: new if n is old else n)


def input_states(graph: fx.Graph) -> dict[fx.Node, Any]:
    """States of the graph inputs that arrive in rows, whatever else is said of them."""
    from ..placement.state import shard

    marked = graph.find_nodes(op="call_function", target=ops.stage_input.default)
    return {x: shard(0) for n in marked if (x := args(n)[0]).op == "placeholder"}


# --- order ------------------------------------------------------------------------------


def order(graph: fx.Graph) -> None:
    """Chain sends and receives of the graph in their order, and keep sends alive."""
    last: fx.Node | None = None
    for node in list(graph.nodes):
        name = op_name(node) if node.op == "call_function" else ""
        if name not in ("sp_passes::pp_send", "sp_passes::pp_recv"):
            continue
        if last is not None and node.kwargs.get("after") is None and len(node.args) < 7:
            node.kwargs = {**node.kwargs, "after": last}
        if name == "sp_passes::pp_send":
            with graph.inserting_before(node):
                kept = graph.call_function(
                    ops.pp_send_.default, ([], *node.args), dict(node.kwargs)
                )
            kept.meta.update(node.meta)
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
            node = kept
        last = node
