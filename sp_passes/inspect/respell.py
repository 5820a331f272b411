# SPDX-License-Identifier: Apache-2.0
"""Collectives that write in place, as ones that return: the spelling that the pass reads.

  _C.shm_allreduce(handle, data)                                 data holds the sum from here on
  auto_functionalized(_C.shm_allreduce, handle, data)[1]         before Inductor undoes it
⇒ vllm.all_reduce(data, "tp:0")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from .records import OpRef, Record, Ref

# Op -> position and name of the tensor that it sums over the ranks.
_IN_PLACE = {"torch.ops._C.shm_allreduce.default": (1, "data")}
_HELD = ("torch.ops.higher_order.auto_functionalized",)
_COMMON, _GROUP = "torch.ops.vllm.all_reduce.default", "tp:0"


def respell(records: Iterable[Record]) -> Iterator[Record]:
    """The records with such collectives replaced; others as they are."""
    now: dict[str, str] = {}
    held: dict[str, Ref] = {}
    values: dict[str, str] = {}
    for record in records:
        values[record.name] = record.value
        if now:
            record = replace(
                record,
                args=tuple(_renamed(a, now) for a in record.args),
                kwargs={k: _renamed(v, now) for k, v in record.kwargs.items()},
            )
        data = _summed(record)
        if data is not None and record.target in _HELD:
            held[record.name] = data
            continue
        if data is not None:
            value = values.get(data.name, "")
            yield _all_reduce(record, data, value)
            now = {k: record.name if v == data.name else v for k, v in now.items()}
            now[data.name] = record.name
            continue
        source = record.args[0] if record.args else None
        taken = held.get(source.name) if isinstance(source, Ref) else None
        if taken is not None and record.target == "operator.getitem":
            yield _all_reduce(record, taken, record.value or values.get(taken.name, ""))
        else:
            yield record


def _summed(record: Record) -> Ref | None:
    """The tensor that ``record`` sums in place, if it is such a call."""
    target, args = record.target, record.args
    if target in _HELD and args and isinstance(args[0], OpRef):
        target, args = args[0].name, ()
    if target not in _IN_PLACE:
        return None
    at, name = _IN_PLACE[target]
    found = args[at] if at < len(args) else record.kwargs.get(name)
    return found if isinstance(found, Ref) else None


def _all_reduce(record: Record, data: Ref, value: str) -> Record:
    return Record(
        record.name, "call", _COMMON, (data, _GROUP), {}, record.value or value, record.source
    )


def _renamed(value: Any, now: dict[str, str]) -> Any:
    if isinstance(value, Ref):
        return Ref(now.get(value.name, value.name))
    if isinstance(value, (list, tuple)):
        return type(value)(_renamed(v, now) for v in value)
    if isinstance(value, dict):
        return {k: _renamed(v, now) for k, v in value.items()}
    return value
