# SPDX-License-Identifier: Apache-2.0
"""What of ops/hopper.py and its CUDA source can be tested without a GPU."""

from __future__ import annotations

import ctypes
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_passes.ops import estimated, hopper, hopper_code, hopper_widths, nvrtc, tuned
from sp_passes.ops.kernels import Call, choose
from sp_passes.version import code_digest

SOURCE = Path(hopper.__file__).parent / "cuda"
WRAPPERS = """
#include "schedule.h"
extern "C" void tiles(int many, int rows, int cols, int group, int size, int reduced, int *out) {
    for (int t = 0; t < many; t++) {
        const Tile a = reduced ? reduced_tile(t, rows, cols, group, size)
                               : tile_of(t, rows, cols, group);
        out[3 * t] = a.chunk, out[3 * t + 1] = a.row, out[3 * t + 2] = a.col;
    }
}
extern "C" int pushes(long long bytes, long long piece, int unit, long long *out) {
    const Pushes all = {bytes, piece, unit};
    const int each = all.to_one_peer();
    for (int q = 0; q < 3 * each && out; q++) {
        const Push p = push_of(q, all);
        out[4 * q] = p.step, out[4 * q + 1] = p.piece, out[4 * q + 2] = p.at;
        out[4 * q + 3] = p.bytes;
    }
    return each;
}
extern "C" int of_piece(long long bytes, long long piece, int unit, int p) {
    return Pushes{bytes, piece, unit}.of_piece(p);
}
extern "C" int source(int chunk, int rank, int size) { return source_of(chunk, rank, size); }
extern "C" int owner(int chunk, int rank, int size) { return owner_of(chunk, rank, size); }
"""


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The index functions of the kernels, compiled for the CPU."""
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "wrap.cpp").write_text(WRAPPERS)
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{SOURCE}", "wrap.cpp", "-o"]
    subprocess.run([*command, "wrap.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "wrap.so"))


def tiles(schedule: Any, rows: int, cols: int, group: int, size: int, reduced: bool) -> Any:
    many = rows * cols * size
    out = (ctypes.c_int * (3 * many))()
    schedule.tiles(many, rows, cols, group, size, int(reduced), out)
    return [tuple(out[3 * t : 3 * t + 3]) for t in range(many)]


small = st.integers(1, 9)


@settings(max_examples=150, deadline=None)
@given(rows=st.integers(1, 20), cols=small, group=small, size=st.integers(1, 8))
def test_every_tile_once(schedule: Any, rows: int, cols: int, group: int, size: int) -> None:
    everything = {(c, r, n) for c in range(size) for r in range(rows) for n in range(cols)}
    for reduced in (False, True):
        found = tiles(schedule, rows, cols, group, size, reduced)
        assert len(found) == len(everything) and set(found) == everything
    assert [tile[0] for tile in tiles(schedule, rows, cols, group, size, False)] == sorted(
        tile[0] for tile in everything
    )


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 20), cols=small, group=small, size=st.integers(2, 8))
def test_own_tiles_come_after_what_peers_need(
    schedule: Any, rows: int, cols: int, group: int, size: int
) -> None:
    """A rank that waits for a row of tiles has sent its own of that row, and of the next turn:
    so no ring of ranks can wait for each other."""
    seen: set[tuple[int, int, int]] = set()
    for chunk, row, col in tiles(schedule, rows, cols, group, size, True):
        if chunk == size - 1:
            ahead = range(min(rows, (row // group + 2) * group))
            peers = range(size - 1)
            assert all((c, r, n) in seen for c in peers for r in ahead for n in range(cols))
        seen.add((chunk, row, col))


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 700), k=st.integers(1, 200), unit=st.sampled_from([64, 1024, 8192]))
def test_pushes_cover_the_rows_once(schedule: Any, rows: int, k: int, unit: int) -> None:
    total, piece = rows * k * 16, 128 * k * 16
    sizes = [ctypes.c_longlong(v) for v in (total, piece)]
    each = schedule.pushes(*sizes, unit, None)
    out = (ctypes.c_longlong * (12 * each))()
    schedule.pushes(*sizes, unit, out)
    counted: dict[tuple[int, int], int] = {}
    for step in (1, 2, 3):
        at = 0
        for q in range((step - 1) * each, step * each):
            where = tuple(out[4 * q : 4 * q + 4])
            assert where[0] == step and where[2] == at and 0 < where[3] <= unit
            assert at // piece == where[1] == (at + where[3] - 1) // piece
            counted[step, where[1]] = counted.get((step, where[1]), 0) + 1
            at += where[3]
        assert at == total
    for (_, number), count in counted.items():
        assert schedule.of_piece(*sizes, unit, number) == count


@pytest.mark.parametrize("size", [2, 3, 8])
def test_chunks_follow_the_pushes(schedule: Any, size: int) -> None:
    """The rank that pushes to me as its step s is the source of my chunk s, and the owner of
    what I multiply first is the one whose sum waits longest for me."""
    for rank in range(size):
        assert schedule.source(0, rank, size) == rank
        assert schedule.owner(size - 1, rank, size) == rank
        for step in range(1, size):
            assert schedule.source(step, (rank + step) % size, size) == rank
        assert {schedule.owner(c, rank, size) for c in range(size)} == set(range(size))


@pytest.mark.parametrize(
    ("width", "ranks", "fp16", "copies"),
    [(192, 0, False, False), (128, 8, False, False), (64, 0, True, True), (256, 2, False, True)],
)
def test_the_source_compiles(width: int, ranks: int, fp16: bool, copies: bool) -> None:
    """The struct of arguments has the size that Python fills (a static assertion)."""
    pytest.importorskip("cuda.bindings")
    macros = hopper_code.macros_of(width, fp16, ranks, copies)
    entry = "gemm_rs" if ranks else "ag_gemm"
    cubin = nvrtc.compile_source(entry, macros, "sm_90a", hopper_code.instruction(width, fp16))
    assert cubin[:4] == b"\x7fELF" and entry.encode() in cubin


def test_a_source_that_is_wrong_says_so() -> None:
    pytest.importorskip("cuda.bindings")
    macros = hopper_code.macros_of(192, False, 0)
    with pytest.raises(nvrtc.SPError, match=r"NVRTC refused ag_gemm\.cu .*\n.*mma"):
        nvrtc.compile_source("ag_gemm", macros, "sm_90a")


def test_shared_memory_suffices() -> None:
    for ranks, widths in ((0, hopper_widths.WIDTHS), (8, hopper_widths.WIDTHS_BACK)):
        for width in widths:
            stages = dict(hopper_code.macros_of(width, False, ranks))["STAGES"]
            sent = 128 * -(-width // 64) * 64 * 2 if ranks else 0
            used = 1024 + stages * (128 + width) * 64 * 2 + sent + 8 * 2 * stages
            assert stages >= 3 and used <= hopper_code.SHARED


def test_widths_fill_the_last_wave() -> None:
    assert hopper_widths.width_for(1, 1024, (6288,), 7168, 132) == 192  # two full waves
    assert hopper_widths.width_for(1, 1024, (1536,), 7168, 132) == 96  # one
    assert hopper_widths.width_for(1, 1 << 19, (8192,), 7168, 132) == 256
    assert hopper_widths.width_back(4096, 7168, 132) == 256
    assert hopper_widths.width_back(8, 7168, 132) == 224  # 256 tiles, not 224 in as many waves


def test_own_rows_fill_the_time_until_others_come() -> None:
    """Eight rows of tiles in all: of 240 columns they make one wave, half of it waiting."""
    waiting = hopper_widths.seconds(2, 512, (3648,), 7168, 132, 240)
    chosen = hopper_widths.width_for(2, 512, (3648,), 7168, 132)
    assert (
        chosen < 160 and hopper_widths.seconds(2, 512, (3648,), 7168, 132, chosen) < 0.8 * waiting
    )
    assert hopper_widths.width_for(1, 1024, (3648,), 7168, 132) == 240


def call(**other: Any) -> Call:
    fields = dict(op="ag_gemm", device="cuda", dtype=torch.bfloat16, n=8, k=8, tokens=8, tp_size=4)
    return Call(**{**fields, **other})


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"device": "cpu"}, "the tensors are on cpu"),
        ({"tp_size": 1}, "one rank has no peers"),
        ({"tp_size": 16}, "up to 8 ranks, these are 16"),
        ({"dtype": torch.float32}, "takes bfloat16 and float16"),
    ],
)
def test_why_not(other: dict[str, Any], reason: str) -> None:
    assert reason in str(hopper.why_not(call(**other)))


def test_auto_takes_it_only_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuned, "capability", lambda: (9, 0))
    monkeypatch.setattr(estimated, "device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(nvrtc, "missing", lambda: None)
    choose.cache_clear()
    measured = call(op="gemm_rs", n=7168, k=768, tokens=4096, tp_size=2)
    try:
        assert choose(measured, "auto").name == "hopper"
        for other in ({"tp_size": 4}, {"tokens": 64}, {"k": 776}, {"device": "cpu"}):
            assert choose(measured._replace(**other), "auto").name != "hopper"
    finally:
        choose.cache_clear()


def test_operands_that_fit() -> None:
    x, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(16, 64, dtype=torch.bfloat16)
    vector = torch.zeros(16, dtype=torch.bfloat16)
    assert hopper.fits(x, [weight], [vector], [True])
    assert hopper.fits(x, [weight[:, :32].t().contiguous().t()[:8]], [None], [True]) is False
    assert hopper.fits(x, [weight], [None], [False]) is False
    assert hopper.fits(x, [weight[:7]], [None], [True]) is False
    assert hopper.fits(x, [weight.float()], [None], [True]) is False
    assert hopper.fits(x, [weight] * 5, [None] * 5, [True] * 5) is False
    assert hopper.fits(x, [weight], [vector.float()], [True]) is False
    assert hopper.fits(x[:0], [weight], [None], [True]) is False
    assert hopper.fits(x, [weight[:0]], [None], [True]) is False
    odd = torch.zeros(17, dtype=torch.bfloat16)[1:]
    assert hopper.fits(x, [weight], [odd], [True]) is False


def test_where_rows_lie_decides_nothing() -> None:
    """Another rank's may lie elsewhere, and both must take the same kernel."""
    flat = torch.arange(65, dtype=torch.float32).bfloat16()
    moved = hopper.copy_engine.aligned(flat[1:].view(4, 16))
    assert moved.data_ptr() % 16 == 0 and torch.equal(moved.flatten(), flat[1:])
    kept = flat[:64].view(4, 16)
    assert hopper.copy_engine.aligned(kept) is kept


