# SPDX-License-Identifier: Apache-2.0
"""The cost model against published measurements; ``python tests/test_policy_published.py`` prints
every row with its error. Nothing but a hardware profile goes in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sp_passes import bench
from sp_passes.policy import costs, forms
from sp_passes.policy.hardware import NAMES, hardware, raw

DATA: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "published.json").read_text())
# Kimi-K3: 92 shared-expert pairs and one dense MLP.
SHARED, DENSE, LAYERS = forms.mlp(7168, 6144), forms.mlp(7168, 33792), 92


class Row(NamedTuple):
    table: str
    tokens: int
    what: str
    measured: float
    model: float

    @property
    def error(self) -> float:
        return self.model / self.measured - 1


def ag_gemm_rows() -> Iterator[Row]:
    table, hw = DATA["gb300_ag_gemm"], hardware("gb300")
    k, ranks = table["k"], table["ranks"]
    for width, rows in table["widths"].items():
        n = int(width)
        for tokens, apart, fused, gemm, gather in rows:
            product = costs.product(tokens, n, k, hw) * 1e6
            moved = costs.collective("all_gather", tokens * k * 2, ranks, hw) * 1e6
            overlapped = costs.ag_gemm(tokens, [n], k, ranks, hw) * 1e6
            yield Row(width, tokens, "gemm", gemm, product)
            yield Row(width, tokens, "ag", gather, moved)
            yield Row(width, tokens, "ag + gemm", apart, product + moved)
            yield Row(width, tokens, "ag_gemm", fused, overlapped)
            yield Row(width, tokens, "speedup", apart / fused, (product + moved) / overlapped)


def pair_rows() -> Iterator[Row]:
    table, hw = DATA["h200_pair"], hardware("h200")
    alone = forms.Work(SHARED.linears, SHARED.weight_bytes, (), SHARED.row_wise)
    for tokens, whole, part in table["rows"]:
        times = forms.seconds(alone, tokens, table["ranks"], hw)
        yield Row("pair", tokens, "replicated", whole, times["replicated"] * 1e6)
        yield Row("pair", tokens, "sharded", part, times["sharded"] * 1e6)


def step_saved(tokens: int, ranks: int) -> float:
    """Seconds that sharding takes off a decode step on GB200."""
    hw = hardware("gb200")
    shared, dense = (forms.seconds(work, tokens, ranks, hw) for work in (SHARED, DENSE))
    return LAYERS * _gain(shared) + _gain(dense)


def _gain(times: dict[str, float]) -> float:
    return times["replicated"] - times["sharded"]


def concurrency_rows() -> Iterator[Row]:
    """Speed-up of a step; the measured replicated step is given, the difference is the model's."""
    table = DATA["gb200_concurrency"]
    for users, before, after in table["rows"]:
        step = users / before
        saved = step_saved(users // table["groups"], table["ranks"])
        yield Row("concurrency", users, "speedup", after / before - 1, step / (step - saved) - 1)


def test_the_h200_pair_within_15_percent() -> None:
    for row in pair_rows():
        assert abs(row.error) < 0.15, row


def test_ag_gemm_on_gb300_within_20_percent_from_4096_tokens() -> None:
    for row in ag_gemm_rows():
        if row.tokens >= 4096 and row.what in ("ag_gemm", "ag + gemm"):
            assert abs(row.error) < 0.20, row


def test_ag_gemm_on_gb300_wins_where_it_won() -> None:
    """All rows but one: at n 3648 and 3584 tokens 0.950 was measured, 1.07 and 1.10 beside it."""
    wrong = [
        (row.table, row.tokens)
        for row in ag_gemm_rows()
        if row.what == "speedup" and (row.measured > 1) != (row.model > 1)
    ]
    assert wrong == [("3648", 3584)]


def test_decode_kernel_time_on_gb200_falls() -> None:
    table = DATA["gb200_decode"]
    before, after = table["kernel_us"]["replicated"], table["kernel_us"]["sharded"]
    measured = after / before - 1
    model = -step_saved(table["tokens"], table["ranks"]) * 1e6 / before
    assert measured < -0.05 and model < -0.05
    assert abs(model - measured) < 0.035


def test_the_concurrency_table() -> None:
    """Within 5 points but for 64 users, where 5.2 ms were saved and all the weights take 4.1."""
    for row in concurrency_rows():
        if row.tokens == 64:
            assert 0 < row.model < row.measured
        else:
            assert abs(row.model - row.measured) < 0.05, row
    signs = [row.tokens for row in concurrency_rows() if (row.model > 0) != (row.measured > 0)]
    assert signs == [1536]  # measured -0.2 %, model +0.7 %
    model = [row.model for row in concurrency_rows()]
    assert model == sorted(model, reverse=True)


def test_64_users_saved_more_than_the_weights_take() -> None:
    """Why that row cannot be met: reading every replicated weight takes less."""
    users, before, after = DATA["gb200_concurrency"]["rows"][0]
    assert users == 64
    weights = LAYERS * SHARED.weight_bytes + DENSE.weight_bytes
    assert users / before - users / after > weights / hardware("gb200").hbm


def test_the_crossover_is_of_the_estimated_order() -> None:
    table = DATA["crossover"]
    for name in ("gb200", "b200", "gb300"):
        found = forms.crossover(SHARED, table["ranks"], hardware(name))
        assert table["tokens"] / 2 <= found <= table["tokens"] * 2, name


def test_two_h200_cross_over_where_they_were_measured_to() -> None:
    """The MLP at TP2: collectives and products won up to 32 tokens, drew at 64, lost at 128."""
    path = Path(bench.__file__).parent / "results" / "2026-11-29-kernels-tp2.json"
    for row in json.loads(path.read_text())["mlp"]:
        times = forms.seconds(SHARED, row["tokens"], row["tp_size"], hardware("h200"))
        sharded, whole = row["us"]["unfused"], row["us"]["replicated"]
        if abs(sharded / whole - 1) > 0.02:
            assert (sharded < whole) == (times["sharded"] < times["replicated"])
        assert times["replicated"] * 1e6 == pytest.approx(whole, rel=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source(name: str) -> None:
    profile = raw(name)
    keys = set(profile) - {"name", "sources", "collectives"}
    keys |= {f"collectives.{kind}" for kind in profile["collectives"]}
    assert set(profile["sources"]) == keys
    assert all(len(text) > 5 for text in profile["sources"].values())
    assert hardware(name).name == name


if __name__ == "__main__":
    for row in (*pair_rows(), *ag_gemm_rows()):
        numbers = f"{row.measured:9.2f} {row.model:9.2f} {100 * row.error:+6.1f} %"
        print(f"{row.table:11} {row.tokens:6} {row.what:10} {numbers}")
    for row in concurrency_rows():
        print(f"{row.table} {row.tokens:6} {100 * row.measured:+6.1f} % {100 * row.model:+6.1f} %")
    decode = DATA["gb200_decode"]
    print("decode", step_saved(32, 4) * 1e6 / decode["kernel_us"]["replicated"])
    for name in NAMES:
        print(name, "crossover", forms.crossover(SHARED, 8, hardware(name)))
