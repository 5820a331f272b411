# SPDX-License-Identifier: Apache-2.0
"""Where the weights and tokens of a dump live, and how that is known.

proven      the graph itself shows it: its product is summed over the ranks, which makes sense
            only for a part; or ``sp_passes::prepare`` had the ranks compare it
declared    the module said so, in a dump of ours; or whoever asks
unknown     nothing says; the pass takes it for whole until the ranks compare it
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ..graph import params
from ..graph.collectives import FUSED, collectives, op_name, read_collective
from ..graph.linears import Linear
from ..graph.values import args
from ..placement import State, input_states, propagate
from .records import InspectError

_NEAREST = 256
_ROUNDS = 8
_REFUSED = re.compile(r"(\w+) \(\S+\): found (\w+) is Replicate\(\); needed Shard\((\d)\)")
aten, prims = torch.ops.aten, torch.ops.prims
_LINEAR_OPS = {
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.add.Tensor,
    aten.cat.default,
    aten.slice.Tensor,
    aten.constant_pad_nd.default,
    aten.clone.default,
    aten._to_copy.default,
    prims.convert_element_type.default,
}


@dataclass(frozen=True)
class Known:
    """A weight's placement, how it is known (``proven``, …), and why."""

    placement: Placement
    basis: str
    why: str


def tokens_of(graph: fx.Graph) -> str:
    """``sharded`` or ``replicated``: plain tensor parallelism only ever sums over all ranks."""
    kinds = {c.kind for c in collectives(graph)}
    return "replicated" if kinds == {"all_reduce"} else "sharded"


def placements(
    graph: fx.Graph, linears: Mapping[fx.Node, Linear], asked: Mapping[str, Placement]
) -> dict[fx.Node, Known]:
    """What is known of every weight.

    Args:
        asked: by FQN, which may hold ``*``; goes before what the graph shows.
    """
    shown = _from_sums(graph, linears)
    compared = _compared(graph)
    found: dict[fx.Node, Known] = {}
    for weight in params.weights(graph):
        name = params.fqn(weight)
        wanted = next((p for g, p in asked.items() if fnmatchcase(name, g)), None)
        declared = weight.meta.get("sp_placement")
        if wanted is not None:
            _fits(wanted, weight)
            found[weight] = Known(wanted, "declared", "as asked")
        elif declared is not None:
            found[weight] = Known(declared, "declared", "by its module")
        elif weight in compared:
            found[weight] = Known(Replicate(), "proven", "the ranks compare it (prepare)")
        elif weight in shown:
            found[weight] = shown[weight]
        else:
            found[weight] = Known(Replicate(), "unknown", "whole, as far as the dump tells")
    return found


def _fits(asked: Placement, weight: fx.Node) -> None:
    """Refuse a dimension that the weight does not have."""
    value = weight.meta.get("val")
    dim = asked.dim if isinstance(asked, Shard) else 0
    if isinstance(value, torch.Tensor) and isinstance(asked, Shard) and dim >= value.ndim:
        raise InspectError(
            f"{params.fqn(weight)} is declared as S{dim}, but has {value.ndim} dimensions; declare "
            "a dimension that it has, or narrow the name"
        )


def needed_by_ops(
    graph: fx.Graph, found: dict[fx.Node, Known], tp_size: int, tokens: str
) -> dict[fx.Node, Known]:
    """``found`` with the weights that an op takes as parts only, by how it was declared.

    A rule that refuses a whole weight says what it needs; that then holds for every call of the
    op. Known placements are never changed.
    """
    needs: dict[tuple[Any, int], Placement] = {}
    for _ in range(_ROUNDS):
        for weight, one in found.items():
            weight.meta["sp_placement"] = one.placement
        learned = dict(_refusals(graph, found, tp_size, tokens))
        if not learned.keys() - needs.keys():
            break
        needs.update(learned)
        for node in graph.nodes:
            for at, operand in enumerate(node.args):
                placement = needs.get((node.target, at))
                known = found.get(operand) if placement is not None else None
                if placement is not None and known is not None and known.basis == "unknown":
                    why = f"{op_name(node)} takes a part of it"
                    found[operand] = Known(placement, "proven", why)
    return found


def _refusals(
    graph: fx.Graph, found: Mapping[fx.Node, Known], tp_size: int, tokens: str
) -> Iterator[tuple[tuple[Any, int], Placement]]:
    """Which argument of an op needs which placement, from rules that refuse a whole weight."""
    states = propagate(graph, tp_size, input_states(graph, None, tokens))
    for node, state in states.items():
        first = state if isinstance(state, State) else next(iter(state), None)
        refused = None if first is None else _REFUSED.match(first.reason or "")
        if refused is None or refused[1] != node.name:
            continue
        for at, operand in enumerate(node.args):
            known = found.get(operand) if isinstance(operand, fx.Node) else None
            if known is not None and known.basis == "unknown" and operand.name == refused[2]:  # type: ignore[union-attr]
                yield (node.target, at), Shard(int(refused[3]))


