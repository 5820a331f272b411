# SPDX-License-Identifier: Apache-2.0
"""One rank's rows of a whole value, computed from rows instead of cut from the whole.

Going back from the value, row-wise ops are followed to where rows are at hand: the input of
an all-gather, or a tensor that crosses a pipeline boundary. An op is row-wise if its
placement rule gives ``Shard(0)`` for ``Shard(0)``.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from ..ops.p2p import local_rows
from ..placement import Op, RuleError, State, shard
from ..placement.registry import entry_of
from ..placement.sizes import equal, static
from . import params
from .boundaries import read_boundary
from .collectives import Collective, token_gather
from .values import args, copy_origin, fake_mode, is_tensor, set_value, shape

aten = torch.ops.aten
_RESHAPES = {
    aten.reshape.default,
    aten.view.default,
    aten.expand.default,
    aten._unsafe_view.default,
}
_LIMIT = 256


class NoOwnRows(Exception):
    """A rank cannot compute its own rows of a value; the text says where the way ends."""


@dataclass
class Rows:
    """How the rows of one value come about.

    Attributes:
        steps: row-wise ops and trims, each after its inputs.
        gathers: all-gathers on the way, by their result.
        boundaries: results of receives and stage inputs on the way.
    """

    steps: list[fx.Node] = field(default_factory=list)
    gathers: dict[fx.Node, Collective] = field(default_factory=dict)
    boundaries: list[fx.Node] = field(default_factory=list)

    @property
    def nodes(self) -> list[fx.Node]:
        return [*self.gathers, *self.boundaries, *self.steps]


def find_rows(start: fx.Node, states: Mapping[fx.Node, Any], tp_size: int) -> Rows:
    """The way back from ``start``, a whole value.

    Raises:
        NoOwnRows: some rows of it are neither gathered nor from a boundary.
    """
    found = Rows()
    done: set[fx.Node] = set()
    local: dict[fx.Node, State] = {}
    op = Op(ChainMap(local, states), tp_size)  # type: ignore[arg-type]
    todo = [start]
    while todo:
        node = todo[-1]
        if node in done:
            todo.pop()
            continue
        if _is_source(node, found, states, tp_size):
            inputs = []
        else:
            inputs = [n for n in _row_inputs(node) if n not in done]
        if inputs and len(done) < _LIMIT:
            todo += inputs
            continue
        if node not in found.gathers and node not in found.boundaries:
            _require_row_wise(node, op, local, tp_size)
            found.steps.append(node)
        local[node] = shard(0)
        done.add(node)
        todo.pop()
    return found


def _is_source(node: fx.Node, found: Rows, states: Mapping[fx.Node, Any], tp_size: int) -> bool:
    if node in found.gathers or node in found.boundaries:
        return True
    gather = token_gather(node)
    if gather is not None and gather.size in (None, tp_size) and states[gather.x] == shard(0):
        found.gathers[node] = gather
        return True
    call = args(node)[0] if _is_wait(node) else node
    boundary = read_boundary(call) if isinstance(call, fx.Node) else None
    if boundary is not None and boundary.result is node and boundary.kind in ("recv", "input"):
        found.boundaries.append(node)
        return True
    return False


def _is_wait(node: fx.Node) -> bool:
    return node.target is torch.ops._c10d_functional.wait_tensor.default


def _row_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs that have this value's rows; weights and vectors have none."""
    if node.op != "call_function" or not is_tensor(node) or not shape(node):
        return []
    rows = shape(node)[0]
    return [
        n
        for n in node.all_input_nodes
        if is_tensor(n)
        and not params.is_weight(n)
        and len(shape(n)) > 0
        and (equal(shape(n)[0], rows) or is_trim(node))
    ]


def is_trim(node: fx.Node) -> bool:
    """Whether ``node`` drops rows at the end of its input: ``x[:num_tokens]``."""
    if node.target is not aten.slice.Tensor:
        return False
    dim, start, _, step = (*args(node)[1:], *(0, None, None, 1)[len(node.args) - 1 :])[:4]
    return dim == 0 and start in (0, None) and step == 1


def _require_row_wise(node: fx.Node, op: Op, local: dict[fx.Node, State], tp_size: int) -> None:
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if node.op != "call_function" or schema is None or not is_tensor(node):
        raise NoOwnRows(f"{params.fqn(node)} is neither gathered nor received")
    inputs = [n for n in node.all_input_nodes if n in local]
    if not inputs:
        raise NoOwnRows(f"{node.name} is neither gathered nor received")
    if schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        raise NoOwnRows(f"{node.name} is not row-wise")
    if is_trim(node):
        here, there = shape(node)[0], shape(inputs[0])[0]
        if not equal(local_rows(here, tp_size), local_rows(there, tp_size)):
            raise NoOwnRows(f"{node.name} keeps {here} of {there} rows: other ranks' rows move")
        return
    op.node = node
    try:
        state = entry_of(target).rule(op)
    except RuleError as error:
        raise NoOwnRows(f"{node.name} is not row-wise: {error}") from None
    if state != shard(0) or not isinstance(state.placement, Shard):
        raise NoOwnRows(f"{node.name} is not row-wise")


class Emitter:
    """Writes the same ops on rows into the graph, each once.

    ``made`` holds the rows of values by the whole value; a caller puts those of sources there.
    """

    def __init__(self, graph: fx.Graph, tp_size: int) -> None:
        self.graph, self.tp_size = graph, tp_size
        self.made: dict[fx.Node, fx.Node] = {}

    def emit(self, rows: Rows) -> None:
        mode = fake_mode(self.graph)
        for node in rows.steps:
            if node in self.made:
                continue
            if is_trim(node):
                self.made[node] = self.made[node.all_input_nodes[0]]
                continue
            inputs = [self.made[n] for n in node.all_input_nodes if n in self.made]
            with self.graph.inserting_before(node):
                new = self.graph.node_copy(node, lambda n: self.made.get(n, n))
                if node.target in _RESHAPES:
                    self._resize(new, inputs[0])
            copy_origin(new, node)
            self.made[node] = set_value(new, mode)
            wanted = (local_rows(shape(node)[0], self.tp_size), *shape(node)[1:])
            assert all(map(equal, shape(new), wanted)), (node, shape(new), wanted)

    def _resize(self, new: fx.Node, source: fx.Node) -> None:
        """The number of rows in the arguments of a reshape is that of its input."""
        sizes = list(args(new)[1])
        if static(sizes[0]) == -1:
            return
        sizes[0] = self.size(source)
        new.args = (new.args[0], sizes, *new.args[2:])

    def size(self, node: fx.Node) -> Any:
        """Rows of ``node``, as an argument of a node at the insertion point."""
        known = static(shape(node)[0])
        if known is not None:
            return known
        size = self.graph.call_function(aten.sym_size.int, (node, 0))
        size.meta["val"] = shape(node)[0]
        return size
