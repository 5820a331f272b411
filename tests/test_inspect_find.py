# SPDX-License-Identifier: Apache-2.0
"""What inspection says: placements, near misses, folded layers, differences, ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from inspect_graphs import (
    TP,
    GatedMLP,
    Layers,
    Softmaxed,
    TensorParallel,
    k3_text,
    mlp_text,
    printed,
    traced,
)
from torch.distributed.tensor import Replicate
from typer.testing import CliRunner

import sp_passes
from sp_passes.cli.main import app
from sp_passes.inspect import InspectError, Inspection, inspect, load, view
from sp_passes.inspect.diff import diff, rank_diff
from sp_passes.inspect.fold import Group, fold, representatives, walk
from sp_passes.inspect.ops import resolve
from sp_passes.inspect.segments import layers

CONFIG = sp_passes.SPConfig(tp_size=TP)


def look(folder: Path, text: str, **options: Any) -> Inspection:
    path = folder / "dump.txt"
    path.write_text(text)
    (found,) = load(path).dumps
    return inspect(found, CONFIG, **options)


def cli(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def test_a_sum_over_ranks_proves_parts(tmp_path: Path) -> None:
    """The text says nothing of placements; taking these weights for whole would be wrong."""
    made = look(tmp_path, printed(traced(TensorParallel())))
    assert {(w.name, w.placement, w.basis) for w in made.weights} == {
        ("up.weight", "Shard(0)", "proven"),
        ("down.weight", "Shard(1)", "proven"),
    }
    assert not [r for r in made.applied if r.decision.bytes_saved_per_rank]
    assert made.collectives["before"] == {"all_gather": 1, "reduce_scatter": 1}


def test_a_near_miss_names_condition_node_and_remedy(tmp_path: Path) -> None:
    made = look(tmp_path, printed(traced(Softmaxed())))
    (row,) = [r for r in made.near_misses if r.decision.pattern == "replicated_mlp"]
    assert row.decision.reason.startswith("not feature-local: aten._softmax.default")
    assert row.at == "_softmax" and "each feature from the same feature" in row.helps
    assert "softmax(self.up(x)" in row.source


@pytest.mark.parametrize(
    ("old", "new", "says", "helps"),
    [
        (
            't_1: "bf16[128, 64][1, 128]meta" = torch.ops.aten.t.default(down_weight)',
            'c: "bf16[64, 128]" = torch.ops.aten.mul.Tensor(down_weight, 2.0)\n'
            '        t_1: "bf16[128, 64]" = torch.ops.aten.t.default(c)',
            "weight computed: down.weight passes mul (c)",
            "store the weight as it is used",
        ),
        (
            "torch.ops.aten.mm.default(mul, t_1)",
            "torch.ops.vendor.fast_gemm.default(mul, down_weight)",
            "unknown op: vendor::fast_gemm (mm_1)",
            "register_linear",
        ),
    ],
)
def test_products_that_no_pattern_takes_are_near_misses(
    tmp_path: Path, old: str, new: str, says: str, helps: str
) -> None:
    assert old in mlp_text()
    made = look(tmp_path, mlp_text().replace(old, new))
    (row,) = [r for r in made.near_misses if r.decision.pattern == ""]
    assert row.decision.reason.startswith(says) and helps in row.helps


def test_declared_placements_go_before_all(tmp_path: Path) -> None:
    made = look(tmp_path, mlp_text(), placements={"*.weight": Replicate()})
    assert len(made.applied) == 1 and {w.basis for w in made.weights} == {"declared"}
    path = tmp_path / "dump.txt"
    result = cli(path, "--tp", TP, "--declare", "gate_up.weight=S0", "--json")
    (graph,) = json.loads(result.stdout)["graphs"]
    assert {s["decision"] for s in graph["sites"]} == {"skipped"}
    assert cli(path, "--declare", "what").exit_code == 2


def test_fold_finds_repetition_inside_repetition() -> None:
    text = "x" + "kkmr" * 3 + "kkm" + "y"
    parts = fold(list(text))
    assert parts[0] == 0 and isinstance(parts[1], Group)
    assert (parts[1].count, parts[1].length) == (3, 4)
    assert parts[1].parts == [Group(1, 1, 2, [1]), 3, 4]
    assert sum(times for _, times, _ in walk(parts)) == len(text)
    shown = representatives(parts, len(text))
    assert all(text[a] == text[b] for a, b in enumerate(shown)) and shown[9] == 1


def test_layers_fold_by_number_and_without(tmp_path: Path) -> None:
    text = printed(traced(Layers(5)))
    named = look(tmp_path, text)
    assert layers(named.before).pattern() == "A 5xB C D" and named.layers == 6
    bare = _nameless(text)
    assert "layers" not in bare
    unnamed = look(tmp_path, bare)
    assert unnamed.layers == 0 and "5x" in layers(unnamed.before).pattern()
    assert len(unnamed.applied) == len(named.applied) == 6


def _nameless(text: str) -> str:
    """The same graph as AOTAutograd prints it: weights as inputs ``arg0_1``, no names."""
    weights = dict(re.findall(r'\b(layers_\w+_weight): "([^"]+)"', text))
    text = "\n".join(
        line for line in text.splitlines() if "getattr(self" not in line and "#" not in line
    )
    for i, name in enumerate(weights):
        text = re.sub(rf"\b{name}\b", f"arg{i}_1", text)
    inputs = "".join(f', arg{i}_1: "{value}"' for i, value in enumerate(weights.values()))
    return text.replace("def forward(self", f"def forward(self{inputs}", 1)


def test_a_93_layer_graph_prints_as_a_page(tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    path.write_text(printed(traced(Layers(92))))
    result = cli(path, "--tp", TP)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) < 40
    assert "93 layers" in result.stdout and "A 92xB C D" in result.stdout


def test_diff_goes_by_structure_not_names(tmp_path: Path) -> None:
    before = traced(Layers(3))
    one, two, renamed = (tmp_path / n for n in ("a.txt", "b.txt", "c.txt"))
    one.write_text(printed(before))
    renamed.write_text(printed(before).replace("silu", "other").replace("mm_", "product_"))
    renamed.write_text(renamed.read_text().replace("aten.other", "aten.silu"))
    sp_passes.rewrite(before, CONFIG)
    two.write_text(printed(before))
    a, b, c = (inspect(load(p).dumps[0], CONFIG) for p in (one, two, renamed))
    assert diff(a, c).is_empty
    found = diff(a, b)
    assert found.rewritten == {"sp_passes.ag_gemm": (0, 4), "sp_passes.gemm_rs": (0, 4)}
    assert found.collectives == {"all_gather": (0, 4), "reduce_scatter": (0, 4)}
    assert found.decisions == (4, 0)
    saved = a.report.bytes_saved_per_rank if a.report else 0
    assert found.weight_bytes[0] - found.weight_bytes[1] == saved > 0
    many = tmp_path / "many.txt"
    many.write_text(f"{two.read_text()}\n{mlp_text()}")
    sides = json.loads(cli("--diff", one, many, "--json").stdout)["compared"]
    assert [side["not_compared"] for side in sides] == [0, 1]
    result = cli("--diff", one, two, "--tp", TP)
    assert result.exit_code == 0 and "sp_passes.ag_gemm" in result.stdout


def test_rank_diff_finds_the_first_difference(tmp_path: Path) -> None:
    for rank in range(3):
        folder = tmp_path / f"rank_{rank}_dp_0"
        folder.mkdir()
        (folder / "graph.py").write_text(mlp_text())
    assert cli("--rank-diff", tmp_path).stdout.strip().endswith("same program.")
    last = tmp_path / "rank_2_dp_0" / "graph.py"
    last.write_text(mlp_text().replace("aten.silu", "aten.relu"))
    found = rank_diff(load(tmp_path).dumps)
    assert "rank 0 against rank 2" in found.first and "aten.relu" in found.first
    last.write_text(mlp_text().replace("mul.Tensor(silu, getitem_1)", "mul.Tensor(silu, silu)"))
    assert "reads other values" in rank_diff(load(tmp_path).dumps).first
    with pytest.raises(InspectError, match="graphs of 1 ranks"):
        rank_diff(load(tmp_path).dumps[:1])


def test_json_holds_what_the_tables_show(tmp_path: Path) -> None:
    made = look(tmp_path, k3_text())
    data = json.loads(json.dumps(view.to_dict(made)))
    assert sum(s["count"] for s in data["sites"]) == len(made.rows)
    assert data["bytes_saved_per_rank"] == sum(s["bytes_saved_per_rank"] for s in data["sites"])
    assert data["report"]["totals"]["bytes_saved_per_rank"] == data["bytes_saved_per_rank"]
    assert sum(w["bytes"] for w in data["weights"]) == sum(data["weight_bytes"].values())


def test_wrong_arguments_end_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(mlp_text())
    for arguments in (
        [],
        [tmp_path / "none.txt"],
        [tmp_path / "[/none].txt"],
        ["--diff", tmp_path / "a.txt"],
        [tmp_path / "a.txt", "--tp", "1"],
        [tmp_path / "a.txt", "--tokens", "some"],
        [tmp_path / "a.txt", "--graph", "elsewhere"],
        [tmp_path / "a.txt", "--html", tmp_path / "no" / "folder.html"],
        [tmp_path / "a.txt", "--declare", "*=S9"],
        ["--vllm", tmp_path / "config.json", "--diff"],
        ["--vllm", tmp_path / "config.json", "--rank-diff"],
        [tmp_path / "a.txt", "--rank-diff", "--html", tmp_path / "a.html"],
    ):
        found = cli(*arguments)
        assert found.exit_code == 2 and "cannot be looked at" not in found.output, arguments


def test_the_module_itself_and_its_dump_agree(tmp_path: Path) -> None:
    """``GatedMLP`` is rewritten, and nothing else is in the way of it."""
    made = look(tmp_path, mlp_text())
    assert [r.decision.pattern for r in made.rows] == ["replicated_mlp"]
    report = sp_passes.rewrite(traced(GatedMLP()), CONFIG)
    assert made.report is not None
    assert made.report.to_dict()["totals"] == report.to_dict()["totals"]


@pytest.mark.slow
def test_vllm_is_traced_and_not_served(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    import vllm_models

    folder = vllm_models.write("deepseek_v2", tmp_path)
    result = cli("--vllm", folder, "--tp", 4, "--json")
    assert result.exit_code == 0, result.output
    (graph,) = json.loads(result.stdout)["graphs"]
    assert graph["layers"] == 2 and graph["tokens"] == "replicated"
    known = {(w["name"].rpartition("attn.")[2], w["placement"]) for w in graph["weights"]}
    assert {("q_b_proj.weight", "Shard(0)"), ("o_proj.weight", "Shard(1)")} <= known
    (site,) = [s for s in graph["sites"] if s["decision"] == "applied"]
    assert site["name"].endswith("fused_qkv_a_proj") and site["count"] == 2
    # 2 layers of [128 + 512 + 64, 256] in bfloat16, three quarters of it
    assert site["bytes_saved_per_rank"] == 2 * 704 * 256 * 2 * 3 // 4
    config = folder / "config.json"
    config.write_text('{"architectures": ["NoSuchModel"], "model_type": "llama"}')
    wrong = cli("--vllm", config, "--tp", 4)
    assert wrong.exit_code == 2 and "cannot trace it here" in wrong.output


def test_a_sum_in_place_counts_as_one(tmp_path: Path) -> None:
    """What vLLM's CPU build prints: the op returns nothing, its argument holds the sum."""
    text = (
        "class GraphModule(torch.nn.Module):\n"
        '    def forward(self, arg0_1: "f32[32, 64]", arg1_1: "f32[64, 32]", '
        'arg2_1: "f32[s0, 64]"):\n'
        '        t: "f32[64, 32]" = torch.ops.aten.t.default(arg0_1)\n'
        '        mm: "f32[s0, 32]" = torch.ops.aten.mm.default(arg2_1, t)\n'
        '        empty: "f32[s0, 32]" = torch.ops.aten.empty.memory_format([s0, 32])\n'
        "        done = torch.ops.vllm.attention_with_output.default(mm, empty, 'layer.0')\n"
        '        t_1: "f32[32, 64]" = torch.ops.aten.t.default(arg1_1)\n'
        '        mm_1: "f32[s0, 64]" = torch.ops.aten.mm.default(empty, t_1)\n'
        "        held = torch.ops._C.shm_allreduce.default(0, mm_1);  held = None\n"
        '        relu: "f32[s0, 64]" = torch.ops.aten.relu.default(mm_1)\n'
        "        return (relu,)\n"
    )
    made = look(tmp_path, text)
    assert made.collectives["before"] == {"all_reduce": 1} and made.tokens == "replicated"
    assert {(w.name, w.placement) for w in made.weights} == {
        ("arg0_1", "Shard(0)"),
        ("arg1_1", "Shard(1)"),
    }
    assert not made.applied


@pytest.mark.parametrize(
    ("op", "rows"), [("rms_norm", ["x"]), ("fused_add_rms_norm", ["x", "x_residual"])]
)
def test_norms_of_vllm_have_names_where_it_is_not_loaded(op: str, rows: list[str]) -> None:
    """Their rule asks for arguments by name."""
    found = resolve(f"torch.ops.vllm_ir.{op}.default", 3)
    names = [argument.name for argument in found._schema.arguments]
    assert names[: len(rows)] == rows and names[len(rows)] == "weight"
