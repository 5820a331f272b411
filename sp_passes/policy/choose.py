# SPDX-License-Identifier: Apache-2.0
"""Which sites of a graph are sharded, and in which form.

Without a token range nothing is estimated and every legal site is sharded. With one, a
policy decides from the seconds of each form, summed over the ends and the middle of the range:

    latency   a site is sharded where that is faster (what a token range alone means)
    memory    every legal site is sharded, each in its fastest sharded form
    balanced  a site is sharded unless that takes more than a tenth longer

or a budget (``need_gib``): the cheapest sites by seconds added for each byte freed, until
enough is freed. A site without weights is decided by its pattern's own estimate.

Everything here is a function of the graph and the config, so the ranks decide alike; the
digest that they compare holds policy, budget, profile and each site's form.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import fx

from ..graph import params
from ..graph.values import nbytes, shape
from . import forms
from .forms import OVERLAPPED, REPLICATED, SHARDED, WEIGHT_GATHER, Linear, Work
from .hardware import Hardware, hardware

if TYPE_CHECKING:
    from ..config import SPConfig
    from ..site import Context, Site

log = logging.getLogger("sp_passes")

GIB = 1 << 30
BALANCED = 0.1
"""How much longer than replicated a site may take under ``balanced``."""


@dataclass
class Option:
    """A site that may be sharded, and what that costs.

    Attributes:
        replicated, sharded: mean seconds over the range; ``sharded`` of the best ``form``.
        freed: bytes of one rank.
        settled: another graph sharded its weights, so only the form is open.
    """

    site: Site
    work: Work
    replicated: float
    sharded: float
    form: str
    freed: int
    settled: bool = False

    @property
    def added(self) -> float:
        return self.sharded - self.replicated


POLICIES: dict[str, Callable[[Option], bool]] = {
    "latency": lambda option: option.added < 0,
    "memory": lambda option: True,
    "balanced": lambda option: option.added <= BALANCED * option.replicated,
}


def decide(ctx: Context, sites: list[Site]) -> None:
    """Skip the sites that the config's policy leaves whole; set the form of the others."""
    config = ctx.config
    if config.token_range is None:
        return
    hw = hardware(config.hardware)
    for site in sites:
        if site.reason is None and site.cost is not None:
            site.reason = _slower(site.cost, config.token_range, hw)
    options = _options(ctx, sites, hw)
    open_ = [option for option in options if not option.settled]
    chosen = _cheapest(open_, config) if config.need_gib else _by_policy(open_, config)
    for option in options:
        if option.settled or id(option) in chosen:
            option.site.form = SHARDED if option.form == OVERLAPPED else option.form
        else:
            option.site.reason = _why_whole(option, ctx, hw)


def marks(token_range: tuple[int, int]) -> tuple[int, int, int]:
    """The numbers of tokens that stand for a range."""
    low, high = token_range
    return low, (low + high) // 2, high


def quickest(works: Mapping[str, Work], config: SPConfig) -> str:
    """The name of the work that takes least over the config's token range; of equals the first."""
    tokens, ranks = config.token_range, config.shard_size
    assert tokens is not None
    hw = hardware(config.hardware)

    def taken(name: str) -> float:
        rows = (forms.seconds(works[name], m, ranks, hw) for m in marks(tokens))
        return sum(row[SHARDED] for row in rows)

    return min(works, key=taken)


def _options(ctx: Context, sites: list[Site], hw: Hardware) -> list[Option]:
    config = ctx.config
    assert config.token_range is not None
    counted: set[fx.Node] = set()
    out = []
    for site in sites:
        if site.reason is not None or not site.shards:
            continue
        work = site.work = work_of(ctx, site)
        ranks = config.shard_size
        timed = work if _decodes(config, hw) else replace(work, decodes=False)
        rows = [forms.seconds(timed, m, ranks, hw) for m in marks(config.token_range)]
        mean = {form: sum(row[form] for row in rows) / len(rows) for form in rows[0]}
        usable = [form for form in mean if form != REPLICATED and _runs(form, site, config)]
        best = min(usable, key=lambda form: mean[form])
        freed = site.bytes_saved(ranks, counted)
        settled = _is_sharded_already(site)
        out.append(Option(site, work, mean[REPLICATED], mean[best], best, freed, settled))
    return out


def _runs(form: str, site: Site, config: SPConfig) -> bool:
    """Whether the rewrite can bring the form about.

    Overlap counts only where a fused kernel is asked for: ``auto`` runs one only on what its
    table has measured.
    """
    if form == OVERLAPPED:
        return config.kernels not in ("auto", "unfused")
    return form in site.forms


def _decodes(config: SPConfig, hw: Hardware) -> bool:
    """Whether a graph of this config may hold ``ag_mlp_rs``: only one for few tokens does."""
    assert config.token_range is not None
    named = config.patterns is None or "ag_mlp_rs" in config.patterns
    few = hw.decode is not None and config.token_range[1] <= hw.decode.max_tokens
    return named and few and config.kernels == "auto"


