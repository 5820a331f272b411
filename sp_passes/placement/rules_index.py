# SPDX-License-Identifier: Apache-2.0
"""Look-ups and writes by index: embedding, index, gather, scatter."""

from __future__ import annotations

from typing import Any

from torch import fx

from .context import Op, RuleError
from .registry import register
from .rules_pointwise import broadcast, operand
from .rules_view import moved, slice_state, wrap
from .state import PARTIAL, REPLICATE, State, shard

ELSEWHERE = "the rows it asks for may be on other ranks"


def _reduced(op: Op, *args: Any) -> None:
    for arg in args:
        if isinstance(arg, fx.Node) and op.state(arg).is_partial:
            raise RuleError(op.describe(arg), "a reduced value", "an index or its source is no sum")


def _embedding(op: Op) -> State:
    """Rows of a table. A table cut by rows (vocabulary) under replicated ids gives Partial.

    The ids are then taken for the masked, rank-local ones of a vocabulary-parallel
    embedding: its masking multiplies by zero or writes zeros, which keeps Partial.
    """
    table, ids = op.args[:2]
    weight, index = op.state(table), op.state(ids)
    _reduced(op, ids)
    if weight.is_partial:
        return _partial_source(op, ids)
    if index.dim is None:
        if weight.dim == 0:
            return PARTIAL
        return REPLICATE if weight.dim is None else shard(len(op.out) - 1, weight.segments)
    if not weight.is_replicate:
        raise RuleError(
            f"{op.describe(ids)} and {op.describe(table)}",
            "replicated ids, or a whole table on every rank",
            "each rank would look up its own tokens in its own part: all-gather the ids first",
        )
    return index


def _partial_source(op: Op, *indices: Any) -> State:
    for index in indices:
        if not op.state(index).is_replicate:
            raise RuleError(op.describe(index), "Replicate()", "it picks from a Partial() value")
    return PARTIAL


def _index(op: Op) -> State:
    """self[i, j, ...] with index tensors."""
    source = op.args[0]
    indices = list(op.arg("indices"))
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    state = op.state(source)
    _reduced(op, *(i for _, i in given))
    if state.is_partial:
        return _partial_source(op, *(i for _, i in given))
    args = [operand(op, i) for _, i in given]
    width = max(len(a.shape) for a in args)
    sharded = [a for a in args if a.state.dim is not None]
    first, count = given[0][0], len(given)
    adjacent = [d for d, _ in given] == list(range(first, first + count))
    if not sharded:
        if state.dim is None:
            return REPLICATE
        if state.dim in [d for d, _ in given] or any(_is_mask(i) for _, i in given):
            raise RuleError(op.describe(source), "an index of other dimensions", ELSEWHERE)
        if not adjacent:
            return moved(state, width + state.dim - sum(d < state.dim for d, _ in given))
        return moved(state, state.dim + (width - count if state.dim > first else 0))
    if state.dim is not None or any(_is_mask(i) for _, i in given):
        raise RuleError(
            f"{op.describe(source)}, indexed by {sharded[0].name}", "one side", ELSEWHERE
        )
    longest = max((a.shape for a in args), key=len)
    found = broadcast(args, longest)
    assert found.dim is not None
    return moved(found, found.dim + (first if adjacent else 0))


