# SPDX-License-Identifier: Apache-2.0
"""One table of the ways a collective is spelled in a traced graph.

    torch     _c10d_functional.all_gather_into_tensor(x, size, group) [+ wait_tensor]
    vLLM      vllm.all_gather(x, dim, size, group), by name: vLLM is not imported
    ours      sp_passes.all_gather(x, group, tp_size)

Each row names the kind and where the arguments are. What a collective does to
placements is said in ``placement/rules_collective.py``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import fx

from .values import args


@dataclass(frozen=True)
class Collective:
    """One collective of a graph.

    Attributes:
        node: the call.
        result: its usable value: the ``wait_tensor`` behind an asynchronous call.
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``all_to_all``.
        x: what this rank contributes.
        dim: the dimension that is gathered or scattered; 0 where the op has no choice.
        group: the group's name, or None where the op does not say.
        size: ranks, or None where the op does not say.
    """

    node: fx.Node
    result: fx.Node
    kind: str
    x: fx.Node
    dim: int
    group: str | None
    size: int | None


@dataclass(frozen=True)
class _Row:
    """Positions of the arguments; None where the op has none."""

    kind: str
    dim: int | None = None
    size: int | None = None
    group: int | None = None
    is_async: bool = False


_TORCH = "_c10d_functional"
TABLE: dict[str, _Row] = {
    f"{_TORCH}::all_gather_into_tensor": _Row("all_gather", None, 1, 2, True),
    f"{_TORCH}::reduce_scatter_tensor": _Row("reduce_scatter", None, 2, 3, True),
    f"{_TORCH}::all_reduce": _Row("all_reduce", None, None, 2, True),
    f"{_TORCH}::all_to_all_single": _Row("all_to_all", None, None, 3, True),
    "vllm::all_gather": _Row("all_gather", 1, 2, 3),
    "vllm::reduce_scatter": _Row("reduce_scatter", 1, 2, 3),
    "vllm::all_reduce": _Row("all_reduce", None, None, 1),
    "sp_passes::all_gather": _Row("all_gather", None, 2, 1),
    "sp_passes::reduce_scatter": _Row("reduce_scatter", None, 2, 1),
    "sp_passes::all_reduce": _Row("all_reduce", None, 2, 1),
    "sp_passes::feature_to_token": _Row("all_to_all", None, 3, 2),
    "sp_passes::token_to_feature": _Row("all_to_all", None, 2, 1),
}

FUSED: dict[str, tuple[str, ...]] = {
    "sp_passes::ag_gemm": ("all_gather",),
    "sp_passes::gemm_rs": ("reduce_scatter",),
    "sp_passes::gemm_gather": ("all_gather",),
    "sp_passes::weight_gather": ("all_gather",),
    "sp_passes::ag_mlp_rs": ("all_gather", "reduce_scatter"),
}
"""Ops that hold collectives of no tokens alone; ``count`` counts the collectives."""


def op_name(node: fx.Node) -> str:
    """``namespace::op`` without the overload; empty for what is no operator."""
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else ""


def ranks_of(node: fx.Node) -> int | None:
    """The ``tp_size`` that an op of sp_passes carries, the size that another collective names."""
    if not op_name(node).startswith("sp_passes::"):
        found = read_collective(node)
        return None if found is None else found.size
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    at = names.index("tp_size") if "tp_size" in names else len(node.args)
    size = node.args[at] if at < len(node.args) else None
    return size if isinstance(size, int) else None


def read_collective(node: fx.Node) -> Collective | None:
    """``node`` as a collective, or None."""
    if node.op != "call_function":
        return None
    row = TABLE.get(op_name(node))
    if row is None:
        return None

    def given(at: int | None) -> Any:
        return args(node)[at] if at is not None and at < len(node.args) else None

    return Collective(
        node=node,
        result=_awaited(node) if row.is_async else node,
        kind=row.kind,
        x=args(node)[0],
        dim=given(row.dim) or 0,
        group=given(row.group),
        size=given(row.size),
    )


def _awaited(node: fx.Node) -> fx.Node:
    waits = [u for u in node.users if op_name(u) == f"{_TORCH}::wait_tensor"]
    return waits[0] if len(waits) == 1 else node


def collectives(graph: fx.Graph) -> list[Collective]:
    """Every collective of the graph, in graph order."""
    return [c for node in graph.nodes if (c := read_collective(node)) is not None]


def count(graph: fx.Graph) -> dict[str, int]:
    """How many collectives of each kind one run of the graph does, fused ones included."""
    kinds = Counter(c.kind for c in collectives(graph))
    for node in graph.nodes:
        kinds.update(FUSED.get(op_name(node), ()))
    return dict(kinds)


def token_gather(node: fx.Node) -> Collective | None:
    """The all-gather along dimension 0 whose usable value ``node`` is, or None."""
    call = args(node)[0] if op_name(node) == f"{_TORCH}::wait_tensor" else node
    found = read_collective(call)
    is_gather = found is not None and found.kind == "all_gather" and found.dim == 0
    return found if is_gather and found is not None and found.result is node else None


def foreign(found: Collective, group: str, tp_size: int) -> str | None:
    """Why a collective is not one of the tensor-parallel group ``group``, or None.

    vLLM names its groups ``tp:0``, ``dp:0``, …; offline (``""``) any name is taken.
    """
    name = found.node.name
    if found.size not in (None, tp_size):
        return f"other group: {name} is over {found.size} ranks, not {tp_size}"
    if op_name(found.node).startswith("vllm::"):
        is_tp = str(found.group).partition(":")[0] == "tp"
    else:
        is_tp = not group or found.group == group
    return None if is_tp else f"other group: {name} is over {found.group!r}, not {group!r}"


def reduction(found: Collective) -> str:
    """How a reduce-scatter or all-reduce combines the ranks' values; ``sum`` where unsaid."""
    given = args(found.node)
    named = op_name(found.node).startswith(_TORCH) and len(given) > 1
    return str(given[1]).lower() if named else "sum"
