# SPDX-License-Identifier: Apache-2.0
"""Who holds which bytes: this rank's resident shards, and the full weights they replaced.

A shard is found by the storage of the full parameter, whose metadata stays while its
storage is resized to zero. So one compiled graph serves every layer of the same shape,
Dynamo's and Inductor's guards hold, and a shard lives as long as its parameter.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import _private
from .errors import ShardingError, SPError
from .layout import ShardLayout
from .proof import agree, prove

log = logging.getLogger("sp_passes")


@dataclass
class _Resident:
    """What this rank keeps of one weight.

    ``shard`` None means that two graphs want it cut differently: the weight stays whole
    and every use takes its part from it. ``strides`` tells a weight from another view of
    its storage, such as its transpose.
    """

    ref: Any
    layout: ShardLayout
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    pg: Any
    shard: Tensor | None
    nbytes: int
    released: bool


_lock = threading.RLock()  # of the tables below; never held while ranks communicate
_group_locks: dict[str, threading.RLock] = {}
_table: dict[tuple[int, int], _Resident] = {}
_agreed: set[tuple[str, str]] = set()
_names: dict[tuple[int, int], str] = {}
_summaries: dict[str, str] = {}
_watch = threading.local()

_read_whole: dict[tuple[int, int], Any] = {}

Watcher = Callable[[str, Sequence[Tensor], Sequence[str]], None]


def _strides(weight: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(weight.shape), weight.stride()


def _key(weight: Tensor) -> tuple[int, int]:
    return _private.storage_key(weight), int(weight.storage_offset())


def _group_lock(pg: Any) -> threading.RLock:
    """Held while this group shards or restores: its collectives must not interleave."""
    with _lock:
        return _group_locks.setdefault(pg.group_name, threading.RLock())


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell ``watcher(plan, weights, names)`` of each graph that starts in this thread."""
    before = getattr(_watch, "watcher", None)
    _watch.watcher = watcher
    try:
        yield
    finally:
        _watch.watcher = before


def compiled(plan: str, summary: str) -> None:
    """A graph with ``plan`` was compiled in this thread; ``summary`` is shown in errors."""
    _summaries[plan] = summary
    watcher = getattr(_watch, "watcher", None)
    if watcher is not None:
        watcher(plan, [], [])


def resident(weight: Tensor, layout: ShardLayout, pg: Any) -> Tensor:
    """This rank's part of ``weight``; never hand it out of an op, its buffer is not yours."""
    entry = _table.get(_key(weight))
    if entry is not None and entry.shard is not None and _same(entry, weight, layout, pg):
        return entry.shard
    if entry is None:
        prepare([weight], [layout], [name_of(weight)], None, False, pg)
    else:
        _keep_whole(weight, entry, layout)
    entry = _table[_key(weight)]
    if entry.shard is not None:
        return entry.shard
    return layout.take(weight, pg.rank(), pg.size())


def prepare(
    weights: Sequence[Tensor],
    layouts: Sequence[ShardLayout],
    names: Sequence[str],
    plan: str | None,
    release: bool,
    pg: Any,
) -> None:
    """Shard every weight of a graph that is not resident yet.

    In this order, so that a failure leaves everything as it was: the ranks compare their
    plans, then the fingerprints of all weights, then each weight is cut and freed. Extra
    memory meanwhile is one shard.

    Raises:
        SPError: the ranks' plans differ, or this is a CUDA graph capture.
        ReplicationError: a weight differs between ranks.
    """
    watcher = getattr(_watch, "watcher", None)
    if watcher is not None and plan is not None:
        watcher(plan, weights, names)
    known = plan is None or (pg.group_name, plan) in _agreed
    if known and all(_key(w) in _table for w in weights):
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise SPError(
            "the first call of a rewritten graph cannot be captured in a CUDA graph: it "
            "compares and shards weights; run the model once before capturing it"
        )
    with _group_lock(pg):
        todo = {
            _key(w): (w, cut, _names.get(_key(w), name))
            for w, cut, name in zip(weights, layouts, names, strict=True)
            if _key(w) not in _table
        }
        if plan is not None:
            agree(plan, len(todo), _summaries.get(plan, "compiled earlier"), pg)
            _agreed.add((pg.group_name, plan))
        prove([w for w, _, _ in todo.values()], [name for _, _, name in todo.values()], pg)
        for key, (weight, cut, _) in todo.items():
            _table[key] = _shard(weight, cut, pg, release)
        _sweep()


