# SPDX-License-Identifier: Apache-2.0
"""Which parameter of a vLLM model a graph input is, and what its layer says of its placement.

Inductor's graphs name no weights. What uses a weight keeps the module it was written in;
the parameter is the one of that module, or of those around it, with the same shape, strides
and dtype.

A layer's weight is this rank's part where it is smaller than the layer's logical matrix.
Where no layer says anything, the ranks compare fingerprints once the weights are loaded: with
equal bytes it is whole, with different ones nothing is said of it and it stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor.placement_types import Replicate, Shard

from .. import proof, weights
from ..declare import declare_placement, declare_segments, declared_placement
from ..graph.values import is_tensor
from . import _private
from .session import Session

_MAX_USERS = 16


@dataclass(frozen=True)
class Weight:
    """One parameter or buffer of the model.

    Attributes:
        fqn: its name.
        tensor: itself.
        differs: the ranks hold different bytes and no layer says how it is sharded.
    """

    fqn: str
    tensor: Tensor
    differs: bool = False


@dataclass
class Names:
    """The weights of a model, found by the source expression of a module that uses them.

    Attributes:
        model: the whole model.
        differs: FQNs of undeclared weights that are not the same on every rank.
        layers: modules that vLLM's custom ops find by name, as its forward context holds them.
    """

    model: nn.Module
    differs: frozenset[str] = frozenset()
    layers: Mapping[str, nn.Module] = field(default_factory=dict)
    _fqns: dict[int, str] = field(default_factory=dict)
    _roots: list[nn.Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        held = [*self.model.named_parameters(), *self.model.named_buffers()]
        self._fqns = {id(tensor): name for name, tensor in held}
        compiled = [m for m in self.model.modules() if _private.is_compiled(m)]
        self._roots = compiled or [self.model]

    def of(self, placeholder: fx.Node) -> Weight | None:
        """The weight that a graph input is, or None: an activation, or not to be told."""
        if not is_tensor(placeholder):
            return None
        stack = _stack(placeholder)
        roots = [root for root in self._roots if _fits(root, stack)]
        for source, _ in reversed(stack):
            found = {
                id(tensor): tensor
                for module in self._modules(source, roots)
                for tensor in _held(module)
                if _is_like(tensor, placeholder.meta["val"]) and id(tensor) in self._fqns
            }
            if len(found) > 1:
                return None
            for key, tensor in found.items():
                return Weight(self._fqns[key], tensor, self._fqns[key] in self.differs)
        return None

    def _modules(self, source: str, roots: Sequence[nn.Module]) -> Iterator[Any]:
        """What a source expression may mean: from a compiled module, or a layer by its name."""
        layer, rest = _private.layer_of_source(source)
        if layer is None:
            yield from (_follow(root, source) for root in roots)
        elif layer in self.layers:
            yield _follow(self.layers[layer], rest)


def _stack(placeholder: fx.Node) -> list[tuple[str, Any]]:
    """Source and class of each module in whose code the input is used, outermost first."""
    todo, seen = list(placeholder.users), set[fx.Node]()
    while todo and len(seen) < _MAX_USERS:
        user = todo.pop(0)
        if user in seen:
            continue
        seen.add(user)
        stack = user.meta.get("nn_module_stack")
        if stack:
            return [(str(source), kind) for source, kind in stack.values()]
        todo.extend(user.users)
    return []


def _fits(root: nn.Module, stack: Sequence[tuple[str, Any]]) -> bool:
    """Whether the modules of ``stack`` can be in ``root``, and not in a draft model like it."""
    for source, kind in stack:
        found = None if _private.layer_of_source(source)[0] else _follow(root, source)
        if isinstance(found, nn.Module) and isinstance(kind, type) and type(found) is not kind:
            return False
    return True


_STEP = re.compile(r"\.(\w+)|\[['\"]([^'\"]+)['\"]\]|\[(\d+)\]")


def _follow(root: nn.Module, source: str) -> Any:
    """What ``L['self'].layers.0.mlp`` is, seen from the compiled module; None where it ends."""
    found: Any = root
    for name, key, index in _STEP.findall(source.removeprefix("L['self']")):
        try:
            found = getattr(found, name) if name else found[key or int(index)]
        except (AttributeError, IndexError, KeyError, TypeError):
            return None
    return found


def _held(module: Any) -> Iterator[Tensor]:
    if isinstance(module, nn.Module):
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)


def _is_like(tensor: Tensor, value: Tensor) -> bool:
    """Whether a graph input could be this tensor; never where a size is dynamic."""
    if tensor.ndim != value.ndim or tensor.dtype != value.dtype:
        return False
    sizes = [*value.shape, *value.stride()]
    if any(not isinstance(size, int) for size in sizes):
        return False
    return [*tensor.shape, *tensor.stride()] == sizes


def introduce(session: Session) -> None:
    """After loading: say how each layer's weight is placed, and what errors may call it."""
    weights.introduce(session.model)
    session.bytes_loaded = weights.resident_bytes(session.model)
    for module in session.model.modules():
        declare(module)
    layers = _private.layers_by_name(session.vllm_config)
    session.names = Names(session.model, _differing(session), layers)


def declare(module: nn.Module) -> None:
    """Say of a layer's weight and bias that they are this rank's part, where they are."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or declared_placement(weight) is not None:
        return
    if _private.is_latents_and_gate(module):
        sizes: Any = module.output_partition_sizes
        whole = sum(sizes[:-1])
        declare_segments(weight, (whole, Replicate()), (sizes[-1], Shard(0)))
        return
    dim = sharded_dim(module, weight)
    if dim is None:
        return
    declare_placement(weight, Shard(dim))
    bias = getattr(module, "bias", None)
    if dim == 0 and isinstance(bias, Tensor) and bias.shape[:1] == weight.shape[:1]:
        declare_placement(bias, Shard(0))


def sharded_dim(module: nn.Module, weight: Tensor) -> int | None:
    """The dimension along which ``weight`` is a part of the layer's logical matrix."""
    if weight.ndim != 2:
        return None
    rows = _first_int(module, "output_size", "num_embeddings_padded", "num_embeddings")
    columns = _first_int(module, "input_size", "embedding_dim")
    if rows is not None and weight.shape[0] < rows:
        return 0
    return 1 if columns is not None and weight.shape[1] < columns else None


def _first_int(module: nn.Module, *names: str) -> int | None:
    found = (getattr(module, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)


def _differing(session: Session) -> frozenset[str]:
    """Undeclared weights whose bytes are not the same on every rank. Collective."""
    if session.tp_size == 1:
        return frozenset()
    held = dict(session.model.named_parameters())
    open_ = {name: t for name, t in held.items() if _may_be_whole(t)}
    if not open_:
        return frozenset()
    return frozenset(proof.differing(list(open_.values()), list(open_), session.tp_group))


def _may_be_whole(tensor: Any) -> bool:
    return (
        tensor.ndim == 2
        and tensor.is_floating_point()
        and tensor.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        and tensor.untyped_storage().nbytes() > 0
        and declared_placement(tensor) is None
    )
