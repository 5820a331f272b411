# SPDX-License-Identifier: Apache-2.0
"""Bytes that the kernels of a rewritten graph share between ranks, on one of them.

Each kind of kernel has one buffer, which all layers use and which is as large as the call that
moves the most. It grows as larger calls come, and what it was before stays, since captured CUDA
graphs may use it: so calls are taken in the graph's order. All sizes come from the functions that
allocate. The driver rounds each buffer up (on an H200 to 2 MiB), which is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import fx

from ..graph.collectives import op_name
from ..graph.values import args, shape, value
from ..layout import LocalPart, parse
from ..ops import hopper, kernels, mlp, one_launch, symmetric, tuned
from ..ops.kernels import Call

Capability = tuple[int, int]

MACHINES: dict[str, tuple[Capability, str]] = {
    "h100": ((9, 0), ""),
    "h200": ((9, 0), "h200"),
}
"""By name of a hardware profile: what ``auto`` asks of a machine, its compute capability and the
profile of its estimates, "" for none. Nothing was measured on others, so they run unfused."""

COPIES, HOPPER, ONE_SHOT, DECODE = "copy engine", "hopper", "one_shot", "decode"
KINDS = {
    "copy_engine": COPIES, "triton": COPIES, "hopper_copy": COPIES,
    "hopper": HOPPER, "one_shot": ONE_SHOT,
}  # fmt: skip
"""Whose buffer a kernel takes; ``unfused`` has none, that of ``torch`` is PyTorch's own."""


class Moved(NamedTuple):
    """A call, and the features of a row that travel."""

    call: Call
    features: int


@dataclass(frozen=True)
class Setting:
    """What decides which kernels run.

    Attributes:
        tp_size: ranks.
        max_tokens: of a step, global; ``SPConfig.max_tokens``.
        kernels: ``SPConfig.kernels``.
        hardware: name of a profile.
    """

    tp_size: int
    max_tokens: int
    kernels: str = "auto"
    hardware: str = "h200"

    @property
    def tokens(self) -> int:
        """As many as the ranks hold: the last one's rows are padded."""
        return -(-self.max_tokens // self.tp_size) * self.tp_size


def shared_bytes(graph: fx.Graph, setting: Setting) -> Mapping[str, int]:
    """Bytes by kind of buffer, for every kernel that may run in a step of up to ``max_tokens``.

    Args:
        graph: rewritten, its values of static shapes but for the tokens.
    """
    found = dict.fromkeys((COPIES, HOPPER, ONE_SHOT, DECODE), 0)
    have = dict.fromkeys(found, 0)
    for moved in calls(graph, setting):
        nbytes = setting.tokens * moved.features * moved.call.dtype.itemsize
        for kind in sorted({KINDS[name] for name in _may_run(moved.call, setting)}):
            if kind == ONE_SHOT:
                found[kind] = one_launch.buffer_bytes(setting.tp_size)
            elif nbytes > have[kind]:
                have[kind] = symmetric.grown(have[kind], nbytes)
                found[kind] += _allocated(kind, setting.tp_size, have[kind])
    found[DECODE] = sum(mlp.decode_bytes(setting.tp_size, *w) for w in _decoded(graph, setting))
    return {kind: size for kind, size in found.items() if size}


def _allocated(kind: str, tp_size: int, nbytes: int) -> int:
    if kind == HOPPER:
        return hopper.buffer_bytes(nbytes)
    return symmetric.buffer_bytes(tp_size, nbytes)


def _may_run(call: Call, setting: Setting) -> set[str]:
    """Kernels with a buffer that ``call`` may take with as many tokens or fewer."""
    if setting.tp_size == 1:
        return set()
    if setting.kernels in kernels.names_of(call.op):
        return {setting.kernels} & KINDS.keys()
    if setting.kernels != "auto" or setting.hardware not in MACHINES:
        return set()
    found = tuned.may_win(call, *MACHINES[setting.hardware])
    return {name for name in found if name in KINDS}


# --- calls of a graph -------------------------------------------------------------------


def calls(graph: fx.Graph, setting: Setting) -> Iterator[Moved]:
    """Those that may take a fused kernel, in order, at the most tokens."""
    for node in graph.nodes:
        read = _READ.get(op_name(node))
        found = read(node, setting.tp_size) if read is not None else None
        if found is not None:
            (n, k), features, dtype = found
            op = op_name(node).partition("::")[2]
            call = Call(op, "cuda", dtype, n, k, setting.tokens, setting.tp_size)
            yield Moved(call, features)


Found = tuple[tuple[int, int], int, torch.dtype]
"""``n`` and ``k`` of the call, features that travel, and the dtype."""


def _ag_gemm(node: fx.Node, tp_size: int) -> Found | None:
    x, weights = args(node)[:2]
    dtype = value(x).dtype
    outs = zip(weights, value(node), strict=False)  # the gathered rows may come last
    n = sum(out.shape[-1] for weight, out in outs if value(weight).dtype == dtype)
    return ((n, shape(x)[-1]), prod(shape(x)[1:]), dtype) if n else None


def _gemm_rs(node: fx.Node, tp_size: int) -> Found | None:
    x, weight = args(node)[:2]
    if value(weight).dtype != value(x).dtype:
        return None
    features = shape(node)[1:]
    return (features[-1], shape(x)[-1]), prod(features), value(x).dtype


def _gemm_gather(node: fx.Node, tp_size: int) -> Found | None:
    x, weight, _, layout = args(node)[:4]
    cut, features = parse(layout), shape(node)[1:]
    if isinstance(cut, LocalPart) or cut.kept or value(weight).dtype != value(x).dtype:
        return None
    return (cut.local_size(tp_size), shape(x)[-1]), prod(features), value(x).dtype


def _alone(node: fx.Node, tp_size: int) -> Found:
    x = args(node)[0]
    features = prod(shape(x)[1:])
    return (features, 0), features, value(x).dtype


_READ: dict[str, Callable[[fx.Node, int], Found | None]] = {
    "sp_passes::ag_gemm": _ag_gemm,
    "sp_passes::gemm_rs": _gemm_rs,
    "sp_passes::gemm_gather": _gemm_gather,
    "sp_passes::all_gather": _alone,
    "sp_passes::reduce_scatter": _alone,
}


def _decoded(graph: fx.Graph, setting: Setting) -> set[tuple[int, int, int]]:
    """``(k, n, inner)`` of the MLPs whose decode steps have buffers of their own."""
    capability, _ = MACHINES.get(setting.hardware, ((0, 0), ""))
    if (capability, setting.tp_size) not in mlp.MEASURED:
        return set()
    found = set()
    for node in graph.nodes:
        if op_name(node) == "sp_passes::ag_mlp_rs":
            _, w1, w2, _, layout = args(node)[:5]
            n, inner = shape(w2)
            part = inner if isinstance(parse(layout), LocalPart) else inner // setting.tp_size
            found.add((shape(w1)[1], n, part))
    return found
