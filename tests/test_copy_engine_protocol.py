# SPDX-License-Identifier: Apache-2.0
"""The copy engine's signals, run by an interpreter of streams in every order that can happen.

The ops run for real on CPU over driver calls that are only written down, for every rank; then
their streams are executed (``stream_machine``).
"""

from __future__ import annotations

import ctypes
import random
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from stream_machine import (
    FLAGS,
    MAIN,
    ROWS,
    SIDE,
    SPACE,
    WIDTH,
    Failure,
    Step,
    WrittenDown,
    as_a_graph,
    every_order,
    some_orders,
)  # fmt: skip
from torch import Tensor

from sp_passes import SPError
from sp_passes.bench import host, host_check
from sp_passes.bench.links import LoopBackPeers
from sp_passes.ops import copy_engine, gather_engine, kernels, nvrtc, rank_sum, symmetric
from sp_passes.ops.driver import Driver, MemOp
from sp_passes.ops.lanes import Lanes, words


class Rank(symmetric.SymmetricPeers):
    """The real moves of one rank, over calls that are written down."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.call = rank, size, 0
        self.side, self._views = None, {}
        self.buffer = torch.zeros(size * ROWS * WIDTH)
        self.written = WrittenDown()
        bases = [SPACE * (peer + 1) for peer in range(size)]
        self.lanes = Lanes(
            self.written, rank, bases, [base + FLAGS for base in bases], SIDE, lambda: MAIN
        )

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.buffer.view(shape)

    def note(self, what: str, *about: Any) -> None:
        self.written.steps.append((MAIN, what, *about))

    def reads(self, rows: Tensor) -> None:
        """Write down that the main stream reads these rows, if they are of the buffer."""
        low = (rows.data_ptr() - self.buffer.data_ptr()) // 4 // WIDTH
        if 0 <= low < self.size * ROWS:
            count = rows.numel() // WIDTH
            self.note("read", tuple(divmod(at, ROWS) for at in range(low, low + count)))


def issued(rank: Rank, calls: Sequence[Callable[[Rank], Any]], patch: Any) -> list[Step]:
    """``(stream, call, what, …)`` of one rank's calls, in the order of their issue."""
    product = copy_engine._product

    def spy(x: Tensor, *args: Any) -> Tensor:
        rank.reads(x)
        made = product(x, *args)
        rank.note("made", made.data_ptr())
        return made

    def add(parts: Tensor, *args: Any) -> Tensor:
        rank.reads(parts)
        return parts[0]

    patch.setattr(copy_engine, "_product", spy)
    patch.setattr(gather_engine, "_product", spy)
    patch.setattr(copy_engine.rank_sum, "add", add)
    patch.setattr(gather_engine.features, "restore", lambda parts, *rest: add(parts))
    steps = rank.written.steps
    for number, call in enumerate(calls):
        start = len(steps)
        call(rank)
        rank.note("free")
        steps[start:] = [(stream, number, *rest) for stream, *rest in steps[start:]]
    return list(steps)


def ag_gemm(rank: Rank) -> None:
    x, weight = torch.zeros(ROWS, WIDTH), torch.zeros(WIDTH, WIDTH)
    copy_engine.gather_products(x, [weight], [None], [True], rank)


def gemm_rs(rank: Rank) -> None:
    x, weight = torch.zeros(rank.size * ROWS, WIDTH), torch.zeros(WIDTH, WIDTH)
    copy_engine.product_reduce(x, weight, None, True, rank)


def gemm_gather(rank: Rank) -> None:
    x, weight = torch.zeros(ROWS, WIDTH), torch.zeros(WIDTH, WIDTH)
    gather_engine.product_gather(x, weight, None, True, (rank.size * WIDTH,), rank)


