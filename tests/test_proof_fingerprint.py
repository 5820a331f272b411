# SPDX-License-Identifier: Apache-2.0
"""The hash that the ranks compare before a shard replaces a weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_passes import ReplicationError, proof

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8,
    torch.int64, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def of(tensor: torch.Tensor) -> int:
    value = proof.fingerprint(tensor)
    assert value.dtype == torch.int64 and value.shape == ()
    return int(value)


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.rand(shape, generator=made) > 0.5
    return (torch.randn(shape, generator=made) * 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = random(dtype, 3, 5)
    before = of(tensor)
    assert of(tensor.clone()) == before
    raw = tensor.view(-1).view(torch.uint8) if dtype != torch.bool else None
    if raw is None:
        tensor[1, 2] = ~tensor[1, 2]
        assert of(tensor) != before
        return
    for byte in range(raw.numel()):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            assert of(tensor) != before, (byte, bit)
            raw[byte] ^= 1 << bit
    assert of(tensor) == before


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 200),
    changes=st.lists(st.tuples(st.integers(0, 199), st.integers(0, 31)), min_size=1, max_size=4),
)
def test_a_few_flipped_bits_count(size: int, changes: list[tuple[int, int]]) -> None:
    tensor = random(torch.float32, size)
    other = tensor.clone()
    words = other.view(torch.int32)
    for at, bit in changes:
        words[at % size] ^= (1 << bit) if bit < 31 else -(1 << 31)
    assert (of(other) == of(tensor)) == torch.equal(tensor.view(torch.int32), words)


def test_order_counts() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    assert len({of(tensor), of(tensor.flip(0)), of(tensor.flip(1)), of(tensor.roll(1, 0))}) == 4


def test_order_counts_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_CHUNK", 8)
    tensor = torch.randn(40)
    found = {of(tensor)}
    for a in range(0, 40, 8):
        for b in range(a + 8, 40, 8):
            other = tensor.clone()
            other[a : a + 8], other[b : b + 8] = tensor[b : b + 8], tensor[a : a + 8]
            found.add(of(other))
    assert len(found) == 11


def test_shape_dtype_and_zeros_count() -> None:
    tensor = torch.randn(4, 6)
    assert of(tensor) != of(tensor.view(6, 4))
    assert of(tensor) != of(tensor.view(torch.int32))
    assert len({of(torch.zeros(n)) for n in range(5)}) == 5
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))
    assert of(torch.tensor([float("nan")])) == of(torch.tensor([float("nan")]))


def test_strides_do_not_count() -> None:
    tensor = torch.randn(4, 6)
    assert of(tensor.t().contiguous().t()) == of(tensor)
    assert of(torch.randn(8, 6)[::2].copy_(tensor)) == of(tensor)


def test_one_rank_agrees_with_itself(solo: Any) -> None:
    proof.agree("0123456789abcdef", 2, "text", solo)
    proof.prove([torch.randn(3), torch.randn(2, 2)], ["a", "b"], solo)
    proof.prove([], [], solo)


def three_ranks(at: Any) -> list[str]:
    out = []
    for odd in ([1], [0, 2], [0], [0, 1, 2]):
        good, other = torch.ones(4), torch.ones(4)
        if at.rank in odd:
            other = other * (2 + (at.rank if len(odd) == 3 else 0))
        try:
            proof.prove([good, other], ["good", "other"], at.group)
            out.append("same")
        except ReplicationError as err:
            out.append(str(err).partition(" is not")[0])
    return out


@pytest.mark.multirank
def test_the_odd_ranks_are_named(on_ranks: Any) -> None:
    """The majority is right; with no majority the first rank's value is."""
    for found in on_ranks(three_ranks, 3):
        assert found == [
            "weight other (rank 1 differs)",
            "weight other (rank 1 differs)",
            "weight other (rank 0 differs)",
            "weight other (rank 1, 2 differs)",
        ]


def test_large_weights() -> None:
    """Many chunks: the position hash wraps as int64 does."""
    tensor = torch.zeros(5 << 20, dtype=torch.int8)
    found = {of(tensor)}
    for at in (0, 1 << 20, (3 << 20) + 7, tensor.numel() - 1):
        tensor[at] = 1
        found.add(of(tensor))
        tensor[at] = 0
    assert len(found) == 5
