# SPDX-License-Identifier: Apache-2.0
"""``sp_passes.dump``: a graph as JSON that names everything and can run nothing.

    {"format": "sp_passes.graph", "version": 1, "title": …, "symbols": {"s0": 512}, "nodes": [
        {"name": "x", "op": "placeholder", "value": "bf16[8, 64][64, 1]"},
        {"name": "w", "op": "placeholder", "value": …, "weight": "up.weight", "placement": "S0"},
        {"name": "mm", "op": "call", "target": "torch.ops.aten.mm.default",
         "args": [{"n": "x"}, {"n": "t"}], "value": …, "source": "model.py:9, in forward: …"}]}

An argument that is no number, text, list or mapping is an object of one key: ``n`` a node,
``op`` an operator, ``const`` a torch constant, ``expr`` a symbolic size, ``slice`` three
arguments, ``tuple`` its items, ``map`` a mapping, ``text`` anything else.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from .. import _private
from ..errors import SPError
from ..graph import params
from ..placement.check import source_line
from .records import Const, Dump, Expr, InspectError, Opaque, OpRef, Record, Ref
from .values import short_dtype

FORMAT, VERSION = "sp_passes.graph", 1
_DEEPEST = 40
_TEXTS = ("op", "target", "value", "source", "weight", "placement")


def dump(graph: fx.GraphModule | fx.Graph, path: str | Path | None = None, title: str = "") -> str:
    """The graph as JSON text: shapes, dtypes, ops, arguments, names of weights, source lines.

    ``sp-passes inspect`` reads it on any machine; no tensor's contents and no pickle is in it.

    Args:
        graph: from ``sp_passes.trace``, an Inductor pass, or ``torch.export``.
        path: also write it there.
        title: for the reader.

    Raises:
        SPError: it is no graph, or the file cannot be written.
    """
    owner = graph if isinstance(graph, fx.GraphModule) else None
    plain = graph.graph if isinstance(graph, fx.GraphModule) else graph
    if not isinstance(plain, fx.Graph):
        raise SPError(f"dump needs a torch.fx graph, found {type(graph).__name__}")
    symbols: dict[str, int] = {}
    data = {
        "format": FORMAT,
        "version": VERSION,
        "title": title,
        "torch": torch.__version__,
        "symbols": symbols,
        "nodes": [_node(node, owner, symbols) for node in plain.nodes],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    if path is not None:
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise SPError(f"dump: {path} cannot be written: {error.strerror}") from None
    return text


def _node(node: fx.Node, owner: fx.GraphModule | None, symbols: dict[str, int]) -> dict[str, Any]:
    op = {"call_function": "call", "call_method": "method", "call_module": "module"}.get(node.op)
    out: dict[str, Any] = {"name": node.name, "op": op or node.op, "target": _target(node.target)}
    out["args"] = [_argument(a) for a in node.args]
    out["kwargs"] = {k: _argument(v) for k, v in node.kwargs.items()}
    out["value"] = _value(node.meta.get("val"), symbols)
    out["source"] = source_line(node) or ""
    weight = node.op == "get_attr" or params.is_weight(node)
    out["weight"] = (params.fqn(node) if params.is_weight(node) else str(node.target)) * weight
    out["placement"] = _placement(node, owner)
    return {k: v for k, v in out.items() if v not in ("", [], {})}


def _target(target: Any) -> str:
    if isinstance(target, OpOverload):
        return "torch.ops." + str(target)
    if isinstance(target, HigherOrderOperator):
        return f"torch.ops.higher_order.{target.name()}"
    if getattr(target, "__module__", "") == "_operator":
        return f"operator.{target.__name__}"
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def _argument(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"n": value.name}
    if value is None or (
        isinstance(value, (bool, int, str)) and not isinstance(value, torch.SymInt)
    ):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"text": str(value)}
    if isinstance(value, tuple):
        return {"tuple": [_argument(v) for v in value]}
    if isinstance(value, list):
        return [_argument(v) for v in value]
    if isinstance(value, dict):
        return {"map": {str(k): _argument(v) for k, v in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_argument(v) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"const": str(value)}
    if isinstance(value, torch.device):
        return {"const": "device"}
    if isinstance(value, (OpOverload, HigherOrderOperator)):
        return {"op": _target(value)}
    return {"expr": str(value)} if isinstance(value, torch.SymInt) else {"text": str(value)[:200]}


def _value(value: Any, symbols: dict[str, int]) -> str:
    if isinstance(value, torch.SymInt):
        _note_symbols(value, symbols)
        return f"Sym({value})"
    if not isinstance(value, torch.Tensor):
        return ""
    for size in (*value.shape, *value.stride()):
        _note_symbols(size, symbols)
    sizes, strides = (", ".join(map(str, s)) for s in (value.shape, value.stride()))
    return f"{short_dtype(value.dtype)}[{sizes}][{strides}]{value.device}"


def _note_symbols(size: Any, symbols: dict[str, int]) -> None:
    if isinstance(size, torch.SymInt) and str(size).isidentifier() and str(size) not in symbols:
        hint = _private.size_hint(size)
        if hint is not None:
            symbols[str(size)] = hint


def _placement(node: fx.Node, owner: fx.GraphModule | None) -> str:
    from ..declare import declared_placement

    found = node.meta.get("sp_placement")
    if found is None and owner is not None and node.op == "get_attr":
        tensor = dict(owner.named_parameters()).get(str(node.target)) if node.target else None
        found = None if tensor is None else declared_placement(tensor)
    if found is None:
        return ""
    if getattr(found, "is_shard", lambda: False)():
        return f"S{found.dim}"
    return "R" if found.is_replicate() else "P" if found.is_partial() else ""


# --- reading ----------------------------------------------------------------------------


def is_ours(data: Any) -> bool:
    return isinstance(data, dict) and data.get("format") == FORMAT


def read(data: Any, origin: str) -> Dump:
    """The graph of a parsed JSON file.

    Raises:
        InspectError: it is none of ours, or damaged.
    """
    if data.get("version") != VERSION:
        raise InspectError(
            f"{origin}: version {data.get('version')!r} of {FORMAT}; this release reads {VERSION}"
        )
    nodes = data.get("nodes")
    if not isinstance(nodes, list):
        raise InspectError(f"{origin}: no list of nodes in it")
    symbols = data.get("symbols")
    hints = (
        {str(k): v for k, v in symbols.items() if type(v) is int and 1 < v < 2**40}
        if isinstance(symbols, dict)
        else {}
    )
    made = Dump(str(data.get("title") or "graph"), origin, hints=hints)
    for number, node in enumerate(nodes):
        record = _record(node)
        if record is None:
            made.notes.append(f"node {number} is damaged and left out")
            continue
        made.records.append(record)
        made.complete |= record.op == "output"
    made.notes = made.notes[:20]
    return made


def _record(node: Any) -> Record | None:
    if not isinstance(node, dict) or not isinstance(node.get("args", []), list):
        return None
    name, kwargs = node.get("name"), node.get("kwargs", {})
    if not isinstance(name, str) or not name.isidentifier() or not isinstance(kwargs, dict):
        return None
    try:
        args = tuple(_read(a, 0) for a in node.get("args", []))
        options = {str(k): _read(v, 0) for k, v in kwargs.items()}
    except ValueError:
        return None
    text = {
        k: str(node.get(k, ""))[:2000]
        for k in ("op", "target", "value", "source", "weight", "placement")
    }
    if text["op"] not in ("placeholder", "get_attr", "call", "method", "module", "output"):
        return None
    if text["op"] == "output" and not args:
        args = ((),)
    op = text.pop("op")
    return Record(name, op, text.pop("target"), args, options, **text)


def _read(value: Any, depth: int) -> Any:
    if depth > _DEEPEST:
        raise ValueError("nested too deep")
    if isinstance(value, list):
        return [_read(v, depth + 1) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError("an argument of several kinds")
    ((kind, inner),) = value.items()
    if kind in ("tuple", "slice") and isinstance(inner, list):
        items = [_read(v, depth + 1) for v in inner]
        return tuple(items) if kind == "tuple" else slice(*items[:3]) if items else None
    if kind == "map" and isinstance(inner, dict):
        return {str(k): _read(v, depth + 1) for k, v in inner.items()}
    made = {"n": Ref, "op": OpRef, "const": Const, "expr": Expr, "text": Opaque}.get(kind)
    if made is None or not isinstance(inner, str):
        raise ValueError(f"an argument of kind {kind!r}")
    return made(inner)
