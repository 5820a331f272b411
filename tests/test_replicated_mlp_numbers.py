# SPDX-License-Identifier: Apache-2.0
"""Rewritten graphs against float64, all ranks in this process, different tokens on each."""

from __future__ import annotations

from typing import Any

import mlps
import pytest
import ranks
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import sp_passes
from sp_passes.models.config import KimiK3Config
from sp_passes.models.layers import Made
from sp_passes.models.moe import SituMLP

FP32 = 1e-5


def rewritten(module: nn.Module, tp: int, *args: Any, **kwargs: Any) -> Any:
    gm = sp_passes.trace(module, *args)
    report = sp_passes.rewrite(gm, mlps.config(tp_size=tp), **kwargs)
    return gm, report


@pytest.mark.parametrize("rows", [5, 1, 0])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", mlps.ZOO)
def test_zoo(name: str, tp: int, rows: int, request: pytest.FixtureRequest) -> None:
    if (name, rows) == ("batched", 1):
        reason = "[3, h] -> [1, 3, h] of Shard(0) is read as Shard(1): PlacementError, not a skip"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    spec = mlps.ZOO[name]
    module = mlps.MLP(spec)
    inputs = [mlps.tokens(spec, r, rows) for r in range(tp)]
    gm, report = rewritten(module, tp, inputs[0])
    assert [d.reason for d in report.decisions] == [""], report
    found = ranks.lockstep(gm, tp, [[x] for x in inputs])
    for x, y in zip(inputs, found, strict=True):
        assert mlps.worst_error(y, mlps.exact(module, x)) < FP32
    sp_passes.check(gm, mlps.config(tp_size=tp))


@pytest.mark.parametrize("name", ["merged", "gpt_oss", "residual", "batched_biases", "situ"])
def test_bfloat16_is_no_worse_than_replicated(name: str) -> None:
    """RMS error against float32; 2 % slack, as both errors are sums of random roundings."""
    spec = mlps.with_(mlps.ZOO[name], hidden=64, width=256)
    module = mlps.MLP(spec, dtype=torch.bfloat16)
    inputs = [mlps.tokens(spec, r, 16, torch.bfloat16) for r in range(4)]
    gm, report = rewritten(module, 4, inputs[0])
    assert len(report.applied) == 1, report
    found = torch.cat(ranks.lockstep(gm, 4, [[x] for x in inputs]))
    x = torch.cat(inputs)
    wanted = mlps.exact(module, x, dtype=torch.float32)
    assert found.dtype == torch.bfloat16
    assert mlps.rms_error(found, wanted) <= 1.02 * mlps.rms_error(module(x), wanted)


def test_situ_of_the_reference_model() -> None:
    config = KimiK3Config.tiny() if hasattr(KimiK3Config, "tiny") else None
    if config is None:
        from types import SimpleNamespace

        config = SimpleNamespace(
            activation_situ_beta=4.0, activation_situ_linear_beta=25.0, hidden_size=12
        )
    module = SituMLP(config, 24, Made(torch.float32))  # type: ignore[arg-type]
    made = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        weight.copy_(torch.randn(weight.shape, generator=made))
    inputs = [torch.randn(3, config.hidden_size, generator=made) for _ in range(4)]
    gm, report = rewritten(module, 4, inputs[0])
    assert len(report.applied) == 1
    for x, y in zip(inputs, ranks.lockstep(gm, 4, [[x] for x in inputs]), strict=True):
        assert mlps.worst_error(y, mlps.exact(module, x)) < FP32


