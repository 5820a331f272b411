# SPDX-License-Identifier: Apache-2.0
"""What of ops/decode_hopper.py and its CUDA source can be tested without a GPU."""

from __future__ import annotations

import ctypes
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sp_passes.ops import decode, decode_hopper, nvrtc
from sp_passes.ops.decode import Activation
from sp_passes.ops.decode_hopper import Part, parts_for

SOURCE = Path(decode_hopper.__file__).parent / "cuda"
K3 = (7168, 768, 7168)
TOKENS = tuple(decode_hopper.CUTS)
WRAPPERS = """
#include "decode_places.h"
extern "C" int owner(int warp) { return owner_of(warp); }
extern "C" int own(int warp) { return own_of(warp); }
extern "C" int part(int own, int split, int eight, int lane) {
    return part_at(own, split, eight, lane);
}
extern "C" int feature(int tile, int rank, int own, int lane) {
    return feature_of(tile, rank, own, lane);
}
extern "C" int token(int eight, int lane) { return token_of(eight, lane); }
extern "C" int first(int tile, int rank) { return first_of(tile, rank); }
extern "C" int turned(int own, int eight, int lane) { return turned_at(own, eight, lane); }
extern "C" int unit(int row, int unit) { return unit_at(row, unit); }
extern "C" int token_of(int row) { return token_of_row(row); }
extern "C" int step_of(int row) { return step_of_row(row); }
extern "C" int shared() { return SHARED_BYTES; }
extern "C" int out_at() { return OUT_AT; }
extern "C" int out_row() { return OUT_ROW; }
"""