def _is_mask(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return value is not None and not value.dtype.is_floating_point and value.dtype.itemsize == 1


def _index_put(op: Op) -> State:
    """self with values written (or added) at indices."""
    source, indices, values = op.args[:3]
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    state, written = op.state(source), op.state(values)
    if any(not op.state(i).is_replicate for _, i in given):
        return _index_put_rows(op, source, given, values)
    if state.is_partial or written.is_partial:
        for arg in (source, values):
            found = op.state(arg)
            if not found.is_partial and found.constant != 0:
                raise RuleError(op.describe(arg), "Partial() or zeros", "beside a Partial() value")
        return PARTIAL
    if state.dim is None and written.dim is None:
        return REPLICATE
    if state.dim in [d for d, _ in given] or (written.dim is not None):
        raise RuleError(f"{op.describe(source)}, {op.describe(values)}", "other dims", ELSEWHERE)
    return state


def _index_put_rows(op: Op, source: Any, given: list[Any], values: Any) -> State:
    """A mask of the same rows as the source, with a value that has no rows."""
    mask = given[0][1]
    aligned = len(given) == 1 and given[0][0] == 0 and _is_mask(mask)
    same = op.state(mask).placement == op.state(source).placement
    plain = op.state(values).is_replicate and len(op.shape(values)) == 0
    if aligned and same and plain:
        return op.state(source)
    raise RuleError(op.describe(mask), "Replicate(), or a mask of the same rows", ELSEWHERE)


def _gather(op: Op) -> State:
    """gather, take_along_dim: result[i][j] = self[i][index[i][j]]."""
    source = op.args[0]
    index = op.arg("index", op.arg("indices"))
    ndim = len(op.shape(source))
    dim = wrap(op.arg("dim"), ndim)
    state, chosen = op.state(source), op.state(index)
    _reduced(op, index)
    if state.is_partial:
        return _partial_source(op, index)
    if state.dim == dim:
        raise RuleError(op.describe(source), f"dimension {dim} whole", ELSEWHERE)
    if state.dim is None and chosen.dim in (None, dim):
        return REPLICATE if chosen.dim is None else chosen
    return broadcast([operand(op, source), operand(op, index)], op.out)


def _scatter(op: Op) -> State:
    """scatter, scatter_add, scatter_reduce: row i of the index writes row i of self."""
    source, dim, index = op.args[:3]
    values = op.args[3] if len(op.args) > 3 else op.arg("src", op.arg("value"))
    ndim = len(op.shape(source))
    at = wrap(dim, ndim)
    args = [operand(op, n) for n in (source, index, values) if isinstance(n, fx.Node)]
    sharded = [a for a in args if a.state.dim is not None]
    adds = "add" in op.name
    fresh = adds and op.state(source).constant == 0
    aligned = all(a.state.dim == at or a.state.constant is not None for a in args)
    if fresh and sharded and aligned:
        return PARTIAL
    if fresh and any(a.state.is_partial for a in args):
        return _partial_source(op, index)
    _reduced(op, source, index, values)
    if any(a.state.dim == at for a in sharded):
        raise RuleError(
            f"{sharded[0].name} is {sharded[0].state}", f"dimension {at} whole", ELSEWHERE
        )
    return broadcast(args, op.out)


def _index_select(op: Op) -> State:
    source, dim, index = op.args[:3]
    state, chosen = op.state(source), op.state(index)
    at = wrap(dim, len(op.shape(source)))
    _reduced(op, index)
    if state.is_partial:
        return _partial_source(op, index)
    if state.dim == at or (state.dim is not None and chosen.dim is not None):
        raise RuleError(f"{op.describe(source)}, {op.describe(index)}", "one side", ELSEWHERE)
    return shard(at, chosen.segments) if chosen.dim is not None else state


def _index_add(op: Op) -> State:
    """self with rows of ``source`` added at ``index`` along ``dim``."""
    target, dim, index, rows = op.args[:4]
    at = wrap(dim, len(op.shape(target)))
    state, added = op.state(target), op.state(rows)
    by_index = op.state(index)
    if state.constant == 0 and added.dim == at and by_index.dim == 0:
        return PARTIAL
    if added.is_partial and by_index.is_replicate and (state.is_partial or state.constant == 0):
        return PARTIAL
    _reduced(op, target, index, rows)
    if not by_index.is_replicate or at in (state.dim, added.dim):
        raise RuleError(f"{op.describe(rows)}, {op.describe(index)}", "other dims", ELSEWHERE)
    if state.constant is not None or state.placement == added.placement:
        return added
    raise RuleError(f"{op.describe(target)}, {op.describe(rows)}", "the same placement", ELSEWHERE)


def _one_hot(op: Op) -> State:
    source = op.args[0]
    _reduced(op, source)
    return op.state(source) if op.state(source).constant is None else REPLICATE


def _slice_scatter(op: Op) -> State:
    """self with ``src`` written into a slice along ``dim``."""
    target, src = op.args[:2]
    at = wrap(op.arg("dim", 0), len(op.shape(target)))
    state, written = op.state(target), op.state(src)
    if at in (state.dim, written.dim):
        kept = slice_state(op, target, at, op.arg("start"), op.arg("end"), op.arg("step", 1))
        if kept != state or written.placement != state.placement:
            raise RuleError(f"{op.describe(target)}, {op.describe(src)}", "other dims", ELSEWHERE)
        return written
    if state.is_partial or written.is_partial:
        for arg in (target, src):
            if not op.state(arg).is_partial and op.state(arg).constant != 0:
                raise RuleError(op.describe(arg), "Partial() or zeros", "beside a Partial() value")
        return PARTIAL
    shape = op.shape(target)
    return broadcast([operand(op, n) for n in (target, src)], shape)


def _local(op: Op) -> State:
    """nonzero and the like: sizes and positions that only a whole value has."""
    source = op.args[0]
    if op.state(source).is_replicate:
        return REPLICATE
    raise RuleError(op.describe(source), "Replicate()", "positions in a part are not in the whole")


register("embedding", _embedding)
register("index _unsafe_index", _index)
register("index_put _unsafe_index_put", _index_put)
register("gather take_along_dim", _gather)
register("scatter scatter_add scatter_reduce", _scatter)
register("index_select", _index_select)
register("index_add", _index_add)
register("one_hot", _one_hot)
register("slice_scatter", _slice_scatter)
register("nonzero masked_select _local_scalar_dense item bincount unique _unique2", _local)
