# SPDX-License-Identifier: Apache-2.0
"""What a site costs in each form, and where one form overtakes another.

replicated     every rank reads the whole weight for its own tokens / tp_size
sharded        collectives move the activations, one after the other with the products; an MLP of
               few tokens may run as ``ag_mlp_rs``, whose launches move them more quickly
overlapped     the same, collectives hidden behind the products by the copy engine
weight_gather  the weight stays sharded and is gathered before use; the gather does not
               depend on activations, so it is prefetched behind the step before it: what
               the site's own products cannot hide is left over
pure_tp        tokens whole on every rank: products on a part of the weight, one all-reduce
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from . import costs
from .hardware import Hardware

REPLICATED, SHARDED, OVERLAPPED = "replicated", "sharded", "overlapped"
WEIGHT_GATHER, PURE_TP = "weight_gather", "pure_tp"
CHOICES = (REPLICATED, SHARDED, OVERLAPPED, WEIGHT_GATHER)
"""What the pass can choose from; pure tensor parallelism is another model."""

LIMIT = 1 << 20


@dataclass(frozen=True)
class Linear:
    """One product of a site, with its whole sizes.

    Attributes:
        n, k: output and input features.
        cut: ``out`` or ``in``: which of the two the sharded form divides by tp_size.
    """

    n: int
    k: int
    cut: str = "out"

    def part(self, ranks: int) -> tuple[int, int]:
        """``(n, k)`` of one rank's shard."""
        return (self.n // ranks, self.k) if self.cut == "out" else (self.n, self.k // ranks)


@dataclass(frozen=True)
class Work:
    """What one site does.

    Attributes:
        linears: its products, in order.
        weight_bytes: of the whole weights.
        collectives: ``(kind, bytes of one token's row)`` that the sharded form adds.
        row_wise: bytes that the ops between the products read and write for one token.
        tokens_whole: the replicated form computes all tokens on every rank.
        item: bytes of an element.
        gathers_weight: the weight_gather form exists.
        decodes: gate, up and down, which for few tokens run as one op where a machine has it.
    """

    linears: tuple[Linear, ...]
    weight_bytes: int
    collectives: tuple[tuple[str, float], ...]
    row_wise: int = 0
    tokens_whole: bool = False
    item: int = costs.ITEM
    gathers_weight: bool = False
    decodes: bool = False

    @property
    def overlaps(self) -> bool:
        """Whether the products stand between one gather and one reduce-scatter."""
        kinds = [kind for kind, _ in self.collectives]
        return kinds == ["all_gather", "reduce_scatter"] and self.linears[-1].cut == "in"


def mlp(hidden: int, width: int, gated: bool = True, item: int = costs.ITEM) -> Work:
    """An MLP with gate and up merged (``gated``): ``[tokens, hidden]`` in and out."""
    first = 2 * width if gated else width
    row = hidden * item
    return Work(
        linears=(Linear(first, hidden, "out"), Linear(hidden, width, "in")),
        weight_bytes=item * (first + width) * hidden,
        collectives=(("all_gather", row), ("reduce_scatter", row)),
        row_wise=(first + width) * item,
        item=item,
        gathers_weight=True,
        decodes=gated,
    )


def seconds(work: Work, tokens: int, ranks: int, hw: Hardware) -> dict[str, float]:
    """Seconds of one site for ``tokens`` global tokens, in each form that it has."""
    out = {
        REPLICATED: _whole(work, tokens, ranks, hw),
        SHARDED: _sharded(work, tokens, ranks, hw),
    }
    if work.overlaps:
        out[OVERLAPPED] = _overlapped(work, tokens, ranks, hw)
    if work.gathers_weight:
        gather = costs.collective("all_gather", work.weight_bytes, ranks, hw)
        out[WEIGHT_GATHER] = max(gather, out[REPLICATED]) + _in_order(work, hw)
    return out


def _in_order(work: Work, hw: Hardware) -> float:
    """Putting gathered weights into logical order: read once, written once."""
    return len(work.linears) * hw.launch + 2 * work.weight_bytes / hw.hbm


def pure_tp(work: Work, tokens: int, ranks: int, hw: Hardware) -> float:
    """Seconds of the site in a model whose tokens are whole on every rank.

    An MLP is tensor-parallel and ends in an all-reduce; a lone projection is computed whole by
    every rank, as served models do.
    """
    last = work.linears[-1]
    if len(work.linears) > 1 and last.cut == "in":
        size = tokens * last.n * work.item
        reduced = costs.collective("all_reduce", size, ranks, hw)
        return _parts(work, tokens, ranks, hw) + reduced
    return sum(costs.product(tokens, one.n, one.k, hw, work.item) for one in work.linears)


def _whole(work: Work, tokens: int, ranks: int, hw: Hardware) -> float:
    rows = tokens if work.tokens_whole else -(-tokens // ranks)
    products = sum(costs.product(rows, one.n, one.k, hw, work.item) for one in work.linears)
    return products + _between(work, rows, hw)


def _parts(work: Work, tokens: int, ranks: int, hw: Hardware) -> float:
    """One rank's part of the weights for all tokens."""
    parts = (one.part(ranks) for one in work.linears)
    products = sum(costs.product(tokens, n, k, hw, work.item) for n, k in parts)
    return products + _between(work, tokens / ranks, hw)


def _between(work: Work, rows: float, hw: Hardware) -> float:
    return hw.launch + work.row_wise * rows / hw.hbm if work.row_wise else 0.0


def _sharded(work: Work, tokens: int, ranks: int, hw: Hardware) -> float:
    moved = sum(costs.collective(kind, row * tokens, ranks, hw) for kind, row in work.collectives)
    if work.decodes and hw.decode is not None and hw.decode.serves(tokens, ranks):
        rows = (row for _, row in work.collectives)
        moved = min(moved, sum(costs.exchanged(row * tokens, ranks, hw.decode) for row in rows))
    return _parts(work, tokens, ranks, hw) + moved + _reordered(work, tokens, ranks, hw)


def _reordered(work: Work, tokens: int, ranks: int, hw: Hardware) -> float:
    """Features that came from, or go to, every rank are copied once into their order.

    Bytes alone: with a launch as of a product for each, a step of 8 layers and few tokens
    (bench/NOTES.md, section 9) would come out 4 % too slow, not 1 %.
    """
    rows = tokens if work.tokens_whole else tokens / ranks
    kinds = ("all_to_all", "all_gather") if work.tokens_whole else ("all_to_all",)
    return sum(2 * row * rows / hw.hbm for kind, row in work.collectives if kind in kinds)


def _overlapped(work: Work, tokens: int, ranks: int, hw: Hardware) -> float:
    *firsts, last = work.linears
    widths = [one.part(ranks)[0] for one in firsts]
    gathered = costs.ag_gemm(tokens, widths, firsts[0].k, ranks, hw, work.item)
    n, k = last.part(ranks)
    scattered = costs.gemm_rs(tokens, n, k, ranks, hw, work.item)
    return gathered + _between(work, tokens / ranks, hw) + scattered


# --- over tokens ------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """Global tokens ``low`` to ``high`` in which ``form`` is the fastest."""

    low: int
    high: int
    form: str


Times = Callable[[int], dict[str, float]]


def ranges(times: Times, low: int, high: int) -> list[Range]:
    """The fastest form for every number of tokens from ``low`` to ``high``.

    Looks at each power of two and at sixteen numbers between two, then for the exact place
    of each change.
    """
    marks = grid(low, high)
    out: list[Range] = []
    for mark in marks:
        best = fastest(times(mark))
        if out and out[-1].form == best:
            out[-1] = Range(out[-1].low, mark, best)
            continue
        start = mark
        if out:
            start = _first(partial(_wins, times, best), out[-1].high, mark)
            out[-1] = Range(out[-1].low, start - 1, out[-1].form)
        out.append(Range(start, mark, best))
    return out


def _wins(times: Times, form: str, tokens: int) -> bool:
    return fastest(times(tokens)) == form


def grid(low: int, high: int, steps: int = 16) -> list[int]:
    """Numbers from ``low`` to ``high``, about ``steps`` to each doubling, both ends included."""
    out, at = [low], float(low)
    while out[-1] < high:
        at = max(at * 2 ** (1 / steps), out[-1] + 1)
        out.append(min(high, round(at)))
    return out


def fastest(times: dict[str, float]) -> str:
    """The quickest; of equal ones the first."""
    return min(times, key=lambda form: times[form])


def crossover(work: Work, ranks: int, hw: Hardware, forms: Sequence[str] = (SHARDED,)) -> int:
    """Fewest global tokens at which replicated is at least as fast as each of ``forms``.

    ``LIMIT`` if it never is.
    """

    def lost(tokens: int) -> bool:
        times = seconds(work, tokens, ranks, hw)
        return all(times[REPLICATED] <= times[form] for form in forms if form in times)

    last = 0
    for mark in grid(1, LIMIT):
        if lost(mark):
            return _first(lost, last, mark)
        last = mark
    return LIMIT


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Smallest number above ``low`` for which ``holds``, if it does from there to ``high``."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
