# SPDX-License-Identifier: Apache-2.0
"""The few CUDA driver calls that move rows and signals between ranks, without any kernel.

A call through ``cuda-bindings`` (with PyTorch's CUDA 13 builds) costs the host 0.1 to 0.3 µs
beside the driver's own time, one through PyTorch several µs. Signals are stream memory
operations: the stream itself writes a word or waits for one, so no multiprocessor is taken.

From NVIDIA's driver API (Stream Memory Operations, CUstreamWriteValue_flags):
- the operations of one batch run in their order, fewer than 256 a batch;
- a write comes after a memory fence like ``__threadfence_system``, scoped to the stream: who
  sees the word sees what the stream wrote before it, copies included;
- the scheduler does not know of the order that they make, so what peers wait for has to be
  issued before what waits for them;
- under stream capture a batch becomes a graph node that runs at every replay.
(``cuMemcpyBatchAsync`` takes 4.2 µs of the host for each of eight copies, against 4.8 one by one on
an H200 machine; it has no graph node and refuses the default stream. Not used.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ..errors import SPError

MOST_OPS = 255


class MemOp(NamedTuple):
    """Write ``value`` to the 32-bit word at ``address``, or ``wait`` until it holds it."""

    wait: bool
    address: int
    value: int


class Move(NamedTuple):
    """Where rows go to, where they lie behind the first, and the word that tells of them."""

    to: int
    offset: int
    word: int


class Calls(Protocol):
    """What :class:`Driver` does, for stand-ins. Streams are handles, addresses integers."""

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between addresses of this process, peers' memory included."""

    def copies(self, source: int, moves: Sequence[Move], nbytes: int, stream: int) -> None:
        """``nbytes`` from ``offset`` behind ``source``, for each move."""

    def sends(self, source: int, moves: Sequence[Move], nbytes: int, stream: int) -> None:
        """As :meth:`copies`, each followed by a write of 1 to its ``word``."""

    def write(self, address: int, value: int, stream: int) -> None:
        """Write a 32-bit word, behind a fence."""

    def batch(self, ops: Sequence[MemOp]) -> Any:
        """Operations to :meth:`run`, in order."""

    def run(self, batch: Any, stream: int) -> None: ...

    def event(self) -> Any:
        """An event; it may be recorded again and again."""

    def record(self, event: Any, stream: int) -> None: ...

    def follow(self, event: Any, stream: int) -> None:
        """``stream`` waits for what the event last recorded."""


class Driver:
    """:class:`Calls` on the current device.

    Raises:
        SPError: ``cuda-bindings`` or the driver is missing, or a call fails.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as err:
            raise SPError(f"cuda-bindings cannot be imported: {err}") from None
        self._cuda = driver
        self._copy, self._write = driver.cuMemcpyAsync, driver.cuStreamWriteValue32
        self._batch = driver.cuStreamBatchMemOp
        self._record, self._follow = driver.cuEventRecord, driver.cuStreamWaitEvent
        try:
            self._require(driver.cuInit(0)[0], "cuInit")
        except RuntimeError as err:  # no libcuda
            raise SPError(f"the CUDA driver cannot be loaded: {err}") from None

    def _require(self, error: Any, what: str) -> None:
        if error:
            raise SPError(f"the CUDA driver refused {what}: {error!r}")

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        (error,) = self._copy(to, source, nbytes, stream)
        if error:
            self._require(error, f"a copy of {nbytes} bytes")

    def copies(self, source: int, moves: Sequence[Move], nbytes: int, stream: int) -> None:
        copy = self._copy
        for to, offset, _ in moves:
            (error,) = copy(to, source + offset, nbytes, stream)
            if error:
                self._require(error, f"a copy of {nbytes} bytes")

    def sends(self, source: int, moves: Sequence[Move], nbytes: int, stream: int) -> None:
        copy, write = self._copy, self._write
        for to, offset, word in moves:
            (error,) = copy(to, source + offset, nbytes, stream)
            if error:
                self._require(error, f"a copy of {nbytes} bytes")
            (error,) = write(stream, word, 1, 0)
            if error:
                self._require(error, "a write of a word by a stream")

    def write(self, address: int, value: int, stream: int) -> None:
        (error,) = self._write(stream, address, value, 0)
        if error:
            self._require(error, "a write of a word by a stream")

    def batch(self, ops: Sequence[MemOp]) -> Any:
        if len(ops) > MOST_OPS:
            raise SPError(f"{len(ops)} stream memory operations at once; {MOST_OPS} are possible")
        made, kinds = [], self._cuda.CUstreamBatchMemOpType
        equal = self._cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        for op in ops:
            params = self._cuda.CUstreamBatchMemOpParams()
            part = params.waitValue if op.wait else params.writeValue
            part.operation = (
                kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32 if op.wait
                else kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
            )  # fmt: skip
            part.address, part.value = op.address, op.value
            part.flags = int(equal) if op.wait else 0
            made.append(params)
        return made

    def run(self, batch: Any, stream: int) -> None:
        (error,) = self._batch(stream, len(batch), batch, 0)
        if error:
            self._require(error, f"{len(batch)} stream memory operations")

    def event(self) -> Any:
        flags = self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING
        error, made = self._cuda.cuEventCreate(int(flags))
        self._require(error, "an event")
        return made

    def record(self, event: Any, stream: int) -> None:
        (error,) = self._record(event, stream)
        if error:
            self._require(error, "recording an event")

    def follow(self, event: Any, stream: int) -> None:
        (error,) = self._follow(stream, event, 0)
        if error:
            self._require(error, "waiting for an event")

    def own_stream(self) -> int:
        """A new stream of the highest priority: PyTorch's come from a pool and may be shared."""
        error, _, highest = self._cuda.cuCtxGetStreamPriorityRange()
        self._require(error, "the priorities of streams")
        flags = int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        error, made = self._cuda.cuStreamCreateWithPriority(flags, highest)
        self._require(error, "a stream")
        return int(made)

    def done(self, stream: int) -> bool:
        """Whether all that the stream has got is over."""
        (error,) = self._cuda.cuStreamQuery(stream)
        if error == self._cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._require(error, "a look at a stream")
        return True
