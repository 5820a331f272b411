# SPDX-License-Identifier: Apache-2.0
"""ops/hopper_copy.py without a GPU: its copies and signals in every order, and its pieces."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_machine import (
    MAIN,
    ROWS,
    SIDE,
    SPACE,
    WIDTH,
    Failure,
    as_a_graph,
    every_order,
    some_orders,
)  # fmt: skip
from test_copy_engine_protocol import OPS as COPY_ENGINE
from test_copy_engine_protocol import Rank, captured, programs
from torch import Tensor

from sp_passes.ops import hopper, hopper_copy, mailbox, triton_gemm
from sp_passes.ops.kernels import Call
from sp_passes.ops.lanes import row_word

READY = SPACE - 4096  # words of this rank alone


def arrivals(rank: Rank, per: int) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """The word of every piece of every peer, with its rows."""
    assert rank.lanes is not None
    first = row_word(rank.size, 0, 0)
    return [
        (
            rank.lanes.rows_words + 4 * (row_word(rank.size, src, piece) - first),
            tuple((src, row) for row in range(start, stop)),
        )
        for src in range(rank.size) if src != rank.rank
        for piece, (start, stop) in enumerate(hopper_copy.pieces_of(ROWS, per))
    ]  # fmt: skip


def ag_gemm(rank: Rank) -> None:
    """Its kernel waits for words and sets them back itself."""

    def gathering(
        x: Tensor, weights: Any, biases: Any, view: Any, piece_tiles: int
    ) -> tuple[list[Tensor], Any]:
        def product(grid: int, block: int, packed: Any, stream: int) -> None:
            for word, rows in arrivals(rank, piece_tiles):
                rank.note("wait", word, 1)
                rank.note("read", rows)
            for word, _ in arrivals(rank, piece_tiles):
                rank.note("write", word, 0)

        return [], SimpleNamespace(packed=None, kernel=SimpleNamespace(launch=product))

    with small_pieces(rank) as patch:
        patch.setattr(hopper, "gathering", gathering)
        weight = torch.zeros(WIDTH, WIDTH)
        hopper_copy.gather_products(torch.zeros(ROWS, WIDTH), [weight], [None], rank)  # type: ignore[arg-type]


def gemm_rs(rank: Rank, counts: bool = True, waits: bool = True, patient: bool = False) -> None:
    """Its first kernel counts what it has made, and adds what is there; its second the rest."""

    def reduction(
        x: Tensor, weight: Any, bias: Any, into: Any, width: int, group: int, per: int
    ) -> tuple[Tensor, Any]:
        made = SimpleNamespace(staged=0, late=0)

        def product(grid: int, block: int, packed: Any, stream: int) -> None:
            for chunk in range(rank.size - 1):
                for piece, (start, stop) in enumerate(hopper_copy.pieces_of(ROWS, per)):
                    rank.note("made", made.staged + 4 * WIDTH * (chunk * ROWS + start))
                    word = into.ready + 4 * (chunk * mailbox.MOST_PIECES + piece)
                    tiles = -(-WIDTH // width) * (stop - start)
                    rank.note("write", word, tiles * hopper_copy.PUSHERS)
            for word, rows in arrivals(rank, per):
                if patient:
                    rank.note("wait", word, 1)
                rank.note("peek", rows, word)

        def finish(grid: int, block: int, packed: Any, stream: int) -> None:
            for _, rows in arrivals(rank, per):
                rank.note("read", rows)

        kernels = {"kernel": product, "finish": finish}
        launch = {name: SimpleNamespace(launch=run) for name, run in kernels.items()}
        return x, SimpleNamespace(made=made, packed=None, **launch)

    with small_pieces(rank) as patch:
        patch.setattr(hopper, "reduction", reduction)
        if not counts:
            patch.setattr(rank.lanes, "wait_count", lambda word, count: None)
        if not waits:
            patch.setattr(rank, "wait_all", lambda pieces: None)
        x, weight = torch.zeros(rank.size * ROWS, WIDTH), torch.zeros(WIDTH, WIDTH)
        hopper_copy.product_reduce(x, weight, None, rank)  # type: ignore[arg-type]


class small_pieces:
    """Tiles of one row, pieces of two rows; no device is asked."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.context = rank, pytest.MonkeyPatch.context()

    def __enter__(self) -> pytest.MonkeyPatch:
        patch = self.context.__enter__()
        into = SimpleNamespace(ready=SPACE * (self.rank.rank + 1) + READY, programs=4)
        patch.setattr(hopper_copy, "kernel_view", lambda peers: into)
        patch.setattr(hopper_copy, "BM", 1)
        patch.setattr(hopper_copy, "width_back", lambda *sizes: 1)
        patch.setattr(hopper_copy, "_GROUP", 2)
        patch.setattr(hopper_copy, "_AG_TWO", 0.0)
        patch.setattr(hopper_copy, "_RS_EACH", 1e-15)
        return patch

    def __exit__(self, *failed: Any) -> None:
        self.context.__exit__(*failed)


