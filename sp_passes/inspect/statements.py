# SPDX-License-Identifier: Apache-2.0
"""One printed line of a graph -> one record; by Python's own parser, never by running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Container
from typing import Any

from .records import Const, Expr, Opaque, OpRef, Record, Ref

LONGEST_LINE = 8 << 20
LONGEST_STATEMENT = 1 << 20
DEEPEST = 100
_UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
_FREES = re.compile(r";\s+(?:[A-Za-z_]\w* = )+None$")
# Most statements: an operator on values and numbers alone. Python's parser reads the rest.
_PLAIN_CALL = re.compile(
    r'(?P<name>[A-Za-z_]\w*)(?:: "(?P<value>[^"\\]*)")? = (?P<target>torch\.ops(?:\.\w+){2,3})'
    r"\((?P<args>[\w ,.-]*)\)"
)
_PLAIN_ITEM = re.compile(
    r'(?P<name>[A-Za-z_]\w*)(?:: "(?P<value>[^"\\]*)")? = (?P<source>[A-Za-z_]\w*)'
    r"\[(?P<at>\d{1,9})\]"
)
_PLAIN_ARG = re.compile(r"(?P<name>[A-Za-z_]\w*)|(?P<int>-?\d{1,18})|(?P<float>-?\d+\.\d*)")
_WORDS = {"None": None, "True": True, "False": False}
_NUMBERS = {"inf": float("inf"), "nan": float("nan")}
_BINARY = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
    ast.BitAnd: "and_",
    ast.BitOr: "or_",
    ast.BitXor: "xor",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
}
_UNARY = {ast.USub: "neg", ast.UAdd: "pos", ast.Invert: "inv", ast.Not: "not_"}
_COMPARE = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
}


class Unreadable(Exception):
    """A line that is no statement of a graph."""


def _parse(text: str) -> ast.Module:
    if len(text) > LONGEST_LINE:
        raise Unreadable(f"a line of {len(text)} characters")
    # Deep nesting is refused before the parser, whose own limit is the C stack.
    if sum(map(text.count, "([{")) > DEEPEST and _depth(text) > DEEPEST:
        raise Unreadable("brackets nested too deep")
    try:
        return ast.parse(text)
    except _UNPARSABLE as error:
        raise Unreadable(f"no Python: {error}") from None


def _depth(text: str) -> int:
    now = deepest = 0
    for char in re.findall(r"[\[\](){}]", text):
        now += 1 if char in "([{" else -1
        deepest = max(deepest, now)
    return deepest


def read_header(text: str) -> list[Record]:
    """The placeholders of ``def forward(self, x: "f32[8]", …):``.

    Raises:
        Unreadable: it is none.
    """
    (function,) = _parse(text.strip() + " pass").body
    if not isinstance(function, ast.FunctionDef):
        raise Unreadable("no function")
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    found = [
        Record(arg.arg, "placeholder", arg.arg, value=_annotation(arg.annotation))
        for arg in given
        if arg.arg != "self"
    ]
    return found


def _annotation(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


class Reader:
    """Reads the statements of one graph in order.

    Attributes:
        alias: names that only rename another, as Dynamo prints ``l_x_ = L_x_``.
        known: names of nodes so far.
    """

    def __init__(self, known: Container[str]) -> None:
        self.known = known
        self.alias: dict[str, str] = {}

    def read(self, text: str) -> Record | None:
        """The record of one line; None where it only frees or renames values.

        Raises:
            Unreadable: it is no statement of a graph.
        """
        if len(text) > LONGEST_STATEMENT:
            raise Unreadable(f"a statement of {len(text)} characters")
        text = _FREES.sub("", text.strip())
        made = self._plain(text)
        if made is not None:
            return made
        try:
            for statement in _parse(text).body:
                made = self._statement(statement) or made
        except RecursionError:
            raise Unreadable("nested too deep") from None
        return made

    def _plain(self, text: str) -> Record | None:
        """The record of the two common statements, without a parse; None of others."""
        found = _PLAIN_CALL.fullmatch(text)
        if found is None:
            item = _PLAIN_ITEM.fullmatch(text)
            if item is None or self._name(item["source"]) not in self.known:
                return None
            args: tuple[Any, ...] = (Ref(self._name(item["source"])), int(item["at"]))
            return Record(item["name"], "call", "operator.getitem", args, value=item["value"] or "")
        parts = found["args"].split(", ") if found["args"] else []
        values: list[Any] = []
        for part in parts:
            kind = _PLAIN_ARG.fullmatch(part)
            if kind is None:
                return None
            if kind["name"] is None:
                values.append(int(part) if kind["int"] else float(part))
            else:
                values.append(_WORDS[part] if part in _WORDS else self._named(part))
        target = found["target"]
        return Record(found["name"], "call", target, tuple(values), value=found["value"] or "")

    def _statement(self, node: ast.stmt) -> Record | None:
        if isinstance(node, ast.Return):
            value = () if node.value is None else self.argument(node.value)
            return Record("output", "output", "output", (value,))
        value_text = ""
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            target: ast.expr = node.target
            value = node.value
            value_text = _annotation(node.annotation)
        elif isinstance(node, ast.Assign):
            if isinstance(node.value, ast.Constant) and node.value.value is None:
                return None
            target, value = node.targets[0], node.value
        elif isinstance(node, (ast.AugAssign, ast.Expr, ast.Pass)):
            return None
        else:
            raise Unreadable(f"a {type(node).__name__.lower()} statement")
        if not isinstance(target, ast.Name):
            raise Unreadable("an assignment to no name")
        if isinstance(value, ast.Name) and value.id in self.known:
            self.alias[target.id] = self._name(value.id)
            return None
        record = self._expression(target.id, value)
        record.value = value_text
        return record

    def _name(self, name: str) -> str:
        return self.alias.get(name, name)

    def _expression(self, name: str, node: ast.expr) -> Record:
        if isinstance(node, ast.Call):
            return self._call(name, node)
        if isinstance(node, ast.Subscript):
            index = self.argument(node.slice)
            return Record(name, "call", "operator.getitem", (self.argument(node.value), index))
        if isinstance(node, ast.BinOp):
            sides = (self.argument(node.left), self.argument(node.right))
            return Record(name, "call", f"operator.{_BINARY[type(node.op)]}", sides)
        if isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
            only = (self.argument(node.operand),)
            return Record(name, "call", f"operator.{_UNARY[type(node.op)]}", only)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            word = _COMPARE.get(type(node.ops[0]), "compare")
            sides = (self.argument(node.left), self.argument(node.comparators[0]))
            return Record(name, "call", f"operator.{word}", sides)
        path = _path(node)
        if path is not None and path[0] == "self" and len(path) > 1:
            return Record(name, "get_attr", ".".join(path[1:]))
        if isinstance(node, ast.Attribute):
            return Record(name, "call", "getattr", (self.argument(node.value), node.attr))
        return Record(name, "call", "constant", (self.argument(node),))

    def _call(self, name: str, node: ast.Call) -> Record:
        args = tuple(self.argument(a) for a in node.args)
        kwargs = {k.arg: self.argument(k.value) for k in node.keywords if k.arg is not None}
        path = _path(node.func)
        if path is None:
            if isinstance(node.func, ast.Attribute):
                owner = self.argument(node.func.value)
                return Record(name, "method", node.func.attr, (owner, *args), kwargs)
            raise Unreadable("a call of no name")
        if path[0] == "self":
            return Record(name, "module", ".".join(path[1:]), args, kwargs)
        if len(path) > 1 and self._name(path[0]) in self.known:
            owner = Ref(self._name(path[0]))
            return Record(name, "method", ".".join(path[1:]), (owner, *args), kwargs)
        return Record(name, "call", ".".join(path), args, kwargs)

    def argument(self, node: ast.expr) -> Any:
        """An argument with names as ``Ref``, and whatever else is no plain value as a class."""
        if isinstance(node, ast.Name):
            return self._named(node.id)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List):
            return [self.argument(n) for n in node.elts]
        if isinstance(node, ast.Tuple):
            return tuple(self.argument(n) for n in node.elts)
        if isinstance(node, ast.Dict):
            keys = [None if k is None else self.argument(k) for k in node.keys]
            return {
                k if isinstance(k, (str, int)) else repr(k): self.argument(v)
                for k, v in zip(keys, node.values, strict=True)
            }
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.argument(node.operand)
            return -inner if isinstance(inner, (int, float)) else Expr(_text(node))
        if isinstance(node, ast.Slice):
            ends = (node.lower, node.upper, node.step)
            return slice(*(None if n is None else self.argument(n) for n in ends))
        return self._other(node)

    def _named(self, name: str) -> Any:
        name = self._name(name)
        if name in self.known:
            return Ref(name)
        return _NUMBERS[name] if name in _NUMBERS else Expr(name)

    def _other(self, node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp):
            return Expr(_text(node))
        path = _path(node)
        if path is not None and path[0] == "torch":
            text = ".".join(path)
            return OpRef(text) if text.startswith("torch.ops.") else Const(text)
        if isinstance(node, ast.Call):
            called = _path(node.func)
            if called == ["slice"]:
                return slice(*(self.argument(a) for a in node.args[:3])) if node.args else None
            if called in (["device"], ["torch", "device"]):
                return Const("device")
        return Opaque(_text(node))


def _text(node: ast.expr) -> str:
    return ast.unparse(node)[:200]


def _path(node: ast.expr) -> list[str] | None:
    """``torch.ops.aten.mm`` as its parts; ``getattr(self.layers, "0").w`` too; else None."""
    parts: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Name):
            parts.append(node.id)
            return parts[::-1]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
            and len(node.args) == 2
            and isinstance(node.args[1], ast.Constant)
        ):
            parts.append(str(node.args[1].value))
            node = node.args[0]
        else:
            return None
