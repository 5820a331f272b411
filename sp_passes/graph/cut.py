# SPDX-License-Identifier: Apache-2.0
"""A region cut for one of ``tp_size`` ranks: layouts, and the same nodes at local width.

Rank r owns the r-th block of lanes. Whatever the region's slices and reshapes do, the
features of a node that rank r owns must lie along one dimension, equally many on each
rank, so that one program serves all ranks; where they do not, the region is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import fx

from ..layout import ShardLayout
from .region import Lanes, NotLocal, Region, cat_dim, slice_of
from .values import args, copy_origin, fake_mode, set_value, shape, static

aten = torch.ops.aten


class Cut:
    """Where each value of ``region`` is cut, for ``tp_size`` ranks.

    Raises:
        NotLocal: a value is not cut evenly along one dimension.
    """

    def __init__(self, region: Region, tp_size: int) -> None:
        self.region = region
        self.tp_size = tp_size
        width = region.second.in_features
        if width % tp_size:
            raise NotLocal(f"width {width} by tp_size {tp_size}", "not divisible")
        if width == tp_size > 1:
            # Sizes of one look like added dimensions to the placement rules.
            raise NotLocal(f"width {width} leaves one feature to a rank", "too narrow")
        self.block = width // tp_size
        self._axes: dict[fx.Node, tuple[int, np.ndarray]] = {}
        for node, lanes in [*region.lanes.items(), *region.vectors.items()]:
            self._axes[node] = self._axis(node, lanes)
        self._args = {n: REBUILD.get(n.target, _as_is)(self, n) for n in region.nodes}

    def _axis(self, node: fx.Node, lanes: Lanes) -> tuple[int, np.ndarray]:
        """The feature dimension along which ranks differ, and each index's rank."""
        if (lanes < 0).any():
            raise NotLocal(f"some features of {node.name} are never used", "features unused")
        owner = lanes // self.block
        for axis in range(owner.ndim):
            first = np.moveaxis(owner, axis, 0).reshape(owner.shape[axis], -1)
            if (first == first[:, :1]).all():
                ranks = first[:, 0]
                counts = np.bincount(ranks, minlength=self.tp_size)
                if (counts == counts[0]).all():
                    return axis, ranks
        raise NotLocal(
            f"the features {list(lanes.shape)} of {node.name} cannot be cut into {self.tp_size} "
            "equal parts along one dimension",
            "not divisible",
        )

    def layout(self, node: fx.Node, dim: int) -> ShardLayout:
        """How a weight whose dimension ``dim`` makes ``node``'s features is cut.

        Raises:
            NotLocal: the owners' order along it is no sequence of evenly cut segments.
        """
        _, ranks = self._axes[node]
        edges = np.flatnonzero(np.diff(ranks)) + 1
        starts = np.concatenate([[0], edges])
        sizes = np.diff(np.concatenate([starts, [len(ranks)]]))
        owners = ranks[starts]
        tp = self.tp_size
        whole = len(owners) % tp == 0 and (owners.reshape(-1, tp) == np.arange(tp)).all()
        if not whole or (sizes.reshape(-1, tp) != sizes.reshape(-1, tp)[:, :1]).any():
            raise NotLocal(f"the features of {node.name} are in an order that no segments describe")
        return ShardLayout(dim, tuple(int(s) for s in sizes.reshape(-1, tp).sum(1)))

    def dim(self, node: fx.Node) -> int:
        """The tensor dimension along which ``node`` is cut."""
        lanes = self.region.vectors.get(node, self.region.lanes.get(node))
        assert lanes is not None
        return len(shape(node)) - lanes.ndim + self._axes[node][0]

    def local_sizes(self, node: fx.Node) -> list[int]:
        """Feature sizes of ``node`` on one rank."""
        lanes = self.region.lanes[node]
        axis, _ = self._axes[node]
        sizes = list(lanes.shape)
        sizes[axis] //= self.tp_size
        return sizes

    def rebuild(
        self,
        graph: fx.Graph,
        made: Mapping[fx.Node, fx.Node],
        now: Callable[[fx.Node], fx.Node],
    ) -> fx.Node:
        """Emit the region at local width before the current insertion point.

        Args:
            graph: the graph, with its insertion point set.
            made: the local values of the region's inputs: first outputs, rows, vectors.
            now: what stands for any other value that the region refers to.

        Returns:
            The local input of the second linear, ``[…, width / tp_size]``.
        """
        made = dict(made)
        mode = fake_mode(graph)
        for node in self.region.nodes:
            inputs, options = self._args[node]
            swap: Callable[[fx.Node], fx.Node] = lambda n: made.get(n) or now(n)  # noqa: E731
            inputs, options = fx.map_arg((inputs, options), swap)
            assert callable(node.target)
            new = graph.call_function(node.target, inputs, options)
            copy_origin(new, node)
            made[node] = set_value(new, mode)
        return made[self.region.second.x]

    def slice_args(self, node: fx.Node) -> tuple[Any, ...]:
        """The slice, in the coordinates of one rank's part of its input."""
        source = args(node)[0]
        assert isinstance(source, fx.Node)
        dim, window = slice_of(node)
        axis, ranks = self._axes[source]
        if dim - (len(shape(source)) - self.region.lanes[source].ndim) != axis:
            return (source, dim, window.start, window.stop, window.step)
        picked = np.zeros(len(ranks), bool)
        picked[window] = True
        local = [np.flatnonzero(picked[ranks == r]) for r in range(self.tp_size)]
        start, step = local[0][0], (local[0][1] - local[0][0] if len(local[0]) > 1 else 1)
        want = start + step * np.arange(len(local[0]))
        if any(len(at) != len(want) or (at != want).any() for at in local):
            raise NotLocal(f"{node.name} slices differently on different ranks")
        return (source, dim, int(start), int(want[-1]) + 1, int(step))


