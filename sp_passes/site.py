# SPDX-License-Identifier: Apache-2.0
"""A place in a graph that a pattern matches, and what patterns may look at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import fx

from .config import SPConfig
from .errors import PlacementError
from .graph import params
from .graph.linears import Linear
from .graph.values import copy_origin, differ, dtype, fake_mode, nbytes, set_value, shape
from .layout import ShardLayout
from .ops.kernels import has_kernel
from .placement import State


@dataclass
class Site:
    """One match.

    Attributes:
        pattern: name of the pattern.
        nodes: the results that the rewrite replaces; no two applied sites share one.
        match: what the pattern found, for its own ``check`` and ``rewrite``.
        shards: the weights that the rewrite shards and how, once it is known.
        proven: weights that the rewrite takes for replicated without sharding them; the
            ranks compare them too.
        reason: why the site is skipped, or None.
        collectives_added, collectives_removed: by kind.
        fused: collectives that stay, but run inside the op of a product, by kind.
        moved: values whose rows the added collectives carry.
        row_bytes: what else a token's row moves; negative where a collective goes.
        shared: how many of the added collectives merge with another site's.
        tokens_whole: every rank computes the site for all tokens before the rewrite.
        claims: its linears are this pattern's also when it is skipped; another pattern's site
            with False gives way, without a row.
        needed: a skip leaves memory or a boundary as it was, so that strict makes it an error.
        cost: of a site without weights: seconds before and after, for a number of global tokens
            and a ``policy.Hardware``.
        label: the site's name, where its weights do not give one.
        forms: ways to rewrite the site that the pattern knows (``sp_passes.policy.forms``).
        form: the one that was chosen.
        work: what the cost model was told of the site, where it was asked (``policy.Work``).
        bytes_moved: what crosses a pipeline boundary before and after, for the report.
        detail: one clause more for the report's text.
        gave_way_to: the site that claims one of its linears, for which it was skipped.
    """

    pattern: str
    nodes: tuple[fx.Node, ...]
    match: Any
    weights: tuple[fx.Node, ...]
    shards: dict[fx.Node, ShardLayout] = field(default_factory=dict)
    proven: tuple[fx.Node, ...] = ()
    reason: str | None = None
    collectives_added: dict[str, int] = field(default_factory=dict)
    collectives_removed: dict[str, int] = field(default_factory=dict)
    fused: dict[str, int] = field(default_factory=dict)
    moved: tuple[fx.Node, ...] = ()
    row_bytes: float = 0
    shared: int = 0
    tokens_whole: bool = False
    claims: bool = True
    needed: bool = True
    cost: Callable[[int, Any], tuple[float, float]] | None = None
    label: str = ""
    forms: tuple[str, ...] = ("sharded",)
    form: str = "sharded"
    work: Any = None
    bytes_moved: dict[str, int] = field(default_factory=dict)
    detail: str = ""
    gave_way_to: Site | None = None

    @property
    def name(self) -> str:
        return self.label or params.common_name([params.fqn(w) for w in self.weights])

    def bytes_saved(self, tp_size: int, counted: set[fx.Node]) -> int:
        """Bytes that one rank gives up of the weights not ``counted`` yet; counts them."""
        mine = self.shards.keys() - counted
        counted |= mine
        return sum(self.shards[w].freed(nbytes(w), tp_size) for w in mine)


@dataclass
class Context:
    """What a pattern sees of the graph.

    Attributes:
        graph: the canonical graph.
        config: the options.
        states: placement of every node before the rewrite.
        linears: every linear by its result, in graph order.
        ready: node of ``sp_passes::prepare`` that the emitted ops wait for.
        replaced: values that earlier rewrites replaced, by the old one.
        prefetched: the linear for which the last gather of a weight was started.
        owners: the site that claims a linear, for each linear of this phase that has one.
    """

    graph: fx.Graph
    config: SPConfig
    states: Mapping[fx.Node, State | tuple[State, ...]]
    linears: dict[fx.Node, Linear]
    ready: fx.Node | None = None
    replaced: dict[fx.Node, fx.Node] = field(default_factory=dict)
    owners: dict[fx.Node, Site] = field(default_factory=dict)
    prefetched: fx.Node | None = None

    def replace(self, old: fx.Node, new: fx.Node, token: bool = False) -> None:
        """Give every user of ``old`` the value ``new``, of the same shape and dtype.

        Args:
            token: the value only says that something has happened.

        Raises:
            PlacementError: they differ; a fault of the pattern.
        """
        if not token and (differ(old, new) or dtype(old) != dtype(new)):
            raise PlacementError(
                f"{old.name} of shape {list(shape(old))}, {dtype(old)} cannot be replaced by "
                f"{new.name} of shape {list(shape(new))}, {dtype(new)}: a fault of the pattern"
            )
        old.replace_all_uses_with(new)
        self.replaced[old] = new

    def erase(self, node: fx.Node) -> None:
        """Remove what nothing uses any more: ``node`` and what only it used."""
        todo = [node]
        while todo:
            node = todo.pop()
            if node.op == "call_function" and not node.users and not node._erased:
                sources = node.all_input_nodes
                self.graph.erase_node(node)
                todo.extend(sources)

    def now(self, node: fx.Node) -> fx.Node:
        """What stands for ``node`` after the rewrites so far; matches were made before them."""
        while node in self.replaced:
            node = self.replaced[node]
        return node

    def emit(self, target: Any, args: tuple[Any, ...], origin: fx.Node, **options: Any) -> fx.Node:
        """``target(*args, **options)`` at the graph's insertion point, with its value.

        It keeps ``origin``'s source lines. An op that has the configured kernel is told to
        use it.
        """
        kernel = self.config.kernels
        chosen: dict[str, Any] = {"kernel": kernel} if has_kernel(target, kernel) else {}
        node = self.graph.call_function(target, args, {**chosen, **options})
        copy_origin(node, origin)
        return set_value(node, fake_mode(self.graph))

    def weights_behind(
        self, inputs: Iterable[fx.Node], but: Collection[fx.Node]
    ) -> tuple[fx.Node, ...]:
        """Weights, other than ``but``, that the replicated ones of ``inputs`` come from.

        A rewrite that mixes such an input with other ranks' values takes these weights for
        replicated, so the ranks compare them.
        """
        found: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        todo = list(inputs)
        while todo:
            node = todo.pop()
            if node in seen or not self._replicated(node):
                continue
            seen.add(node)
            if params.is_weight(node):
                found.add(node)
            elif node.op == "call_function":
                todo.extend(node.all_input_nodes)
        return tuple(sorted(found.difference(but), key=lambda n: n.meta["sp_index"]))

    def _replicated(self, node: fx.Node) -> bool:
        state = self.states[node]
        return all(s.is_replicate for s in (state if isinstance(state, tuple) else (state,)))

    @property
    def group(self) -> tuple[str, int]:
        """The last arguments of every op that communicates."""
        return self.config.group_name, self.tp_size

    @property
    def tp_size(self) -> int:
        assert self.config.tp_size is not None
        return self.config.tp_size

    @property
    def shard_group(self) -> tuple[str, int]:
        """As ``group``, of the ranks that weights are sharded over: all, or a part of them."""
        return self.config.sharding_name, self.shard_size

    @property
    def shard_size(self) -> int:
        return self.config.shard_size

    def prefetch_point(self, first: fx.Node, weights: Iterable[fx.Node]) -> fx.Node:
        """Where gathers of ``weights`` for ``first`` start: at the site that gathers before it."""
        assert self.ready is not None
        for weight in weights:
            if weight.op == "get_attr":
                self.ready.prepend(weight)
        here = self.prefetched or self.ready.next
        self.prefetched = first
        return here

    def position(self, node: fx.Node) -> int:
        """Of a node that the phase began with; later ones come last."""
        return int(node.meta.get("sp_index", 1 << 60))

    def state(self, node: fx.Node) -> State:
        """Placement of a tensor-valued node."""
        found = self.states[node]
        return found if isinstance(found, State) else State(None, None, f"{node.name} is a tuple")


class Pattern(Protocol):
    """A file in ``patterns/``: the module itself has these three functions."""

    __name__: str

    def find(self, ctx: Context) -> Iterator[Site]:
        """Yield matches in graph order; a match may already carry a reason."""

    def check(self, ctx: Context, site: Site) -> str | None:
        """Why the site cannot be rewritten, or None; fills ``site.shards``."""

    def rewrite(self, ctx: Context, site: Site) -> None:
        """Replace the site's nodes."""
