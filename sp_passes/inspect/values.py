# SPDX-License-Identifier: Apache-2.0
"""Printed shapes and dtypes -> fake tensors, with symbols for the sizes that vary.

    bf16[s77, 64][64, 1]cuda:0   Sym(8*s77)   DTensor(f32[8], …)   Parameter(f32[8])

Fake tensors hold no memory, and equal texts share one.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .. import _private

_TENSOR = re.compile(r"(?P<dtype>[a-z]+\d*\w*)\[(?P<rest>.*)$", re.DOTALL)
_WRAPPED = re.compile(r"^[A-Z]\w*\((.*)\)$", re.DOTALL)
_SYMBOL = re.compile(r"^[A-Za-z_]\w*$")
MOST_DIMS = 32
LARGEST = 2**62

_OPS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "FloorDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "CleanDiv": operator.floordiv,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}


class Values:
    """Makes the values of one graph.

    Args:
        hint: a stand-in size for a symbol of which nothing is known; sizes that depend on
            it are never printed. A multiple of the ranks, so that rows divide.
        hints: sizes that the dump itself gives.

    Attributes:
        mode: the fake mode of all values.
    """

    def __init__(self, hint: int, hints: dict[str, int] | None = None) -> None:
        self._env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self._hint, self._hints = hint, hints or {}
        self._symbols: dict[str, Any] = {}
        self._sizes: dict[str, Any] = {}
        self._made: dict[str, Any] = {}

    def of(self, text: str) -> Any:
        """The value that ``text`` describes; None where it describes none."""
        if text in self._made:
            return self._made[text]
        try:
            made = self._read(text)
        except (ValueError, RuntimeError, TypeError, OverflowError, ZeroDivisionError):
            made = None
        self._made[text] = made
        return made

    def _read(self, text: str) -> Any:
        text = text.strip()
        wrapped = _WRAPPED.match(text)
        if text.startswith("Sym(") and wrapped is not None:
            return self.size(wrapped[1])
        if wrapped is not None:
            text = wrapped[1]
        found = _TENSOR.match(text)
        dtype = None if found is None else _DTYPES.get(found["dtype"])
        if found is None or dtype is None:
            return None
        sizes_text, rest = _until_bracket(found["rest"])
        sizes = [self._checked(s) for s in _commas(sizes_text)]
        strides: list[Any] | None = None
        if rest.startswith("["):
            strides = [self.size(s) for s in _commas(_until_bracket(rest[1:])[0])]
            strides = strides if len(strides) == len(sizes) else None
        with self.mode:
            if strides is None or any(_is_negative(s) for s in strides):
                return torch.empty(sizes, dtype=dtype)
            return torch.empty_strided(sizes, strides, dtype=dtype)

    def _checked(self, text: str) -> Any:
        size = self.size(text)
        if _is_negative(size) or (isinstance(size, int) and size > LARGEST):
            raise ValueError(f"a size of {text}")
        return size

    def size(self, text: str) -> Any:
        """An int, or a SymInt for an expression of symbols.

        Raises:
            ValueError: it is neither.
        """
        text = text.strip()
        if text not in self._sizes:
            if text.lstrip("-").isdecimal() and len(text) < 20:
                self._sizes[text] = int(text)
            else:
                self._sizes[text] = self._expression(text)
        return self._sizes[text]

    def _expression(self, text: str) -> Any:
        if not text or len(text) > 500:
            raise ValueError("no size")
        try:
            tree = ast.parse(text, mode="eval").body
            return self._walk(tree, 0)
        except (SyntaxError, RecursionError, MemoryError, AssertionError):
            raise ValueError(f"no size: {text}") from None

    def _walk(self, node: ast.expr, depth: int) -> Any:
        if depth > 30:
            raise ValueError("nested too deep")
        if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < LARGEST:
            return node.value
        if isinstance(node, ast.Name):
            return self.symbol(node.id)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._walk(node.operand, depth + 1)
        if isinstance(node, ast.BinOp):
            left, right = (self._walk(n, depth + 1) for n in (node.left, node.right))
            if isinstance(node.op, ast.Pow) and right in (2, 3) and type(right) is int:
                return left * left if right == 2 else left * left * left
            if type(node.op) in _OPS:
                return _OPS[type(node.op)](left, right)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2:
            call = _CALLS.get(node.func.id)
            if call is not None:
                return call(*(self._walk(n, depth + 1) for n in node.args))
        return self.symbol(ast.unparse(node)[:60])

    def symbol(self, name: str) -> Any:
        """The symbolic size ``name``."""
        if name not in self._symbols:
            if len(self._symbols) >= 1000:
                raise ValueError("too many symbols")
            hint = self._hints.get(name, self._hint * (len(self._symbols) + 1))
            self._symbols[name] = _private.symbolic_size(self._env, name, hint)
        return self._symbols[name]

    def printed(self, text: str) -> str:
        """``text`` with the dump's names of symbols in place of torch's."""
        names = {str(sym): name for name, sym in self._symbols.items()}
        if not names:
            return text
        pattern = r"\b(" + "|".join(map(re.escape, names)) + r")\b"
        return re.sub(pattern, lambda m: names[m[1]], text)


def _is_negative(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, torch.SymInt) and size < 0


def _until_bracket(text: str) -> tuple[str, str]:
    """What stands before the bracket that closes, and what behind it."""
    depth = 0
    for i, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            if depth == 0:
                return text[:i], text[i + 1 :]
            depth -= 1
    raise ValueError("no closing bracket")


def _commas(text: str) -> list[str]:
    """Parts between the commas that are in no bracket."""
    if not text.strip():
        return []
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    if len(parts) > MOST_DIMS:
        raise ValueError("too many dimensions")
    return parts


_DTYPES: dict[str, torch.dtype] = _private.dtype_names()


def describe(value: Any) -> str:
    """``bf16[8, 64]`` of a tensor; "" of anything else."""
    if isinstance(value, torch.Tensor):
        short = _SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{short}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, torch.SymInt):
        return f"Sym({value})"
    return ""


_SHORT = {dtype: short for short, dtype in _DTYPES.items()}


def short_dtype(dtype: torch.dtype) -> str:
    """``bf16`` of ``torch.bfloat16``."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))
