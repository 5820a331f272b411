# SPDX-License-Identifier: Apache-2.0
"""``sp_passes::ag_mlp_rs`` where it runs as separate ops, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from ranks import Rank
from torch import Tensor

from sp_passes import ShardingError, SPError
from sp_passes.ops import decode, mlp
from sp_passes.ops.decode import Activation

ours = torch.ops.sp_passes
K, INNER, N = 16, 8, 12
ACTS = (("silu", 1.0, None), ("situ", 4.0, None), ("situ", 4.0, 25.0))


def weights() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    w1 = torch.randn(2 * INNER, K, generator=made)
    return w1, torch.randn(N, INNER, generator=made)


def reference(x: Tensor, act: tuple[str, float, float | None]) -> Tensor:
    w1, w2 = weights()
    gate, up = (x @ w1.t()).chunk(2, 1)
    name, beta, linear = act
    if name == "silu":
        return (torch.nn.functional.silu(gate) * up) @ w2.t()
    up = up if linear is None else linear * torch.tanh(up / linear)
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up) @ w2.t()


def call(x: Tensor, act: tuple[str, float, float | None], group: str, size: int) -> Tensor:
    w1, w2 = weights()
    cut = (f"S0[{INNER},{INNER}]", f"S1[{INNER}]")
    return ours.ag_mlp_rs(x, w1, w2, *cut, *act, None, group, size)


def on_a_rank(rank: Rank, rows: int) -> list[Tensor]:
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rank.rank))
    return [x, *(call(x, act, rank.group.group_name, rank.world) for act in ACTS)]


@pytest.mark.multirank
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_own_rows_of_each_rank(rows: int) -> None:
    for x, *outs in ranks.run(on_a_rank, 2, rows):
        for act, out in zip(ACTS, outs, strict=True):
            assert torch.allclose(out, reference(x, act), atol=1e-4), act


@pytest.mark.parametrize("act", ACTS)
def test_activation_rounds_once(act: tuple[str, float, float | None]) -> None:
    gate_up = torch.randn(5, 2 * INNER)
    wide = mlp.activate(gate_up.double(), Activation(*act))
    assert mlp.activate(gate_up.bfloat16(), Activation(*act)).dtype == torch.bfloat16
    assert torch.allclose(mlp.activate(gate_up, Activation(*act)).double(), wide, atol=1e-6)


def test_opcheck(solo: Any) -> None:
    w1, w2 = weights()
    args = (torch.randn(3, K), w1, w2, f"S0[{INNER},{INNER}]", f"S1[{INNER}]")
    tail = ("situ", 4.0, 25.0, None, solo.group_name, 1)
    torch.library.opcheck(
        ours.ag_mlp_rs.default, (*args, *tail), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ((f"S0[{2 * INNER}]", f"S1[{INNER}]"), "two equal segments of rows"),
        ((f"S0[{INNER},{INNER}]", f"S0[{N}]"), f"cut by its {INNER} columns"),
    ],
)
def test_refuses_other_layouts(solo: Any, cuts: tuple[str, str], message: str) -> None:
    w1, w2 = weights()
    with pytest.raises(ShardingError, match=message):
        ours.ag_mlp_rs(
            torch.randn(3, K), w1, w2, *cuts, "silu", 1.0, None, None, solo.group_name, 1
        )


def test_refuses_an_unknown_activation(solo: Any) -> None:
    with pytest.raises(SPError, match="activation 'gelu' is unknown"):
        call(torch.randn(3, K), ("gelu", 1.0, None), solo.group_name, 1)


def test_one_shot_takes_whole_rows_only() -> None:
    """Its kernels read weights by their address: a part in place would give other numbers."""
    x: Any = SimpleNamespace(is_cuda=True, shape=(2, 64), dtype=torch.bfloat16)
    w1, w2 = torch.zeros(256, 64).bfloat16(), torch.zeros(64, 256).bfloat16()
    assert mlp._why_not(x, w1, w2[:, :128].contiguous(), 2) == decode.triton_missing()
    assert "strides (64, 1) and (256, 1)" in str(mlp._why_not(x, w1, w2[:, :128], 2))


def test_one_shot_says_why_not(solo: Any) -> None:
    w1, w2 = weights()
    with pytest.raises(SPError, match="one_shot cannot run here: the tensors are on cpu"):
        ours.ag_mlp_rs(
            torch.randn(3, K), w1, w2, f"S0[{INNER},{INNER}]", f"S1[{INNER}]",
            "silu", 1.0, None, None, solo.group_name, 1, "one_shot",
        )  # fmt: skip
