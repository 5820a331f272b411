# SPDX-License-Identifier: Apache-2.0
"""Two pipeline stages of two tensor-parallel ranks each, as four real processes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import sp_passes
from sp_passes import ShardingError, SPConfig
from sp_passes.models import KimiK3Config, KimiK3Model, init_weights, shrunken_config
from sp_passes.models.stages import TENSORS, KimiK3Stage, init_stage, seams_of
from sp_passes.ops import p2p

TP = PP = 2
ops = torch.ops.sp_passes
FUNCTIONAL = torch.ops._c10d_functional
pytestmark = pytest.mark.multirank


def model_config(layers: int = 3) -> KimiK3Config:
    """Layers that each open an AttnRes block; all but the last are in the first stage."""
    kinds = ("kda", "mla", "kda")[:layers]
    return replace(shrunken_config(3), attn_res_block_size=1, layer_types=kinds)


def ids(tokens: int) -> Tensor:
    made = torch.Generator().manual_seed(tokens)
    return torch.randint(0, model_config().vocab_size, (tokens,), generator=made)


class Place:
    """Where a process stands: its stage, its tensor-parallel rank, and both groups."""

    def __init__(self, rank: ranks.Rank) -> None:
        self.stage, self.tp_rank = divmod(rank.rank, TP)
        tp = [dist.new_group([s * TP + r for r in range(TP)]) for s in range(PP)]
        pp = [dist.new_group([s * TP + r for s in range(PP)]) for r in range(TP)]
        self.tp, self.pp = tp[self.stage], pp[self.tp_rank]

    def config(self, **options: Any) -> SPConfig:
        return SPConfig(group=self.tp, **options)

    def model(self, seams: str, layers: int = 3) -> KimiK3Stage:
        tp = (TP, self.tp_rank, self.tp.group_name)
        stage = KimiK3Stage(
            model_config(layers), PP, self.stage, *tp, seams=seams, pipeline=self.pp.group_name
        )
        return init_stage(stage)


def expected(tokens: int, layers: int = 3) -> Tensor:
    model = init_weights(KimiK3Model(model_config(layers)))
    with torch.no_grad():
        return model(ids(tokens))


def error(found: Tensor, tokens: int, layers: int = 3) -> float:
    wanted = expected(tokens, layers)
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max())


# --- a whole model -----------------------------------------------------------------------


def by_tensors(rank: ranks.Rank, counts: list[int], layers: int, compiled: bool) -> list[Any]:
    """The engine carries the named tensors between compiled stages."""
    place = Place(rank)
    module = place.model("tensors", layers)
    stage: Any = module
    if compiled:
        stage = sp_passes.compile(
            module,
            place.config(**seams_of(PP, place.stage)),
            placements={"input_ids": Replicate()},
            dynamic=True,
        )
    out: list[Any] = []
    for tokens in counts:
        rows = sp_passes.local_rows(tokens, TP) if compiled else tokens
        if place.stage == 0:
            with torch.no_grad():
                found = stage(ids(tokens))
            assert {n: t.shape[0] for n, t in found.items()} == dict.fromkeys(TENSORS, rows)
            for tensor in found.values():
                dist.send(tensor.contiguous(), group_dst=1, group=place.pp)
            out.append(found["residual"])
            continue
        hidden = model_config().hidden_size
        sizes = {"hidden_states": (hidden,), "residual": (layers - 1, hidden)}
        taken = {name: torch.empty(rows, *size) for name, size in sizes.items()}
        for tensor in taken.values():
            dist.recv(tensor, group_src=0, group=place.pp)
        with torch.no_grad():
            out.append(stage(ids(tokens), **taken))
    report = stage.report.to_json() if compiled else ""
    return [out, report]


def test_whole_boundaries_are_the_model_itself() -> None:
    results = ranks.run(by_tensors, TP * PP, [5], 3, False)
    for out, _ in results[TP:]:
        assert error(out[0], 5) < 1e-4


@pytest.mark.slow
def test_named_tensors_between_compiled_stages() -> None:
    counts = [7, 4]
    results = ranks.run(by_tensors, TP * PP, counts, 2, True, timeout=280)
    for out, _ in results[TP:]:
        for found, tokens in zip(out, counts, strict=True):
            assert error(found, tokens, 2) < 1e-4, tokens
    first, second = (results[r][0][0] for r in range(TP))
    assert first.shape == second.shape and not torch.equal(first, second)
    for _, text in results:
        report = sp_passes.Report.from_json(text)
        sites = {d.name: d for d in report.applied if d.pattern == "pp_send"}
        assert sorted(sites) == sorted(TENSORS), report
        assert all(d.collectives_removed == {"all_gather": 1} for d in sites.values())
        assert "residual" in str(report) and any(d.pattern != "pp_send" for d in report.applied)


def by_p2p(rank: ranks.Rank, tokens: int) -> Any:
    """The stages send and receive themselves; traced, rewritten and run."""
    place = Place(rank)
    module = place.model("p2p")
    gm = sp_passes.trace(module, ids(tokens))
    report = sp_passes.rewrite(gm, place.config(), {"input_ids": Replicate()})
    with torch.no_grad():
        out = gm(ids(tokens))
    return out, [
        (d.name, d.applied, dict(d.bytes_moved)) for d in report.decisions if d.pattern == "pp_send"
    ]


@pytest.mark.parametrize("tokens", [7, 1])
def test_stages_that_send_themselves(tokens: int) -> None:
    results = ranks.run(by_p2p, TP * PP, tokens)
    for out, _ in results[TP:]:
        assert error(out, tokens) < 1e-4
    hidden, rows = model_config().hidden_size * 4, sp_passes.local_rows(tokens, TP)
    for number, (_, sites) in enumerate(results):
        assert all(applied for _, applied, _ in sites)
        verb = "send {} to stage 1" if number < TP else "recv {} from stage 0"
        assert [name for name, _, _ in sites] == [verb.format(0), verb.format(1)]
        moved = [(m["before"], m["after"]) for *_, m in sites]
        assert moved == [(tokens * hidden * n, rows * hidden * n) for n in (1, 2)]


# --- ops under torch.compile ---------------------------------------------------------------


class Sender(nn.Module):
    """Sends two tensors in an order of its own; what it returns depends on neither."""

    def __init__(self, place: Place, functional: bool) -> None:
        super().__init__()
        self.place, self.functional = place, functional

    def forward(self, x: Tensor) -> Tensor:
        tp, pp = self.place.tp.group_name, self.place.pp.group_name
        for tag, part in ((1, x * 2), (0, x + 1)):
            whole = ops.all_gather(part, tp, TP)
            if self.functional:
                FUNCTIONAL.wait_tensor(FUNCTIONAL.isend(whole, 1, tag, pp))
            else:
                ops.pp_send(whole, 1, tag, pp)
        return torch.relu(x)


class Receiver(nn.Module):
    def __init__(self, place: Place, functional: bool) -> None:
        super().__init__()
        self.place, self.functional = place, functional

    def forward(self, x: Tensor) -> Tensor:
        tp, pp = self.place.tp.group_name, self.place.pp.group_name
        got = []
        for tag in (1, 0):
            size = [x.shape[0] * TP, x.shape[1]]
            if self.functional:
                buffer = FUNCTIONAL.irecv(x.new_empty(size), 0, tag, pp)
                got.append(FUNCTIONAL.wait_tensor(buffer))
            else:
                got.append(ops.pp_recv(size, x.dtype, x.device, 0, tag, pp))
        m, r = x.shape[0], self.place.tp_rank
        return ops.token_shard(got[0], tp, TP) * 10 + got[1][r * m : (r + 1) * m]


def compiled_p2p(rank: ranks.Rank, functional: bool, rewritten: bool) -> Any:
    place = Place(rank)
    module = (Receiver if place.stage else Sender)(place, functional)
    run: Any = torch.compile(module, dynamic=True)
    if rewritten:
        run = sp_passes.compile(module, place.config(), dynamic=True)
    out = []
    for rows in (3, 5):
        x = torch.arange(rows * 4.0).view(rows, 4) + 100 * place.tp_rank
        with torch.no_grad():
            out.append(run(x))
    names = [(d.name, d.reason) for d in run.report.decisions] if rewritten else []
    return out, names


@pytest.mark.parametrize(("functional", "rewritten"), [(False, True), (True, True), (False, False)])
def test_sends_survive_the_compiler(functional: bool, rewritten: bool) -> None:
    results = ranks.run(compiled_p2p, TP * PP, functional, rewritten)
    for number, (out, sites) in enumerate(results[TP:]):
        for found, rows in zip(out, (3, 5), strict=True):
            x = torch.arange(rows * 4.0).view(rows, 4) + 100 * number
            torch.testing.assert_close(found, x * 20 + x + 1)
        assert [why for _, why in sites] == ["", ""] * rewritten, sites


# --- when the stages disagree ----------------------------------------------------------------


def disagree(rank: ranks.Rank, case: str) -> tuple[str, float]:
    """The first stage agreed on rows, the second expects something else."""
    place = Place(rank)
    pp, x = place.pp.group_name, torch.ones(4, 3)
    start = time.monotonic()
    with pytest.raises(ShardingError) as caught:
        if place.stage == 0:
            ops.pp_send(x, 1, 5, pp, "S0")
        else:
            size, dtype = [8 if case == "whole" else 4, 3], x.dtype
            if case == "dtype":
                dtype = torch.bfloat16
            ops.pp_recv(size, dtype, x.device, 0, 5, pp, "R" if case == "same shape" else "S0")
    return str(caught.value), time.monotonic() - start


SIDES = {
    "whole": ("[4, 3] float32, one rank's rows", "[8, 3] float32, one rank's rows"),
    "same shape": ("[4, 3] float32, one rank's rows", "[4, 3] float32, the whole tensor"),
    "dtype": ("[4, 3] float32, one rank's rows", "[4, 3] bfloat16, one rank's rows"),
}


@pytest.mark.parametrize("case", SIDES)
def test_both_sides_say_what_each_expects(case: str) -> None:
    sent, wanted = SIDES[case]
    for text, seconds in ranks.run(disagree, TP * PP, case):
        assert f"stage 0 sends {sent}; stage 1 receives {wanted}" in text
        assert "tensor 5" in text and seconds < 5


def one_side(rank: ranks.Rank, rewritten: int) -> Any:
    """Only one of the stages is rewritten."""
    place = Place(rank)
    gm = sp_passes.trace(place.model("p2p"), ids(6))
    if place.stage == rewritten:
        sp_passes.rewrite(gm, place.config(), {"input_ids": Replicate()})
    start = time.monotonic()
    with pytest.raises(ShardingError) as caught, torch.no_grad():
        gm(ids(6))
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("rewritten", [0, 1])
def test_one_stage_alone_is_an_error_on_both(rewritten: int) -> None:
    width = model_config().hidden_size
    whole = f"[6, {width}] float32, the whole tensor"
    rows = f"[3, {width}] float32, one rank's rows"
    sent, wanted = (whole, rows) if rewritten else (rows, whole)
    for text, seconds in ranks.run(one_side, TP * PP, rewritten):
        assert f"stage 0 sends {sent}; stage 1 receives {wanted}" in text
        assert seconds < 20


def wrong_peer(rank: ranks.Rank) -> str:
    place = Place(rank)
    with pytest.raises(sp_passes.SPError) as caught:
        ops.pp_send(torch.ones(2), place.stage, 0, place.pp.group_name)
    return str(caught.value)


def test_a_stage_does_not_send_to_itself() -> None:
    for number, text in enumerate(ranks.run(wrong_peer, TP * PP)):
        assert f"rank {number // TP} is no other stage" in text


def in_store(rank: ranks.Rank) -> list[list[int]]:
    """What groups without a CPU backend use, twice on one channel."""
    return [p2p._swap_in_store(rank.group, 1 - rank.rank, 3, [rank.rank, n]) for n in (7, 8)]


def test_headers_through_the_store() -> None:
    assert ranks.run(in_store, 2) == [[[1, 7], [1, 8]], [[0, 7], [0, 8]]]


class SameRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x[:3])


def same_rows(rank: ranks.Rank) -> str:
    """The first rows on every rank: rank 0 alone takes them for its own."""
    config = SPConfig(group=rank.group, patterns=["pp_send"], stage_inputs={"x": Shard(0)})
    gm = sp_passes.trace(SameRows(), torch.empty(6, 2))
    report = sp_passes.rewrite(gm, config)
    assert len(report.applied) == (rank.rank == 0)
    with pytest.raises(sp_passes.SPError, match="decided differently") as caught:
        gm(torch.ones(3, 2))
    return str(caught.value)


def test_a_slice_of_the_same_rows_on_every_rank_is_no_token_shard() -> None:
    assert all("rank 1: plan" in text for text in ranks.run(same_rows, 2))


# --- named inputs ----------------------------------------------------------------------------


class Tensors:
    """What engines hand on: a mapping inside an object."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors


class Nested(nn.Module):
    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group

    def forward(self, scale: Tensor, intermediate: Tensors) -> dict[str, Tensor]:
        x = ops.token_shard(intermediate.tensors["hidden_states"], self.group, TP)
        return {"hidden_states": ops.all_gather(x * scale, self.group, TP)}


def nested(rank: ranks.Rank) -> Any:
    names = {"hidden_states": Shard(0)}
    config = SPConfig(group=rank.group, stage_inputs=names, stage_outputs=names)
    stage = sp_passes.compile(
        Nested(rank.group.group_name), config, placements={"scale": Replicate()}, dynamic=True
    )
    out = []
    for rows in (3, 6):
        x = torch.full((rows, 2), float(rank.rank + 1))
        given = Tensors({"hidden_states": x})
        found = stage(torch.tensor(3.0), intermediate=given)["hidden_states"]
        assert given.tensors["hidden_states"] is x
        out.append(torch.equal(found, x * 3))
    with pytest.raises(sp_passes.SPError, match="stage_inputs names 'hidden_states'"):
        stage(torch.tensor(3.0), Tensors({"residual": x}))
    return out, [(d.name, d.applied) for d in stage.report.decisions]


def test_tensors_inside_an_object() -> None:
    for out, sites in ranks.run(nested, 2):
        assert out == [True, True]
        assert sites == [("hidden_states", True)] * 2, sites
