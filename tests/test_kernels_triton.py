# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels' logic, interpreted on CPU tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sp_passes import SPError
from sp_passes.ops import decode, one_shot, triton_gemm
from sp_passes.ops.decode import Activation, Tiling
from sp_passes.ops.hopper_code import SPIN_SECONDS

SCRIPT = Path(__file__).parent / "kernels_interpreted.py"
CASES = (
    "decode_mlp", "splits_that_do_not_divide", "same_bits_in_any_batch", "nan_stays_in_its_row",
    "small_gates", "rank_order", "one_shot_collectives", "ag_gemm_in_one",
)  # fmt: skip


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_interpreted(interpreted: dict[str, str], case: str) -> None:
    assert interpreted[case] == ""


def test_every_case_is_run(interpreted: dict[str, str]) -> None:
    assert set(interpreted) == set(CASES)


def test_a_wait_has_the_limit_of_the_other_kernels() -> None:
    """In the code that a GPU runs; interpreted there is none."""
    if decode.triton_missing():
        pytest.skip("Triton is not installed")
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sp_passes.ops import one_shot_kernels, triton_waits

    numbers = dict.fromkeys(("n", "stride", "half", "RANK"), "i32")
    kinds = {"x": "*i64", "out": "*i64", "table": "*i64", "calls": "*i32", **numbers}
    given = {"COPY": False, "SIZE": 2, "LANES": 2, "BLOCK": 256, "ASM": True}
    code = one_shot_kernels.push_rows
    places = {(code.arg_names.index(name),): value for name, value in given.items()}
    source = ASTSource(code, {**kinds, **dict.fromkeys(given, "constexpr")}, places)
    ptx = compiled(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    limit = f"{SPIN_SECONDS * 10**9};"
    assert ptx.count("trap;") == 1 and limit in ptx
    both = (triton_waits._UNTIL.value, triton_waits._END_IF_LATE.value)
    assert all("@late trap;" in text and limit in text for text in both)


def test_unknown_activation() -> None:
    with pytest.raises(SPError, match="activation 'gelu' is unknown; there are silu and situ"):
        Activation("gelu")


@pytest.mark.parametrize(
    ("tokens", "sizes", "dtype", "reason"),
    [
        (257, (7168, 768, 7168), torch.bfloat16, "257 tokens; it is for at most 256"),
        (8, (7168, 768, 7168), torch.float32, "torch.float32"),
        (8, (7168, 100, 7168), torch.bfloat16, "not multiples of 64"),
    ],
)
def test_decode_why_not(
    tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype, reason: str
) -> None:
    if decode.triton_missing():
        pytest.skip("Triton is not installed")
    assert reason in str(decode.why_not(tokens, *sizes, dtype))


def test_decode_supports_k3() -> None:
    if decode.triton_missing() is None:
        assert decode.why_not(64, 7168, 768, 7168, torch.bfloat16) is None


def test_tiling_depends_on_shapes_alone_and_fits() -> None:
    tiling = decode.tiling_for(7168, 768, 7168, decode.PROGRAMS)
    assert tiling == Tiling(splits=5)
    for tok in (16, 32, 64, 128, 256):
        t = tiling.fitted(tok, 2)
        assert t.stages * (2 * t.pairs + tok) * t.bk * 2 <= decode.STAGE_BYTES
        assert t.splits == tiling.splits and t.bk == tiling.bk


def test_more_rows_than_the_one_shot_buffers_hold() -> None:
    shot = one_shot.loop_back(torch.device("cpu"), 2, 1, 64, 64, 64)
    with pytest.raises(SPError, match="3 rows of 64 do not fit buffers for 1 rows of 64"):
        shot.gather(torch.zeros(3, 64))


def test_tiles_fill_the_waves() -> None:
    """192 columns where they divide the work evenly; wide tiles only where none is cut off."""
    assert triton_gemm.tiles_for(8, 6288, 7168, 132, True) == triton_gemm.MIDDLE
    assert triton_gemm.tiles_for(8, 1536, 7168, 132, True) == triton_gemm.NARROW
    assert triton_gemm.tiles_for(256, 6288, 7168, 132, True) == triton_gemm.WIDE
    assert triton_gemm.tiles_for(256, 6288, 7168, 132, False) != triton_gemm.WIDE


def test_pieces_are_whole_tiles() -> None:
    for rows in (1, 128, 1000, 1024, 2048, 4096, 4100):
        pieces = triton_gemm.pieces_of(rows)
        assert pieces == 1 or rows % (pieces * triton_gemm.BM) == 0
    assert [triton_gemm.pieces_of(rows) for rows in (512, 1024, 2048, 4100)] == [1, 2, 4, 1]


def test_rows_that_descriptors_cannot_describe() -> None:
    x, weight = torch.zeros(4, 64), torch.zeros(32, 64)
    assert triton_gemm.fits(x, weight)
    assert not triton_gemm.fits(x, weight.t())
    assert not triton_gemm.fits(x, torch.zeros(32, 66))
    assert not triton_gemm.fits(x, weight.half())
