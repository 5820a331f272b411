# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs, what the copy engine schedules, and what its workspace refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import sp_passes
from sp_passes import SPConfig, SPError
from sp_passes.bench import plot
from sp_passes.cli import bench_kernels
from sp_passes.ops import (
    copy_engine,
    features,
    gather_engine,
    hopper,
    kernels,
    symmetric,
    tuned,
    unfused,
)
from sp_passes.ops.kernels import Call, choose

CALL = Call("ag_gemm", "cuda", torch.bfloat16, 6288, 7168, 4096, 2)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    choose.cache_clear()
    yield
    choose.cache_clear()


def on(call: Call, **changes: Any) -> Call:
    return call._replace(**changes)


def test_unmeasured_is_unfused() -> None:
    assert choose(on(CALL, device="cpu"), "auto").name == "unfused"
    assert choose(on(CALL, n=17), "auto").name == "unfused"


def test_measured_winner_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "winner", lambda call: "copy_engine")
    assert choose(CALL, "auto").name == "copy_engine"
    assert choose(on(CALL, device="cpu"), "auto").name == "unfused"


@pytest.mark.parametrize("name", ["copy_engine", "torch", "triton"])
def test_cuda_only_kernels_say_so(name: str) -> None:
    with pytest.raises(SPError, match=f"kernel '{name}' does not support .* are on cpu"):
        choose(on(CALL, device="cpu"), name)
    with pytest.raises(SPError, match="one rank has no peers"):
        choose(on(CALL, tp_size=1), name)


def test_unknown_kernel() -> None:
    with pytest.raises(SPError, match=r"no kernel 'fast' for ag_gemm; there are \('auto'"):
        choose(CALL, "fast")


def test_buckets() -> None:
    times = {
        1024: {"unfused": 10.0, "copy_engine": 9.9},
        2048: {"unfused": 10.0, "copy_engine": 5.0},
        4096: {"unfused": 10.0, "copy_engine": 5.0},
        8192: {"unfused": 10.0, "copy_engine": 12.0},
    }
    buckets = tuned.buckets_of(times)
    assert buckets == (
        (2048, "unfused"), (4096, "copy_engine"), (8192, "unfused"),
    )  # fmt: skip
    for tokens, name in ((1, "unfused"), (2049, "copy_engine"), (4096, "copy_engine")):
        assert tuned.in_bucket(buckets, tokens) == name
    assert tuned.in_bucket(buckets, 8193) is None


def test_table_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    key = ((9, 0), "ag_gemm", 6288, 7168, 2, "bfloat16")
    tuned.write(path, {key: ((4096, "copy_engine"),)})
    other = ((9, 0), "gemm_rs", 7168, 768, 2, "bfloat16")
    tuned.write(path, {other: ((64, "unfused"),)})
    assert tuned.read(path) == {key: ((4096, "copy_engine"),), other: ((64, "unfused"),)}
    shipped = SPConfig(tp_size=2).digest()
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    monkeypatch.setattr(tuned, "capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tuned.named.cache_clear()
    try:
        assert tuned.winner(CALL) == "copy_engine"
        assert choose(CALL, "auto").name == "copy_engine"
        assert SPConfig(tp_size=2).digest() != shipped, "ranks with other tables would not notice"
    finally:
        tuned.named.cache_clear()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "capability"),
        ({"op": "gemm_xy"}, "no op 'gemm_xy'; there are ag_gemm"),
        ({"op": "gemm_rs", "buckets": [[64, "triton"]]}, "gemm_rs has no kernel 'triton'"),
        ({"buckets": [[64, "unfused"], [64, "hopper"]]}, "64 follows 64"),
        ({"buckets": [[-1, "unfused"]]}, "-1 follows 0"),
        ({"n": 1e400}, "infinity"),
    ],
)
def test_bad_table_file(tmp_path: Path, changes: dict[str, Any] | None, message: str) -> None:
    row = {"capability": [9, 0], "op": "ag_gemm", "n": 8, "k": 8, "tp_size": 2,
           "dtype": "bfloat16", "buckets": [[64, "unfused"]]}  # fmt: skip
    path = tmp_path / "table.json"
    path.write_text(json.dumps([{"op": 1} if changes is None else {**row, **changes}]))
    with pytest.raises(SPError, match=f"is no kernel table.*{message}"):
        tuned.read(path)


