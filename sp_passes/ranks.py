# SPDX-License-Identifier: Apache-2.0
"""Run a function on several local ranks: processes of their own, joined by gloo.

For demos, checks and tests on one machine. Nothing outlives :func:`run_ranks`: a failure,
a time-out or an interrupt of the caller ends every rank, and a rank whose caller is gone
ends itself.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from . import _private
from .errors import SPError

HOST = "127.0.0.1"

# How long to wait, after a first failure, for what the other ranks have to say, in seconds.
_GRACE = 0.5

# How long ranks may take to part once all have returned, in seconds.
_PARTING = 15.0

Notify = Callable[[int, str], None]


class RankError(SPError):
    """A rank failed, died or was too slow; the message holds its traceback.

    Attributes:
        summary: the message's first line.
        failures: traceback of each rank that raised.
        expected: the rank raised an SPError, whose message says it all.
    """

    def __init__(
        self, summary: str, failures: dict[int, str] | None = None, expected: bool = False
    ) -> None:
        self.summary = summary
        self.failures = failures or {}
        self.expected = expected
        tail = "".join(f"\n--- rank {r} ---\n{text}" for r, text in self.failures.items())
        super().__init__(summary + tail)


@dataclass
class _Rank:
    """The caller's end of one rank."""

    number: int
    process: Any
    pipe: Connection
    outcome: tuple[str, Any] | None = None

    def read(self, notify: Notify | None) -> None:
        """Take one message, or note that the process died without one."""
        try:
            kind, value = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(5)
            self.outcome = ("died", self.process.exitcode)
            return
        if kind == "tell":
            if notify is not None:
                notify(self.number, value)
        else:
            self.outcome = (kind, value)

    def kill(self) -> None:
        """End the process and what it started (a C++ compiler, say), by its own id."""
        if self.process.pid is not None and self.process.exitcode is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self.process.kill()  # it has not made its own process group yet
        self.process.join(10)
        self.pipe.close()


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    notify: Notify | None = None,
) -> list[Any]:
    """``fn(rank, world_size, *args)`` in ``world_size`` processes, with gloo initialised.

    Args:
        fn: a function that a fresh process can import by name; it and ``args`` are pickled.
        world_size: number of ranks; the default process group holds them all.
        timeout: seconds until the ranks are ended.
        notify: called with (rank, text) for each :func:`tell` of a rank.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankError: a rank raised or died, or the time is up.

    Ranks that do not end within 15 s of the last result are ended, with a warning: destroying a
    process group can hang.
    """
    if world_size < 1:
        raise SPError(f"run_ranks needs at least 1 rank, got world_size={world_size}")
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    ranks: list[_Rank] = []
    try:
        _start_tracker()
        with _spawning():
            for number in range(world_size):
                ranks.append(_start(number, world_size, store.port, fn, args, timeout))
        return _collect(ranks, timeout, notify)
    finally:
        for rank in ranks:
            rank.kill()


@dataclass
class _Work:
    """What a rank is told to do."""

    number: int
    world_size: int
    port: int
    fn: Callable[..., Any]
    args: tuple[Any, ...] = field(repr=False)
    timeout: float = 120


def _start(
    number: int, world_size: int, port: int, fn: Any, args: tuple[Any, ...], timeout: float
) -> _Rank:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    work = pickle.dumps(_Work(number, world_size, port, fn, args, timeout))
    process = context.Process(
        target=_enter, args=(work, theirs), name=f"sp_passes rank {number}", daemon=True
    )
    process.start()
    theirs.close()
    return _Rank(number, process, mine)


def _start_tracker() -> None:
    """Start Python's helper that frees the semaphores of killed ranks, and keep it quiet.

    It takes its warning filters from the environment it starts in.
    """
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = f"{before + ',' if before else ''}ignore:resource_tracker"
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


@contextmanager
def _spawning() -> Iterator[None]:
    """Start ranks that Ctrl-C does not reach, whatever the caller's main module is.

    Ranks inherit the blocked signal, so that an interrupt is the caller's alone even before
    they run any Python; the caller gets its own as soon as all are started. A main module
    that is no file (``python -c``, stdin) must not be imported by the ranks.
    """
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    hide = path is not None and not os.path.exists(path)
    if hide:
        del main.__file__
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if hide:
            main.__file__ = path


