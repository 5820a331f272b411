# SPDX-License-Identifier: Apache-2.0
"""Whether a site pays: a first-order cost model over a range of global tokens.

Replicated, a rank reads the whole weight for its own ``M / tp`` tokens. Sharded, it reads
``1 / tp`` of it for all ``M`` tokens and moves the tokens in and the results out. With W
weight bytes, F flops a token and H bytes a token's row:

    replicated = max(W / hbm, F * M / tp / flops)
    sharded    = max(W / tp / hbm, F / tp * M / flops) + moved / link + latency * collectives

Both do the same arithmetic a rank; what differs is the bytes read against the bytes
moved. Where all ranks hold all tokens, the replicated form computes F * M. A site without
weights is decided by its pattern. Without a token range nothing is estimated and every
legal site is rewritten.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from torch import fx

from .errors import SPError
from .graph import params
from .graph.values import nbytes, product, shape

if TYPE_CHECKING:
    from .site import Context, Site


@dataclass(frozen=True)
class Hardware:
    """One accelerator and its links.

    Attributes:
        hbm: bytes a second that weights are read with.
        flops: multiply-adds a second times two, 16-bit inputs.
        link: bytes a second one rank sends to its peers.
        latency: seconds one small collective takes.
    """

    hbm: float
    flops: float
    link: float
    latency: float


PROFILES = {
    # HBM and matmul rates measured on one H200 with graph-replayed kernels; link and latency
    # are assumptions (NVLink 4 at 450 GB/s a direction, of which 80 %; 10 µs), not measured.
    "h200": Hardware(hbm=4.3e12, flops=650e12, link=360e9, latency=10e-6),
}


def hardware(name: str | None) -> Hardware:
    """The profile ``name``, or the one in the JSON file of that path; H200 for None.

    Raises:
        SPError: there is neither such a profile nor such a file, or a number is missing.
    """
    if name is None:
        return PROFILES["h200"]
    if name in PROFILES:
        return PROFILES[name]
    try:
        data = json.loads(Path(name).read_text())
        return Hardware(**{f.name: float(data[f.name]) for f in fields(Hardware)})
    except FileNotFoundError:
        known = ", ".join(PROFILES)
        raise SPError(f"hardware={name!r} is neither a profile ({known}) nor a file") from None
    except (OSError, ValueError, KeyError, TypeError) as err:
        wanted = ", ".join(f.name for f in fields(Hardware))
        raise SPError(f"{name} is no hardware profile with numbers for {wanted}: {err}") from None


@dataclass(frozen=True)
class Work:
    """What one site does, in bytes and flops.

    Attributes:
        weight_bytes: of the whole weights.
        flops: for one token, with the whole weights.
        row_bytes: one token's row in, and its row out, less what moved before.
        collectives: how many the sharded form adds, less those it removes.
        tokens_whole: the replicated form computes all tokens on every rank.
    """

    weight_bytes: int
    flops: int
    row_bytes: float
    collectives: int
    tokens_whole: bool = False


def step_seconds(work: Work, tokens: int, tp: int, hw: Hardware) -> tuple[float, float]:
    """``(replicated, sharded)`` time of one site for ``tokens`` global tokens."""
    compute = work.flops * tokens / tp / hw.flops
    before = compute * tp if work.tokens_whole else compute
    replicated = max(work.weight_bytes / hw.hbm, before)
    moved = work.row_bytes * tokens * (tp - 1) / tp
    sharded = max(work.weight_bytes / tp / hw.hbm, compute)
    return replicated, sharded + moved / hw.link + work.collectives * hw.latency


def crossover(work: Work, tp: int, hw: Hardware, limit: int = 1 << 20) -> int:
    """Fewest global tokens at which replicated is at least as fast (``limit`` if none)."""
    low, high = 1, limit
    while low < high:
        middle = (low + high) // 2
        replicated, sharded = step_seconds(work, middle, tp, hw)
        low, high = (low, middle) if replicated <= sharded else (middle + 1, high)
    return low


def decide(ctx: Context, sites: list[Site]) -> None:
    """Skip the sites that the sharded form would slow down over the config's token range.

    The range is judged by the sum of its two ends and its middle.
    """
    config = ctx.config
    if config.token_range is None:
        return
    hw = hardware(config.hardware)
    low, high = config.token_range
    for site in sites:
        if site.reason is None and site.cost is not None:
            site.reason = _slower(site.cost, config.token_range, hw)
        if site.reason is not None or not site.shards or _is_sharded_already(site):
            continue
        work = work_of(site)
        times = [step_seconds(work, m, ctx.tp_size, hw) for m in (low, (low + high) // 2, high)]
        replicated, sharded = (sum(t) for t in zip(*times, strict=True))
        if sharded >= replicated:
            site.reason = (
                f"slower: replicated wins for {low} to {high} tokens: estimated crossover at "
                f"{crossover(work, ctx.tp_size, hw)} tokens"
            )


def _slower(
    cost: Callable[[int, Hardware], tuple[float, float]], tokens: tuple[int, int], hw: Hardware
) -> str | None:
    low, high = tokens
    times = [cost(m, hw) for m in (low, (low + high) // 2, high)]
    before, after = (sum(t) for t in zip(*times, strict=True))
    if after < before:
        return None
    return (
        f"slower: estimated {after / 3 * 1e6:.1f} µs instead of {before / 3 * 1e6:.1f} µs for "
        f"{low} to {high} tokens"
    )


def _is_sharded_already(site: Site) -> bool:
    """Another graph released a weight of the site: its layout is settled for all graphs."""
    return any(params.use_elsewhere(w) == "sharded" for w in site.shards)


def work_of(site: Site) -> Work:
    """Bytes and flops of a site, from its weights and the row that goes in."""
    matrices = [w for w in site.shards if len(shape(w)) == 2]
    return Work(
        weight_bytes=sum(nbytes(w) for w in site.shards),
        flops=sum(2 * (product(shape(w)) or 0) for w in matrices),
        row_bytes=sum(_row_bytes(n) for n in site.moved) + site.row_bytes,
        collectives=sum(site.collectives_added.values())
        - sum(site.collectives_removed.values())
        - site.shared,
        tokens_whole=site.tokens_whole,
    )


def _row_bytes(node: fx.Node) -> int:
    last = shape(node)[-1]
    return last * node.meta["val"].dtype.itemsize if isinstance(last, int) else 0
