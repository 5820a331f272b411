# SPDX-License-Identifier: Apache-2.0
"""Runs the Triton kernels' logic on CPU tensors; started by test_kernels_triton.py.

Triton decides at import whether it interprets, so this is a process of its own. The
interpreter's matrix products need float16.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from torch import Tensor

from sp_passes.bench.links import LoopBackPeers
from sp_passes.ops import decode, one_shot, triton_gemm
from sp_passes.ops.decode import Activation, Tiling, Workspace

K, INNER, HIDDEN = 512, 128, 192
SITU, CLIPPED = Activation("situ", 4.0), Activation("situ", 4.0, 25.0)


def reference(x: Tensor, w1: Tensor, w2: Tensor, act: Activation) -> Tensor:
    gate, up = (x.double() @ w1.double().T).chunk(2, 1)
    if act.name == "silu":
        return (torch.nn.functional.silu(gate) * up) @ w2.double().T
    if act.linear_beta is not None:
        up = act.linear_beta * torch.tanh(up / act.linear_beta)
    value = act.beta * torch.tanh(gate / act.beta) * torch.sigmoid(gate) * up
    return value @ w2.double().T


def mlp(x: Tensor, act: Activation, tiling: Tiling | None = None) -> tuple[Tensor, Tensor]:
    """The kernel's result in a poisoned output, and the reference."""
    made = torch.Generator().manual_seed(1)
    w1 = (torch.randn(2 * INNER, K, generator=made) * (3 / K**0.5)).half()
    w2 = (torch.randn(HIDDEN, INNER, generator=made) / INNER**0.5).half()
    tiling = tiling or replace(Tiling(), splits=3)
    out = torch.full((x.shape[0], HIDDEN), float("nan"), dtype=x.dtype)
    space = Workspace(x.device, INNER, x.shape[0], tiling.splits)
    return decode.decode_mlp(x, w1, w2, act, space, out, tiling), reference(x, w1, w2, act)


def error(out: Tensor, ref: Tensor) -> float:
    return float((out.double() - ref).norm() / ref.norm())


def rows(m: int) -> Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(m)).half()


def decode_mlp() -> None:
    for act in (Activation(), SITU, CLIPPED):
        for m in (1, 5, 17):
            out, ref = mlp(rows(m), act)
            assert error(out, ref) < 1e-3, (act, m)


def splits_that_do_not_divide() -> None:
    for splits in (1, 5, 8):
        out, ref = mlp(rows(3), CLIPPED, replace(Tiling(), splits=splits))
        assert error(out, ref) < 1e-3, splits


def same_bits_in_any_batch() -> None:
    x = rows(17)
    whole, _ = mlp(x, CLIPPED)
    alone, _ = mlp(x[9:10], CLIPPED)
    assert alone[0].equal(whole[9])


def nan_stays_in_its_row() -> None:
    x = rows(4)
    clean, _ = mlp(x, CLIPPED)
    x[2, 7] = float("nan")
    out, _ = mlp(x, CLIPPED)
    assert not out[2].isfinite().any()
    keep = [0, 1, 3]
    assert out[keep].equal(clean[keep])


def small_gates() -> None:
    """The activation keeps its relative accuracy near 0."""
    x = (rows(2).float() * 3e-2).half()
    out, ref = mlp(x, CLIPPED)
    assert error(out, ref) < 5e-3


def rank_order() -> None:
    parts, bias = torch.randn(5, 3, 70).half(), torch.randn(70).half()
    total = torch.zeros(3, 70)
    for part in parts:
        total += part.float()
    assert decode.add_in_rank_order(parts, None).equal(total.half())
    assert decode.add_in_rank_order(parts, bias).equal((total + bias).half())
    assert decode.add_in_rank_order(parts, bias, dtype=torch.float32).equal(total + bias)


def one_shot_collectives() -> None:
    for size, own in ((2, 3), (3, 2), (4, 1)):
        shot = one_shot.loop_back(torch.device("cpu"), size, own, K, HIDDEN, INNER)
        for _ in range(3):
            x, bias = torch.randn(own, K).half(), torch.randn(HIDDEN).half()
            gathered = shot.gather(x).view(size, own, K)
            assert gathered.equal(x.expand(size, own, K)), size
            parts = torch.randn(size * own, HIDDEN).half()
            total = torch.zeros(own, HIDDEN)
            for part in parts.view(size, own, HIDDEN):
                total += part.float()
            assert shot.add(parts, bias).equal((total + bias).half()), size
        for one in shot.signals():  # the watch looks where the kernels write
            (flags,) = one.boxes
            assert flags.unique().tolist() == [3], size
            flags[-1, size - 1] -= 1
            assert [w.call for w in one.waits([flags.flatten().tolist()], size - 1)] == [3]


def ag_gemm_in_one() -> None:
    """Every way to cut, rows that end inside a tile or not, both orders of a weight, a bias."""
    cuts = (triton_gemm.WIDE, triton_gemm.WIDE_FLAT, triton_gemm.MIDDLE, triton_gemm.NARROW)
    for size, rows, pieces, n, k in ((2, 40, 1, 272, 128), (3, 256, 2, 144, 64)):
        weight, bias = (torch.randn(n, k) / k**0.5).half(), torch.randn(n).half()
        turned = weight.t().contiguous()
        triton_gemm.pieces_of = lambda rows, pieces=pieces: pieces
        for cut in cuts if rows % 128 == 0 else cuts[2:]:
            triton_gemm.tiles_for = lambda *args, cut=cut: cut
            peers = LoopBackPeers(size, (rows, k), torch.float16, "device", True, "cpu")
            for call in range(2):
                x = torch.randn(rows, k).half()
                everyone = torch.cat([x, peers.far[1:].flatten(0, 1)]).double()
                peers.slots.fill_(float("nan"))
                _, (with_bias, plain) = triton_gemm.gather_products(
                    x, [weight, turned], [bias, None], [True, False], peers
                )
                ref = everyone @ weight.double().t()
                assert error(plain, ref) < 1e-3, (size, cut)
                assert error(with_bias, ref + bias.double()) < 1e-3, (size, cut)
                heard = peers.mailbox.flags[1:, :pieces].unique().tolist()
                assert peers.mailbox.numbers[:pieces].unique().tolist() == heard == [call + 1]


CASES = (
    decode_mlp, splits_that_do_not_divide, same_bits_in_any_batch, nan_stays_in_its_row,
    small_gates, rank_order, one_shot_collectives, ag_gemm_in_one,
)  # fmt: skip


def main() -> None:
    """Run the cases; one JSON object of name and failure, empty for a pass."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    for case in CASES:
        try:
            case()
            found[case.__name__] = ""
        except Exception as err:
            found[case.__name__] = f"{type(err).__name__}: {err}"
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
