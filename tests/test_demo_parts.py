# SPDX-License-Identifier: Apache-2.0
"""The parts of the demo, verify on ranks, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sp_passes.cli import demo as demo_command
from sp_passes.cli import verify as verify_command
from sp_passes.cli.main import app
from sp_passes.demo import full_size, shrunken, wrong_design
from sp_passes.demo.shrunken import Compared
from sp_passes.ranks import run_ranks


def test_the_checker_refuses_the_wrong_design() -> None:
    message = str(wrong_design.refusal(4))
    assert "Shard(0)" in message and "Shard(1)" in message
    assert "gate, up = nn.functional.linear(x, self.gate_up)" in message


@pytest.mark.multirank
def test_the_wrong_design_is_wrong_only_where_tokens_differ() -> None:
    for found in run_ranks(wrong_design.numbers, 2):
        assert found.own_tokens > 0.3
        assert found.same_tokens < 1e-6


def test_known_figures_by_kind_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of the demo on fake tensors, with fewer layers."""
    full = full_size.model_config("kimi-k3", None)
    monkeypatch.setattr(full_size, "model_config", lambda model, layers: full.with_layers(3))
    reports, moved = demo_command._full_width(demo_command.Console(quiet=True))
    figures = {4: (1.015, 16.98, 6.60, 90.6), 8: (1.184, 19.81, 7.70, 105.7)}
    figures[16] = (1.269, 21.23, 8.25, 113.2)
    for tp, (dense, shared, routed, f_a) in figures.items():
        kinds = {k.name: k for k in full_size.kinds(reports[tp])}
        mlp = kinds["layers.*.mlp"]
        assert round(mlp.saved / 2**30, 3) == dense and round(mlp.whole / 2**30, 3) == 1.354
        experts = kinds["layers.*.block_sparse_moe.shared_experts"]
        assert experts.sites == 2
        assert round(experts.saved / experts.sites * 92 / 2**30, 2) == shared
        both = [k for name, k in kinds.items() if "routed_expert" in name]
        saved = sum(k.saved / k.sites * 92 for k in both) / 2**30
        assert len(both) == 2 and saved == pytest.approx(routed, abs=0.005)
        latent = kinds["layers.*.self_attn.f_a_proj"]
        assert round(latent.saved / latent.sites * 69 / 2**20, 1) == f_a
        before, after = moved[tp]
        assert sum(after.count.values()) > sum(before.count.values())
        assert sum(after.sent.values()) > sum(before.sent.values()) > 0
    found = demo_command._as_dict(reports, moved, [], [], wrong_design.refusal(4), 1.0)
    tp8 = json.loads(json.dumps(found))["full_width"]["tp8"]
    assert tp8["bytes_sent_per_step"]["after"] == sum(moved[8][1].sent.values())
    assert tp8["kinds"] and all(kind["saved"] for kind in tp8["kinds"])


def test_ranks_are_merged_for_each_count() -> None:
    near, far = Compared(3, 1e-7, 0.0, 1e-5), Compared(3, 1e-3, 0.0, 1e-5)
    assert shrunken.merged([[near], [far]], "fp32") == [far]
    assert near.ok and not far.ok
    (both,) = shrunken.merged([[Compared(1, 3.0, 4.0, 5.0)], [Compared(1, 4.0, 3.0, 5.0)]], "bf16")
    assert both.error == both.own_error == 12.5**0.5 and both.limit == 5.0


def _verify(*args: str) -> Any:
    return CliRunner().invoke(app, ["verify", *args])


@pytest.mark.multirank
@pytest.mark.slow
def test_verify_on_two_ranks() -> None:
    """The dense MLP's layer; test_latent_projection_ranks compares those with experts."""
    result = _verify("--tp", "2", "--layers", "1", "--tokens", "5", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["ok"] and [c["rows"] for c in data["counts"]] == [3]
    assert 0 < data["counts"][0]["error"] < 1e-5


def test_verify_tells_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [[Compared(3, 1e-7, 0.0, 1e-5), Compared(1, 0.3, 0.0, 1e-5)]]
    monkeypatch.setattr(verify_command, "run_ranks", lambda *args, **kwargs: found)
    result = _verify()
    assert result.exit_code == 1
    assert "DIFFERENT" in result.stdout and "equal" in result.stdout


# --- Ctrl-C -----------------------------------------------------------------------------

# The demo with the part on fake tensors left out, so that its ranks run at once.
# A job in the background is started with SIGINT ignored, and hands that on.
_DEMO = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from sp_passes.cli import demo, main
demo._full_width = lambda out: ({}, {})
sys.argv = ["sp-passes", "demo"]
main.main()
"""


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    todo = [pid]
    while todo:
        try:
            tasks = list(Path(f"/proc/{todo.pop()}/task").iterdir())
            children = [int(c) for t in tasks for c in (t / "children").read_text().split()]
        except OSError:
            continue
        found.update(children)
        todo.extend(children)
    return found


def _is_rank(pid: int) -> bool:
    try:
        return b"multiprocessing.spawn" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait(seconds: float, until: Any) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if until():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("how", ["SIGINT to the caller", "SIGINT to the group", "SIGKILL"])
def test_interrupted_ranks_leave_nothing_behind(how: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _DEMO],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    seen: set[int] = set()

    def ranks_run() -> bool:
        seen.update(_descendants(process.pid))
        return sum(map(_is_rank, seen)) == demo_command.RANKS

    try:
        assert _wait(60, ranks_run), process.poll()
        time.sleep(4 if how == "SIGINT to the caller" else 0)  # in mid-work, and at the start
        seen |= _descendants(process.pid)
        if how == "SIGINT to the group":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGKILL if how == "SIGKILL" else signal.SIGINT)
        _, stderr = process.communicate(timeout=90)
    finally:
        process.kill()
    assert _wait(15, lambda: not any(map(_alive, seen))), [p for p in seen if _alive(p)]
    if how != "SIGKILL":
        assert process.returncode == 130
        assert "Traceback" not in stderr and "sp-passes: interrupted" in stderr
