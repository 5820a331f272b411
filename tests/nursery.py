# SPDX-License-Identifier: Apache-2.0
"""Processes that start warm: forked from one that has imported what they need, and no more.

Starting Python with torch and sp_passes costs three seconds of CPU, with vLLM nine, and the
tests start some hundred ranks. What a child finds is as cold as in a process of its own: no
compiled code, no caches, no groups. (numpy's and torch's first random numbers are the nursery's,
and so is the folder: a test sets what it needs.)

Strings hash differently in each nursery, as they do on the ranks of a real job: an order that
leaks out of a set must not be the same everywhere only because all ranks were forked from one.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

TORCH = ("torch._inductor.compile_fx", "torch._inductor.codegen.cpp_wrapper_cpu", "sp_passes")

_PDEATHSIG = 1  # of prctl


class Nursery:
    """One such process; it ends with its last user, and its children with it."""

    def __init__(self, modules: Sequence[str]) -> None:
        context = get_context("spawn")
        self._control, its = context.Pipe()
        self.process = context.Process(target=_tend, args=(its, tuple(modules)), daemon=True)
        self.process.start()
        its.close()

    def fork(self, target: Callable[..., None], args: tuple[Any, ...]) -> Child:
        """``target(pipe, *args)`` in a new process."""
        mine, its = Pipe()
        self._control.send_bytes(pickle.dumps(("fork", target, args, dict(os.environ))))
        assert self.process.pid is not None
        send_handle(self._control, its.fileno(), self.process.pid)
        its.close()
        return Child(self, self._control.recv(), mine)

    def code_of(self, pid: int) -> int | None:
        """A child's exit code as ``subprocess`` gives it; None while it runs."""
        try:
            self._control.send_bytes(pickle.dumps(("code", pid)))
            found: int | None = self._control.recv()
        except (OSError, EOFError):
            return -signal.SIGKILL  # its parent is gone, and took it along
        return found


class Child:
    """A forked process, with what ``multiprocessing.Process`` has to say of one."""

    def __init__(self, nursery: Nursery, pid: int, pipe: Connection) -> None:
        self.pid, self.pipe, self._nursery = pid, pipe, nursery
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        if self._code is None:  # until it is asked for, the pid is not given to another
            self._code = self._nursery.code_of(self.pid)
        return self._code

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, seconds: float) -> int | None:
        end = time.monotonic() + seconds
        while self.is_alive() and time.monotonic() < end:
            time.sleep(0.01)
        return self.exitcode

    def kill(self) -> None:
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


# --- where ranks come from --------------------------------------------------------------

_nurseries: dict[tuple[tuple[str, ...], int], Nursery] = {}
_HASHES = 2


def child(
    at: int, target: Callable[..., None], args: tuple[Any, ...], modules: Sequence[str] = TORCH
) -> Child:
    """The ``at``-th of several processes: neighbours come from different nurseries."""
    every = [_nursery(tuple(modules), place) for place in range(_HASHES)]  # all import at once
    return every[at % _HASHES].fork(target, args)


def _nursery(modules: tuple[str, ...], place: int) -> Nursery:
    found = _nurseries.get((modules, place))
    if found is None or not found.process.is_alive():
        found = _nurseries[modules, place] = Nursery(modules)
    return found


@atexit.register
def close() -> None:
    for nursery in _nurseries.values():
        nursery.process.kill()
        nursery.process.join(5)
    _nurseries.clear()


# --- in the nursery ---------------------------------------------------------------------


def _tend(control: Connection, modules: Sequence[str]) -> None:
    for module in modules:
        import_module(module)
    codes: dict[int, int] = {}
    while True:
        try:
            what, *rest = pickle.loads(control.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        if what == "fork":
            handle = recv_handle(control)
            pid = os.fork()
            if pid == 0:
                control.close()
                _live(handle, *rest)
            os.close(handle)
            control.send(pid)
        else:
            (pid,) = rest
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            control.send(codes.get(pid))


def _live(
    handle: int, target: Callable[..., None], args: tuple[Any, ...], env: Mapping[str, str]
) -> None:
    """The child: the environment of who asked for it, and the end of its parent is its own."""
    code = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        os.environ.clear()
        os.environ.update(env)
        target(Connection(handle), *args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
