# SPDX-License-Identifier: Apache-2.0
"""Columns of a tile of ``ops.hopper``: those with which a call is thought to end soonest."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

BM = 128
"""Rows of a tile."""
WIDTHS = (256, 240, 224, 208, 192, 176, 160, 144, 128, 112, 96)
WIDTHS_BACK, WIDTHS_BACK_COPIED = (256, 224, 192, 128), (256, 192, 128)
"""Columns of a tile of ag_gemm, and of gemm_rs with tiles pushed and with tiles copied."""
NARROW = (80, 64)
"""For ag_gemm with rows by the copy engines: more tiles for the rows that come last."""

# Fitted to one and two H200 (bench/NOTES.md): seconds for a column and a feature of a tile, and
# columns that a tile's rows and its end cost besides.
_COLUMN, _EXTRA = BM * 2 / 6.0e12, 20


class Way(NamedTuple):
    """How rows come: seconds until the first are here, bytes/s from all peers together."""

    latency: float
    bandwidth: float
    widths: tuple[int, ...]


PUSHED, COPIED = Way(5e-6, 210e9, WIDTHS), Way(14e-6, 360e9, WIDTHS + NARROW)
HERE = Way(0.0, float("inf"), WIDTHS)
"""All rows are there: of the product alone."""


@lru_cache(maxsize=4096)
def width_back(
    tall: int, n: int, programs: int, widths: tuple[int, ...] = WIDTHS_BACK
) -> int:  # fmt: skip
    """Columns of a tile of gemm_rs, for ``tall`` rows of tiles: those of the shortest waves."""
    return min(widths, key=lambda w: -(-tall * -(-n // w) // programs) * (w + _EXTRA))


@lru_cache(maxsize=4096)
def width_for(
    size: int, rows: int, ns: tuple[int, ...], k: int, programs: int, way: Way = PUSHED,
    piece_tiles: int = 1,
) -> int:  # fmt: skip
    """Columns of a tile of ag_gemm, for ``rows`` of each rank and weights of ``ns`` features.

    The schedule of the kernel is played through: a tile starts when the one before it has ended
    and its rows are here. Few wide tiles fill all multiprocessors, but only once the peers' rows
    have come; narrower ones can use the time until then for the own rows.
    """

    def ends(width: int) -> float:
        return seconds(size, rows, ns, k, programs, width, way, piece_tiles)

    return min(way.widths, key=ends)


def seconds(
    size: int, rows: int, ns: tuple[int, ...], k: int, programs: int, width: int,
    way: Way = PUSHED, piece_tiles: int = 1, group: int = 8,
) -> float:  # fmt: skip
    """How long ag_gemm is thought to take with tiles of ``width`` columns.

    ``piece_tiles``: rows of tiles that arrive together.
    """
    tall, wide = -(-rows // BM), sum(-(-n // width) for n in ns)
    tile = np.arange(size * tall * wide)
    chunk, inside = np.divmod(tile, tall * wide)
    first = inside // (group * wide) * group
    row = first + inside % (group * wide) % np.minimum(tall - first, group)
    end_of_piece = np.minimum((row // piece_tiles + 1) * piece_tiles * BM, rows)
    bytes_before = ((chunk - 1) * rows + end_of_piece) * k * 2
    here = np.where(chunk > 0, way.latency + bytes_before / way.bandwidth, 0.0)
    end = np.zeros(programs)
    for start in range(0, len(tile), programs):
        wave = here[start : start + programs]
        end[: len(wave)] = np.maximum(end[: len(wave)], wave) + (width + _EXTRA) * k * _COLUMN
    return float(end.max())
