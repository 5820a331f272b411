# SPDX-License-Identifier: Apache-2.0
"""Records -> a torch.fx graph with fake values, as the pass takes it."""

from __future__ import annotations

import operator
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ..graph import params
from ..graph.collectives import op_name
from ..graph.values import args as args_of
from . import lower, weights
from .ops import NoOp, is_unknown, resolve
from .records import Const, Dump, Expr, InspectError, Opaque, OpRef, Record, Ref
from .respell import respell
from .values import Values

_SAFE = ("aten", "prims", "_c10d_functional", "sp_passes")
MOST_PIECES = 4096
_SYMBOL = re.compile(r"(?:s|u|z|zf|zuf)\d+")
aten = torch.ops.aten


@dataclass
class Built:
    """A graph that the pass can run on.

    Attributes:
        graph: with ``meta["val"]`` wherever a value is known.
        values: made them.
        notes: what is missing, a line each.
        unknown_ops: ops that this process does not have, and how often.
        guessed: names of inputs taken for weights by their use; the dump does not say.
    """

    dump: Dump
    graph: fx.Graph
    values: Values
    notes: list[str] = field(default_factory=list)
    unknown_ops: Counter[str] = field(default_factory=Counter)
    guessed: list[str] = field(default_factory=list)


def build(dump: Dump, tp_size: int) -> Built:
    """The graph of ``dump``.

    Raises:
        InspectError: no node of it could be read.
    """
    values = Values(hint=840 * tp_size, hints=dump.hints)
    built = Built(dump, fx.Graph(), values, list(dump.notes))
    if any(r.target.startswith("torch.ops.sp_passes_models.") for r in dump.records):
        from .. import models  # noqa: F401  (registers its ops and their placements)
    maker = _Maker(built)
    records = list(respell(dump.records))
    for record in records:
        if record.op in ("placeholder", "get_attr"):
            maker.add_input(record)
    for record in records:
        if record.op not in ("placeholder", "get_attr", "output"):
            maker.add_call(record)
    maker.add_output(next((r for r in records if r.op == "output"), None))
    maker.fill_tuples()
    maker.blind()
    if not maker.nodes:
        raise InspectError(f"{dump.origin}: a graph without nodes")
    built.guessed = weights.mark(built.graph)
    missing = [n.name for n in maker.nodes.values() if n.meta.get("val") is None and n.users]
    if missing:
        built.notes.append(
            f"{len(missing)} values have no shape, such as {missing[0]}: print the graph with "
            "shapes (print_readable does)"
        )
    return built


