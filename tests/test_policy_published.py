# SPDX-License-Identifier: Apache-2.0
"""The cost model against published measurements; ``python tests/test_policy_published.py`` prints
every row with its error. Nothing but a hardware profile goes in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sp_passes import bench
from sp_passes.ops import estimated, tuned
from sp_passes.policy import costs, forms
from sp_passes.policy.hardware import NAMES, hardware, raw

DATA: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "published.json").read_text())
RESULTS = Path(bench.__file__).parent / "results"
# Kimi-K3: 92 shared-expert pairs and one dense MLP.
SHARED, DENSE, LAYERS = forms.mlp(7168, 6144), forms.mlp(7168, 33792), 92

# Of 8 layers, with how often: sites as the pass finds them (what is gathered for an MLP serves the
# projections of its layer too).
MLPS = ((7, SHARED), (1, DENSE))
PROJECTIONS = tuple(
    (count, forms.Work((forms.Linear(n, k),), 2 * n * k, moved, tokens_whole=whole))
    for count, n, k, whole, moved in (
        (7, 3584, 7168, False, (("all_to_all", 3584.0),)),
        (7, 7168, 3584, False, (("all_gather", 7168.0), ("all_to_all", 7168.0))),
        (7, 896, 7168, False, (("all_to_all", 1792.0),)),
        (2, 2112, 7168, True, (("all_gather", 4224.0),)),
        (6, 128, 7168, True, (("all_gather", 256.0),)),
    )
)


MLP_FORMS = {
    "replicated": "replicated", "unfused": "sharded", "copy_engine": "overlapped",
    "one_shot": "one_shot",
}  # fmt: skip


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


def stack_rows() -> Iterator[Row]:
    """What sharding adds to a step of 8 layers at TP2: every site unfused, and the MLPs alone."""
    found = json.loads((RESULTS / "2026-11-29-stack-2.json").read_text())["stack"]["rows"]
    for row in found:
        us, tokens = row["us"], row["tokens"]
        apart = [(n, replace(work, decodes=False)) for n, work in (*MLPS, *PROJECTIONS)]
        for variant, works in (("unfused", apart), ("auto@64", MLPS)):
            if variant == "unfused" or tokens <= 64:
                model = -sum(
                    n * _gain(forms.seconds(w, tokens, 2, hardware("h200"))) for n, w in works
                )
                yield Row(variant, tokens, "replicated", us["replicated"], us["replicated"])
                yield Row(variant, tokens, "added", us[variant] - us["replicated"], model * 1e6)


def kernel_rows() -> Iterator[Row]:
    """The rows that the shipped kernel table names, over the links of two H200."""
    hw = hardware("h200")
    for row in json.loads((RESULTS / shipped_from()).read_text())["rows"]:
        op, n, k, tokens, us = row["op"], row["n"], row["k"], row["tokens"], row["us"]
        if not k:
            moved = costs.collective(op, tokens * n * 2, 2, hw)
            yield Row("alone", tokens, op, us["unfused"], moved * 1e6)
        elif op == "gemm_gather":
            line = forms.Linear(2 * n, k)
            work = forms.Work((line,), 4 * n * k, (("all_gather", 4.0 * n),), tokens_whole=True)
            whole = forms.seconds(work, tokens, 2, hw)["sharded"]
            yield Row("unfused", tokens, op, us["unfused"], whole * 1e6)
        else:
            apart, fused = estimated.seconds(op, n, k, tokens, 2, hw) or (0.0, 0.0)
            product = costs.product(tokens, n, k, hw)
            yield Row("product", tokens, op, row["product_us"], product * 1e6)
            yield Row("unfused", tokens, op, us["unfused"], apart * 1e6)
            yield Row("copy_engine", tokens, op, us["copy_engine"], fused * 1e6)
            gain = us["unfused"] / us["copy_engine"]
            yield Row("speedup", tokens, op, gain, apart / fused)


def shipped_from() -> str:
    """The newest result that the kernel table was made from."""
    found: str = json.loads(tuned.SHIPPED.read_text())[0]["source"]
    return found.rpartition(", ")[2]


def mlp_rows() -> Iterator[Row]:
    """The shared experts at TP2, whole, in parts, overlapped and as one op."""
    hw, apart = hardware("h200"), replace(SHARED, decodes=False)
    for row in json.loads((RESULTS / "2026-11-29-stack-2.json").read_text())["pair"]["rows"]:
        tokens, us = row["tokens"], row["us"]
        times = forms.seconds(apart, tokens, 2, hw)
        times["one_shot"] = forms.seconds(SHARED, tokens, 2, hw)["sharded"]
        for kernel, form in MLP_FORMS.items():
            if kernel in us:
                yield Row("mlp", tokens, kernel, us[kernel], times[form] * 1e6)


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


MLP_BOUNDS = {"replicated": 0.13, "unfused": 0.11, "copy_engine": 0.21, "one_shot": 0.15}


def test_the_mlp_at_tp2_on_two_h200() -> None:
    """One op won up to 128 tokens, where it drew; collectives and products up to 64."""
    rows = {(row.what, row.tokens): row for row in mlp_rows()}
    for row in rows.values():
        assert abs(row.error) < MLP_BOUNDS[row.what], row
        if row.what == "unfused":
            whole = rows["replicated", row.tokens]
            assert (row.measured < whole.measured) == (row.model < whole.model), row
    measured = json.loads((RESULTS / "2026-11-29-stack-2.json").read_text())["pair"]["crossover"]
    hw, apart = hardware("h200"), replace(SHARED, decodes=False)
    assert forms.crossover(SHARED, 2, hw) == pytest.approx(measured, rel=0.02)
    assert forms.crossover(SHARED, 4, hw) == forms.crossover(apart, 4, hw), "measured at 2 alone"


def test_collectives_and_products_on_two_h200() -> None:
    """Of products of few rows none is asked; unfused ops and collectives alone on average."""
    rows = [row for row in kernel_rows() if row.what != "gemm_gather"]
    for table, bound in (("alone", 0.08), ("unfused", 0.05)):
        off = [abs(row.error) for row in rows if row.table == table]
        assert sum(off) / len(off) < bound, table


def test_eight_layers_at_tp2_on_two_h200() -> None:
    """Within 2.5 % of the step; at 256 tokens 10 %, where the model adds 539 of 911 µs."""
    rows = list(stack_rows())
    for whole, added in zip(rows[::2], rows[1::2], strict=True):
        off = abs(added.model - added.measured) / whole.measured
        assert off < (0.10 if added.tokens == 256 else 0.025), added
        assert (added.model < 0) == (added.measured < 0)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source(name: str) -> None:
    profile = raw(name)
    keys = set(profile) - {"name", "sources", "collectives"}
    keys |= {f"collectives.{kind}" for kind in profile["collectives"]}
    assert set(profile["sources"]) == keys
    assert all(len(text) > 5 for text in profile["sources"].values())
    assert hardware(name).name == name


def summary() -> Iterator[str]:
    """Mean error without sign and the worst, of the rows of two H200."""
    found = [("", row) for row in (*kernel_rows(), *mlp_rows())]
    found += [
        (f" from {low}", row) for low in (1024, 4096) for _, row in found if row.tokens >= low
    ]
    groups: dict[str, list[float]] = {}
    for since, row in found:
        kind = f"{row.table} {row.what}" if row.table in ("mlp", "alone") else row.table
        kind = row.what if row.what == "gemm_gather" else kind
        if since != " from 4096" or not row.tokens & (row.tokens - 1):
            groups.setdefault(kind + since, []).append(100 * row.error)
    for kind, off in sorted(groups.items()):
        mean = sum(map(abs, off)) / len(off)
        yield f"{kind:28} {len(off):3} rows {mean:5.1f} %, {min(off):+.0f} to {max(off):+.0f}"


if __name__ == "__main__":
    for row in (*pair_rows(), *ag_gemm_rows(), *kernel_rows(), *mlp_rows()):
        numbers = f"{row.measured:9.2f} {row.model:9.2f} {100 * row.error:+6.1f} %"
        print(f"{row.table:11} {row.tokens:6} {row.what:10} {numbers}")
    for row in stack_rows():
        print(f"{row.table:11} {row.tokens:6} {row.what:10} {row.measured:9.0f} {row.model:9.0f}")
    for row in concurrency_rows():
        print(f"{row.table} {row.tokens:6} {100 * row.measured:+6.1f} % {100 * row.model:+6.1f} %")
    decode = DATA["gb200_decode"]
    print("decode", step_saved(32, 4) * 1e6 / decode["kernel_us"]["replicated"])
    for name in NAMES:
        print(name, "crossover", forms.crossover(SHARED, 8, hardware(name)))
    print("\n".join(summary()))
