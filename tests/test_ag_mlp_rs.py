# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""MLPs of few tokens as one op: the graph, which activations are read, and what is skipped.

``EXPECTTEST_ACCEPT=1 pytest tests/test_ag_mlp_rs.py`` rewrites the text.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import blocks
import mlps
import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor, fx, nn
from torch.distributed.tensor import Shard

import sp_passes
from sp_passes import PlacementError, SPConfig
from sp_passes.barriers import set_barriers
from sp_passes.declare import declare_placement
from sp_passes.graph.collectives import count, op_name
from sp_passes.graph.traffic import bytes_sent
from sp_passes.inspect import placed
from sp_passes.ops import mlp as op
from sp_passes.policy import choose, forms

TP, ROWS, HIDDEN, WIDTH = 2, 3, 64, 128
PATTERNS = ("replicated_mlp", "shared_gather", "ag_mlp_rs")
SPEC = mlps.Spec(hidden=HIDDEN, width=WIDTH)


@pytest.fixture(autouse=True)
def activations_travel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as small as these would rather be gathered."""
    if "full_size" not in request.node.name:
        monkeypatch.setattr(choose, "_runs", lambda form, *_: form == forms.SHARDED)


def config(**options: Any) -> SPConfig:
    given = {"patterns": PATTERNS, "policy": "memory", "token_range": (1, 128), **options}
    return SPConfig(**{"tp_size": TP, **given})


def rewritten(module: nn.Module, rows: int = ROWS, **options: Any) -> tuple[fx.GraphModule, Any]:
    gm = sp_passes.trace(module, torch.empty(rows, HIDDEN, dtype=module.down_weight.dtype))  # type: ignore[union-attr, arg-type]
    report = sp_passes.rewrite(gm, config(**options))
    return gm, report


def mlp(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> mlps.MLP:
    return mlps.MLP(mlps.with_(SPEC, **changes), dtype=dtype)


def decided(report: Any) -> Any:
    (found,) = [d for d in report.decisions if d.pattern == "ag_mlp_rs"]
    return found


def fused(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if op_name(n) == "sp_passes::ag_mlp_rs"]


class Golden(TestCase):
    maxDiff = None

    def test_situ(self) -> None:
        gm, _ = rewritten(mlp(act="situ"))
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [3, 64]
gate_up_weight : [256, 64]
down_weight : [64, 128]
prepare = prepare([gate_up_weight, down_weight], ['S0[128,128]', 'S1[128]'], ['gate_up_weight', 'down_weight'], plan, True, '', 2) : [0]
ag_mlp_rs = ag_mlp_rs(x, gate_up_weight, down_weight, 'S0[128,128]', 'S1[128]', 'situ', 4.0, 25.0, prepare, '', 2) : [3, 64]
return ag_mlp_rs
""",
        )


# --- which activations are read ---------------------------------------------------------

Act = Callable[[Tensor, Tensor], Tensor]


def by_exp(g: Tensor, u: Tensor) -> Tensor:
    """As Inductor decomposes SiLU."""
    wide = g.float()
    return (wide / (1 + (-wide).exp())).to(g.dtype) * u


def by_reciprocal(g: Tensor, u: Tensor) -> Tensor:
    return u * (g * torch.reciprocal(torch.exp(-g) + 1))


def situ(g: Tensor, u: Tensor) -> Tensor:
    return (2.0 * torch.tanh(g.float() * 0.5) * torch.sigmoid(g.float()) * u.float()).to(g.dtype)


READ: dict[str, tuple[Act | str, tuple[Any, ...]]] = {
    "silu": ("silu", ("silu", 1.0, None)),
    "casts": ("cast", ("silu", 1.0, None)),
    "exp": (by_exp, ("silu", 1.0, None)),
    "reciprocal": (by_reciprocal, ("silu", 1.0, None)),
    "situ without a clip": (situ, ("situ", 2.0, None)),
    "situ": ("situ", ("situ", 4.0, 25.0)),
}

UNREAD: dict[str, Act | str] = {
    "gelu": "gelu",
    "clamped": "clamped",
    "up in the gate": lambda g, u: torch.sigmoid(u) * g * u,
    "twice": lambda g, u: 2 * F.silu(g) * u,
    "another slope": lambda g, u: g * torch.sigmoid(1.702 * g) * u,
    "sign": lambda g, u: g * torch.sigmoid(-g) * u,
    "situ of another scale": lambda g, u: 3.0 * torch.tanh(g / 2.0) * torch.sigmoid(g) * u,
    "squared": lambda g, u: F.silu(g) * u * u,
    "one plus": lambda g, u: g / (2 + torch.exp(-g)) * u,
    "8 bits": lambda g, u: (F.silu(g) * u).to(torch.float8_e4m3fn).to(g.dtype),
    "other 16 bits": lambda g, u: (F.silu(g.half()) * u.half()).to(g.dtype),
    "inverted": lambda g, u: u / torch.sigmoid(g),
}


