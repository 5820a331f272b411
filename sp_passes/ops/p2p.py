# SPDX-License-Identifier: Apache-2.0
"""Pipeline boundaries: send, receive, and a rank's rows of a whole tensor.

    token_shard   x [M, …] whole             -> [ceil(M / tp_size), …], zeros behind the last row
    pp_send       x, to rank ``dst``         -> an empty token
    pp_recv       size, from rank ``src``    -> [size]
    stage_input   x [m, …] of a boundary     -> [tp_size * m, …], what the stage was written for
    stage_output  x [M, …] whole             -> [ceil(M / tp_size), …], what the boundary carries

``pp_send`` and ``pp_recv`` work in a pipeline group: the ranks that hold the same part of
each stage, numbered by stage, so that matching tensor-parallel ranks talk to each other.
``placement`` says what the tensor is, ``"R"`` (whole) or ``"S0"`` (the rank's rows). Both
sides first tell each other shape, dtype and placement; where these differ both raise, and
no data is sent. That is one exchange between the hosts, without a device synchronisation;
it makes the sender wait until the receiver is there, and is left out in CUDA graph capture
(the warm-up run has made it). ``check=False`` leaves it out always, on both sides alike.

``after`` orders operations that share no data: a backend such as NCCL pairs sends with
receives by their order alone. ``pp_send_`` is ``pp_send`` in a schema that no compiler
pass takes for dead code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _private
from ..errors import ShardingError, SPError
from . import unfused
from .groups import group_of

PLACEMENTS = ("R", "S0")
_MAX_DIMS = 8
_HEADER_TAG = 1 << 20
_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
]
_sequence: Counter[str] = Counter()


def local_rows(num_tokens: Any, tp_size: int) -> Any:
    """Rows that each rank holds of ``num_tokens`` global ones; the last ranks' are padded."""
    return (num_tokens + tp_size - 1) // tp_size


def cut_rows(x: Tensor, rank: int, tp_size: int) -> Tensor:
    """Rows ``[rank * m, (rank + 1) * m)`` of ``x``, zeros where ``x`` has none; a copy."""
    rows = local_rows(x.shape[0], tp_size)
    mine = x[rank * rows : (rank + 1) * rows]
    if mine.shape[0] == rows:
        return mine.clone(memory_format=torch.contiguous_format)
    out = x.new_zeros((rows, *x.shape[1:]))
    out[: mine.shape[0]] = mine
    return out


def _token_shard(x: Tensor, group: str, tp_size: int) -> Tensor:
    return cut_rows(x, group_of(group, tp_size).rank(), tp_size)


def _stage_input(x: Tensor, name: str, group: str, tp_size: int) -> Tensor:
    return unfused.all_gather(x, group_of(group, tp_size), tp_size)


def _stage_output(x: Tensor, name: str, group: str, tp_size: int) -> Tensor:
    return _token_shard(x, group, tp_size)


def _pp_send(
    x: Tensor,
    dst: int,
    tag: int,
    group: str,
    placement: str = "R",
    check: bool = True,
    after: Tensor | None = None,
) -> Tensor:
    pg = _pipeline(group, dst)
    x = x.contiguous()
    if check:
        _agree(pg, dst, tag, _Header(list(x.shape), x.dtype, placement), sends=True)
    if x.numel():
        pg.send([x], dst, tag).wait()
    return x.new_empty(0, dtype=torch.int8)


def _pp_send_(
    nothing: Sequence[Tensor],
    x: Tensor,
    dst: int,
    tag: int,
    group: str,
    placement: str = "R",
    check: bool = True,
    after: Tensor | None = None,
) -> Tensor:
    return _pp_send(x, dst, tag, group, placement, check, after)


def _pp_recv(
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    src: int,
    tag: int,
    group: str,
    placement: str = "R",
    check: bool = True,
    after: Tensor | None = None,
) -> Tensor:
    pg = _pipeline(group, src)
    out = torch.empty(tuple(size), dtype=dtype, device=device)
    if check:
        _agree(pg, src, tag, _Header(list(out.shape), dtype, placement), sends=False)
    if out.numel():
        pg.recv([out], src, tag).wait()
    return out


def _pipeline(name: str, peer: int) -> Any:
    if not name:
        raise SPError("pp_send and pp_recv need the name of a pipeline group to run")
    pg = _private.resolve_process_group(name)
    if not 0 <= peer < pg.size() or peer == pg.rank():
        raise SPError(
            f"pipeline group {name!r} has ranks 0 to {pg.size() - 1} and this is rank "
            f"{pg.rank()}: rank {peer} is no other stage of it"
        )
    return pg


# --- what both sides agree on -----------------------------------------------------------


class _Header:
    """Shape, dtype and placement of what is about to travel."""

    def __init__(self, shape: list[int], dtype: torch.dtype, placement: str) -> None:
        if placement not in PLACEMENTS:
            raise SPError(f"placement={placement!r} is unknown; use 'R' (whole) or 'S0' (rows)")
        if len(shape) > _MAX_DIMS:
            raise SPError(f"a boundary tensor has at most {_MAX_DIMS} dimensions, found {shape}")
        self.shape, self.dtype, self.placement = shape, dtype, placement

    def pack(self) -> list[int]:
        sizes = [*self.shape, *[-1] * (_MAX_DIMS - len(self.shape))]
        kind = _DTYPES.index(self.dtype) if self.dtype in _DTYPES else len(_DTYPES)
        return [PLACEMENTS.index(self.placement), kind, *sizes]

    @staticmethod
    def text(row: list[int]) -> str:
        shape = [n for n in row[2:] if n >= 0]
        kind = str(_DTYPES[row[1]]).removeprefix("torch.") if row[1] < len(_DTYPES) else "other"
        what = "one rank's rows" if PLACEMENTS[row[0]] == "S0" else "the whole tensor"
        return f"{shape} {kind}, {what}"