def _by_policy(options: list[Option], config: SPConfig) -> set[int]:
    wanted = POLICIES[config.policy or "latency"]
    return {id(option) for option in options if wanted(option)}


def _cheapest(options: list[Option], config: SPConfig) -> set[int]:
    """The options that free ``need_gib`` for the least time; all of them if even they do not."""
    need = int((config.need_gib or 0) * GIB)
    order = sorted(range(len(options)), key=lambda i: (_price(options[i]), i))
    chosen = []
    freed = 0
    for i in order:
        if options[i].added >= 0 and freed >= need:
            break
        chosen.append(i)
        freed += options[i].freed
    for i in sorted(chosen, key=lambda i: (-options[i].added, i)):
        if options[i].added > 0 and freed - options[i].freed >= need:
            chosen.remove(i)
            freed -= options[i].freed
    if options and freed < need:
        log.warning(
            "need_gib=%g: all %d sites of this graph that can be sharded free %.2f GiB",
            config.need_gib,
            len(options),
            freed / GIB,
        )
    return {id(options[i]) for i in chosen}


def _price(option: Option) -> float:
    return option.added / max(1, option.freed)


def _why_whole(option: Option, ctx: Context, hw: Hardware) -> str:
    config = ctx.config
    assert config.token_range is not None
    low, high = config.token_range
    if config.need_gib:
        return f"not needed: other sites free {config.need_gib:g} GiB for less time"
    at = forms.crossover(option.work, config.shard_size, hw)
    return f"slower: replicated wins for {low} to {high} tokens: estimated crossover at {at} tokens"


def _slower(
    cost: Callable[[int, Hardware], tuple[float, float]], tokens: tuple[int, int], hw: Hardware
) -> str | None:
    times = [cost(m, hw) for m in marks(tokens)]
    before, after = (sum(t) for t in zip(*times, strict=True))
    if after < before:
        return None
    return (
        f"slower: estimated {after / 3 * 1e6:.1f} µs instead of {before / 3 * 1e6:.1f} µs for "
        f"{tokens[0]} to {tokens[1]} tokens"
    )


def _is_sharded_already(site: Site) -> bool:
    """Another graph released a weight of the site: its layout is settled for all graphs."""
    return any(params.use_elsewhere(w) == "sharded" for w in site.shards)


# --- from a site to its work ------------------------------------------------------------


def work_of(ctx: Context, site: Site) -> Work:
    """Products, bytes and collectives of a site whose ``shards`` are known."""
    linears = tuple(_linear(ctx, site, n) for n in site.nodes if n in ctx.linears)
    share = {w: layout.cut_size / layout.size for w, layout in site.shards.items()}
    matrix = next((w for w in site.shards if len(shape(w)) == 2), site.nodes[-1])
    item = matrix.meta["val"].dtype.itemsize
    return Work(
        linears=linears,
        weight_bytes=int(sum(nbytes(w) * part for w, part in share.items())),
        collectives=_collectives(site),
        row_wise=sum(one.n for one in linears[:-1]) * item if len(linears) > 1 else 0,
        tokens_whole=site.tokens_whole,
        item=item,
        gathers_weight=WEIGHT_GATHER in site.forms,
        decodes=_is_gated(linears, item),
    )


def _is_gated(linears: tuple[Linear, ...], item: int) -> bool:
    """One weight of gate and up, then one down, in 16 bits: what ``ag_mlp_rs`` takes."""
    if len(linears) != 2 or item != 2:
        return False
    first, last = linears
    return (first.cut, last.cut) == ("out", "in") and first.n == 2 * last.k


def _linear(ctx: Context, site: Site, node: fx.Node) -> Linear:
    found = ctx.linears[node]
    layout = site.shards.get(found.weight)
    share = layout.cut_size / layout.size if layout is not None else 1.0
    cut = "in" if layout is not None and layout.dim == found.in_dim else "out"
    n, k = found.out_features, found.in_features
    return Linear(int(n * share), k, cut) if cut == "out" else Linear(n, int(k * share), cut)


def _collectives(site: Site) -> tuple[tuple[str, float], ...]:
    """``(kind, bytes a token)`` of what the sharded form adds, less what merges with others."""
    kinds = [kind for kind, count in site.collectives_added.items() for _ in range(count)]
    if len(kinds) == len(site.moved):
        return tuple((kind, _row_bytes(n)) for kind, n in zip(kinds, site.moved, strict=True))
    kinds = kinds[site.shared :]
    each = max(0.0, site.row_bytes) / max(1, len(kinds))
    return tuple((kind, each) for kind in kinds)


def _row_bytes(node: fx.Node) -> int:
    last = shape(node)[-1]
    return last * node.meta["val"].dtype.itemsize if isinstance(last, int) else 0
