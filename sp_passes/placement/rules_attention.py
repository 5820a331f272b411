# SPDX-License-Identifier: Apache-2.0
"""Attention in other layouts than ``[batch, heads, positions, features]`` of plain tensors.

    _flash_attention_forward, _efficient_attention_forward   [batch, positions, heads, features]
    the same with cumulative lengths, torch_attn::_varlen_attn   [tokens, heads, features]
    flex_attention                                            a higher-order op, with its bodies

Heads never meet. Samples do not either, but where lengths say at which token each begins.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx

from .context import Op, RuleError
from .registry import register, spread
from .sizes import static
from .state import REPLICATE, State, States, shard


def _alike(op: Op, dims: Collection[int], what: str) -> State:
    """The one state of query, key and value, which may be sharded along ``dims``."""
    query = op.args[0]
    state = op.state(query)
    for arg in op.args[:3]:
        found = op.state(arg)
        if found.placement != state.placement or found.dim not in (None, *dims) or found.is_partial:
            raise RuleError(
                f"{op.describe(arg)} beside {op.describe(query)}",
                f"query, key and value sharded alike along {what}",
                "attention mixes positions and needs all features of a head",
            )
    return REPLICATE if state.constant is not None else state


def _others_whole(op: Op) -> list[fx.Node]:
    """Tensors beside query, key and value."""
    others = [arg for arg in op.tensors()[3:] if _inputs_of(arg) is None]
    for arg in others:
        if not op.state(arg).is_replicate:
            raise RuleError(op.describe(arg), "Replicate()", "it belongs to every query")
    return others


def _heads_behind(op: Op) -> States:
    """``[…, positions, heads, features]``; of 4 dimensions the first are samples."""
    ndim = len(op.shape(op.args[0]))
    if op.arg("dropout_p", 0) != 0:
        raise RuleError(f"dropout {op.arg('dropout_p')}", "0", "ranks draw different numbers")
    samples = ndim == 4 and not _others_whole(op)
    state = _alike(op, (0, ndim - 2) if samples else (ndim - 2,), "heads or whole samples")
    if state.dim is None:
        return spread(op, REPLICATE)
    of_sums = shard(1 if ndim == 4 and state.dim else 0, state.segments)  # [(batch,) heads, …]
    values = op.node.meta["val"]
    if not isinstance(values, (tuple, list)):
        return state
    return (state, of_sums, *(REPLICATE for _ in values[2:]))


def _flex(op: Op) -> States:
    """The bodies must not ask which sample (or head) it is, if those are sharded."""
    state = _alike(op, (0, 1), "batch or heads")
    others = _others_whole(op)
    if state.dim is None:
        return spread(op, REPLICATE)
    for arg in others:
        sizes = op.shape(arg)
        if len(sizes) > 2 and static(sizes[state.dim]) != 1:
            raise RuleError(
                f"{op.describe(arg)} of sizes {list(sizes)}",
                f"size 1 along dimension {state.dim}",
                "a block mask for every sample or head would be paired with a rank's own ones",
            )
    for body, at in ((op.args[3], 1), (op.args[4][-1], 0)):
        inputs = _inputs_of(body)
        if inputs is None or inputs[at + state.dim].users:
            raise RuleError(
                f"{op.name_of(body)}, which reads the index of a sample or head",
                "a score_mod and mask_mod that do not, along the sharded dimension",
                "the index counts a rank's own ones only",
            )
    return spread(op, state)


def _inputs_of(body: Any) -> list[fx.Node] | None:
    """Placeholders of a higher-order op's body; None for anything else."""
    is_body = isinstance(body, fx.Node) and body.op == "get_attr"
    owner = body.graph.owning_module if is_body else None
    module = getattr(owner, str(body.target), None) if owner is not None else None
    if not isinstance(module, fx.GraphModule):
        return None
    return list(module.graph.find_nodes(op="placeholder"))


register("_flash_attention_forward _efficient_attention_forward", _heads_behind, plain=False)
register("torch_attn::_varlen_attn", _heads_behind)
register("python::flex_attention", _flex)
