# SPDX-License-Identifier: Apache-2.0
"""``all_gather`` and ``reduce_scatter`` as kernels: signals, numbers, choice, and their rows."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_copy_engine_protocol as protocol
import torch
from torch import Tensor, nn

import sp_passes
from sp_passes import SPConfig, SPError
from sp_passes.bench import kernels as bench
from sp_passes.bench import links, sanitize
from sp_passes.cli import bench_kernels
from sp_passes.ops import collective_engine, one_launch, one_shot, tuned
from sp_passes.ops.kernels import Call, choose

ours = torch.ops.sp_passes
SCRIPT = Path(__file__).parent / "collectives_interpreted.py"
GATHER = Call("all_gather", "cuda", torch.bfloat16, 7168, 0, 256, 2)
SCATTER = Call("reduce_scatter", "cuda", torch.bfloat16, 7168, 0, 256, 2)


def on(call: Call, **changes: Any) -> Call:
    return call._replace(**changes)


# --- copy engine: every order of two ranks' steps --------------------------------------------


def spied(run: Any, x: Tensor, rank: protocol.Rank) -> None:
    """Write down what is read out of the buffer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_engine, "_take", lambda out, rows: noted(rank, rows))
        patch.setattr(collective_engine.unfused, "add_into", lambda out, rows: noted(rank, rows))
        run(x, rank)


def noted(rank: protocol.Rank, rows: Tensor) -> None:
    for chunk in rows if rows.ndim == 3 else [rows]:
        rank.reads(chunk)


def all_gather(rank: protocol.Rank) -> None:
    spied(collective_engine.gather, torch.zeros(protocol.ROWS, protocol.WIDTH), rank)


def reduce_scatter(rank: protocol.Rank) -> None:
    x = torch.zeros(rank.size, protocol.ROWS, protocol.WIDTH)
    spied(collective_engine.scatter, x, rank)


