# SPDX-License-Identifier: Apache-2.0
"""The feature-local region between two linears, and how it is cut over ranks.

Every feature that enters the second linear is a *lane*. Walking back from there, each
node of the region tells which lane each of its features belongs to; at the outputs of
the first linears this says which weight rows make which lane, however the graph slices,
chunks, interleaves or reshapes them. A rank that owns a block of lanes then owns known
rows of each first weight, and every literal size in between follows.

Values have token dimensions first (``rows``) and feature dimensions last.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from ..placement.sizes import equal
from . import params
from .linears import Linear
from .values import args, is_tensor, product, same_shape, shape, static

aten = torch.ops.aten
Lanes = np.ndarray
_UNKNOWN = -1
_LIMIT = 256


class NotLocal(Exception):
    """Why a region cannot be cut by features: the reason a user reads, ``kind: detail``."""

    def __init__(self, detail: str, kind: str = "not feature-local") -> None:
        super().__init__(f"{kind}: {detail}")


@dataclass
class Region:
    """What lies between ``firsts`` and ``second``.

    Attributes:
        second: the linear that the region feeds.
        firsts: linears whose outputs the region starts from.
        nodes: the region's own nodes, in graph order.
        lanes: feature dimensions' lanes of every first output and region node.
        rows: inputs ``[rows…, 1]`` that scale whole rows.
        vectors: inputs without rows that vary along features, with their lanes.
        scalars: inputs that broadcast over everything.
    """

    second: Linear
    firsts: list[Linear] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    lanes: dict[fx.Node, Lanes] = field(default_factory=dict)
    rows: list[fx.Node] = field(default_factory=list)
    vectors: dict[fx.Node, Lanes] = field(default_factory=dict)
    scalars: list[fx.Node] = field(default_factory=list)

    def escapes(self) -> tuple[fx.Node, fx.Node] | None:
        """A value of the region and a user that needs it at full width, if there is one.

        Outside the region, or the second linear itself where it also adds the value: the
        local value, its input, stands for no other use.
        """
        end = self.second.call or self.second.node
        inside = {*self.nodes, end}
        whole = {*self.rows, *self.vectors, *self.scalars}
        for node in [*(f.node for f in self.firsts), *self.nodes]:
            for user in node.users:
                if user not in inside or node in whole:
                    return node, user
                if user is end and (node is not self.second.x or _uses(end, node) > 1):
                    return node, user
        return None


def _uses(user: fx.Node, node: fx.Node) -> int:
    """How often ``node`` is among the arguments of ``user``."""
    found: list[fx.Node] = []
    fx.map_arg((user.args, user.kwargs), found.append)
    return found.count(node)


def find_region(second: Linear, found: dict[fx.Node, Linear]) -> Region:
    """Walk back from ``second``'s input to the linears it is computed from.

    Args:
        second: the later linear.
        found: every linear of the graph by its result.

    Raises:
        NotLocal: an op mixes features or rows, or something else than linears feeds it.
    """
    region = Region(second)
    width = second.in_features
    last = shape(second.x)[-1]
    if static(last) != width:
        raise NotLocal(f"the width {last} entering {second.node.name} is not static")
    order: dict[fx.Node, int] = {}
    heap: list[tuple[int, fx.Node]] = []

    def push(node: fx.Node, lanes: Lanes) -> None:
        known = region.lanes.get(node)
        if known is None:
            region.lanes[node] = lanes
            order[node] = _position(node)
            heapq.heappush(heap, (-order[node], node))
            return
        if known.shape != lanes.shape:
            raise NotLocal(f"{node.name} is read with two different feature shapes")
        clash = (known != lanes) & (known != _UNKNOWN) & (lanes != _UNKNOWN)
        if clash.any():
            raise NotLocal(f"the features of {node.name} are combined in two different orders")
        region.lanes[node] = np.where(known == _UNKNOWN, lanes, known)

    push(second.x, np.arange(width))
    while heap:
        if len(region.nodes) > _LIMIT:
            raise NotLocal(f"more than {_LIMIT} operations lie before {second.node.name}")
        _, node = heapq.heappop(heap)
        lanes = region.lanes[node]
        if node in found:
            _add_first(region, found[node], lanes)
        else:
            rule = _rule(node)
            for source, its_lanes in rule(region, node, lanes):
                push(source, its_lanes)
            region.nodes.append(node)
    region.nodes.reverse()
    region.firsts.reverse()
    return region


def _position(node: fx.Node) -> Any:
    return node.meta["sp_index"]


def number_nodes(graph: fx.Graph) -> None:
    """Give nodes their place in graph order, which ``find_region`` walks by."""
    for index, node in enumerate(graph.nodes):
        node.meta["sp_index"] = index


def _add_first(region: Region, linear: Linear, lanes: Lanes) -> None:
    if lanes.ndim != 1:
        raise NotLocal(f"{linear.node.name} is read with its features split")
    if (lanes == _UNKNOWN).any():
        unused = int((lanes == _UNKNOWN).sum())
        raise NotLocal(
            f"{unused} of the {len(lanes)} features of {params.fqn(linear.weight)} do not reach "
            f"{region.second.node.name}",
            "features unused",
        )
    region.firsts.append(linear)


# --- how each op hands lanes to its inputs ----------------------------------------------

Edges = Iterator[tuple[fx.Node, Lanes]]
Rule = Callable[[Region, fx.Node, Lanes], Edges]


def _rule(node: fx.Node) -> Rule:
    if node.op in ("placeholder", "get_attr"):
        kind = "weight" if params.is_weight(node) else "activation"
        raise NotLocal(f"the {kind} {params.fqn(node)} of full feature width enters the region")
    target: Any = node.target
    if target in RULES:
        return RULES[target]
    tags = getattr(target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags or "rand" in str(target):
        raise NotLocal(f"{target} ({node.name}) draws random numbers", "randomness")
    schema = getattr(target, "_schema", None)
    if torch.Tag.pointwise in tags and schema is not None and not schema.is_mutable:
        return _pointwise
    raise NotLocal(f"{target} ({node.name}) may mix features")


def _pointwise(region: Region, node: fx.Node, lanes: Lanes) -> Edges:
    """Each operand broadcasts to the result: full width, rows only, or features only."""
    ndim = len(shape(node))
    for operand in node.all_input_nodes:
        if not is_tensor(operand):
            continue
        if operand.target is aten.expand.default and is_tensor(args(operand)[0]):
            operand = _through_expand(operand, node, lanes)
        sizes = shape(operand)
        missing = ndim - len(sizes)
        features = sizes[max(0, len(sizes) - lanes.ndim) :]
        rows = sizes[: max(0, len(sizes) - lanes.ndim)]
        padded = (1,) * (lanes.ndim - len(features)) + tuple(features)
        has_rows = missing == 0 and rows and (static(rows[0]) != 1 or not _is_constant(operand))
        if has_rows and not equal(rows[0], shape(node)[0]):
            raise NotLocal(f"{operand.name} is one row, which {node.name} repeats")
        if all(static(f) == 1 for f in padded):
            (region.rows if has_rows else region.scalars).append(operand)
        elif tuple(map(static, padded)) != lanes.shape:
            raise NotLocal(
                f"{operand.name} with feature shape {list(padded)} is broadcast over "
                f"{list(lanes.shape)} in {node.name}"
            )
        elif missing > 0 or (not has_rows and all(static(r) == 1 for r in rows)):
            _add_vector(region, operand, lanes, len(features))
        else:
            yield operand, lanes


def _is_constant(node: fx.Node) -> bool:
    """Made of weights and numbers only: its single row is no token, also when M is 1."""
    todo = [node]
    for _ in range(_LIMIT):
        if not todo:
            return True
        source = todo.pop()
        if source.op == "placeholder" and not params.is_weight(source):
            return False
        todo.extend(source.all_input_nodes)
    return False


def _through_expand(operand: fx.Node, node: fx.Node, lanes: Lanes) -> fx.Node:
    """The source of an expand, where broadcasting in the pointwise op does the same."""
    source = args(operand)[0]
    assert isinstance(source, fx.Node)
    others = [n for n in node.all_input_nodes if n is not operand and is_tensor(n)]
    if any(same_shape(n, node) for n in others):
        return source
    raise NotLocal(f"{operand.name} is a broadcast value on its own")


def _add_vector(region: Region, operand: fx.Node, lanes: Lanes, ndim: int) -> None:
    if ndim != lanes.ndim:
        raise NotLocal(f"{operand.name} covers only some of the feature dimensions")
    known = region.vectors.get(operand)
    if known is not None and not np.array_equal(known, lanes):
        raise NotLocal(f"{operand.name} is used for two sets of features")
    region.vectors[operand] = lanes


def _constant(region: Region, node: fx.Node, lanes: Lanes) -> Edges:
    return iter(())


def _like(region: Region, node: fx.Node, lanes: Lanes) -> Edges:
    yield args(node)[0], lanes


def _reshape(region: Region, node: fx.Node, lanes: Lanes) -> Edges:
    source = args(node)[0]
    assert isinstance(source, fx.Node)
    sizes = shape(source)
    for start in range(len(sizes) - 1, 0, -1):
        if product(sizes[start:]) == lanes.size:
            yield source, lanes.reshape(sizes[start:])
            return
    raise NotLocal(f"{node.name} reshapes {list(sizes)} across rows and features")


def _permute(region: Region, node: fx.Node, lanes: Lanes) -> Edges:
    source, order = args(node)[0], args(node)[1]
    assert isinstance(source, fx.Node) and isinstance(order, (list, tuple))
    rows = len(order) - lanes.ndim
    if list(order[:rows]) != list(range(rows)):
        raise NotLocal(f"{node.name} moves rows into features")
    back = np.argsort([d - rows for d in order[rows:]])
    yield source, lanes.transpose(back)


def _slice(region: Region, node: fx.Node, lanes: Lanes) -> Edges:
    source = args(node)[0]
    assert isinstance(source, fx.Node)
    at, window = slice_of(node)
    axis = at - (len(shape(source)) - lanes.ndim)
    if axis < 0:
        raise NotLocal(f"{node.name} slices rows")
    whole = np.full(_feature_sizes(source, lanes.ndim), _UNKNOWN)
    whole[(slice(None),) * axis + (window,)] = lanes
    yield source, whole


def _select(region: Region, node: fx.Node, lanes: Lanes) -> Edges:
    source, dim, index = args(node)[:3]
    assert isinstance(source, fx.Node) and isinstance(dim, int)
    ndim = len(shape(source))
    axis = dim % ndim - (ndim - lanes.ndim - 1)
    if axis < 0:
        raise NotLocal(f"{node.name} selects one row")
    whole = np.full(_feature_sizes(source, lanes.ndim + 1), _UNKNOWN)
    whole[(slice(None),) * axis + (index,)] = lanes
    yield source, whole


def _cat(region: Region, node: fx.Node, lanes: Lanes) -> Edges:
    ndim = len(shape(node))
    parts = args(node)[0]
    assert isinstance(parts, (list, tuple))
    axis = cat_dim(node) - (ndim - lanes.ndim)
    if axis < 0:
        raise NotLocal(f"{node.name} concatenates rows")
    start = 0
    for part in parts:
        size = static(shape(part)[cat_dim(node)])
        if size is None:
            raise NotLocal(f"{node.name} concatenates pieces of unknown width")
        yield part, np.take(lanes, range(start, start + size), axis)
        start += size


def _unsqueeze(region: Region, node: fx.Node, lanes: Lanes) -> Edges:
    source, dim = args(node)[:2]
    assert isinstance(source, fx.Node) and isinstance(dim, int)
    ndim = len(shape(node))
    axis = dim % ndim - (ndim - lanes.ndim)
    if axis < 0:
        raise NotLocal(f"{node.name} adds a row dimension")
    yield source, lanes.squeeze(axis)


def _feature_sizes(node: fx.Node, ndim: int) -> tuple[int, ...]:
    sizes = shape(node)[len(shape(node)) - ndim :]
    if product(sizes) is None:
        raise NotLocal(f"{node.name} has features of unknown width")
    return tuple(sizes)


def slice_of(node: fx.Node) -> tuple[int, slice]:
    """Dimension and window of an ``aten.slice``, normalised to its input's size."""
    given = args(node)
    filled: list[Any] = [*given, *(0, None, None, 1)[len(given) - 1 :]]
    source, dim, start, stop, step = filled
    dim %= len(shape(source))
    size = static(shape(source)[dim])
    ends = (start, stop, step)
    if size is None or any(e is not None and static(e) is None for e in ends):
        raise NotLocal(f"{node.name} slices rows or a dimension of unknown size")
    return dim, slice(*slice(start, stop, step).indices(size))


def cat_dim(node: fx.Node) -> int:
    dim = args(node)[1] if len(args(node)) > 1 else node.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    return dim % len(shape(node))


RULES: dict[Any, Rule] = {
    aten.reshape.default: _reshape,
    aten.permute.default: _permute,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.cat.default: _cat,
    aten.unsqueeze.default: _unsqueeze,
    aten.full.default: _constant,
    aten.full_like.default: _like,
    aten.zeros_like.default: _like,
    aten.ones_like.default: _like,
    **dict.fromkeys(
        (
            aten.clone.default,
            aten._to_copy.default,
            aten.contiguous.default,
            aten.alias.default,
            aten.detach.default,
            torch.ops.prims.convert_element_type.default,
        ),
        _pointwise,
    ),
}
