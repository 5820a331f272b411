# SPDX-License-Identifier: Apache-2.0
"""Ranks that cannot run the same kernels, or not make the same buffers, still do the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import ranks
import torch
from ranks import Rank
from torch import Tensor

from sp_passes import SPError, _private
from sp_passes.ops import common, hopper, kernels, one_launch, shared, symmetric, triton_gemm, tuned
from sp_passes.ops.kernels import Call, choose

CALL = Call("ag_gemm", "cuda", torch.bfloat16, 6288, 7168, 4096, 2)
GATHER = Call("all_gather", "cuda", torch.bfloat16, 7168, 0, 64, 2)
CUDA = torch.device("cuda")


class Lines(logging.Handler):
    """What the package logs, from a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    lines, log = Lines(), logging.getLogger("sp_passes")
    log.addHandler(lines)
    try:
        yield lines.texts
    finally:
        log.removeHandler(lines)


@contextmanager
def replaced(*pairs: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes set, and no choice kept from before or for afterwards."""
    with ExitStack() as stack:
        for owner, name, value in pairs:
            stack.enter_context(patch.object(owner, name, value))
        for clear in (choose.cache_clear, kernels._lacking.clear):
            clear()
            stack.callback(clear)
        yield


def name_or_refusal(call: Call, name: str, group: Any) -> str:
    try:
        return choose(call, name, ref(group)).name
    except SPError as err:
        return str(err)


# --- kernels ----------------------------------------------------------------------------


def one_without_triton(at: Rank) -> dict[str, Any]:
    asked = []

    def said(value: Any, pg: Any, what: str) -> list[Any]:
        asked.append(what)
        return shared.said(value, pg, what)

    gone = "Triton is not installed" if at.rank == 1 else None
    with (
        replaced(
            (triton_gemm, "triton_missing", lambda: gone),
            (one_launch, "triton_missing", lambda: gone),
            (tuned, "winner", lambda call: "triton" if call.k else "one_shot"),
            (common, "said", said),
        ),
        listening() as lines,
    ):
        return {
            "auto": [choose(call, "auto", ref(at.group)).name for call in (CALL, GATHER)],
            "triton": name_or_refusal(CALL, "triton", at.group),
            "copy_engine": name_or_refusal(CALL, "copy_engine", at.group),
            "more": choose(CALL._replace(tokens=64), "auto", ref(at.group)).name,
            "asked": len(asked),
            "lines": lines,
        }


@pytest.mark.multirank
def test_a_kernel_that_one_rank_cannot_run_is_run_by_none() -> None:
    for found in ranks.run(one_without_triton, 2):
        assert found["auto"] == ["unfused", "unfused"] and found["more"] == "unfused"
        assert "[6288, 7168], 4096 tokens on 2 ranks, bfloat16: rank 1: Triton" in found["triton"]
        assert found["copy_engine"] == "copy_engine", "it needs no Triton"
        assert found["asked"] == 1, "compared once a group"
        (line,) = found["lines"]
        assert line.endswith(": no rank runs one_shot, triton (rank 1: Triton is not installed)")


def one_alone(at: Rank) -> Tensor:
    """An op where one rank's table has a kernel that the other's refuses."""

    def alone(*args: Any, **options: Any) -> Tensor:
        raise AssertionError("the other rank runs another kernel")

    row = kernels.Kernel("fast", "all_gather", alone, lambda call: "no" if at.rank else None)
    x = torch.arange(6.0).view(2, 3) + 10 * at.rank
    with (
        replaced((kernels, "no_peers", lambda call: None), (tuned, "winner", lambda call: "fast")),
        patch.dict(kernels._TABLE, {("all_gather", "fast"): row}),
    ):
        out: Tensor = torch.ops.sp_passes.all_gather(x, at.group.group_name, 2)
    return out


@pytest.mark.multirank
def test_the_op_itself_asks_the_group() -> None:
    rows = torch.arange(6.0).view(2, 3)
    for out in ranks.run(one_alone, 2, timeout=60):
        assert out.equal(torch.cat([rows, rows + 10]))


def test_other_machines_run_unfused() -> None:
    fits: dict[common.Row, str | None] = {(op, "unfused"): None for op in kernels.OPS}
    fits[CALL.op, "copy_engine"] = None
    fits[CALL.op, "hopper"] = "it is written for compute capability 9.0"
    found = common.differing([("A", fits), ("A", fits), ("B", fits)])
    assert set(found) == {("ag_gemm", "copy_engine"), ("ag_gemm", "hopper")}
    assert found["ag_gemm", "copy_engine"] == "rank 0 has A; rank 2 has B"
    assert common.differing([("A", fits)] * 3) == {}, "what none can run, all know"
    more = {**fits, ("ag_gemm", "extra"): None}
    found = common.differing([("A", fits), ("A", more)])
    assert found == {("ag_gemm", "extra"): "rank 0: it has no such kernel"}


def test_nothing_is_compared_inside_a_capture(solo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with replaced((tuned, "winner", lambda call: None), (tuned, "capability", lambda: (9, 0))):
        with pytest.raises(SPError, match=r"run one step before capturing, or .*'unfused'"):
            choose(CALL, "auto", ref(solo))
        assert choose(CALL, "unfused", ref(solo)).name == "unfused"


# --- buffers ----------------------------------------------------------------------------


def one_out_of_memory(at: Rank) -> dict[str, Any]:
    def make(pg: Any, device: torch.device, nbytes: int) -> Any:
        if at.rank == 1 and nbytes > 100:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return SimpleNamespace(nbytes=nbytes)

    fresh = [(symmetric, name, {}) for name in ("_workspaces", "_unusable")]
    with (
        replaced(*fresh, (symmetric, "SymmetricPeers", make), (hopper, "for_group", make)),
        listening() as lines,
    ):
        return {
            "made": [
                symmetric.workspace(at.group, CUDA, nbytes) is not None for nbytes in (64, 200, 32)
            ],
            "hopper": hopper.workspace(at.group, CUDA, 200, 1) is not None,
            "lines": lines,
        }


@pytest.mark.multirank
def test_a_buffer_that_one_rank_cannot_make_is_made_by_none() -> None:
    first, second = ranks.run(one_out_of_memory, 2)
    assert first == second
    assert first["made"] == [True, False, True], "the smaller one is still there"
    assert not first["hopper"] and len(first["lines"]) == 2
    assert first["lines"][0].endswith("need 200 bytes run unfused: rank 1: CUDA out of memory.")


def one_without_room(at: Rank, where: int) -> list[str]:
    """The steps that each rank takes where the second cannot allocate, or one fails before."""
    steps = []

    def empty(nbytes: int, **where: Any) -> Tensor:
        steps.append("empty")
        if at.rank == 1:
            raise RuntimeError("no room")
        return torch.empty(nbytes)

    def rendezvous(buffer: Tensor, group: str) -> None:
        steps.append("rendezvous")

    def make() -> Any:
        if at.rank == where:
            raise ValueError("before it")
        return shared.allocate(at.group, CUDA, 8)

    made = {"empty": empty, "rendezvous": rendezvous}
    with patch.object(_private, "_get", lambda module, name: made[name]):
        try:
            shared.together(at.group, make)
        except SPError as err:
            steps.append(str(err))
    return [*steps, *shared.said(f"then {at.rank}", at.group, "see that no rank is behind")]


@pytest.mark.multirank
def test_nobody_waits_for_a_rank_that_could_not_allocate() -> None:
    then = ["then 0", "then 1"]
    assert ranks.run(one_without_room, 2, 9) == [["empty", "rank 1: no room", *then]] * 2
    first, second = ranks.run(one_without_room, 2, 0)
    assert first == ["rank 0: ValueError: before it", *then]
    assert second == ["empty", *first]
