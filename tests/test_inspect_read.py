# SPDX-License-Identifier: Apache-2.0
"""Dumps of every kind -> the same graph; whatever is no dump -> one clean line."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from inspect_graphs import TP, GatedMLP, k3_text, mlp_text, printed, traced, traced_k3

import sp_passes
from sp_passes.inspect import Dump, InspectError, inspect, load
from sp_passes.inspect.choose import choose
from sp_passes.inspect.text import TextReader

CONFIG = sp_passes.SPConfig(tp_size=TP)


def decisions(made: Any) -> list[tuple[Any, ...]]:
    """What was decided, with bytes, by sites' names."""
    assert made.error == "" and made.report is not None
    return [
        (d.pattern, d.name, d.applied, d.bytes_saved_per_rank, tuple(d.weights))
        for d in made.report.decisions
        if d.applied
    ]


def only(path: Path) -> Dump:
    (found,) = load(path).dumps
    return found


def write(folder: Path, text: str, name: str = "dump.txt") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def direct() -> list[tuple[Any, ...]]:
    """Decisions on the traced graph itself."""
    report = sp_passes.rewrite(traced_k3(), CONFIG)
    return [
        (d.pattern, d.name, d.applied, d.bytes_saved_per_rank, tuple(d.weights))
        for d in report.decisions
        if d.applied
    ]


