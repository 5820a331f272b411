# SPDX-License-Identifier: Apache-2.0
"""The watch names the rank that does not come, from the words that the protocol leaves."""

from __future__ import annotations

import logging
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
from stream_machine import FLAGS, MAIN, SIDE, SPACE, Machine, WrittenDown

from sp_passes import SPError
from sp_passes.bench import watch_check
from sp_passes.ops import watch
from sp_passes.ops.lanes import Lanes, words
from sp_passes.ops.watch import Watch

SIZE = 3
BASES = [SPACE * (peer + 1) for peer in range(SIZE)]


def program(rank: int) -> list[Any]:
    """Driver calls of one exchange."""
    calls = WrittenDown()
    lanes = Lanes(calls, rank, BASES, [base + FLAGS for base in BASES], SIDE, lambda: MAIN)
    lanes.exchange(0, 0, 0, 8)
    return [(stream, 0, *rest) for stream, *rest in calls.steps if rest[0] != "copy"]


def words_after(*here: int) -> list[list[int]]:
    """All ranks' words once the ranks ``here`` have called, and no stream can go on."""
    machine = Machine([program(rank) if rank in here else [] for rank in range(SIZE)])
    while ready := machine.ready():
        machine.step(ready[0])
    at = [base + FLAGS for base in BASES]
    return [[machine.words.get(a + 4 * i, 0) for i in range(words(SIZE))] for a in at]


def test_the_rank_that_did_not_come_is_named_once() -> None:
    one = Watch(0, SIZE, 60.0)
    waiting, done = words_after(0, 1), words_after(0, 1, 2)
    assert one.look(waiting, 0.0) == [] == one.look(waiting, 59.0)
    assert one.pending, "so it looks more often"
    (line,) = one.look(waiting, 61.0)
    assert line == "rank 0 has waited 61 s for rank 2, which has not come (barrier)"
    assert one.look(waiting, 99.0) == [] and one.late
    assert one.look(done, 100.0) == ["rank 2 came to rank 0"]
    assert not one.late and not one.pending
    assert one.look(waiting, 101.0) == [], "counted from the new call on"


def test_a_taken_signal_starts_the_time_again() -> None:
    one = Watch(1, SIZE, 60.0)
    waiting, idle = words_after(1), words_after()
    for now in (0.0, 59.0, 120.0):
        assert one.look(waiting, now) == []
        assert one.look(idle, now + 1) == []


@pytest.mark.parametrize(
    ("text", "found"), [("", None), ("60", (60.0, False)), ("600,abort", (600.0, True))]
)
def test_what_may_be_asked(text: str, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(watch.VARIABLE, text)
    assert watch.asked() == found


@pytest.mark.parametrize("text", ["soon", "0", "60,kill", "inf", "60,"])
def test_what_may_not(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(watch.VARIABLE, text)
    with pytest.raises(SPError, match="give seconds above 0, or seconds and abort"):
        watch.asked()


def test_what_is_not_watched_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group: Any = SimpleNamespace(group_name="7")
    for text, why in (("60s", "give seconds above 0"), ("60", "it does not move by driver calls")):
        monkeypatch.setenv(watch.VARIABLE, text)
        caplog.clear()
        assert watch.start(SimpleNamespace(lanes=None), group) is None
        (line,) = caplog.messages
        assert line.startswith("group 7 is not watched: ") and why in line


def test_a_process_is_ended_where_its_stacks_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []

    def end() -> None:
        ended.append(1)
        raise SystemExit

    def closed(file: Any) -> None:
        raise OSError("closed")

    monkeypatch.setattr(watch.os, "abort", end)
    monkeypatch.setattr(watch.faulthandler, "dump_traceback", closed)
    monkeypatch.setattr(watch, "_lives", lambda *about: True)
    one, held = Watch(0, SIZE, 1e-9), words_after(0, 1)
    with pytest.raises(SystemExit):
        watch.follow(one, lambda: held, "7", None, True)
    assert ended


def test_the_check_over_links_can_fail() -> None:
    good = {"right": [True], "driver_calls": True, "lines": []}
    row = {"case": "captures", "codes": [0, 0], "ranks": [good, good]}
    assert watch_check.passed(row)
    for wrong in ({"driver_calls": False}, {"right": [True, False]},
                  {"lines": ["group 0 is not watched any more: gone"]}):  # fmt: skip
        assert not watch_check.passed({**row, "ranks": [good, {**good, **wrong}]})


def test_the_thread_logs_and_ends_with_its_group(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = words_after(0, 1)
    monkeypatch.setattr(watch, "reader", lambda *about: lambda: held)
    peers: Any = SimpleNamespace(rank=0, size=SIZE, lanes=SimpleNamespace(calls=None), _words=[])
    with ranks.single() as group, caplog.at_level(logging.ERROR):
        assert watch.start(peers, group) is None, "not asked for"
        monkeypatch.setenv(watch.VARIABLE, "0.05")
        thread = watch.start(peers, group)
        assert thread is not None and thread.daemon
        end = time.monotonic() + 20
        while not caplog.records and time.monotonic() < end:
            time.sleep(0.01)
        assert "for rank 2" in caplog.records[0].getMessage() and thread.is_alive()
    thread.join(20)
    assert not thread.is_alive()
    assert watch._lives("gone", weakref.ref(group)) is False
