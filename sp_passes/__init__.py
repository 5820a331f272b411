# SPDX-License-Identifier: Apache-2.0
"""Shard the weights that sequence-parallel serving keeps whole on every rank.

compile, trace, rewrite, check, SequenceParallelPass   the pass, by several doors
SPConfig, Report                                       options in, decisions out
unshard, load_full_state_dict, resident_bytes          the weights afterwards
dump                                                   a graph as JSON, for sp-passes inspect
"""

from __future__ import annotations

from . import ops
from .api import CompiledModule, compile, rewrite
from .backend import SequenceParallelPass
from .config import SPConfig
from .declare import declare_placement, declare_segments, declared_placement
from .errors import PlacementError, ReplicationError, ShardingError, SPError
from .inspect import dump
from .layout import ShardLayout
from .placement import check, declare_op
from .report import Decision, Report
from .stages import StageRows, local_rows
from .trace import trace
from .version import __version__
from .weights import load_full_state_dict, resident_bytes, unshard

__all__ = [
    "CompiledModule",
    "Decision",
    "PlacementError",
    "ReplicationError",
    "Report",
    "SPConfig",
    "SPError",
    "SequenceParallelPass",
    "ShardLayout",
    "ShardingError",
    "StageRows",
    "__version__",
    "check",
    "compile",
    "declare_op",
    "declare_placement",
    "declare_segments",
    "declared_placement",
    "dump",
    "load_full_state_dict",
    "local_rows",
    "ops",
    "resident_bytes",
    "rewrite",
    "trace",
    "unshard",
]
