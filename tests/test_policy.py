# SPDX-License-Identifier: Apache-2.0
"""Policies, budgets, ranges and hardware profiles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlps
import pytest
import torch
from torch import nn

import sp_passes
from sp_passes import SPConfig, SPError, passes
from sp_passes.bench import calibrate
from sp_passes.placement import input_states
from sp_passes.policy import choose, costs, forms, groups
from sp_passes.policy.hardware import Copies, hardware, parse, raw

GIB = 1 << 30
SHARED = forms.mlp(7168, 6144)
WIDTHS = (64, 128, 512, 2048)


class Stack(nn.Module):
    """MLPs of several widths after each other; only the widest are worth the collectives."""

    def __init__(self) -> None:
        super().__init__()
        spec = mlps.with_(mlps.BASE, hidden=4096)
        with torch.device("meta"):
            self.parts = nn.ModuleList(Meta(spec.hidden, width) for width in WIDTHS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + part(x)
        return x


class Meta(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(width, hidden, dtype=torch.bfloat16), False)
        self.down = nn.Parameter(torch.empty(hidden, width, dtype=torch.bfloat16), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(nn.functional.silu(nn.functional.linear(x, self.up)), self.down)


def decided(**options: Any) -> sp_passes.Report:
    graph = sp_passes.trace(Stack(), torch.empty(4, 4096, dtype=torch.bfloat16, device="meta"))
    config = mlps.config(4, hardware="gb200", **options)
    report = sp_passes.rewrite(graph, config)
    sp_passes.check(graph, config)
    return report


def applied(report: sp_passes.Report) -> list[str]:
    return [d.name.rpartition(".")[2] for d in report.applied]


def test_policies_choose_more_and_more_sites() -> None:
    few = (32, 32)
    latency = applied(decided(token_range=few))
    balanced = applied(decided(token_range=few, policy="balanced"))
    memory = applied(decided(token_range=few, policy="memory"))
    assert latency == applied(decided(token_range=few, policy="latency"))
    assert set(latency) <= set(balanced) <= set(memory) and memory == ["0", "1", "2", "3"]
    assert applied(decided(policy="memory")) == memory
    skipped = decided(token_range=few, policy="latency").skipped
    assert skipped and all(d.reason.startswith("slower: replicated wins") for d in skipped)


def test_memory_takes_the_form_that_the_tokens_want() -> None:
    few = decided(token_range=(8, 8), policy="memory").applied
    many = decided(token_range=(1 << 20, 1 << 20), policy="memory").applied
    assert {d.form for d in many} == {"weight_gather"}
    assert [d.weights for d in few] == [d.weights for d in many]
    assert many[-1].collectives_added == {"all_gather": 2}
    assert few[-1].form == "sharded" and "weights gathered" not in str(few[-1])


TRAVELLING = """\
x : [5, 10]
gate_up_weight : [48, 10]
down_weight : [10, 24]
prepare = prepare([gate_up_weight, down_weight], ['S0[24,24]', 'S1[24]'], \
['gate_up_weight', 'down_weight'], plan, True, '', 4) : [0]
weight_gather = weight_gather(gate_up_weight, 'S0[24,24]', prepare, '', 4) : [4, 12, 10]
weight_gather_1 = weight_gather(down_weight, 'S1[24]', prepare, '', 4) : [4, 10, 6]
weight_wait = weight_wait(weight_gather, 'S0[24,24]', 4) : [48, 10]
permute = permute(weight_wait, [1, 0]) : [10, 48]
mm = mm(x, permute) : [5, 48]
slice = slice(mm, 1, 0, 24) : [5, 24]
slice_1 = slice(mm, 1, 24, 48) : [5, 24]
silu = silu(slice) : [5, 24]
mul = mul(silu, slice_1) : [5, 24]
weight_wait_1 = weight_wait(weight_gather_1, 'S1[24]', 4) : [10, 24]
permute_1 = permute(weight_wait_1, [1, 0]) : [24, 10]
mm_1 = mm(mul, permute_1) : [5, 10]
return mm_1
"""


def test_a_graph_whose_weights_travel() -> None:
    """Both gathers start before the first product; the activation ops are the model's own."""
    graph = sp_passes.trace(mlps.MLP(mlps.BASE), mlps.tokens(mlps.BASE, 0))
    config = mlps.config(4, policy="memory", token_range=(1 << 22, 1 << 22))
    sp_passes.rewrite(graph, config)
    assert mlps.show(graph) == TRAVELLING


