# SPDX-License-Identifier: Apache-2.0
"""Which modules of a loaded model the regional route can shard: found by structure.

    mlp         the smallest module that holds a pair of linears, hidden → k·I and I → hidden,
                and no weight that is neither a linear's nor a vector
    projection  a lone linear

A weight is whole on this rank when its shape is that of the layer's logical matrix. No class
name plays a role.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from . import _private
from .config import Options

MLP, PROJECTION = "mlp", "projection"


@dataclass(frozen=True)
class Candidate:
    """One module that may be sharded.

    Attributes:
        name: FQN in the model.
        module: the module itself.
        kind: ``"mlp"`` or ``"projection"``.
        width: features of its input ``[tokens, width]``.
        weights: name within the module → name in the model, of its parameters.
        reason: why it stays as it is; empty when it may be sharded.
        site: False where nothing says that its tokens are sharded.
    """

    name: str
    module: nn.Module
    kind: str
    width: int
    weights: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    site: bool = True

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for modules that one compilation serves."""
        rows = [(n, tuple(p.shape), str(p.dtype)) for n, p in self.module.named_parameters()]
        return (type(self.module), self.kind, tuple(rows))


@dataclass
class _Tree:
    """A model's modules, with their first FQN and everything that holds them."""

    model: nn.Module
    names: dict[nn.Module, str] = field(default_factory=dict)
    parents: dict[nn.Module, list[tuple[nn.Module, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, module in self.model.named_modules():
            self.names[module] = name
            for child_name, child in module.named_children():
                self.parents.setdefault(child, []).append((module, child_name))

    def above(self, module: nn.Module) -> Iterator[nn.Module]:
        """Everything that holds ``module``, each once, nearest first."""
        todo, seen = [module], {module}
        while todo:
            for parent, _ in self.parents.get(todo.pop(0), ()):
                if parent not in seen:
                    seen.add(parent)
                    todo.append(parent)
                    yield parent


def find(model: nn.Module, options: Options) -> list[Candidate]:
    """Every candidate of ``model``, in its order, with the reason where it must stay as it is.

    Ordinary tensor-parallel layers are none: their weights are one rank's part. Nor is what a
    graph that vLLM compiles shows: the graph route decides on that.
    """
    tree = _Tree(model)
    found: dict[nn.Module, Candidate | None] = {}
    for module, width in _mlps(tree).items():
        found[module] = _candidate(tree, module, MLP, width, options)
    inside = {child for module in found for child in module.modules()}
    for module in tree.names:
        sizes = _private.linear_sizes(module)
        if sizes and module not in inside and min(sizes) > 1:
            found[module] = _candidate(tree, module, PROJECTION, sizes[1], options)
    return [c for module in tree.names if (c := found.get(module)) is not None]


def _mlps(tree: _Tree) -> dict[nn.Module, int]:
    """Input width by module, of the smallest modules that hold a pair."""
    widths = {m: w for m in tree.names if (w := _mlp_width(m)) is not None}
    larger = {above for module in widths for above in tree.above(module)}
    return {m: w for m, w in widths.items() if m not in larger}


def _mlp_width(module: nn.Module) -> int | None:
    """Input width of a module that holds a pair of linears, and no weight beside them."""
    if _private.linear_sizes(module):
        return None
    linears = [m for m in module.modules() if _private.linear_sizes(m)]
    owned = {id(p) for m in linears for p in m.parameters()}
    if any(p.ndim > 1 and id(p) not in owned for p in module.parameters()):
        return None
    pairs = (_pair_width(a, b) for a in linears for b in linears if a is not b)
    return next((width for width in pairs if width is not None), None)


def _pair_width(first: nn.Module, second: nn.Module) -> int | None:
    a, b = _private.linear_sizes(first), _private.linear_sizes(second)
    if a is None or b is None or b[0] != a[1] or a[0] not in (b[1], 2 * b[1]):
        return None
    return a[1]


def _is_whole(linear: nn.Module) -> bool:
    """By its weight's shape, or by its flag where the weight has another form."""
    weight = _weight(linear)
    if weight is None or _private.linear_method(linear):
        return _private.is_replicated(linear)
    return tuple(weight.shape) == _private.linear_sizes(linear)


def _weight(linear: nn.Module) -> Tensor | None:
    """Its weight; None where a backend has packed it away."""
    found = getattr(linear, "weight", None)
    return found if isinstance(found, Tensor) and found.numel() else None


def _candidate(
    tree: _Tree, module: nn.Module, kind: str, width: int, options: Options
) -> Candidate | None:
    """The module with its reason, if any; None where it is not this route's business.

    That is a module whose weights are one rank's part, or that a graph of vLLM's shows.
    """
    name = tree.names[module]
    weights = {n: f"{name}.{n}" if name else n for n, _ in module.named_parameters()}
    found = Candidate(name, module, kind, width, weights)
    if _private.shards_itself(module):
        return replace(found, reason="already sharded: vLLM does it itself")
    linears = [m for m in module.modules() if _private.linear_sizes(m)]
    above = list(tree.above(module))
    seen = any(map(_private.is_compiled, above)) and not any(map(_private.runs_in_opaque_op, above))
    if seen or not all(map(_is_whole, linears)):
        return None
    named = any(fnmatchcase(w, p) for w in weights.values() for p in options.include)
    if not named and not any(map(_private.says_sequence_parallel, (module, *above))):
        return replace(found, reason=_NO_SIGN, site=False)
    return replace(found, reason=_why_not(tree, found, linears, options, named))


_NO_SIGN = (
    "nothing says that its tokens are sharded: no sequence-parallel flag on it or above it; name "
    "it in include if they are"
)


def _why_not(
    tree: _Tree, found: Candidate, linears: list[nn.Module], options: Options, named: bool
) -> str:
    for linear in linears:
        if method := _private.linear_method(linear):
            return f"{tree.names[linear]} is quantised in a way that is not known: {method}"
        if _weight(linear) is None:
            return f"{tree.names[linear]} has no weight of its own: the platform packed it"
    for weight in found.weights.values():
        if not options.covers(weight):
            return f"excluded: {weight}"
    if found.kind == PROJECTION and not named:
        return "a lone projection: name it in include to shard it"
    return _reader(tree, found)


def _reader(tree: _Tree, found: Candidate) -> str:
    """Who reads a weight of the module past its forward; such a weight must stay whole."""
    held = [found.module, *found.module.modules()]
    for module in held:
        if not _private.linear_sizes(module):
            continue
        for parent, name in tree.parents.get(module, ()):
            if parent not in held[1:] and _reads_weight(type(parent), name):
                return f"{type(parent).__name__} reads {name}.weight past its forward"
    return ""


def _reads_weight(kind: type, child: str) -> bool:
    """Whether a method of ``kind`` loads ``child`` and an attribute ``weight`` with it."""
    for base in kind.__mro__:
        if base in (nn.Module, object):
            continue
        for method in vars(base).values():
            function = getattr(method, "fget", getattr(method, "__func__", method))
            if isinstance(function, FunctionType) and _loads(function, child):
                return True
    return False


def _loads(function: FunctionType, child: str) -> bool:
    """``self.child.weight``, one load right after the other."""
    attributes = [
        i.argval for i in dis.get_instructions(function) if i.opname in ("LOAD_ATTR", "LOAD_METHOD")
    ]
    return (child, "weight") in pairwise(attributes)
