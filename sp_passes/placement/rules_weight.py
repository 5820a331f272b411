# SPDX-License-Identifier: Apache-2.0
"""A sharded weight that is gathered before use: whole before, whole after."""

from __future__ import annotations

from .context import Op, RuleError
from .registry import register
from .state import REPLICATE, State


def _weight_gather(op: Op) -> State:
    """The op cuts the whole logical weight itself and gathers all parts."""
    weight = op.args[0]
    if not op.state(weight).is_replicate:
        raise RuleError(
            op.describe(weight), "Replicate()", "the op cuts the whole logical weight itself"
        )
    return REPLICATE


def _weight_wait(op: Op) -> State:
    parts = op.args[0]
    if not op.state(parts).is_replicate:
        raise RuleError(op.describe(parts), "Replicate()", "it waits for what weight_gather sends")
    return REPLICATE


register("sp_passes::weight_gather", _weight_gather)
register("sp_passes::weight_wait", _weight_wait)
