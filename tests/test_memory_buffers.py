# SPDX-License-Identifier: Apache-2.0
"""The bytes of shared buffers that a report states are those that the kernels allocate."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import sp_passes
from sp_passes import SPConfig
from sp_passes.graph.collectives import op_name
from sp_passes.layout import ShardLayout
from sp_passes.ops import (
    hopper,
    kernels,
    mlp,
    one_launch,
    one_shot,
    shared,
    symmetric,
    tuned,
)
from sp_passes.ops.kernels import Call
from sp_passes.policy import buffers
from sp_passes.policy.buffers import Setting

TP, MOST = 2, 64
CPU = torch.device("cpu")
GROUP: Any = SimpleNamespace(group_name="sizes", size=lambda: TP, rank=lambda: 0)


class Model(nn.Module):
    """All five ops; rows of 64 features and then of 96, for which the buffers must grow."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"a": (64, 128), "b": (128, 64), "wide": (64, 96), "c": (96, 128), "d": (128, 96)}
        for name, (k, n) in sizes.items():
            setattr(self, name, nn.Linear(k, n, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(torch.relu(self.a(x)))
        y = torch.ops.sp_passes.all_gather(x, "", TP)
        z = torch.ops.sp_passes.reduce_scatter(self.wide(y), "", TP)
        out: Tensor = z + self.d(torch.relu(self.c(z)))
        return out


@pytest.fixture(scope="module")
def graph() -> fx.Graph:
    gm = sp_passes.trace(Model().bfloat16(), torch.zeros(4, 64, dtype=torch.bfloat16))
    sp_passes.rewrite(gm, SPConfig(tp_size=TP))
    return gm.graph


def like(node: Any) -> Tensor:
    val = node.meta["val"]
    return torch.zeros(val.shape, dtype=val.dtype)


def shard(weight: fx.Node, layout: str) -> Tensor:
    return ShardLayout.parse(layout).take(like(weight), 0, TP).contiguous()


def run(node: fx.Node, kernel: str) -> None:
    """The node's op by that kernel, up to where it has its buffer."""
    op, given = op_name(node).partition("::")[2], node.args
    take: Callable[..., Any] = kernels._TABLE[op, kernel].run
    x: Any = like(given[0])
    if op in ("all_gather", "reduce_scatter"):
        call: tuple[Any, ...] = ()
    elif op == "ag_gemm":
        call = ([shard(given[1][0], given[3][0])], [None], [True])
    else:
        call = (shard(given[1], given[3]), None, True)
        call += (ShardLayout.parse(given[3]).segments,) if op == "gemm_gather" else ()
    with suppress(AttributeError):
        take(x, *call, GROUP, TP)


@pytest.mark.parametrize("kernel", ["copy_engine", "hopper", "hopper_copy"])
def test_the_buffers_of_a_graph(
    graph: fx.Graph, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, int]] = []

    def for_good(pg: Any, device: torch.device, make: Any, what: str) -> Any:
        made.append((make.func, make.args[2]))
        return SimpleNamespace(nbytes=shared.rounded(make.args[2]))

    monkeypatch.setattr(symmetric.shared, "for_good", for_good)
    for name in ("_workspaces", "_unusable", "_most_tokens"):
        monkeypatch.setattr(symmetric, name, {})
    monkeypatch.setattr(symmetric, "_kept", [])
    symmetric.expect("sizes", MOST - 1, TP)
    for node in graph.nodes:
        if (op_name(node).partition("::")[2], kernel) in kernels._TABLE:
            run(node, kernel)
    assert sum(op_name(node) == "sp_passes::ag_gemm" for node in graph.nodes) == 2
    sizes = {
        symmetric.SymmetricPeers: lambda n: symmetric.buffer_bytes(TP, n),
        hopper.for_group: lambda n: buffers._allocated(buffers.HOPPER, TP, n),
    }
    found = buffers.shared_bytes(graph, Setting(TP, MOST - 1, kernel))
    assert len(made) == 2, "one for 64 features, one for 96"
    assert [nbytes for _, nbytes in made] == [MOST * 64 * 2, 2 * MOST * 64 * 2]
    assert found == {buffers.KINDS[kernel]: sum(sizes[make](n) for make, n in made)}


def asked_of(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> int:
    """Bytes of symmetric memory that ``make()`` asks for."""
    asked: list[int] = []

    def allocate(pg: Any, device: torch.device, nbytes: int) -> Any:
        asked.append(nbytes)
        raise KeyError

    for module in (symmetric.shared, one_shot):
        monkeypatch.setattr(module, "allocate", allocate)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    one = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: one)
    with pytest.raises(KeyError):
        make()
    (nbytes,) = asked
    return nbytes


def test_what_each_kind_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = 123_457
    copies = asked_of(monkeypatch, lambda: symmetric.SymmetricPeers(GROUP, CPU, nbytes))
    assert copies == buffers._allocated(buffers.COPIES, TP, nbytes)
    halves = asked_of(monkeypatch, lambda: hopper.for_group(GROUP, CPU, nbytes))
    assert halves == buffers._allocated(buffers.HOPPER, TP, nbytes) > 2 * nbytes
    launch = asked_of(monkeypatch, lambda: one_launch._make(GROUP, CPU))
    assert launch == one_launch.buffer_bytes(TP) > 8 << 20
    k, n, inner = 128, 192, 64
    rows = mlp.DECODE_TOKENS // TP
    whole = asked_of(monkeypatch, lambda: one_shot.for_group(GROUP, CPU, rows, k, n, inner))
    space = one_shot.OneShot([0, 0], torch.zeros(1), 0, rows, k, n, inner).space
    assert whole + space.part.nbytes + space.hidden.nbytes == mlp.decode_bytes(TP, k, n, inner)


def test_auto_counts_what_may_win(graph: fx.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    key = ((9, 0), "ag_gemm", 64, 64, TP, "bfloat16")
    monkeypatch.setattr(tuned, "table", lambda: {key: ((16, "unfused"), (32, "hopper"))})
    found = {most: buffers.shared_bytes(graph, Setting(TP, most)) for most in (16, 18, 64)}
    assert found[16] == {}
    assert found[18] == {buffers.HOPPER: buffers._allocated(buffers.HOPPER, TP, 18 * 64 * 2)}
    assert found[64].keys() == {buffers.HOPPER}, "fewer tokens take it"
    assert buffers.shared_bytes(graph, Setting(TP, 64, hardware="gb200")) == {}
    assert buffers.shared_bytes(graph, Setting(TP, 64, "unfused")) == {}
    monkeypatch.setattr(tuned, "table", lambda: {})
    call = Call("gemm_rs", "cuda", torch.bfloat16, 7168, 768, 16384, 8)
    assert tuned.may_win(call, (9, 0), "h200") == {None, "copy_engine"}, "by the cost model"
    assert tuned.may_win(call._replace(tokens=2048), (9, 0), "h200") == {None}
    assert tuned.may_win(call, (9, 0), "") == {None}, "nothing of this machine is asked"


def test_decode_steps_have_buffers() -> None:
    graph = fx.Graph()
    x, w1, w2 = (graph.placeholder(name) for name in ("x", "w1", "w2"))
    for node, shape in ((x, (4, 128)), (w1, (256, 128)), (w2, (128, 128))):
        node.meta["val"] = torch.zeros(shape, dtype=torch.bfloat16)
    given = (x, w1, w2, "S0[128,128]", "S1[128]", "silu", 1.0, None, None, "", TP)
    for _ in range(2):  # layers of one shape share them
        graph.call_function(torch.ops.sp_passes.ag_mlp_rs.default, given)
    found = buffers.shared_bytes(graph, Setting(TP, 64))
    assert found == {buffers.DECODE: mlp.decode_bytes(TP, 128, 128, 64)}
    assert buffers.shared_bytes(graph, Setting(8, 64)) == {}, "not measured, so not run"
