# SPDX-License-Identifier: Apache-2.0
"""Run a sharded MLP of few tokens as one op.

    x[S0] ─ ag_gemm(W1) ─ act ─ gemm_rs(W2) ─ y[S0]   ⇒   x[S0] ─ ag_mlp_rs(W1, W2) ─ y[S0]

``W1`` holds gate and up one after the other, ``act`` is SiLU(gate) · up or SiTU in any
spelling: it is read as a product of factors (``_Reader``), with casts left out, since the op
computes it in float32. The op pushes rows, multiplies and adds over the ranks in five
launches; it was faster than its parts up to 128 tokens on two H200 (``sp_passes.ops.mlp``).

So it needs a token range that ends there, and where the launches cannot run or were not
measured the parts stay as they are. Weights keep their layouts: graphs for more tokens share
them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from sp_passes.errors import ShardingError
from sp_passes.graph.moves import is_cast
from sp_passes.graph.values import args, dtype, shape, static, value
from sp_passes.ops import decode, mlp
from sp_passes.ops.decode import Activation
from sp_passes.site import Context, Site

ORDER = 31
NAME = "ag_mlp_rs"
ONLY_WITH_TOKEN_RANGE = True
MOST_NODES, MOST_FACTORS = 64, 4
aten, ops = torch.ops.aten, torch.ops.sp_passes
BESIDE = (ops.local_shard.default, ops.all_gather.default)
"""What else an MLP's activation may read: a vector's part, gathered factors of rows."""
VIEWS = (aten.slice.Tensor, aten.clone.default, aten.reshape.default, aten.cat.default)


@dataclass
class Match:
    """``between`` lies between the two ops; ``others`` are its inputs from elsewhere."""

    first: fx.Node
    last: fx.Node
    between: set[fx.Node]
    others: list[fx.Node] = field(default_factory=list)
    act: Activation = field(default_factory=Activation)


# --- find -------------------------------------------------------------------------------


def find(ctx: Context) -> Iterator[Site]:
    """Every ``gemm_rs`` of what element-wise ops make of the products of one ``ag_gemm``."""
    for node in ctx.graph.nodes:
        match = _walk(node) if node.target is ops.gemm_rs.default else None
        if match is not None:
            weights = (*args(match.first)[1], args(node)[1])
            yield Site(NAME, (node,), match, weights, needed=False)


def _walk(last: fx.Node) -> Match | None:
    """Back from ``last`` to the ops that hold a collective; None where other work lies between."""
    firsts, between, others = set[fx.Node](), set[fx.Node](), list[fx.Node]()
    todo = [args(last)[0]]
    while todo:
        node = todo.pop()
        if node in between:
            continue
        if node.target is operator.getitem and args(node)[0].target is ops.ag_gemm.default:
            firsts.add(args(node)[0])
            between.add(node)
        elif _is_local(node) and len(between) < MOST_NODES:
            between.add(node)
            todo.extend(node.all_input_nodes)
        elif node.op == "call_function" and node.target not in BESIDE:
            return None
        else:
            others.append(node)
    return Match(firsts.pop(), last, between, others) if len(firsts) == 1 else None


def _is_local(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or node.target in VIEWS or is_cast(node)


# --- check ------------------------------------------------------------------------------


def check(ctx: Context, site: Site) -> str | None:
    """The first condition that does not hold: what the op computes, then whether it pays."""
    match: Match = site.match
    site.detail = f"one op up to {mlp.DECODE_TOKENS} tokens"
    return (
        _operands(match)
        or _escape(match)
        or _activation(match)
        or _tokens(ctx)
        or _speed(ctx, match)
    )


def _operands(match: Match) -> str | None:
    """The op takes plain rows, one merged weight without bias, and a weight to sum over ranks."""
    x, weights, biases, layouts, _, *where = args(match.first)[:7]
    rows, last, bias, layout, _, *there = args(match.last)[:7]
    name = match.first.name
    if len(weights) != 1:
        return f"several weights: {name} multiplies {len(weights)}, the op one of gate and up"
    if match.first.kwargs.get("gathered"):
        return f"gathered rows: others read the rows that {name} gathers"
    if biases[0] is not None or (bias is not None and len(shape(bias)) != 2):
        found = bias if biases[0] is None else biases[0]
        return f"bias: {found.name} is added, the op adds none"
    if where != there:
        return f"other group: {match.last.name} is over {there}, {name} over {where}"
    if len(shape(x)) != 2:
        return f"rows: {x.name} has {len(shape(x))} dimensions, needs [tokens, features]"
    kinds = {dtype(n) for n in (x, weights[0], rows, last)}
    if len(kinds) > 1:
        return f"dtype: {', '.join(sorted(map(str, kinds)))} between {name} and {match.last.name}"
    try:
        mlp.cuts(value(weights[0]), value(last), layouts[0], layout)
    except ShardingError as error:
        return f"layout: {error}"
    return None


def _escape(match: Match) -> str | None:
    inside = {*match.between, match.last}
    for node in (match.first, *sorted(match.between)):
        other = next((user for user in node.users if user not in inside), None)
        if other is not None:
            return f"used elsewhere: {node.name}, between the products, by {other.name}"
    return None


def _activation(match: Match) -> str | None:
    if match.others:
        return f"activation: it reads {match.others[0].name}, the op's reads gate and up alone"
    try:
        factors = _Reader(match).read(args(match.last)[0])
    except _Unread as unread:
        return f"activation: {unread}"
    act = _named(factors)
    if act is None:
        return f"activation: that of {match.last.name} is neither silu(gate) * up nor situ"
    match.act = act
    return None


def _tokens(ctx: Context) -> str | None:
    if ctx.config.token_range is None:
        return "no token range: whether one op is faster depends on the tokens"
    most = ctx.config.token_range[1]
    if most > mlp.DECODE_TOKENS:
        return f"tokens: up to {most}; one op is faster up to {mlp.DECODE_TOKENS}"
    return None


def _speed(ctx: Context, match: Match) -> str | None:
    """Why the launches would not run, or were not measured to be faster."""
    if ctx.config.kernels != "auto":
        return f"kernels: {ctx.config.kernels!r} is asked for, the op has its own"
    x, w2 = args(match.first)[0], value(args(match.last)[1])
    ranks = args(match.first)[6]
    device = value(x).device.type if ctx.config.group is not None else None
    why = mlp.unmeasured(device, ranks)
    if why is not None:
        return f"unmeasured: {why}"
    if dtype(x) not in decode.DTYPES:
        return f"dtype: {dtype(x)}; the kernels take bfloat16 and float16"
    sizes = (shape(x)[1], shape(args(match.last)[0])[1], w2.shape[0])
    if None in map(static, sizes) or decode.tiling_for(*sizes, decode.PROGRAMS) is None:
        return f"sizes: {', '.join(map(str, sizes))} are not all multiples of 64"
    return None


# --- which activation -------------------------------------------------------------------

Factors = tuple[float, tuple[Any, ...]]
"""A number times factors: ``"gate"``, ``"up"``, or ``(function, its argument's Factors)``."""

ONE_PLUS_EXP = "1 + exp"


class _Unread(Exception):
    """A node that is no product of such factors."""


def _times(a: Factors, b: Factors) -> Factors:
    factors = (*a[1], *b[1])
    if len(factors) > MOST_FACTORS:
        raise _Unread(f"a product of {len(factors)} factors is neither silu(gate) * up nor situ")
    return a[0] * b[0], tuple(sorted(factors, key=repr))


def _inverse(a: Factors | float, node: fx.Node) -> Factors:
    """Of a number, or of ``1 + exp(z)``, which is ``sigmoid(-z)``."""
    scale, factors = (a, ()) if isinstance(a, (int, float)) else a
    if scale == 0 or any(one[0] != ONE_PLUS_EXP for one in factors):
        raise _Unread(f"{node.name} divides by what is neither a number nor 1 + exp")
    parts = [(1.0, (("sigmoid", _times((-1.0, ()), one[1])),)) for one in factors]
    result: Factors = (1.0 / scale, ())
    for part in parts:
        result = _times(result, part)
    return result


class _Reader:
    """Reads the ops between the two products as factors of gate and up."""

    def __init__(self, match: Match) -> None:
        self.products = {n for n in match.between if n.target is operator.getitem}
        self.width = static(shape(args(match.last)[0])[-1])
        self.exact = (dtype(match.last), torch.float32, torch.float64)
        self.known: dict[fx.Node, Factors] = {}

    def read(self, node: Any) -> Factors:
        """Of a node or a number."""
        if isinstance(node, (int, float)):
            return float(node), ()
        if node not in self.known:
            self.known[node] = self._read(node)
        return self.known[node]

    def _read(self, node: fx.Node) -> Factors:
        if dtype(node) not in self.exact:
            raise _Unread(f"{node.name} is rounded to {dtype(node)}")
        if is_cast(node) or node.target is aten.clone.default:
            return self.read(args(node)[0])
        if node.target is aten.slice.Tensor:
            return 1.0, (self._half(node),)
        rule = _RULES.get(node.target)
        if rule is None or node.kwargs or len(node.args) > 2:
            raise _Unread(f"{node.name} is no part of silu(gate) * up or situ")
        found: Factors = rule(self, node)
        return found

    def _half(self, node: fx.Node) -> str:
        """``gate`` for the first half of the product's features, ``up`` for the second."""
        source = args(node)[0]
        while is_cast(source) and dtype(source) in self.exact:
            source = args(source)[0]
        defaults: tuple[Any, ...] = (None, 0, 0, None, 1)
        _, dim, start, end, step = args(node) + defaults[len(node.args) :]
        total, width = static(shape(source)[-1]), self.width
        if source in self.products and dim % 2 == 1 and step == 1 and total == 2 * (width or 0):
            span = slice(start, end).indices(total)[:2]
            for name, half in (("gate", (0, width)), ("up", (width, total))):
                if span == half:
                    return name
        raise _Unread(f"{node.name} is neither the first nor the second half of the features")

    def call(self, node: fx.Node, name: str) -> Factors:
        return 1.0, ((name, self.read(args(node)[0])),)

    def add(self, node: fx.Node) -> Factors:
        """``1 + exp(z)`` only."""
        a, b = args(node)[:2]
        for one, other in ((a, b), (b, a)):
            found = self.read(other) if one == 1 and isinstance(other, fx.Node) else (0.0, ())
            if found[0] == 1.0 and len(found[1]) == 1 and found[1][0][0] == "exp":
                return 1.0, ((ONE_PLUS_EXP, found[1][0][1]),)
        raise _Unread(f"{node.name} is a sum")

    def product(self, node: fx.Node) -> Factors:
        return _times(self.read(args(node)[0]), self.read(args(node)[1]))

    def quotient(self, node: fx.Node) -> Factors:
        return _times(self.read(args(node)[0]), _inverse(self.read(args(node)[1]), node))

    def silu(self, node: fx.Node) -> Factors:
        return _times(self.read(args(node)[0]), self.call(node, "sigmoid"))


_RULES: dict[Any, Any] = {
    aten.mul.Tensor: _Reader.product,
    aten.mul.Scalar: _Reader.product,
    aten.div.Tensor: _Reader.quotient,
    aten.div.Scalar: _Reader.quotient,
    aten.add.Tensor: _Reader.add,
    aten.add.Scalar: _Reader.add,
    aten.neg.default: lambda reader, node: _times((-1.0, ()), reader.read(args(node)[0])),
    aten.reciprocal.default: lambda reader, node: _inverse(reader.read(args(node)[0]), node),
    aten.silu.default: _Reader.silu,
    aten.sigmoid.default: lambda reader, node: reader.call(node, "sigmoid"),
    aten.tanh.default: lambda reader, node: reader.call(node, "tanh"),
    aten.exp.default: lambda reader, node: reader.call(node, "exp"),
}


def _named(found: Factors) -> Activation | None:
    """The op's activation that these factors are."""
    scale, factors = found
    gated = ("sigmoid", (1.0, ("gate",)))
    rest = list(factors)
    if gated not in rest:
        return None
    rest.remove(gated)
    if sorted(rest, key=repr) == ["gate", "up"]:
        return Activation("silu") if scale == 1.0 else None
    beta, linear = _softened(rest, "gate"), _softened(rest, "up")
    plain_up = "up" in rest
    if len(rest) != 2 or beta is None or (linear is None) != plain_up:
        return None
    if not math.isclose(scale, beta * (linear or 1.0), rel_tol=1e-6):
        return None
    return Activation("situ", beta, linear)


def _softened(factors: list[Any], name: str) -> float | None:
    """``b`` of a factor ``tanh(name / b)``."""
    for one in factors:
        if one[0] == "tanh" and one[1][1] == (name,) and one[1][0] > 0:
            return 1.0 / one[1][0]
    return None


# --- rewrite ----------------------------------------------------------------------------


def rewrite(ctx: Context, site: Site) -> None:
    """One op where ``gemm_rs`` stood, with the weights and layouts of the two."""
    match: Match = site.match
    x, (w1,), _, (layout1,), ready, *where = args(match.first)[:7]
    _, w2, residual, layout2, *_ = args(match.last)
    act = match.act
    given = (x, w1, w2, layout1, layout2, act.name, act.beta, act.linear_beta, ready, *where)
    with ctx.graph.inserting_before(match.last):
        result = ctx.emit(ops.ag_mlp_rs.default, given, match.last)
        if residual is not None:
            result = ctx.emit(aten.add.Tensor, (result, residual), match.last)
    ctx.replace(match.last, result)
    ctx.erase(match.last)
