# SPDX-License-Identifier: Apache-2.0
"""The random calls of ``soak``: how each is drawn, run and referenced."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..layout import ShardLayout
from ..ops.decode import Activation
from ..ops.kernels import _TABLE, Call
from ..ops.mlp import DECODE_TOKENS, activate
from .devices import Place
from .timing import relative_error

# Of 16-bit results against float64; float32 products on GPUs are exact float32 here.
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
OPS = ("ag_gemm", "gemm_rs", "gemm_gather", "mlp", "all_gather", "reduce_scatter")
WIDTHS = (64, 512, 768, 1536, 3648, 7168)
EXACT = ("all_gather",)
MOST_ELEMENTS = 1 << 25
REPLAYS = 3


@dataclass(frozen=True)
class Drawn:
    """One call. ``rows`` are one rank's, ``n`` and ``k`` features of one rank's weight."""

    number: int
    op: str
    kernel: str
    rows: int
    n: int
    k: int
    dtype: torch.dtype
    bias: bool
    graph: bool
    sleepers: tuple[int, ...]

    def text(self, seed: int) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        graph = "replayed" if self.graph else "eager"
        return (
            f"{self.op} by {self.kernel}, {self.rows} rows a rank, n {self.n}, k {self.k}, "
            f"{dtype}, {graph}: --seed {seed} --first {self.number}"
        )


def kernels_of(op: str) -> list[str]:
    """Names to draw from; torch's own fused ops are not this project's to check."""
    if op == "mlp":
        return ["unfused", "one_shot"]
    return sorted(name for kind, name in _TABLE if kind == op and name != "torch")


def draw(place: Place, seed: int, number: int, small: bool) -> Drawn:
    """Call ``number``; the same on every rank, whatever kernels the ranks can run."""
    dice = random.Random(f"{seed}:{number}")
    op = dice.choice([name for name in OPS if kernels_of(name)])
    widths = WIDTHS[:2] if small else WIDTHS
    n, k = dice.choice(widths), dice.choice(widths)
    most = (DECODE_TOKENS if op == "mlp" else 64 if small else 4096) // place.size
    rows = dice.choice((1, 2, dice.randint(1, 64), dice.randint(1, max(most, 1)), most))
    rows = max(1, min(rows, most, MOST_ELEMENTS // (place.size * max(n, k))))
    dtype = dice.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    sleepers = tuple(r for r in range(place.size) if dice.random() < 0.05)
    bias, graph = dice.random() < 0.5, dice.random() < 0.3 and place.cuda
    found = Drawn(number, op, "", rows, n, k, dtype, bias, graph, sleepers)
    usable = [name for name in kernels_of(op) if supported(place, found, name)]
    return replace(found, kernel=dice.choice(usable))


def supported(place: Place, drawn: Drawn, kernel: str) -> bool:
    size = place.size
    if drawn.op == "mlp":
        return kernel == "unfused" or (place.cuda and drawn.dtype != torch.float32)
    tokens = drawn.rows if drawn.op == "gemm_gather" else drawn.rows * size
    alone = drawn.op in ("all_gather", "reduce_scatter")
    k = 0 if alone else drawn.k
    call = Call(drawn.op, place.device.type, drawn.dtype, drawn.n, k, tokens, size)
    return _TABLE[drawn.op, kernel].why_not(call) is None


# --- one call ---------------------------------------------------------------------------


@dataclass
class Case:
    """What a call computes on this rank, and what it should.

    ``inputs`` are this rank's tensors, which :meth:`fill` may change between replays.
    """

    place: Place
    drawn: Drawn
    seed: int

    def noise(self, part: int, owner: int, *shape: int) -> Tensor:
        """Unit noise that every rank can draw for every ``owner``; ``part`` tells tensors apart."""
        number = hash((self.seed, self.drawn.number, part, owner)) & ((1 << 62) - 1)
        generator = torch.Generator(self.place.device).manual_seed(number)
        made = torch.randn(shape, generator=generator, device=self.place.device)
        return made.to(self.drawn.dtype)

    def weight(self, part: int, owner: int, *shape: int) -> Tensor:
        return (self.noise(part, owner, *shape).float() * shape[-1] ** -0.5).to(self.drawn.dtype)

    def xs(self, rows: int, width: int, turn: int) -> list[Tensor]:
        return [self.noise(100 + turn, r, rows, width) for r in range(self.place.size)]


Made = tuple[Tensor, Callable[[Tensor], Tensor], Callable[[int], tuple[Tensor, Tensor]]]
"""Of a case: the static input, the call, and for a turn (new input, what should come of it)."""


def _ag_gemm(case: Case) -> Made:
    d, place = case.drawn, case.place
    weight = case.weight(0, place.rank, d.n, d.k)
    bias = case.noise(1, place.rank, d.n) if d.bias else None
    run = _TABLE["ag_gemm", d.kernel].run

    def call(x: Tensor) -> Tensor:
        out: Tensor = run(x, [weight], [bias], [True], place.pg, place.size)[1]
        return out

    def turn(at: int) -> tuple[Tensor, Tensor]:
        xs = case.xs(d.rows, d.k, at)
        wanted = torch.cat(xs).double() @ weight.double().T
        return xs[place.rank], wanted if bias is None else wanted + bias.double()

    return turn(0)[0], call, turn


def _gemm_rs(case: Case) -> Made:
    d, place = case.drawn, case.place
    weights = [case.weight(0, r, d.n, d.k) for r in range(place.size)]
    bias = case.noise(1, 0, d.n) if d.bias else None
    run = _TABLE["gemm_rs", d.kernel].run
    mine = slice(place.rank * d.rows, (place.rank + 1) * d.rows)

    def call(x: Tensor) -> Tensor:
        out: Tensor = run(x, weights[place.rank], bias, True, place.pg, place.size)
        return out

    def turn(at: int) -> tuple[Tensor, Tensor]:
        xs = case.xs(place.size * d.rows, d.k, at)
        pairs = zip(xs, weights, strict=True)
        wanted = sum((x[mine].double() @ w.double().T for x, w in pairs), torch.zeros(()))
        return xs[place.rank], wanted if bias is None else wanted + bias.double()

    return turn(0)[0], call, turn


def _gemm_gather(case: Case) -> Made:
    d, place = case.drawn, case.place
    segments = (2 * place.size * 8, d.n * place.size)
    weight = case.weight(0, 0, sum(segments), d.k)
    shard = ShardLayout(0, segments).take(weight, place.rank, place.size).contiguous()
    run = _TABLE["gemm_gather", d.kernel].run

    def call(x: Tensor) -> Tensor:
        out: Tensor = run(x, shard, None, True, segments, place.pg, place.size)
        return out

    def turn(at: int) -> tuple[Tensor, Tensor]:
        x = case.noise(100 + at, 0, d.rows, d.k)
        return x, x.double() @ weight.double().T

    return turn(0)[0], call, turn


def _mlp(case: Case) -> Made:
    d, place = case.drawn, case.place
    inner = max(64, d.n // 64 * 64)
    hidden = max(64, d.k // 64 * 64)
    w1s = [case.weight(0, r, 2 * inner, hidden) for r in range(place.size)]
    w2s = [case.weight(1, r, hidden, inner) for r in range(place.size)]
    act = Activation("situ", 4.0, 25.0) if d.bias else Activation("silu")

    def call(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.sp_passes.ag_mlp_rs(
            x, w1s[place.rank], w2s[place.rank], "L0", "L1", act.name, act.beta, act.linear_beta,
            None, place.pg.group_name, place.size, d.kernel,
        )  # fmt: skip
        return out

    def turn(at: int) -> tuple[Tensor, Tensor]:
        xs = case.xs(d.rows, hidden, at)
        x = xs[place.rank].double()
        parts = (
            activate(x @ a.double().T, act) @ b.double().T for a, b in zip(w1s, w2s, strict=True)
        )
        return xs[place.rank], sum(parts, torch.zeros(()))

    return turn(0)[0], call, turn


def _all_gather(case: Case) -> Made:
    d, place = case.drawn, case.place
    run = _TABLE["all_gather", d.kernel].run

    def turn(at: int) -> tuple[Tensor, Tensor]:
        xs = case.xs(d.rows, d.n, at)
        return xs[place.rank], torch.cat(xs)

    return turn(0)[0], lambda x: run(x, place.pg, place.size), turn


def _reduce_scatter(case: Case) -> Made:
    d, place = case.drawn, case.place
    run = _TABLE["reduce_scatter", d.kernel].run
    mine = slice(place.rank * d.rows, (place.rank + 1) * d.rows)

    def turn(at: int) -> tuple[Tensor, Tensor]:
        xs = case.xs(place.size * d.rows, d.n, at)
        return xs[place.rank], sum((x[mine].double() for x in xs), torch.zeros(()))

    return turn(0)[0], lambda x: run(x, place.pg, place.size), turn


_MAKERS: dict[str, Callable[[Case], Made]] = {
    "ag_gemm": _ag_gemm,
    "gemm_rs": _gemm_rs,
    "gemm_gather": _gemm_gather,
    "mlp": _mlp,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}


def run_one(place: Place, drawn: Drawn, seed: int) -> list[float]:
    """Relative errors of a call, or of each replay of it."""
    x, call, turn = _MAKERS[drawn.op](Case(place, drawn, seed))
    if place.rank in drawn.sleepers:
        time.sleep(random.Random(f"{seed}:{drawn.number}:{place.rank}").random() * 0.05)
    if not drawn.graph:
        return [_error(drawn, call(x), turn(0)[1])]
    call(x)  # makes what cannot be made inside a capture
    place.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call(x)
    errors = []
    for at in range(REPLAYS):
        new, wanted = turn(at)
        x.copy_(new)
        graph.replay()
        errors.append(_error(drawn, out, wanted))
    return errors


def _error(drawn: Drawn, out: Tensor, wanted: Tensor) -> float:
    if drawn.op in EXACT:
        return 0.0 if out.equal(wanted) else float("inf")
    return relative_error(out, wanted)
