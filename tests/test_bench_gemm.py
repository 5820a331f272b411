# SPDX-License-Identifier: Apache-2.0
"""The bench of products: what it compares, and what it is asked for; no GPU."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_passes.bench import gemm, hopper

SHAPE = gemm.Shape("ag", 8, 16, 4)


def maker(gain: float) -> Any:
    def make(shape: gemm.Shape, size: int, x: Tensor, weight: Tensor) -> gemm.Product:
        return gemm.Product(lambda: x @ weight.t() * gain, {"bad": lambda: x @ weight.t() * 2})

    return ("ag",), make


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(gemm, "replay_us", lambda calls, rounds: 2.0)
    monkeypatch.setattr(gemm, "MAKERS", {"right": maker(1.0), "wrong": maker(1.1)})


@pytest.mark.usefixtures("on_cpu")
def test_a_wrong_product_is_found() -> None:
    (row,) = gemm.rows_of(SHAPE, 2, ["right"], True)
    assert (row["us"], row["ratio"]) == (2.0, 1.0)
    assert row["cuts_us"]["bad"].startswith("AssertionError")
    with pytest.raises(AssertionError, match="error"):
        list(gemm.rows_of(SHAPE, 2, ["wrong"], False))
    assert not list(gemm.rows_of(SHAPE._replace(op="rs"), 2, ["right"], False))


def test_rows_by_name() -> None:
    found = gemm.shapes_of("ag:8x16x4,rs:64x8x2")
    assert found == [SHAPE, gemm.Shape("rs", 64, 8, 2)]
    for wrong in ("ag:8x16", "up:8x16x4", "ag:8x16xmany"):
        with pytest.raises(argparse.ArgumentTypeError, match="op:NxKxTOKENS"):
            gemm.shapes_of(wrong)
