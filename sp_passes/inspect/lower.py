# SPDX-License-Identifier: Apache-2.0
"""Calls of Dynamo's own graphs -> operators, by a table of names.

    torch._C._nn.linear(x, w, b)   x.chunk(2, -1)   a * b   x[..., :64]   x.to(torch.float32)

What the table does not know stays as it is, and nothing is found out about it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch

from .records import Const, Record, Ref


class Lookup(Protocol):
    def value_of(self, name: str) -> Any: ...


# torch function or Tensor method -> op with the same arguments.
_SAME = {
    "linear": "linear.default",
    "silu": "silu.default",
    "relu": "relu.default",
    "sigmoid": "sigmoid.default",
    "tanh": "tanh.default",
    "gelu": "gelu.default",
    "softmax": "softmax.int",
    "chunk": "chunk.default",
    "split": "split.Tensor",
    "view": "view.default",
    "reshape": "reshape.default",
    "permute": "permute.default",
    "transpose": "transpose.int",
    "t": "t.default",
    "contiguous": "contiguous.default",
    "unsqueeze": "unsqueeze.default",
    "squeeze": "squeeze.dim",
    "expand": "expand.default",
    "flatten": "flatten.using_ints",
    "cat": "cat.default",
    "matmul": "matmul.default",
    "mm": "mm.default",
    "bmm": "bmm.default",
    "pow": "pow.Tensor_Scalar",
    "mean": "mean.dim",
    "rsqrt": "rsqrt.default",
    "square": "square.default",
    "exp": "exp.default",
    "neg": "neg.default",
    "add": "add.Tensor",
    "mul": "mul.Tensor",
    "sub": "sub.Tensor",
    "truediv": "div.Tensor",
    "div": "div.Tensor",
    "clamp": "clamp.default",
    "embedding": "embedding.default",
    "topk": "topk.default",
}
_VARIADIC = {"view", "reshape", "permute", "expand"}
_CASTS = {"float": "float32", "half": "float16", "bfloat16": "bfloat16", "double": "float64"}
_HOMES = ("torch.", "torch.nn.functional.", "torch._C._nn.", "operator.")


def lower(record: Record, found: Lookup) -> Record:
    """``record`` as an operator call, or unchanged."""
    name = _short(record)
    if name is None:
        return replace(record, target=f"self.{record.target}") if record.op == "module" else record
    if name == "getitem":
        return _getitem(record, found)
    if record.op == "method" and name in (*_CASTS, "to", "type_as"):
        return _cast(record, name, found)
    if name not in _SAME or not _has_tensor(record, found):
        return record
    args = record.args
    if name in _VARIADIC and len(args) > 1 and not isinstance(args[1], (list, tuple)):
        args = (args[0], list(args[1:]))
    if name == "split" and len(args) > 1 and isinstance(args[1], (list, tuple)):
        return _as(record, "split_with_sizes.default", args)
    if name == "embedding" and len(args) > 1:
        return _as(record, "embedding.default", (args[1], args[0]), {})
    if name in ("add", "mul") and args and not isinstance(args[0], Ref):
        args = args[::-1]
    kwargs = {k: v for k, v in record.kwargs.items() if k not in ("inplace", "_stacklevel")}
    return _as(record, _SAME[name], args, kwargs)


def _as(record: Record, op: str, args: Any, kwargs: Any = None) -> Record:
    options = record.kwargs if kwargs is None else kwargs
    return replace(record, op="call", target=f"torch.ops.aten.{op}", args=args, kwargs=options)


def _short(record: Record) -> str | None:
    if record.op == "method":
        return record.target
    for home in reversed(_HOMES):
        short = record.target.removeprefix(home)
        if short != record.target and "." not in short:
            return short
    return None


def _has_tensor(record: Record, found: Lookup) -> bool:
    flat = [a for arg in record.args for a in (arg if isinstance(arg, (list, tuple)) else [arg])]
    return any(
        isinstance(a, Ref) and isinstance(found.value_of(a.name), torch.Tensor) for a in flat
    )


def _cast(record: Record, name: str, found: Lookup) -> Record:
    wanted = Const(f"torch.{_CASTS[name]}") if name in _CASTS else None
    for given in (*record.args[1:], *record.kwargs.values()):
        if isinstance(given, Const) and given.name != "device":
            wanted = given
    if wanted is None:
        return record
    args = (record.args[0], wanted)
    target = "torch.ops.prims.convert_element_type.default"
    return replace(record, op="call", target=target, args=args, kwargs={})


def _getitem(record: Record, found: Lookup) -> Record:
    """A part of a tensor along one dimension as a slice; an item of a tuple as it is."""
    source, index = record.args
    value = found.value_of(source.name) if isinstance(source, Ref) else None
    if not isinstance(value, torch.Tensor):
        return record
    parts = index if isinstance(index, tuple) else (index,)
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        fill = (slice(None),) * (value.ndim - len(parts) + 1)
        parts = (*parts[:at], *fill, *parts[at + 1 :])
    cuts = [(i, p) for i, p in enumerate(parts) if p != slice(None)]
    if len(cuts) != 1 or not isinstance(cuts[0][1], slice):
        return record
    dim, cut = cuts[0]
    if not all(e is None or isinstance(e, int) for e in (cut.start, cut.stop, cut.step)):
        return record
    stop = 2**63 - 1 if cut.stop is None else cut.stop
    args = (source, dim, cut.start or 0, stop, 1 if cut.step is None else cut.step)
    return _as(record, "slice.Tensor", args, {})
