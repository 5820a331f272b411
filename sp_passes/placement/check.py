# SPDX-License-Identifier: Apache-2.0
"""The strict form: every rule must hold, and the message says what to look at."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ..declare import Declared, declared_placement
from ..errors import PlacementError
from ..graph import params
from ..layout import ShardLayout
from .context import RuleError
from .propagate import run
from .registry import op_name
from .state import REPLICATE, State, States, of

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<where>\S+))?')


class NodePlacements(dict[str, "Placement | tuple[Placement, ...]"]):
    """Placements by node name; the ``fx.Node`` itself works as a key too."""

    def __missing__(self, key: Any) -> Any:
        if isinstance(key, fx.Node):
            return self[key.name]
        raise KeyError(key)


def check(
    gm: fx.GraphModule,
    config: Any,
    placements: Mapping[str, Declared] | None = None,
    tokens: str = "sharded",
) -> NodePlacements:
    """The placement of every node of ``gm``, or an error at the first rule that fails.

    Args:
        gm: aten graph of one rank, local shapes in ``meta["val"]``.
        config: gives ``tp_size``.
        placements: of inputs, by name (see ``input_states``).
        tokens: "sharded" or "replicated", for the inputs that ``placements`` leaves out.

    Raises:
        PlacementError: names the node and op, what was found, what was needed and why, and
            the source line when the graph carries stack traces.
    """
    inputs = input_states(gm, placements, tokens)
    size = getattr(config, "shard_size", config.tp_size)
    states = run(gm.graph, size, inputs, _raise, outer=config.tp_size)
    for node in gm.graph.nodes:
        if node.op == "output":
            _no_partial_leaves(node, states)
    return NodePlacements({node.name: _placement(state) for node, state in states.items()})


def _placement(state: States) -> Any:
    if isinstance(state, tuple):
        return tuple(_placement(s) for s in state)
    return state.placement


def _no_partial_leaves(output: fx.Node, states: Mapping[fx.Node, States]) -> None:
    for node in output.all_input_nodes:
        found = states[node]
        for state in found if isinstance(found, tuple) else (found,):
            if state.is_partial:
                error = RuleError(
                    f"the output {node.name}, which is Partial()",
                    "Replicate() or Shard(dim)",
                    "a Partial value leaves the graph without a reduction: reduce-scatter or "
                    "all-reduce it",
                )
                _raise(node, error)


def _raise(node: fx.Node, error: RuleError) -> NoReturn:
    where = source_line(node)
    raise PlacementError(
        f"{node.name} ({op_name(node.target)}): {error}" + (f"\n  at {where}" if where else "")
    )


def source_line(node: fx.Node) -> str | None:
    """``file:line, in function: code`` of the innermost frame that the node came from."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return None
    lines = trace.strip().splitlines()
    frames = [(i, m) for i, line in enumerate(lines) if (m := _FRAME.search(line))]
    if not frames:
        return lines[-1].strip()
    own = [f for f in frames if "/torch/" not in f[1]["file"]]
    at, frame = (own or frames)[-1]
    text = f"{frame['file']}:{frame['line']}"
    if frame["where"]:
        text += f", in {frame['where']}"
    code = [line.strip() for line in lines[at + 1 :] if line.strip() and "^" not in line]
    return f"{text}: {code[0]}" if code else text


# --- inputs -----------------------------------------------------------------------------


def input_states(
    gm_or_graph: fx.GraphModule | fx.Graph,
    placements: Mapping[str, Declared | State] | None = None,
    tokens: str = "sharded",
) -> dict[fx.Node, State]:
    """States of the placeholders and get_attr nodes of a graph.

    In this order: ``placements`` by name (a placeholder's name or target; a parameter's
    FQN, with dots or underscores); what the parameter declares; ``meta["sp_placement"]``;
    ``Replicate()`` for parameters (``meta["sp_param"]``, get_attr), numbers and
    0-d tensors; ``tokens`` for every other tensor.

    Args:
        tokens: "sharded" (``Shard(0)``: each rank its own rows) or "replicated".

    Raises:
        PlacementError: a name in ``placements`` is no input of the graph.
    """
    if tokens not in ("sharded", "replicated"):
        raise PlacementError(f"tokens={tokens!r}: needs 'sharded' or 'replicated'")
    graph = gm_or_graph if isinstance(gm_or_graph, fx.Graph) else gm_or_graph.graph
    owner = graph.owning_module if isinstance(gm_or_graph, fx.Graph) else gm_or_graph
    nodes = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
    asked = _checked(placements)
    used: set[str] = set()
    states: dict[fx.Node, State] = {}
    for node in nodes:
        keys = [k for k in _names(node) if k in asked]
        used.update(keys)
        trusted = _is_param(node)
        if keys:
            _fits(keys[0], asked[keys[0]], _ndim(node, owner))
            states[node] = of(asked[keys[0]], _ndim(node, owner), trusted)
        else:
            states[node] = of(_default(node, owner, tokens), _ndim(node, owner), trusted)
    if stray := sorted(set(asked) - used):
        known = ", ".join(dict.fromkeys(_names(n)[0] for n in nodes))
        raise PlacementError(
            f"placements names {', '.join(stray)}, which is no input of this graph; its inputs "
            f"are {known}"
        )
    return states


def _checked(placements: Any) -> dict[str, Declared | State]:
    """``placements`` if it maps names to placements that can be followed."""
    if placements is not None and not isinstance(placements, Mapping):
        raise PlacementError(
            f"placements={placements!r}: needs a mapping such as {{'x': Shard(0)}}"
        )
    for name, placement in (placements or {}).items():
        if not isinstance(placement, (Placement, State, ShardLayout)):
            raise PlacementError(
                f"placements[{name!r}] is {placement!r}; needs Shard(dim), Replicate() or "
                "Partial() of torch.distributed.tensor"
            )
        if isinstance(placement, Partial) and placement.reduce_op != "sum":
            raise PlacementError(f"placements[{name!r}] is {placement}; only sums are followed")
    return dict(placements or {})


def _fits(name: str, placement: Declared | State, ndim: int) -> None:
    if isinstance(placement, Shard) and not -ndim <= placement.dim < ndim:
        raise PlacementError(
            f"placements[{name!r}] is {placement}, but that input has {ndim} dimensions"
        )


def _names(node: fx.Node) -> list[str]:
    known = [params.fqn(node), str(node.target)]
    return list(dict.fromkeys([*known, node.name, *(n.replace(".", "_") for n in known)]))


def _is_param(node: fx.Node) -> bool:
    return node.op == "get_attr" or params.is_weight(node)


def _default(node: fx.Node, owner: Any, tokens: str) -> Declared | State:
    value = _value(node, owner)
    if not isinstance(value, torch.Tensor):
        return REPLICATE
    declared = declared_placement(value)
    if declared is None:
        declared = node.meta.get("sp_placement")
    if declared is not None:
        return declared
    if _is_param(node) or value.ndim == 0 or tokens == "replicated":
        return Replicate()
    return Shard(0)


def _value(node: fx.Node, owner: Any) -> Any:
    if node.op != "get_attr" or owner is None:
        return node.meta.get("val")
    found = owner
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return node.meta.get("val") if found is None else found


def _ndim(node: fx.Node, owner: Any) -> int:
    return getattr(_value(node, owner), "ndim", 0)
