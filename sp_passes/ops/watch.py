# SPDX-License-Identifier: Apache-2.0
"""Says which rank does not come, where ranks wait for each other on the GPU.

A stream that waits for a word (``lanes``) has no time limit, as PyTorch's own waits on symmetric
memory have none by default, and NCCL's watchdog sees NCCL's work only. So ask for a watch:

    SP_PASSES_WATCH=60          after 60 s a line in the log: who waits for whom
    SP_PASSES_WATCH=600,abort   and then the process ends (SIGABRT), as NCCL's watchdog does it

A thread for each workspace reads once a second, through the links, whether the signals of this
rank have been taken; 20 times a second while one has not, so that a rank which is always the
earlier one is not taken for one that waits. Calls cost nothing more, and replayed graphs are seen
too. The thread ends with its process group. Without the variable there is none.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .. import _private
from ..errors import SPError
from .lanes import Word, barrier_word, row_word, words
from .mailbox import MOST_PIECES

log = logging.getLogger("sp_passes")

VARIABLE = "SP_PASSES_WATCH"
Words = Sequence[Sequence[int]]
"""Of every rank (``lanes``)."""


def asked() -> tuple[float, bool] | None:
    """Seconds, and whether to end the process then; None for no watch.

    Raises:
        SPError: the variable says something else.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    seconds, comma, then = text.partition(",")
    try:
        limit = float(seconds)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf") or (comma and then.strip() != "abort"):
        raise SPError(
            f"{VARIABLE}={text!r}: give seconds above 0, or seconds and abort: '600,abort'"
        )
    return limit, bool(comma)


class Watch:
    """Which peers have neither taken one rank's signals nor sent theirs, and since when.

    (One that has sent its own has come, and waits for a third rank.)

    Args:
        limit: seconds; a signal is taken within microseconds once its peer has come.
    """

    def __init__(self, rank: int, size: int, limit: float) -> None:
        self.rank, self.size, self.limit = rank, size, limit
        self._since: dict[int, float] = {}
        self._told: set[int] = set()

    def look(self, held: Words, now: float) -> list[str]:
        """Lines to log, each peer once until it comes."""
        lines = []
        for peer in range(self.size):
            left = self._left(held[peer], held[self.rank], peer)
            if not left:
                self._since.pop(peer, None)
                if peer in self._told:
                    self._told.discard(peer)
                    lines.append(f"rank {peer} came to rank {self.rank}")
                continue
            waited = now - self._since.setdefault(peer, now)
            if waited >= self.limit and peer not in self._told:
                self._told.add(peer)
                lines.append(
                    f"rank {self.rank} has waited {waited:.0f} s for rank {peer}, which has not "
                    f"come ({', '.join(left)})"
                )
        return lines

    @property
    def late(self) -> bool:
        return bool(self._told)

    @property
    def pending(self) -> bool:
        """Whether a signal was not taken at the last look."""
        return bool(self._since)

    def _left(self, there: Sequence[int], here: Sequence[int], peer: int) -> list[str]:
        """This rank's signals among the words of a peer, whose own is not here."""
        places: dict[str, Word] = {"barrier": barrier_word}
        for piece in range(MOST_PIECES):
            places[f"rows, piece {piece}"] = partial(row_word, self.size, piece=piece)
        return [what for what, at in places.items() if there[at(self.rank)] and not here[at(peer)]]


def start(peers: Any, pg: Any) -> threading.Thread | None:
    """Watch a workspace that moves by driver calls, if that is asked for; else a line in the log.

    A wrong variable changes nothing about what the ranks run.
    """
    try:
        found = asked()
    except SPError as err:
        log.error("group %s is not watched: %s", pg.group_name, err)
        return None
    if found is None:
        return None
    if peers.lanes is None:
        log.warning("group %s is not watched: it does not move by driver calls", pg.group_name)
        return None
    watch = Watch(peers.rank, peers.size, found[0])
    read = reader(peers._words, peers.rank, peers.lanes.calls)
    about = (watch, read, pg.group_name, weakref.ref(pg), found[1])
    thread = threading.Thread(target=follow, args=about, name="sp_passes watch", daemon=True)
    thread.start()
    return thread


def reader(boxes: Sequence[torch.Tensor], rank: int, calls: Any) -> Callable[[], Words]:
    """Reads all ranks' words on a stream of its own, whatever the others wait for."""
    device = boxes[rank].device
    count = words(len(boxes))
    host = torch.zeros(len(boxes), count, dtype=torch.int32, pin_memory=True)
    stream = torch.cuda.Stream(device)
    places = [(to.data_ptr(), box.data_ptr()) for to, box in zip(host, boxes, strict=True)]
    ready = threading.local()

    def read() -> Words:
        if not hasattr(ready, "here"):
            torch.cuda.set_device(device)
            _private.let_others_capture()
            stream.query()  # from here on the thread has a context for the driver
            ready.here = True
        for to, source in places:
            calls.copy(to, source, 4 * count, stream.cuda_stream)
        stream.synchronize()
        found: Words = host.tolist()
        return found

    return read


def follow(watch: Watch, read: Callable[[], Words], name: str, pg: Any, abort: bool) -> None:
    """The thread: until the group is gone."""
    pause = min(1.0, watch.limit / 10)
    while _lives(name, pg):
        try:
            lines = watch.look(read(), time.monotonic())
        except (RuntimeError, SPError) as err:
            log.warning("group %s is not watched any more: %s", name, err)
            return
        for line in lines:
            log.error("group %s: %s", name, line)
        if abort and watch.late:
            try:
                faulthandler.dump_traceback(sys.__stderr__ or 2)
            finally:  # also where nobody can take it
                os.abort()
        time.sleep(pause / 20 if watch.pending else pause)


def _lives(name: str, pg: Any) -> bool:
    """Whether the group still exists under its name."""
    group = pg()
    if group is None or not dist.is_initialized():
        return False
    try:
        return _private.resolve_process_group(name) is group
    except RuntimeError:
        return False
