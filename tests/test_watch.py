# SPDX-License-Identifier: Apache-2.0
"""The watch names the rank that does not come, from the words that the protocols leave."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from stream_machine import FLAGS, MAIN, SIDE, SPACE, Machine, WrittenDown

from sp_passes import SPError
from sp_passes.bench import watch_check
from sp_passes.ops import mailbox, one_launch, one_shot, waits, watch
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


def taken(rank: int) -> waits.Taken:
    return waits.Taken(rank, [torch.empty(0)] * SIZE, "ops")


class Read:
    """Words without a GPU."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read, self.drained = read, threading.Event()

    def __call__(self) -> Any:
        return self.read()

    def drain(self) -> None:
        self.drained.set()


def test_the_rank_that_did_not_come_is_named_once() -> None:
    one = Watch(0, SIZE, [taken(0)], 60.0)
    waiting, done = [words_after(0, 1)], [words_after(0, 1, 2)]
    assert one.look(waiting, 0.0) == [] == one.look(waiting, 59.0)
    assert one.pending, "so it looks more often"
    (line,) = one.look(waiting, 61.0)
    assert line == "rank 0 has waited 61 s for rank 2, which has not come (barrier of ops)"
    assert one.look(waiting, 99.0) == [] and one.late
    assert one.look(done, 100.0) == ["rank 2 came to rank 0"]
    assert not one.late and not one.pending
    assert one.look(waiting, 101.0) == [], "counted from the new call on"


def test_a_taken_signal_starts_the_time_again() -> None:
    one = Watch(1, SIZE, [taken(1)], 60.0)
    waiting, idle = [words_after(1)], [words_after()]
    for now in (0.0, 59.0, 120.0):
        assert one.look(waiting, now) == []
        assert one.look(idle, now + 1) == []


