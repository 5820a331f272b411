# SPDX-License-Identifier: Apache-2.0
"""What ran, in the log and in a file: one line and one JSON file per worker.

A report counts for this worker when a graph with its plan has started here. On a warm start
vLLM loads its artifacts and no pass runs: the plan is a constant of the artifact, and the
report that the compile left beside it (``sp_passes.store``) is read back and marked so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import store
from ..errors import SPError
from ..report import Decision, Report, format_bytes, merge
from ..weights import released_bytes, resident_bytes
from . import _private
from .session import Session

log = _private.logger("sp_passes.reports")

# Skips that say that all is well, or that the user wanted them.
_FINE = ("already sharded", "excluded", "a lone projection")
_LOST = "vLLM loaded the compiled artifact, but the report that lay beside it is gone"


def publish(session: Session) -> None:
    """After profiling: log, write, and with ``strict`` refuse.

    Raises:
        SPError: strict, and a weight of a site stays whole, or no site was found.
    """
    report = of_worker(session)
    now = resident_bytes(session.model)
    path = write(session, report, now)
    log.info("sp_passes: %s", line(session, report, now) + (f"; report in {path}" if path else ""))
    if not report.applied:
        log.warning("sp_passes: %s", nothing_applied(report))
    if session.options.strict:
        enforce(report)


def of_worker(session: Session) -> Report:
    """Every decision for the graphs and modules that ran here."""
    found = list(session.reports.get("regional", ()))
    compiled = session.reports.get("graph", [])
    started = {key for key, _ in session.started}
    found += [r for r in compiled if r.plan not in started]  # those that shard nothing
    for (key, weights), names in session.started.items():
        report = store.find(key) or session.stored.get(key)
        if report is not None:
            found.append(report.renamed(names))
        elif weights:
            found.append(_lost(session, weights))
    merged = merge(found) or Report(session.tp_size, nearest="no graph was compiled or loaded")
    merged.model = session.model_name
    return merged


def _lost(session: Session, weights: Sequence[str]) -> Report:
    """What is known of a cached graph whose report is gone: the weights that it sharded here."""
    held = dict(session.model.named_parameters())
    saved = {w: released_bytes(held[w]) if w in held else 0 for w in weights}
    rows = [Decision("unknown", w, True, "", (w,), n, detail=_LOST) for w, n in saved.items()]
    return Report(session.tp_size, rows, nearest=_LOST, from_cache=True)


def line(session: Session, report: Report, now: int) -> str:
    """The one line of a worker."""
    cached = " (as reported by the compile that made the cached artifact)"
    return (
        f"rank {session.tp_rank} of tp_size {session.tp_size}: {len(report.applied)} sites "
        f"applied, {len(report.skipped)} skipped{cached if report.from_cache else ''}; weights "
        f"{format_bytes(session.bytes_loaded)} loaded, {format_bytes(now)} resident"
    )


def nothing_applied(report: Report) -> str:
    """What came closest, and the condition that failed."""
    if not report.decisions:
        return f"no site was found: {report.nearest}"
    first = next((d for d in report.skipped if d.weights), report.decisions[0])
    return (
        f"no site was rewritten; the nearest is {first.pattern} at {first.name}, skipped: "
        f"{first.reason}"
    )


def enforce(report: Report) -> None:
    """``strict``: an error for the first weight that stays whole, or where there is no site.

    Raises:
        SPError: names the site and the condition.
    """
    sharded = {w for d in report.applied for w in d.weights}
    left = [
        d
        for d in report.skipped
        if d.weights and not d.reason.startswith(_FINE) and not sharded.issuperset(d.weights)
    ]
    if left:
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        raise SPError(
            f"strict: {left[0].pattern} at {left[0].name} is skipped: {left[0].reason}{more}; "
            "exclude it by name, or drop strict"
        )
    if not report.applied:
        raise SPError(f"strict: {nothing_applied(report)}")


def write(session: Session, report: Report, now: int) -> Path | None:
    """The report as a file under the report folder, else vLLM's debug dump path; or None."""
    folder = _folder(session)
    if folder is None:
        return None
    path = folder / "sp_passes.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(as_dict(session, report, now), indent=2))
    except OSError as err:
        log.warning("sp_passes: the report could not be written: %s", err)
        return None
    return path


def as_dict(session: Session, report: Report, now: int) -> dict[str, Any]:
    return {
        **report.to_dict(),
        "rank": session.tp_rank,
        "vllm": _private.version(),
        "bytes_loaded": session.bytes_loaded,
        "bytes_resident": now,
    }


def _folder(session: Session) -> Path | None:
    dump = session.vllm_config.compile_debug_dump_path()
    if session.options.report_dir is None:
        return dump
    parallel = session.vllm_config.parallel_config
    rank = f"rank_{parallel.rank}_dp_{parallel.data_parallel_index}"
    return Path(session.options.report_dir) / rank