def test_printed_text_gives_the_traced_graphs_decisions(
    direct: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    """Text carries no placements: what is sharded already follows from the graph alone."""
    made = inspect(only(write(tmp_path, k3_text())), CONFIG)
    assert decisions(made) == direct and len(direct) > 40
    assert {w.basis for w in made.weights} == {"proven", "unknown"}


def test_our_json_gives_the_same_and_keeps_placements(
    direct: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    path = tmp_path / "k3.json"
    sp_passes.dump(traced_k3(), path, title="k3")
    made = inspect(only(path), CONFIG)
    assert decisions(made) == direct
    assert made.title == "k3"
    assert sum(w.basis == "declared" for w in made.weights) > 20


def test_a_log_of_two_processes_is_told_apart_and_lends_names(tmp_path: Path) -> None:
    dynamo = (
        "class GraphModule(torch.nn.Module):\n"
        "    def forward(self, L_self_modules_layers_modules_3_modules_up_parameters_weight_: "
        '"f32[128, 64]", L_x_: "f32[s77, 64]"):\n'
        '        y: "f32[s77, 128]" = torch._C._nn.linear(L_x_, '
        "L_self_modules_layers_modules_3_modules_up_parameters_weight_, None)\n"
        "        return (y,)\n"
    )
    aot = (
        "===== AFTER POST GRAD =====\n"
        "class <lambda>(torch.nn.Module):\n"
        '    def forward(self, arg0_1: "f32[128, 64][64, 1]cpu", arg1_1: "f32[s77, 64]"):\n'
        '        permute: "f32[64, 128]" = torch.ops.aten.permute.default(arg0_1, [1, 0])\n'
        '        mm: "f32[s77, 128]" = torch.ops.aten.mm.default(arg1_1, permute)\n'
        "        return (mm,)\n"
    )
    lines = []
    for mine in (dynamo + aot).splitlines():  # both ranks' lines take turns
        for rank in (0, 1):
            lines.append(f"[rank{rank}]:V1129 14:53:13.904000 {rank + 7} a/b.py:1] [0/0] {mine}")
    found = load(write(tmp_path, "\n".join(lines) + "\nmore noise\n"))
    shipped = [
        f"pod-{i % 2}  | 2026-11-29T16:20:56.{i:06}Z stderr F {line}"
        for i, line in enumerate(lines)
    ]
    again = load(write(tmp_path, "\n".join(shipped), "shipped.txt")).dumps
    assert [d.records for d in again] == [d.records for d in found.dumps]
    assert [(d.rank, d.title) for d in found.dumps] == [
        (0, "GraphModule"),
        (1, "GraphModule"),
        (0, "AFTER POST GRAD"),
        (1, "AFTER POST GRAD"),
    ]
    made = inspect(found.dumps[2], CONFIG)
    assert [w.name for w in made.weights] == ["layers.3.up.weight"]
    assert [d[1] for d in decisions(made)] == ["layers.3.up"]
    assert decisions(inspect(found.dumps[0], CONFIG)) == decisions(made)  # Dynamo's own graph


def test_a_trace_names_its_graphs_and_puts_inputs_on_lines_of_their_own(tmp_path: Path) -> None:
    front = "V1129 14:53:13.904000 7 a/b.py:1] "
    end = ', "frame_id": 0, "rank": 3, "has_payload": "5a03"}\n'
    expanded = (
        "\tclass <lambda>(torch.nn.Module):\n"
        "\t    def forward(\n"
        "\t        self,\n"
        "\t        arg0_1: \"f32[128, 64]\",  # ParamAOTInput(target='up.weight')\n"
        '\t        arg1_1: "f32[s77, 64]",  # PlainAOTInput(idx=1)\n'
        "\t    ):\n"
        '\t        t: "f32[64, 128]" = torch.ops.aten.t.default(arg0_1)\n'
        '\t        mm: "f32[s77, 128]" = torch.ops.aten.mm.default(arg1_1, t)\n'
        "\t        return (\n"
        "\t            mm,  # PlainAOTOutput(idx=0)\n"
        "\t        )\n"
    )
    sizes = ", ".join(f'"l_{i}": [64, 64]' for i in range(400))
    text = f'{front}{{"dynamo_output_graph": {{"sizes": {{{sizes}}}}}{end}{expanded}'
    for name in ("before_post_grad_graph", "inductor_post_grad_graph"):
        text += f'{front}{{"artifact": {{"name": "{name}", "encoding": "string"}}{end}{expanded}'
    first, before, after = load(write(tmp_path, text)).dumps
    assert [d.title for d in (first, before, after)] == [
        "dynamo_output_graph",
        "before_post_grad_graph",
        "inductor_post_grad_graph",
    ]
    assert after.rank == 3 and after.complete and not after.notes
    assert [r.weight for r in after.records if r.op == "placeholder"] == ["up.weight", ""]
    (chosen,) = choose([before, after])
    assert chosen.dump is after


@pytest.mark.parametrize(
    "front", ["2026-11-29T16:20:56.{:06}Z ", "vllm-1  | ", "2026-11-29 16:20:56,{:03} {}"]
)
def test_what_a_container_puts_before_a_line_is_no_part_of_it(tmp_path: Path, front: str) -> None:
    mine = "V1129 14:53:13.904000 7 a/b.py:1] [0/0] " if front.endswith("{}") else ""
    lines = [front.format(i, mine) + line for i, line in enumerate(k3_text().splitlines())]
    plain, found = (write(tmp_path, t, n) for n, t in (("p", k3_text()), ("f", "\n".join(lines))))
    assert only(found).records == only(plain).records


def test_an_exported_program_is_read_and_its_pickles_are_not(tmp_path: Path) -> None:
    good, evil = tmp_path / "good.pt2", tmp_path / "evil.pt2"
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(GatedMLP(), (torch.randn(8, 64),), dynamic_shapes=({0: rows},))
    torch.export.save(program, good)
    mark = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (mark,))

    with zipfile.ZipFile(good) as source, zipfile.ZipFile(evil, "w") as target:
        for member in source.infolist():
            data = source.read(member)
            is_pickle = member.filename.endswith(".pt") or "weight_" in member.filename
            target.writestr(member.filename, pickle.dumps(Evil()) if is_pickle else data)
    made = inspect(only(evil), CONFIG)
    assert [d[1] for d in decisions(made)] == ["gate_up.weight+down.weight"]
    assert not mark.exists()


def test_a_zipped_folder_is_read_without_extracting(tmp_path: Path) -> None:
    path = tmp_path / "dump.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rank_0/../../outside.txt", mlp_text())
        archive.writestr("rank_1/graph.txt", mlp_text())
        archive.writestr("bomb.txt", b"0" * (64 << 20))
        archive.writestr("inner.zip", b"PK\x03\x04" + b"\x00" * 100)
    found = load(path)
    assert [d.rank for d in found.dumps] == [0, 1]
    assert any("bomb.txt: unpacks to 64 MiB" in text for text in found.skipped)
    assert any("an archive in an archive" in text for text in found.skipped)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dump.zip"]


