# SPDX-License-Identifier: Apache-2.0
"""Rows that cross pipeline stages through vLLM's own GroupCoordinators: TP2 x PP2, gloo."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
import vllm_ranks
from torch import nn

from sp_passes.errors import ShardingError, SPError
from sp_passes.stages import StageRows, local_rows

HIDDEN, BLOCKS, TP, MAX_TOKENS = 6, 3, 2, 16
STEPS = (1, 5, 8, 11)
NAMES = ("hidden_states", "residual")


def setup_module() -> None:
    vllm_ranks.needs_vllm()


def rows_of(tokens: int, tp_rank: int) -> dict[str, torch.Tensor]:
    """What one rank hands on: its own rows of two tensors, and one that all ranks share."""
    generator = torch.Generator().manual_seed(tokens)
    whole = torch.randn(tokens, HIDDEN, generator=generator)
    generator.manual_seed(100 * tokens + tp_rank)
    rows = local_rows(tokens, TP)
    return {
        "hidden_states": torch.randn(rows, HIDDEN, generator=generator),
        "residual": torch.randn(rows, BLOCKS, HIDDEN, generator=generator),
        "whole": whole,
    }


class Stage(nn.Module):
    """One pipeline stage: the first makes rows, the second passes on what it got."""

    def __init__(self, tp_rank: int) -> None:
        super().__init__()
        self.tp_rank = tp_rank

    def forward(self, positions: torch.Tensor, intermediate_tensors: Any = None) -> Any:
        from vllm.sequence import IntermediateTensors

        if intermediate_tensors is not None:
            return intermediate_tensors
        return IntermediateTensors(rows_of(len(positions), self.tp_rank))


# --- transport --------------------------------------------------------------------------


def _transport(rank: ranks.Rank) -> dict[str, Any]:
    from vllm.distributed import get_pp_group, get_tp_group

    from sp_passes.vllm.pp import StageTransport

    with vllm_ranks.parallel(rank, TP, 2):
        pp, tp = get_pp_group(), get_tp_group()

        def exchange(tokens: int, sent: dict[str, torch.Tensor] | None = None) -> Any:
            sent = sent or rows_of(tokens, tp.rank_in_group)
            try:
                if pp.is_first_rank:
                    transport.made(sent, tokens)
                    pp.send_tensor_dict(sent, all_gather_group=tp)
                    return None
                got = pp.recv_tensor_dict(all_gather_group=tp)
            except ShardingError as err:
                return str(err)
            return {n: bool(torch.equal(got[n], t)) for n, t in sent.items()}

        transport = StageTransport(pp, TP, NAMES)
        stock = exchange(8)
        transport.install()
        steps = {tokens: exchange(tokens) for tokens in STEPS}
        wrong = rows_of(8, tp.rank_in_group)
        wrong["residual"] = torch.zeros(8, BLOCKS, HIDDEN)
        refused = exchange(8, wrong)
        uneven = rows_of(8, tp.rank_in_group)
        uneven["residual"] = torch.zeros(3, BLOCKS, HIDDEN)
        transport._made.clear()
        transport.made = lambda *_: None  # as after a replayed graph: the step is not known
        unknown = exchange(8, uneven)
        transport.remove()
        again = exchange(8)
        return {
            "first": pp.is_first_rank,
            "stock": stock,
            "steps": steps,
            "refused": refused,
            "uneven": unknown,
            "again": again,
        }


@pytest.mark.multirank
def test_named_tensors_travel_as_one_ranks_rows() -> None:
    """Odd counts, rows that differ per rank; a replicated tensor keeps vLLM's own way."""
    results = vllm_ranks.run(_transport)
    for found in results:
        if found["first"]:
            continue
        for tokens in STEPS:
            assert found["steps"][tokens] == dict.fromkeys((*NAMES, "whole"), True), tokens
        # Without it the receiver glues slices of different rows together.
        assert (
            found["stock"]
            == found["again"]
            == {
                "hidden_states": False,
                "residual": False,
                "whole": True,
            }
        )
    text = (
        "this stage sends residual as [8, 3, 6] (a full tensor), but one rank's rows of 8 tokens "
        "were agreed: [4, 3, 6] at TP2"
    )
    for found in results:
        before = "" if found["first"] else "the stage before refused: "
        assert found["refused"] == before + text
        assert found["uneven"] == (
            f"{before}this stage sends different rows: {{'hidden_states': 4, 'residual': 3}}"
        )


# --- runners ----------------------------------------------------------------------------


