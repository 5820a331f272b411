# SPDX-License-Identifier: Apache-2.0
"""Which overlapped ops must keep the ranks apart themselves, and which need not.

An overlapped op writes into memory of its peers. A fast rank may start the next op that
uses the same memory while a slow one still works on the last. Nothing is needed where a
collective lies between the two: no rank leaves it before every rank has entered it.

*Between* is proven by data: the collective depends on the earlier op and the later op on
the collective, so that no scheduler can take it out. An op of another workspace counts as
such a collective. What the next graph does is not known, so each workspace has one end at
which its ops answer for the neighbour:

    exit   ag_gemm, gemm_gather: a collective follows before the next op of the kind, or
           before the graph ends
    entry  gemm_rs: a collective comes first, since the last op of the kind or since the
           graph began

In ``ag_gemm ─ act ─ gemm_rs`` each op is proven by the other, in any sequence of such graphs.
An op that is not gets ``barrier=True``. ``ag_mlp_rs`` uses none of these workspaces; its
collectives part others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx

from .graph.collectives import foreign, op_name, ranks_of, read_collective

EXIT, ENTRY = "exit", "entry"
ENDS = {
    "sp_passes::ag_gemm": EXIT,
    "sp_passes::gemm_gather": EXIT,
    "sp_passes::gemm_rs": ENTRY,
}
"""The end at which each kind of op answers for its workspace; each kind has its own."""


@dataclass
class _Workspace:
    """The ops that share one, in graph order; position i is bit i of the masks."""

    end: str
    ops: list[fx.Node]


def set_barriers(graph: fx.Graph, group: str, tp_size: int) -> dict[str, str]:
    """Set ``barrier`` on every overlapped op that needs it.

    Args:
        graph: the rewritten graph.
        group: name of the tensor-parallel group; a collective of another one parts nothing.
        tp_size: its ranks.

    Returns:
        For each overlapped op by name: ``"<name> lies between"``, the collective that proves
        it safe, or ``"barrier: <reason>"``.
    """
    found: dict[str, str] = {}
    for node in graph.nodes:
        if op_name(node) in ENDS and ranks_of(node) not in (None, tp_size):
            node.kwargs = {**node.kwargs, "barrier": True}
            found[node.name] = f"barrier: it is over a part of the {tp_size} ranks"
    spaces = _workspaces(graph, tp_size)
    if not spaces:
        return found
    parting = {node for node in graph.nodes if _parts(node, group, tp_size)}
    after = _collective_after(graph, parting)
    before = _collective_before(graph, parting)
    for space in spaces:
        needs = _not_apart(graph, space, parting)
        beyond = after if space.end == EXIT else before
        for node in space.ops:
            proof = beyond.get(node)
            reason = needs.get(node)
            if reason is None and proof is None:
                where = "after it" if space.end == EXIT else "before it"
                reason = f"no collective of this graph is sure to run {where}"
            if reason is not None:
                node.kwargs = {**node.kwargs, "barrier": True}
                found[node.name] = f"barrier: {reason}"
            else:
                assert proof is not None
                found[node.name] = f"{proof.name} lies between"
    return found


def counts(found: dict[str, str]) -> dict[str, int]:
    """How many ops are proven apart and how many have a barrier set."""
    kinds = Counter("set" if text.startswith("barrier") else "proven" for text in found.values())
    return {"proven": kinds["proven"], "set": kinds["set"]}


def _parts(node: fx.Node, group: str, tp_size: int) -> bool:
    """Whether no rank of the group leaves ``node`` before every rank has entered it.

    torch's all-to-all may have nothing to send between two of them; ours always has.
    """
    name = op_name(node)
    if name in ENDS or name == "sp_passes::ag_mlp_rs":
        return ranks_of(node) in (None, tp_size)
    found = read_collective(node)
    if found is None or (found.kind == "all_to_all" and not name.startswith("sp_passes::")):
        return False
    return foreign(found, group, tp_size) is None


def _workspaces(graph: fx.Graph, tp_size: int) -> list[_Workspace]:
    spaces: dict[str, _Workspace] = {}
    for node in graph.nodes:
        name = op_name(node)
        if name in ENDS and ranks_of(node) in (None, tp_size):
            spaces.setdefault(name, _Workspace(ENDS[name], [])).ops.append(node)
    return list(spaces.values())


def _collective_after(graph: fx.Graph, parting: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For every node a collective that depends on it, where there is one."""
    found: dict[fx.Node, fx.Node] = {}
    for node in reversed(graph.nodes):
        for user in node.users:
            proof = user if user in parting else found.get(user)
            if proof is not None:
                found[node] = proof
                break
    return found


def _collective_before(graph: fx.Graph, parting: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For every node a collective that it depends on, where there is one."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            proof = source if source in parting else found.get(source)
            if proof is not None:
                found[node] = proof
                break
    return found


def _not_apart(graph: fx.Graph, space: _Workspace, parting: set[fx.Node]) -> dict[fx.Node, str]:
    """The ops with a neighbour in their workspace from which no collective parts them.

    Two masks a node, over the workspace's ops: those that it depends on, and those that it
    depends on through a collective.
    """
    needs: dict[fx.Node, str] = {}
    if len(space.ops) < 2:
        return needs
    index = {node: i for i, node in enumerate(space.ops)}
    masks: dict[fx.Node, tuple[int, int]] = {}
    for node in graph.nodes:
        behind, apart = 0, 0
        for source in node.all_input_nodes:
            if source in masks:
                its_behind, its_apart = masks[source]
                behind, apart = behind | its_behind, apart | its_apart
        at = index.get(node)
        if at is not None:
            near = ((1 << at) - 1) & ~apart
            for i in _bits(near):
                ordered = bool(behind >> i & 1)
                _mark(needs, space.ops[i], node, space.end, ordered)
        if node in parting:
            apart = behind
        if at is not None:
            behind |= 1 << at
        if behind:
            masks[node] = (behind, apart)
    return needs


def _mark(
    needs: dict[fx.Node, str], first: fx.Node, second: fx.Node, end: str, ordered: bool
) -> None:
    """The earlier op answers at its exit, the later one at its entry; both if either may lead."""
    if end == EXIT or not ordered:
        needs.setdefault(first, f"nothing lies between it and {second.name}")
    if end == ENTRY or not ordered:
        needs.setdefault(second, f"nothing lies between it and {first.name}")


def _bits(mask: int) -> list[int]:
    out = []
    while mask:
        low = mask & -mask
        out.append(low.bit_length() - 1)
        mask ^= low
    return out