def test_without_nvrtc_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an error in the middle of a step: ``auto`` then takes another kernel."""
    bindings = pytest.importorskip("cuda.bindings.nvrtc")

    def lost() -> None:
        raise RuntimeError("libnvrtc.so.13 was not found\nanywhere")

    monkeypatch.setattr(bindings, "nvrtcVersion", lost)
    assert "cannot be loaded: libnvrtc.so.13 was not found" in str(nvrtc.missing.__wrapped__())


def test_the_half_is_read_in_front_of_a_barrier_of_the_block() -> None:
    """Afterwards the thread that leaves last may change it, while another warp still pushes."""
    for entry in ("ag_gemm", "gemm_rs"):
        source = (SOURCE / f"{entry}.cu").read_text()
        body = source[source.index(f"{entry}(const __grid_constant__") :]
        body = body[: body.index("\n}")]
        read, leaves = body.index("half_of(c)"), body.index("leave(c, half)")
        barriers = [at for at in range(len(body)) if body.startswith(("arrange(", "__syncthr"), at)]
        assert source.count("half_of(c)") == 1 and any(read < at < leaves for at in barriers)


def test_what_does_not_fit_goes_to_the_copy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name in ("ag_gemm", "gemm_rs"):
        monkeypatch.setattr(
            hopper.copy_engine, name, lambda *args, name=name, **kwargs: asked.append(name)
        )
    x, odd = torch.zeros(4, 6), torch.zeros(3, 6)
    hopper.ag_gemm(x, [odd], [None], [True], SimpleNamespace(), 2)
    hopper.gemm_rs(x, odd, None, True, SimpleNamespace(), 2)
    assert asked == ["ag_gemm", "gemm_rs"]


def test_the_kernels_are_part_of_what_ranks_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with other sources of a protocol would wait for each other."""
    before = code_digest.__wrapped__()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda p: read(p) + b" " * (p.name == "hopper.h"))
    assert code_digest.__wrapped__() != before


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of every launch; nothing is launched."""
    found: list[Any] = []
    kernel = SimpleNamespace(launch=lambda grid, block, packed, stream: found.append(packed))
    properties = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(hopper, "code", lambda *args: kernel)
    monkeypatch.setattr(hopper._private, "raw_stream_getter", lambda: lambda device: 0)
    monkeypatch.setattr(
        hopper.hopper_code, "tensor_map",
        lambda address, *about: address.to_bytes(8, "little") + bytes(120),
    )  # fmt: skip
    return found


def lie_at(packed: Any) -> tuple[int, ...]:
    """Where a launch reads x and the weight, and the bias, and where it stores."""
    made = packed.fields[0]
    first = [int.from_bytes(bytes(field)[:8], "little") for field in (made.x, made.weight[0])]
    return *first, made.bias[0], made.out[0]


def test_what_was_made_for_other_operands_is_not_found(launched: list[Any]) -> None:
    """Also where a tensor lies that another lay at before; a weight is updated in place."""
    peers = hopper.loop_back(torch.device("cpu"), 2, 8, 64)
    place = torch.zeros(8192, dtype=torch.bfloat16)
    x, weight, bias = place[:512].view(8, 64), place[:1024].view(16, 64), place[:16]
    others = [
        (x[:4], weight, None), (x, place[:2048].view(32, 64), None),
        (x, place[:2048].view(16, 128)[:, :64], None), (x, weight, bias), (x, weight, bias[8:]),
        (x.half(), place.view(torch.float16)[:1024].view(16, 64), None), (x, weight.clone(), None),
    ]  # fmt: skip
    for many, (rows, matrix, vector) in enumerate([(x, weight, None), *others], 1):
        for x_now in (rows, rows.clone()):
            out = hopper.product_reduce(x_now, matrix, vector, peers)
            (both,) = hopper.gather_products(x_now, [matrix], [vector], peers)
            for packed, result in zip(launched[-2:], (out, both), strict=True):
                operands = (x_now, matrix, vector, result)
                assert lie_at(packed) == tuple(0 if t is None else t.data_ptr() for t in operands)
            matrix += 1
        assert out.shape == (len(rows) // 2, len(matrix)) and out.dtype == rows.dtype
        assert both.shape == (len(rows) * 2, len(matrix))
        assert len(peers.launches) == 2 * many == len(set(launched))


def test_a_call_that_could_not_be_prepared_leaves_nothing(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next one would find arguments without weights, and launch them."""
    peers = hopper.loop_back(torch.device("cpu"), 2, 4, 64)

    def refuse(*args: Any) -> bytes:
        raise nvrtc.SPError("a tensor map was refused")

    x, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(16, 64, dtype=torch.bfloat16)
    for maps, launches in ((refuse, 0), (refuse, 0), (lambda *args: bytes(128), 1)):
        monkeypatch.setattr(hopper.hopper_code, "tensor_map", maps)
        for call in (
            lambda: hopper.gather_products(x, [weight], [None], peers),
            lambda: hopper.product_reduce(x, weight, None, peers),
        ):
            with nullcontext() if launches else pytest.raises(nvrtc.SPError, match="refused"):
                call()
    assert len(launched) == 2 and len(peers.launches) == 2
