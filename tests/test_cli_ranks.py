# SPDX-License-Identifier: Apache-2.0
"""run_ranks: results, failures, deaths, time-outs; and that nothing is left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sp_passes import ranks
from sp_passes.errors import SPError
from sp_passes.ranks import RankError, run_ranks, tell

pytestmark = pytest.mark.multirank


def _sum(rank: int, world: int, scale: int) -> torch.Tensor:
    tell(f"hello from {rank}")
    x = torch.tensor([rank + 1]) * scale
    dist.all_reduce(x)
    return x


def _misbehave(rank: int, world: int, how: str, folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    dist.barrier()
    if rank == 1 and how == "raise":
        raise ValueError("the weights are on holiday")
    if rank == 1 and how == "refuse":
        raise SPError("give me something else")
    if rank == 1 and how == "die":
        os._exit(7)
    if rank == 1:
        time.sleep(600)
    dist.barrier()  # waits for rank 1, which does not come


def gone(folder: Path) -> bool:
    return not any(Path("/proc", path.name).exists() for path in folder.iterdir())


def test_results_by_rank_and_progress() -> None:
    heard: list[tuple[int, str]] = []
    found = run_ranks(_sum, 2, 10, notify=lambda rank, text: heard.append((rank, text)))
    assert [x.item() for x in found] == [30, 30]
    assert sorted(heard) == [(0, "hello from 0"), (1, "hello from 1")]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "rank 1 of 2 failed: ValueError: the weights are on holiday"),
        ("refuse", "rank 1 of 2 failed: SPError: give me something else"),
        ("die", "rank 1 of 2 died with exit code 7"),
    ],
)
def test_a_bad_rank_ends_all(tmp_path: Path, how: str, message: str) -> None:
    with pytest.raises(RankError) as err:
        run_ranks(_misbehave, 2, how, str(tmp_path))
    assert err.value.summary == message
    assert err.value.expected == (how == "refuse")
    if how == "raise":
        assert "in _misbehave" in str(err.value)
    assert len(list(tmp_path.iterdir())) == 2 and gone(tmp_path)


def test_time_out_ends_all(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"ranks \[0, 1\] of 2 did not end within 12 s"):
        run_ranks(_misbehave, 2, "sleep", str(tmp_path), timeout=12)
    assert gone(tmp_path)


def _never_parts(rank: int, world: int, folder: str) -> int:
    Path(folder, str(os.getpid())).touch()
    if rank == 1:  # as NCCL's does while a CUDA graph that captured it lives
        dist.destroy_process_group = lambda: time.sleep(600)
    return rank * 10


def test_a_rank_that_never_parts_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_PARTING", 1.0)
    with pytest.warns(
        RuntimeWarning, match=r"ranks \[1\] of 2 returned, but did not end within 1 s"
    ):
        assert run_ranks(_never_parts, 2, str(tmp_path)) == [0, 10]
    assert gone(tmp_path)


def test_work_may_end_its_group_itself() -> None:
    assert not dist.is_initialized()
    ranks._part()


def test_no_ranks() -> None:
    with pytest.raises(SPError, match="at least 1 rank"):
        run_ranks(_sum, 0, 1)
