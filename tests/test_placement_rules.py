# SPDX-License-Identifier: Apache-2.0
"""What each rule gives, one row a case: a function, the states of its inputs, the result."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from sp_passes.errors import SPError
from sp_passes.placement import REPLICATE, State, along, declare_op, propagate, row_wise

TP = 4
M = 6  # local tokens
STATE = re.compile(r"S(\d)(?:\[([\d,]*)\])?")


def state(text: str) -> State:
    """``R``, ``P``, ``S0`` (rows), ``S1[8,8]`` (segments), ``S1[]`` (segments unknown)."""
    if text == "R":
        return REPLICATE
    if text == "P":
        return State(Partial())
    found = STATE.fullmatch(text)
    assert found, text
    segments = None if found[2] is None else tuple(int(s) for s in found[2].split(",") if s)
    return State(Shard(int(found[1])), segments)


def trace(fn: Callable[..., Any], *inputs: Any, mode: str = "fake") -> fx.GraphModule:
    return make_fx(lambda *args: fn(*args), tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)


def place(gm: fx.GraphModule, states: list[str], tp: int = TP) -> dict[fx.Node, Any]:
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return propagate(gm.graph, tp, dict(zip(nodes, map(state, states), strict=True)))


def result(fn: Callable[..., Any], inputs: list[tuple[Any, str]], mode: str = "fake") -> Any:
    """State of what ``fn`` returns; an input is a shape or a tensor, and its state."""
    tensors = [t if isinstance(t, torch.Tensor) else torch.randn(*t) for t, _ in inputs]
    gm = trace(fn, *tensors, mode=mode)
    output = next(n for n in gm.graph.nodes if n.op == "output")
    found = place(gm, [s for _, s in inputs])[output]
    return found if isinstance(output.args[0], (tuple, list)) else found[0]


def show(found: Any) -> str:
    if isinstance(found, tuple):
        return " ".join(map(show, found))
    if found.placement is None:
        return "! " + found.reason
    if isinstance(found.placement, Shard):
        parts = "" if found.segments is None else f"[{','.join(map(str, found.segments))}]"
        return f"S{found.placement.dim}{parts}"
    return "R" if found.is_replicate else "P"


IDS = torch.zeros(M, dtype=torch.int64)
MASK = torch.zeros(M, dtype=torch.bool)
POINTWISE: list[tuple[str, Callable[..., Any], list[tuple[Any, str]], str]] = [
    ("silu", F.silu, [((M, 8), "S0")], "S0"),
    ("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), [((M, 8), "S1[32]")], "S1[32]"),
    ("row vector", torch.mul, [((M, 8), "S0"), ((8,), "R")], "S0"),
    ("column", torch.mul, [((M, 8), "S0"), ((M, 1), "S0")], "S0"),
    ("column from the right", torch.add, [((8,), "R"), ((M, 8), "S0")], "S0"),
    ("both sharded", torch.mul, [((M, 8), "S1[16,16]"), ((M, 8), "S1[16,16]")], "S1[16,16]"),
    ("bias of the features", torch.add, [((M, 8), "S1[32]"), ((8,), "S0[32]")], "S1[32]"),
    ("declared bias", torch.add, [((M, 8), "S1[32]"), ((8,), "S0[]")], "S1[32]"),
    ("segment order", torch.mul, [((M, 8), "S1[8,24]"), ((M, 8), "S1[24,8]")], "! .*segments"),
    ("replicated rows", torch.add, [((M, 8), "S0"), ((M, 8), "R")], "! .*Replicate.*size 6"),
    ("replicated column", torch.mul, [((M, 8), "S0"), ((M, 1), "R")], "! .*size 6"),
    ("full vector", torch.mul, [((M, 8), "S1[32]"), ((8,), "R")], "! .*size 8"),
    ("scalar vector", torch.mul, [((M, 8), "S1[32]"), ((1,), "R")], "S1[32]"),
    ("dims differ", torch.mul, [((M, M), "S0"), ((M, M), "S1[]")], "! .*line up"),
    ("rows meet columns", torch.mul, [((M, M), "S0"), ((M,), "S0")], "! .*line up"),
    ("partial sum", torch.add, [((M, 8), "P"), ((M, 8), "P")], "P"),
    ("partial difference", torch.sub, [((M, 8), "P"), ((M, 8), "P")], "P"),
    ("partial plus whole", torch.add, [((M, 8), "P"), ((M, 8), "R")], "! .*tp_size times"),
    ("partial plus number", lambda x: x + 1, [((M, 8), "P")], "! .*tp_size times"),
    ("partial times number", lambda x: x * 2, [((M, 8), "P")], "P"),
    ("partial over vector", torch.div, [((M, 8), "P"), ((8,), "R")], "P"),
    ("one over partial", torch.div, [((8,), "R"), ((M, 8), "P")], "! .*not linear"),
    ("partial squared", lambda x: x * x, [((M, 8), "P")], "! .*replicated"),
    ("partial gelu", F.gelu, [((M, 8), "P")], "! .*not linear"),
    ("partial compared", lambda x: x > 0, [((M, 8), "P")], "! .*not linear"),
    ("partial negated", torch.neg, [((M, 8), "P")], "P"),
    ("partial cast", lambda x: x.to(torch.bfloat16), [((M, 8), "P")], "P"),
    ("partial rounded", lambda x: x.to(torch.int32), [((M, 8), "P")], "! .*floating"),
    ("masked partial", lambda x, m: x.masked_fill(m[:, None], 0.0), [((M, 8), "P"), (MASK, "R")],
     "P"),
    ("where partial", lambda x, m: torch.where(m[:, None], x, 0.0), [((M, 8), "P"), (MASK, "R")],
     "P"),
    ("where partial one", lambda x, m: torch.where(m[:, None], x, 1.0),
     [((M, 8), "P"), (MASK, "R")], "! .*zeros"),
    ("constant rows", lambda x: x + torch.full((M, 1), 3.0), [((M, 8), "S0")], "S0"),
    ("zeros on partial", lambda x: x + torch.zeros(M, 8), [((M, 8), "P")], "P"),
    ("ones on partial", lambda x: x + torch.ones(M, 8), [((M, 8), "P")], "! .*tp_size times"),
    ("expanded bias", lambda x, b: x + b.expand(M, 8), [((M, 8), "S0"), ((8,), "R")], "S0"),
    ("positions", lambda x: x + torch.arange(M)[:, None], [((M, 8), "S0")], "! .*size 6"),
    ("random rows", lambda x: x + torch.rand_like(x), [((M, 8), "S0")], "S0"),
    ("random", lambda x: x + torch.rand_like(x), [((M, 8), "R")], "! .*random"),
]  # fmt: skip

VIEWS: list[tuple[str, Callable[..., Any], list[tuple[Any, str]], str]] = [
    ("heads", lambda x: x.view(M, 4, 2), [((M, 8), "S0")], "S0"),
    ("feature heads", lambda x: x.view(M, 4, 2), [((M, 8), "S1[32]")], "S1[16]"),
    ("unknown heads", lambda x: x.view(M, 4, 2), [((M, 8), "S1[]")], "S1[]"),
    ("one unknown head", lambda x: x.view(M, 1, 8), [((M, 8), "S1[]")], "S1[]"),
    ("one block", lambda x: x.view(M, 1, 8), [((M, 8), "S1[32]")], "S2[32]"),
    ("two segments", lambda x: x.view(M, 2, 4), [((M, 8), "S1[16,16]")], "S2[16]"),
    ("pairs", lambda x: x.view(M, 4, 2), [((M, 8), "S1[16,16]")], "S1[8,8]"),
    ("uneven blocks", lambda x: x.view(M, 2, 4), [((M, 8), "S1[8,24]")], "! .*blocks"),
    ("uneven heads", lambda x: x.view(M, 4, 2), [((M, 8), "S1[8,24]")], "S1[4,12]"),
    ("merge rows", lambda x: x.reshape(M * 2, 4), [((M, 2, 4), "S0")], "S0"),
    ("merge behind rows", lambda x: x.reshape(M * 2, 4), [((M, 2, 4), "S1[8]")], "! .*every rank"),
    ("merge behind one", lambda x: x.reshape(8, 4), [((1, 8, 4), "S1[32]")], "S0[32]"),
    ("merge segments", lambda x: x.reshape(M, 8), [((M, 2, 4), "S2[16]")], "S1[16,16]"),
    ("merge heads", lambda x: x.reshape(M, 8), [((M, 4, 2), "S1[16]")], "S1[32]"),
    ("flatten all", lambda x: x.reshape(-1), [((M, 8), "S1[32]")], "! "),
    ("flatten rows", lambda x: x.reshape(-1), [((M, 8), "S0")], "S0"),
    ("batch of one", lambda x: x.view(1, M, 8), [((M, 8), "S0")], "S1"),
    ("unsqueeze", lambda x: x.unsqueeze(0), [((M, 8), "S0")], "S1"),
    ("unsqueeze behind", lambda x: x.unsqueeze(-1), [((M, 8), "S1[32]")], "S1[32]"),
    ("squeeze", lambda x: x.squeeze(0), [((1, M, 8), "S1")], "S0"),
    ("squeeze sharded", lambda x: x.squeeze(0), [((1, 8), "S0")], "! .*squeezes"),
    ("t", lambda x: x.t(), [((M, 8), "S0")], "S1"),
    ("permute", lambda x: x.permute(2, 0, 1), [((M, 2, 4), "S1[8]")], "S2[8]"),
    ("transpose", lambda x: x.transpose(-1, 0), [((M, 2, 4), "S2[16]")], "S0[16]"),
    ("expand", lambda x: x[None].expand(3, M, 8), [((M, 8), "S0")], "S1"),
    ("expand sharded", lambda x: x.expand(3, 8), [((1, 8), "S0")], "! .*expands"),
    ("select", lambda x: x[:, 0], [((M, 8), "S0")], "S0"),
    ("select before", lambda x: x[0], [((M, 8), "S1[32]")], "S0[32]"),
    ("select sharded", lambda x: x[0], [((M, 8), "S0")], "! .*element"),
    ("whole slice", lambda x: x[0:M], [((M, 8), "S0")], "S0"),
    ("rows sliced", lambda x: x[: M - 1], [((M, 8), "S0")], "! .*rows"),
    ("rows sliced to half", lambda x: x[: M // 2], [((M, 8), "S0")], "! .*rows"),
    ("features of rows", lambda x: x[:, :3], [((M, 8), "S0")], "S0"),
    ("first segment", lambda x: x[:, :4], [((M, 8), "S1[16,16]")], "S1[16]"),
    ("second segment", lambda x: x[:, 4:], [((M, 8), "S1[16,16]")], "S1[16]"),
    ("two of three", lambda x: x[:, 2:], [((M, 8), "S1[8,8,16]")], "S1[8,16]"),
    ("through a segment", lambda x: x[:, :5], [((M, 8), "S1[16,16]")], "! .*through a sharded"),
    ("half of one", lambda x: x[:, :4], [((M, 8), "S1[32]")], "! .*through a sharded"),
    ("unknown segments", lambda x: x[:, :4], [((M, 8), "S1[]")], "S1[]"),
    ("even", lambda x: x[:, ::2], [((M, 8), "S1[32]")], "S1[16]"),
    ("odd", lambda x: x[:, 1::2], [((M, 8), "S1[32]")], "S1[16]"),
    ("odd of the second", lambda x: x[:, 5::2], [((M, 8), "S1[16,16]")], "S1[8]"),
    ("uneven step", lambda x: x[:, ::3], [((M, 8), "S1[32]")], "! .*through"),
    ("strided, not to the end", lambda x: x[:, :5:2], [((M, 8), "S1[32]")], "! .*through"),
    ("strided, one too few", lambda x: x[:, :6:2], [((M, 8), "S1[32]")], "! .*through"),
    ("unlike blocks", lambda x: x.view(M, 2, 4), [((M, 8), "S1[8,8,4,12]")], "! .*blocks"),
    ("chunk", lambda x: x.chunk(2, -1), [((M, 8), "S1[16,16]")], "S1[16] S1[16]"),
    ("chunk one", lambda x: x.chunk(2, -1), [((M, 8), "S1[32]")], "! .*! "),
    ("split", lambda x: x.split([2, 6], 1), [((M, 8), "S1[8,24]")], "S1[8] S1[24]"),
    ("split rows", lambda x: x.split(3), [((M, 8), "S0")], "! .*rows.*"),
    ("unbind", lambda x: x.unbind(1), [((M, 2), "S0")], "S0 S0"),
    ("unbind sharded", lambda x: x.unbind(0), [((2, 8), "S0")], "! .*element"),
    ("cat features", lambda x, y: torch.cat([x, y], 1), [((M, 4), "S1[16]"), ((M, 2), "S1[8]")],
     "S1[16,8]"),
    ("cat of rows", lambda x, y: torch.cat([x, y], 1), [((M, 4), "S0"), ((M, 2), "S0")], "S0"),
    ("cat with whole", lambda x, y: torch.cat([x, y], 1), [((M, 4), "S1[16]"), ((M, 2), "R")],
     "! .*sharded there"),
    ("cat rows with whole", lambda x, y: torch.cat([x, y], 1), [((M, 4), "S0"), ((M, 2), "R")],
     "! .*different ranks"),
    ("cat partial", lambda x, y: torch.cat([x, y], 1), [((M, 4), "P"), ((M, 2), "P")], "P"),
    ("cat ones to partial", lambda x: torch.cat([x, torch.ones(M, 1)], 1), [((M, 4), "P")],
     "! .*tp_size times"),
    ("stack", lambda x, y: torch.stack([x, y]), [((M, 4), "S0"), ((M, 4), "S0")], "S1"),
    ("flip", lambda x: x.flip(1), [((M, 4), "S0")], "S0"),
    ("flip sharded", lambda x: x.flip(1), [((M, 4), "S1[16]")], "! .*between ranks"),
    ("roll", lambda x: x.roll(1, 0), [((M, 4), "S0")], "! .*between ranks"),
    ("pad features", lambda x: F.pad(x, (0, 1)), [((M, 4), "S0")], "S0"),
    ("pad rows", lambda x: F.pad(x, (0, 0, 0, 1)), [((M, 4), "S0")], "! .*pads"),
    ("repeat", lambda x: x.repeat(1, 3), [((M, 4), "S0")], "S0"),
    ("repeat sharded", lambda x: x.repeat(2, 1), [((M, 4), "S0")], "! .*repeats"),
    ("partial view", lambda x: x.view(M, 2, 2)[:, 0].t(), [((M, 4), "P")], "P"),
]  # fmt: skip

W = (16, 8)
PRODUCTS: list[tuple[str, Callable[..., Any], list[tuple[Any, str]], str]] = [
    ("tokens", F.linear, [((M, 8), "S0"), (W, "R")], "S0"),
    ("columns", F.linear, [((M, 8), "R"), (W, "S0[32,32]")], "S1[32,32]"),
    ("rows", F.linear, [((M, 8), "S1[32]"), (W, "S1[32]")], "P"),
    ("declared rows", F.linear, [((M, 8), "S1[32]"), (W, "S1[]")], "P"),
    ("segments differ", F.linear, [((M, 8), "S1[8,24]"), (W, "S1[24,8]")], "! .*order"),
    ("classic", F.linear, [((M, 8), "S0"), (W, "S0[64]")], "! .*all-gather the tokens first"),
    ("classic rows", F.linear, [((M, 8), "S0"), (W, "S1[32]")], "! .*all-gather the tokens"),
    ("whole", F.linear, [((M, 8), "R"), (W, "R")], "R"),
    ("half cut x", F.linear, [((M, 8), "S1[32]"), (W, "R")], "! .*contracted"),
    ("half cut w", F.linear, [((M, 8), "R"), (W, "S1[32]")], "! .*contracted"),
    ("cut twice", F.linear, [((M, 8), "S1[32]"), (W, "S0[64]")], "! .*contracted"),
    ("partial x", F.linear, [((M, 8), "P"), (W, "R")], "P"),
    ("partial w", F.linear, [((M, 8), "R"), (W, "P")], "P"),
    ("partial both", F.linear, [((M, 8), "P"), (W, "P")], "! .*Replicate"),
    ("partial cut", F.linear, [((M, 8), "P"), (W, "S0[64]")], "! .*Replicate"),
    ("bias", F.linear, [((M, 8), "R"), (W, "S0[64]"), ((16,), "S0[64]")], "S1[64]"),
    ("bias whole", F.linear, [((M, 8), "R"), (W, "S0[64]"), ((16,), "R")], "! .*size 16"),
    ("bias of rows", F.linear, [((M, 8), "S1[32]"), (W, "S1[32]"), ((16,), "R")],
     "! .*tp_size times"),
    ("bias partial", F.linear, [((M, 8), "S1[32]"), (W, "S1[32]"), ((16,), "P")], "P"),
    ("residual", lambda r, x, w: torch.addmm(r, x, w.t()),
     [((M, 16), "S0"), ((M, 8), "S0"), (W, "R")], "S0"),
    ("residual whole", lambda r, x, w: torch.addmm(r, x, w.t()),
     [((M, 16), "R"), ((M, 8), "S1[32]"), (W, "S1[32]")], "! .*tp_size times"),
    ("bmm batch", torch.bmm, [((M, 2, 8), "S0"), ((M, 8, 3), "S0")], "S0"),
    ("bmm one batch", torch.bmm, [((M, 2, 8), "S0"), ((M, 8, 3), "R")], "! .*batch"),
    ("bmm contracted", torch.bmm, [((2, M, 8), "S2[32]"), ((2, 8, 3), "S1[32]")], "P"),
    ("bmm free", torch.bmm, [((2, M, 8), "R"), ((2, 8, 3), "S2[12]")], "S2[12]"),
    ("matmul 3-d", torch.matmul, [((M, 2, 8), "S0"), ((8, 16), "R")], "S0"),
    ("linear 3-d", F.linear, [((M, 2, 8), "R"), (W, "S0[64]")], "S2[64]"),
    ("mv", torch.mv, [((M, 8), "S0"), ((8,), "R")], "S0"),
    ("dot", torch.dot, [((8,), "S0"), ((8,), "S0")], "P"),
    ("attention heads", F.scaled_dot_product_attention,
     [((1, 2, M, 8), "S1[8]")] * 3, "S1[8]"),
    ("attention positions", F.scaled_dot_product_attention, [((1, 2, M, 8), "S2")] * 3,
     "! .*heads"),
    ("attention mixed", F.scaled_dot_product_attention,
     [((1, 2, M, 8), "S1[8]"), ((1, 2, M, 8), "R"), ((1, 2, M, 8), "R")], "! .*alike"),
]  # fmt: skip


@pytest.mark.parametrize(
    "size, given, expected",
    [
        ((2, 3, M, 8), "S0", "S0"),
        ((2, 3, M, 8), "S1[12]", "S1[12]"),
        ((3, M, 8), "S0", "S0"),
        ((3, M, 8), "S1", "! .*heads"),
        ((M, 8), "S0", "! .*heads"),
        ((2, 2, 3, M, 8), "S1", "S1"),
        ((2, 3, M, 8), "S3", "! .*heads"),
    ],
)
def test_attention_of_fewer_dimensions(size: tuple[int, ...], given: str, expected: str) -> None:
    """The last two are positions and features: neither may be sharded."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in "qkv"]
    target = torch.ops.aten.scaled_dot_product_attention.default
    call = graph.call_function(target, tuple(nodes))
    for node in (*nodes, call):
        node.meta["val"] = torch.empty(size, device="meta")
    graph.output(call)
    found = show(propagate(graph, TP, dict.fromkeys(nodes, state(given)))[call])
    assert found == expected or (expected[0] == "!" and re.match(expected, found)), found


