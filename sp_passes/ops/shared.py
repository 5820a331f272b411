# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of a group: every rank gets it, or none does.

A rank may be out of memory, or unable to map its peers', where the others are not. If it then
went its own way, the others would wait for it in a barrier on the GPU, which nothing ends. So
after each step that can fail the ranks say how it went. That costs the host a few small
exchanges when a buffer is made, and nothing afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import _private
from ..errors import SPError
from ..proof import said

T = TypeVar("T")
log = logging.getLogger("sp_passes")
_MODULE = "torch.distributed._symmetric_memory"


def rounded(nbytes: int) -> int:
    """To whole KiB."""
    return -(-nbytes // 1024) * 1024


class Refused(SPError):
    """A rank could not, and every rank knows."""


def together(pg: Any, make: Callable[[], T]) -> T:
    """What ``make()`` returns, once it has on every rank. Collective.

    Steps of ``make`` may themselves be done together: a failure is told once, wherever it is.

    Raises:
        Refused: on every rank; names the one where ``make()`` failed, and its error.
    """
    made: Any = None
    error: Exception | None = None
    try:
        made = make()
    except Refused:
        raise
    except Exception as err:  # whatever it is, the others must hear of it
        error = err
    for rank, why in enumerate(said(error and first_line(error), pg, "share memory")):
        if why is not None:
            raise Refused(f"rank {rank}: {why}") from error
    return made


def first_line(error: Exception) -> str:
    text = next(iter(str(error).splitlines()), "")
    return text if isinstance(error, RuntimeError | SPError) else f"{type(error).__name__}: {text}"


def allocate(pg: Any, device: torch.device, nbytes: int) -> tuple[Tensor, Any]:
    """``nbytes`` of this rank that its peers can reach, and the handle. Collective.

    Raises:
        Refused: on every rank, where one of them cannot.
    """
    empty, rendezvous = (_private._get(_MODULE, name) for name in ("empty", "rendezvous"))
    buffer = together(pg, partial(empty, nbytes, dtype=torch.uint8, device=device))
    return buffer, together(pg, partial(rendezvous, buffer, pg.group_name))


def for_good(pg: Any, device: torch.device, make: Callable[[], T], what: str) -> T | None:
    """What ``make()`` returns, whatever mode or warm-up of a graph the call is in. Collective.

    None on every rank, with a log line, where one of them fails; ``what`` then runs unfused.
    """

    def run() -> T:
        with torch.inference_mode(False), torch.no_grad():
            return make()

    outside = torch.cuda.is_available()
    try:
        return together(pg, partial(_private.outside_graph_pools, device, run) if outside else run)
    except Refused as err:
        log.warning(
            "no symmetric memory for group %s, %s run unfused: %s", pg.group_name, what, err
        )
        return None
