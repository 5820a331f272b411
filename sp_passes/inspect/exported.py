# SPDX-License-Identifier: Apache-2.0
"""The graph of a ``torch.export`` archive (.pt2), from its JSON alone.

``torch.export.load`` also unpickles the archive's sample inputs and constants, which can run
code; here only ``models/*.json`` is read, and no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .. import _private
from .records import Const, Dump, Expr, InspectError, Opaque, OpRef, Record, Ref

_SYMBOL = re.compile(r"Symbol\('(\w+)'[^)]*\)")


def is_model(data: Any) -> bool:
    return isinstance(data, dict) and isinstance(data.get("graph_module"), dict)


def read(data: Any, origin: str) -> Dump:
    """The graph of a parsed ``model.json``.

    Raises:
        InspectError: it is not built as torch.export builds it.
    """
    try:
        return _Model(data, origin).read()
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RecursionError) as error:
        raise InspectError(
            f"{origin}: not a graph as torch.export of torch 2.11 to 2.14 saves it ({error!r})"
        ) from None


class _Model:
    def __init__(self, data: Any, origin: str) -> None:
        module = data["graph_module"]
        self.graph, self.signature = module["graph"], module["signature"]
        self.dump = Dump("exported program", origin, complete=True)
        self.dtypes = _private.exported_dtypes()

    def read(self) -> Dump:
        names = dict(self._weights())
        for entry in self.graph["inputs"]:
            ((kind, arg),) = entry.items()
            name = arg["name"] if isinstance(arg, dict) and "name" in arg else None
            if name is None:
                continue
            value = self._value(name) if kind == "as_tensor" else ""
            self._add(Record(name, "placeholder", name, value=value, weight=names.get(name, "")))
        for node in self.graph["nodes"]:
            self._call(node)
        results = tuple(self._argument(o) for o in self.graph["outputs"])
        self._add(Record("output", "output", "output", (results,)))
        return self.dump

    def _add(self, record: Record) -> None:
        self.dump.records.append(record)

    def _weights(self) -> Iterator[tuple[str, str]]:
        for spec in self.signature["input_specs"]:
            for kind, key in (("parameter", "parameter_name"), ("buffer", "buffer_name")):
                if kind in spec:
                    yield spec[kind]["arg"]["name"], spec[kind][key]

    def _value(self, name: str) -> str:
        meta = self.graph["tensor_values"].get(name)
        if meta is None:
            return ""
        sizes, strides = (
            ", ".join(self._size(s) for s in meta[key]) for key in ("sizes", "strides")
        )
        return f"{self.dtypes.get(meta['dtype'], '?')}[{sizes}][{strides}]"

    def _size(self, size: Any) -> str:
        if "as_int" in size:
            return str(size["as_int"])
        inner = size["as_expr"]
        text = _SYMBOL.sub(r"\1", inner["expr_str"])
        hint = (inner.get("hint") or {}).get("as_int")
        if text.isidentifier() and isinstance(hint, int) and 1 < hint < 2**40:
            self.dump.hints[text] = hint
        return text

    def _call(self, node: Any) -> None:
        args, kwargs = [], {}
        for given in node["inputs"]:
            if given.get("kind") == 2:
                kwargs[given["name"]] = self._argument(given["arg"])
            else:
                args.append(self._argument(given["arg"]))
        source = _source(node.get("metadata", {}).get("stack_trace", ""))
        target = node["target"].replace("_operator.", "operator.")
        outputs = node["outputs"]
        names = list(_names(outputs))
        single = len(outputs) == 1 and "as_tensor" in outputs[0]
        if single or not names:
            name = names[0] if names else node.get("name") or f"call_{len(self.dump.records)}"
            value = self._value(name)
            self._add(Record(name, "call", target, tuple(args), kwargs, value, source))
            return
        call = node.get("name") or f"{names[0]}_all"
        self._add(Record(call, "call", target, tuple(args), kwargs, "", source))
        for i, name in enumerate(names):
            item = (Ref(call), i)
            self._add(Record(name, "call", "operator.getitem", item, {}, self._value(name), source))

    def _argument(self, arg: Any) -> Any:
        ((kind, value),) = arg.items()
        if kind in ("as_tensor", "as_custom_obj"):
            return Ref(value["name"])
        if kind in ("as_tensors", "as_optional_tensors"):
            return [self._optional(v) for v in value]
        if kind in ("as_sym_int", "as_sym_bool", "as_sym_float"):
            return self._symbolic(value)
        if kind in ("as_sym_ints", "as_sym_bools", "as_sym_floats"):
            return [self._symbolic(v) for v in value]
        if kind == "as_scalar_type":
            return Const(_private.exported_dtype_names().get(value, ""))
        if kind in ("as_layout", "as_memory_format"):
            return None
        if kind == "as_none":
            return None
        if kind == "as_device":
            return Const("device")
        if kind == "as_operator":
            return OpRef(value)
        if kind in ("as_int", "as_float", "as_bool", "as_string"):
            return value
        return value if isinstance(value, list) and _is_flat(value) else Opaque(kind)

    def _optional(self, value: Any) -> Any:
        inner = value.get("as_tensor", value)
        return Ref(inner["name"]) if isinstance(inner, dict) and "name" in inner else None

    def _symbolic(self, value: Any) -> Any:
        ((kind, inner),) = value.items()
        if kind == "as_name":
            return Ref(inner)
        return Expr(str(inner)) if kind == "as_expr" else inner


def _names(outputs: Any) -> Iterator[str]:
    for entry in outputs:
        ((_, value),) = entry.items()
        for item in value if isinstance(value, list) else [value]:
            inner = item.get("as_name") or item.get("name") if isinstance(item, dict) else None
            if isinstance(inner, str):
                yield inner


def _is_flat(value: list[Any]) -> bool:
    return all(isinstance(v, (int, float, str, bool)) or v is None for v in value)


def _source(trace: Any) -> str:
    """The innermost frame of a stack trace that is not torch's own."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)', str(trace)[:20000])
    own = [f for f in frames if "/torch/" not in f[0]] or frames
    return "{}:{}, in {}: {}".format(*own[-1])[:500] if own else ""