LN = (8,)
REDUCTIONS: list[tuple[str, Callable[..., Any], list[tuple[Any, str]], str]] = [
    ("sum features", lambda x: x.sum(-1), [((M, 8), "S0")], "S0"),
    ("sum rows", lambda x: x.sum(0), [((M, 8), "S0")], "P"),
    ("sum all", lambda x: x.sum(), [((M, 8), "S1[32]")], "P"),
    ("sum before", lambda x: x.sum(0), [((M, 8), "S1[32]")], "S0[32]"),
    ("sum keepdim", lambda x: x.sum(0, keepdim=True), [((M, 8), "S1[32]")], "S1[32]"),
    ("sum partial", lambda x: x.sum(0), [((M, 8), "P")], "P"),
    ("mean", lambda x: x.mean(-1, keepdim=True), [((M, 8), "S0")], "S0"),
    ("mean of parts", lambda x: x.mean(-1), [((M, 8), "S1[32]")], "! .*own part"),
    ("amax", lambda x: x.amax(-1), [((M, 8), "S0")], "S0"),
    ("amax of parts", lambda x: x.amax(0), [((M, 8), "S0")], "! .*own part"),
    ("amax partial", lambda x: x.amax(0), [((M, 8), "P")], "! .*not linear"),
    ("var", lambda x: x.var(-1), [((M, 8), "S0")], "S0"),
    ("argmax", lambda x: x.argmax(-1), [((M, 8), "S0")], "S0"),
    ("argmax of parts", lambda x: x.argmax(-1), [((M, 8), "S1[32]")], "! .*own part"),
    ("topk", lambda x: x.topk(2), [((M, 8), "S0")], "S0 S0"),
    ("topk of parts", lambda x: x.topk(2), [((M, 8), "S1[32]")], "! .*! "),
    ("max dim", lambda x: x.max(1), [((M, 8), "S0")], "S0 S0"),
    ("softmax", lambda x: x.softmax(-1), [((M, 8), "S0")], "S0"),
    ("softmax of parts", lambda x: x.softmax(-1), [((M, 8), "S1[32]")], "! .*all elements"),
    ("cumsum rows", lambda x: x.cumsum(0), [((M, 8), "S0")], "! .*all elements"),
    ("layer norm", lambda x, w: F.layer_norm(x, LN, w), [((M, 8), "S0"), (LN, "R")], "S0"),
    ("layer norm of parts", lambda x: F.layer_norm(x, LN), [((M, 8), "S1[32]")], "! .*norm"),
    ("rms norm", lambda x, w: F.rms_norm(x, LN, w), [((M, 8), "S0"), (LN, "R")], "S0"),
    ("rms norm of parts", lambda x: F.rms_norm(x, LN), [((M, 8), "S1[32]")], "! "),
    ("rms norm of partial", lambda x: F.rms_norm(x, LN), [((M, 8), "P")], "! .*linear"),
]  # fmt: skip

