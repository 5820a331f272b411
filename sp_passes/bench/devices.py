# SPDX-License-Identifier: Apache-2.0
"""Where a rank of a bench runs: a GPU each with NCCL, several on one GPU, or the CPU.

Ranks that share a GPU cannot use NCCL, and gloo's copies through the host cannot be captured
in a CUDA graph. There ``collectives`` puts stand-ins over symmetric memory below the ops, so
that a whole model can be captured and replayed. Such ranks are time-sliced: their results
count, their times do not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _private
from ..errors import SPError

_MODULE = "torch.distributed._symmetric_memory"
SHARED_DEVICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
STAND_IN_BYTES = 256 << 20
# Longer than a watchdog waits, so that the watchdog gets to name the call.
TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Place:
    """One rank.

    Attributes:
        pg: the default process group, which moves tensors of ``device``.
        shared: other ranks use the same GPU.
    """

    rank: int
    size: int
    pg: Any
    device: torch.device
    shared: bool = False

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Returns when every rank's device has come here."""
        self.sync()
        dist.barrier()

    def say(self, text: str) -> None:
        """Progress, from the first rank alone."""
        from ..ranks import tell

        if self.rank == 0:
            tell(text)


def will_share(ranks: int) -> bool:
    """Whether so many ranks are more than there are GPUs, if there are any."""
    return torch.cuda.is_available() and ranks > torch.cuda.device_count()


@contextmanager
def environment(ranks: int) -> Iterator[None]:
    """What the ranks' processes must inherit; around the call that starts them."""
    wanted = {SHARED_DEVICES: "1"} if will_share(ranks) else {}
    with patch.dict(os.environ, wanted):
        yield


def join(rank: int, size: int) -> Place:
    """Inside a rank of ``ranks.run_ranks``: take a device, and a group that moves its tensors."""
    if not torch.cuda.is_available():
        return Place(rank, size, dist.group.WORLD, torch.device("cpu"))
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = _private.default_store()
    dist.destroy_process_group()
    shared = will_share(size)
    dist.init_process_group(
        "gloo" if shared else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore("devices", store), rank=rank, world_size=size, timeout=TIMEOUT,
    )  # fmt: skip
    place = Place(rank, size, dist.group.WORLD, device, shared)
    place.meet()
    return place


class StandIn:
    """All-gather and all-to-all through one symmetric buffer; everything on the current stream.

    A call waits until all peers have read the call before, publishes, waits for all peers, and
    reads. ``nbytes``: of the largest tensor that one rank publishes.
    """

    def __init__(self, place: Place, nbytes: int = STAND_IN_BYTES) -> None:
        self.rank, self.size, self.nbytes = place.rank, place.size, nbytes
        self.buffer = _private._get(_MODULE, "empty")(
            nbytes, dtype=torch.uint8, device=place.device
        )
        self.handle = _private._get(_MODULE, "rendezvous")(self.buffer, place.pg.group_name)
        place.meet()

    def fits(self, x: Tensor) -> bool:
        return x.is_cuda and x.numel() * x.element_size() <= self.nbytes

    def all_gather(self, out: Tensor, mine: Tensor) -> None:
        self._publish(mine)
        for peer, row in enumerate(out.view(self.size, -1)):
            row.copy_(self._of(peer, (mine.numel(),), mine.dtype))

    def all_to_all(self, out: Tensor, x: Tensor) -> None:
        self._publish(x)
        blocks = (self.size, x.numel() // self.size)
        for peer, row in enumerate(out.view(blocks)):
            row.copy_(self._of(peer, blocks, x.dtype)[self.rank])

    def _publish(self, x: Tensor) -> None:
        self.handle.barrier(channel=0)
        self._of(self.rank, (x.numel(),), x.dtype).copy_(x.reshape(-1))
        self.handle.barrier(channel=1)

    def _of(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        found: Tensor = self.handle.get_buffer(peer, shape, dtype)
        return found


@contextmanager
def collectives(place: Place) -> Iterator[None]:
    """Inside, the ops' collectives on ``place.device`` can be captured in a CUDA graph.

    Raises:
        SPError: ranks share a GPU and a tensor to capture exceeds ``STAND_IN_BYTES``.
    """
    if not place.shared:
        yield
        return
    made = StandIn(place)
    gather, exchange = _private.all_gather_into, dist.all_to_all_single

    def all_gather_into(out: Tensor, mine: Tensor, pg: Any) -> None:
        if _takes(made, mine, pg, place):
            made.all_gather(out, mine)
        else:
            gather(out, mine, pg)

    def all_to_all_single(out: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and _takes(made, x, kwargs.get("group"), place):
            return made.all_to_all(out, x)
        return exchange(out, x, *args, **kwargs)

    with (
        patch.object(_private, "all_gather_into", all_gather_into),
        patch.object(dist, "all_to_all_single", all_to_all_single),
    ):
        yield


def _takes(made: StandIn, x: Tensor, pg: Any, place: Place) -> bool:
    if pg is not place.pg or not x.is_cuda:
        return False
    if made.fits(x):
        return True
    if torch.cuda.is_current_stream_capturing():
        raise SPError(f"{x.numel() * x.element_size()} bytes, the stand-in takes {made.nbytes}")
    return False
