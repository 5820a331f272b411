# SPDX-License-Identifier: Apache-2.0
"""Columns of a tile of ``ops.hopper``: those with which a call is thought to end soonest."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

BM = 128
"""Rows of a tile."""
WIDTHS = (256, 240, 224, 208, 192, 176, 160, 144, 128, 112, 96)
WIDTHS_BACK = (256, 192, 128)
"""Columns of a tile of ag_gemm, and of gemm_rs, which sends panels of 64."""

# Fitted to one and two H200 (bench/NOTES.md): seconds for a column and a feature of a tile, columns
# that a tile's rows and its end cost besides, seconds until the first rows of a peer are here, and
# bytes a second from all peers together.
_COLUMN, _EXTRA, _LATENCY, _LINK = BM * 2 / 6.0e12, 20, 5e-6, 210e9


@lru_cache(maxsize=4096)
def width_back(tall: int, n: int, programs: int) -> int:
    """Columns of a tile of gemm_rs, for ``tall`` rows of tiles: those of the shortest waves."""
    return min(WIDTHS_BACK, key=lambda w: -(-tall * -(-n // w) // programs) * (w + _EXTRA))


@lru_cache(maxsize=4096)
def width_for(size: int, rows: int, ns: tuple[int, ...], k: int, programs: int) -> int:
    """Columns of a tile of ag_gemm, for ``rows`` of each rank and weights of ``ns`` features.

    The schedule of the kernel is played through: a tile starts when the one before it has ended
    and its rows are here. Few wide tiles fill all multiprocessors, but only once the peers' rows
    have come; narrower ones can use the time until then for the own rows.
    """
    return min(WIDTHS, key=lambda width: seconds(size, rows, ns, k, programs, width))


def seconds(
    size: int, rows: int, ns: tuple[int, ...], k: int, programs: int, width: int, group: int = 8
) -> float:
    """How long ag_gemm is thought to take with tiles of ``width`` columns."""
    tall, wide = -(-rows // BM), sum(-(-n // width) for n in ns)
    tile = np.arange(size * tall * wide)
    chunk, inside = np.divmod(tile, tall * wide)
    first = inside // (group * wide) * group
    row = first + inside % (group * wide) % np.minimum(tall - first, group)
    bytes_before = ((chunk - 1) * rows + np.minimum((row + 1) * BM, rows)) * k * 2
    here = np.where(chunk > 0, _LATENCY + bytes_before / _LINK, 0.0)
    end = np.zeros(programs)
    for start in range(0, len(tile), programs):
        wave = here[start : start + programs]
        end[: len(wave)] = np.maximum(end[: len(wave)], wave) + (width + _EXTRA) * k * _COLUMN
    return float(end.max())
