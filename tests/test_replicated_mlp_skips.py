# SPDX-License-Identifier: Apache-2.0
"""What is not rewritten, for which named reason, and that it still computes the same."""

from __future__ import annotations

from typing import Any

import mlps
import pytest
import ranks
import torch
import torch.nn.functional as F
from sp_passes.patterns import replicated_mlp
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import sp_passes
from sp_passes import SPConfig, SPError, declare_placement
from sp_passes.graph import params
from sp_passes.graph.canonical import canonicalise
from sp_passes.graph.linears import linears
from sp_passes.graph.region import number_nodes
from sp_passes.placement import propagate
from sp_passes.site import Context

H, W, TP = 8, 24, 4


class Net(nn.Module):
    """``fn(self, x)`` over some weights."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn
        made = torch.Generator().manual_seed(3)
        sizes = {
            "up": (W, H), "up2": (W, H), "down": (H, W), "down2": (H, W), "mid": (W, W),
            "odd": (10, H), "odd_down": (H, 10), "back": (W, H), "norm": (W,),
        }  # fmt: skip
        for name, size in sizes.items():
            value = torch.randn(*size, generator=made) * size[-1] ** -0.5
            setattr(self, name, nn.Parameter(value, requires_grad=False))

    def forward(self, x: Tensor) -> Any:
        return self.fn(self, x)


def lin(s: Any, x: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, s.up)), s.down)


def with_hidden(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = F.silu(F.linear(x, s.up))
    return F.linear(h, s.down), h


def with_first(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = F.linear(x, s.up)
    return F.linear(F.silu(h), s.down), h.sum(-1)


def added_hidden(s: Any, x: Tensor) -> Tensor:
    """As Inductor fuses ``h @ W.T + h``."""
    h = F.silu(F.linear(x, s.up))
    return torch.addmm(h, h, s.mid.t())


SKIPS: dict[str, tuple[Any, str]] = {
    "not divisible": (
        lambda s, x: F.linear(F.silu(F.linear(x, s.odd)), s.odd_down),
        "not divisible",
    ),
    "layernorm inside": (
        lambda s, x: F.linear(F.layer_norm(F.linear(x, s.up), (W,), s.norm), s.down),
        "not feature-local",
    ),
    "softmax inside": (
        lambda s, x: F.linear(F.linear(x, s.up).softmax(-1), s.down),
        "not feature-local",
    ),
    "cumsum inside": (
        lambda s, x: F.linear(F.linear(x, s.up).cumsum(-1), s.down),
        "not feature-local",
    ),
    "hidden is an output": (with_hidden, "used elsewhere"),
    "product is used elsewhere": (with_first, "used elsewhere"),
    "weight is used elsewhere": (lambda s, x: lin(s, x) + s.up.sum(0), "weight used elsewhere"),
    "second weight is used elsewhere": (
        lambda s, x: lin(s, x) * s.down.abs().max(),
        "weight used elsewhere",
    ),
    "weight is an output": (lambda s, x: (lin(s, x), s.up), "weight returned"),
    "transposed weight is an output": (lambda s, x: (lin(s, x), s.down.t()), "weight returned"),
    "hidden is added to the result": (added_hidden, "used elsewhere"),
    "product is added to the result": (
        lambda s, x: (lambda h: torch.addmm(h, h, s.mid.t()))(F.linear(x, s.up)),
        "used elsewhere",
    ),
    "mixed dtypes": (
        lambda s, x: F.linear(F.linear(x, s.up).double(), s.down.double()).float(),
        "*",
    ),
}


@pytest.mark.parametrize("rows", [3, 1])
@pytest.mark.parametrize("name", SKIPS)
def test_named_skip(name: str, rows: int) -> None:
    fn, category = SKIPS[name]
    module = Net(fn)
    made = torch.Generator().manual_seed(4)
    inputs = [torch.randn(rows, H, generator=made) * (r + 1) for r in range(TP)]
    gm = sp_passes.trace(module, inputs[0])
    report = sp_passes.rewrite(gm, mlps.config(TP))
    if category == "*":
        assert not report.applied
    else:
        assert [d.reason.partition(":")[0] for d in report.skipped] == [category], report
        assert category in str(report)
    assert not report.applied and report.bytes_saved_per_rank == 0
    assert "sp_passes" not in str([n.target for n in gm.graph.nodes])
    for x, y in zip(inputs, ranks.lockstep(gm, TP, [[x] for x in inputs]), strict=True):
        wanted = module(x)
        for a, b in zip(_tuple(y), _tuple(wanted), strict=True):
            torch.testing.assert_close(a, b)


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return (
        value if isinstance(value, tuple) else tuple(value) if isinstance(value, list) else (value,)
    )


def reasons(module: nn.Module, config: SPConfig, **kwargs: Any) -> list[str]:
    gm = sp_passes.trace(module, torch.randn(3, H))
    report = sp_passes.rewrite(gm, config, **kwargs)
    return [d.reason.partition(":")[0] for d in report.decisions]


def test_randomness() -> None:
    module = Net(lambda s, x: F.linear(F.dropout(F.linear(x, s.up), 0.5, training=True), s.down))
    assert reasons(module, mlps.config(TP)) == ["randomness"]


def test_integer_weights_are_no_site() -> None:
    class Int(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.randint(-3, 3, (W, H)))
            self.register_buffer("b", torch.randint(-3, 3, (H, W)))

        def forward(self, x: Tensor) -> Tensor:
            h = x.long() @ self.a.t()  # type: ignore[operator]
            return h.clamp(0) @ self.b.t()  # type: ignore[operator]

    assert reasons(Int(), mlps.config(TP)) == ["dtype"]


def test_tokens_replicated() -> None:
    assert reasons(Net(lin), mlps.config(TP), tokens="replicated") == ["tokens not sharded"]
    given = {"x": Replicate()}
    assert reasons(Net(lin), mlps.config(TP), placements=given) == ["tokens not sharded"]


def test_tokens_sharded_by_features() -> None:
    (reason,) = reasons(Net(lin), mlps.config(TP), placements={"x": Shard(1)})
    assert reason.startswith("tokens")


@pytest.mark.parametrize("weight, dim", [("up", 0), ("down", 1)])
def test_already_sharded(weight: str, dim: int) -> None:
    module = Net(lin)
    declare_placement(getattr(module, weight), Shard(dim))
    assert reasons(module, mlps.config(TP)) == ["already sharded"]
    given = {weight: Shard(dim)}
    assert reasons(Net(lin), mlps.config(TP), placements=given) == ["already sharded"]


def test_one_rank() -> None:
    (reason,) = reasons(Net(lin), mlps.config(1))
    assert "tp_size" in reason or "one rank" in reason


def test_two_layouts_of_one_weight() -> None:
    """Merged and interleaved readings of one gate_up: both sites stay, the weight whole."""
    spec = mlps.Spec(hidden=H, width=W)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = mlps.MLP(spec), mlps.MLP(mlps.with_(spec, split="strided"))
            self.b.gate_up_weight = self.a.gate_up_weight

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    assert reasons(Two(), mlps.config(TP)) == ["two layouts", "two layouts"]


def test_one_conflict_leaves_the_rest_of_the_graph_alone() -> None:
    """The site whose weight leaks is skipped, the other is rewritten."""

    def both(s: Any, x: Tensor) -> Tensor:
        other = F.linear(F.silu(F.linear(x, s.up2)), s.down2)
        return lin(s, x) + other + s.up.sum(0)

    assert reasons(Net(both), mlps.config(TP)) == [
        "",
        "weight used elsewhere",
    ]


def test_a_weight_of_two_sites_with_one_layout_is_sharded_once() -> None:
    """Bytes are those of the three distinct weights, however many sites use them."""

    def both(s: Any, x: Tensor) -> Tensor:
        shared = lin(s, x)
        return shared + F.linear(F.silu(F.linear(x + 1, s.up)), s.down2)

    module = Net(both)
    x = [torch.randn(3, H) * (r + 1) for r in range(TP)]
    gm = sp_passes.trace(module, x[0])
    report = sp_passes.rewrite(gm, mlps.config(TP))
    assert len(report.applied) == 2, report
    assert report.bytes_saved_per_rank == 3 * 4 * W * H * (TP - 1) // TP
    for a, b in zip(x, ranks.lockstep(gm, TP, [[v] for v in x]), strict=True):
        torch.testing.assert_close(b, module(a))


def test_the_same_mlp_twice_counts_once() -> None:
    module = Net(lambda s, x: lin(s, lin(s, x) + 1))
    report = sp_passes.rewrite(sp_passes.trace(module, torch.randn(3, H)), mlps.config(TP))
    assert len(report.applied) == 2, report
    assert report.bytes_saved_per_rank == 2 * 4 * W * H * (TP - 1) // TP
    assert report.by_pattern() == {"replicated_mlp": report.bytes_saved_per_rank}


def test_three_linears_in_a_row() -> None:
    """The middle one belongs to one site only."""
    module = Net(lambda s, x: F.linear(F.relu(F.linear(F.relu(F.linear(x, s.up)), s.mid)), s.down))
    inputs = [torch.randn(3, H) * (r + 1) for r in range(TP)]
    gm = sp_passes.trace(module, inputs[0])
    report = sp_passes.rewrite(gm, mlps.config(TP))
    assert len(report.applied) == 1
    assert [d.reason.partition(":")[0] for d in report.skipped] == ["overlap"], report
    for a, b in zip(inputs, ranks.lockstep(gm, TP, [[v] for v in inputs]), strict=True):
        torch.testing.assert_close(b, module(a))


def test_a_residual_stream_makes_no_bogus_sites() -> None:
    """Three layers with norms: three sites, none of them across layers, no skips."""

    class Layer(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(H)
            self.mlp = mlps.MLP(mlps.Spec(hidden=H, width=W), seed)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(self.norm(x))

    model = nn.Sequential(*(Layer(i) for i in range(3)))
    report = sp_passes.rewrite(sp_passes.trace(model, torch.randn(3, H)), mlps.config(TP))
    assert [(d.applied, d.name) for d in report.decisions] == [(True, f"{i}.mlp") for i in range(3)]


def test_a_residual_stream_without_norms_makes_no_bogus_sites() -> None:
    class Layer(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.mlp = mlps.MLP(mlps.Spec(hidden=H, width=W), seed)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(x)

    model = nn.Sequential(*(Layer(i) for i in range(3)))
    report = sp_passes.rewrite(sp_passes.trace(model, torch.randn(3, H)), mlps.config(TP))
    assert [(d.applied, d.name) for d in report.decisions] == [(True, f"{i}.mlp") for i in range(3)]


# --- what is added, and other inputs ------------------------------------------------------

ADDED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "partial rows": (lambda s, x, r: r, {"r": Partial()}, "addend"),
    "rows by features": (lambda s, x, r: r, {"r": Shard(1)}, "addend"),
    "rows of all ranks": (lambda s, x, r: r, {"r": Replicate()}, "addend"),
    "unknown rows": (lambda s, x, r: x.flip(0), {}, "addend"),
    "one row of own tokens": (lambda s, x, r: r[:1], {"r": Shard(0)}, "addend"),
    "own rows": (lambda s, x, r: r, {"r": Shard(0)}, ""),
    "own numbers": (lambda s, x, r: r[:, :1], {"r": Shard(0)}, ""),
    "a constant": (lambda s, x, r: torch.full_like(x, 2), {}, ""),
    "one row of all ranks": (lambda s, x, r: s.down[:, :1].t() * 0 + 1, {}, "weight used"),
    "the same row of all ranks": (lambda s, x, r: s.down2.sum(1)[None], {}, ""),
    "that row, expanded": (lambda s, x, r: s.down2.sum(1).expand(len(x), H), {}, ""),
    "partial bias": (lambda s, x, r: r[0], {"r": Partial()}, "bias"),
    "bias by features": (lambda s, x, r: r.sum(0), {"r": Shard(1)}, "bias"),
    "bias of own rows": (lambda s, x, r: r.sum(0), {"r": Shard(0)}, "bias"),
    "bias of all ranks": (lambda s, x, r: r.sum(0), {"r": Replicate()}, ""),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_the_second_linear_adds(name: str) -> None:
    fn, placements, category = ADDED[name]

    class Adding(Net):
        def forward(self, x: Tensor, r: Tensor) -> Tensor:  # type: ignore[override]
            hidden = F.silu(F.linear(x, self.up))
            return torch.addmm(self.fn(self, x, r), hidden, self.down.t())

    module = Adding(fn)
    made = torch.Generator().manual_seed(5)
    own = placements.get("r") == Shard(0)
    r = [torch.randn(3, H, generator=made) for _ in range(TP)]
    inputs = [[torch.randn(3, H, generator=made), r[i if own else 0]] for i in range(TP)]
    gm = sp_passes.trace(module, *inputs[0])
    report = sp_passes.rewrite(gm, mlps.config(TP), placements=placements)
    assert [d.reason.partition(":")[0].startswith(category or "-") for d in report.skipped] == (
        [True] if category else []
    ), report
    assert len(report.applied) == (not category), report
    for given, y in zip(inputs, ranks.lockstep(gm, TP, inputs), strict=True):
        torch.testing.assert_close(y, module(*given))


def test_a_row_input_of_fewer_rows() -> None:
    """``[1, s, 1]`` of own tokens on ``[m, s, k]`` broadcasts over rows: gathered, it cannot."""

    class Rows(Net):
        def forward(self, x: Tensor, r: Tensor) -> Tensor:  # type: ignore[override]
            return F.linear(F.silu(F.linear(x, self.up)) * r, self.down)

    for size in ((1, 2, 1), (1, 1, 1), (1, 2, W)):
        gm = sp_passes.trace(Rows(None), torch.randn(3, 2, H), torch.randn(size))
        report = sp_passes.rewrite(gm, mlps.config(TP))
        assert [d.reason.partition(":")[0] for d in report.decisions] == ["not feature-local"]
    for size in ((3, 2, 1), (3, 1, 1)):
        inputs = [[torch.randn(3, 2, H) * (k + 1), torch.randn(size)] for k in range(TP)]
        gm = sp_passes.trace(Rows(None), *inputs[0])
        report = sp_passes.rewrite(gm, mlps.config(TP))
        assert len(report.applied) == 1, report
        for given, y in zip(inputs, ranks.lockstep(gm, TP, inputs), strict=True):
            torch.testing.assert_close(y, Rows(None)(*given))


def test_a_value_of_the_region_that_is_a_row_input() -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__(None)
            self.one = nn.Parameter(torch.randn(1, H))
            self.wide = nn.Parameter(torch.randn(H, W + 1))

        def forward(self, x: Tensor) -> Tensor:
            factor = F.linear(x, self.one)
            return F.linear(torch.cat([F.linear(x, self.up) * factor, factor], -1), self.wide)

    assert reasons(Scaled(), mlps.config(5)) == ["used elsewhere"]


# --- what must be the same on every rank --------------------------------------------------


def proven(module: nn.Module, *inputs: Tensor) -> list[str]:
    """What the sites of ``module`` take for replicated without sharding it."""
    graph = sp_passes.trace(module, *inputs).graph
    config = SPConfig(tp_size=TP, patterns=("replicated_mlp",))
    canonicalise(graph)
    number_nodes(graph)
    tokens = [n for n in graph.nodes if n.op == "placeholder" and not params.is_weight(n)]
    states = propagate(graph, TP, dict.fromkeys(tokens, Shard(0)))
    ctx = Context(graph, config, states, linears(graph))
    sites = list(replicated_mlp.find(ctx))
    assert [site.reason or replicated_mlp.check(ctx, site) for site in sites] == [None]
    return [params.fqn(w) for site in sites for w in site.proven]


class Others(nn.Module):
    """A vector, a number, a computed vector and biases beside the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, W), nn.Linear(W, H)
        self.scale, self.shift = nn.Parameter(torch.randn(W)), nn.Parameter(torch.randn(W))
        self.row = nn.Parameter(torch.randn(H))
        self.register_buffer("number", torch.tensor(1.5))
        self.unused = nn.Parameter(torch.randn(W))

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.up(x)) * self.scale + self.shift.view(2, -1).exp().flatten()
        h = h * (x * self.row).mean(-1, keepdim=True)
        return self.down(h / self.number)


