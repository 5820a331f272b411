# SPDX-License-Identifier: Apache-2.0
"""Says which rank does not come, where ranks wait for each other on the GPU.

A stream that waits for a word (``lanes``) has no time limit, as PyTorch's own waits on symmetric
memory have none by default, and NCCL's watchdog sees NCCL's work only. So ask for a watch:

    SP_PASSES_WATCH=60          after 60 s a line in the log: who waits for whom
    SP_PASSES_WATCH=600,abort   and then the process ends (SIGABRT), as NCCL's watchdog does it

A thread for each workspace reads its words (``waits``) once a second, through the links where they
are a peer's; 20 times a second while one is pending whose call has no number, so that a rank which
is always the earlier one is not taken for one that waits. Calls cost nothing more, and replayed
graphs are seen too. The thread ends with its process group, or when Python ends. Without the
variable there is none.

"Any CUDA API call may block" (NVIDIA, API synchronization behavior): a thread that copies from
pageable memory, or launches a kernel for the first time, behind work that does not end keeps other
threads' calls waiting as well. So a second thread makes the calls (:class:`Apart`), and the first
one says, and ends the process, whatever they do.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .. import _private
from ..errors import SPError
from .driver import Driver
from .waits import Signals, Wait, Words, Workspace

log = logging.getLogger("sp_passes")

VARIABLE = "SP_PASSES_WATCH"
_READ_S = 0.5  # after so long a look has failed; a copy of some KiB takes microseconds
_JOIN_S = 2.0  # that Python's end waits for a thread; a call of the driver may not come back
_ends = threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

Held = Sequence[Words]
"""What the boxes of each of a workspace's signals hold."""


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
    """For which peers one rank waits, and since when.

    Args:
        signals: of one workspace.
        limit: seconds; a signal comes within microseconds of its peer.
    """

    def __init__(self, rank: int, size: int, signals: Sequence[Signals], limit: float) -> None:
        self.rank, self.size, self.signals, self.limit = rank, size, signals, limit
        self._since: dict[tuple[int, Wait], float] = {}
        self._told: set[int] = set()
        self._blind_since: float | None = None
        self._blinded = False

    def look(self, held: Held | None, now: float) -> list[str]:
        """Lines to log, each peer once until it comes.

        Args:
            held: None as long as the words cannot be read.
        """
        if held is None:
            return self._blind(now)
        lines = [f"rank {self.rank} can read the words again"] if self._blinded else []
        self._blind_since, self._blinded = None, False
        before, self._since = self._since, {}
        for peer in range(self.size):
            if peer == self.rank:
                continue
            late = []
            for words, one in zip(held, self.signals, strict=True):
                for wait in one.waits(words, peer):
                    since = self._since[peer, wait] = before.get((peer, wait), now)
                    if now - since >= self.limit:
                        late.append((now - since, str(wait)))
            if late and peer not in self._told:
                self._told.add(peer)
                lines.append(
                    f"rank {self.rank} has waited {max(late)[0]:.0f} s for rank {peer}, which has "
                    f"not come ({'; '.join(what for _, what in late)})"
                )
            elif not late and peer in self._told:
                self._told.discard(peer)
                lines.append(f"rank {peer} came to rank {self.rank}")
        return lines

    def forget(self) -> None:
        """After a while without a look: a wait without a number may be another one by now."""
        self._since = {
            key: since for key, since in self._since.items()
            if key[1].call is not None or key[0] in self._told
        }  # fmt: skip

    def _blind(self, now: float) -> list[str]:
        """Since the first look that failed: one alone is none, the process may have stood still."""
        if self._blind_since is None:
            self._blind_since = now
            return []
        waited = now - self._blind_since
        if waited < self.limit or self._blinded:
            return []
        self._blinded = True
        return [
            f"rank {self.rank} has waited {waited:.0f} s to read the words that say for whom it "
            f"waits: work on its GPU, or a call of the CUDA driver, does not end{self.last_seen()}"
        ]

    def last_seen(self) -> str:
        """For whom it waited at the last look that could be made."""
        found = [f"rank {peer} ({wait})" for peer, wait in self._since]
        return f"; at the last look it waited for {', '.join(found)}" if found else ""

    @property
    def late(self) -> bool:
        return bool(self._told) or self._blinded

    @property
    def pending(self) -> bool:
        """Whether at the last look a wait was open that cannot be told from the next one."""
        return any(wait.call is None for _, wait in self._since)


def start(workspace: Workspace, pg: Any, device: torch.device) -> threading.Thread | None:
    """Watch a workspace of a group, if that is asked for; else a line in the log.

    Whatever fails here changes nothing about what the ranks run.
    """
    try:
        found = asked()
        if found is None:
            return None
        signals = workspace.signals()
        if not signals:
            raise SPError("it does not move by driver calls")
        watch = Watch(workspace.rank, workspace.size, signals, found[0])
        about = (
            watch, Reader(signals, device, Driver()), pg.group_name, weakref.ref(pg), found[1]
        )  # fmt: skip
        thread = threading.Thread(target=follow, args=about, name="sp_passes watch", daemon=True)
        thread.start()
    except Exception as err:
        log.error("group %s is not watched: %s", pg.group_name, err or type(err).__name__)
        return None
    _threads.add(thread)
    return thread