def cut(graph: fx.Graph) -> set[fx.Node]:
    """Weights of which a rank keeps a part once ``sp_passes::prepare`` has run."""
    calls = [n for n in graph.nodes if op_name(n) == "sp_passes::prepare"]
    return {w for call in calls for w in args(call)[0]}


def _compared(graph: fx.Graph) -> set[fx.Node]:
    calls = [n for n in graph.nodes if op_name(n) == "sp_passes::prepare"]
    return {w for call in calls for w in call.all_input_nodes if params.is_weight(w)}


def _from_sums(graph: fx.Graph, linears: Mapping[fx.Node, Linear]) -> dict[fx.Node, Known]:
    """Weights whose products are summed over the ranks, and those that only feed these."""
    found: dict[fx.Node, Known] = {}
    for summed in collectives(graph):
        if summed.kind not in ("all_reduce", "reduce_scatter"):
            continue
        ends = _back(summed.x, linears, through=_LINEAR_OPS)
        rows = [linears[n] for n in ends if n in linears]
        for row in rows:
            why = f"its product is summed over the ranks ({summed.node.name})"
            found.setdefault(row.weight, Known(Shard(row.in_dim), "proven", why))
        for row in rows:
            _feeding(found, row.x, row.weight, row.call or row.node, linears)
    for node in graph.nodes:
        if op_name(node) != "sp_passes::gemm_rs":
            continue
        x, weight, _, layout = args(node)[:4]
        if str(layout).startswith("L") and params.is_weight(weight):
            why = f"its product is summed over the ranks ({node.name})"
            found.setdefault(weight, Known(Shard(int(layout[1:])), "proven", why))
            _feeding(found, x, weight, node, linears)
    return found | _from_mlps(graph)


def _from_mlps(graph: fx.Graph) -> dict[fx.Node, Known]:
    """Weights that an op of a whole MLP uses as this rank holds them."""
    found: dict[fx.Node, Known] = {}
    for node in graph.nodes:
        if op_name(node) != "sp_passes::ag_mlp_rs":
            continue
        for weight, layout in zip(args(node)[1:3], args(node)[3:5], strict=True):
            if str(layout).startswith("L") and params.is_weight(weight):
                why = f"its MLP is summed over the ranks ({node.name})"
                found[weight] = Known(Shard(int(layout[1:])), "proven", why)
    return found


def _feeding(
    found: dict[fx.Node, Known],
    x: fx.Node,
    weight: fx.Node,
    end: fx.Node,
    linears: Mapping[fx.Node, Linear],
) -> None:
    """Linears whose results feed ``end`` and nothing else, whatever lies between, hold parts."""
    why = f"it feeds only {params.fqn(weight)}, which holds a part"
    for node in _back(x, linears):
        if not _leads_to(node, end, linears):
            continue
        if node in linears:
            column = linears[node]
            found.setdefault(column.weight, Known(Shard(column.out_dim), "proven", why))
        elif op_name(node) == "sp_passes::ag_gemm":
            for own, layout in zip(args(node)[1], args(node)[3], strict=True):
                if str(layout).startswith("L"):
                    found.setdefault(own, Known(Shard(int(layout[1:])), "proven", why))


def _back(
    start: fx.Node, linears: Mapping[fx.Node, Linear], through: Collection[Any] | None = None
) -> list[fx.Node]:
    """The nearest linears, and ops that hold one, whose results reach ``start``.

    Args:
        through: the calls that may lie between; any, for None.
    """
    seen: set[fx.Node] = set()
    todo, ends = [start], []
    while todo and len(seen) < _NEAREST:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in linears or op_name(node) in FUSED:
            ends.append(node)
            continue
        passes = through is None or node.target in through
        if node.op == "call_function" and passes and read_collective(node) is None:
            todo.extend(node.all_input_nodes)
            todo.extend(n for user in node.users if _writes(user) for n in user.all_input_nodes)
    return ends


def _writes(node: fx.Node) -> bool:
    """Whether a call has no result, and so writes to its inputs, as attention ops do."""
    return node.op == "call_function" and not node.users and node.meta.get("val") is None


def _leads_to(start: fx.Node, end: fx.Node, linears: Mapping[fx.Node, Linear]) -> bool:
    seen: set[fx.Node] = set()
    todo = list(start.users)
    while todo:
        node = todo.pop()
        if node is end or node in seen:
            continue
        product = node in linears or op_name(node) in FUSED
        if product or node.op == "output" or len(seen) > _NEAREST:
            return False
        seen.add(node)
        todo.extend(node.users)
        if _writes(node):
            buffers = [n for n in node.all_input_nodes if n.op == "call_function"]
            todo.extend(user for n in buffers for user in n.users)
    return True