def places(part: Part, folder: Path) -> Any:
    """The index functions of one launch, compiled for the CPU."""
    (folder / "wrap.cpp").write_text(WRAPPERS)
    macros = [f"-D{name}={value}" for name, value in part.macros(False)]
    command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{SOURCE}", *macros, "wrap.cpp", "-o"]
    subprocess.run([*command, "wrap.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "wrap.so"))


def both(tok: int, sizes: tuple[int, int, int] = K3) -> tuple[Part, Part]:
    found = parts_for(*sizes, tok)
    assert found is not None
    return found


def test_both_launches_fit_a_multiprocessor() -> None:
    for tok in TOKENS:
        first, second = both(tok)
        assert first.shared + second.shared <= decode_hopper.SHARED
        assert max(first.blocks, second.blocks) <= decode_hopper.PROGRAMS
        assert min(first.w_stages, first.x_stages, second.w_stages, second.x_stages) >= 2
        assert first.trigger <= 7168 // 64 // first.splits, (
            "the second launch would not begin early"
        )
        assert not second.trigger


def test_same_sums_to_16_tokens_and_to_64() -> None:
    """A token's bits change with the tiles and splits, so not within these."""
    for few in ((8, 16), (32, 64)):
        assert len({tuple((p.tile, p.splits) for p in both(tok)) for tok in few}) == 1


def test_every_padding_has_a_cut() -> None:
    most = max(decode_hopper.MEASURED.values())
    assert {decode_hopper.token_block(m) for m in range(1, most + 1)} <= set(TOKENS)


@pytest.mark.parametrize("sizes", [(7168, 100, 7168), (7168, 768, 7100), (7000, 768, 7168)])
def test_no_tiles_for_other_shapes(sizes: tuple[int, int, int]) -> None:
    assert parts_for(*sizes, 16) is None


def test_no_tiles_for_more_blocks_than_run_at_once() -> None:
    assert parts_for(7168, 3072, 7168, 16) is None


# Small shapes of the same cut: all rows of the weight, tokens of two eights, both ways of partials.
@pytest.mark.parametrize("late", [0, 1])
def test_hidden_state_has_every_feature_once(late: int, tmp_path: Path) -> None:
    part = Part(1, 512, 512, 128, 8, 16, 2, 2, 0, late, 0)
    at, parts = partials(part, tmp_path)
    written: Counter[tuple[int, int]] = Counter()
    for (tile, rank, own, eight, lane), (gate, _, up, _) in parts.items():
        group = tile * 8 + gate[0] // 16  # eight gate rows and their up rows
        feature = at.feature(tile, rank, own, lane)
        assert feature == 8 * group + gate[0] % 16 and up[0] == gate[0] + 8
        assert at.token(eight, lane) == gate[1]
        written.update((feature, gate[1] + e) for e in (0, 1))
    assert len(written) == 256 * 16 and set(written.values()) == {1}


def test_result_has_every_feature_once(tmp_path: Path) -> None:
    part = Part(0, 128, 256, 128, 2, 16, 2, 2, 0, 1, 0)
    at, parts = partials(part, tmp_path)
    unit = {}
    for (tile, rank, own, eight, lane), values in parts.items():
        row = values[0][0] - lane // 4
        assert at.first(tile, rank) + own * 16 == tile * 128 + row
        if lane < 16:  # the token whose eight features of the group stmatrix puts there
            place = at.turned(own, eight, lane)
            assert place % 16 == 0 and place + 16 <= at.shared()
            token, byte = divmod(place - at.out_at(), at.out_row())
            assert token == 8 * eight + lane % 8 and byte == own * 32 + lane // 8 * 16
            unit[tile, rank, token, byte] = 1
    assert len(unit) == 2 * 2 * 16 * 8


def test_direct_rows_are_where_the_tensor_cores_read(tmp_path: Path) -> None:
    """Rows of 128 bytes whose units of 16 are swizzled by the row, a step after the other."""
    part = Part(0, 256, 128, 128, 2, 16, 2, 2, 0, 1, 1)
    at = places(part, tmp_path)
    found = {at.unit(row, unit): (row, unit) for row in range(32) for unit in range(8)}
    assert len(found) == 256
    for place, (row, unit) in found.items():
        step, byte = divmod(place - decode_hopper.BARRIERS, 16 * 128)
        token, column = divmod(byte, 128)
        assert (step, token) == (at.step_of(row), at.token_of(row))
        assert column // 16 ^ token % 8 == unit


def partials(part: Part, folder: Path) -> tuple[Any, dict[Any, Any]]:
    """What each lane of each adding warp finds: (row of the tile, token) of its four sums."""
    at = places(part, folder)
    assert at.shared() == part.shared
    sent: dict[tuple[int, int, int], Any] = {}
    warps, eights = part.tile // 16, part.tok // 8
    many = part.rows // part.tile
    for tile in range(many):
        for warp in range(warps):
            for split in range(part.splits):
                for eight in range(eights):
                    for lane in range(32):
                        row, token = 16 * warp + lane // 4, 8 * eight + lane % 4 * 2
                        mine = [
                            (row, token),
                            (row, token + 1),
                            (row + 8, token),
                            (row + 8, token + 1),
                        ]
                        key = tile, at.owner(warp), at.part(at.own(warp), split, eight, lane)
                        assert key not in sent and key[2] % 16 == 0 and key[2] + 16 <= part.shared
                        sent[key] = split, mine
    found = {}
    for tile in range(many):
        for rank in range(part.splits):
            for own in range(warps // part.splits):
                for eight in range(eights):
                    for lane in range(32):
                        read = [
                            sent.pop((tile, rank, at.part(own, split, eight, lane)))
                            for split in range(part.splits)
                        ]
                        assert [split for split, _ in read] == list(range(part.splits))
                        assert all(mine == read[0][1] for _, mine in read)
                        found[tile, rank, own, eight, lane] = read[0][1]
    assert not sent
    return at, found


@pytest.mark.parametrize(("tok", "fp16"), [(16, False), (32, False), (64, True)])
def test_compiles(tok: int, fp16: bool) -> None:
    if nvrtc.missing():
        pytest.skip(str(nvrtc.missing()))
    for part in both(tok):
        prelude = decode_hopper.instruction(tok, fp16)
        cubin = nvrtc.compile_source("decode", part.macros(fp16), "sm_90a", prelude)
        assert b"decode" in cubin


def test_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch gets its own weight, what it reads and where its result goes."""
    seen: list[Any] = []

    def fake_map(address: int, sizes: Any, steps: Any, box: Any, fp16: bool) -> bytes:
        return repr((address, sizes, steps, box)).encode().ljust(128, b" ")

    def fake_launch(kernel: Any, grid: int, block: int) -> Any:
        def launch(packed: nvrtc.Arguments, stream: int) -> None:
            fields = packed.fields
            maps = [eval(bytes(field)) for field in fields[:2]]
            seen.append((grid, block, maps, [field.value for field in fields[2:]], stream))

        return launch

    monkeypatch.setattr(decode_hopper, "tensor_map", fake_map)
    monkeypatch.setattr(decode_hopper, "_own", decode_hopper._Own())
    monkeypatch.setattr(nvrtc, "kernel", lambda *args: SimpleNamespace(shared=args[3]))
    monkeypatch.setattr(nvrtc, "EarlyLaunch", fake_launch)
    monkeypatch.setattr(decode_hopper._private, "raw_stream_getter", lambda: lambda device: 7)
    k, inner, n = K3
    x, w1 = torch.zeros(9, k).half(), torch.zeros(2 * inner, k).half()
    w2, hidden, out = (
        torch.zeros(n, inner).half(),
        torch.zeros(16 * inner).half(),
        torch.zeros(9, n),
    )
    decode_hopper.run(x, w1, w2, Activation("situ", 4.0, 25.0), hidden, out)
    (grid1, block1, maps1, rest1, stream), (grid2, block2, maps2, rest2, _) = seen
    act = [9, 1, 1, 4.0, 25.0]
    first, second = both(16)
    assert (grid1, block1, stream) == (first.blocks, first.threads, 7)
    assert (grid2, block2) == (second.blocks, second.threads)
    assert maps1[0] == (w1.data_ptr(), (k, 8, 2, 96), (k, inner * k, 8 * k), (64, 8, 2, 4))
    assert maps1[1] == (x.data_ptr(), (k, 9), (k,), (64, 16))
    assert rest1 == [x.data_ptr(), hidden.data_ptr(), *act]
    assert maps2[0] == (w2.data_ptr(), (inner, n), (inner,), (64, 128))
    assert maps2[1] == (hidden.data_ptr(), (inner, 16), (inner,), (64, 16))
    assert rest2 == [hidden.data_ptr(), out.data_ptr(), *act]


def test_which_launches_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton ones beyond what was measured, for other shapes, and where one is asked for."""
    monkeypatch.setattr(decode_hopper, "_device_why_not", lambda device: None)
    most = decode_hopper.MEASURED[K3]

    def reason(
        tokens: int, inner: int = 768, at: int = 32, dtype: torch.dtype = torch.float16
    ) -> str | None:
        def tensor(*shape: int) -> Any:
            return SimpleNamespace(
                shape=shape, is_cuda=True, dtype=dtype, device=SimpleNamespace(index=0),
                data_ptr=lambda: at, is_contiguous=lambda: True,
            )  # fmt: skip

        return decode_hopper.why_not(
            tensor(tokens, 7168), tensor(2 * inner, 7168), tensor(7168, inner)
        )

    assert reason(1) is None and reason(most) is None
    assert f"{most + 1} tokens; for such weights it is faster to {most}" == reason(most + 1)
    assert "faster to 0" in str(reason(1, inner=1536))
    assert "a multiple of 16" in str(reason(1, at=8))
    assert "the dtypes are torch.float32" in str(reason(1, dtype=torch.float32))
    assert "on cpu" in str(decode_hopper.why_not(*[torch.zeros(2, 2)] * 3))
    assert most <= decode.MAX_TOKENS