def programs(
    size: int, calls: Sequence[Callable[[Rank], Any]], patch: Any, merged: bool = False,
    change: Callable[[Rank], None] = lambda rank: None,
) -> list[list[Step]]:  # fmt: skip
    """Of every rank. ``merged``: one product for all chunks; else chunks in two pieces."""
    patch.setattr(copy_engine, "at_once", lambda *sizes: merged)
    least = 1 << 20 if merged else ROWS * WIDTH // (2 if size == 2 else 4)
    patch.setattr(copy_engine, "FULL", least)
    patch.setattr(gather_engine, "FULL", least)
    made = []
    for number in range(size):
        rank = Rank(number, size)
        change(rank)
        with pytest.MonkeyPatch.context() as inner:
            made.append(issued(rank, calls, inner))
    return made


OPS = {"ag_gemm": ag_gemm, "gemm_rs": gemm_rs, "gemm_gather": gemm_gather}


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("first", OPS)
def test_two_ranks_in_every_order(
    first: str, merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for second in OPS:
        made = programs(2, [OPS[first], OPS[second], OPS[first]], monkeypatch, merged)
        assert every_order(made) > 100


def test_three_ranks_of_any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [ag_gemm, gemm_rs, gemm_gather, gemm_rs]
    for merged in (False, True):
        made = programs(3, calls, monkeypatch, merged)
        some_orders(made, 60)
        some_orders(made, 5, one_queue=True)


def captured(rank: Rank) -> None:
    assert rank.lanes is not None
    rank.lanes.capturing = lambda: True


@pytest.mark.parametrize("op", OPS)
def test_graphs_run_in_any_order_that_they_allow(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = programs(3, [OPS[op], OPS[op]], monkeypatch, change=captured)
    for seed in range(30):
        draw = random.Random(seed)
        some_orders([as_a_graph(steps, draw) for steps in made], 1, one_queue=True)


def test_graphs_of_eager_calls_can_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    made = programs(3, [ag_gemm], monkeypatch)
    draw = random.Random(0)
    with pytest.raises(Failure, match="all ranks wait"):
        some_orders([as_a_graph(steps, draw) for steps in made], 1, one_queue=True)


def without(part: str) -> Callable[[Rank], None]:
    """Break the protocol: leave a part of it out."""

    def change(rank: Rank) -> None:
        lanes = rank.lanes
        assert lanes is not None
        if part == "barrier":
            lanes._barrier = []
        elif part == "resets":
            keep = [op for op in lanes._barrier if op.wait or op.value]
            lanes._barrier = keep
        elif part == "waits":
            lanes._arrivals = [[[] for _ in row] for row in lanes._arrivals]
            lanes.wait_all = lambda pieces: None  # type: ignore[method-assign]
        elif part == "later forks":
            forks = iter([lanes.fork])
            lanes.fork = lambda: next(forks, lambda: None)()  # type: ignore[method-assign]
        else:
            setattr(lanes, part, lambda: None)

    return change


@pytest.mark.parametrize(
    ("op", "part", "complaint"),
    [
        (ag_gemm, "barrier", "reads rows of call|sets a word that is set"),
        (ag_gemm, "resets", "sets a word that is set"),
        (ag_gemm, "waits", "reads rows of call"),
        (ag_gemm, "fork", "sets a word that is set|reads rows of call"),
        (gemm_rs, "later forks", "copies a product that is not there"),
        (gemm_rs, "merge", "free again"),
    ],
)
def test_broken_protocols_are_found(
    op: Callable[[Rank], None], part: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [op] if part == "later forks" else [op, op]
    made = programs(2, calls, monkeypatch, change=without(part))
    with pytest.raises(Failure, match=complaint):
        every_order(made)


def test_waiting_before_sending_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(rank: Rank) -> None:
        assert rank.lanes is not None
        rank.lanes.fork()
        rank.lanes.wait_all(1)
        rank.lanes.open()
        rank.push(torch.zeros(ROWS, WIDTH), 1, (2, ROWS, WIDTH), 0, 0)
        rank.merge()

    made = programs(2, [backwards], monkeypatch)
    every_order(made)  # two streams that run beside each other
    with pytest.raises(Failure, match="all ranks wait"):
        some_orders(made, 1, one_queue=True)


def test_one_product_where_many_small_ones_would_read_the_weight_again() -> None:
    at_once = copy_engine.at_once.__wrapped__
    assert at_once(8, 8, 6288, 7168, 7168) and at_once(8, 32, 7168, 1536, 7168)
    assert not at_once(8, 1024, 6288, 7168, 7168) and not at_once(2, 512, 7168, 768, 7168)


def test_words_do_not_overlap() -> None:
    size = 3
    rank = Rank(1, size)
    assert rank.lanes is not None
    lanes, own = rank.lanes, 2 * SPACE + FLAGS
    waited = [op.address for op in lanes._barrier if op.wait]
    for src in (0, 2):
        waited += [op.address for batch in lanes._arrivals[src] for op in batch if op.wait]
    assert len(set(waited)) == len(waited)
    assert all(own <= address < own + 4 * (words(size) - 1) for address in waited)
    assert MemOp(False, 1 * SPACE + FLAGS + 4 * 1, 1) in lanes._barrier  # at rank 0, as rank 1


def test_batches_of_the_driver() -> None:
    """Fields where the driver reads them: type, address, value, flags."""
    cuda = pytest.importorskip("cuda.bindings.driver")
    calls = object.__new__(Driver)
    calls._cuda = cuda
    made = calls.batch([MemOp(False, 1 << 40, 1), MemOp(True, (1 << 40) + 4, 1)])
    fields = [(ctypes.c_uint64 * 4).from_address(params.getPtr())[:] for params in made]
    assert fields == [[2, 1 << 40, 1, 0], [1, (1 << 40) + 4, 1, 1]]
    with pytest.raises(SPError, match="256 stream memory operations at once; 255 are possible"):
        calls.batch([MemOp(False, 0, 1)] * 256)


def test_no_driver_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    with pytest.raises(SPError, match=r"cuda-bindings cannot be imported|the CUDA driver"):
        Driver()


class AtOnce(WrittenDown):
    """Driver calls that happen as they are made."""

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def write(self, address: int, value: int, stream: int) -> None:
        ctypes.c_int32.from_address(address).value = value

    def run(self, batch: list[MemOp], stream: int) -> None:
        for op in batch:
            assert not op.wait or ctypes.c_int32.from_address(op.address).value == op.value
            if not op.wait:
                self.write(op.address, op.value, stream)


class Refusing(AtOnce):
    def run(self, batch: list[MemOp], stream: int) -> None:
        raise SPError("the CUDA driver refused 3 stream memory operations: NOT_SUPPORTED")


@pytest.mark.parametrize("refusing", [None, 1])
def test_ranks_agree_on_driver_calls(
    refusing: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """One that cannot make them is enough for all to do without, and to say so."""
    size = 3
    boxes = [torch.zeros(words(size), dtype=torch.int32) for _ in range(size)]
    flags = [box.data_ptr() for box in boxes]
    together = threading.Barrier(size, timeout=20)

    class Half(symmetric.SymmetricPeers):
        def __init__(self, rank: int) -> None:
            self.rank, self.size, self._words = rank, size, boxes

        def _meet(self) -> None:
            together.wait()

        def _lanes(self, device: torch.device) -> Lanes:
            calls = Refusing() if self.rank == refusing else AtOnce()
            return Lanes(calls, self.rank, [0] * size, flags, SIDE, lambda: MAIN)

    def agree(rank: int) -> bool:
        return Half(rank)._agreed(torch.device("cpu")) is not None

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(agree, range(size)))
    assert found == [refusing is None] * size
    assert not any(box.any() for box in boxes)
    if refusing is not None:
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == size
        assert sum("NOT_SUPPORTED" in line for line in said) == 1
        assert sum(f"rank {refusing} needs them" in line for line in said) == size - 1


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("under_capture", [False, True])
def test_one_process_for_all_ranks(
    merged: bool, under_capture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in of the benchmarks computes what a rank would, over calls that happen."""
    monkeypatch.setattr(copy_engine, "at_once", lambda *sizes: merged)
    size, rows, n, k = 4, 3, 6, 5

    def peers(width: int, incoming: bool) -> LoopBackPeers:
        made = LoopBackPeers(size, (rows, width), torch.float32, "device", incoming, "cpu")
        made.lanes = made.lanes_over(AtOnce(), SIDE, lambda: MAIN, lambda: under_capture)
        return made

    for _ in range(2):
        x, weight = torch.randn(rows, k), torch.randn(n, k)
        there = peers(k, True)
        everyone = torch.cat([x, there.far[1:].flatten(0, 1)])
        there.slots.fill_(float("nan"))
        _, (out,) = copy_engine.gather_products(x, [weight], [None], [True], there)
        torch.testing.assert_close(out, everyone @ weight.t())
        there = peers(n, True)
        ref = torch.stack([x @ weight.t(), *there.far[1:]])
        there.slots.fill_(float("nan"))
        out = gather_engine.product_gather(x, weight, None, True, (size * n,), there)
        torch.testing.assert_close(out, ref.transpose(0, 1).flatten(1))
        there, x = peers(n, False), torch.randn(size * rows, k)
        ref = there.slots[1:].sum(0) + x[:rows] @ weight.t()
        out = copy_engine.product_reduce(x, weight, None, True, there)
        torch.testing.assert_close(out, ref)
        sent = (x @ weight.t()).view(size, rows, n)[1:]
        torch.testing.assert_close(there.far[1:], sent if merged else sent.flip(0))


def test_host_times_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of the benchmark runs; the table of kernels is as it was afterwards."""
    before = kernels.kernel_names()

    def once(call: Callable[[], Any]) -> tuple[float, float]:
        call()
        return 1.0, 1.0

    monkeypatch.setattr(host_check, "host_us", once)
    monkeypatch.setattr(host, "profile", partial(host.profile, count=2, top=99))
    try:
        result = host.alone(Namespace(device="cpu", rows=2, whole=False))
    finally:
        torch.distributed.destroy_process_group()
    found = {(row["what"], row.get("ranks")) for row in result["rows"]}
    assert {("ag_gemm, at once", 8), ("gemm_rs, each chunk", 2), ("gemm_gather", 8)} <= found
    assert {("ag_gemm hopper", 2), ("gemm_rs hopper, x moves", 8)} <= found
    assert {row["part"] for row in result["rows"]} == {"whole", "single", "op", "kernel"}
    assert any(
        row["function"] == "lanes.py:exchange" for row in result["profile"]["ag_gemm, at once"]
    )
    assert kernels.kernel_names() == before


@pytest.mark.parametrize("macros", [(("RANKS", 8), ("BIAS", 1)), (("RANKS", 2), ("FP16", 1))])
def test_the_sum_in_rank_order_compiles(macros: tuple[tuple[str, int], ...]) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        cubin = nvrtc.compile_source("add", macros, "sm_90a")
    except SPError as err:
        if "cannot be loaded" not in str(err):
            raise
        pytest.skip(str(err))
    assert b"add" in cubin


def test_the_sum_takes_whole_pieces_only() -> None:
    parts, bias = torch.zeros(2, 3, 16, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.bfloat16)
    assert rank_sum._fits(parts, None) and rank_sum._fits(parts, bias)
    assert not rank_sum._fits(parts, bias.float())
    assert not rank_sum._fits(parts[:, :, :12], None)
    assert not rank_sum._fits(parts.float(), None)
    assert not rank_sum._fits(parts[:, :0], None)


def test_the_sum_keeps_float64() -> None:
    parts, bias = torch.randn(3, 4, 8).double(), torch.randn(16).double()[::2]
    assert torch.equal(rank_sum.add(parts, bias), (parts[0] + parts[1]) + parts[2] + bias)
