# SPDX-License-Identifier: Apache-2.0
"""``trace``: the graph a module runs, with names, and without memory."""

from __future__ import annotations

from typing import Any

import mlps
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor.placement_types import Shard

import sp_passes
from sp_passes import SPError, declare_placement


def targets(gm: Any, op: str) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == op]


@pytest.mark.parametrize("name", mlps.ZOO)
def test_runs_like_the_module(name: str) -> None:
    spec = mlps.ZOO[name]
    module = mlps.MLP(spec)
    x = mlps.tokens(spec, 0)
    gm = sp_passes.trace(module, x)
    torch.testing.assert_close(gm(x), module(x))


def test_names_are_those_of_the_module_and_storage_is_shared() -> None:
    model = nn.Sequential(mlps.MLP(mlps.BASE), mlps.MLP(mlps.BASE, 1))
    gm = sp_passes.trace(model, torch.randn(3, 10))
    assert targets(gm, "get_attr") == [
        "0.gate_up_weight", "0.down_weight", "1.gate_up_weight", "1.down_weight",
    ]  # fmt: skip
    assert gm.get_parameter("1.down_weight") is model[1].down_weight
    assert all("val" in n.meta for n in gm.graph.nodes if n.op != "output")
    assert all(
        isinstance(n.meta["val"], FakeTensor)
        for n in gm.graph.nodes
        if isinstance(n.meta.get("val"), Tensor)
    )


def test_arguments_by_name() -> None:
    class Many(nn.Module):
        def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], *, scale: Tensor, n: int) -> Any:
            return x * pair[0] + pair[1] * scale * n

    one = torch.ones(2, 2)
    gm = sp_passes.trace(Many(), one, (one, one * 2), scale=one * 3, n=4)
    assert targets(gm, "placeholder") == ["x", "pair_0", "pair_1", "scale"]
    assert torch.equal(gm(one, one, one * 2, one * 3), one * 25)


def test_a_wide_model_traces_on_the_meta_device() -> None:
    """A terabyte of weights, none allocated."""
    with torch.device("meta"):
        wide = nn.Linear(1 << 20, 1 << 18, bias=False)
    gm = sp_passes.trace(nn.Sequential(wide), torch.empty(4, 1 << 20, device="meta"))
    assert list(gm.graph.output_node().args[0].meta["val"].shape) == [4, 1 << 18]


def test_fake_inputs() -> None:
    module = mlps.MLP(mlps.BASE)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(3, 10))
    gm = sp_passes.trace(module, x)
    assert sp_passes.rewrite(gm, mlps.config(tp_size=4)).applied


def test_training_leaves_no_mark_on_the_module() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    before = {k: (v.data_ptr(), v.requires_grad) for k, v in module.named_parameters()}
    sp_passes.trace(module, torch.randn(2, 4))
    after = {k: (v.data_ptr(), v.requires_grad) for k, v in module.named_parameters()}
    assert before == after and module.training


def test_in_place_ops_become_functional() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            y.add_(1).mul_(2)
            return y

    gm = sp_passes.trace(InPlace(), torch.zeros(2))
    assert not [t for t in targets(gm, "call_function") if "_." in t.replace("aten._", "")]
    assert gm(torch.zeros(2)).tolist() == [2, 2]


def test_tied_weights_are_one_node() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x)))

    gm = sp_passes.trace(Tied(), torch.randn(2, 4))
    assert targets(gm, "get_attr") == ["a.weight"]


def test_declared_placements_reach_the_graph() -> None:
    module = mlps.MLP(mlps.BASE)
    declare_placement(module.down_weight, Shard(1))
    gm = sp_passes.trace(module, torch.randn(3, 10))
    (reason,) = [d.reason for d in sp_passes.rewrite(gm, mlps.config(tp_size=2)).decisions]
    assert reason.startswith("already sharded: down_weight is ")


def test_tracing_errors_say_which_module_and_why() -> None:
    class Depends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(SPError, match="tracing Depends failed"):
        sp_passes.trace(Depends(), torch.randn(2))
    with pytest.raises(SPError, match=r"needs an nn\.Module, found function"):
        sp_passes.trace(lambda x: x, torch.randn(2))  # type: ignore[arg-type]
    with pytest.raises(SPError, match="tracing MLP failed"):
        sp_passes.trace(mlps.MLP(mlps.BASE), torch.randn(3, 11))