def _as_is(cut: Cut, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pointwise and the like: the same arguments; an expanded operand becomes its source."""
    strip = lambda n: args(n)[0] if n.target is aten.expand.default else n  # noqa: E731
    return fx.map_arg((args(node), dict(node.kwargs)), strip)


def _reshape(cut: Cut, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    source, target = args(node)[:2]
    assert isinstance(target, (list, tuple))
    features = cut.local_sizes(node)
    first, *others = _row_sizes(node, len(target) - len(features))
    if -1 in others:
        if first == -1 or others.count(-1) > 1:
            raise NotLocal(f"{node.name} leaves more than one size open")
        return (source, [first * cut.tp_size, *others, *features]), {}
    return (source, [-1, *others, *features]), {}


def _row_sizes(node: fx.Node, count: int) -> list[Any]:
    """The reshape's sizes of rows as numbers or nodes; -1 where its argument left them open."""
    given = args(node)[1][:count]
    found = [static(size) for size in shape(node)[:count]]
    return [g if f is None else f for f, g in zip(found, given, strict=True)]


def _slice(cut: Cut, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return cut.slice_args(node), {}


def _select(cut: Cut, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    source, dim = args(node)[:2]
    assert isinstance(source, fx.Node) and isinstance(dim, int)
    ndim = len(shape(source))
    axis, _ = cut._axes[source]
    if dim % ndim - (ndim - cut.region.lanes[source].ndim) == axis:
        raise NotLocal(f"{node.name} selects a feature that only one rank has")
    return args(node), {}


def _cat(cut: Cut, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    axes = {cut._axes[part][0] for part in args(node)[0]}
    if len(axes) != 1 or cut._axes[node][0] not in axes:
        raise NotLocal(f"{node.name} joins parts that are cut along different dimensions")
    return (args(node)[0], cat_dim(node)), {}


def _full(cut: Cut, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A constant broadcasts in a pointwise op, and so needs neither rows nor width there."""
    for user in node.users:
        if torch.Tag.pointwise not in getattr(user.target, "tags", ()):
            raise NotLocal(f"{user.name} reads the constant {node.name} at its full size")
    return ([1] * len(shape(node)), args(node)[1]), dict(node.kwargs)


REBUILD: dict[Any, Callable[[Cut, fx.Node], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.reshape.default: _reshape,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.cat.default: _cat,
    aten.full.default: _full,
}
