# SPDX-License-Identifier: Apache-2.0
"""A module's weights after the rewrite: count, restore, update, and refuse stray use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import _private
from .errors import ShardingError, SPError
from .proof import all_well, prove, whole_parts
from .residents import (
    Resident,
    entry_of,
    forget,
    group_lock,
    is_released,
    keep_whole,
    remember_name,
    restore,
    strides_of,
    writing,
)


def _tensors(module: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Weights and buffers by FQN, also of a compiled wrapper around the module."""
    module = getattr(module, "_orig_mod", module)
    yield from module.named_parameters(remove_duplicate=remove_duplicate)
    yield from module.named_buffers(remove_duplicate=remove_duplicate)


def introduce(module: nn.Module) -> None:
    """Make a module's weights known by FQN; those that share a storage stay whole."""
    by_storage: dict[int, list[Tensor]] = {}
    for name, tensor in _tensors(module):
        remember_name(tensor, name)
        by_storage.setdefault(_private.storage_key(tensor), []).append(tensor)
    for aliases in by_storage.values():
        if len(aliases) > 1:
            keep_whole(aliases)


def resident_bytes(module: nn.Module) -> int:
    """Bytes of weights and buffers that this rank holds for ``module``, shards included."""
    seen: dict[int, int] = {}
    for _, tensor in _tensors(module):
        key = _private.storage_key(tensor)
        seen.setdefault(key, tensor.untyped_storage().nbytes())
        entry = entry_of(tensor)
        if entry is not None and entry.shard is not None:
            seen[-key] = entry.shard.numel() * entry.shard.element_size()
    return sum(seen.values())


def released_bytes(weight: Tensor) -> int:
    """Bytes of ``weight`` that this rank gave up: its full bytes less those of its shard."""
    entry = entry_of(weight)
    if entry is None or not entry.released or entry.shard is None:
        return 0
    return entry.nbytes - entry.shard.numel() * entry.shard.element_size()


def unshard(module: nn.Module) -> list[str]:
    """Give ``module`` its full weights back; every rank of the group must call it.

    The next call of a compiled graph shards them again. CUDA graphs that were captured with
    the shards must not be replayed any more: a replay does not look where the weights are.

    Returns:
        FQNs of the weights that were restored.
    """
    restored = []
    for name, tensor in _tensors(module):
        entry = entry_of(tensor)
        if entry is None:
            continue
        with group_lock(entry.pg):
            if entry.released:
                restore(tensor, entry)
                restored.append(name)
            forget(tensor)
    return restored


def load_full_state_dict(
    module: nn.Module, state_dict: Mapping[str, Tensor], strict: bool = True
) -> None:
    """Copy full weights into ``module``; resident shards are updated in place.

    Addresses do not change, so captured CUDA graphs stay valid. Every rank of the group
    must call it with the same values for the sharded weights; that is compared first. Of a
    weight that is whole in part each rank brings its own kept segments.

    Raises:
        SPError: missing or unexpected names (with ``strict``), a wrong shape.
        ReplicationError: the ranks bring different values; nothing was changed.
    """
    targets = dict(_tensors(module, remove_duplicate=False))
    state_dict = {name.removeprefix("_orig_mod."): new for name, new in state_dict.items()}
    wanted = targets.keys() - _unsaved(module)
    pairs = [(n, targets[n], state_dict[n]) for n in targets if n in state_dict and n in wanted]
    problem = _misfit(wanted, state_dict, strict) or _wrong_shape(pairs)
    for pg in _groups(targets.values()):
        all_well(problem, pg)
    if problem is not None:
        raise problem
    _prove_new(pairs)
    for _, old, new in pairs:
        entry = entry_of(old)
        if entry is not None and entry.shard is not None:
            with writing(entry.shard):
                whole = _as_held(entry, old, new)
                entry.shard.copy_(entry.layout.take(whole, entry.pg.rank(), entry.pg.size()))
        if entry is None or not entry.released:
            with writing(old):
                old.copy_(new)


def _misfit(wanted: set[str], given: Mapping[str, Tensor], strict: bool) -> SPError | None:
    missing, extra = sorted(wanted - given.keys()), sorted(given.keys() - wanted)
    if not strict or not (missing or extra):
        return None
    return SPError(
        f"the state dict does not fit the module: missing {missing[:5]}, unexpected "
        f"{extra[:5]}; pass strict=False to load what fits"
    )


def _wrong_shape(pairs: Sequence[tuple[str, Tensor, Tensor]]) -> SPError | None:
    for name, old, new in pairs:
        if old.shape != new.shape:
            return ShardingError(
                f"{name} has shape {list(old.shape)}, the state dict brings {list(new.shape)}; "
                "bring the full weight"
            )
    return None


def _groups(tensors: Iterable[Tensor]) -> list[Any]:
    """The groups that the tensors are sharded over, each once, in a fixed order."""
    found = {e.pg.group_name: e.pg for t in tensors if (e := entry_of(t)) is not None}
    return [found[name] for name in sorted(found)]


def _as_held(entry: Resident, old: Tensor, new: Tensor) -> Tensor:
    """``new`` as the view of the storage that ``entry`` was cut from."""
    if entry.strides == strides_of(old):
        return new
    whole = new.new_empty_strided(*entry.strides)
    whole.as_strided(*strides_of(old)).copy_(new)
    return whole


def _prove_new(pairs: Sequence[tuple[str, Tensor, Tensor]]) -> None:
    by_group: dict[str, list[tuple[str, Tensor, Any]]] = {}
    for name, old, new in pairs:
        entry = entry_of(old)
        if entry is not None:
            kept = entry.layout.kept
            parts = whole_parts(_as_held(entry, old, new) if kept else new, entry.layout, name)
            rows = by_group.setdefault(entry.pg.group_name, [])
            rows += [(part_name, part, entry.pg) for part, part_name in parts]
    for rows in by_group.values():
        prove([new for _, new, _ in rows], [name for name, _, _ in rows], rows[0][2])


def _unsaved(module: nn.Module) -> set[str]:
    """Buffers that a state dict does not hold."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in getattr(module, "_orig_mod", module).named_modules()
        for name in child._non_persistent_buffers_set
    }


def guard_module(module: nn.Module) -> None:
    """Make eager use of released weights, and their ``state_dict``, a clear error.

    Without this a CPU kernel would read freed memory. Each module that owns parameters
    gets three hooks; the forward one does nothing while Dynamo traces.
    """
    for name, child in module.named_modules():
        if child._parameters and not getattr(child, "_sp_passes_guarded", False):
            child._sp_passes_guarded = True
            child.register_state_dict_pre_hook(_Refuse("state_dict()", name))
            child.register_load_state_dict_pre_hook(_Refuse("load_state_dict()", name, _LOAD))
            child.register_forward_pre_hook(_Refuse("eager forward", name, eager_only=True))


def _first_released(module: nn.Module) -> str | None:
    return next(
        (n for n, p in module._parameters.items() if p is not None and is_released(p)), None
    )


_UNSHARD = "call sp_passes.unshard(module) on every rank first"
_LOAD = "use sp_passes.load_full_state_dict(module, state_dict) on every rank"


@dataclass(frozen=True)
class _Refuse:
    """A hook that raises while the module owns a released weight; it can be pickled."""

    what: str
    path: str
    instead: str = _UNSHARD
    eager_only: bool = False

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if self.eager_only and torch.compiler.is_compiling():
            return
        name = _first_released(module)
        if name is not None:
            full = f"{self.path}.{name}" if self.path else name
            raise SPError(
                f"{self.what} of {full}: only this rank's shard exists, the full weight was "
                f"released; {self.instead}"
            )