class _Maker:
    def __init__(self, built: Built) -> None:
        self.built, self.graph, self.values = built, built.graph, built.values
        self.nodes: dict[str, fx.Node] = {}
        self.lost: Counter[str] = Counter()

    def add_input(self, record: Record) -> None:
        name = record.name if record.op == "placeholder" else record.target
        node = self.graph.create_node("placeholder", record.name, name=record.name)
        self._finish(node, record)
        fqn = record.weight or (name if record.op == "get_attr" else weights.fqn_of(name))
        if fqn:
            params.mark(node, fqn, placement_of(record.placement))

    def add_call(self, record: Record) -> None:
        lowered = record if record.target.startswith("torch.ops.") else lower.lower(record, self)
        args = tuple(self._argument(a) for a in lowered.args)
        kwargs = {k: self._argument(v) for k, v in lowered.kwargs.items()}
        target = resolve(lowered.target, len(args) + len(kwargs))
        if is_unknown(target):
            self.built.unknown_ops[lowered.target.removeprefix("torch.ops.")] += 1
        try:
            node = self.graph.create_node("call_function", target, args, kwargs, record.name)
        except Exception as error:  # an argument that fx cannot hold
            self.built.notes.append(f"{record.name} is left out: {str(error)[:80]}")
            return
        self._finish(node, record)
        if node.meta["val"] is None and not record.value:
            node.meta["val"] = self._run(node)

    def value_of(self, name: str) -> Any:
        """The value of the node ``name``, None where it has none."""
        node = self.nodes.get(name)
        return None if node is None else node.meta.get("val")

    def _finish(self, node: fx.Node, record: Record) -> None:
        node.meta["val"] = self.values.of(record.value) if record.value else None
        if record.source:
            node.meta["sp_source"] = record.source
            node.meta["stack_trace"] = record.source
        self.nodes[record.name] = node

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Ref):
            node = self.nodes.get(value.name)
            if node is None:
                self.lost[value.name] += 1
                node = self._missing(value.name)
            return node
        if isinstance(value, (list, tuple)):
            return type(value)(self._argument(v) for v in value)
        if isinstance(value, dict):
            return {k: self._argument(v) for k, v in value.items()}
        if isinstance(value, slice):
            return slice(*(self._argument(v) for v in (value.start, value.stop, value.step)))
        return self._constant(value)

    def _constant(self, value: Any) -> Any:
        if isinstance(value, Const):
            found = _CONSTANTS.get(value.name)
            return torch.device("cpu") if value.name == "device" else found
        if isinstance(value, OpRef):
            return resolve(value.name)
        if isinstance(value, Expr):
            return self._symbolic(value.text)
        return value.text if isinstance(value, Opaque) else value

    def _symbolic(self, text: str) -> Any:
        """A node that holds a symbolic size; a name that is no symbol's is a value that is lost."""
        if text.isidentifier() and not _SYMBOL.fullmatch(text):
            self.lost[text] += 1
            return self.nodes.get(text) or self._missing(text)
        try:
            size = self.values.size(text)
        except (ValueError, RuntimeError, ZeroDivisionError, OverflowError):
            return text
        if not isinstance(size, torch.SymInt):
            return size
        name = f"size of {text}"
        if name not in self.nodes:
            self.nodes[name] = self._missing(f"size_{len(self.nodes)}")
            self.nodes[name].meta["val"] = size
        return self.nodes[name]

    def _missing(self, name: str) -> fx.Node:
        """An input in place of a value that the dump uses and does not hold."""
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first) if first else nullcontext():
            node = self.graph.create_node("placeholder", name, name=name)
        node.meta["val"] = None
        self.nodes[name] = node
        return node

    def _run(self, node: fx.Node) -> Any:
        """The value that the op gives, on fake tensors; None where that cannot be found out."""
        target = node.target
        known = isinstance(target, OpOverload) and target.namespace in _SAFE
        if target is operator.getitem:
            source, index = args_of(node)
            parts: Any = source.meta.get("val") if isinstance(source, fx.Node) else None
            fits = isinstance(parts, (list, tuple)) and isinstance(index, int)
            return parts[index] if fits and -len(parts) <= index < len(parts) else None
        if not known or is_unknown(target) or target._schema.is_mutable:  # type: ignore[union-attr]
            return None
        if any(n.meta.get("val") is None for n in node.all_input_nodes) or _too_many(node):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        try:
            with self.values.mode, torch.no_grad():
                return target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # whatever a meta kernel says of arguments that do not fit
            return None

    def add_output(self, record: Record | None) -> None:
        if record is None:
            ends = [n for n in self.nodes.values() if n.op == "call_function" and not n.users]
            result: Any = tuple(ends)
        else:
            result = self._argument(record.args[0])
        self.graph.output(result)
        if self.lost:
            self.built.notes.append(
                f"{len(self.lost)} values are used and never made, such as {min(self.lost)}"
            )

    def fill_tuples(self) -> None:
        """Values of ops with several results, from the items that the graph takes of them."""
        for node in self.nodes.values():
            if node.meta["val"] is not None or node.op != "call_function":
                continue
            items = {
                u.args[1]: u.meta.get("val") for u in node.users if u.target is operator.getitem
            }
            at = [i for i in items if isinstance(i, int) and 0 <= i < MOST_PIECES]
            if at and len(at) == len(items):
                node.meta["val"] = [items.get(i) for i in range(max(at) + 1)]

    def blind(self) -> None:
        """Hide what has no shape behind a name: no pattern can judge it."""
        for node in self.nodes.values():
            inputs = [node, *node.all_input_nodes]
            unknown = any(n.meta.get("val") is None for n in inputs)
            if node.target is operator.getitem:
                unknown |= not isinstance(args_of(node)[0], fx.Node)
            if node.op == "call_function" and unknown:
                name = op_name(node).replace("::", ".")
                plain = getattr(node.target, "__name__", str(node.target))
                # Rules are found by name, and those of Python's own calls expect values.
                node.target = NoOp(name or f"unknown {plain}")


def _too_many(node: fx.Node) -> bool:
    """Whether the op would make more pieces than any model has."""
    if node.target not in (aten.split.Tensor, aten.unbind.int, aten.chunk.default):
        return False
    first, *rest = args_of(node)
    source = first.meta["val"] if isinstance(first, fx.Node) else None
    dims: list[Any] = [*rest, *node.kwargs.values()]
    if not isinstance(source, torch.Tensor) or not all(isinstance(d, int) for d in dims):
        return True
    if node.target is aten.chunk.default:
        return bool(dims) and dims[0] > MOST_PIECES
    longest = max((s for s in source.shape if isinstance(s, int)), default=0)
    pieces = (
        longest if node.target is aten.unbind.int else longest // max(1, dims[0] if dims else 1)
    )
    return pieces > MOST_PIECES


def placement_of(text: str) -> Placement | None:
    """``S0`` -> ``Shard(0)``, ``R``, ``P``; None of anything else."""
    if len(text) > 1 and text[0] == "S" and text[1:].isdecimal() and len(text) < 4:
        return Shard(int(text[1:]))
    return {"R": Replicate(), "P": Partial()}.get(text)


_CONSTANTS: dict[str, Any] = {
    f"torch.{name}": value
    for name, value in vars(torch).items()
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
}
