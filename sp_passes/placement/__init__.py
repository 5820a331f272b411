# SPDX-License-Identifier: Apache-2.0
"""Where every value of a rank's graph lives: propagation and checking of placements.

state      what is known of one value
registry   the table of rules; ``declare_op`` for ops of your own
propagate  the lenient pass: unknown values carry their reason
check      the strict pass: the first rule that fails is a PlacementError
rules_*    one file a kind of op
"""

from __future__ import annotations

from .check import NodePlacements, check, input_states
from .context import Op, RuleError
from .propagate import propagate
from .registry import along, declare_op, row_wise
from .rules_vendor import register_norm
from .state import PARTIAL, REPLICATE, State, shard

__all__ = [
    "PARTIAL",
    "REPLICATE",
    "NodePlacements",
    "Op",
    "RuleError",
    "State",
    "along",
    "check",
    "declare_op",
    "input_states",
    "propagate",
    "register_norm",
    "row_wise",
    "shard",
]