@pytest.mark.parametrize("pieces", [1, 2])
def test_two_ranks_in_every_order(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row_bytes = 4 * protocol.WIDTH
    monkeypatch.setattr(collective_engine, "PIECE_BYTES", protocol.ROWS * row_bytes // pieces)
    for calls in (
        [all_gather, reduce_scatter, all_gather],
        [reduce_scatter, protocol.ag_gemm, reduce_scatter],
    ):
        made = protocol.programs(2, calls, monkeypatch)
        pushes = [step for step in made[0] if step[1] == 0 and step[2] == "copy"]
        assert len(pushes) >= pieces
        assert protocol.every_order(made) > 100


@pytest.mark.parametrize(
    ("op", "part", "complaint"),
    [
        (all_gather, "waits", "reads rows of call"),
        (reduce_scatter, "waits", "reads rows of call"),
        (reduce_scatter, "merge", "free again"),
        (all_gather, "barrier", "reads rows of call|sets a word that is set"),
    ],
)
def test_broken_protocols_are_found(
    op: Any, part: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective_engine, "PIECE_BYTES", 2 * 4 * protocol.WIDTH)
    made = protocol.programs(2, [op, op], monkeypatch, change=protocol.without(part))
    with pytest.raises(protocol.Failure, match=complaint):
        protocol.every_order(made)


def test_pieces_cover_the_rows() -> None:
    most = collective_engine.PIECE_BYTES
    assert collective_engine.spans(5, 64) == [(0, 5)]
    assert collective_engine.spans(1, 100 * most) == [(0, 1)]
    found = collective_engine.spans(4001, most // 500)
    assert len(found) == collective_engine.PIECES
    assert [a for a, _ in found] == [0, *(b for _, b in found[:-1])] and found[-1][1] == 4001


def test_numbers_of_the_copy_engine() -> None:
    sanitize.engine_all_gather()
    sanitize.engine_reduce_scatter()


def test_sanitize_counts_what_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main(["--parts", "hopper,engine_all_gather"]) == 0
    left_out, _, last = capsys.readouterr().out.splitlines()
    assert "hopper: left out" in left_out and last == "1 of 2 parts ran, none failed"


class AtOnce(protocol.WrittenDown):
    """Driver calls that copy when they are called."""

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(to, source, nbytes)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_stand_in_moves_what_a_rank_does(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver's calls, in either direction; its own rows too."""
    monkeypatch.setattr(links, "Driver", AtOnce)
    monkeypatch.setattr(links._private, "raw_stream_getter", lambda: lambda device: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(collective_engine, "PIECE_BYTES", 4 * 3 * 4 // pieces)
    for incoming in (True, False):
        peers = links.LoopBackPeers(2, (4, 3), torch.float32, "device", incoming, "cpu")
        peers.side = SimpleNamespace(cuda_stream=8)
        peers.lanes = peers._lanes()
        there, x = peers.slots[1].clone(), torch.randn(2, 4, 3)
        if incoming:
            assert collective_engine.gather(x[0], peers).equal(torch.stack([x[0], there]))
        else:
            assert collective_engine.scatter(x, peers).equal(x[0] + there)
            assert peers.far[1].equal(x[1])


# --- one launch ------------------------------------------------------------------------------


def test_one_launch_on_two_processes_that_stall(tmp_path: Path) -> None:
    """Sizes that never line up, both kinds in and out of turn; equal to the bit."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    for rank in range(2):
        (tmp_path / f"rank{rank}").write_bytes(bytes(one_launch.buffer_bytes(2)))
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), str(rank), "2", str(tmp_path), "10"],
            env=env, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        end = time.monotonic() + 90
        while time.monotonic() < end and any(p.poll() is None for p in started):
            if any(p.poll() for p in started):
                break  # the other one would wait for ever
            time.sleep(0.05)
        codes = [p.poll() for p in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0], "".join(p.communicate()[1][-500:] for p in started)


def test_words_are_the_bytes() -> None:
    x = torch.randn(3, 7).bfloat16()
    assert one_launch.words(x).dtype == torch.int16
    assert one_launch.words(x[:2]).dtype == torch.int32
    assert one_launch.words(x[1:]).dtype == torch.int16  # 14 bytes into its storage
    assert one_launch.words(torch.zeros(4, 8, dtype=torch.uint8)).dtype == torch.int64
    assert one_launch.words(x.t()).view(x.dtype).equal(x.t().reshape(-1))


def test_one_launch_falls_back_once_and_refuses_captures(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(pg: Any, device: torch.device, nbytes: int) -> None:
        raise RuntimeError("no peer access\nbetween these devices")

    monkeypatch.setattr(one_launch, "_made", {})
    monkeypatch.setattr(one_shot, "shared", refuse)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    group, device = SimpleNamespace(group_name="far apart", size=lambda: 1), torch.device("cpu")
    assert one_launch.for_group(group, device) is None
    assert one_launch.for_group(group, device) is None
    (record,) = caplog.records
    said = record.getMessage()
    assert "far apart, its small collectives run unfused: rank 0: no peer access" in said
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(SPError, match="run one step of that size before capturing"):
        one_launch.for_group(SimpleNamespace(group_name="another"), device)


# --- choice ----------------------------------------------------------------------------------


def test_unmeasured_collectives_are_unfused_and_not_estimated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(*call: Any) -> str:
        raise AssertionError("the cost model has no product to weigh")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuned, "capability", lambda: (9, 0))
    monkeypatch.setattr(tuned.estimated, "winner", asked)
    choose.cache_clear()
    for call in (on(GATHER, n=17), on(SCATTER, n=17, tokens=32768)):
        assert choose(call, "auto").name == "unfused"
    monkeypatch.setattr(tuned, "table", lambda: {
        ((9, 0), "all_gather", 7168, 0, 2, "bfloat16"): ((512, "one_shot"), (4096, "copy_engine")),
    })  # fmt: skip
    choose.cache_clear()
    try:
        assert choose(GATHER, "auto").name == "one_shot"
        assert choose(on(GATHER, tokens=512), "auto").name == "unfused"  # above its buffers
        assert choose(on(GATHER, tokens=4096), "auto").name == "copy_engine"
        assert choose(SCATTER, "auto").name == "unfused"
    finally:
        choose.cache_clear()


@pytest.mark.parametrize(
    ("call", "name", "reason"),
    [
        (on(GATHER, tokens=512), "one_shot", "7340032 bytes; it is for at most 4194304"),
        (on(SCATTER, dtype=torch.int32), "one_shot", "it adds bfloat16, float16 and float32"),
        (on(SCATTER, tp_size=1), "copy_engine", "one rank has no peers"),
        (on(GATHER, device="cpu"), "copy_engine", "the tensors are on cpu"),
        (GATHER, "triton", "no kernel 'triton' for all_gather"),
    ],
)
def test_why_not(call: Call, name: str, reason: str) -> None:
    with pytest.raises(SPError, match=reason):
        choose(call, name)


def test_ops_take_a_kernel_and_a_barrier(solo: Any) -> None:
    x, where = torch.randn(4, 3), (solo.group_name, 1)
    assert ours.all_gather(x, *where, kernel="unfused", barrier=True).equal(x)
    assert ours.reduce_scatter(x, *where, kernel="unfused", barrier=True).equal(x)
    with pytest.raises(SPError, match=r"'copy_engine' does not support .* are on cpu"):
        ours.all_gather(x, *where, kernel="copy_engine")
    wide = torch.full((2, 1), 1 + 2.0**-40, dtype=torch.float64)
    assert ours.reduce_scatter(wide, *where).equal(wide)


def test_models_that_call_them_compile() -> None:
    """Inductor names the arguments of ops whose layout it keeps, ``kernel`` like one of its own.

    The demo compiles such a model without the pass.
    """
    for op in (ours.all_gather.default, ours.reduce_scatter.default):
        assert torch.Tag.flexible_layout in op.tags


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(ours.all_gather(x, "", 2).float()).bfloat16().float().bfloat16()


def test_the_configured_kernel_is_handed_on() -> None:
    graph = sp_passes.trace(Normed(), torch.randn(3, 8).double())
    config = SPConfig(tp_size=2, kernels="copy_engine", patterns=["late_gather"])
    assert sp_passes.rewrite(graph, config).applied
    (node,) = graph.graph.find_nodes(op="call_function", target=ours.all_gather.default)
    assert node.kwargs == {"kernel": "copy_engine"}


# --- what is measured ------------------------------------------------------------------------


def test_rows_of_the_bench() -> None:
    asked = bench_kernels.chosen(bench_kernels.Asked(
        ops="gemm_gather,all_gather,ag_gemm", tokens="6001,8,8",
        shapes="2112x7168,ag_gemm:272x128,3584,gemm_rs:1x1",
    ))  # fmt: skip
    found = list(asked.rows(2))
    assert found == [
        ("gemm_gather", 1056, 7168, 8), ("gemm_gather", 1056, 7168, 6002),
        ("all_gather", 3584, 0, 8), ("all_gather", 3584, 0, 6002),
        ("ag_gemm", 2112, 7168, 8), ("ag_gemm", 2112, 7168, 6002),
        ("ag_gemm", 272, 128, 8), ("ag_gemm", 272, 128, 6002),
    ]  # fmt: skip
    every = list(bench.Asked().rows(2))
    assert {row[0] for row in every} == set(bench.SHAPES)
    assert ("reduce_scatter", 7168, 0, 8) in every and ("ag_gemm", 6288, 7168, 8) not in every


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ops": "ag_gem"}, "--ops: 'ag_gem' is not measured; there are ag_gemm"),
        ({"kernels": "fast"}, "--kernels: 'fast' is not measured"),
        ({"shapes": "axb"}, "give n x k such as 3648x7168"),
        ({"tokens": "0"}, "give counts such as"),
    ],
)
def test_rows_that_do_not_exist(given: dict[str, str], message: str) -> None:
    with pytest.raises(SPError, match=message):
        bench_kernels.chosen(bench_kernels.Asked(**given))  # type: ignore[arg-type]


def test_winners_of_a_collective() -> None:
    """Comparisons do not win; a kernel must win at both ends of a bucket."""
    rows = [
        {"op": "all_gather", "n": 7168, "k": 0, "tp_size": 2, "tokens": m, "us": us}
        for m, us in (
            (8, {"unfused": 10.0, "one_shot": 6.0, "torch": 1.0}),
            (16, {"unfused": 10.0, "one_shot": 7.0, "nccl": 1.0}),
            (64, {"unfused": 10.0, "copy_engine": 8.0}),
        )
    ]
    assert bench.winners(rows, (9, 0)) == {
        ((9, 0), "all_gather", 7168, 0, 2, "bfloat16"): (
            (8, "unfused"), (16, "one_shot"), (64, "unfused"),
        )
    }  # fmt: skip
