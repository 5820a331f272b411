# SPDX-License-Identifier: Apache-2.0
"""Who holds which bytes: this rank's resident shards, and the full weights they replaced.

A shard is found by the storage of the full parameter, whose metadata stays while its
storage is resized to zero. So one compiled graph serves every layer of the same shape,
Dynamo's and Inductor's guards hold, and a shard lives as long as its parameter.

Whether a storage may be freed is decided when it is about to be, from what every graph
says at run time that it reads whole: one compiled graph may serve modules that the
compiler never saw.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _private, stray
from .errors import SPError
from .layout import Layout, LocalPart, ShardLayout
from .proof import agree, prove, same_rows, whole_parts

log = logging.getLogger("sp_passes")

Key = tuple[int, int]
Strides = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class Resident:
    """What this rank keeps of one weight.

    Attributes:
        ref: tells whether the weight's storage is gone.
        layout: how ``shard`` was cut.
        strides: shape and strides of the weight, which tell it from another view of its
            storage, such as its transpose.
        pg: the group it is sharded over.
        shard: this rank's part. None while the full weight is kept, asked or because something
            else reads it or two graphs want it cut differently: every use then takes its part
            from it, since not every write to a tensor shows in its version (``.data``,
            inference mode).
        nbytes: of the full weight.
        released: the full storage is freed.
        retired: shards that captured CUDA graphs may still read.
        rows_compared: the ranks have compared how many rows they multiply it with.
    """

    ref: Any
    layout: ShardLayout
    strides: Strides
    pg: Any
    shard: Tensor | None
    nbytes: int
    released: bool = False
    retired: list[Tensor] = field(default_factory=list)
    rows_compared: bool = False


_lock = threading.RLock()  # of the tables below; never held while ranks communicate
_group_locks: dict[str, threading.RLock] = {}
_table: dict[Key, Resident] = {}
_agreed: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
_names: dict[Key, str] = {}
_summaries: dict[str, str] = {}
_read_whole: dict[int, Any] = {}
_declared: set[tuple[str, Key, Key]] = set()
_prepared: set[tuple[str, Key, Key]] = set()
_watch = threading.local()

Watcher = Callable[[str, Sequence[Tensor], Sequence[str]], None]


def strides_of(weight: Tensor) -> Strides:
    return tuple(weight.shape), weight.stride()


def key_of(weight: Tensor) -> Key:
    return _private.storage_key(weight), int(weight.storage_offset())


def entry_of(weight: Tensor) -> Resident | None:
    return _table.get(key_of(weight))


def forget(weight: Tensor) -> None:
    _table.pop(key_of(weight), None)
    _prepared.clear()


def group_lock(pg: Any) -> threading.RLock:
    """Held while this group shards or restores: its collectives must not interleave."""
    with _lock:
        return _group_locks.setdefault(pg.group_name, threading.RLock())


# --- names, and who listens -------------------------------------------------------------


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell ``watcher(plan, weights, names)`` of each graph that starts in this thread."""
    before = getattr(_watch, "watcher", None)
    _watch.watcher = watcher
    try:
        yield
    finally:
        _watch.watcher = before


def _tell(plan: str | None, weights: Sequence[Tensor], names: Sequence[str]) -> None:
    watcher = getattr(_watch, "watcher", None)
    if watcher is not None and plan is not None:
        watcher(plan, weights, names)


def compiled(plan: str, summary: str) -> None:
    """A graph with ``plan`` was compiled in this thread; ``summary`` is shown in errors."""
    _summaries[plan] = summary
    _tell(plan, [], [])


def remember_name(weight: Tensor, name: str) -> None:
    """Let errors and reports call ``weight`` by its FQN."""
    with _lock:
        _names[key_of(weight)] = name


def name_of(weight: Tensor) -> str:
    return _names.get(key_of(weight), f"weight of shape {list(weight.shape)}")


# --- weights that must stay whole -------------------------------------------------------


def is_released(tensor: Tensor) -> bool:
    """Whether the full bytes of ``tensor`` are gone and only shards exist."""
    entry = entry_of(tensor)
    return entry is not None and entry.released


def use_of(tensor: Tensor) -> str | None:
    """How graphs so far use a weight: ``"sharded"``, ``"whole"``, or None."""
    if is_released(tensor):
        return "sharded"
    return "whole" if _private.storage_key(tensor) in _read_whole else None


def keep_whole(tensors: Sequence[Tensor]) -> None:
    """Something reads these tensors whole: their storage must not be freed."""
    with _lock:
        for tensor in tensors:
            _read_whole.setdefault(_private.storage_key(tensor), _private.storage_weak_ref(tensor))