def _worker(rank: ranks.Rank) -> dict[str, Any]:
    """What vLLM's worker does in a step, with its V1 runner's own method."""
    from vllm.distributed import get_pp_group, get_tp_group
    from vllm.sequence import IntermediateTensors
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from sp_passes.vllm import pp as pipeline

    with vllm_ranks.parallel(rank, TP, 2):
        pp, tp = get_pp_group(), get_tp_group()
        tp_rank = tp.rank_in_group
        stage = Stage(tp_rank)
        session = vllm_ranks.session(stage, TP, stage_tensors=NAMES)
        runner = session.worker.model_runner
        runner.max_num_tokens = MAX_TOKENS
        full = {n: torch.zeros(MAX_TOKENS, *t.shape[1:]) for n, t in rows_of(2, 0).items()}
        runner.intermediate_tensors = IntermediateTensors(full)
        own = GPUModelRunner.sync_and_gather_intermediate_tensors
        runner.sync_and_gather_intermediate_tensors = MethodType(own, runner)
        pipeline.install(session)
        steps: dict[int, Any] = {}
        dummy: Any = None
        for tokens in (8, 5):
            positions = torch.arange(tokens)
            if pp.is_first_rank:
                out = stage(positions=positions)
                for handle in pp.isend_tensor_dict(out.tensors, all_gather_group=tp):
                    handle.wait()
                continue
            got, handles, after = pp.irecv_tensor_dict(all_gather_group=tp)
            for done in (*[h.wait for h in handles], *after):
                done()
            gather = runner.sync_and_gather_intermediate_tensors
            held = gather(tokens, IntermediateTensors(got), True)
            wanted = rows_of(tokens, tp_rank)
            out = stage(positions=positions, intermediate_tensors=held)
            steps[tokens] = {n: bool(torch.equal(out[n], t)) for n, t in wanted.items()}
            in_buffer = all(out[n].data_ptr() == full[n].data_ptr() for n in NAMES)
            steps[tokens]["in buffer"] = in_buffer
            dummy = {n: list(t.shape) for n, t in gather(7, None, False).items()}
            try:
                gather(tokens, IntermediateTensors(dict(full)), True)
            except ShardingError as err:
                steps[tokens]["full"] = str(err)
        pp.__dict__.pop("isend_tensor_dict")
        pp.__dict__.pop("irecv_tensor_dict")
        return {"first": pp.is_first_rank, "steps": steps, "dummy": dummy}


@pytest.mark.multirank
def test_the_runner_keeps_the_rows_that_came() -> None:
    for found in vllm_ranks.run(_worker):
        if found["first"]:
            continue
        for tokens, step in found["steps"].items():
            rows = local_rows(tokens, TP)
            assert step.pop("full") == (
                f"this stage receives hidden_states as [16, 6], but one rank's rows of {tokens} "
                f"tokens were agreed: [{rows}, 6] at TP2"
            )
            assert all(step.values()), step
        assert found["dummy"] == {"hidden_states": [4, 6], "residual": [4, 3, 6], "whole": [7, 6]}


def test_captured_graphs_return_the_rows_that_they_made() -> None:
    """The V2 runner's own steps: store at capture, largest first, and slice after a replay."""
    from vllm.sequence import IntermediateTensors

    from sp_passes.vllm.pp import GraphOutputs, RowBuffer

    rows = StageRows(MAX_TOKENS)
    kept = IntermediateTensors(GraphOutputs(rows, TP))
    made = {tokens: rows_of(tokens, 0) for tokens in (11, 5, 1)}
    for tokens, tensors in made.items():
        for name in NAMES:
            kept[name][:tokens] = tensors[name]
        replayed = kept[:tokens]
        for name in NAMES:
            assert torch.equal(replayed[name], tensors[name])
            assert replayed[name].data_ptr() == kept[name].buffer.data_ptr()
    with pytest.raises(ShardingError, match="graph 5 returned 3 rows before and 4 now"):
        kept["residual"][:5] = torch.zeros(4, BLOCKS, HIDDEN)

    buffer = torch.zeros(MAX_TOKENS, HIDDEN)
    received = {"hidden_states": RowBuffer(StageRows(MAX_TOKENS), TP, buffer)}
    new = {k: v[:5].copy_(made[5][k][:5]) for k, v in received.items()}
    assert torch.equal(new["hidden_states"], made[5]["hidden_states"])
    assert IntermediateTensors(received)[:7]["hidden_states"].shape == (4, HIDDEN)
    assert int(buffer.count_nonzero()) == made[5]["hidden_states"].numel()


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version or a signature that was not tried: nothing is wrapped."""
    from sp_passes.vllm import _private
    from sp_passes.vllm.pp import StageTransport

    def irecv_tensor_dict(src: int | None = None, all_gather_group: Any = None) -> None: ...

    def isend_tensor_dict(
        tensor_dict: Any, dst: Any, all_gather_group: Any, all_gather_tensors: Any
    ) -> None: ...

    pp = SimpleNamespace(isend_tensor_dict=isend_tensor_dict, irecv_tensor_dict=irecv_tensor_dict)
    with pytest.raises(SPError, match=r"irecv_tensor_dict .* and no all_gather_tensors; use vLLM"):
        StageTransport(pp, TP, NAMES)
    monkeypatch.setattr(_private, "version", lambda: "0.99.0")
    with pytest.raises(SPError, match=r"works with vLLM 0.32 and 0.33, found 0.99.0"):
        StageTransport(pp, TP, NAMES)
