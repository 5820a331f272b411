# SPDX-License-Identifier: Apache-2.0
"""One call for everything on a GPU machine: what fits runs, what hangs is ended."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from sp_passes.bench import everything as bench
from sp_passes.bench.everything import Step

PYTHON = sys.executable


def script(tmp_path: Path, name: str, text: str) -> str:
    (tmp_path / f"{name}.py").write_text(text)
    return f"{PYTHON} {tmp_path / name}.py"


def test_steps_that_fail_hang_or_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hang = "import signal, subprocess, sys\nprint('child', flush=True)\n"
    hang += "def asked(*_): print('asked to end', flush=True); sys.exit()\n"
    hang += "signal.signal(signal.SIGTERM, asked)\n"
    hang += "subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    steps = [
        Step(
            "good", script(tmp_path, "good", "print('a'); print('42 of 42')"), 1, 30, needs=PYTHON
        ),
        Step("bad", script(tmp_path, "bad", "raise SystemExit(3)"), 1, 30, needs=PYTHON),
        Step("hangs", script(tmp_path, "hangs", hang), 1, 2, needs=PYTHON),
        Step("long", script(tmp_path, "long", ""), 900, 900, needs=PYTHON),
        Step("wide", script(tmp_path, "wide", ""), 1, 30, gpus=2, needs=PYTHON),
        Step("tool", "no-such-tool", 1, 30, needs="no-such-tool"),
    ]
    rows = bench.everything(steps, tmp_path / "out", 60, gpus=1)
    assert [row.get("code", "left out") for row in rows] == [0, 3, None, *["left out"] * 3]
    lines = capsys.readouterr().out.splitlines()
    assert "ok" in lines[0] and lines[0].endswith("42 of 42")
    assert "exit 3" in lines[1] and "ended" in lines[2] and lines[2].endswith("asked to end")
    assert rows[2]["seconds"] < 20
    assert "takes about 900 s" in lines[3]
    assert "needs 2 GPUs, there are 1" in lines[4] and "not installed" in lines[5]
    assert len(json.loads((tmp_path / "out" / "everything.json").read_text())["steps"]) == 6


def test_steps_that_measure_nothing_run_together(tmp_path: Path) -> None:
    meet = "import pathlib, sys, time\nhere = pathlib.Path(__file__).parent\n"
    meet += (
        "(here / sys.argv[1]).touch()\nwhile not (here / sys.argv[2]).exists(): time.sleep(0.05)"
    )
    steps = [
        Step(a, f"{script(tmp_path, a, meet)} {a} {b}", 1, 20, needs=PYTHON, results=True)
        for a, b in (("one", "two"), ("two", "one"))
    ]
    alone = Step("alone", script(tmp_path, "alone", "pass"), 1, 20, needs=PYTHON)
    rows = bench.everything([*steps, alone, alone, steps[0]], tmp_path / "out", 60, gpus=1)
    assert [(row["code"], row["group"]) for row in rows] == [
        (0, 0), (0, 0), (0, 1), (0, 2), (0, 3)
    ]  # fmt: skip


def test_commands_are_of_this_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(bench.STEPS)
    for step in bench.STEPS:
        words = step.words(Path("DIR"), 2)
        (module,) = {word for word in words if word.startswith("sp_passes")}
        assert find_spec(module) is not None and not any("{" in word for word in words)
        assert step.usual < step.limit


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, message in (
        (["--only", "x"], "no step x; there are models"),
        ([], "--out is needed"),
    ):
        with pytest.raises(SystemExit):
            bench.main(wrong)
        assert message in capsys.readouterr().err


def test_a_call_in_which_nothing_ran_is_no_success(tmp_path: Path) -> None:
    assert bench.main(["--out", str(tmp_path), "--budget", "0", "--only", "models,gemm"]) == 1
