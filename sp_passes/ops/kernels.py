# SPDX-License-Identifier: Apache-2.0
"""Which implementation runs an op: a table, asked once per kind of call.

A fused kernel is one more :func:`register_kernel`. ``kernels="auto"`` takes the kernel that
was measured fastest for the call (``tuned``), for shapes that were not measured the one that
the cost model picks beyond doubt (``estimated``), and else the supported one of highest
preference: unfused, since the fused ones register below it. A name takes that kernel, or
raises with the reason it does not apply. A kernel that some rank of the group cannot run is run
by none (``common``). The choice for a call is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import ref

import torch

from ..errors import SPError
from . import common, tuned, unfused

OPS = ("ag_gemm", "gemm_rs", "gemm_gather", "all_gather", "reduce_scatter")


class Call(NamedTuple):
    """What the choice of a kernel may depend on; equal on every rank.

    ``tokens`` are global rows (``tp_size`` times the local ones), ``n`` output features
    and ``k`` input features of this rank's weights (``n`` summed over several weights). A
    collective alone has no weight: ``n`` are the features of a row, ``k`` is 0.
    """

    op: str
    device: str
    dtype: torch.dtype
    n: int
    k: int
    tokens: int
    tp_size: int


@dataclass(frozen=True)
class Kernel:
    """One row: ``why_not`` returns the reason a call is not supported, or None.

    What it says may depend on the machine, such as a library that is missing.

    ``may_skip_gathered``: an ag_gemm that takes ``gathered=False`` when nobody reads the
    gathered tokens, and then may return anything in their place. ``adds_rows``: a gemm_rs whose
    ``bias`` may be rows of the result's shape.
    """

    name: str
    op: str
    run: Callable[..., Any]
    why_not: Callable[[Call], str | None]
    preference: int = field(default=0)
    may_skip_gathered: bool = field(default=False)
    adds_rows: bool = field(default=False)


_TABLE: dict[common.Row, Kernel] = {}
_lacking = common.Lacking()


def register_kernel(
    name: str,
    op: str,
    run: Callable[..., Any],
    why_not: Callable[[Call], str | None] = lambda call: None,
    preference: int = 0,
    may_skip_gathered: bool = False,
    adds_rows: bool = False,
) -> None:
    """Add an implementation of ``op``; it has the signature of the one in ``unfused``."""
    if op not in OPS:
        raise SPError(f"no op {op!r} to register a kernel for; there are {', '.join(OPS)}")
    _TABLE[op, name] = Kernel(name, op, run, why_not, preference, may_skip_gathered, adds_rows)
    choose.cache_clear()
    _lacking.clear()


def no_peers(call: Call) -> str | None:
    """Why no kernel that reaches into peers' memory takes the call, or None."""
    if call.device != "cuda":
        return f"it needs GPUs that reach each other; the tensors are on {call.device}"
    if call.tp_size == 1:
        return "one rank has no peers"
    return None


def one_queue() -> str | None:
    """Why no product whose branch of a graph has to run beside another takes a call, or None."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return (
            "with CUDA_DEVICE_MAX_CONNECTIONS=1 streams share one queue of the device, in which a "
            "captured call can wait for what stands behind it"
        )
    return None


def barred(barrier: bool) -> dict[str, bool]:
    """The argument for a kernel; only one that may have to wait needs to know of it."""
    return {"barrier": True} if barrier else {}


def kernel_names() -> tuple[str, ...]:
    """Names that ``SPConfig.kernels`` may take."""
    return ("auto", *sorted({name for _, name in _TABLE}))


def names_of(op: str) -> tuple[str, ...]:
    """Of the kernels that ``op`` has.

    Raises:
        ValueError: there is no such op.
    """
    if op not in OPS:
        raise ValueError(f"there is no op {op!r}; there are {', '.join(OPS)}")
    return tuple(name for known, name in _TABLE if known == op)


def has_kernel(target: Any, name: str) -> bool:
    """Whether a kernel of that name was registered for the op ``target``."""
    return (str(getattr(target, "__name__", "")).partition(".")[0], name) in _TABLE


def lacking(pg: Any) -> Mapping[common.Row, str]:
    """Kernels that no rank of the group runs since one cannot, and why. Its first call is
    collective, on a group of several ranks with GPUs.

    Raises:
        SPError: that first call is inside a CUDA graph capture.
    """
    found = _lacking.get(pg)
    if found is None:
        tokens = 8 * pg.size()
        found = _lacking.compare(pg, {
            row: kernel.why_not(Call(row[0], "cuda", torch.bfloat16, 64, 64, tokens, pg.size()))
            for row, kernel in _TABLE.items()
        })  # fmt: skip
    return found


@lru_cache(maxsize=4096)
def choose(
    call: Call | tuple[str, str, torch.dtype, int, int, int, int],
    requested: str,
    group: ref[Any] | None = None,
) -> Kernel:
    """The kernel that runs ``call``, the same on every rank.

    Args:
        call: or its fields, a tuple that is quicker to make and finds the same entry.
        group: refers to the process group; None leaves out what other ranks can run.

    Raises:
        SPError: the requested kernel does not exist or does not support the call, or, at the
            group's first call, as :func:`lacking`.
    """
    call = Call(*call)
    rows = [k for k in _TABLE.values() if k.op == call.op]
    away: Mapping[common.Row, str] = {}
    if group is not None and requested != "unfused" and no_peers(call) is None:
        away = lacking(group())
    if requested != "auto":
        rows = [k for k in rows if k.name == requested]
        if not rows:
            known = ("auto", *names_of(call.op))
            raise SPError(f"no kernel {requested!r} for {call.op}; there are {known}")
        reason = away.get((call.op, requested)) or rows[0].why_not(call)
        if reason is not None:
            raise SPError(
                f"kernel {requested!r} does not support {_text(call)}: {reason}; kernels='auto' "
                "takes one that does"
            )
        return rows[0]
    usable = [k for k in rows if (k.op, k.name) not in away and k.why_not(call) is None]
    measured = tuned.winner(call)
    for kernel in usable:
        if kernel.name == measured:
            return kernel
    return max(usable, key=lambda k: (k.preference, k.name))


def _text(call: Call) -> str:
    weight = f" with weights [{call.n}, {call.k}]" if call.k else f" of {call.n} features"
    dtype = str(call.dtype).removeprefix("torch.")
    return f"{call.op}{weight}, {call.tokens} tokens on {call.tp_size} ranks, {dtype}"


register_kernel("unfused", "ag_gemm", unfused.ag_gemm)
register_kernel("unfused", "gemm_rs", unfused.gemm_rs, adds_rows=True)
register_kernel("unfused", "all_gather", unfused.all_gather)
register_kernel("unfused", "reduce_scatter", unfused.reduce_scatter)
