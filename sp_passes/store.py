# SPDX-License-Identifier: Apache-2.0
"""Reports by plan, kept beside Inductor's compiled artifacts.

A second start loads artifacts and runs no pass. The plan is a constant of the compiled
graph, so the report of the compile that made it is found again by that.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from . import _private
from .report import Report

log = logging.getLogger("sp_passes")

_memory: dict[str, Report] = {}


def _path(plan: str) -> Path:
    return Path(_private.inductor_cache_dir()) / "sp_passes" / f"{plan}.json"


def save(report: Report) -> None:
    """Keep ``report`` in this process and, if the folder can be written, beside the artifacts."""
    _memory[report.plan] = report
    path = _path(report.plan)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(report.to_json())
        os.replace(name, path)
    except OSError as err:
        log.warning("the report of plan %s could not be stored: %s", report.plan, err)


def find(plan: str) -> Report | None:
    """The report of ``plan``: this process's own, or the stored one, marked as such."""
    if plan in _memory:
        return _memory[plan]
    try:
        return Report.from_json(_path(plan).read_text(), from_cache=True)
    except (OSError, ValueError, KeyError):
        return None