def test_no_activation_at_all() -> None:
    """Two linears in a row are feature-local too."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 8)
            self.b = nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    module = Plain()
    inputs = [torch.randn(3, 6) * (r + 1) for r in range(4)]
    gm, report = rewritten(module, 4, inputs[0])
    assert len(report.applied) == 1
    for x, y in zip(inputs, ranks.lockstep(gm, 4, [[x] for x in inputs]), strict=True):
        assert mlps.worst_error(y, mlps.exact(module, x)) < FP32


# --- shapes of graphs that must come out right, rewritten or not --------------------------

H, W = 8, 24


class Any2(nn.Module):
    """``fn(self, x)`` over a few weights."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn
        made = torch.Generator().manual_seed(1)
        sizes = {
            "w1": (W, H), "w1b": (W, H), "w2": (H, W), "square": (H, H), "square2": (H, H),
            "w_half": (W // 2, H), "merged": (2 * W, H), "bias": (H,), "one": (1,), "row": (1, H),
            "narrow": (1, H), "head": (6, 4), "heads": (6, 1), "full_row": (1, W), "wide": (W,),
        }  # fmt: skip
        for name, size in sizes.items():
            value = torch.randn(*size, generator=made) * size[-1] ** -0.5
            setattr(self, name, nn.Parameter(value, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self, x)


def up(s: Any, x: Tensor) -> Tensor:
    return F.linear(x, s.w1)


APPLIED = ""
SHAPES: dict[str, tuple[Any, str]] = {
    "scalar over all tokens": (
        lambda s, x: F.linear(F.silu(up(s, x)) * x.abs().max(), s.w2),
        "scalar input",
    ),
    "vector over all tokens": (
        lambda s, x: F.linear(up(s, x) * x.amax(0).repeat(3), s.w2),
        "feature input",
    ),
    "weight of one row": (lambda s, x: F.linear(up(s, x) * s.full_row, s.w2), APPLIED),
    "weight of one element": (lambda s, x: F.linear(up(s, x) * s.one, s.w2), APPLIED),
    "row mask": (lambda s, x: F.linear(up(s, x).masked_fill(x[:, :1] > 0, 0.0), s.w2), APPLIED),
    "row gate of another linear": (
        lambda s, x: F.linear(up(s, x) * torch.sigmoid(F.linear(x, s.narrow)), s.w2),
        APPLIED,
    ),
    "two inputs": (
        lambda s, x: F.linear(F.silu(up(s, x)) * F.linear(x * 2, s.w1b), s.w2),
        APPLIED,
    ),
    "one weight on two inputs": (
        lambda s, x: F.linear(F.silu(up(s, x)) * up(s, x + 1), s.w2),
        APPLIED,
    ),
    "product with itself": (lambda s, x: F.linear(up(s, x) * up(s, x), s.w2), APPLIED),
    "in-place ops": (lambda s, x: F.linear(F.relu_(up(s, x)).mul_(2), s.w2), APPLIED),
    "tied and transposed": (lambda s, x: F.silu(up(s, x)) @ s.w1, APPLIED),
    "tied square": (
        lambda s, x: F.linear(F.silu(F.linear(x, s.square)), s.square),
        "two layouts",
    ),
    "one bias on both sides": (
        lambda s, x: F.linear(F.silu(F.linear(x, s.square, s.bias)), s.square2, s.bias),
        "weight used elsewhere",
    ),
    "first bias of one element": (
        lambda s, x: F.linear(F.silu(torch.addmm(s.one, x, s.w1.t())), s.w2),
        "bias broadcast",
    ),
    "second bias of one row": (
        lambda s, x: torch.addmm(s.row, F.silu(up(s, x)), s.w2.t()),
        APPLIED,
    ),
    "row of x as bias": (lambda s, x: torch.addmm(x, F.silu(up(s, x)), s.w2.t()), APPLIED),
    "heads": (
        lambda s, x: F.linear((up(s, x).view(-1, 6, 4) * s.head).reshape(-1, W), s.w2),
        "not divisible",
    ),
    "heads transposed": (
        lambda s, x: F.linear(up(s, x).view(-1, 6, 4).transpose(1, 2).reshape(-1, W), s.w2),
        APPLIED,
    ),
    "vector of heads": (
        lambda s, x: F.linear((up(s, x).view(-1, 6, 4) * s.heads).reshape(-1, W), s.w2),
        "not feature-local",
    ),
    "each feature twice": (
        lambda s, x: F.linear(F.linear(x, s.w_half).repeat_interleave(2, -1), s.w2),
        "not feature-local",
    ),
    "zeros between features": (
        lambda s, x: F.linear(
            torch.cat(
                [F.linear(x, s.w_half).unsqueeze(-1), x.new_zeros(x.shape[0], W // 2, 1)], -1
            ).flatten(-2),
            s.w2,
        ),
        "*",
    ),
    "features padded": (
        lambda s, x: F.linear(F.pad(F.linear(x, s.w_half), (0, W // 2)), s.w2),
        "not feature-local",
    ),
    "flipped features": (lambda s, x: F.linear(up(s, x).flip(-1), s.w2), "not feature-local"),
    "glu": (lambda s, x: F.linear(F.glu(F.linear(x, s.merged)), s.w2), "*"),
    "rows rolled inside": (lambda s, x: F.linear(up(s, x).roll(1, 0), s.w2), "not feature-local"),
    "rows rolled before": (lambda s, x: F.linear(up(s, x.roll(1, 0)), s.w2), "tokens unknown"),
    "sum over tokens inside": (
        lambda s, x: F.linear((h := up(s, x)) - h.mean(0, keepdim=True), s.w2),
        "not feature-local",
    ),
    "largest of a row": (
        lambda s, x: F.linear((h := up(s, x)) / h.abs().amax(-1, keepdim=True), s.w2),
        "used elsewhere",
    ),
    "top k of a row": (
        lambda s, x: F.linear(
            torch.where((h := up(s, x)) >= h.topk(3, -1).values[:, -1:], h, 0.0), s.w2
        ),
        "used elsewhere",
    ),
    "half of the features": (
        lambda s, x: F.linear(F.silu(F.linear(x, s.merged)[:, :W]), s.w2),
        "*",
    ),
    "position of the row": (
        lambda s, x: F.linear(up(s, x) * torch.arange(x.shape[0]).float().unsqueeze(-1), s.w2),
        "*",
    ),
}


@pytest.mark.parametrize("rows", [5, 1])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, tp: int, rows: int) -> None:
    """Right whether rewritten or not; skipped for the reason that holds."""
    fn, category = SHAPES[name]
    if (name, tp) == ("heads", 2):
        category = APPLIED
    module = Any2(fn)
    made = torch.Generator().manual_seed(2)
    inputs = [torch.randn(rows, H, generator=made) * (r + 1) for r in range(tp)]
    gm, report = rewritten(module, tp, inputs[0])
    if category != "*":
        assert [d.reason.partition(":")[0] for d in report.decisions] == [category], report
    for x, y in zip(inputs, ranks.lockstep(gm, tp, [[x] for x in inputs]), strict=True):
        wanted = module(x)
        assert torch.allclose(y, wanted, rtol=FP32, atol=FP32 * float(wanted.abs().max())), report


# --- rows that are no tokens --------------------------------------------------------------


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("real", [1, 3])
def test_padded_rows_change_no_real_row(real: int, garbage: float) -> None:
    """``real`` < tp_size tokens, padded to one a rank: whole ranks hold garbage only."""
    tp, spec = 4, mlps.ZOO["gpt_oss"]
    module = mlps.MLP(spec)
    inputs = [mlps.tokens(spec, r, 1) for r in range(tp)]
    for x in inputs[real:]:
        x.fill_(garbage)
    gm, _ = rewritten(module, tp, inputs[0])
    found = ranks.lockstep(gm, tp, [[x] for x in inputs])
    for x, y in zip(inputs[:real], found, strict=False):
        assert mlps.worst_error(y, mlps.exact(module, x)) < FP32


def test_the_same_tokens_give_the_same_bits_on_every_rank() -> None:
    spec, tp = mlps.BASE, 4
    module = mlps.MLP(spec)
    x = mlps.tokens(spec, 0)
    gm, _ = rewritten(module, tp, x)
    found = ranks.lockstep(gm, tp, [[x]] * tp)
    assert all(torch.equal(y, found[0]) for y in found)


# --- arguments that are not tokens --------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlps.MLP(mlps.Spec(form="single"))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        h = F.silu(F.linear(x, self.inner.up_weight)) * scale
        return F.linear(h, self.inner.down_weight)


def test_a_vector_argument_must_be_declared_replicated() -> None:
    module, tp = Scaled(), 4
    inputs = [mlps.tokens(mlps.BASE, r) for r in range(tp)]
    scale = torch.randn(24)
    _, report = rewritten(module, tp, inputs[0], scale)
    assert [d.reason.partition(":")[0] for d in report.decisions] == ["feature input"]
    whole = {"scale": torch.distributed.tensor.Replicate()}
    gm, report = rewritten(module, tp, inputs[0], scale, placements=whole)
    assert len(report.applied) == 1, report
    for x, y in zip(inputs, ranks.lockstep(gm, tp, [[x, scale] for x in inputs]), strict=True):
        assert mlps.worst_error(y, module(x, scale)) < FP32


VIEWS: dict[str, Any] = {
    "pair": lambda z, n: (lambda v: v[:, :, 0] * v[:, :, 1])(z.view(len(z), -1, 2, n)),
    "lanes": lambda z, n: (lambda v: v[..., 0] * v[..., 1])(z.view(len(z), -1, n, 2)),
    "first row size": lambda z, n: (lambda v: v[..., 0, :] * v[..., 1, :])(z.view(-1, 1, 2, n)),
    "two rows": lambda z, n: (lambda v: (v[..., 0, :] * v[..., 1, :]).reshape(len(z), n))(
        z.view(3, -1, 2, n)
    ),
}


def symbolic_rows(x: Tensor) -> Tensor:
    """``x`` as a fake tensor of any number of rows."""
    dims = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (x.ndim - 1)]
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    context = StatelessSymbolicContext(dynamic_sizes=dims, constraint_sizes=[None] * x.ndim)
    return mode.from_tensor(x, symbolic_context=context, source=ConstantSource("x"))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_minus_one_between_the_linears(name: str, dynamic: bool) -> None:
    """A view that leaves a size of rows open: ``view(m, -1, 2, n)``."""
    split = VIEWS[name]

    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 16), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = split(self.a(x), 8)
            return self.b(h.reshape(len(x), 8))

    module = View().requires_grad_(False)
    inputs = [torch.randn(6, 6) * (r + 1) for r in range(4)]
    gm = sp_passes.trace(module, symbolic_rows(inputs[0]) if dynamic else inputs[0])
    report = sp_passes.rewrite(gm, mlps.config(tp_size=4))
    assert len(report.applied) == 1, report
    for x, y in zip(inputs, ranks.lockstep(gm, 4, [[x] for x in inputs]), strict=True):
        assert mlps.worst_error(y, mlps.exact(module, x)) < FP32