def test_vectors_scalars_and_the_bias_are_to_be_proven() -> None:
    """Not the row input's weight: each rank scales its own rows, as before."""
    assert sorted(proven(Others(), torch.randn(3, H))) == [
        "down.bias",
        "number",
        "scale",
        "shift",
    ]


def test_nothing_is_to_be_proven_of_weights_alone() -> None:
    assert proven(Net(lin), torch.randn(3, H)) == []


def test_a_sharded_bias_that_also_scales_is_proven_once() -> None:
    """It is in ``shards``, where its fingerprint is compared."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(H, W), nn.Linear(W, H, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x) * self.up.bias)

    assert proven(Tied(), torch.randn(3, H)) == []


# --- strict -------------------------------------------------------------------------------


def test_strict_turns_a_skip_into_an_error() -> None:
    gm = sp_passes.trace(Net(with_hidden), torch.randn(3, H))
    with pytest.raises(SPError, match=r"strict: replicated_mlp at .*used elsewhere"):
        sp_passes.rewrite(gm, mlps.config(TP, strict=True))


def test_strict_turns_no_site_into_an_error() -> None:
    gm = sp_passes.trace(nn.Linear(H, H), torch.randn(3, H))
    with pytest.raises(SPError, match="strict: no site"):
        sp_passes.rewrite(gm, mlps.config(TP, strict=True))


def test_no_site_is_a_visible_line_that_says_what_came_closest() -> None:
    report = sp_passes.rewrite(sp_passes.trace(nn.Linear(H, H), torch.randn(3, H)), mlps.config(TP))
    assert "no site found; 1 linear" in str(report)
    report = sp_passes.rewrite(sp_passes.trace(nn.ReLU(), torch.randn(3, H)), mlps.config(TP))
    assert "no site found; no " in str(report)


def test_cost_model_skips_with_its_crossover() -> None:
    config = mlps.config(TP, token_range=(1 << 19, 1 << 20))
    gm = sp_passes.trace(Net(lin), torch.randn(3, H))
    (decision,) = sp_passes.rewrite(gm, config).decisions
    assert decision.reason.startswith("slower: replicated wins"), decision
    assert "crossover" in decision.reason


def test_a_linear_is_free_where_the_mlp_that_claims_it_is_skipped() -> None:
    """up and mid are an MLP, but for another use of up; then mid and down are one."""
    gm = sp_passes.trace(Net(lambda s, x: (lin3(s, x), s.up.sum())), torch.empty(3, H))
    report = sp_passes.rewrite(gm, SPConfig(tp_size=TP, patterns=("replicated_mlp",)))
    assert [d.weights for d in report.applied] == [("mid", "down")], report
    assert [d.reason for d in report.skipped] == ["weight used elsewhere: up by sum_1"], report


def lin3(s: Any, x: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(F.silu(F.linear(x, s.up)), s.mid)), s.down)