def test_pieces_cover_the_rows_and_fill_the_gpu() -> None:
    full = copy_engine.FULL
    assert copy_engine.spans(8, 4096, 7168, 768, full) == [(0, 4096)]
    assert copy_engine.spans(2, 5, 64, 64, full) == [(0, 5)]
    assert copy_engine.spans(2, 16384, 6288, 6288, full) == [(0, 16384)]  # product-bound
    found = copy_engine.spans(2, 16384, 7168, 768, full)
    assert len(found) == 4
    assert [a for a, _ in found[1:]] == [b for _, b in found[:-1]]
    assert found[0][0] == 0 and found[-1][1] == 16384


class Recorder:
    """Peers of one rank on CPU: what arrives is there from the start, pushes are written down."""

    def __init__(self, slots: Tensor, rank: int) -> None:
        self.arrived, self.rank, self.size = slots, rank, slots.shape[0]
        self.side: Any = None
        self.log: list[Any] = []
        self.pushed: dict[int, Tensor] = {}

    def fork(self) -> None:
        self.log.append("fork")

    def merge(self) -> None:
        self.log.append("merge")

    def open(self) -> None:
        self.log.append("open")

    def mine(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.arrived.view(shape)

    def chunks(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self.mine(shape, dtype).unbind(0)

    def exchange(self, rows: Tensor, shape: tuple[int, ...], opened: bool = False) -> Tensor:
        self.fork()
        if not opened:
            self.open()
        self.send(rows, shape)
        self.arrived[self.rank] = rows[self.rank] if rows.ndim == 3 else rows
        for step in range(1, self.size):
            self.wait((self.rank - step) % self.size, 0)
        self.merge()
        return self.arrived

    def send(self, rows: Tensor, shape: tuple[int, ...]) -> None:
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            self.push(rows[peer] if rows.ndim == 3 else rows, step, shape, 0, 0)

    def push(self, rows: Tensor, step: int, shape: Any, start: int, piece: int) -> None:
        self.log.append(("push", step, piece))
        peer = (self.rank + step) % self.size
        self.pushed.setdefault(peer, torch.zeros(shape[1:]))[start : start + len(rows)] = rows

    def wait(self, src: int, piece: int) -> None:
        self.log.append(("wait", src, piece))

    def wait_all(self, pieces: int) -> None:
        for step in range(1, self.size):
            for piece in range(pieces):
                self.wait((self.rank - step) % self.size, piece)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_engine, "FULL", 6)


@pytest.mark.parametrize("out_first", [True, False])
def test_ag_gemm_schedule(streams: None, out_first: bool) -> None:
    size, rank, rows, k, n = 4, 2, 6, 5, 4
    slots = torch.randn(size, rows, k)
    x = slots[rank].clone()
    everyone = slots.flatten(0, 1).clone()
    slots[rank] = float("nan")  # a rank's own slot is never filled
    weight, bias = torch.randn(n, k), torch.randn(n)
    peers = Recorder(slots, rank)
    given = weight if out_first else weight.t().contiguous()
    _, (out,) = copy_engine.gather_products(x, [given], [bias], [out_first], peers)
    assert torch.allclose(out, everyone @ weight.t() + bias, atol=1e-5)
    assert peers.log[:2] == ["fork", "open"] and peers.log[-1] == "merge"
    pushes = [entry[1:] for entry in peers.log if entry[0] == "push"]
    assert pushes == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    waits = [entry[1] for entry in peers.log if entry[0] == "wait"]
    assert waits == [1, 1, 0, 0, 3, 3]  # in the order of their pushes
    assert all(rows_.equal(x) for rows_ in peers.pushed.values())


def test_gemm_rs_schedule(streams: None) -> None:
    size, rank, rows, k, n = 4, 1, 6, 5, 4
    slots = torch.randn(size, rows, n)
    x, weight, bias = torch.randn(size * rows, k), torch.randn(n, k), torch.randn(n)
    peers = Recorder(slots, rank)
    out = copy_engine.product_reduce(x, weight, bias, True, peers)
    part = (x @ weight.t()).view(size, rows, n)
    total = torch.zeros(rows, n)
    for src in range(size):
        total += part[rank] if src == rank else slots[src]
    assert torch.allclose(out, total + bias, atol=1e-5)
    steps = [entry[1] for entry in peers.log if entry[0] == "push"]
    assert steps == [3, 3, 2, 2, 1, 1]  # farthest first, own chunk never
    assert all(torch.allclose(rows_, part[peer]) for peer, rows_ in peers.pushed.items())
    assert {entry[1] for entry in peers.log if entry[0] == "wait"} == {0, 2, 3}


def test_rows_that_are_added_do_not_change_the_dtype(
    solo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a kernel does not add them itself; the compiled graph relies on it."""
    row = kernels.Kernel("narrow", "gemm_rs", unfused.gemm_rs, lambda call: None)
    monkeypatch.setattr("sp_passes.ops.choose", lambda *asked: row)
    x, weight = torch.randn(4, 6, dtype=torch.bfloat16), torch.randn(8, 6, dtype=torch.bfloat16)
    rows = torch.randn(4, 8)
    made = torch.ops.sp_passes.gemm_rs(x, weight, rows, "L1", None, solo.group_name, 1)
    assert made.dtype == torch.bfloat16


def test_no_workspace_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "_capturing", lambda: True)
    with pytest.raises(SPError, match=r"has a workspace of 0 bytes and this call needs 64"):
        symmetric.workspace(SimpleNamespace(group_name="captured"), torch.device("cuda"), 64)
    with pytest.raises(SPError, match=r"capture; run the largest step that takes this kernel"):
        hopper.workspace(SimpleNamespace(group_name="captured"), torch.device("cuda"), 64, 1)


def test_no_symmetric_memory_falls_back_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(pg: Any, device: torch.device, nbytes: int) -> None:
        raise RuntimeError("peer access is not supported\nbetween these devices")

    monkeypatch.setattr(symmetric, "SymmetricPeers", refuse)
    for name in ("_unusable", "_workspaces"):
        monkeypatch.setattr(symmetric, name, {})
    group: Any = SimpleNamespace(group_name="far apart", size=lambda: 1)
    for _ in range(2):
        assert symmetric.workspace(group, torch.device("cuda"), 64) is None
    assert len(caplog.records) == 1
    said = caplog.records[0].getMessage()
    assert "far apart, its ops that need 64 bytes run unfused: rank 0: peer access" in said
    monkeypatch.setattr(symmetric, "SymmetricPeers", lambda *args: SimpleNamespace(nbytes=64))
    later: Any = SimpleNamespace(group_name="far apart", size=lambda: 1)
    assert symmetric.workspace(later, torch.device("cuda"), 64) is not None, "another group"


def test_too_few_signal_words_fall_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Small(symmetric.SymmetricPeers):
        def __init__(self, pg: Any, device: torch.device, nbytes: int) -> None:
            self.size, self.handle = 64, SimpleNamespace(signal_pad_size=2048)
            self._require_signals()

    monkeypatch.setattr(symmetric, "SymmetricPeers", Small)
    monkeypatch.setattr(symmetric, "_unusable", {})
    group: Any = SimpleNamespace(group_name="many ranks", size=lambda: 1)
    assert symmetric.workspace(group, torch.device("cuda"), 64) is None
    assert "9 signal channels of 64 ranks need 2304 bytes" in caplog.records[0].getMessage()


@pytest.mark.parametrize("segments", [(16,), (8, 8)])
@pytest.mark.parametrize("rows", [1, 6])
def test_gemm_gather_schedule(streams: None, rows: int, segments: tuple[int, ...]) -> None:
    size, rank, k = 4, 1, 5
    slots = torch.randn(size, rows, 4)
    x, weight, bias = torch.randn(rows, k), torch.randn(4, k), torch.randn(4)
    peers = Recorder(slots, rank)
    out = gather_engine.product_gather(x, weight, bias, True, segments, peers)
    mine = x @ weight.t() + bias
    assert torch.allclose(slots[rank], mine)
    assert out.equal(features.restore(slots, segments, size))
    assert out.untyped_storage().data_ptr() != slots.untyped_storage().data_ptr()
    assert len(peers.pushed) == size - 1
    assert all(torch.allclose(there, mine) for there in peers.pushed.values())
    assert {entry[1] for entry in peers.log if entry[0] == "wait"} == {0, 2, 3}


def test_a_larger_call_keeps_the_old_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def peers(pg: Any, device: torch.device, nbytes: int) -> Any:
        made.append(nbytes)
        return SimpleNamespace(nbytes=nbytes)

    monkeypatch.setattr(symmetric, "SymmetricPeers", peers)
    monkeypatch.setattr(symmetric, "_workspaces", {})
    monkeypatch.setattr(symmetric, "_kept", [])
    group: Any = SimpleNamespace(group_name="grows", size=lambda: 1)
    for nbytes in (64, 32, 65, 66, 128):  # a step of one token more does not keep a buffer more
        symmetric.workspace(group, torch.device("cuda"), nbytes)
    assert made == [64, 128]
    assert [old.nbytes for old in symmetric._kept] == [64]
    monkeypatch.setattr(symmetric, "_most_tokens", {})
    symmetric.expect("grows", 99, 4)
    symmetric.workspace(group, torch.device("cuda"), 256, tokens=8)
    symmetric.workspace(group, torch.device("cuda"), 3200, tokens=100)
    assert made[2:] == [3200]
    symmetric.workspace(group, torch.device("cuda"), 512, tokens=8)  # wider rows, as few tokens
    assert made[3:] == [6400]
    symmetric.expect("grows", 200, 4)
    monkeypatch.setattr(symmetric, "_capturing", lambda: True)
    held = symmetric.workspace(group, torch.device("cuda"), 6400, tokens=100)
    assert held.nbytes == 6400, "enough for what is captured"


def test_max_tokens_reaches_the_workspaces(solo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "_most_tokens", {})
    config = SPConfig(group=solo, max_tokens=4096)
    sp_passes.compile(torch.nn.Linear(8, 8), config)(torch.zeros(2, 8))
    assert symmetric._most_tokens == {solo.group_name: 4096}


def test_bench_kernels_needs_a_gpu() -> None:
    asked = bench_kernels.Asked()
    with pytest.raises(SPError, match=r"bench kernels needs an NVIDIA GPU; torch .* sees none"):
        bench_kernels.run(asked, False)


def measured() -> dict[str, Any]:
    """Two ops, each with a kernel that the other does not have."""
    rows = [
        {"op": op, "n": 8, "k": 8, "tokens": m, "tp_size": 2, "link": "peer",
         "us": {"unfused": 2.0 * m, own: 1.5 * m}, "over_floor": {"unfused": 2.0, own: 1.5},
         "product_us": 1.0 * m, "transfer_us": 0.5 * m}
        for op, own in (("ag_gemm", "triton"), ("gemm_rs", "nccl")) for m in (1, 2)
    ]  # fmt: skip
    return {"device": "a GPU", "rows": rows}


def test_bench_kernels_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    asked = bench_kernels.Asked()
    bench_kernels._report(measured(), asked, False)
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert [line.split(";")[0] for line in lines if "; µs" in line] == ["ag_gemm", "gemm_rs"]
    assert [row[5:] for row in cells] == [
        ["2 (2.00)", "2 (1.50)"], ["4 (2.00)", "3 (1.50)"],
        ["2 (2.00)", "2 (1.50)"], ["4 (2.00)", "3 (1.50)"],
    ]  # fmt: skip


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(measured(), tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