def declare_whole(plan: str, tensors: Sequence[Tensor]) -> None:
    """A graph is about to read these weights whole.

    Raises:
        SPError: another graph has released one of them.
    """
    if not tensors:
        return
    mark = _mark(plan, tensors)
    if mark in _declared:
        return
    gone = next((t for t in tensors if is_released(t)), None)
    if gone is not None:
        raise SPError(
            f"{name_of(gone)} was sharded and released by another compiled graph, but this one "
            "reads it whole; compile the module that holds both uses as one graph "
            "(fullgraph=True shows where it breaks), or leave this part out"
        )
    keep_whole(tensors)
    _declared.add(mark)


# --- shards -----------------------------------------------------------------------------


def part(weight: Tensor, layout: Layout, pg: Any, x: Tensor | None = None) -> Tensor:
    """What this rank multiplies by; ``x`` as in :func:`resident`."""
    return weight if isinstance(layout, LocalPart) else resident(weight, layout, pg, x)


def resident(weight: Tensor, layout: ShardLayout, pg: Any, x: Tensor | None = None) -> Tensor:
    """This rank's part of ``weight``; never hand it out of an op, its buffer is not yours.

    Args:
        x: own rows that it is going to multiply, once they are gathered.

    Raises:
        ShardingError: as :func:`compare_rows`.
    """
    entry = entry_of(weight)
    if entry is None:
        prepare([weight], [layout], [name_of(weight)], None, False, pg)
        entry = _table[key_of(weight)]
    if x is not None and not entry.rows_compared:
        compare_rows(x, weight, pg)
    if entry.shard is not None:
        if _same(entry, weight, layout, pg):
            return entry.shard
        _make_whole(weight, entry, layout)
    return _take(weight, layout, pg)


def _take(weight: Tensor, layout: ShardLayout, pg: Any) -> Tensor:
    """This rank's part as the weight is now: a view where that is contiguous, else a copy."""
    with torch.no_grad():
        return layout.take(Tensor.detach(weight), pg.rank(), pg.size()).contiguous()


def compare_rows(x: Tensor, weight: Tensor, pg: Any) -> None:
    """On a weight's first use: every rank must bring the same number of rows.

    Raises:
        ShardingError: they do not, where the collective would abort or hang.
    """
    entry = entry_of(weight)
    if entry is None or entry.rows_compared:
        return
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    same_rows(x.shape[0], name_of(weight), pg)
    entry.rows_compared = True


def prepare(
    weights: Sequence[Tensor],
    layouts: Sequence[ShardLayout],
    names: Sequence[str],
    plan: str | None,
    release: bool,
    pg: Any,
    proven: Sequence[Tensor] = (),
    whole: Sequence[Tensor] = (),
) -> None:
    """Shard every weight of a graph that is not resident yet.

    In this order, so that a failure leaves everything as it was: the ranks compare their
    plans, then the fingerprints of all weights, then each weight is cut and freed. Extra
    memory meanwhile is less than the largest weight.

    Args:
        weights, layouts: what is sharded, and how.
        names: of ``weights``, then of ``proven``, as the compiled graph knew them.
        plan: digest of the graph's decisions; None for an op called by itself.
        release: free the full weights.
        pg: the tensor-parallel group.
        proven: weights that the rewrite takes for replicated without sharding them.
        whole: weights that the graph reads whole.

    Raises:
        SPError: the ranks' plans differ, another graph released one of ``whole``, or this is
            a CUDA graph capture.
        ReplicationError: a weight differs between ranks.
    """
    _tell(plan, weights, names)
    if plan is not None and weights and _mark(plan, weights) in _prepared:
        return
    known = plan is None or plan in _agreed.get(pg, ())
    if known and all(map(_is_resident, weights)) and not _unseen(plan, (*proven, *whole)):
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise SPError(
            "the first call of a rewritten graph cannot be captured in a CUDA graph: it "
            "compares and shards weights; run the model once before capturing it"
        )
    with group_lock(pg):
        if plan is not None:
            declare_whole(plan, (*proven, *whole))
        known_as = [
            _names.get(key_of(w), n) for w, n in zip((*weights, *proven), names, strict=True)
        ]
        rows = list(zip(weights, layouts, known_as, strict=False))
        todo = {key_of(w): (w, cut) for w, cut, _ in rows if not _is_resident(w)}
        if plan is not None:
            agree(plan, len(todo), _summaries.get(plan, "compiled earlier"), pg)
            _agreed.setdefault(pg, set()).add(plan)
        fresh = (row for row in rows if not _is_resident(row[0]))
        unproven = [part for row in fresh for part in whole_parts(*row)]
        for key, (weight, cut) in todo.items():
            if key in _table:  # another view of its storage is sharded
                _make_whole(weight, _table[key], cut)
        unproven += zip(proven, known_as[len(rows) :], strict=True)
        prove([w for w, _ in unproven], [n for _, n in unproven], pg)
        for key, (weight, cut) in todo.items():
            if key not in _table:
                _table[key] = _shard(weight, cut, pg, release)
        _sweep()
        if plan is not None and weights:
            _prepared.add(_mark(plan, weights))