def test_the_next_gather_starts_one_site_ahead() -> None:
    graph = sp_passes.trace(Stack(), torch.empty(4, 4096, dtype=torch.bfloat16, device="meta"))
    config = mlps.config(4, policy="memory", token_range=(1 << 22, 1 << 22))
    sp_passes.rewrite(graph, config)
    names = [str(node.target) for node in graph.graph.nodes]
    at = [i for i, name in enumerate(names) if name.startswith("sp_passes.weight_")]
    order = "".join(names[i].split(".")[1].removeprefix("weight_")[0] for i in at)
    # Of each site two gathers; those of the second start before the first one's products.
    assert order == "gg" + "wggw" * 3 + "ww"


def test_a_budget_takes_the_cheapest_sites_that_free_it() -> None:
    many = {"token_range": (1 << 16, 1 << 16)}
    sizes = [2 * 2 * width * 4096 * 3 // 4 for width in WIDTHS]
    for need in (1, sizes[1], sizes[3] + 1, sum(sizes)):
        report = decided(need_gib=need / GIB, **many)
        freed = report.bytes_saved_per_rank
        assert freed >= need
        for d in report.applied:  # nothing is taken that is not needed
            assert freed - d.bytes_saved_per_rank < need
        assert all(d.reason.startswith("not needed") for d in report.skipped)


def test_a_budget_drops_what_a_later_site_makes_needless() -> None:
    """The small site is the cheapest a byte, and not needed once the large one is taken."""
    sizes = {"small": (1, GIB), "large": (10, 9 * GIB), "free": (-1, 0)}
    options = [
        choose.Option(None, None, 0.0, float(added), "sharded", freed)  # type: ignore[arg-type]
        for added, freed in sizes.values()
    ]
    config = SPConfig(tp_size=4, need_gib=9, token_range=(1, 1))
    chosen = choose._cheapest(options, config)
    assert chosen == {id(options[1]), id(options[2])}


def test_a_budget_that_cannot_be_met_says_so(caplog: pytest.LogCaptureFixture) -> None:
    report = decided(need_gib=10, token_range=(64, 64))
    assert len(report.applied) == 4
    assert "need_gib=10" in caplog.text and "4 sites" in caplog.text


def test_decisions_and_their_digest_repeat() -> None:
    options = {"token_range": (64, 64), "need_gib": 0.01}
    first, again = decided(**options), decided(**options)
    assert first.to_dict() == again.to_dict() and first.plan == again.plan
    assert decided(token_range=(64, 64), policy="memory").plan != first.plan


def test_the_chosen_form_is_part_of_the_plan() -> None:
    """Of one config: ranks that differ in nothing but a form must not agree."""
    plans = []
    for form in ("sharded", "weight_gather"):
        graph = sp_passes.trace(Stack(), torch.empty(4, 4096, dtype=torch.bfloat16, device="meta"))
        config = mlps.config(4)

        def chosen(sites: list[Any], form: str = form) -> None:
            sites[0].form = form

        states = input_states(graph)
        plans.append(passes.run(graph.graph, config, states, chosen).plan)
    assert plans[0] != plans[1]


def test_what_each_policy_accepts() -> None:
    def accepted(added: float) -> list[str]:
        option = choose.Option(None, None, 1.0, 1.0 + added, "sharded", 1)  # type: ignore[arg-type]
        return [name for name, wants in choose.POLICIES.items() if wants(option)]

    assert accepted(-0.01) == ["latency", "memory", "balanced"]
    assert accepted(0.05) == ["memory", "balanced"]
    assert accepted(0.2) == ["memory"]


class Gated(nn.Module):
    """Kimi-K3's shared experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(12288, 7168, dtype=torch.bfloat16, device="meta"), False)
        self.down = nn.Parameter(
            torch.empty(7168, 6144, dtype=torch.bfloat16, device="meta"), False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = nn.functional.linear(x, self.up).chunk(2, -1)
        return nn.functional.linear(nn.functional.silu(gate) * up, self.down)


ONE_OP = ("replicated_mlp", "ag_gemm", "gemm_rs", "ag_mlp_rs")


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"tp_size": 4}, {"patterns": ONE_OP[:3]}, {"kernels": "unfused"},
        {"token_range": (110, 129)},
    ],
)  # fmt: skip
def test_one_op_is_weighed_where_a_graph_may_hold_it(changes: dict[str, Any]) -> None:
    """At 110 to 128 tokens the MLP pays as one op on two ranks, and in parts it does not."""
    given = {"tp_size": 2, "token_range": (110, 128), "patterns": ONE_OP, **changes}
    config = SPConfig(**given)
    rows = 128 // config.tp_size
    graph = sp_passes.trace(Gated(), torch.empty(rows, 7168, dtype=torch.bfloat16, device="meta"))
    found = [d.pattern for d in sp_passes.rewrite(graph, config).applied]
    pays = changes in ({}, {"tp_size": 4})  # there it pays in parts
    assert ("replicated_mlp" in found) == pays
    assert ("ag_mlp_rs" in found) == (not changes)


def test_slow_copies_bound_what_is_overlapped() -> None:
    hw = hardware("gb300")
    slow = replace(hw, copies=Copies(0.0, 1e9))
    for overlapped in (
        costs.ag_gemm(4096, [1536], 7168, 8, slow),
        costs.gemm_rs(4096, 7168, 768, 8, slow),
    ):
        copies = 7 * 512 * 7168 * 2 / 1e9
        assert copies < overlapped < 1.1 * copies
    assert costs.ag_gemm(4096, [1536], 7168, 8, hw) < copies / 10


def test_shard_group_offline() -> None:
    report = decided(shard_group=2)
    assert report.shard_size == 2 and "in parts of 2" in str(report)
    assert report.bytes_saved_per_rank == sum(2 * 2 * width * 4096 // 2 for width in WIDTHS)
    again = sp_passes.Report.from_json(report.to_json())
    assert again.shard_size == 2 and again.to_dict() == {**report.to_dict(), "from_cache": False}


def test_rows_of_a_part_must_not_pass_for_those_of_all_ranks() -> None:
    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            part = torch.ops.sp_passes.all_gather(x, "", 2)
            return torch.ops.sp_passes.reduce_scatter(part * 2, "", 4)

    graph = sp_passes.trace(Wrong(), torch.empty(8, 4))
    with pytest.raises(sp_passes.PlacementError, match=r"rows of 2 ranks .* all 4"):
        groups.verify(graph.graph, 2, 4)
    groups.verify(graph.graph, 4, 4)


def test_node_is_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    four = SPConfig(tp_size=8, shard_group="node")
    assert four.shard_size == 4
    digest = four.digest()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert SPConfig(tp_size=8, shard_group="node").digest() != digest
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert SPConfig(tp_size=16, shard_group="node", hardware="b200").shard_size == 8
    assert SPConfig(tp_size=16, shard_group="node", hardware="gb200").shard_size == 16


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown policy": ({"policy": "fast"}, "latency, memory, balanced"),
    "policy without tokens": ({"policy": "latency"}, "token_range"),
    "budget without tokens": ({"need_gib": 1}, "token_range"),
    "no budget": ({"need_gib": 0, "token_range": (1, 2)}, "above 0"),
    "two ways": ({"need_gib": 1, "policy": "memory", "token_range": (1, 2)}, "leave one out"),
    "part of three": ({"shard_group": 3}, "use one of 2, 4"),
    "unknown part": ({"shard_group": "rack"}, "'node'"),
    "no part": ({"shard_group": 0}, "at least 1"),
}


@pytest.mark.parametrize("options, words", WRONG.values(), ids=WRONG)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SPError, match=words):
        SPConfig(tp_size=4, **options)


def test_options_round_trip_and_change_the_digest() -> None:
    plain = SPConfig(tp_size=4, token_range=(1, 8))
    seen = {plain.digest()}
    for option in ({"policy": "memory"}, {"need_gib": 2}, {"shard_group": 2}):
        config = SPConfig(tp_size=4, token_range=(1, 8), **option)  # type: ignore[arg-type]
        assert SPConfig.from_json(config.to_json()) == config
        seen.add(config.digest())
    assert len(seen) == 4


def test_ranges_are_exact() -> None:
    hw = hardware("gb200")

    def times(tokens: int) -> dict[str, float]:
        return forms.seconds(SHARED, tokens, 8, hw)

    found = forms.ranges(times, 1, 1 << 16)
    assert [r.form for r in found] == ["sharded", "replicated"]
    assert found[0].high + 1 == found[1].low == forms.crossover(SHARED, 8, hw)
    assert (found[0].low, found[1].high) == (1, 1 << 16)
    for one in found:
        assert forms.fastest(times(one.low)) == forms.fastest(times(one.high)) == one.form


def test_where_memory_counts_weights_travel_for_many_tokens() -> None:
    """Of the forms that free memory: activations move at first, weights in the end."""
    hw = hardware("gb300")

    def times(tokens: int) -> dict[str, float]:
        found = forms.seconds(SHARED, tokens, 8, hw)
        return {form: s for form, s in found.items() if form != "replicated"}

    assert forms.fastest(times(64)) == "sharded"
    assert forms.fastest(times(1 << 16)) == "weight_gather"


def test_groups_inside_a_node_do_not_pay_the_network() -> None:
    hw = hardware("h200")
    size = 1 << 24
    inside, across = (costs.collective("all_gather", size, n, hw) for n in (8, 16))
    assert across > inside + size / 16 / hw.network.bandwidth
    assert costs.collective("all_reduce", size, 1, hw) == 0


def test_a_table_of_two_ranks_stands_for_others() -> None:
    """Where as many bytes arrive: a ring of n brings 2 (n - 1) / n of the tensor."""
    hw = hardware("h200")
    of_two = costs.collective("all_reduce", 7 << 24, 2, hw)
    assert costs.collective("all_reduce", 4 << 24, 8, hw) == pytest.approx(of_two)
    assert of_two == pytest.approx(costs.between(hw.points("all_reduce"), 7 << 24))


def test_a_file_is_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    data = {**raw("h200"), "name": "mine", "hbm": 1e12}
    path.write_text(json.dumps(data))
    assert hardware(str(path)).hbm == 1e12
    a, b = (SPConfig(tp_size=4, hardware=name) for name in ("h200", str(path)))
    assert a.digest() != b.digest()
    for change, words in (
        ({"hbm": 0}, "hbm"),
        ({"rates": [[2, 1], [1, 1]]}, "rates"),
        ({"launch_us": "x"}, "mine"),
        ({"collectives": {}}, "'all_gather' is missing"),
        ({"ranks_per_node": 0.5}, "ranks_per_node"),
        ({"hbm": 10**400}, "mine"),
        ({"rates": [[1, float("nan")]]}, "rates"),
    ):
        with pytest.raises(SPError, match=words):
            parse({**data, **change}, "mine")
    for text in ("{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(SPError, match="no JSON"):
            hardware(str(path))


def test_calibrate_rehearses_on_a_cpu(solo: Any) -> None:
    """The same steps at toy sizes; what one rank cannot show says where it comes from."""
    if torch.cuda.is_available():
        pytest.skip("measures the GPU there")
    profile = calibrate.measure(0, 1, raw("gb200"), "here")
    found = parse(profile, "here")
    assert found.name == "here" and 0 < found.hbm < 1e12 and found.launch > 0
    assert len(found.rates) == len(calibrate.TOY_ROWS) - 1
    sources = profile["sources"]
    assert "measured" in sources["hbm"] and sources["network"] == "not measured: gb200"
    assert set(sources) == set(raw("gb200")["sources"])
    assert found.collectives == hardware("gb200").collectives


@pytest.mark.parametrize("ranks", [2, 4])
def test_copies_are_taken_apart(ranks: int) -> None:
    """Of times that the cost model gives, the numbers that they were made from."""
    hw = replace(hardware("h200"), copies=Copies(2e-6, 300e9, 20e-6))
    times = [costs.transfer(size, ranks, hw, cut) * 1e6 for size, cut in calibrate.COPIED]
    found = calibrate.copy_engine(times, ranks, 4e12)
    assert found == pytest.approx({"bytes_per_s": 300e9, "latency_us": 2.0, "call_us": 20.0})


@pytest.mark.parametrize("times", [(), (2372.0, 2372.0, 2385.0), (30.0, 30.0, 20.0)])
def test_times_that_can_be_no_copies(times: tuple[float, ...]) -> None:
    """Two sizes that take the same time measured something else than copies."""
    assert calibrate.copy_engine(times, 2, 4e12) is None


@pytest.mark.parametrize(("parts", "ranks"), [(("copies",), 2), (("collectives", "copies"), 1)])
def test_a_calibration_that_would_measure_nothing_is_refused(
    parts: tuple[str, ...], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SPError, match=rf"nothing of {parts[0]}.* --ranks {ranks} on 0 GPUs"):
        calibrate.calibrate(ranks, "h200", None, None, parts)
