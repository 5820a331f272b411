# SPDX-License-Identifier: Apache-2.0
"""Values that are whole in part: a merged weight of which one matrix is sharded.

Most rules would take such a value for sharded and add up, or gather, its whole part once
for each rank. So only the ops named here may see one: those that carry its elements along,
and slices, which part whole from sharded.
"""

from __future__ import annotations

from typing import Any

import torch

from ..layout import ShardLayout
from .context import Op, RuleError
from .registry import Rule
from .sizes import equal, static, to_the_end
from .state import REPLICATE, Runs, State, States, in_part, of


def apply(op: Op, rule: Rule) -> States:
    """The state of ``op``, some of whose inputs are whole in part; ``rule`` is its own rule.

    Raises:
        RuleError: the op is not known to keep what is whole apart from what is sharded.
    """
    name = getattr(getattr(op.node.target, "_schema", None), "name", "")
    special = _RULES.get(name)
    if special is not None:
        return special(op)
    if name in _KNOWS:
        return rule(op)
    tags = getattr(op.node.target, "tags", ())
    if name in _CARRIES or torch.Tag.pointwise in tags:
        return _carried(op, rule)
    source = next(a for a in op.tensors() if op.state(a).runs is not None)
    raise _refused(op, source, f"{name or op.node.name} may mix the two")


def _refused(op: Op, source: Any, meaning: str) -> RuleError:
    return RuleError(op.describe(source), "whole or sharded throughout", meaning)


def _carried(op: Op, rule: Rule) -> State:
    """The op's own rule says where the dimension goes; the runs go with it."""
    sources = [a for a in op.tensors() if op.state(a).runs is not None]
    first, runs = sources[0], op.state(sources[0]).runs
    assert runs is not None
    found = rule(op)
    if not isinstance(found, State) or found.dim is None:
        raise _refused(op, first, "the product or sum would count its whole part on every rank")
    for arg in op.tensors():
        if op.state(arg).dim is not None and op.state(arg).runs != runs:
            raise RuleError(
                f"{op.describe(first)} beside {op.describe(arg)}", "the same parts whole", ""
            )
    if not equal(op.out[found.dim], sum(n for n, _ in runs)):
        raise _refused(op, first, "the reshape splits or joins the dimension")
    return in_part(found.dim, runs)


def _slice(op: Op) -> State:
    source = op.args[0]
    state = op.state(source)
    sizes = op.shape(source)
    dim = op.arg("dim", 0) % len(sizes)
    if dim != state.dim:
        return state
    start, end, step = op.arg("start"), op.arg("end"), op.arg("step", 1)
    start = 0 if start is None else static(start)
    end = static(sizes[dim]) if to_the_end(end, sizes[dim]) else static(end)
    if start is None or end is None:
        raise _refused(op, source, "the slice has no fixed bounds")
    taken = _taken(state, start, end)
    if step != 1 and len(taken) != 1:
        raise _refused(op, source, "the slice takes every other element of both")
    return in_part(dim, taken)


def _split(op: Op) -> States:
    source = op.args[0]
    state = op.state(source)
    dim = op.arg("dim", 0) % len(op.shape(source))
    pieces = op.node.meta["val"]
    if dim != state.dim:
        return tuple(state for _ in pieces)
    out, start = [], 0
    for piece in pieces:
        stop = start + piece.shape[dim]
        out.append(in_part(dim, _taken(state, start, stop)))
        start = stop
    return tuple(out)


def _taken(state: State, start: int, end: int) -> Runs:
    """The runs of ``[start:end]``."""
    assert state.runs is not None
    total = sum(n for n, _ in state.runs)
    start, end = (min(max(b + total if b < 0 else b, 0), total) for b in (start, end))
    out, at = [], 0
    for size, whole in state.runs:
        length = min(at + size, end) - max(at, start)
        if length > 0:
            out.append((length, whole))
        at += size
    return tuple(out)


def _gemm_gather(op: Op) -> State:
    """x Replicate() times a weight whose kept segments are its sharded ones."""
    cut, x = ShardLayout.parse(op.arg("layout")), op.args[0]
    if not op.state(x).is_replicate:
        raise RuleError(op.describe(x), "Replicate()", "every rank multiplies all tokens")
    runs = of(cut, cut.dim + 1).runs
    for given, dim in ((op.arg("weight"), cut.dim), (op.arg("bias"), 0)):
        if given is None:
            continue
        state = op.state(given)
        if state.runs != runs or state.dim != dim:
            raise RuleError(op.describe(given), f"the parts of the layout {cut}")
    return in_part(len(op.out) - 1, runs or ())


def _prepare(op: Op) -> State:
    """Weights whose layouts keep what is sharded; of others nothing is said here."""
    for weight, text in zip(op.arg("weights"), op.arg("layouts"), strict=True):
        state, cut = op.state(weight), ShardLayout.parse(text)
        if (state != of(cut, cut.dim + 1)) if cut.kept else not state.is_replicate:
            raise RuleError(op.describe(weight), f"what the layout {cut} says")
    for weight in op.arg("proven") or ():
        if not op.state(weight).is_replicate:
            raise RuleError(op.describe(weight), "Replicate()", "it is taken for replicated")
    return REPLICATE


def _nothing(op: Op) -> State:
    return REPLICATE


_CARRIES = {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul", "aten::linear"),
    *("aten::t", "aten::transpose", "aten::permute", "aten::unsqueeze", "aten::squeeze"),
    *("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::expand", "aten::clone"),
    *("aten::alias", "aten::detach", "aten::contiguous", "aten::_to_copy"),
    "prims::convert_element_type",
}

_KNOWS = {"sp_passes::ag_gemm"}
"""Ops whose own rule keeps them apart: ``ag_gemm`` multiplies such a weight as it is."""

_RULES: dict[str, Any] = {
    "aten::slice": _slice,
    **dict.fromkeys(("aten::split", "aten::split_with_sizes", "aten::chunk"), _split),
    "sp_passes::gemm_gather": _gemm_gather,
    "sp_passes::prepare": _prepare,
    "sp_passes::agree": _nothing,
}
