# SPDX-License-Identifier: Apache-2.0
"""The process group behind the name that an op carries."""

from __future__ import annotations

from typing import Any

from .. import _private
from ..errors import ShardingError, SPError


def group_of(name: str, tp_size: int) -> Any:
    """The process group ``name``, checked against the ``tp_size`` the graph was made for."""
    if not name:
        raise SPError(
            "this graph was rewritten offline (SPConfig without a group) and cannot run on "
            "several ranks; rewrite it with SPConfig(group=...)"
        )
    pg = _private.resolve_process_group(name)
    if pg.size() != tp_size:
        raise ShardingError(
            f"the graph was rewritten for tp_size {tp_size}, group {name!r} has {pg.size()} ranks"
        )
    return pg
