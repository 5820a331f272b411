# SPDX-License-Identifier: Apache-2.0
"""How a weight is cut over the ranks: one dimension, segment by segment; or not at all.

A merged weight (gate and up; q_a and kv_a) holds several logical matrices, its
segments. Rank r takes the r-th block of *each* segment, not the r-th block of the
whole: otherwise rank 0 would hold gate rows only. A segment that the model itself shards (a
gate merged with whole projections) is kept: every rank has its own part of it already.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import torch

from .errors import ShardingError

_TEXT = re.compile(r"S(\d+)\[(=?\d+(?:,=?\d+)*)\]", re.ASCII)
_LOCAL = re.compile(r"L([01])")


@dataclass(frozen=True)
class ShardLayout:
    """``Shard(dim)`` of a weight, segment by segment; written ``S0[6144,6144]``.

    Args:
        dim: the dimension that is cut.
        segments: sizes along ``dim`` of the segments, in order, as a module holds them before
            the rewrite; their sum is its size of that dimension.
        kept: positions of the segments that are this rank's own part already and stay as they
            are; written with ``=``, as in ``S0[2112,=1536]``.
    """

    dim: int
    segments: tuple[int, ...]
    kept: tuple[int, ...] = ()

    def __str__(self) -> str:
        sizes = (f"{'=' if i in self.kept else ''}{n}" for i, n in enumerate(self.segments))
        return f"S{self.dim}[{','.join(sizes)}]"

    @staticmethod
    @lru_cache(maxsize=4096)
    def parse(text: str) -> ShardLayout:
        """The layout that ``str(layout)`` wrote.

        Raises:
            ShardingError: ``text`` is not of the form ``S<dim>[<size>,…]``.
        """
        found = _TEXT.fullmatch(text)
        if not found:
            raise ShardingError(f"{text!r} is not a shard layout such as 'S0[6144,6144]'")
        sizes = found[2].split(",")
        kept = tuple(i for i, size in enumerate(sizes) if size.startswith("="))
        return ShardLayout(int(found[1]), tuple(int(s.lstrip("=")) for s in sizes), kept)

    @property
    def size(self) -> int:
        """Size of the sharded dimension before the rewrite."""
        return sum(self.segments)

    @property
    def cut_ranges(self) -> list[tuple[int, int]]:
        """``(start, length)`` along ``dim`` of each segment that is whole on every rank."""
        starts = [sum(self.segments[:i]) for i in range(len(self.segments))]
        pairs = enumerate(zip(starts, self.segments, strict=True))
        return [pair for i, pair in pairs if i not in self.kept]

    @property
    def cut_size(self) -> int:
        """Size along ``dim`` of what is cut."""
        return sum(length for _, length in self.cut_ranges)

    def freed(self, nbytes: int, tp_size: int) -> int:
        """Bytes that one rank gives up of a weight of ``nbytes``."""
        return nbytes * self.cut_size // self.size // tp_size * (tp_size - 1)

    def indivisible(self, tp_size: int) -> int | None:
        """The first segment to cut that ``tp_size`` does not divide, or None."""
        return next((length for _, length in self.cut_ranges if length % tp_size), None)

    @lru_cache(maxsize=4096)  # noqa: B019
    def local_segments(self, tp_size: int) -> tuple[int, ...]:
        """Sizes of one rank's parts, of kept segments their own.

        Raises:
            ShardingError: ``tp_size`` does not divide a segment.
        """
        bad = self.indivisible(tp_size)
        if bad is not None:
            raise ShardingError(
                f"segment of {bad} in layout {self} is not divisible by tp_size {tp_size}"
            )
        return tuple(s if i in self.kept else s // tp_size for i, s in enumerate(self.segments))

    @lru_cache(maxsize=4096)  # noqa: B019
    def local_size(self, tp_size: int) -> int:
        return sum(self.local_segments(tp_size))

    def part_size(self, full: torch.Tensor, tp_size: int) -> int:
        """Size along ``dim`` of one rank's part of ``full``."""
        self.require(full)
        return self.local_size(tp_size)

    def ranges(self, rank: int, tp_size: int) -> list[tuple[int, int]]:
        """``(start, length)`` along ``dim`` of each part that ``rank`` owns."""
        out, start = [], 0
        pairs = zip(self.segments, self.local_segments(tp_size), strict=True)
        for i, (full, local) in enumerate(pairs):
            out.append((start if i in self.kept else start + rank * local, local))
            start += full
        return out

    def take(self, full: torch.Tensor, rank: int, tp_size: int) -> torch.Tensor:
        """Rank's part of ``full``: a view for one segment, a copy for several."""
        self.require(full)
        parts = [full.narrow(self.dim, a, n) for a, n in self.ranges(rank, tp_size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def put(
        self, full: torch.Tensor, part: torch.Tensor, rank: int, tp_size: int, mine: bool = True
    ) -> None:
        """Write ``rank``'s part back into its places in ``full``; kept segments if ``mine``."""
        pieces = part.split(list(self.local_segments(tp_size)), self.dim)
        places = zip(self.ranges(rank, tp_size), pieces, strict=True)
        for i, ((a, n), piece) in enumerate(places):
            if mine or i not in self.kept:
                full.narrow(self.dim, a, n).copy_(piece)

    def require(self, full: torch.Tensor) -> None:
        """Raise unless ``full`` has this layout's size along ``dim``."""
        if full.ndim <= self.dim or full.shape[self.dim] != self.size:
            raise ShardingError(
                f"layout {self} needs {self.size} along dimension {self.dim}, "
                f"found a tensor of shape {list(full.shape)}"
            )


@dataclass(frozen=True)
class LocalPart:
    """A weight that is used as this rank holds it; written ``L0``, ``L1``.

    The model sharded it itself, or every rank multiplies all of it: nothing is cut, proven
    or released.

    Args:
        dim: the dimension that a ``ShardLayout`` would cut; tells the weight's orientation.
    """

    dim: int

    def __str__(self) -> str:
        return f"L{self.dim}"

    def part_size(self, full: torch.Tensor, tp_size: int) -> int:
        """Size along ``dim`` of this rank's part, which is all that ``full`` holds."""
        if full.ndim <= self.dim:
            raise ShardingError(
                f"layout {self} needs a matrix, found a tensor of shape {list(full.shape)}"
            )
        return full.shape[self.dim]


Layout = ShardLayout | LocalPart


@lru_cache(maxsize=4096)
def parse(text: str) -> Layout:
    """The layout that ``str(layout)`` wrote.

    Raises:
        ShardingError: ``text`` is neither ``S<dim>[<size>,…]`` nor ``L<dim>``.
    """
    found = _LOCAL.fullmatch(text)
    return LocalPart(int(found[1])) if found else ShardLayout.parse(text)