def _collect(ranks: list[_Rank], timeout: float, notify: Notify | None) -> list[Any]:
    end = time.monotonic() + timeout
    while any(rank.outcome is None for rank in ranks):
        if not _read(ranks, end - time.monotonic(), notify):
            late = [rank.number for rank in ranks if rank.outcome is None]
            raise RankError(f"ranks {late} of {len(ranks)} did not end within {timeout:g} s")
        if any(rank.outcome is not None and rank.outcome[0] != "done" for rank in ranks):
            _read_rest(ranks, notify)
            raise _failure(ranks)
    _let_part(ranks)
    return [rank.outcome[1] for rank in ranks if rank.outcome is not None]


def _read(ranks: list[_Rank], seconds: float, notify: Notify | None) -> bool:
    """Read whatever is there; False when nothing came in time."""
    open_pipes = {rank.pipe: rank for rank in ranks if rank.outcome is None}
    ready = wait(list(open_pipes), max(seconds, 0))
    for pipe in ready:
        open_pipes[pipe].read(notify)  # type: ignore[index]
    return bool(ready)


def _read_rest(ranks: list[_Rank], notify: Notify | None) -> None:
    end = time.monotonic() + _GRACE
    while any(rank.outcome is None for rank in ranks):
        if not _read(ranks, end - time.monotonic(), notify):
            return


def _let_part(ranks: list[_Rank]) -> None:
    """Wait until each has closed its pipe, the last thing that a rank does."""
    end, open_pipes = time.monotonic() + _PARTING, {rank.pipe: rank.number for rank in ranks}
    while open_pipes:
        ready = wait(list(open_pipes), max(end - time.monotonic(), 0))
        if not ready:
            warnings.warn(
                f"ranks {sorted(open_pipes.values())} of {len(ranks)} returned, but did not end "
                f"within {_PARTING:g} s and were ended; the results are whole",
                RuntimeWarning, stacklevel=4,
            )  # fmt: skip
            return
        for pipe in ready:
            del open_pipes[pipe]  # type: ignore[arg-type]


def _failure(ranks: list[_Rank]) -> RankError:
    """The error to raise; a rank that only lost its peers is not the one to blame."""
    failed = {r.number: r.outcome[1] for r in ranks if r.outcome and r.outcome[0] == "error"}
    dead = {r.number: r.outcome[1] for r in ranks if r.outcome and r.outcome[0] == "died"}
    own = [number for number, (line, _, _) in failed.items() if "onnection" not in line]
    if dead and not own:
        number, code = next(iter(dead.items()))
        return RankError(f"rank {number} of {len(ranks)} died with exit code {code}")
    first = own[0] if own else next(iter(failed))
    line, _, expected = failed[first]
    texts = {r: text for r, (_, text, _) in failed.items() if r == first or r in own}
    return RankError(f"rank {first} of {len(ranks)} failed: {line}", texts, expected)


# --- in the rank ------------------------------------------------------------------------

_pipe: Connection | None = None


def tell(text: str) -> None:
    """From inside a rank: pass a line of progress to the caller's ``notify``."""
    if _pipe is not None:
        _pipe.send_bytes(pickle.dumps(("tell", text)))


def _enter(data: bytes, pipe: Connection) -> None:
    global _pipe
    _isolate()
    _pipe = pipe
    failed = False
    try:
        work: _Work = pickle.loads(data)
        message = pickle.dumps(("done", _work(work)))
    except BaseException as err:
        line = f"{type(err).__name__}: {err}".partition("\n")[0]
        what = (line, traceback.format_exc(), isinstance(err, SPError))
        message, failed = pickle.dumps(("error", what)), True
    pipe.send_bytes(message)
    if not failed:
        _part()
    pipe.close()


def _isolate() -> None:
    """A process group of its own, deaf to Ctrl-C, that ends when its caller is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    caller = multiprocessing.parent_process()
    assert caller is not None

    def follow() -> None:
        wait([caller.sentinel])
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()


def _work(work: _Work) -> Any:
    torch.set_num_threads(1)
    if os.path.isdir("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=work.timeout)
    store = dist.TCPStore(HOST, work.port, is_master=False, timeout=limit)
    dist.init_process_group(
        "gloo", store=store, rank=work.number, world_size=work.world_size, timeout=limit
    )
    return work.fn(work.number, work.world_size, *work.args)


def _part() -> None:
    _private.drop_cuda_graphs()  # NCCL's destruction waits for those that captured its calls
    if not dist.is_initialized():
        return  # the work has ended it
    dist.barrier()  # no rank leaves while another still talks to it
    dist.destroy_process_group()
