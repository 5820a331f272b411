# SPDX-License-Identifier: Apache-2.0
"""The regional route: single modules, compiled and sharded after the weights are loaded.

For modules that no graph of vLLM's shows: models that are not under torch.compile, and
what runs inside an opaque op.

    find      candidates by structure (``modules``)
    decide    trace one module of each shape, rewrite it offline: applied, or the reason
    agree     the ranks compare all decisions, then all weights
    shard     compile each module, run it once on zeros: weights are cut and freed
    install   the module's forward runs the compiled one
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import api, residents
from .._private import constant_floats
from ..errors import SPError
from ..proof import agree, all_well, prove
from ..report import Decision, Report, format_bytes, merge
from ..trace import trace
from ..weights import guard_module, resident_bytes
from . import _private, modules
from .modules import Candidate
from .plain import plain
from .session import Session

log = _private.logger("sp_passes.regional")

ROUTE = "regional"
# Local rows that Dynamo compiles for: one row is a graph of its own.
WARM_ROWS = (2, 1)
_TRACE_ROWS = 8
NOTHING = "no module outside vLLM's compiled graphs holds a weight that is whole on every rank"


@dataclass(frozen=True)
class Choice:
    """What is done with one module: ``report`` holds its decisions, applied or not."""

    candidate: Candidate
    report: Report

    @property
    def applied(self) -> bool:
        return bool(self.report.bytes_saved_per_rank)


def apply(session: Session) -> None:
    """Shard every module of the loaded model that the route can. Collective.

    Raises:
        SPError: the ranks decide differently; the same message on all of them, and nothing
            was changed.
        ReplicationError: a weight is not the same on every rank; nothing was changed.
    """
    if ROUTE not in session.options.routes or session.tp_size == 1:
        return
    choices = _on_all_ranks(session, lambda: _decide(session))
    _agree(session, choices)
    chosen = [c for c in choices if c.applied]
    _prove(session, chosen)
    now = [c for c in chosen if c.candidate.kind == modules.MLP]
    for choice in chosen:
        if choice.candidate.kind == modules.PROJECTION:
            Observer(session, choice.candidate).install()
    left = [c.report for c in choices if not c.applied]
    _take(session, now, "sharded", left)


def decisions(session: Session) -> Report:
    """What the route would do with the loaded model, as this rank sees it; nothing changes."""
    found = _merged(session, [c.report for c in _decide(session)])
    found.nearest = found.nearest or ("" if found.decisions else NOTHING)
    return found


def _merged(session: Session, reports: Sequence[Report]) -> Report:
    """One report of the whole model; without a site, with what came nearest to one."""
    found = merge(r for r in reports if r.decisions)
    if found is None:
        found = Report(session.tp_size, nearest=next((r.nearest for r in reports), ""))
    return replace(found, model=type(session.model).__name__)


def _take(
    session: Session, choices: Sequence[Choice], tokens: str, others: Sequence[Report] = ()
) -> None:
    """Shard the chosen modules, and report what happened."""
    owner = type(session.model).__name__
    before = sum(resident_bytes(c.candidate.module) for c in choices)
    with _private.large_blocks(session.worker):
        reports = [shard(session, c.candidate, tokens) for c in choices]
    after = sum(resident_bytes(c.candidate.module) for c in choices)
    session.add_report(ROUTE, _merged(session, [*reports, *others]))
    if not choices:
        return
    session.freed(ROUTE, before - after)
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    shapes = len({c.candidate.signature for c in choices})
    log.info(
        "sp_passes sharded %d modules of %s (%d shapes): weights %s before, %s after, on this "
        "rank of %d",
        len(choices),
        owner,
        shapes,
        format_bytes(before),
        format_bytes(after),
        session.tp_size,
    )


# --- decide -----------------------------------------------------------------------------


def _on_all_ranks(session: Session, work: Callable[[], list[Choice]]) -> list[Choice]:
    """``work()``; where one rank fails, none goes on."""
    out: list[Choice] = []
    problem: Exception | None = None
    try:
        out = work()
    except Exception as err:
        problem = err
    all_well(problem, session.tp_group)
    return out


def _decide(session: Session) -> list[Choice]:
    """A choice for every candidate; one trace for each shape."""
    by_shape: dict[Any, Report] = {}
    out = []
    for found in modules.find(session.model, session.options):
        if not found.site:
            nearest = f"{found.name}: {found.reason}"
            out.append(Choice(found, Report(session.tp_size, nearest=nearest)))
            continue
        if found.reason:
            out.append(Choice(found, _skipped(session, found, found.reason)))
            continue
        if found.signature not in by_shape:
            by_shape[found.signature] = _rewritten(session, found)
        report = by_shape[found.signature]
        if not report.decisions:
            report = _skipped(session, found, report.nearest)
        out.append(Choice(found, report.renamed(found.weights)))
    return out


def _rewritten(session: Session, found: Candidate) -> Report:
    """What the pass decides on the module's graph; nothing runs and nothing changes.

    Without a decision, ``nearest`` says why.
    """
    first = next(found.module.parameters())
    x = torch.empty(_TRACE_ROWS, found.width, dtype=first.dtype, device=first.device)
    given = {"token_range": session.token_range(None), "max_tokens": session.max_tokens}
    config = session.options.sp_config(tp_size=session.tp_size, **given)
    try:
        return api.rewrite(trace(plain(found.module), x), config)
    except Exception as err:  # whatever a module does: it stays as it is, with this reason
        line = (str(err) if isinstance(err, SPError) else repr(err)).partition("\n")[0]
        return Report(session.tp_size, nearest=f"it cannot be read: {line}")


def _skipped(session: Session, found: Candidate, reason: str) -> Report:
    names = tuple(found.weights.values())
    row = Decision(f"regional {found.kind}", found.name, False, reason, names)
    return Report(session.tp_size, [row])


def _agree(session: Session, choices: Sequence[Choice]) -> None:
    """The ranks must have decided the same of the same modules."""
    rows = [
        (c.candidate.name, [(d.pattern, d.applied, d.reason) for d in c.report.decisions])
        for c in choices
    ]
    applied = [c.candidate.name for c in choices if c.applied]
    plan = hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
    summary = f"regional route: {len(applied)} of {len(choices)} modules: {_some(applied)}"
    agree(plan, len(applied), summary, session.tp_group)


def _prove(session: Session, chosen: Sequence[Choice]) -> None:
    """All weights at once, before the first is cut: a difference leaves everything as it was."""
    held = {
        c.candidate.weights[name]: parameter
        for c in chosen
        for name, parameter in c.candidate.module.named_parameters()
    }
    prove(list(held.values()), list(held), session.tp_group)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# --- shard ------------------------------------------------------------------------------


def shard(session: Session, found: Candidate, tokens: str) -> Report:
    """Compile ``found``, shard its weights and let it run the compiled forward. Collective.

    Args:
        session: of this worker.
        found: a candidate without a reason.
        tokens: ``"sharded"`` or ``"replicated"``, of the rows it is called with.

    Returns:
        The decisions, with FQNs of the model.
    """
    config = session.sp_config(token_range=session.token_range(None))
    compiled = api.compile(plain(found.module), config, tokens=tokens, dynamic=True, fullgraph=True)
    for name, parameter in found.module.named_parameters():
        residents.remember_name(parameter, found.weights[name])
    first = next(found.module.parameters())
    with torch.inference_mode(), constant_floats():
        for rows in WARM_ROWS:
            compiled(torch.zeros(rows, found.width, dtype=first.dtype, device=first.device))
    _private.mark_sharded(found.module)
    _replace_forward(found.module, compiled.forward)
    for child in found.module.children():
        guard_module(child)
    assert compiled.report is not None
    return compiled.report


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Of this object only; names, weights and every reference to it stay."""
    module.__dict__["forward"] = torch.compiler.disable(
        forward, reason="sp_passes compiled this module by itself"
    )


# --- lone projections -------------------------------------------------------------------


@dataclass
class Observer:
    """Stands before a lone projection until its first call tells where its tokens live.

    Called with all tokens of the step, they are replicated; with this rank's part of them,
    sharded. Every rank sees the same calls, so every rank decides alike.
    """

    session: Session
    candidate: Candidate

    def install(self) -> None:
        module = self.candidate.module
        inner = module.forward

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            tokens = self._tokens(x)
            if tokens is None:
                return inner(x, *args, **kwargs)
            del module.__dict__["forward"]
            self._take(tokens)
            return module(x, *args, **kwargs)

        _replace_forward(module, forward)

    def _tokens(self, x: Tensor) -> str | None:
        """``"sharded"``, ``"replicated"``, or None where this call does not tell."""
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        step, size = _private.step_tokens(), self.session.tp_size
        if x.ndim != 2 or step is None or step < 2:
            return None
        return {step: "replicated", -(-step // size): "sharded"}.get(x.shape[0])

    def _take(self, tokens: str) -> None:
        choice = Choice(self.candidate, Report(self.session.tp_size))
        _take(self.session, [choice], tokens)
