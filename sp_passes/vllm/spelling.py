# SPDX-License-Identifier: Apache-2.0
"""The CPU build's all-reduce, in the spelling that patterns read, and back.

    auto_functionalized(_C.shm_allreduce, handle, data) → getitem 1
    sp_passes.all_reduce(data, group, tp_size)

On GPUs a graph holds ``vllm.all_reduce``, which patterns read as it is. The op in shared
memory writes in place and so stands in a graph as a tuple that no placement rule reads. What no
pattern has replaced is written back, so that vLLM's own op runs.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..config import SPConfig
from ..graph.values import args, copy_origin
from . import _private

_CALL = torch.ops.higher_order.auto_functionalized
_COMMON = torch.ops.sp_passes.all_reduce.default
_MARK = "sp_vllm_shm"


def to_common(graph: fx.Graph, handle: int | None, config: SPConfig) -> int:
    """Respell the all-reduces of the TP group; returns how many there were."""
    count = 0
    for node in list(graph.nodes):
        if handle is None or not _is_shm(node, handle):
            continue
        results = [u for u in node.users if u.target is operator.getitem and args(u)[1] == 1]
        if len(results) != len(node.users):
            continue
        for result in results:
            with graph.inserting_before(result):
                call = graph.call_function(
                    _COMMON, (node.kwargs["data"], config.group_name, config.tp_size)
                )
            copy_origin(call, result)
            call.meta["val"], call.meta[_MARK] = result.meta["val"], True
            result.replace_all_uses_with(call)
            graph.erase_node(result)
        graph.erase_node(node)
        count += 1
    return count


def to_vendor(graph: fx.Graph, handle: int | None) -> None:
    """Write the respelled all-reduces that are left back as vLLM's op."""
    for node in list(graph.nodes):
        if handle is None or not node.meta.get(_MARK) or node.target is not _COMMON:
            continue
        value = node.meta["val"]
        with graph.inserting_before(node):
            call = graph.call_function(
                _CALL, (_private.shm_all_reduce(),), {"handle": handle, "data": args(node)[0]}
            )
            result = graph.call_function(operator.getitem, (call, 1))
        for new, val in ((call, (None, value)), (result, value)):
            copy_origin(new, node)
            new.meta["val"] = val
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _is_shm(node: fx.Node, handle: int) -> bool:
    if node.target is not _CALL or args(node)[0] is not _private.shm_all_reduce():
        return False
    return bool(node.kwargs.get("handle") == handle)