def _torch_save() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "text without a graph (0 lines)"),
        (b"hello\nworld\n", "text without a graph (2 lines)"),
        (b"\x7fELF\x00\x01\x02", "a binary file (an executable)"),
        (pickle.dumps([1, 2]), "a binary file (a pickle), which is never unpickled"),
        (_torch_save(), "a file of torch.save (a pickle), which is never unpickled"),
        (b"PK\x03\x04 not really", "a damaged archive"),
        (b'{"format": "sp_passes.graph", "version": 9}', "version 9"),
        (b'{"format": "sp_passes.graph"', "damaged JSON"),
        (b'{"some": "json"}', "JSON, but neither"),
        (b'{"graph_module": {"graph": 3, "signature": []}}', "not a graph as torch.export"),
        (b"[" * 100_000, "damaged JSON"),
    ],
)
def test_what_is_no_dump_is_refused_in_one_line(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "thing"
    path.write_bytes(data)
    with pytest.raises(InspectError) as error:
        load(path)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_truncated_dump_gives_what_is_there(tmp_path: Path) -> None:
    text = k3_text()
    made = inspect(only(write(tmp_path, text[: len(text) // 2])), CONFIG)
    assert 0 < len(decisions(made)) < 40
    assert any("cut off" in note for note in made.notes)


def test_unknown_ops_and_missing_shapes_are_said(tmp_path: Path) -> None:
    text = mlp_text().replace("torch.ops.aten.silu.default", "torch.ops.nobody.silu2.default")
    made = inspect(only(write(tmp_path, text)), CONFIG)
    assert dict(made.built.unknown_ops) == {"nobody.silu2.default": 1}
    (row,) = [r for r in made.near_misses if r.decision.pattern == "replicated_mlp"]
    assert "nobody.silu2" in row.decision.reason
    bare = inspect(only(write(tmp_path, traced(GatedMLP()).code.replace("    def", "def"))), CONFIG)
    assert bare.rows == [] and any("have no shape" in note for note in bare.notes)


def test_shapes_left_out_in_the_middle_are_worked_out_again(tmp_path: Path) -> None:
    import re

    text = re.sub(r'(\b(?:mm|silu|mul|t)(?:_\d)?): "[^"]+"', r"\1", mlp_text())
    assert text.count('"') < mlp_text().count('"')
    assert decisions(inspect(only(write(tmp_path, text)), CONFIG)) == decisions(
        inspect(only(write(tmp_path, mlp_text())), CONFIG)
    )


def test_graphs_beyond_the_budget_are_counted_not_kept() -> None:
    lines = (line for _ in range(50) for line in (*mlp_text().splitlines(), "noise " * 50))
    reader = TextReader("log", budget=40)
    found = list(reader.read(lines))
    assert sum(len(d.records) for d in found) <= 40
    assert len(found) + reader.left_out == 50


def test_nothing_in_a_dump_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    calls = [
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"torch.ops.load_library({str(mark)!r})",
        f"torch.load({str(mark)!r})",
        f"(lambda: open({str(mark)!r}, 'w'))()",
        f"[open({str(mark)!r}, 'w') for _ in (1,)][0]",
    ]
    body = "".join(f"        a{i} = {call}\n" for i, call in enumerate(calls))
    text = mlp_text().replace("        # File", body + "        # File", 1)
    made = inspect(only(write(tmp_path, text)), CONFIG)
    assert len(decisions(made)) == 1 and not mark.exists()


def test_symbols_print_as_the_dump_has_them(tmp_path: Path) -> None:
    text = mlp_text().replace("[8, ", "[s77, ").replace("silu.default(", "softmax.int(")
    made = inspect(only(write(tmp_path, text)), CONFIG)
    assert made.before[0].shape == "" or "s77" in made.built.values.printed(made.before[0].shape)
    assert all("s77" in str(r.value) for r in made.built.dump.records if r.name == "mm")


def test_dump_refuses_what_is_no_graph() -> None:
    with pytest.raises(sp_passes.SPError, match="found Linear"):
        sp_passes.dump(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(sp_passes.SPError, match="cannot be written"):
        sp_passes.dump(traced(GatedMLP()), "/no/such/folder/graph.json")
    assert json.loads(sp_passes.dump(traced(GatedMLP())))["format"] == "sp_passes.graph"
    assert printed(traced(GatedMLP())) == mlp_text()
