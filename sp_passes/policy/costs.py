# SPDX-License-Identifier: Apache-2.0
"""Seconds of the parts that a step is made of, from a hardware profile.

    product      launch + max(bytes / hbm, ramp + flop / rate)
    collective   the quicker of the one-shot path and the measured table; across nodes the
                 network's share comes on top
    overlapped   a product for each rank's chunk, while the copy engine moves the others: the
                 longer of all products, and all transfers with the one product that they
                 cannot hide; narrow products are cut into pieces, so that this one is short

Nothing here is fitted to a row of a published table: the profile is all that goes in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from .hardware import Decode, Hardware, Points

RAMP_ROWS, RAMP_K = 256, 7168
"""What a profile's ramp was measured at; smaller tiles and shorter ones lose less."""

ITEM = 2
"""Bytes of an activation; the profiles' rates are of 16-bit inputs."""


def product(rows: float, n: int, k: int, hw: Hardware, item: int = ITEM, copies: int = 1) -> float:
    """Seconds of ``[rows, k] x [k, n]``; ``copies`` products of its size back to back."""
    if rows <= 0:
        return 0.0
    read = item * (n * k + rows * (n + k)) / hw.hbm
    flop = 2 * rows * n * k
    first = hw.ramp * min(1.0, rows / RAMP_ROWS) * k / RAMP_K
    compute = first + flop / rate(flop, hw)
    return copies * (hw.launch + max(read, compute * item / ITEM))


def rate(flop: float, hw: Hardware) -> float:
    """Flop a second of one product of ``flop``."""
    return between(hw.rates, flop, log_value=False)


def between(points: Points, at: float, log_value: bool = True) -> float:
    """Value at ``at``: between two points along a straight line over logarithms."""
    first, last = points[0], points[-1]
    if at <= first[0]:
        return first[1]
    if at >= last[0]:
        return last[1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if at <= x1:
            part = math.log(at / x0) / math.log(x1 / x0)
            return y0 * (y1 / y0) ** part if log_value else y0 + (y1 - y0) * part
    raise AssertionError("unreachable: at lies between the first and the last point")


def collective(kind: str, size: float, ranks: int, hw: Hardware) -> float:
    """Seconds of one collective.

    Args:
        kind: ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``all_reduce``.
        size: bytes of the whole tensor: gathered, before it is scattered, reduced.
        ranks: of the group.
    """
    if ranks < 2 or size <= 0:
        return 0.0
    local = min(ranks, hw.ranks_per_node)
    here = _inside(kind, size, local, hw) if local > 1 else 0.0
    nodes = -(-ranks // hw.ranks_per_node)
    if nodes == 1:
        return here
    trips = 2 if kind == "all_reduce" else 1
    share = size / local * (nodes - 1) / nodes
    return here + trips * (hw.network.latency + share / hw.network.bandwidth)


def _inside(kind: str, size: float, ranks: int, hw: Hardware) -> float:
    """Within one node."""
    others = (ranks - 1) / ranks
    ways = []
    if kind == "all_reduce":
        ways.append(_table(kind, 2 * size * others, hw))
        ways.append(
            _inside("reduce_scatter", size, ranks, hw) + _inside("all_gather", size, ranks, hw)
        )
    else:
        measured = "reduce_scatter" if kind == "reduce_scatter" else "all_gather"
        ways.append(_table(measured, size * others, hw))
    shot = hw.one_shot
    if shot is not None and size <= shot.max_bytes:
        arriving = size * (ranks - 1) if kind == "all_reduce" else size * others
        ways.append(shot.latency + arriving / shot.bandwidth)
    return min(ways)


def _table(kind: str, size: float, hw: Hardware) -> float:
    """From the measured table; beyond its end at the last point's bandwidth."""
    points = hw.points(kind)
    most, seconds = points[-1]
    if size > most:
        return seconds * size / most
    return between(points, size)


def exchanged(size: float, ranks: int, decode: Decode) -> float:
    """As :func:`collective`, of a gather or scatter inside the launches of ``ag_mlp_rs``."""
    return decode.latency + size * (ranks - 1) / ranks / decode.bandwidth


def transfer(size: float, ranks: int, hw: Hardware, pieces: int = 1) -> float:
    """Seconds until ``size`` bytes are at every other rank, with a signal for each piece."""
    each = pieces * hw.copies.latency + size / hw.copies.bandwidth
    return hw.copies.call + (ranks - 1) * each


def ag_gemm(
    tokens: float, widths: Sequence[int], k: int, ranks: int, hw: Hardware, item: int = ITEM
) -> float:
    """All-gather of ``[tokens, k]`` overlapped with its products, ``[tokens, n]`` each."""
    rows = tokens / ranks
    count = _pieces(ranks, rows, max(widths), sum(widths), 1)
    own, piece = (sum(product(m, n, k, hw, item) for n in widths) for m in (rows, rows / count))
    moved = transfer(rows * k * item, ranks, hw, count)
    return max(own + (ranks - 1) * count * piece, moved + piece)


def gemm_rs(tokens: float, n: int, k: int, ranks: int, hw: Hardware, item: int = ITEM) -> float:
    """A product ``[tokens, k] x [k, n]`` overlapped with its reduce-scatter, and the adding up."""
    rows = tokens / ranks
    count = _pieces(ranks, rows, n, k, 2)
    own, piece = (product(m, n, k, hw, item) for m in (rows, rows / count))
    moved = transfer(rows * n * item, ranks, hw, count)
    add = hw.launch + (ranks + 1) * rows * n * item / hw.hbm
    return max((ranks - 1) * count * piece + own, piece + moved) + add


def _pieces(ranks: int, rows: float, n: int, depth: int, full: int) -> int:
    """Into how many the copy engine's kernel cuts a chunk; ``full``: fillings of a GPU a piece."""
    from ..ops import copy_engine

    return len(copy_engine.spans(ranks, int(rows), n, depth, full * copy_engine.FULL))