def _mark(plan: str, tensors: Sequence[Tensor]) -> tuple[str, Key, Key]:
    """Tells a graph's run for one module from its runs for others, without reading them all."""
    return plan, key_of(tensors[0]), key_of(tensors[-1])


def _unseen(plan: str | None, tensors: Sequence[Tensor]) -> bool:
    return bool(plan is not None and tensors and _mark(plan, tensors) not in _declared)


def _is_resident(weight: Tensor) -> bool:
    """Sharded, and as this very view of its storage."""
    entry = entry_of(weight)
    return entry is not None and (entry.shard is None or entry.strides == strides_of(weight))


def _same(entry: Resident, weight: Tensor, layout: ShardLayout, pg: Any) -> bool:
    if entry.layout is not layout and entry.layout != layout:
        return False
    return entry.pg is pg and entry.strides == (weight.shape, weight.stride())


@contextmanager
def writing(tensor: Tensor) -> Iterator[None]:
    """The mode in which ``tensor`` may be written, whatever mode the caller is in."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        yield


def _shard(weight: Tensor, layout: ShardLayout, pg: Any, release: bool) -> Resident:
    entry = Resident(
        ref=_private.storage_weak_ref(weight),
        layout=layout,
        strides=strides_of(weight),
        pg=pg,
        shard=None,
        nbytes=weight.numel() * weight.element_size(),
    )
    weakref.finalize(weight, _sweep).atexit = False
    if release and pg.size() > 1 and _may_release(weight, entry):
        _release(weight, entry)
    return entry


def _may_release(weight: Tensor, entry: Resident) -> bool:
    why = None
    if weight.untyped_storage().nbytes() != entry.nbytes:
        why = "shares its storage with other tensors"
    elif _private.storage_key(weight) in _read_whole:
        why = "is read whole by something else"
    if why is not None:
        log.warning("%s %s and stays whole", name_of(weight), why)
    return why is None


def _release(weight: Tensor, entry: Resident) -> None:
    with torch.inference_mode(False), torch.no_grad():  # also when called in inference mode
        part = entry.layout.take(Tensor.detach(weight), entry.pg.rank(), entry.pg.size())
        copy = partial(part.clone, memory_format=torch.contiguous_format)
        entry.shard = _private.outside_graph_pools(part.device, copy)
    weight.untyped_storage().resize_(0)
    entry.released = True
    stray.refuse(weight, name_of(weight))


def _sweep() -> None:
    """Drop what belongs to parameters that are gone."""
    with _lock:
        for key in [k for k, entry in _table.items() if entry.ref.expired()]:
            del _table[key]
            _names.pop(key, None)
            _prepared.clear()
        for storage in [k for k, ref in _read_whole.items() if ref.expired()]:
            del _read_whole[storage]
            for mark in [m for m in _declared if storage in (m[1][0], m[2][0])]:
                _declared.discard(mark)


def _make_whole(weight: Tensor, entry: Resident, layout: ShardLayout) -> None:
    """Two graphs cut a weight differently: neither layout is kept. Collective."""
    with group_lock(entry.pg):
        if entry.shard is None:
            return
        if entry.layout == layout:
            why = f"as {layout} by graphs of different groups or through different views"
        else:
            why = f"as {entry.layout} and as {layout} by different graphs"
        log.warning("%s is wanted %s, so it is kept whole", name_of(weight), why)
        restore(weight, entry)
        entry.retired.append(entry.shard)
        entry.shard = None
        _prepared.clear()


def restore(weight: Tensor, entry: Resident) -> None:
    """Rebuild the full weight from all ranks' shards. Collective."""
    if not entry.released or entry.shard is None:
        return
    size = entry.pg.size()
    parts = entry.shard.new_empty((size, *entry.shard.shape))
    _private.all_gather_into(parts.view(-1), entry.shard.view(-1), entry.pg)
    weight.untyped_storage().resize_(entry.nbytes)
    stray.allow(weight)
    with writing(weight):
        whole = Tensor.detach(weight).as_strided(*entry.strides)
        for rank in range(size):
            entry.layout.put(whole, parts[rank], rank, size, mine=rank == entry.pg.rank())
    entry.released = False