def _same(entry: _Resident, weight: Tensor, layout: ShardLayout, pg: Any) -> bool:
    return entry.layout == layout and entry.pg is pg and entry.strides == _strides(weight)


def _shard(weight: Tensor, layout: ShardLayout, pg: Any, release: bool) -> _Resident:
    nbytes = weight.numel() * weight.element_size()
    with torch.no_grad():
        part = layout.take(weight.detach(), pg.rank(), pg.size())
        shard = part.clone(memory_format=torch.contiguous_format)
    ref = _private.storage_weak_ref(weight)
    entry = _Resident(ref, layout, _strides(weight), pg, shard, nbytes, False)
    weakref.finalize(weight, _sweep).atexit = False
    if release and pg.size() > 1:
        _release(weight, entry)
    return entry


def _release(weight: Tensor, entry: _Resident) -> None:
    storage = weight.untyped_storage()
    if storage.nbytes() != entry.nbytes:
        log.warning(
            "%s shares its storage with other tensors and stays allocated beside its shard",
            name_of(weight),
        )
        return
    storage.resize_(0)
    entry.released = True


def _sweep() -> None:
    """Drop the shards of parameters that are gone."""
    with _lock:
        for key in [k for k, entry in _table.items() if entry.ref.expired()]:
            del _table[key]
            _names.pop(key, None)
        for key in [k for k, ref in _read_whole.items() if ref.expired()]:
            del _read_whole[key]


def _keep_whole(weight: Tensor, entry: _Resident, layout: ShardLayout) -> None:
    with _group_lock(entry.pg):
        if entry.shard is None:
            return
        log.warning(
            "%s is wanted as %s and as %s by different graphs, so it is kept whole",
            name_of(weight),
            entry.layout,
            layout,
        )
        _restore(weight, entry)
        entry.shard = None


def _restore(weight: Tensor, entry: _Resident) -> None:
    """Rebuild the full weight from all ranks' shards. Collective."""
    if not entry.released or entry.shard is None:
        return
    size = entry.pg.size()
    parts = entry.shard.new_empty((size, *entry.shard.shape))
    _private.all_gather_into(parts.view(-1), entry.shard.view(-1), entry.pg)
    weight.untyped_storage().resize_(entry.nbytes)
    with torch.no_grad():
        whole = weight.detach().as_strided(*entry.strides)
        for rank in range(size):
            entry.layout.put(whole, parts[rank], rank, size)
    entry.released = False


