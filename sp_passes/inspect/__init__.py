# SPDX-License-Identifier: Apache-2.0
"""Looking at dumped graphs: why was this model not rewritten, and what would a rewrite buy?

load      files, folders, logs, archives -> graphs as they were read
inspect   one of them, run through canonicalise, find, check and rewrite
dump      a graph as JSON, to be looked at elsewhere
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.distributed.tensor.placement_types import Placement

from ..config import SPConfig
from ..errors import SPError
from .analyse import Inspection, analyse
from .build import build
from .ours import dump
from .records import Dump, InspectError
from .source import Loaded, load

__all__ = ["Dump", "InspectError", "Inspection", "Loaded", "dump", "inspect", "load"]


def inspect(
    dumped: Dump,
    config: SPConfig,
    tokens: str = "auto",
    placements: Mapping[str, Placement] | None = None,
) -> Inspection:
    """What the pass would do with a graph that was read.

    Args:
        dumped: from ``load``.
        config: offline (``SPConfig(tp_size=8)``).
        tokens: placement of the activations: ``"sharded"``, ``"replicated"``, or ``"auto"``,
            which goes by the graph's collectives.
        placements: of weights by FQN, which may hold ``*``.

    Raises:
        InspectError: nothing of the graph could be read.
    """
    assert config.tp_size is not None
    with collector_paused():
        try:
            return analyse(build(dumped, config.tp_size), config, tokens, placements)
        except SPError:
            raise
        except Exception as error:  # a damaged dump may say what no graph does
            kind = type(error).__name__
            raise InspectError(
                f"{dumped.origin}: the graph {dumped.title!r} cannot be looked at: {kind}: "
                f"{str(error)[:200]}"
            ) from error


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without the cyclic garbage collector, which would walk all records again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
