# SPDX-License-Identifier: Apache-2.0
"""The graphs that Inductor makes for GPUs, which are not those for CPUs, read without a GPU.

Parameters and inputs are fake CUDA tensors. The pass sees its graph; compiling ends there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_placement_property import compare
from test_placement_rules import result, show, state, trace
from torch import fx, nn
from torch._inductor.fx_passes import fuse_attention, misc_patterns
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

import sp_passes
from sp_passes import passes
from sp_passes.api import _declared
from sp_passes.backend import Backend
from sp_passes.bench.model_check import small_config
from sp_passes.models import KimiK3Model
from sp_passes.placement import propagate
from sp_passes.report import Report

# Patterns of Inductor's own that look for themselves by tracing on a real device.
TRACED = ((misc_patterns, "_misc_patterns_init"), (fuse_attention, "_sfdp_init"))


class Seen(BaseException):
    """The pass has run; it must not be caught on the way out."""


def decided(monkeypatch: pytest.MonkeyPatch, device: str, dynamic: bool) -> Report:
    """What the pass decides on a small Kimi-K3, one of two ranks, under torch.compile."""
    for module, name in TRACED:
        monkeypatch.setattr(module, name, lambda *args, **kwargs: None)
    reports: list[Report] = []
    run = passes.run

    def recorded(*args: Any) -> Any:
        reports.append(run(*args))
        raise Seen

    monkeypatch.setattr(passes, "run", recorded)
    torch._dynamo.reset()
    with FakeTensorMode(), torch.no_grad(), pytest.raises(BaseException):  # noqa: B017
        model = KimiK3Model(small_config(), 2, 0, "", torch.bfloat16, device)
        backend = Backend(sp_passes.SPConfig(tp_size=2), "sharded", (), _declared(model))
        ids = torch.zeros(8, dtype=torch.long, device=device)
        torch.compile(model, backend=backend, dynamic=dynamic)(ids)
    (report,) = reports
    return report


@pytest.mark.parametrize("dynamic", [True, False])
def test_gpu_graphs_are_rewritten_as_cpu_graphs_are(
    monkeypatch: pytest.MonkeyPatch, dynamic: bool
) -> None:
    with monkeypatch.context() as patched:
        wanted = decided(patched, "cpu", dynamic)
    found = decided(monkeypatch, "cuda", dynamic)
    assert Counter(d.pattern for d in found.applied) == Counter(
        d.pattern for d in wanted.applied
    ), str(found)
    assert found.bytes_saved_per_rank == wanted.bytes_saved_per_rank > 0
    assert not any("no placement rule" in d.reason for d in found.skipped), str(found)


# --- ops that only GPUs' graphs hold, or that users' models put there ---------------------

aten, prims, fp8 = torch.ops.aten, torch.ops.prims, torch.float8_e4m3fn
Op = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def heads(x: torch.Tensor) -> torch.Tensor:
    """``[rows, 64]`` as ``[4 samples, 4 heads, positions, 16]``."""
    return x.view(4, x.shape[0] // 4, 4, 16).transpose(1, 2)


def rows(o: torch.Tensor) -> torch.Tensor:
    return o.transpose(1, 2).reshape(-1, 64)


def packed(x: torch.Tensor, **ends: Any) -> torch.Tensor:
    """Flash attention of ``[4 samples, positions, 4 heads, 16]``."""
    q = x.view(4, -1, 4, 16)
    return aten._flash_attention_forward(q, q, q, None, None, 9, 9, 0.0, False, False)[0]


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float() / 448
    return (x / scale).to(fp8), scale


def by_recipe(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    one = w.float().amax(0, keepdim=True)
    given, kinds = quantised(x), [1]  # one scale a row
    return aten._scaled_mm_v2(
        given[0], w.to(fp8).t(), [given[1]], kinds, [0], [one], kinds, [0], None, torch.bfloat16
    )


OPS: dict[str, Op] = {
    "online softmax": lambda x, w, b: x.softmax(-1),
    "log_softmax": lambda x, w, b: x.log_softmax(-1),
    "rms_norm": lambda x, w, b: F.rms_norm(x, [64], b),
    "fused rms_norm": lambda x, w, b: aten._fused_rms_norm(x, [64], b, 1e-6)[0],
    "layer_norm": lambda x, w, b: F.layer_norm(x, [64], b, b),
    "group_norm": lambda x, w, b: F.group_norm(x, 4),
    "gelu tanh": lambda x, w, b: F.gelu(x, approximate="tanh"),
    "mish": lambda x, w, b: F.mish(x),
    "glu": lambda x, w, b: F.glu(x),
    "linear with bias": lambda x, w, b: F.linear(x, w, b),
    "addmm of rows": lambda x, w, b: torch.addmm(x, x, w),
    "_addmm_activation": lambda x, w, b: aten._addmm_activation(b, x, w, use_gelu=True),
    "_int_mm": lambda x, w, b: torch._int_mm(x.to(torch.int8), w.to(torch.int8)),
    "_weight_int8pack_mm": lambda x, w, b: aten._weight_int8pack_mm(x, w.to(torch.int8), b),
    "_scaled_mm by rows": lambda x, w, b: torch._scaled_mm(
        quantised(x)[0], w.to(fp8).t(), quantised(x)[1], w.float().amax(0, keepdim=True),
        out_dtype=torch.bfloat16),
    "_scaled_mm_v2": by_recipe,
    "_grouped_mm of experts": lambda x, w, b: torch._grouped_mm(
        torch.stack([x.bfloat16()] * 4), torch.stack([w.bfloat16()] * 4)).sum(0),
    "flash": lambda x, w, b: rows(
        aten._scaled_dot_product_flash_attention(heads(x), heads(x), heads(x), 0.0, True)[0]),
    "memory-efficient": lambda x, w, b: rows(aten._scaled_dot_product_efficient_attention(
        heads(x), heads(x), heads(x), None, False)[0]),
    "cudnn": lambda x, w, b: rows(aten._scaled_dot_product_cudnn_attention(
        heads(x), heads(x), heads(x), None, False)[0]),
    "_flash_attention_forward": lambda x, w, b: packed(x).reshape(-1, 64),
    "embedding": lambda x, w, b: F.embedding(x.argmax(-1) % 64, w),
    "topk": lambda x, w, b: x.topk(2)[0],
    "stable sort": lambda x, w, b: x.sort(dim=-1, stable=True)[0],
    "cumsum": lambda x, w, b: x.cumsum(-1),
    "rotary, complex": lambda x, w, b: torch.view_as_real(
        torch.view_as_complex(x.float().view(-1, 4, 8, 2))
        * torch.polar(x.float().abs(), x.float()).view(-1, 4, 8, 2).select(-1, 0)).flatten(1),
    "bits": lambda x, w, b: x.view(torch.int16).bitwise_and(0x7FFF).view(x.dtype),
    "flip": lambda x, w, b: x.flip(-1),
    "unfold": lambda x, w, b: x.unfold(-1, 4, 4).sum(-1),
    "diagonal": lambda x, w, b: x.view(-1, 8, 8).diagonal(0, -2, -1),
    "convolution": lambda x, w, b: aten.convolution(
        x.view(4, 64, -1), w.view(64, 64, 1), None, [1], [0], [1], False, [0], 1),
    "foreach": lambda x, w, b: torch._foreach_mul([x, x * 2], [x, x])[1],
    "multinomial": lambda x, w, b: torch.multinomial(x.float().softmax(-1), 1),
}  # fmt: skip
"""Row-wise, all of them: of ``x [rows, 64]``, a weight ``[64, 64]`` and a vector ``[64]``."""


class Ops(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(OPS[name](*given) for name in self.names)


def seen(monkeypatch: pytest.MonkeyPatch, module: nn.Module, inputs: list[Any]) -> fx.Graph:
    """The first graph that the pass would rewrite."""
    for owner, name in TRACED:
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: None)
    graphs: list[fx.Graph] = []

    def recorded(graph: fx.Graph, *rest: Any) -> Any:
        graphs.append(graph)
        raise Seen

    monkeypatch.setattr(passes, "run", recorded)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(BaseException) as stopped:
        backend = Backend(sp_passes.SPConfig(tp_size=2), "sharded", ())
        torch.compile(module, backend=backend)(*inputs)
    assert graphs, str(stopped.value)
    return graphs[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_op_of_gpu_graphs_has_a_rule(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    with FakeTensorMode():
        x = torch.empty(16, 64, dtype=dtype, device="cuda")
        w = torch.empty(64, 64, dtype=dtype, device="cuda")
        b = torch.empty(64, dtype=dtype, device="cuda")
        graph = seen(monkeypatch, Ops(list(OPS)), [x, w, b])
    inputs = graph.find_nodes(op="placeholder")
    states = propagate(graph, 2, {n: state("S0") for n in inputs if n.meta["val"].shape[0] == 16})
    output = next(n for n in graph.nodes if n.op == "output")
    found = dict(zip(OPS, map(show, states[output]), strict=True))
    assert not {name: text for name, text in found.items() if text != "S0"}


# --- the rules themselves ----------------------------------------------------------------


def grouped(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
    offs = None if ends is None else ends.new_tensor([2, 4]).to(torch.int32)
    return torch._grouped_mm(a.bfloat16(), b.bfloat16(), offs=offs).double()


def diagonal(x: torch.Tensor) -> torch.Tensor:
    return x.diagonal(0, 1, 2)


TRUE: list[tuple[str, Callable[..., torch.Tensor], list[tuple[tuple[int, ...], str]]]] = [
    ("glu", lambda x: F.glu(x, 1), [((4, 8), "S0")]),
    ("glu of rows", lambda x: F.glu(x, 0), [((4, 8), "S1[8,8]")]),
    ("unfold", lambda x: x.unfold(1, 2, 2), [((4, 8), "S0")]),
    ("unfold of a sum", lambda x: x.unfold(1, 4, 2), [((4, 8), "P")]),
    ("diagonal", diagonal, [((4, 3, 3), "S0")]),
    ("diagonal before", lambda x: x.diagonal(0, 0, 1), [((3, 3, 4), "S2[8]")]),
    ("flip", lambda x: prims.rev(x, [1]), [((4, 8), "S0")]),
    ("pairs", lambda x: torch.view_as_real(torch.view_as_complex(x)), [((4, 2), "S0")]),
    ("pairs of a sum", lambda x: torch.view_as_complex(x).imag, [((4, 2), "P")]),
    ("polar", lambda x, y: torch.view_as_real(torch.polar(x, y)), [((4, 8), "S0")] * 2),
    ("complex", lambda x, y: torch.complex(x, y).real, [((4, 8), "S1[8,8]")] * 2),
    ("foreach", lambda x, y: torch._foreach_mul([x, y], [y, x])[1], [((4, 8), "S0")] * 2),
    ("foreach of a number", lambda x: torch._foreach_add([x], 1.0)[0], [((4, 8), "S1[16]")]),
    ("samples", lambda x, w: F.conv1d(x, w), [((4, 3, 5), "S0"), ((2, 3, 2), "R")]),
    ("samples, a sum", lambda x, w: F.conv1d(x, w), [((4, 3, 5), "P"), ((2, 3, 2), "R")]),
    ("online softmax", lambda x: prims.prepare_softmax_online(x, 1)[1], [((4, 8), "S0")]),
    ("experts", grouped, [((2, 4, 8), "S0"), ((2, 8, 8), "S0")]),
    ("experts' rows", grouped, [((2, 4, 8), "S1"), ((2, 8, 8), "R")]),
    ("experts' features", grouped, [((2, 4, 8), "R"), ((2, 8, 8), "S2[16]")]),
]
"""What these give of real shards, put together, is what the whole gives."""


@pytest.mark.parametrize(("name", "fn", "inputs"), TRUE, ids=[row[0] for row in TRUE])
def test_rules_are_true_of_real_shards(name: str, fn: Any, inputs: Any) -> None:
    gm = trace(fn, *[torch.randn(*shape, dtype=torch.float64) for shape, _ in inputs])
    nodes = gm.graph.find_nodes(op="placeholder")
    given = [state(text) for _, text in inputs]
    states = propagate(gm.graph, 2, dict(zip(nodes, given, strict=True)))
    output = next(n for n in gm.graph.nodes if n.op == "output")
    assert "!" not in show(states[output]), show(states[output])
    compare(gm, given, 2)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: Any = None) -> torch.Tensor:
    """Of ``[samples, positions, heads, features]``, or of ``[tokens, heads, features]``."""
    ends = None if ends is None else ends.to(torch.int32)
    return aten._flash_attention_forward(q, k, v, ends, ends, 6, 6, 0.0, True, False)[0]


def by_scales(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    given, wide = ([s.float()], [1], [0]), [x.new_ones(1, 16).float()]
    return aten._scaled_mm_v2(
        x.to(fp8), w.to(fp8).t(), *given, wide, [1], [0], None, torch.bfloat16
    )


IDS, HEAD = torch.zeros(3, dtype=torch.int64), (2, 6, 4, 8)
GIVEN: list[tuple[str, Callable[..., Any], list[tuple[Any, str]], str]] = [
    ("online softmax of rows", lambda x: prims.prepare_softmax_online(x, 0)[0],
     [((6, 8), "S0")], "! .*own part only"),
    ("online softmax of features", lambda x: prims.prepare_softmax_online(x, 1)[0],
     [((6, 8), "S1[32]")], "! .*own part only"),
    ("online softmax of a sum", lambda x: prims.prepare_softmax_online(x, 1)[0],
     [((6, 8), "P")], "! .*not linear"),
    ("heads", flash, [(HEAD, "S2[16]")] * 3, "S2[16]"),
    ("samples", flash, [(HEAD, "S0")] * 3, "S0"),
    ("positions", flash, [(HEAD, "S1[]")] * 3, "! .*mixes positions"),
    ("keys whole", flash, [(HEAD, "S0"), (HEAD, "R"), (HEAD, "R")], "! .*alike"),
    ("packed heads", flash, [(HEAD[1:], "S1[16]")] * 3 + [(IDS, "R")], "S1[16]"),
    ("packed tokens", flash, [(HEAD[1:], "S0")] * 3 + [(IDS, "R")], "! .*mixes positions"),
    ("samples with lengths", flash, [(HEAD, "S0")] * 3 + [(IDS, "R")], "! .*mixes positions"),
    ("glu of features", F.glu, [((6, 8), "S1[32]")], "! .*one half"),
    ("glu of a sum", F.glu, [((6, 8), "P")], "! .*not linear"),
    ("windows of rows", lambda x: x.unfold(0, 2, 1), [((6, 8), "S0")], "! .*windows"),
    ("diagonal of rows", lambda x: x.diagonal(), [((6, 8), "S0")], "! .*positions"),
    ("rows flipped", lambda x: prims.rev(x, [0]), [((6, 8), "S0")], "! .*between ranks"),
    ("pairs across ranks", torch.view_as_complex, [((6, 2), "S1[8]")], "! .*last dimension"),
    ("polar of a sum", torch.polar, [((6, 8), "P"), ((6, 8), "R")], "! .*not linear"),
    ("foreach of a sum", lambda x: torch._foreach_exp([x])[0], [((6, 8), "P")], "! .*not linear"),
    ("rows in groups", grouped, [((6, 8), "S0"), ((2, 8, 8), "R"), ((2,), "R")], "! .*positions"),
    ("features of groups", grouped, [((6, 8), "R"), ((2, 8, 8), "S2[32]"), ((2,), "R")], "S1[32]"),
    ("contracted in groups", grouped,
     [((6, 8), "S1[32]"), ((2, 8, 8), "S1[32]"), ((2,), "R")], "P"),
    ("experts of other ranks", grouped,
     [((6, 8), "R"), ((2, 8, 8), "S0"), ((2,), "R")], "! .*other ranks"),
    ("channels mixed", F.conv1d, [((2, 4, 8), "S1[16]"), ((4, 4, 2), "R")], "! .*mixes"),
    ("positions convolved", F.conv1d, [((2, 4, 8), "S2[]"), ((4, 4, 2), "R")], "! .*mixes"),
    ("channels apart", lambda x, w: F.conv1d(x, w, groups=4),
     [((2, 4, 8), "S1[16]"), ((4, 1, 2), "S0[16]")], "S1[16]"),
    ("bias of a sum", F.conv1d, [((2, 4, 8), "P"), ((4, 4, 2), "R"), ((4,), "R")], "! .*mixes"),
    ("multinomial of a vector", lambda x: torch.multinomial(x.abs(), 1),
     [((6,), "S0")], "! .*different numbers"),
    ("drawn for a whole row", aten._sample_dirichlet, [((6, 8), "S1[32]")], "! .*random"),
    ("activated sum", lambda b, x, w: aten._addmm_activation(b, x, w),
     [((8,), "R"), ((6, 8), "S1[32]"), ((8, 8), "S0[32]")], "! .*"),
    ("recipe, contracted", lambda x, w, s: by_scales(x, w, s), [
        ((6, 16), "S1[]"), ((16, 16), "S1[]"), ((6, 1), "R")], "! .*blocks"),
    ("recipe, rows of others", lambda x, w, s: by_scales(x, w, s), [
        ((6, 16), "S0"), ((16, 16), "R"), ((6, 1), "R")], "! .*size 6"),
    ("recipe, rows", lambda x, w, s: by_scales(x, w, s), [
        ((6, 16), "S0"), ((16, 16), "R"), ((6, 1), "S0")], "S0"),
    ("int8 weight's scales", lambda x, w, s: aten._weight_int8pack_mm(x, w.to(torch.int8), s),
     [((6, 8), "R"), ((8, 8), "S0[32]"), ((8,), "R")], "! .*size 8"),
    ("int8 product", lambda x, w: torch._int_mm(x.to(torch.int8), w.to(torch.int8)),
     [((32, 8), "S0"), ((8, 8), "R")], "S0"),
    ("dropout", lambda x: torch.native_dropout(x, 0.5, True)[0], [((6, 8), "S0")], "S0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fn", "inputs", "wanted"), GIVEN, ids=[r[0] for r in GIVEN])
def test_rules_refuse_what_ranks_cannot_do(name: str, fn: Any, inputs: Any, wanted: str) -> None:
    found = show(result(fn, inputs))
    assert re.match(wanted, found) if wanted[0] == "!" else found == wanted, found


class Flex(nn.Module):
    def __init__(self, score: Any) -> None:
        super().__init__()
        self.score = score

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, q, q, score_mod=self.score)


@pytest.mark.parametrize(
    ("score", "given", "wanted"),
    [
        (None, "S0", "S0"),
        (lambda score, b, h, q, k: score * (h + 1), "S0", "S0"),
        (lambda score, b, h, q, k: score * (h + 1), "S1[16]", "! .*index of a sample or head"),
        (None, "S2[]", "! .*mixes positions"),
    ],
)
def test_flex_attention_by_samples_or_heads(
    monkeypatch: pytest.MonkeyPatch, score: Any, given: str, wanted: str
) -> None:
    graph = seen(monkeypatch, Flex(score), [torch.randn(2, 8, 16, 16)])
    states = propagate(graph, 2, {graph.find_nodes(op="placeholder")[0]: state(given)})
    found = show(states[next(n for n in graph.nodes if n.op == "output")])
    assert re.match(wanted, found), found


# --- bodies of higher-order ops ----------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, self.mlp, torch.neg, (x,))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


def test_bodies_of_higher_order_ops_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective in a branch that other ranks do not take would hang; its inputs are not ours."""
    graph = seen(monkeypatch, Branches(), [torch.randn(4, 8)])
    assert any(node.target is torch.ops.higher_order.cond for node in graph.nodes), graph