def of(act: Act | str) -> mlps.MLP:
    if isinstance(act, str):
        return mlp(act=act)
    module = mlp()
    module.spec = mlps.with_(SPEC, act=f"{id(act)}")
    mlps.ACTS[module.spec.act] = act
    return module


@pytest.mark.parametrize("name", READ)
def test_reads(name: str) -> None:
    act, found = READ[name]
    gm, report = rewritten(of(act))
    assert decided(report).applied, str(report)
    (node,) = fused(gm)
    assert node.args[5:8] == pytest.approx(found)


@pytest.mark.parametrize("name", UNREAD)
def test_reads_no_other(name: str) -> None:
    gm, report = rewritten(of(UNREAD[name]))
    assert decided(report).reason.startswith("activation: "), str(report)
    assert not fused(gm)


# --- what is skipped --------------------------------------------------------------------


class Shared(nn.Module):
    """Two MLPs on the same rows, or one whose hidden rows are returned."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.one, self.two, self.twice = mlp(), mlp(), twice
        self.down_weight = self.one.down_weight

    def forward(self, x: Tensor) -> Any:
        return self.one(x) + self.two(x) if self.twice else self.one(x)


SKIPPED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "separate": ({"form": "separate"}, {}, "several weights: ag_gemm_default multiplies 2"),
    "bias": ({"bias1": True}, {}, "bias: "),
    "bias after": ({"bias2": True}, {}, "bias: "),
    "vector": ({"vector": True}, {}, "activation: it reads local_shard"),
    "batched": ({"batched": True}, {}, "activation: reshape"),
    "interleaved": ({"split": "strided"}, {}, "layout: gate and up must be two equal segments"),
    "swapped": ({"split": "swapped"}, {}, "activation: "),
    "in first": ({"in_first": True}, {}, "layout: gate and up must be two equal segments"),
    "many tokens": ({}, {"token_range": (1, 129)}, "tokens: up to 129; one op is faster up to 128"),
    "no token range": ({}, {"token_range": None}, "no token range: "),
    "ranks": ({}, {"tp_size": 4}, "unmeasured: not measured on 4 ranks"),
    "kernels": ({}, {"kernels": "unfused"}, "kernels: 'unfused' is asked for"),
    "sizes": ({"width": 96}, {}, "sizes: 64, 48, 64 are not all multiples of 64"),
    "dtype": ({"dtype": torch.float32}, {}, "dtype: torch.float32; the kernels take"),
}  # fmt: skip


@pytest.mark.parametrize("name", SKIPPED)
def test_skips(name: str) -> None:
    spec, options, reason = SKIPPED[name]
    module = mlp(**spec)
    shape = (ROWS, 2, HIDDEN) if spec.get("batched") else (ROWS, HIDDEN)
    gm = sp_passes.trace(module, torch.empty(shape, dtype=module.down_weight.dtype))
    report = sp_passes.rewrite(gm, config(**options))
    assert decided(report).reason.startswith(reason), str(report)
    assert not fused(gm) and count(gm.graph) == {"all_gather": 1, "reduce_scatter": 1}


def test_a_shared_gather_stays() -> None:
    gm, report = rewritten(Shared(True))
    assert not fused(gm), str(report)
    reasons = {d.reason.partition(":")[0] for d in report.decisions if d.pattern == "ag_mlp_rs"}
    assert reasons == {"several weights"}


def test_full_size_by_default_with_a_token_range_only() -> None:
    """The shared experts of Kimi-K3, as the cost model decides."""
    module = mlp()
    with torch.device("meta"):
        for name, size in (("gate_up_weight", (12288, 7168)), ("down_weight", (7168, 6144))):
            weight = torch.empty(size, dtype=torch.bfloat16)
            setattr(module, name, nn.Parameter(weight, requires_grad=False))
    module.spec = mlps.with_(SPEC, hidden=7168, width=6144, act="situ")
    for tokens, policy, found in (((1, 64), None, True), (None, None, False)):
        gm = sp_passes.trace(module, torch.empty(8, 7168, dtype=torch.bfloat16, device="meta"))
        report = sp_passes.rewrite(gm, SPConfig(tp_size=TP, token_range=tokens, policy=policy))
        assert bool(fused(gm)) is found, str(report)
        assert found or "ag_mlp_rs" not in str(report)


# --- what the rest of the package makes of the op ---------------------------------------


def test_the_same_collectives_and_bytes() -> None:
    parts, _ = rewritten(mlp(), patterns=PATTERNS[:2])
    gm, report = rewritten(mlp())
    assert fused(gm)
    assert count(gm.graph) == count(parts.graph) == {"all_gather": 1, "reduce_scatter": 1}
    row = ROWS * HIDDEN * 2
    assert bytes_sent(gm.graph, TP) == bytes_sent(parts.graph, TP)
    assert bytes_sent(gm.graph, TP) == {"all_gather": row, "reduce_scatter": row}
    assert report.bytes_saved_per_rank == 3 * HIDDEN * WIDTH * 2 // 2
    assert decided(report).bytes_saved_per_rank == 0


def test_bytes_of_rows_in_and_sums_out() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, 10, dtype=torch.bfloat16)
    given = (x, None, None, "L0", "L1", "silu", 1.0, None, None, "", 4)
    y = graph.call_function(torch.ops.sp_passes.ag_mlp_rs.default, given)
    y.meta["val"] = torch.empty(3, 50, dtype=torch.bfloat16)
    graph.output(y)
    assert bytes_sent(graph, 4) == {"all_gather": 3 * 60, "reduce_scatter": 3 * 300}


def test_placement() -> None:
    gm, _ = rewritten(mlp())
    found = sp_passes.check(gm, config())
    assert found[fused(gm)[0].name] == Shard(0)
    with pytest.raises(PlacementError, match=r"ag_mlp_rs gathers the ranks' tokens"):
        sp_passes.check(gm, config(), tokens="replicated")


class Own(nn.Module):
    """An MLP whose weights the model sharded itself; ``also`` returns ``rows`` or ``gate``."""

    def __init__(self, c: blocks.Comm, also: str = "") -> None:
        super().__init__()
        self.also = also
        gate, up, down = (
            blocks.weight(shape, i)
            for i, shape in enumerate([(WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)])
        )
        self.c, self.whole = c, (gate, up, down)
        mine = torch.cat([w.chunk(c.size)[c.rank] for w in (gate, up)]).to(torch.bfloat16)
        self.gate_up = declare_placement(nn.Parameter(mine, requires_grad=False), Shard(0))
        self.down_weight = blocks.part(c, down, 1, torch.bfloat16)

    def forward(self, x: Tensor) -> Any:
        rows = self.c.gather(x)
        gate, up = F.linear(rows, self.gate_up).chunk(2, -1)
        y = self.c.scatter(F.linear(F.silu(gate) * up, self.down_weight))
        return (y, {"rows": rows, "gate": gate}[self.also].amax(0)) if self.also else y

    def exact(self, x: Tensor) -> Tensor:
        gate, up, down = (w.to(torch.bfloat16).double() for w in self.whole)
        return (F.silu(x.double() @ gate.t()) * (x.double() @ up.t())) @ down.t()


FUSIONS = ("ag_gemm", "gemm_rs", "ag_mlp_rs")


def test_weights_that_the_model_sharded() -> None:
    gm, report = rewritten(Own(blocks.Comm(TP)), patterns=FUSIONS)
    (node,) = fused(gm)
    assert node.args[3:5] == ("L0", "L1"), str(report)
    sp_passes.check(gm, config())
    known = placed._from_mlps(gm.graph)
    assert [(str(n.target), k.placement) for n, k in known.items()] == [
        ("gate_up", Shard(0)), ("down_weight", Shard(1)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("also", "reason"),
    [("rows", "gathered rows: others read"), ("gate", "used elsewhere: slice")],
)
def test_values_that_others_read(also: str, reason: str) -> None:
    gm, report = rewritten(Own(blocks.Comm(TP), also), patterns=FUSIONS)
    assert decided(report).reason.startswith(reason), str(report)
    assert not fused(gm)


def test_its_collectives_keep_others_apart() -> None:
    graph = fx.Graph()
    x, w1, w2, w3 = (graph.placeholder(name) for name in ("x", "w1", "w2", "w3"))
    ours = torch.ops.sp_passes
    given = (x, w1, w2, "L0", "L1", "silu", 1.0, None, None, "", TP)
    y = graph.call_function(ours.ag_mlp_rs.default, given)
    z = graph.call_function(ours.gemm_rs.default, (y, w3, None, "L1", None, "", TP))
    graph.output(z)
    assert set_barriers(graph, "", TP) == {z.name: f"{y.name} lies between"}
    assert set_barriers(graph, "", 2 * TP)[z.name].startswith("barrier: ")


# --- on ranks ---------------------------------------------------------------------------


def _as_measured() -> Callable[[], None]:
    """Take this machine for one on which the op was measured; gives what undoes that."""
    kept = choose._runs, op.unmeasured
    choose._runs = lambda form, *_: form == forms.SHARDED  # type: ignore[assignment]
    op.unmeasured = lambda *_: None

    def undo() -> None:
        choose._runs, op.unmeasured = kept

    return undo


def on_a_rank(at: Any) -> dict[str, Any]:
    undo = _as_measured()
    try:
        found = {**_compiled_and_shared(at), **_eager(at)}
        return {**found, "own": _own(at), "uneven": _uneven(at)}
    finally:
        undo()


def _tokens(at: Any, rows: int) -> Tensor:
    return mlps.tokens(SPEC, at.rank, rows, torch.bfloat16)


def _compiled_and_shared(at: Any) -> dict[str, Any]:
    """Few tokens as one op, more as two ops on the same shards; then whole again."""
    module = mlp(act="situ")
    before = {name: weight.clone() for name, weight in module.named_parameters()}
    exact, whole = copy.deepcopy(module), sp_passes.resident_bytes(module)
    few = sp_passes.compile(module, config(group=at.group, tp_size=None), dynamic=True)
    many = sp_passes.trace(module, _tokens(at, 70))
    more = config(group=at.group, tp_size=None, token_range=(129, 4096))
    report = sp_passes.rewrite(many, more)
    errors = []
    for rows, run in ((3, few), (70, many), (5, few), (2, few)):
        x = _tokens(at, rows)
        errors.append(mlps.rms_error(run(x), mlps.exact(exact, x)))
    kept = sp_passes.resident_bytes(module)
    restored = sp_passes.unshard(module)
    same = all(weight.equal(before[name]) for name, weight in module.named_parameters())
    x = _tokens(at, 4)
    again = mlps.rms_error(few(x), mlps.exact(exact, x))
    found = [decided(few.report).applied, decided(report).applied]
    return {
        "errors": [*errors, again], "kept": kept / whole, "restored": restored, "same": same,
        "applied": found,
    }  # fmt: skip


def _eager(at: Any) -> dict[str, Any]:
    """As one op and as two, of the same rows: they differ in rounding only."""
    out = []
    for rows in (1, 7):
        x, module = _tokens(at, rows), mlp(act="situ")
        wanted = mlps.exact(copy.deepcopy(module), x)
        for names in (PATTERNS, PATTERNS[:2]):
            gm = sp_passes.trace(module, x)
            sp_passes.rewrite(gm, config(group=at.group, tp_size=None, patterns=names))
            assert len(fused(gm)) == (names == PATTERNS)
            out.append(mlps.rms_error(gm(x), wanted))
            sp_passes.unshard(module)
    return {"one": out[::2], "two": out[1::2]}


def _own(at: Any) -> float:
    module, x = Own(blocks.Comm.of(at)), _tokens(at, 5)
    gm = sp_passes.trace(module, x)
    sp_passes.rewrite(gm, config(group=at.group, tp_size=None, patterns=FUSIONS))
    assert len(fused(gm)) == 1
    return mlps.rms_error(gm(x), module.exact(x))


def _uneven(at: Any) -> str:
    module = mlp()
    gm = sp_passes.trace(module, _tokens(at, 3))
    sp_passes.rewrite(gm, config(group=at.group, tp_size=None))
    try:
        gm(_tokens(at, 3 + at.rank))
    except sp_passes.ShardingError as error:
        return str(error)
    return ""


@pytest.mark.multirank
def test_on_ranks(on_ranks: Any) -> None:
    for found in on_ranks(on_a_rank, 2):
        assert max(found["errors"]) < 8e-3, found
        assert found["own"] < 8e-3, found
        assert found["applied"] == [True, False]
        assert found["kept"] == 0.5 and found["same"]
        assert found["restored"] == ["gate_up_weight", "down_weight"]
        for one, two in zip(found["one"], found["two"], strict=True):
            assert one < 1.1 * two < 8e-3, found
        assert "3" in found["uneven"] and "4" in found["uneven"], found


def test_on_a_cpu_the_parts_stay() -> None:
    """With a group the device is known."""
    assert op.unmeasured("cpu", TP) == "the tensors are on cpu"
    assert op.unmeasured(None, TP) is None