def _tensors(module: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Weights and buffers by FQN, also of a compiled wrapper around the module."""
    module = getattr(module, "_orig_mod", module)
    yield from module.named_parameters(remove_duplicate=remove_duplicate)
    yield from module.named_buffers(remove_duplicate=remove_duplicate)


def remember_names(module: nn.Module) -> None:
    """Let errors and reports call this module's weights by their FQNs."""
    for name, tensor in _tensors(module):
        _names[_key(tensor)] = name


def name_of(weight: Tensor) -> str:
    return _names.get(_key(weight), f"weight of shape {list(weight.shape)}")


def is_released(tensor: Tensor) -> bool:
    """Whether the full bytes of ``tensor`` are gone and only shards exist."""
    entry = _table.get(_key(tensor))
    return entry is not None and entry.released


def use_of(tensor: Tensor) -> str | None:
    """How graphs compiled so far use a weight: ``"sharded"``, ``"whole"``, or None."""
    if is_released(tensor):
        return "sharded"
    return "whole" if _key(tensor) in _read_whole else None


def read_whole(tensors: Sequence[Tensor]) -> None:
    """A compiled graph reads these weights whole: no other graph may release them."""
    with _lock:
        for tensor in tensors:
            _read_whole.setdefault(_key(tensor), _private.storage_weak_ref(tensor))


def resident_bytes(module: nn.Module) -> int:
    """Bytes of weights and buffers that this rank holds for ``module``, shards included."""
    seen: dict[int, int] = {}
    for _, tensor in _tensors(module):
        key = _private.storage_key(tensor)
        seen.setdefault(key, tensor.untyped_storage().nbytes())
        entry = _table.get(_key(tensor))
        if entry is not None and entry.shard is not None:
            seen[-key] = entry.shard.numel() * entry.shard.element_size()
    return sum(seen.values())


def unshard(module: nn.Module) -> list[str]:
    """Give ``module`` its full weights back; every rank of the group must call it.

    A compiled graph that runs afterwards shards them again. CUDA graphs that were captured
    with the shards must not be replayed any more.

    Returns:
        FQNs of the weights that were restored.
    """
    restored = []
    for name, tensor in _tensors(module):
        entry = _table.get(_key(tensor))
        if entry is None:
            continue
        with _group_lock(entry.pg):
            if entry.released:
                _restore(tensor, entry)
                restored.append(name)
            _table.pop(_key(tensor), None)
    return restored


def load_full_state_dict(
    module: nn.Module, state_dict: Mapping[str, Tensor], strict: bool = True
) -> None:
    """Copy full weights into ``module``; resident shards are updated in place.

    Addresses do not change, so captured CUDA graphs stay valid. Every rank of the group
    must call it with the same values for the sharded weights; that is compared first.

    Raises:
        SPError: missing or unexpected names (with ``strict``), a wrong shape.
        ReplicationError: the ranks bring different values; nothing was changed.
    """
    targets = dict(_tensors(module, remove_duplicate=False))
    wanted = targets.keys() - _unsaved(module)
    missing, extra = sorted(wanted - state_dict.keys()), sorted(state_dict.keys() - wanted)
    if strict and (missing or extra):
        raise SPError(
            f"the state dict does not fit the module: missing {missing[:5]}, unexpected "
            f"{extra[:5]}; pass strict=False to load what fits"
        )
    pairs = [(n, targets[n], state_dict[n]) for n in targets if n in state_dict and n in wanted]
    for name, old, new in pairs:
        if old.shape != new.shape:
            raise ShardingError(
                f"{name} has shape {list(old.shape)}, the state dict brings {list(new.shape)}; "
                "bring the full weight"
            )
    with torch.no_grad():
        _prove_new(pairs)
        for _, old, new in pairs:
            entry = _table.get(_key(old))
            if entry is not None and entry.shard is not None:
                pg = entry.pg
                whole = _as_held(entry, old, new)
                entry.shard.copy_(entry.layout.take(whole, pg.rank(), pg.size()))
            if entry is None or not entry.released:
                old.copy_(new)


def _as_held(entry: _Resident, old: Tensor, new: Tensor) -> Tensor:
    """``new`` as the view of the storage that ``entry`` was cut from."""
    if entry.strides == _strides(old):
        return new
    whole = new.new_empty_strided(*entry.strides)
    whole.as_strided(*_strides(old)).copy_(new)
    return whole


def _prove_new(pairs: Sequence[tuple[str, Tensor, Tensor]]) -> None:
    by_group: dict[str, list[tuple[str, Tensor, Any]]] = {}
    for name, old, new in pairs:
        entry = _table.get(_key(old))
        if entry is not None:
            by_group.setdefault(entry.pg.group_name, []).append((name, new, entry.pg))
    for rows in by_group.values():
        prove([new for _, new, _ in rows], [name for name, _, _ in rows], rows[0][2])


def _unsaved(module: nn.Module) -> set[str]:
    """Buffers that a state dict does not hold."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        for name in child._non_persistent_buffers_set
    }


def guard_module(module: nn.Module) -> None:
    """Make eager use of released weights, and their ``state_dict``, a clear error.

    Without this a CPU kernel would read freed memory. Each module that owns parameters
    gets two hooks; the forward one does nothing while Dynamo traces.
    """
    for name, child in module.named_modules():
        if child._parameters and not getattr(child, "_sp_passes_guarded", False):
            child._sp_passes_guarded = True
            child.register_state_dict_pre_hook(_refuse("state_dict()", name))
            child.register_forward_pre_hook(_refuse_eager(name))


def _first_released(module: nn.Module) -> str | None:
    return next(
        (n for n, p in module._parameters.items() if p is not None and is_released(p)), None
    )


def _refuse(what: str, path: str) -> Callable[..., None]:
    def hook(module: nn.Module, *args: Any) -> None:
        name = _first_released(module)
        if name is not None:
            full = f"{path}.{name}" if path else name
            raise SPError(
                f"{what} of {full}: only this rank's shard exists, the full weight was released; "
                "call sp_passes.unshard(module) on every rank first"
            )

    return hook


def _refuse_eager(path: str) -> Callable[..., None]:
    refuse = _refuse("eager forward", path)

    def hook(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            refuse(module, args)

    return hook