@atexit.register
def _finish() -> None:
    """Python stops its daemon threads wherever they are, and one that comes back from a C++ call
    then takes the process down (``std::terminate``)."""
    _ends.set()
    for thread in [*_threads]:
        thread.join(_JOIN_S)


def not_seen(what: str, pg: Any) -> None:
    """A line in the log where a watch is asked for that cannot see ``what``."""
    if os.environ.get(VARIABLE):
        log.warning("group %s: %s cannot be watched", pg.group_name, what)


class Reads(Protocol):
    """What reads the words, with calls of the driver."""

    def __call__(self) -> Held | None:
        """None where they could not be read yet."""

    def drain(self) -> None:
        """Comes back once no copy is under way: memory that one reads or writes may go then."""


class Reader:
    """Reads the words on a stream of its own, whatever the others wait for.

    A call returns None where that takes long; the next one looks again.
    """

    def __init__(self, signals: Sequence[Signals], device: torch.device, calls: Driver) -> None:
        self._boxes = [one.boxes for one in signals]
        self._hosts = [
            [torch.zeros(box.numel(), dtype=torch.int32, pin_memory=True) for box in boxes]
            for boxes in self._boxes
        ]
        self._calls, self._stream, self._under_way = calls, 0, False
        self._index = torch.cuda.current_device() if device.index is None else device.index

    def __call__(self) -> Held | None:
        if not self._stream:
            torch.cuda.set_device(self._index)
            _private.let_others_capture()
            torch.cuda.mem_get_info(self._index)  # from here on the thread has a context
            self._stream = self._calls.own_stream()
        if not self._under_way:
            for hosts, boxes in zip(self._hosts, self._boxes, strict=True):
                for to, box in zip(hosts, boxes, strict=True):
                    self._calls.copy(to.data_ptr(), box.data_ptr(), 4 * box.numel(), self._stream)
            self._under_way = True
        end = time.monotonic() + _READ_S / 2
        while not self._calls.done(self._stream):
            if time.monotonic() > end:
                return None
            time.sleep(1e-3)
        self._under_way = False
        return [[host.tolist() for host in hosts] for hosts in self._hosts]

    def drain(self) -> None:
        while self._under_way and not self._calls.done(self._stream):
            time.sleep(1e-2)


class Apart:
    """``read`` on a thread of its own: None as long as it has not come back.

    Raises what ``read`` raised. ``close`` ends the thread, once a call under way comes back.
    """

    def __init__(self, read: Reads) -> None:
        self._read = read
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[Held | Exception | None] = queue.SimpleQueue()
        self._under_way = False
        self._thread = threading.Thread(
            target=self._serve, name="sp_passes watch, reads", daemon=True
        )
        self._thread.start()

    def _serve(self) -> None:
        while self._asked.get():
            try:
                self._found.put(self._read())
            except Exception as err:  # the other thread's to judge
                self._found.put(err)
        with suppress(Exception):  # nothing is copied where calls are refused
            self._read.drain()

    def __call__(self) -> Held | None:
        if not self._under_way:
            self._asked.put(True)
            self._under_way = True
        try:
            found = self._found.get(timeout=_READ_S)
        except queue.Empty:
            return None
        self._under_way = False
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self._asked.put(False)
        self._thread.join(_JOIN_S / 2)


def follow(watch: Watch, read: Reads, name: str, pg: Any, abort: bool) -> None:
    """The thread: until the group is gone, or Python ends."""
    pause, seen, apart = min(1.0, watch.limit / 10), 0.0, None
    try:
        apart = Apart(read)
        while _lives(name, pg) and not _ends.is_set():
            held, now = apart(), time.monotonic()
            if held is not None:
                if now - seen > 3 * pause + _READ_S:
                    watch.forget()
                seen = now
            for line in watch.look(held, now):
                log.error("group %s: %s", name, line)
            if abort and watch.late:
                _end()
            _ends.wait(pause / 20 if watch.pending else pause)
    except Exception as err:
        text = str(err) or type(err).__name__
        log.error("group %s is not watched any more: %s%s", name, text, watch.last_seen())
        if abort and seen:  # else the watch could not be set up, which ends nobody
            _end_unless_gone(watch, name, pg, pause)
    finally:
        if apart is not None:
            apart.close()


def _end_unless_gone(watch: Watch, name: str, pg: Any, pause: float) -> None:
    """A GPU that refuses calls serves no peer: a process that has not given its group up after
    the time of a wait is ended."""
    end = time.monotonic() + watch.limit
    while _lives(name, pg) and not _ends.wait(pause):
        if time.monotonic() >= end:
            log.error("group %s: it still exists %.0f s after that", name, watch.limit)
            _end()


def _end() -> None:
    try:
        faulthandler.dump_traceback(sys.__stderr__ or 2)
    finally:  # also where nobody can take it
        os.abort()


def _lives(name: str, pg: Any) -> bool:
    """Whether the group still exists under its name."""
    group = pg()
    if group is None or not dist.is_initialized():
        return False
    try:
        return _private.resolve_process_group(name) is group
    except RuntimeError:
        return False