def test_a_wait_without_a_number_is_forgotten_over_a_gap(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that stood still looked at one wait before and at another one after."""
    gaps = iter([0.0, 0.1, 90.0, 0.1])
    held = [words_after(0, 1)]
    clock = [1000.0]

    def read() -> Any:
        clock[0] += next(gaps, 0.1)
        return held

    looks: list[float] = []
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock[0])
    waits_for = SimpleNamespace(wait=looks.append, is_set=lambda: False)
    monkeypatch.setattr(watch, "_ends", waits_for)
    monkeypatch.setattr(watch, "_lives", lambda *about: len(looks) < 4)
    monkeypatch.setattr(watch, "Apart", Here)
    monkeypatch.setattr(watch, "_end", lambda: pytest.fail("it ended the process"))
    watch.follow(Watch(0, SIZE, [taken(0)], 60.0), Read(read), "7", None, True)
    assert not caplog.messages
    one = Watch(0, SIZE, [taken(0)], 60.0)
    one.look(held, 0.0)
    one.look(held, 60.0)
    one.forget()
    assert one.look(held, 90.0) == [] and one.late, "who was named has not come by that"


class Here:
    """``Apart`` on the same thread."""

    def __init__(self, read: Any) -> None:
        self.read = read

    def __call__(self) -> Any:
        return self.read()

    def close(self) -> None:
        self.read.drain()


def held_by(signals: Any) -> Any:
    return [[box.flatten().tolist() for box in one.boxes] for one in signals]


def test_counters_name_the_piece_and_the_call() -> None:
    flags = mailbox.flags_of(torch.zeros(mailbox.nbytes(SIZE) // 4, dtype=torch.int32), SIZE)
    box = mailbox.Mailbox(flags, list(flags))
    signals = [waits.Counted(box, "ops")]
    one = Watch(0, SIZE, signals, 60.0)
    for call in (1, 2):
        box.number(2)
        for peer, piece in ((1, 0), (1, 1), (2, 1)):
            box.signal(peer, piece)
        one.look(held_by(signals), 100.0 * call)
        assert not one.pending, "the next call is told from this one"
        (line,) = one.look(held_by(signals), 100.0 * call + 60)
        assert line.endswith(f"for rank 2, which has not come (rows of ops, piece 0, call {call})")
        box.signal(2, 0)
        assert one.look(held_by(signals), 100.0 * call + 61) == ["rank 2 came to rank 0"]


def test_one_shot_s_flags_name_the_call_and_an_early_rank_does_not_wait() -> None:
    """What a rank has delivered to itself is what it waits for, in any of its programs."""
    mine = torch.zeros(one_shot.buffer_bytes(SIZE, 1, 64, 64), dtype=torch.uint8)
    shot = one_shot.OneShot([mine.data_ptr()] * SIZE, mine, 1, 1, 64, 64, 64)
    signals = shot.signals()
    one = Watch(1, SIZE, signals, 60.0)
    added = one_shot.flags_of(mine, SIZE, one_shot.flag_bytes(SIZE))
    for call in range(1, 200):  # always one call ahead of rank 0
        added[:] = torch.tensor([call - 1, call, call + 1])
        assert one.look(held_by(signals), 59.0 * call) == []
    added[3:] = call
    (line,) = one.look(held_by(signals), 59.0 * call + 60)
    assert line == (
        "rank 1 has waited 60 s for rank 0, which has not come (addends of ag_mlp_rs, call 199)"
    )


def test_waits_of_several_kinds_are_named_together_and_numbers_wrap() -> None:
    mine = torch.zeros(one_launch.buffer_bytes(SIZE), dtype=torch.uint8)
    made = one_launch.OneLaunch([mine.data_ptr()] * SIZE, mine, 0)
    signals = [taken(0), *made.signals()]
    flags = one_shot.flags_of(mine, SIZE)
    flags[:] = 2**31 - 1
    flags[:, 0] = -(2**31)
    held = [words_after(0, 1), *held_by(signals[1:])]
    one = Watch(0, SIZE, signals, 1.0)
    one.look(held, 0.0)
    first, second = one.look(held, 1.0)
    small = "all_gather or reduce_scatter of one_shot, call -2147483648"
    assert first.endswith(f"rank 1, which has not come ({small})")
    assert second.endswith(f"rank 2, which has not come (barrier of ops; {small})")


def test_the_reader_copies_once_and_comes_back_while_the_gpu_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[tuple[int, int, int]] = []
    done = [False]
    calls: Any = SimpleNamespace(
        own_stream=lambda: 7,
        done=lambda stream: done[0] and stream == 7,
        copy=lambda to, source, nbytes, stream: copied.append((to, source, nbytes)),
    )
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda n, dtype, pin_memory: zeros(n, dtype=dtype))
    for name in ("set_device", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(watch._private, "let_others_capture", lambda: None)
    monkeypatch.setattr(watch, "_READ_S", 0.01)
    boxes = [torch.arange(5 + i, dtype=torch.int32) for i in range(SIZE)]
    read = watch.Reader([waits.Taken(0, boxes, "ops")], torch.device("cuda", 0), calls)
    assert read() is None is read() and len(copied) == SIZE, "the same copies are still under way"
    for to, source, nbytes in copied:
        ctypes.memmove(to, source, nbytes)
    done[0] = True
    assert read() == [[box.tolist() for box in boxes]]
    assert read() is not None and len(copied) == 2 * SIZE
    done[0] = False
    assert read() is None
    threading.Timer(0.1, lambda: done.__setitem__(0, True)).start()
    begin = time.monotonic()
    read.drain()
    assert time.monotonic() - begin > 0.05, "memory stays until nothing is copied"


def test_words_that_cannot_be_read_are_said_once() -> None:
    """Counted from the first look that failed; the last one before it is told."""
    one = Watch(0, SIZE, [taken(0)], 60.0)
    one.look([words_after(0, 1)], 0.0)
    assert one.look(None, 100.0) == [] == one.look(None, 159.0) and not one.late
    (line,) = one.look(None, 161.0)
    assert "has waited 61 s to read the words" in line and one.late
    assert line.endswith("does not end; at the last look it waited for rank 2 (barrier of ops)")
    assert one.look(None, 199.0) == []
    again = one.look([words_after(0, 1, 2)], 200.0)
    assert again == ["rank 0 can read the words again"] and not one.late
    assert one.look(None, 300.0) == [], "counted anew"


def test_a_driver_call_that_does_not_come_back_does_not_hold_the_watch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where another thread copies from pageable memory behind work that does not end."""
    ended, released = threading.Event(), threading.Event()

    reads: list[int] = []

    def read() -> Any:
        reads.append(1)
        released.wait(5)
        return [words_after(0, 1, 2)]

    def end() -> None:
        ended.set()
        raise SystemExit

    monkeypatch.setattr(watch, "_READ_S", 0.01)
    until = time.monotonic() + 4
    monkeypatch.setattr(watch, "_lives", lambda *about: time.monotonic() < until)
    monkeypatch.setattr(watch, "_end", end)
    with pytest.raises(SystemExit):
        watch.follow(Watch(0, SIZE, [taken(0)], 0.05), Read(read), "7", None, True)
    assert ended.is_set() and "call of the CUDA driver, does not end" in caplog.messages[0]
    apart = watch.Apart(Read(read))
    reads.clear()
    assert apart() is None is apart() and len(reads) == 1, "asked for once"
    released.set()
    found = [apart() for _ in range(50)]
    assert found[-1] == [words_after(0, 1, 2)]
    apart.close()
    assert apart._read.drained.wait(5)
    assert len(reads) <= 50, "none of them is of an earlier call"


@pytest.mark.parametrize("abort", [False, True])
def test_a_gpu_that_refuses_calls_ends_the_watch_and_where_asked_the_process(
    abort: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that waited too long has ended itself: the last look still says for whom."""
    ended: list[int] = []
    held = [words_after(0, 1)]

    def read() -> Any:
        if ended:
            raise SPError("the CUDA driver refused a look at a stream: 719")
        ended.append(0)
        return held

    until = time.monotonic() + 4
    lives = lambda *about: len(ended) < 2 and time.monotonic() < until  # noqa: E731
    monkeypatch.setattr(watch, "_lives", lives)
    monkeypatch.setattr(watch, "_end", lambda: ended.append(1))
    watch.follow(Watch(0, SIZE, [taken(0)], 0.05), Read(read), "7", None, abort)
    assert len(ended) == 1 + abort
    assert caplog.messages[0] == (
        "group 7 is not watched any more: the CUDA driver refused a look at a stream: 719; at the "
        "last look it waited for rank 2 (barrier of ops)"
    )
    assert len(caplog.messages) == 1 + abort


def test_a_watch_that_cannot_be_set_up_ends_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read() -> Any:
        raise SPError("the CUDA driver refused a stream")

    monkeypatch.setattr(watch, "_lives", lambda *about: True)
    monkeypatch.setattr(watch, "_end", lambda: pytest.fail("it ended the process"))
    watch.follow(Watch(0, SIZE, [taken(0)], 0.05), Read(read), "7", None, True)
    assert "is not watched any more" in caplog.messages[0]


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
        nothing: Any = SimpleNamespace(signals=lambda: ())
        assert watch.start(nothing, group, torch.device("cpu")) is None
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
    one, held = Watch(0, SIZE, [taken(0)], 1e-9), [words_after(0, 1)]
    with pytest.raises(SystemExit):
        watch.follow(one, Read(lambda: held), "7", None, True)
    assert ended


def test_the_check_over_links_can_fail() -> None:
    good = {"right": [True], "driver_calls": True, "lines": []}
    row = {"case": "captures", "codes": [0, 0], "ranks": [good, good]}
    assert watch_check.passed(row)
    for wrong in ({"driver_calls": False}, {"right": [True, False]}, {"right": []},
                  {"lines": ["group 0 is not watched any more: gone"]}):  # fmt: skip
        assert not watch_check.passed({**row, "ranks": [good, {**good, **wrong}]})
    came = "rank 1 came to rank 0"
    said = "group 0: rank 0 has waited 1 s for rank 1, which has not come (barrier of copy_engine)"
    blind = "rank 0 has waited 1 s to read the words that say for whom it waits: does not end"
    again = "rank 0 can read the words again"
    for name, lines, passes in (
        ("copy_engine", [said, came], True), ("copy_engine", [said], False),
        ("copy_engine", [came, said], False), ("one_shot", [said, came], False),
        ("copy_engine", [blind, again], False), ("first launches", [blind, again, came], True),
        ("first launches", [blind], False), ("first launches", [], False),
    ):  # fmt: skip
        found = [{"right": [True], "said": {name: lines}}, {"right": [True], "said": {name: []}}]
        assert watch_check.passed({"case": "late", "codes": [0, 0], "ranks": found}) is passes
    dead = {"case": "dead copy_engine", "codes": [-6, -9], "texts": [f"x\n  {said}\n", ""]}
    assert watch_check.passed(dead)
    for wrong in ({"codes": [-9, -9]}, {"case": "dead one_shot"}, {"texts": [came, said]},
                  {"texts": [blind, ""]}, {"codes": [], "texts": ["not begun"]}):  # fmt: skip
        assert not watch_check.passed({**dead, **wrong})
    held = {**dead, "case": "held one_shot", "texts": [blind, ""]}
    assert watch_check.passed(held) and not watch_check.passed({**held, "texts": [came, ""]})
    error = "CUDA error: unspecified launch failure"
    limit = {"case": "limit hopper", "codes": [0, -9], "ranks": [{"error": error, "lines": []}]}
    assert watch_check.passed(limit)
    for wrong in ({"codes": [-9, -9]}, {"case": "limit triton"}, {"ranks": []}):
        assert not watch_check.passed({**limit, **wrong})


def test_the_thread_logs_and_ends_with_its_group(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = [words_after(0, 1)]
    monkeypatch.setattr(watch, "Reader", lambda *about: Read(lambda: held))
    monkeypatch.setattr(watch, "Driver", lambda: None)
    made: Any = SimpleNamespace(rank=0, size=SIZE, signals=lambda: [taken(0)])
    device = torch.device("cpu")
    with ranks.single() as group, caplog.at_level(logging.ERROR):
        assert watch.start(made, group, device) is None, "not asked for"
        monkeypatch.setenv(watch.VARIABLE, "0.05")
        thread = watch.start(made, group, device)
        assert thread is not None and thread.daemon
        end = time.monotonic() + 20
        while not caplog.records and time.monotonic() < end:
            time.sleep(0.01)
        assert "for rank 2" in caplog.records[0].getMessage() and thread.is_alive()
    thread.join(20)
    assert not thread.is_alive()
    assert watch._lives("gone", weakref.ref(group)) is False


def test_python_s_end_stops_the_threads_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon thread that comes back from the driver afterwards would take the process down."""
    monkeypatch.setattr(watch, "_ends", threading.Event())
    monkeypatch.setattr(watch, "_threads", set())
    monkeypatch.setattr(watch, "_lives", lambda *about: True)
    monkeypatch.setattr(watch, "Reader", lambda *about: Read(lambda: [words_after(0, 1, 2)]))
    monkeypatch.setattr(watch, "Driver", lambda: None)
    monkeypatch.setenv(watch.VARIABLE, "60")
    made: Any = SimpleNamespace(rank=0, size=SIZE, signals=lambda: [taken(0)])
    with ranks.single() as group:
        thread = watch.start(made, group, torch.device("cpu"))
    assert thread is not None
    before = {one.ident for one in threading.enumerate() if one.name.startswith("sp_passes watch")}
    assert thread.ident in before and len(before) >= 2
    begin = time.monotonic()
    watch._finish()
    assert not thread.is_alive() and time.monotonic() - begin < 1.5
    after = {one.ident for one in threading.enumerate() if one.name.startswith("sp_passes watch")}
    assert len(before - after) >= 2


def test_a_watch_that_cannot_start_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*about: Any) -> None:
        raise TypeError("other bindings")

    made: Any = SimpleNamespace(rank=0, size=SIZE, signals=lambda: [taken(0)])
    group: Any = SimpleNamespace(group_name="7")
    monkeypatch.setenv(watch.VARIABLE, "60")
    monkeypatch.setattr(watch, "Driver", lambda: None)
    monkeypatch.setattr(watch, "Reader", refuse)
    assert watch.start(made, group, torch.device("cpu")) is None
    monkeypatch.setattr(watch, "_lives", lambda *about: True)
    monkeypatch.setattr(watch, "Apart", refuse)
    watch.follow(Watch(0, SIZE, [taken(0)], 0.05), Read(lambda: None), "7", None, True)
    assert caplog.messages == [
        "group 7 is not watched: other bindings", "group 7 is not watched any more: other bindings",
    ]  # fmt: skip
