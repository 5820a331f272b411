# SPDX-License-Identifier: Apache-2.0
"""Which graph inputs are weights, and under which name.

``meta["sp_param"]`` of a placeholder or get_attr node holds the weight's FQN, and
``meta["sp_placement"]`` what its module declared; a node without the first is an
activation. ``trace`` and the Inductor pass set them.
"""

from __future__ import annotations

import re

from torch import fx

from ..declare import Declared

_KEY = "sp_param"


def mark(node: fx.Node, fqn: str, declared: Declared | None = None) -> None:
    """Say that ``node`` is the weight ``fqn``, and what its module declared of it."""
    node.meta[_KEY] = fqn
    if declared is not None:
        node.meta["sp_placement"] = declared


def mark_use(node: fx.Node, use: str | None) -> None:
    """Say how other graphs of this process use the weight: "sharded", "whole", None;
    or "excluded": the configuration keeps it whole."""
    node.meta["sp_use"] = use


def use_elsewhere(node: fx.Node) -> str | None:
    return node.meta.get("sp_use")


def is_weight(node: fx.Node) -> bool:
    return _KEY in node.meta


def fqn(node: fx.Node) -> str:
    """The weight's name, or the node's when nobody named it."""
    return node.meta.get(_KEY, node.name)


def weights(graph: fx.Graph) -> list[fx.Node]:
    """Every weight of the graph, in graph order."""
    return [n for n in graph.nodes if n.op in ("placeholder", "get_attr") and is_weight(n)]


def common_name(names: list[str]) -> str:
    """Where several weights live: ``layers.3.mlp`` for its two projections."""
    split = [name.split(".") for name in names]
    prefix = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        prefix.append(parts[0])
    while prefix and prefix[-1] in ("weight", "bias"):
        prefix.pop()
    return ".".join(prefix) or "+".join(names)


_SOURCE = re.compile(r"\[['\"]([^'\"]+)['\"]\]|\.([A-Za-z_]\w*)|\[(\d+)\]")
_CONTAINERS = {"_modules", "_parameters", "_buffers"}


def fqn_of_source(source: str) -> str:
    """``layers.0.weight`` of Dynamo's ``L['self']._modules['layers']…``; ``x`` of ``L['x']``."""
    parts = [a or b or c for a, b, c in _SOURCE.findall(source)]
    if source.startswith("G[") or source.startswith(("L['self']", "L['stage_arguments']")):
        parts = parts[1:]
    return ".".join(p for p in parts if p not in _CONTAINERS) or source