INDEXING: list[tuple[str, Callable[..., Any], list[tuple[Any, str]], str]] = [
    ("embedding", F.embedding, [(IDS, "S0"), ((9, 8), "R")], "S0"),
    ("embedding whole", F.embedding, [(IDS, "R"), ((9, 8), "R")], "R"),
    ("vocabulary", F.embedding, [(IDS, "R"), ((9, 8), "S0[]")], "P"),
    ("vocabulary of tokens", F.embedding, [(IDS, "S0"), ((9, 8), "S0[]")], "! .*ids first"),
    ("columns", F.embedding, [(IDS, "R"), ((9, 8), "S1[32]")], "S1[32]"),
    ("masked vocabulary", lambda i, w, m: F.embedding(i, w) * m[:, None],
     [(IDS, "R"), ((9, 8), "S0[]"), (MASK, "R")], "P"),
    ("gather features", lambda x, i: x.gather(1, i[:, None]), [((M, 8), "S0"), (IDS, "S0")], "S0"),
    ("gather other rows", lambda x, i: x.gather(1, i[:, None]), [((M, 8), "S0"), (IDS, "R")],
     "! .*size 6"),
    ("gather rows", lambda x, i: x.gather(0, i[:, None]), [((M, 8), "S0"), (IDS, "S0")],
     "! .*other ranks"),
    ("take from a table", lambda x, i: x[i], [((9, 8), "R"), (IDS, "S0")], "S0"),
    ("take rows", lambda x, i: x[i], [((M, 8), "S0"), (IDS, "R")], "! .*other ranks"),
    ("take features", lambda x, i: x[:, i], [((M, 8), "S0"), (IDS, "R")], "S0"),
    ("index_select", lambda x, i: x.index_select(0, i), [((9, 8), "R"), (IDS, "S0")], "S0"),
    ("scatter", lambda x, i: torch.zeros_like(x).scatter(1, i[:, None], 1.0),
     [((M, 8), "S0"), (IDS, "S0")], "S0"),
    ("scatter of rows", lambda x, i: torch.zeros_like(x).scatter(0, i[:, None], 1.0),
     [((M, 8), "S0"), (IDS, "S0")], "! .*other ranks"),
    ("histogram", lambda i: torch.zeros(9).scatter_add(0, i, torch.ones(M)), [(IDS, "S0")], "P"),
    ("one hot", lambda i: F.one_hot(i, 9), [(IDS, "S0")], "S0"),
    ("zeroed rows", lambda x, m: torch.ops.aten.index_put(x, [m], torch.zeros(())),
     [((M, 8), "S0"), (MASK, "S0")], "S0"),
]  # fmt: skip

