# SPDX-License-Identifier: Apache-2.0
"""Which sites of one phase may be applied together: whose is a linear, and whose a weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from .graph import params
from .layout import ShardLayout
from .site import Context, Site

Key = tuple[str, tuple[fx.Node, ...]]


def key(site: Site) -> Key:
    """Tells a site from others of its phase, however often it is found."""
    return site.pattern, site.nodes


def owners(sites: list[Site]) -> dict[fx.Node, Site]:
    """The site that claims a linear; of several the first, of those that may be rewritten."""
    claiming = sorted((s for s in sites if s.claims), key=lambda s: s.reason is not None)
    return {node: site for site in reversed(claiming) for node in site.nodes}


def gives_way(ctx: Context, site: Site) -> bool:
    """Whether another pattern claims a linear of a site that claims none."""
    owners = (ctx.owners.get(node, site) for node in site.nodes)
    return not site.claims and any(owner.pattern != site.pattern for owner in owners)


def settle_overlaps(sites: list[Site]) -> None:
    """A linear belongs to one site only, the first; the others' linears are free again."""
    taken: dict[fx.Node, Site] = {}
    for site in sites:
        if site.reason is not None or not site.claims:
            continue
        other = next((taken[n] for n in site.nodes if n in taken), None)
        if other is not None:
            site.reason = f"overlap: a linear belongs to {other.name}, which is rewritten"
            site.claims, site.gave_way_to = False, other
            continue
        taken.update(dict.fromkeys(site.nodes, site))


def skipped_owners(sites: list[Site]) -> dict[Key, str]:
    """Sites that others gave way to, and that were skipped in the end; with the reasons.

    The others may be rewritten after all: the phase is decided again without these.
    """
    owners = (site.gave_way_to for site in sites)
    return {key(o): o.reason for o in owners if o is not None and o.reason is not None}


def settle_weights(sites: list[Site]) -> None:
    """Skip what cannot share a weight, until nothing changes.

    Two sites may share a weight if they cut it alike; a weight with any other use, or two
    layouts, stays whole.
    """
    while True:
        live = [site for site in sites if site.reason is None]
        layouts: dict[fx.Node, set[ShardLayout]] = {}
        for site in live:
            for weight, layout in site.shards.items():
                layouts.setdefault(weight, set()).add(layout)
        results = {(w, node) for site in live for w in site.shards for node in site.nodes}
        for site in live:
            site.reason = next(
                (r for w in site.shards if (r := _weight_conflict(w, layouts[w], results))), None
            )
        if all(site.reason is None for site in live):
            return


def _weight_conflict(
    weight: fx.Node, layouts: set[ShardLayout], results: set[tuple[fx.Node, fx.Node]]
) -> str | None:
    name = params.fqn(weight)
    if len(layouts) > 1:
        ways = " and ".join(sorted(map(str, layouts)))
        return f"two layouts: {name} is wanted as {ways} and stays whole"
    if params.use_elsewhere(weight) == "excluded":
        return f"excluded: the configuration keeps {name} whole"
    if params.use_elsewhere(weight) == "whole":
        return f"weight used elsewhere: another compiled graph reads {name} whole"
    for user in _users(weight):
        if user.op == "output":
            return f"weight returned: {name} is an output of the graph"
        if (weight, user) not in results:
            return f"weight used elsewhere: {name} by {user.name}"
    return None


def _users(weight: fx.Node) -> Iterator[fx.Node]:
    """What uses a weight, seen through transposes and the like."""
    for user in weight.users:
        if user.target in (
            torch.ops.aten.permute.default,
            torch.ops.aten.unsqueeze.default,
            torch.ops.aten.expand.default,
            torch.ops.aten.reshape.default,
            torch.ops.aten.t.default,
        ):
            yield from _users(user)
        elif user.target in (
            torch.ops.higher_order.auto_functionalized,
            torch.ops.higher_order.auto_functionalized_v2,
        ):
            yield from user.users
        else:
            yield user
