# SPDX-License-Identifier: Apache-2.0
"""Views and rearrangements: the values stay, their dimensions move.

Each rule is linear, so a Partial input gives a Partial output.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from .context import Op, RuleError, Sizes
from .registry import register
from .reshape import reshaped
from .segments import sliced
from .sizes import equal, keys, static
from .state import PARTIAL, REPLICATE, State, States, same_segments, shard


def moved(state: State, dim: int) -> State:
    """``state`` with its shard on ``dim``."""
    return state if state.dim == dim else shard(dim, state.segments)


def wrap(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def _view(op: Op) -> State:
    source = op.args[0]
    state = op.state(source)
    if state.dim is None:
        return state
    before, after = op.shape(source), op.out
    d = state.dim
    if len(before) == len(after) and all(map(equal, before, after)):
        return state
    return shard(*reshaped(keys(before), keys(after), d, state.segments, op.tp_size))


def _view_dtype(op: Op) -> State:
    source = op.args[0]
    state = op.state(source)
    before, after = op.shape(source), op.out
    if state.is_partial:
        raise RuleError(op.describe(source), "a reduced value", "bits of a sum are no sum of bits")
    same = all(map(equal, before, after))
    if state.dim is not None and state.dim == len(before) - 1 and not same:
        raise RuleError(op.describe(source), "another dimension sharded", "the dtype cuts the last")
    return state if same or state.constant is None else REPLICATE


def _order(op: Op) -> State:
    """permute, transpose, t, movedim."""
    source = op.args[0]
    state = op.state(source)
    if state.dim is None:
        return state
    ndim = len(op.shape(source))
    return moved(state, _dims_of(op, ndim).index(state.dim))


def _dims_of(op: Op, ndim: int) -> list[int]:
    name = op.name
    order = list(range(ndim))
    if name == "aten::permute":
        return [wrap(d, ndim) for d in op.arg("dims")]
    if name in ("aten::t", "aten::numpy_T", "aten::mT"):
        a, b = ndim - 2, ndim - 1
    else:
        a, b = (wrap(d, ndim) for d in op.args[1:3])
    if ndim >= 2:
        order[a], order[b] = order[b], order[a]
    return order


def _unsqueeze(op: Op) -> State:
    state = op.state(op.args[0])
    if state.dim is None:
        return state
    at = wrap(op.arg("dim"), len(op.out))
    return moved(state, state.dim + (at <= state.dim))


def _squeeze(op: Op) -> State:
    source = op.args[0]
    state = op.state(source)
    if state.dim is None:
        return state
    shape = op.shape(source)
    given = op.arg("dim")
    dims = range(len(shape)) if given is None else given if not isinstance(given, int) else [given]
    gone = [d for d in (wrap(d, len(shape)) for d in dims) if static(shape[d]) == 1]
    if state.dim in gone:
        raise _lost(op, source, "squeezes the sharded dimension, whose logical size is tp_size")
    return moved(state, state.dim - sum(d < state.dim for d in gone))


def _expand(op: Op) -> State:
    source = op.args[0]
    state = op.state(source)
    if state.dim is None:
        return state
    before, after = op.shape(source), op.out
    dim = state.dim + len(after) - len(before)
    if not equal(before[state.dim], after[dim]):
        raise _lost(op, source, "expands the sharded dimension")
    return moved(state, dim)


def _lost(op: Op, source: Any, meaning: str) -> RuleError:
    return RuleError(op.describe(source), "that dimension not sharded", meaning)


def slice_state(op: Op, source: Any, dim: int, start: Any, end: Any, step: Any) -> State:
    """State of ``source[..., start:end:step, ...]`` along ``dim``."""
    state = op.state(source)
    if state.dim is None or state.dim != dim:
        return state
    return shard(dim, sliced(op, source, state, start, end, step))


def _slice(op: Op) -> State:
    source = op.args[0]
    dim = wrap(op.arg("dim", 0), len(op.shape(source)))
    return slice_state(op, source, dim, op.arg("start"), op.arg("end"), op.arg("step", 1))


def _narrow(op: Op) -> State:
    source = op.args[0]
    dim = wrap(op.arg("dim"), len(op.shape(source)))
    start = op.arg("start")
    return slice_state(op, source, dim, start, start + op.arg("length"), 1)


def _select(op: Op) -> State:
    source = op.args[0]
    state = op.state(source)
    if state.dim is None:
        return state
    dim = wrap(op.arg("dim"), len(op.shape(source)))
    if dim == state.dim:
        raise _lost(op, source, "takes one element of the sharded dimension: another on each rank")
    return moved(state, state.dim - (dim < state.dim))


def _split(op: Op) -> States:
    """split, split_with_sizes, chunk, tensor_split, unbind, by the sizes of their results."""
    source = op.args[0]
    state = op.state(source)
    pieces = op.node.meta["val"]
    shape = op.shape(source)
    dim = wrap(op.arg("dim", 0), len(shape))
    if state.dim is None:
        return tuple(state for _ in pieces)
    if len(pieces[0].shape) < len(shape):
        if dim == state.dim:
            raise _lost(op, source, "takes single elements of the sharded dimension")
        return tuple(moved(state, state.dim - (dim < state.dim)) for _ in pieces)
    if state.dim != dim:
        return tuple(state for _ in pieces)
    out, start = [], 0
    for piece in pieces:
        stop = start + piece.shape[dim]
        out.append(shard(dim, sliced(op, source, state, start, stop, 1)))
        start = stop
    return tuple(out)


def together(op: Op, args: list[fx.Node]) -> State:
    """The one state that operands of equal rank share; constants fit any, if not added up."""
    found, first, constants = REPLICATE, None, []
    for arg in args:
        state = op.state(arg)
        if state.constant is not None:
            constants.append(arg)
        elif first is None:
            found, first = state, arg
        else:
            segments, agree = same_segments(found.segments, state.segments)
            if found.placement != state.placement or not agree:
                raise RuleError(
                    f"{op.describe(first)} beside {op.describe(arg)}",
                    "one placement for all of them",
                    "their rows or features would belong to different ranks",
                )
            found = found if found.dim is None else shard(found.dim, segments)
    values = {op.state(arg).constant for arg in constants}
    if first is None and len(values) == 1:
        return op.state(constants[0])
    if found.is_partial and values - {0.0}:
        raise RuleError(
            f"{op.name_of(constants[0])}, a constant, beside {op.describe(first)}",
            "zeros",
            "the reduction would add the constant tp_size times",
        )
    return found


def _cat(op: Op) -> State:
    args = [a for a in op.arg("tensors") if len(op.shape(a)) > 1 or static(op.shape(a)[0]) != 0]
    ndim = len(op.out)
    dim = wrap(op.arg("dim", 0), ndim)
    if any(op.state(a).dim == dim for a in args):
        return _cat_sharded(op, args, dim)
    return together(op, args)


def _cat_sharded(op: Op, args: list[fx.Node], dim: int) -> State:
    segments: list[int] = []
    known = True
    for arg in args:
        state, size = op.state(arg), static(op.shape(arg)[dim])
        if state.dim != dim:
            raise RuleError(op.describe(arg), f"Shard({dim})", "the others are sharded there")
        if state.segments is not None:
            segments += state.segments
            known = known and state.segments != ()
        elif len(args) == 1:
            return state
        elif size is None:
            raise RuleError(
                f"{op.describe(arg)} of symbolic size",
                "another dimension",
                "joining blocks of rows on every rank is not joining the rows",
            )
        else:
            segments.append(size * op.tp_size)
    return shard(dim, tuple(segments) if known else ())


def _stack(op: Op) -> State:
    state = together(op, list(op.arg("tensors")))
    if state.dim is None:
        return state
    at = wrap(op.arg("dim", 0), len(op.out))
    return moved(state, state.dim + (at <= state.dim))


def _untouched(argument: str) -> Any:
    """flip, roll and the like: the dimensions they name must not be sharded."""

    def rule(op: Op) -> State:
        source = op.args[0]
        state = op.state(source)
        if state.dim is None:
            return state
        ndim = len(op.shape(source))
        named = op.arg(argument)
        dims = [named] if isinstance(named, int) else named
        if not dims or state.dim in [wrap(d, ndim) for d in dims]:
            raise _lost(op, source, "moves elements between ranks")
        return state

    return rule


def _unfold(op: Op) -> State:
    """unfold(x, dimension, size, step): windows along it, their elements in a new last one."""
    source = op.args[0]
    if op.state(source).dim == wrap(op.args[1], len(op.shape(source))):
        raise _lost(op, source, "takes windows that reach into other ranks' parts")
    return op.state(source)


def _diagonal(op: Op) -> State:
    source = op.args[0]
    state = op.state(source)
    if state.dim is None:
        return state
    gone = [wrap(op.arg(name), len(op.shape(source))) for name in ("dim1", "dim2")]
    if state.dim in gone:
        raise _lost(op, source, "looks at positions, which are local")
    return moved(state, state.dim - sum(d < state.dim for d in gone))


def _pairs(op: Op) -> State:
    """view_as_complex, imag: one element of the last two, or one of each."""
    source = op.args[0]
    state = op.state(source)
    if "view_as" in op.name and state.dim == len(op.shape(source)) - 1:
        raise _lost(op, source, "joins the elements of the last dimension")
    return state if state.constant in (None, 0) else REPLICATE


def _glu(op: Op) -> State:
    """One half of a dimension, times the sigmoid of the other half."""
    source = op.args[0]
    state = op.state(source)
    if state.is_partial:
        raise RuleError(op.describe(source), "a reduced value", "the op is not linear")
    if state.dim is not None and state.dim == wrap(op.arg("dim", -1), len(op.shape(source))):
        raise _lost(op, source, "multiplies one half of the dimension by the other")
    return state if state.constant is None else REPLICATE


def _triangle(op: Op) -> State:
    source = op.args[0]
    state = op.state(source)
    if state.dim is not None and state.dim >= len(op.shape(source)) - 2:
        raise _lost(op, source, "looks at positions, which are local")
    return REPLICATE if state.constant is not None else state


def _repeat(op: Op) -> State:
    source = op.args[0]
    state = op.state(source)
    if state.dim is None:
        return state
    times = op.arg("repeats")
    dim = state.dim + len(times) - len(op.shape(source))
    if static(times[dim]) != 1:
        raise _lost(op, source, "repeats the sharded dimension")
    return moved(state, dim)


def _pad(op: Op) -> State:
    source = op.args[0]
    state = op.state(source)
    pad, value = op.arg("pad"), op.arg("value", 0)
    if state.is_partial and value != 0:
        raise RuleError(f"{op.describe(source)}, padded with {value}", "0", "the padding is summed")
    if state.dim is not None:
        back = 2 * (len(op.shape(source)) - 1 - state.dim)
        if back < len(pad) and any(static(p) != 0 for p in pad[back : back + 2]):
            raise _lost(op, source, "pads the sharded dimension on every rank")
    return REPLICATE if state.constant is not None else state


register("view reshape _unsafe_view flatten unflatten _reshape_alias reshape_copy view_copy", _view)
register("view.dtype", _view_dtype)
register("permute transpose t swapaxes swapdims numpy_T mT", _order)
register("unsqueeze", _unsqueeze)
register("squeeze", _squeeze)
register("expand expand_copy", _expand)
register("slice slice_copy", _slice)
register("narrow narrow_copy", _narrow)
register("select select_copy", _select)
register("split split_with_sizes split_copy split_with_sizes_copy", _split)
register("chunk tensor_split unbind unbind_copy", _split)
register("cat concat", _cat)
register("stack", _stack)
register("flip roll prims::rev", _untouched("dims"))
register("unfold unfold_copy", _unfold)
register("diagonal diagonal_copy", _diagonal)
register("view_as_complex imag", _pairs)
register("glu", _glu)
register("tril triu", _triangle)
register("repeat", _repeat)
register("constant_pad_nd", _pad)

__all__ = ["PARTIAL", "Sizes", "moved", "slice_state", "together", "wrap"]