ALL = [
    pytest.param(*row[1:], id=f"{kind}: {row[0]}")
    for kind, rows in (
        ("pointwise", POINTWISE),
        ("view", VIEWS),
        ("product", PRODUCTS),
        ("reduction", REDUCTIONS),
        ("index", INDEXING),
    )
    for row in rows
]


@pytest.mark.parametrize(("fn", "inputs", "expected"), ALL)
def test_rule(fn: Any, inputs: list[tuple[Any, str]], expected: str) -> None:
    found = show(result(fn, inputs))
    if expected.startswith("!"):
        assert re.match(expected, found, re.S), found
    else:
        assert found == expected


SYMBOLIC = [
    ("views of rows", lambda x: x.view(x.shape[0], 2, 4).reshape(-1, 4), "S0"),
    ("merged and split", lambda x: x.view(-1, 2, 2, 2).reshape(x.shape[0], 8), "S0"),
    ("batch of one", lambda x: x.unsqueeze(0).reshape(1, x.shape[0], 8), "S1"),
    ("whole slice", lambda x: x[: x.shape[0]], "S0"),
    ("some rows", lambda x: x[: x.shape[0] - 1], "! .*rows"),
    ("two rows", lambda x: x[:2], "! .*rows"),
    ("zeros of the same rows", lambda x: x + x.new_zeros(x.shape[0], 8), "S0"),
    ("rows in pairs", lambda x: x.reshape(x.shape[0] // 2, 2, 8), "S0"),
    ("cat of rows", lambda x: torch.cat([x, x]), "! .*joining"),
]


@pytest.mark.parametrize(("fn", "expected"), [pytest.param(*r[1:], id=r[0]) for r in SYMBOLIC])
def test_symbolic_rows(fn: Any, expected: str) -> None:
    found = show(result(fn, [(torch.randn(10, 8), "S0")], mode="symbolic"))
    assert re.match(expected, found) if expected.startswith("!") else found == expected


def test_no_guard_is_added() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x[: x.shape[0]].view(-1, 2, 4).reshape(-1, 8) + x).sum(1)

    gm = trace(fn, torch.randn(10, 8), mode="symbolic")
    x = next(n for n in gm.graph.nodes if n.op == "placeholder")
    env = x.meta["val"].shape[0].node.shape_env
    before = len(env.guards)
    place(gm, ["S0"])
    assert len(env.guards) == before


# --- declared and unknown ops -----------------------------------------------------------

LIB = torch.library.Library("placement_test", "DEF")
LIB.define("mix(Tensor x, Tensor w) -> Tensor")
LIB.define("rows(Tensor x, Tensor w) -> (Tensor, Tensor)")
LIB.define("heads(Tensor q, Tensor[] kv, Tensor? scale) -> Tensor")
for _name in ("mix", "heads"):
    LIB.impl(_name, lambda x, *_: x.clone(), "CompositeExplicitAutograd")
LIB.impl("rows", lambda x, w: (x.clone(), x.clone()), "CompositeExplicitAutograd")
OPS = torch.ops.placement_test
declare_op("placement_test::rows", row_wise())
declare_op(OPS.heads.default, along([1, 1, 1], 1))


def test_unknown_op_says_how_to_declare_it() -> None:
    found = result(lambda x, w: OPS.mix(x, w) * 2, [((M, 8), "S0"), ((8,), "R")])
    assert found.placement is None
    assert "placement_test::mix" in found.reason and "declare_op" in found.reason
    assert result(OPS.mix, [((M, 8), "R"), ((8,), "R")]) == REPLICATE


def test_row_wise() -> None:
    assert show(result(OPS.rows, [((M, 8), "S0"), ((8,), "R")])) == "S0 S0"
    assert show(result(OPS.rows, [((M, 8), "R"), ((8,), "R")])) == "R R"
    assert "row-wise" in show(result(OPS.rows, [((M, 8), "S1[32]"), ((8,), "R")]))


def test_along() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        return OPS.heads(q, [k, v], None)

    assert show(result(fn, [((M, 2, 4), "S1[8]")] * 3)) == "S1[8]"
    assert show(result(fn, [((M, 2, 4), "R")] * 3)) == "R"
    mixed = [((M, 2, 4), "S1[8]"), ((M, 2, 4), "R"), ((M, 2, 4), "S1[8]")]
    assert "needed Shard(1)" in show(result(fn, mixed))


def test_declared_op_under_auto_functionalized() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"], w.meta["val"] = torch.empty(M, 8), torch.empty(8)
    wrapper = torch.ops.higher_order.auto_functionalized
    for op, expected in ((OPS.rows, "S0 S0"), (OPS.mix, "! .*placement_test::mix.default")):
        y = graph.call_function(wrapper, (op.default,), {"x": x, "w": w})
        y.meta["val"] = (torch.empty(M, 8), torch.empty(M, 8))
        found = show(propagate(graph, TP, {x: state("S0")})[y])
        assert re.match(expected, found), found


def test_declare_op_needs_a_namespace() -> None:
    with pytest.raises(SPError, match="namespace::op"):
        declare_op("mix", row_wise())


def test_first_cause_is_named() -> None:
    gm = trace(lambda x: F.gelu(x.flip(0)).sum(), torch.randn(M, 8))
    states = list(place(gm, ["S0"]).values())
    assert states[-1][0].reason.startswith("flip")


def test_in_place_ops_need_the_placement_of_what_they_overwrite() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.copy_(x, y)

    assert show(result(fn, [((M, 8), "S0"), ((M, 8), "S0")])) == "S0"
    assert "overwritten" in show(result(fn, [((M, 8), "R"), ((M, 8), "S0")]))


def test_fresh_buffer_takes_the_state_written_to_it() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(M, 8)
        torch.ops.aten.copy_(buffer, x)
        return buffer * 2

    assert show(result(fn, [((M, 8), "S0")])) == "S0"


def test_sizes_are_replicated() -> None:
    gm = trace(lambda x: x.new_zeros(x.shape[0] * 2), torch.randn(10, 8), mode="symbolic")
    states = place(gm, ["S0"])
    assert all(s.placement == Replicate() for n, s in states.items() if n.op == "call_function")
