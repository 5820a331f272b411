# SPDX-License-Identifier: Apache-2.0
"""Sharding over a part of the tensor-parallel group: ``SPConfig(shard_group=…)``.

    4 ranks, shard_group=2     [0 1] [2 3]     each pair holds every weight once

Each part of ``shard_size`` neighbouring ranks holds the whole weights together; the parts hold
copies. Collectives stay inside a part: with parts no larger than a node they never leave it,
at the price of less memory saved. Tokens stay where they were: a rank's rows are its own, so
a part sees only the rows of its own ranks.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch.distributed as dist
from torch import fx

from .. import _private
from ..errors import PlacementError, SPError
from ..graph.collectives import op_name, ranks_of

NODE = "node"

_parts: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()


def shard_size(asked: str | int | None, tp_size: int, hardware: str | None = None) -> int:
    """Ranks of a part.

    Args:
        asked: ``SPConfig.shard_group``.
        tp_size: of the whole group, which the parts must divide.
        hardware: profile that says the ranks of a node where the launcher does not
            (``LOCAL_WORLD_SIZE``).

    Raises:
        SPError: the parts do not divide the group.
    """
    if asked is None:
        return tp_size
    size = min(tp_size, _ranks_of_node(hardware)) if asked == NODE else int(asked)
    if tp_size % size:
        raise SPError(
            f"shard_group={asked!r} makes parts of {size} ranks, which do not divide tp_size "
            f"{tp_size}; use one of {', '.join(str(n) for n in _divisors(tp_size))}"
        )
    return size


def _ranks_of_node(hardware: str | None) -> int:
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    from .hardware import hardware as profile

    return profile(hardware).ranks_per_node


def _divisors(n: int) -> list[int]:
    return [d for d in range(2, n + 1) if n % d == 0]


def part_of(group: Any, size: int) -> Any:
    """The process group of this rank's part of ``group``; made once, by its members.

    Ranks of the whole group must come here in the same order.
    """
    if group is None or size == group.size():
        return group
    made = _parts.setdefault(group, {})
    if size not in made:
        ranks = dist.get_process_group_ranks(group)
        first = group.rank() // size * size
        name = f"{group.group_name}_sp_passes_{size}_{first}"
        made[size] = _private.new_part(group, ranks[first : first + size], name)
    return made[size]


def verify(graph: fx.Graph, size: int, tp_size: int) -> None:
    """Nothing that a part gathered may meet what all ranks share, or leave the graph.

    Placements are followed over one group. Seen from a part, its gathered rows look like those
    that every rank has; they are not, so they must reach a reduce-scatter of the part before
    anything else.

    Raises:
        PlacementError: names the op where they meet; a fault of the pattern.
    """
    if size == tp_size:
        return
    inside: set[fx.Node] = set()
    for node in graph.nodes:
        found = [n for n in node.all_input_nodes if n in inside]
        mine = ranks_of(node) == size
        if mine and op_name(node) in ("sp_passes::ag_gemm", "sp_passes::all_gather"):
            inside.add(node)
        elif found and not (mine and op_name(node) in ("sp_passes::gemm_rs",)):
            if node.op == "output" or ranks_of(node) not in (None, size):
                raise PlacementError(
                    f"{found[0].name} holds the rows of {size} ranks and reaches {node.name}, "
                    f"which takes it for those of all {tp_size}; {_BUG}"
                )
            inside.add(node)


_BUG = "this is a fault of the pattern, not of the model: please report the graph"