def _agree(pg: Any, peer: int, tag: int, header: _Header, sends: bool) -> None:
    """Raise on both sides unless both expect the same.

    Raises:
        ShardingError: names both shapes, and which stage has which.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    mine = header.pack()
    theirs = _swap(pg, peer, tag, mine)
    if theirs == mine:
        return
    here, there = _Header.text(mine), _Header.text(theirs)
    sent, wanted = (here, there) if sends else (there, here)
    src, dst = (pg.rank(), peer) if sends else (peer, pg.rank())
    raise ShardingError(
        f"stages {src} and {dst} of pipeline group {pg.group_name} disagree about tensor {tag}: "
        f"stage {src} sends {sent}; stage {dst} receives {wanted}. Compile both stages with the "
        "pattern pp_send, or neither (patterns=…), for the same tokens and tp_size"
    )


def _swap(pg: Any, peer: int, tag: int, mine: list[int]) -> list[int]:
    """The other side's header, in exchange for this one; through the hosts only."""
    from ..proof import _say_when_slow

    with _say_when_slow(pg, f"agree on tensor {tag} between stages"):
        if any(d.type == "cpu" for d in pg._device_types):
            theirs = torch.empty(len(mine), dtype=torch.int64)
            sent = pg.send([torch.tensor(mine, dtype=torch.int64)], peer, _HEADER_TAG + tag)
            pg.recv([theirs], peer, _HEADER_TAG + tag).wait()
            sent.wait()
            return theirs.tolist()
        return _swap_in_store(pg, peer, tag, mine)


def _swap_in_store(pg: Any, peer: int, tag: int, mine: list[int]) -> list[int]:
    """For groups that only move device memory: through the store, one key each way."""
    me, low, high = pg.rank(), *sorted((pg.rank(), peer))
    channel = f"sp_passes/pp/{pg.group_name}/{low}-{high}/{tag}"
    _sequence[channel] += 1
    key = f"{channel}/{_sequence[channel]}"
    store = dist.PrefixStore(key, _private.default_store())
    store.set(str(me), ",".join(map(str, mine)))
    theirs = [int(n) for n in store.get(str(peer)).decode().split(",")]
    store.delete_key(str(peer))
    return theirs


# --- shapes -----------------------------------------------------------------------------


def _shard_fake(x: Tensor, group: str, tp_size: int) -> Tensor:
    return x.new_empty((local_rows(x.shape[0], tp_size), *x.shape[1:]))


def _stage_input_fake(x: Tensor, name: str, group: str, tp_size: int) -> Tensor:
    return x.new_empty((tp_size * x.shape[0], *x.shape[1:]))


def _stage_output_fake(x: Tensor, name: str, group: str, tp_size: int) -> Tensor:
    return _shard_fake(x, group, tp_size)


def _pp_send_fake(
    x: Tensor,
    dst: int,
    tag: int,
    group: str,
    placement: str = "R",
    check: bool = True,
    after: Tensor | None = None,
) -> Tensor:
    return x.new_empty(0, dtype=torch.int8)


def _pp_send__fake(
    nothing: Sequence[Tensor],
    x: Tensor,
    dst: int,
    tag: int,
    group: str,
    placement: str = "R",
    check: bool = True,
    after: Tensor | None = None,
) -> Tensor:
    return x.new_empty(0, dtype=torch.int8)


def _pp_recv_fake(
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    src: int,
    tag: int,
    group: str,
    placement: str = "R",
    check: bool = True,
    after: Tensor | None = None,
) -> Tensor:
    return torch.empty(tuple(size), dtype=dtype, device=device)


_PEER = 'int tag, str group, str placement="R", bool check=True, Tensor? after=None) -> Tensor'
_NAMED = "(Tensor x, str name, str group, int tp_size) -> Tensor"

SIGNATURES: dict[str, tuple[str, Any, Any]] = {
    "token_shard": ("(Tensor x, str group, int tp_size) -> Tensor", _token_shard, _shard_fake),
    "stage_input": (_NAMED, _stage_input, _stage_input_fake),
    "stage_output": (_NAMED, _stage_output, _stage_output_fake),
    "pp_send": (f"(Tensor x, int dst, {_PEER}", _pp_send, _pp_send_fake),
    "pp_recv": (
        f"(SymInt[] size, ScalarType dtype, Device device, int src, {_PEER}",
        _pp_recv,
        _pp_recv_fake,
    ),
}


def register_last(lib: torch.library.Library) -> None:
    """``pp_send_``, and the marks that keep sends and receives out of dead-code elimination."""
    schema = f"(Tensor(a!)[] nothing, Tensor x, int dst, {_PEER}"
    lib.define("pp_send_" + schema, tags=(torch.Tag.pt2_compliant_tag,))
    lib.impl("pp_send_", _pp_send_, "CompositeExplicitAutograd")
    torch.library.register_fake("sp_passes::pp_send_", _pp_send__fake, lib=lib)
    ops = torch.ops.sp_passes
    for packet in (ops.pp_send, ops.pp_recv):
        torch.fx.node.has_side_effect(packet.default)
        torch.fx.node.has_side_effect(packet)
