# SPDX-License-Identifier: Apache-2.0
"""Bytes that one rank sends to its peers in one run of a graph, by kind of collective.

    all_gather       (n - 1) x what the rank contributes: to each peer its own part
    reduce_scatter   (n - 1) / n x the addend: to each peer the part that it keeps
    all_to_all       (n - 1) / n x what the rank holds
    all_reduce       2 (n - 1) / n x the addend: a reduce-scatter and an all-gather
                     (sp_passes::all_reduce sends the whole addend to each peer instead)

n is the number of ranks. These are the fewest bytes that leave a rank when every link goes
from one rank to one other; switches that reduce or multicast move fewer. Parts of ``gemm_rs``
count in the dtype of its result, in which an accelerator sends them.

Ops that hold a collective count as that collective. What opaque ops of the model exchange
inside, such as routed experts, is not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import fx

from ..errors import SPError
from ..layout import ShardLayout
from .collectives import FUSED, op_name, ranks_of, read_collective
from .values import args, product, shape, value

Share = Callable[[int], Fraction]

SENT: dict[str, Share] = {
    "all_gather": lambda n: Fraction(n - 1),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "all_to_all": lambda n: Fraction(n - 1, n),
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
}
"""What a rank sends of its input, for each kind."""

_GATHERED: tuple[bool, Share] = (True, SENT["all_gather"])
_SCATTERED: tuple[bool, Share] = (False, lambda n: Fraction(n - 1))
_FUSED_SENT: dict[str, tuple[tuple[bool, Share], ...]] = {
    "sp_passes::ag_gemm": (_GATHERED,),
    "sp_passes::gemm_rs": (_SCATTERED,),
    "sp_passes::gemm_gather": ((False, lambda n: Fraction(n - 1, n)),),
    "sp_passes::weight_gather": ((True, lambda n: Fraction(n - 1, n)),),
    "sp_passes::ag_mlp_rs": (_GATHERED, _SCATTERED),
}
"""For each of ``FUSED``'s kinds, of its input (True) or its result (False): what lies between
product and collective."""

_OWN_ALL_REDUCE = "sp_passes::all_reduce"


def bytes_sent(graph: fx.Graph, tp_size: int) -> dict[str, int]:
    """Bytes that one rank sends, by kind; the kinds are those that ``count`` finds.

    Args:
        graph: with fake values of static shapes.
        tp_size: ranks of a collective that does not say how many it spans.

    Raises:
        SPError: a collective's tensor has no value, or one of unknown size.
    """
    sent: Counter[str] = Counter()
    for node in graph.nodes:
        name = op_name(node)
        if name in FUSED:
            for kind, (of_input, share) in zip(FUSED[name], _FUSED_SENT[name], strict=True):
                part = share(min(ranks_of(node) or tp_size, tp_size)) * _gathered_share(node)
                sent[kind] += _part(args(node)[0] if of_input else node, part)
        elif (found := read_collective(node)) is not None:
            ranks = found.size or tp_size
            share = SENT["all_gather" if name == _OWN_ALL_REDUCE else found.kind]
            sent[found.kind] += _part(found.x, share(ranks))
    return dict(sent)


def _gathered_share(node: fx.Node) -> Fraction:
    """Of a ``gemm_gather`` what is not this rank's own already; else all of it."""
    text = str(args(node)[3]) if op_name(node) == "sp_passes::gemm_gather" else ""
    if "=" not in text:
        return Fraction(1)
    layout = ShardLayout.parse(text)
    return Fraction(layout.cut_size, layout.size)


def _part(node: fx.Node, share: Fraction) -> int:
    count = product(shape(node))
    if count is None:
        raise SPError(
            f"{node.name} has the shape {list(shape(node))}: bytes can be counted for a fixed "
            "number of tokens only; trace without dynamic shapes"
        )
    tensor = value(node)
    assert isinstance(tensor, torch.Tensor)
    return int(count * tensor.dtype.itemsize * share)
