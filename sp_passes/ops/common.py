# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a group can run in common, compared once a group.

A rank without Triton, NVRTC or the GPU of the others would choose another kernel than they do,
and each would wait for the other for ever. So at a group's first call the ranks compare what
they have, and a kernel that one of them cannot run is run by none. Nothing is compared again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..errors import SPError
from ..proof import said
from . import tuned

log = logging.getLogger("sp_passes")

Row = tuple[str, str]
"""Op and kernel."""


class Lacking:
    """By group: kernels that its ranks must not run, and why."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Any, Mapping[Row, str]] = WeakKeyDictionary()

    def get(self, pg: Any) -> Mapping[Row, str] | None:
        return self._found.get(pg)

    def compare(self, pg: Any, reasons: Mapping[Row, str | None]) -> Mapping[Row, str]:
        """Collective. One log line where the ranks differ.

        Args:
            reasons: why this rank's machine cannot run a kernel, None where it can.

        Raises:
            SPError: inside a CUDA graph capture.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise SPError(
                f"the first op of group {pg.group_name!r} cannot be captured in a CUDA graph: the "
                "ranks compare what they can run; run one step before capturing, or ask for "
                "kernels='unfused'"
            )
        everyone = said((machine(), dict(reasons)), pg, "compare what they can run")
        found = self._found[pg] = differing(everyone)
        if found:
            why = dict.fromkeys(found.values())
            rows = {w: sorted({n for (_, n), y in found.items() if y == w}) for w in why}
            log.warning(
                "group %s: no rank runs %s", pg.group_name,
                "; nor ".join(f"{', '.join(names)} ({w})" for w, names in rows.items()),
            )  # fmt: skip
        return found

    def clear(self) -> None:
        self._found.clear()


def machine() -> str:
    """What the fastest kernel depends on, beside the call: the GPU and the table of kernels."""
    entries = repr(sorted(map(repr, tuned.named().items())))
    table = hashlib.sha256(entries.encode()).hexdigest()[:8]
    if not torch.cuda.is_available():
        return f"no GPU, kernel table {table}"
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return (
        f"{gpu.name} {gpu.major}.{gpu.minor} of {gpu.multi_processor_count} multiprocessors, "
        f"kernel table {table}"
    )


def differing(everyone: list[tuple[str, dict[Row, str | None]]]) -> dict[Row, str]:
    """Of each rank's ``(machine, reasons)``: the kernels that some rank cannot run, and why.

    All but the unfused ones where the machines differ: how they cut their work may depend on it,
    and so does which is fastest. A kernel that no rank can run is left out: all know that.
    """
    found: dict[Row, str] = {}
    first = everyone[0][0]
    for row in dict.fromkeys(row for _, reasons in everyone for row in reasons):
        whys = [reasons.get(row, "it has no such kernel") for _, reasons in everyone]
        rank = next((rank for rank, why in enumerate(whys) if why is not None), None)
        odd = next((rank for rank, (other, _) in enumerate(everyone) if other != first), None)
        if rank is not None and None in whys:
            found[row] = f"rank {rank}: {whys[rank]}"
        elif odd is not None and row[1] != "unfused":
            found[row] = f"rank 0 has {first}; rank {odd} has {everyone[odd][0]}"
    return found