OPS = {"ag_gemm": ag_gemm, "gemm_rs": gemm_rs}


@pytest.mark.parametrize("first", OPS)
def test_two_ranks_in_every_order(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among themselves, and with calls of the copy engine on the same buffer and words."""
    for second in (*OPS.values(), *COPY_ENGINE.values()):
        made = programs(2, [OPS[first], second, OPS[first]], monkeypatch)
        assert every_order(made) > 100


def test_three_ranks_of_any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = programs(3, [ag_gemm, gemm_rs, COPY_ENGINE["gemm_rs"], gemm_rs, ag_gemm], monkeypatch)
    some_orders(made, 60)
    some_orders(made, 5, one_queue=True)


@pytest.mark.parametrize(
    ("without", "complaint"),
    [("counts", "copies a product that is not there"), ("waits", "reads rows of call")],
)
def test_what_is_left_out_is_found(
    without: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = programs(2, [partial(gemm_rs, **{without: False})], monkeypatch)
    with pytest.raises(Failure, match=complaint):
        every_order(made)


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(2, 8), rows=st.integers(1, 5000), wanted=st.integers(0, 40),
    group=st.sampled_from([1, 4]),
)  # fmt: skip
def test_pieces(size: int, rows: int, wanted: int, group: int) -> None:
    per = hopper_copy.tiles_per_piece(size, rows, wanted, group)
    pieces = hopper_copy.pieces_of(rows, per)
    assert per % group == 0 and pieces[0][0] == 0 and pieces[-1][1] == rows
    assert all(a[1] == b[0] == (i + 1) * per * 128 for i, (a, b) in enumerate(pairwise(pieces)))
    assert len(pieces) <= max(min(wanted, mailbox.MOST_PIECES), 1)
    assert len(pieces) * (size - 1) <= max(hopper_copy._MOST_MOVES, size - 1)


def test_words_to_count_in_suffice() -> None:
    from sp_passes.ops.peers import Streams

    local = Streams(torch.device("cpu")).local
    assert local.numel() >= hopper.LOCAL_WORDS and not local.any()


def test_what_does_not_fit_goes_to_the_copy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the driver's calls are not to be had."""
    asked: list[str] = []
    for name in ("ag_gemm", "gemm_rs"):
        monkeypatch.setattr(
            hopper_copy.copy_engine, name, lambda *args, name=name, **kwargs: asked.append(name)
        )
    x, odd = torch.zeros(4, 6), torch.zeros(3, 6)
    hopper_copy.ag_gemm(x, [odd], [None], [True], SimpleNamespace(), 2)
    hopper_copy.gemm_rs(x, odd, None, True, SimpleNamespace(), 2)
    without = SimpleNamespace(lanes=None)
    monkeypatch.setattr(hopper_copy, "workspace", lambda *args: without)
    x, fine = torch.zeros(4, 8), torch.zeros(16, 8)
    hopper_copy.ag_gemm(x, [fine], [None], [True], SimpleNamespace(), 2)
    hopper_copy.gemm_rs(x, fine, None, True, SimpleNamespace(), 2)
    assert asked == ["ag_gemm", "gemm_rs"] * 2


def test_a_product_that_waits_for_what_comes_behind_it_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a queue that the streams share; beside each other they would get on."""
    made = programs(2, [partial(gemm_rs, patient=True)], monkeypatch)
    every_order(made)
    with pytest.raises(Failure, match="all ranks wait"):
        some_orders(made, 1, one_queue=True)


@pytest.mark.parametrize(("op", "first"), [("ag_gemm", MAIN), ("gemm_rs", SIDE)])
def test_branches_of_a_graph_have_to_run_beside_each_other(
    op: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of one branch in front of the other a call waits for what stands behind it: why
    it refuses a device with one queue (``kernels.one_queue``)."""
    made = programs(2, [OPS[op]], monkeypatch, change=captured)
    every_order(made)
    draw = random.Random(0)
    with pytest.raises(Failure, match="all ranks wait"):
        some_orders([as_a_graph(steps, draw, first) for steps in made], 1, one_queue=True)


@pytest.mark.parametrize("kernel", [hopper_copy, triton_gemm])
def test_one_queue_is_refused(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call("ag_gemm", "cuda", torch.bfloat16, 8, 8, 8, 2)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in kernel.why_not(call)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in str(kernel.why_not(call))


def test_parts_go_to_their_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 3
    for rank, steps in enumerate(programs(size, [gemm_rs], monkeypatch)):
        to = [step[3] // SPACE - 1 for step in steps if step[2] == "copy"]
        chunks = [(rank + size - 1 - chunk) % size for chunk in range(size - 1)]
        assert to == [peer for peer in chunks for _ in range(len(to) // (size - 1))]
