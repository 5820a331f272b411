# SPDX-License-Identifier: Apache-2.0
"""Long runs in parts: each result is told at once, and a part that hangs is named and ended."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..ranks import tell
from .devices import Place

HANGS = "HANGS"
_RESULT = "result "


class Watchdog:
    """Ends the process, with a word on why, when a part takes longer than ``limit`` seconds."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._now: tuple[str, float] | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def start(self, what: str) -> None:
        self._now = (what, time.monotonic())

    def stop(self) -> None:
        self._now = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(self.limit / 10, 1.0))
            now = self._now
            if now is not None and time.monotonic() - now[1] > self.limit:
                tell(f"{HANGS}: no return in {self.limit:g} s: {now[0]}")
                time.sleep(1.0)  # the other ranks' words, before the first exit ends them
                os._exit(3)


def together(place: Place, mine: Any) -> list[Any]:
    """Every rank's, by rank. Collective."""
    out: list[Any] = [None] * place.size
    dist.all_gather_object(out, mine)
    return out


def tell_result(place: Place, result: Any) -> None:
    """From the first rank, to whoever started the ranks; see :func:`hearing`."""
    if place.rank == 0:
        tell(_RESULT + json.dumps(result))


def hearing(
    result: Callable[[Any], None], text: Callable[[int, str], None] | None = None
) -> Callable[[int, str], None]:
    """A ``notify`` for ``run_ranks`` that tells results from progress."""

    def hear(rank: int, said: str) -> None:
        if said.startswith(_RESULT):
            result(json.loads(said.removeprefix(_RESULT)))
        elif text is not None:
            text(rank, said)

    return hear
