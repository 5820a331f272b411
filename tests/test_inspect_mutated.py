# SPDX-License-Identifier: Apache-2.0
"""Damaged dumps: a partial result or a clean error, never anything else."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inspect_graphs import TP, TensorParallel, mlp_text, printed, traced

import sp_passes
from sp_passes.inspect import inspect, load, view
from sp_passes.inspect.page import html

CONFIG = sp_passes.SPConfig(tp_size=TP)
ROUNDS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
PIECES = [
    "",
    "(",
    ")",
    "[",
    "]",
    ",",
    '"',
    "'",
    "0",
    "-1",
    "9" * 30,
    "None",
    "\x00",
    "é",
    "\n",
    "s77",
]
WORDS = ["mm", "silu", "torch.ops.aten.view.default", "x", "self", "bf16[0]", "[[[", "f32[a*b]"]


def texts() -> list[str]:
    return [mlp_text(), printed(traced(TensorParallel()))]


def mutate(text: str, seed: int, times: int) -> str:
    chance = random.Random(seed)
    for _ in range(times):
        at = chance.randrange(len(text) + 1)
        kind = chance.randrange(5)
        if kind == 0:
            text = text[:at] + chance.choice(PIECES) + text[at + chance.randrange(4) :]
        elif kind == 1:
            text = text[:at] + text[at + chance.randrange(80) :]
        elif kind == 2:  # lines in another order
            lines = text.split("\n")
            chance.shuffle(lines) if chance.random() < 0.1 else lines.reverse()
            text = "\n".join(lines) if chance.random() < 0.3 else text
        elif kind == 3:  # one word for another
            words = text.split(" ")
            words[chance.randrange(len(words))] = chance.choice(WORDS)
            text = " ".join(words)
        else:  # a number for another
            digits = [i for i, c in enumerate(text) if c.isdigit()]
            if digits:
                i = chance.choice(digits)
                text = text[:i] + str(chance.randrange(10)) + text[i + 1 :]
    return text


def look(path: Path) -> int:
    """How many graphs were looked at; only an SPError may come out."""
    seen = 0
    try:
        for dump in load(path).dumps:
            made = inspect(dump, CONFIG)
            json.dumps(view.to_dict(made))
            html([made], graphviz=False)
            seen += 1
    except sp_passes.SPError as error:
        assert "\n" not in str(error).strip()
    return seen


@ROUNDS
@given(seed=st.integers(0, 10**9), times=st.integers(1, 12), which=st.integers(0, 1))
def test_mutated_text(tmp_path: Path, seed: int, times: int, which: int) -> None:
    path = tmp_path / "dump.txt"
    path.write_text(mutate(texts()[which], seed, times))
    look(path)


@ROUNDS
@given(seed=st.integers(0, 10**9), times=st.integers(1, 8))
def test_mutated_json(tmp_path: Path, seed: int, times: int) -> None:
    data = json.loads(sp_passes.dump(traced(TensorParallel())))
    chance = random.Random(seed)
    for _ in range(times):
        node = chance.choice(data["nodes"])
        key = chance.choice([*node, "args", "value"])
        node[key] = chance.choice(
            [None, 3, [], {}, "x", [{"n": "gone"}], [{"op": "torch.ops.aten.mm.default"}], [[[1]]]]
        )
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(data))
    look(path)


@pytest.mark.parametrize(
    "line",
    [
        "a = " + "(" * 5000 + "x" + ")" * 5000,
        "a = " + "-" * 5000 + "1",
        "a = x" + ".y" * 50_000,
        "a = " + "x + " * 20_000 + "x",
        "a = torch.ops.aten.mm.default(" + "9" * 6000 + ")",
        'a: "bf16[' + "9" * 5000 + ']" = torch.ops.aten.neg.default(x)',
        'a: "bf16[1000000000, 1000000000]" = torch.ops.aten.neg.default(x)',
        "a = torch.ops.aten.full.default([1000000000000], 1.0)",
        "big = torch.ops.aten.full.default([1000000000], 1.0);  "
        "a = torch.ops.aten.split.Tensor(big, 1)",
        "a = torch.ops.aten.unbind.int(torch.ops.aten.full.default([100000000], 1.0))",
    ],
)
def test_lines_made_to_exhaust(tmp_path: Path, line: str) -> None:
    path = tmp_path / "dump.txt"
    path.write_text(mlp_text().replace("        # File", f"        {line}\n        # File", 1))
    assert look(path) == 1
