# SPDX-License-Identifier: Apache-2.0
"""What a rule sees of a node, and how it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from .state import REPLICATE, State, States

Sizes = tuple[Any, ...]


class RuleError(Exception):
    """A rule does not hold: what was found, what was needed, what it means."""

    def __init__(self, found: str, needed: str, meaning: str = "") -> None:
        super().__init__(found, needed, meaning)
        self.found, self.needed, self.meaning = found, needed, meaning

    def __str__(self) -> str:
        text = f"found {self.found}; needed {self.needed}"
        return f"{text}: {self.meaning}" if self.meaning else text


class Op:
    """One node as a rule sees it. One object serves a whole run; ``node`` moves on."""

    __slots__ = ("env", "node", "outer", "tp_size")

    def __init__(self, env: dict[fx.Node, States], tp_size: int, outer: int | None = None) -> None:
        self.env, self.tp_size, self.outer = env, tp_size, outer
        self.node: fx.Node = None  # type: ignore[assignment]

    def state(self, arg: Any) -> State:
        """The state of an argument; of a number, ``Replicate()``."""
        if not isinstance(arg, fx.Node):
            return REPLICATE
        found = self.env[arg]
        return found if isinstance(found, State) else (found[0] if found else REPLICATE)

    def shape(self, arg: Any) -> Sizes:
        """Local sizes of a tensor argument; ``()`` for a number.

        Raises:
            RuleError: the graph carries no ``meta["val"]`` for it.
        """
        if not isinstance(arg, fx.Node):
            return ()
        value = arg.meta.get("val")
        if isinstance(value, torch.Tensor):
            return tuple(value.shape)
        if value is None:
            raise RuleError(f"{arg.name} without meta['val']", "its shape", "trace with fakes")
        return ()

    @property
    def out(self) -> Sizes:
        """Local sizes of the result."""
        return self.shape(self.node)

    def arg(self, name: str, default: Any = None) -> Any:
        """The argument called ``name`` in the op's schema."""
        node = self.node
        if name in node.kwargs:
            return node.kwargs[name]
        position, fallback = _schema(node.target).get(name, (None, default))
        if position is not None and position < len(node.args):
            return node.args[position]
        return default if fallback is None else fallback

    def tensors(self) -> list[fx.Node]:
        """Tensor operands in schema order, lists flattened, repeats kept."""
        node = self.node
        return [n for n in _nodes((node.args, node.kwargs)) if _is_tensor(n)]

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments."""
        return self.node.args

    @property
    def name(self) -> str:
        """``ns::op`` without the overload."""
        return self.node.target._schema.name  # type: ignore[union-attr]

    def name_of(self, arg: Any) -> str:
        return f"{arg.name}" if isinstance(arg, fx.Node) else repr(arg)

    def describe(self, arg: Any) -> str:
        """``name is Shard(0)`` for messages."""
        return f"{self.name_of(arg)} is {self.state(arg)}"


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _nodes(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _nodes(item)


def _is_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return value is None or isinstance(value, torch.Tensor)


@lru_cache(maxsize=4096)
def _schema(target: Any) -> dict[str, tuple[int, Any]]:
    if not isinstance(target, OpOverload):
        return {}
    return {a.name: (i, a.default_value) for i, a in enumerate(target._schema.arguments)}
