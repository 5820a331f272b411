# SPDX-License-Identifier: Apache-2.0
"""Host time of whole eager calls of ag_gemm and gemm_rs by ``hopper``, in one process.

The process is rank 0 of a group whose other ranks do nothing (PyTorch's ``fake`` backend), and
what it pushes to them lands in its own buffer (``hopper.loop_back``). All else is as a user calls
it: through the dispatcher, with weights sharded and released, one launch at the end. The calls
go through the layers of a small model, each with a weight and rows of its own; "x moves": every
call finds its rows where the one before did not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _private, residents
from ..layout import ShardLayout
from ..ops import hopper, hopper_code, kernels, nvrtc, symmetric
from ..ops.kernels import _TABLE
from .host_check import DTYPE, Row, timed

LAYERS = 4


@contextmanager
def rank_0_of(size: int) -> Iterator[Any]:
    """The default process group, of ranks that say what this one says."""
    dist.init_process_group("fake", store=_private.fake_store(), rank=0, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextmanager
def hoppers_kernel(device: str) -> Iterator[str]:
    """Its name. Without a device its launches and tensor maps do nothing."""
    name = "hopper" if device == "cuda" else "hopper alone"
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(hopper_code, "SPIN_SECONDS", 3))  # none comes late
        if device != "cuda":
            kernel = SimpleNamespace(launch=lambda *args: None)
            properties = SimpleNamespace(multi_processor_count=132)
            for place, found, new in (
                (torch.cuda, "get_device_properties", lambda device: properties),
                (_private, "raw_stream_getter", lambda: lambda device: 0),
                (hopper, "code", lambda *args: kernel),
                (hopper_code, "tensor_map", lambda *args: bytes(128)),
            ):
                stack.enter_context(mock.patch.object(place, found, new))
            ag, rs = hopper.ag_gemm, hopper.gemm_rs
            kernels.register_kernel(name, "ag_gemm", ag, may_skip_gathered=True)
            kernels.register_kernel(name, "gemm_rs", rs)
            stack.callback(kernels.choose.cache_clear)
            stack.callback(_TABLE.pop, ("ag_gemm", name))
            stack.callback(_TABLE.pop, ("gemm_rs", name))
        yield name


def calls_of(
    op: str, pg: Any, rows: int, n: int, k: int, kernel: str, device: str, moves: bool
) -> Callable[[], Any]:
    """A call of the next layer's op; ``n`` and ``k`` of this rank's part of the weight."""
    size, name = pg.size(), pg.group_name
    ag = op == "ag_gemm"
    peers = hopper.loop_back(torch.device(device), size, rows, k if ag else n)
    symmetric._workspaces[name, hopper.for_group] = pg, peers
    run = torch.ops.sp_passes.ag_gemm.default if ag else torch.ops.sp_passes.gemm_rs.default

    layout = f"S0[{n * size}]" if ag else f"S1[{k * size}]"

    def call(x: Tensor, weight: Tensor) -> Callable[[], Any]:
        if ag:
            return partial(run, x, [weight], [None], [layout], None, name, size, kernel)
        return partial(run, x, weight, None, layout, None, name, size, kernel)

    layers = []
    for _ in range(LAYERS):
        full = torch.zeros((n * size, k) if ag else (n, k * size), dtype=DTYPE, device=device)
        residents.prepare([full], [ShardLayout.parse(layout)], ["weight"], None, True, pg)
        tall = rows if ag else size * rows
        xs = [torch.zeros(tall, k, dtype=DTYPE, device=device) for _ in range(1 + moves)]
        layers.append([call(x, full) for x in xs])
    turns = cycle([layer[i] for i in range(1 + moves) for layer in layers])
    return lambda: next(turns)()


def whole_rows(sizes: Sequence[int], rows: int, device: str, shapes: Any) -> Iterator[Row]:
    """One for each op and number of ranks.

    Args:
        rows: of a rank.
        shapes: ``bench.host.Sizes``.
    """
    if device == "cuda" and nvrtc.missing() is not None:
        return
    sides = {"ag_gemm": (shapes.n, shapes.hidden), "gemm_rs": (shapes.hidden, shapes.k)}
    for size in sizes:
        with rank_0_of(size) as pg, hoppers_kernel(device) as kernel, torch.inference_mode():
            for op, (n, k) in sides.items():
                for moves in (False, True):
                    call = calls_of(op, pg, rows, n, k, kernel, device, moves)
                    for _ in range(2 * LAYERS):
                        call()
                    what = f"{op} hopper, x moves" if moves else f"{op} hopper"
                    yield timed(what, call, part="whole", ranks=size, rows=rows)
