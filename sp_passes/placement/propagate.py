# SPDX-License-Identifier: Apache-2.0
"""One forward pass over a graph that gives every value its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from . import rules, rules_in_part  # noqa: F401  (the first fills the table)
from .context import Op, RuleError
from .registry import entry_of, op_name, spread
from .state import REPLICATE, State, States, of

Refuse = Callable[[fx.Node, RuleError], State]


def propagate(
    graph: fx.Graph,
    tp_size: int,
    inputs: Mapping[fx.Node, Placement | State],
    known: Mapping[fx.Node, States] | None = None,
    outer: int | None = None,
) -> dict[fx.Node, States]:
    """The state of every node, for the SPMD program of one rank.

    Lenient: where a rule fails, the result is unknown, with the reason, and so is what is
    computed from it. Collectives are the exception: what they return follows from what
    they do, whatever their input is said to be.

    Args:
        graph: aten graph with local shapes in ``meta["val"]``.
        inputs: states of placeholders and get_attr nodes; what is missing is replicated.
        known: states of an earlier run that still hold, so that only new nodes are looked at,
            and those that were unknown.
        outer: ranks of the whole group, where ``tp_size`` is a part of it that weights are
            sharded over: what a collective of either brings is whole as the part sees it
            (``policy.groups.verify`` keeps the two apart).
    """
    return run(graph, tp_size, inputs, _unknown, known, outer)


def _unknown(node: fx.Node, error: RuleError) -> State:
    return State(None, reason=f"{node.name} ({op_name(node.target)}): {error}")


def run(
    graph: fx.Graph,
    tp_size: int,
    inputs: Mapping[fx.Node, Placement | State],
    refuse: Refuse,
    known: Mapping[fx.Node, States] | None = None,
    outer: int | None = None,
) -> dict[fx.Node, States]:
    """``propagate`` with ``refuse`` called where a rule fails; it raises or gives a state."""
    env: dict[fx.Node, States] = {}
    op = Op(env, tp_size, outer)
    strict = refuse is not _unknown
    known = known or {}
    for node in graph.nodes:
        before = known.get(node)
        if before is not None and node.op != "output" and _is_known(before):
            env[node] = before
        elif node.op == "call_function":
            env[node] = _call(op, node, refuse, strict)
        elif node.op in ("placeholder", "get_attr"):
            given = inputs.get(node, REPLICATE)
            env[node] = REPLICATE if given is REPLICATE else of(given, _ndim(node))
        elif node.op == "output":
            env[node] = tuple(op.state(n) for n in _outputs(node))
        else:
            env[node] = _call(op, node, refuse, strict)
    return env


def _is_known(states: States) -> bool:
    if isinstance(states, State):
        return states.placement is not None
    return all(state.placement is not None for state in states)


def _call(op: Op, node: fx.Node, refuse: Refuse, strict: bool) -> States:
    env = op.env
    entry = entry_of(node.target)
    op.node = node
    plain, unknown, in_part = entry.plain, None, False
    for source in node._input_nodes:
        state = env[source]
        if state is not REPLICATE:
            plain = False
            if type(state) is State:
                if state.placement is None:
                    unknown = state
                    break
                in_part = in_part or state.runs is not None
    if plain:
        return spread(op, REPLICATE)
    if unknown is not None:
        return entry.result(op) if entry.result else spread(op, unknown)
    try:
        return rules_in_part.apply(op, entry.rule) if in_part else entry.rule(op)
    except RuleError as error:
        if entry.result and not strict:
            return entry.result(op)
        return spread(op, refuse(node, error))


def _ndim(node: fx.Node) -> int:
    return getattr(node.meta.get("val"), "ndim", 0)


def _outputs(node: fx.Node) -> list[fx.Node]:
    value = node.args[0]
    flat: list[fx.Node] = []
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, fx.Node):
            flat.append(item)
        elif isinstance(item, (tuple, list)):
            stack.extend(reversed(item))
        elif isinstance(item, dict):
            stack.extend(reversed(list(item.values())))
    return flat
