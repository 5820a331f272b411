# SPDX-License-Identifier: Apache-2.0
"""Whether a site pays, and in which form.

hardware  a machine's numbers, from a JSON profile with sources
costs     seconds of products, collectives and both overlapped
forms     seconds of a site in each form; ranges of tokens, crossovers
choose    which sites of a graph are sharded, and how, under a policy or a budget
buffers   bytes of the kernels' shared buffers on one rank
memory    bytes of one rank before and after, and the tokens of KV cache they buy
groups    sharding over a part of the tensor-parallel group
"""

from __future__ import annotations

from .choose import POLICIES, decide, quickest, work_of
from .forms import Linear, Range, Work, crossover, ranges, seconds
from .hardware import NAMES, Hardware, hardware

__all__ = [
    "NAMES",
    "POLICIES",
    "Hardware",
    "Linear",
    "Range",
    "Work",
    "crossover",
    "decide",
    "hardware",
    "quickest",
    "ranges",
    "seconds",
    "work_of",
]
