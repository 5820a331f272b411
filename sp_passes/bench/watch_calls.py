# SPDX-License-Identifier: Apache-2.0
"""One op of each kind that waits for peers, for ``watch_check``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import copy_engine, decode, hopper, mlp, one_launch, symmetric, triton_gemm  # noqa: F401
from ..ops.kernels import _TABLE, lacking

ROWS, SIZE = 64, 2
HIDDEN, INNER = 7168, 768  # of this rank's shard, as Kimi-K3's shared experts at eight ranks
OWN = 8  # rows of a rank in a decode step
NBYTES = 1 << 26
Issued = Callable[[], None]
"""Called between the op and what is queued behind it."""


class Kind(NamedTuple):
    """``make`` is collective and makes the buffers. ``right(pg, step, issued)`` says whether the
    result of a step is right, on every rank at once; from its second call in a stream on it
    loads no kernel and copies nothing from pageable memory behind the op."""

    make: Callable[[Any, torch.device], Any]
    right: Callable[[Any, int, Issued], bool]
    waits: str
    """What the watch has to say of its second call."""
    begin: Callable[[Any, torch.device], None] | None = None
    """Lets a peer get past the barrier of ``right``, and no further."""


def prepare(kind: str, pg: Any, device: torch.device) -> None:
    """Everything that needs both ranks, but the calls. Collective."""
    lacking(pg)
    KINDS[kind].make(pg, device)


def draw(seed: int, *shape: int) -> Tensor:
    """Of spread 1, the same on every rank."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=made).to("cuda", torch.bfloat16)


def close(out: Tensor, ref: Tensor) -> bool:
    return bool((out.float() - ref).norm() < 1e-2 * ref.norm())


def gathered(kernel: str, pg: Any, step: int, issued: Issued) -> bool:
    """all_gather of small whole numbers, exactly."""
    number = [float(r + 10 * (step % 10)) for r in range(SIZE)]
    x = torch.full((ROWS, HIDDEN), number[pg.rank()], device="cuda", dtype=torch.bfloat16)
    out = _TABLE["all_gather", kernel].run(x, pg, SIZE)
    issued()
    return all(bool((part == n).all()) for part, n in zip(out.chunk(SIZE), number, strict=True))


def multiplied(kernel: str, pg: Any, step: int, issued: Issued) -> bool:
    xs = [draw(10 * step + r, 256, 512) for r in range(SIZE)]
    weight = draw(1, 512, 512)
    ref = torch.cat(xs).float() @ weight.float().T
    given = ([weight], [None], [True])
    out = _TABLE["ag_gemm", kernel].run(xs[pg.rank()], *given, pg, SIZE)[-1]
    issued()
    return close(out, ref)


def decoded(pg: Any, step: int, issued: Issued) -> bool:
    xs = [draw(10 * step + r, OWN, HIDDEN) for r in range(SIZE)]
    ref = torch.zeros(SIZE * OWN, HIDDEN, device="cuda")
    for rank in range(SIZE):
        front = draw(2 + rank, 2 * INNER, HIDDEN) * HIDDEN**-0.5
        back = draw(20 + rank, HIDDEN, INNER) * INNER**-0.5
        hidden = mlp.activate(torch.cat(xs).float() @ front.float().T, decode.Activation("silu"))
        ref += hidden @ back.float().T
        if rank == pg.rank():
            w1, w2 = front, back
    how = ("L0", "L1", "silu", 1.0, None, None, str(pg.group_name), SIZE, "one_shot")
    out = torch.ops.sp_passes.ag_mlp_rs(xs[pg.rank()], w1, w2, *how)
    issued()
    return close(out, ref.chunk(SIZE)[pg.rank()])


def copied(pg: Any, step: int, issued: Issued) -> bool:
    """As ``gathered``, with a copy from pageable memory behind it on rank 0."""

    def behind() -> None:
        issued()
        if pg.rank() == 0:
            torch.ones(1 << 23).to("cuda")

    return gathered("one_shot", pg, step, behind)


def loaded(pg: Any, step: int, issued: Issued) -> bool:
    """As ``gathered``, with kernels behind it on rank 0 that it has not launched before."""

    def behind() -> None:
        issued()
        if pg.rank() == 0:
            ones = torch.ones(64, device="cuda")
            torch.atan2(ones, ones).cumprod(0)

    return gathered("one_shot", pg, step, behind)


def _decode_buffers(pg: Any, device: torch.device) -> Any:
    x, w2 = (torch.empty(s, device=device, dtype=torch.bfloat16) for s in
             ((OWN, HIDDEN), (HIDDEN, INNER)))  # fmt: skip
    return mlp._one_shot(x, w2, pg, SIZE)


def _copies(pg: Any, device: torch.device) -> Any:
    return symmetric.workspace(pg, device, NBYTES)


def _past_the_barrier(pg: Any, device: torch.device) -> None:
    _copies(pg, device).meet()


def _hopper(pg: Any, device: torch.device) -> Any:
    return hopper.workspace(pg, device, NBYTES, SIZE * ROWS)


KINDS = {
    "copy_engine": Kind(_copies, partial(gathered, "copy_engine"), "barrier of copy_engine"),
    "triton": Kind(
        _copies, partial(multiplied, "triton"), "rows of triton's ag_gemm", _past_the_barrier
    ),
    "one_shot": Kind(one_launch.for_group, partial(gathered, "one_shot"), "of one_shot, call 2"),
    "ag_mlp_rs": Kind(_decode_buffers, decoded, "rows of ag_mlp_rs, call 2"),
    "hopper": Kind(_hopper, partial(multiplied, "hopper"), ""),
    "a pageable copy": Kind(one_launch.for_group, copied, ""),
    "first launches": Kind(one_launch.for_group, loaded, ""),
}
