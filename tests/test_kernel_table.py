# SPDX-License-Identifier: Apache-2.0
"""The shipped kernel table is what the results that it names come to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sp_passes import SPError, bench
from sp_passes.bench import kernel_table
from sp_passes.ops import tuned

RESULTS = Path(bench.__file__).parent / "results"


def saved(path: Path, times: dict[int, dict[str, float]], link: str = "peer") -> Path:
    """A result of one ``ag_gemm``; a floor of 1 µs."""
    rows = [
        {"op": "ag_gemm", "n": 8, "k": 8, "tp_size": 2, "tokens": m, "link": link, "us": us,
         "over_floor": us}
        for m, us in times.items()
    ]  # fmt: skip
    path.write_text(json.dumps({"rows": rows}))
    return path


def test_the_shipped_table_is_made_from_the_results_it_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    entries = json.loads(tuned.SHIPPED.read_text())
    files = sorted({name for one in entries for name in one["source"].split(", ")})
    assert files and kernel_table.main([*(str(RESULTS / name) for name in files), "--check"]) == 0
    assert "slower than unfused in 0" in capsys.readouterr().out


def test_the_last_file_counts_and_a_kernel_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "table.json")
    win, lose = {"unfused": 2.0, "hopper": 1.0}, {"unfused": 2.0, "hopper": 3.0}
    first = saved(tmp_path / "1.json", {64: win, 128: lose, 256: win})
    second = saved(tmp_path / "2.json", {128: win | {"triton": 0.5, "torch": 0.1}})
    key: Any = ((9, 0), "ag_gemm", 8, 8, 2, "bfloat16")
    files = [str(first), str(second)]

    assert kernel_table.main([*files, "--check"]) == 1 and not tuned.SHIPPED.exists()
    assert kernel_table.main(files) == 0
    assert tuned.read(tuned.SHIPPED) == {key: ((64, "unfused"), (256, "hopper"))}
    assert json.loads(tuned.SHIPPED.read_text())[0]["source"] == "1.json, 2.json"
    assert kernel_table.main([*reversed(files)]) == 0  # 128 tokens as in the first
    assert tuned.read(tuned.SHIPPED) == {key: ((256, "unfused"),)}
    assert "64, hopper to 256 -> unfused to 256" in capsys.readouterr().out
    kernel_table.main([*files, "--without", "ag_gemm:hopper"])
    assert tuned.read(tuned.SHIPPED) == {key: ((256, "unfused"),)}


def test_times_of_stand_ins_make_no_table(tmp_path: Path) -> None:
    with pytest.raises(SPError, match="measured with pinned in place of links"):
        kernel_table.rows_of([saved(tmp_path / "1.json", {64: {"unfused": 1.0}}, "pinned")])
    with pytest.raises(SPError, match=r"no rows in .*1\.json"):
        kernel_table.rows_of([saved(tmp_path / "1.json", {})])


def test_an_entry_names_the_results_of_its_own_ranks(tmp_path: Path) -> None:
    rows = kernel_table.rows_of([saved(tmp_path / "1.json", {64: {"unfused": 1.0}})])
    rows += [{**row, "tp_size": 4, "file": "2.json"} for row in rows]
    found = kernel_table.entries(rows, (9, 0))
    assert {source: [key[4] for key in made] for source, made in found.items()} == {
        "1.json": [2], "2.json": [4],
    }  # fmt: skip
