# SPDX-License-Identifier: Apache-2.0
"""Slices along the sharded dimension: legal at segment boundaries, or with a stride."""

from __future__ import annotations

from typing import Any

from .context import Op, RuleError
from .sizes import equal, static, to_the_end
from .state import Segments, State


def sliced(op: Op, source: Any, state: State, start: Any, end: Any, step: Any) -> Segments | None:
    """Segments of ``source[start:end:step]`` along the dimension that ``state`` shards.

    Legal are: the whole; a run of whole local segments; the whole or one segment of it from
    ``a < step`` in steps that divide every local block (interleaved gate and up).

    Raises:
        RuleError: the slice takes other logical elements on other ranks.
    """
    assert state.dim is not None
    size = op.shape(source)[state.dim]
    start = 0 if start is None else start
    if step == 1 and static(start) == 0 and to_the_end(end, size):
        return state.segments
    if step == 1 and equal(_length(op, state.dim), size):
        return state.segments
    if state.segments == ():
        return ()
    length, first = static(size), static(start)
    last = length if to_the_end(end, size) else static(end)
    if length is None or first is None or last is None:
        raise _cut(op, source, state, start, end, step)
    if state.segments is None and step == 1:
        raise _cut(op, source, state, start, end, step)
    first, last = _clamp(first, length), _clamp(last, length)
    segments = state.segments or (length * op.tp_size,)
    found = _take(segments, op.tp_size, first, last, step)
    if found is None:
        raise _cut(op, source, state, start, end, step)
    return found


def _take(segments: Segments, tp_size: int, first: int, last: int, step: int) -> Segments | None:
    local = [s // tp_size for s in segments]
    edges = [sum(local[:i]) for i in range(len(local) + 1)]
    base = max(e for e in edges if e <= first)
    offset = first - base
    if offset >= step:
        return None
    i = edges.index(base)
    end = next((j for j in range(i, len(edges)) if _ends(edges, j, i, last, offset, step)), None)
    if end is None or end == i:
        return None
    if any(n % step for n in local[i:end]):
        return None
    return tuple(s // step for s in segments[i:end])


def _ends(edges: list[int], j: int, i: int, last: int, offset: int, step: int) -> bool:
    """Whether a slice that stops at ``last`` takes everything up to edge ``j``."""
    return edges[j] - step + offset < last <= edges[j] + offset and j > i


def _clamp(position: int, size: int) -> int:
    return min(max(position + size if position < 0 else position, 0), size)


def _length(op: Op, dim: int) -> Any:
    value = op.node.meta.get("val")
    shape = getattr(value, "shape", ())
    return shape[dim] if dim < len(shape) else -1


def _cut(op: Op, source: Any, state: State, start: Any, end: Any, step: Any) -> RuleError:
    assert state.dim is not None
    size = op.shape(source)[state.dim]
    what = f"[{start}:{'' if end is None or to_the_end(end, size) else end}:{step}]"
    if state.segments is None:
        meaning = "slices the rows of each rank, which are other rows on each"
    else:
        local = [s // op.tp_size for s in state.segments]
        meaning = f"slices through a sharded segment (local sizes {local})"
    return RuleError(f"{op.describe(source)}, sliced {what}", "whole segments", meaning)
