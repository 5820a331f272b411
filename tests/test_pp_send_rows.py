# SPDX-License-Identifier: Apache-2.0
"""How many rows cross a boundary: local_rows, StageRows, and figures of full-size stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sp_passes
from sp_passes import ShardingError, SPError, StageRows, local_rows
from sp_passes.models import KimiK3Config, load_config, shrunken_config
from sp_passes.models.stages import KimiK3Stage, layers_of, stage_report
from sp_passes.ops.p2p import cut_rows


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 64])
def test_ranks_together_hold_every_token(tokens: int, tp: int) -> None:
    x = torch.arange(tokens * 3.0).view(tokens, 3)
    parts = [cut_rows(x, rank, tp) for rank in range(tp)]
    assert {p.shape[0] for p in parts} == {local_rows(tokens, tp)}
    whole = torch.cat(parts)
    assert torch.equal(whole[:tokens], x) and not whole[tokens:].any()
    assert all(p.data_ptr() != x.data_ptr() for p in parts if p.numel())


# --- rows of captured graphs ---------------------------------------------------------------


def buffers() -> dict[str, torch.Tensor]:
    return {"hidden_states": torch.zeros(8, 4), "residual": torch.zeros(8, 2, 4)}


def test_a_replay_hands_on_exactly_the_captured_rows() -> None:
    rows, kept = StageRows(8), buffers()
    assert (
        rows.record(10, {"hidden_states": torch.zeros(5, 4), "residual": torch.zeros(5, 2, 4)}) == 5
    )
    rows.record("full", 8)
    views = rows.view(kept, 10)
    assert {n: tuple(v.shape) for n, v in views.items()} == {
        "hidden_states": (5, 4),
        "residual": (5, 2, 4),
    }
    kept["residual"].fill_(3)
    assert (views["residual"] == 3).all()
    assert rows.view(kept, "full")["hidden_states"].shape == (8, 4) and rows.rows("full") == 8
    assert rows.record(10, torch.zeros(5, 4)) == 5


def test_narrowed_exactly_once() -> None:
    rows = StageRows(8)
    rows.record("part", 5)
    rows.record("full", 8)
    for key in ("part", "full"):
        once = rows.view(buffers(), key)
        with pytest.raises(ShardingError, match=r"narrowed already.*narrowed exactly once"):
            rows.view(once, key)
    with pytest.raises(ShardingError, match="has 6 rows, a full-size buffer has 8"):
        rows.view({"residual": torch.zeros(6, 2)}, "part")


def test_rows_that_do_not_fit() -> None:
    rows = StageRows(8)
    with pytest.raises(ShardingError, match="same rows of every tensor"):
        rows.record(1, {"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ShardingError, match="returns 9 rows, buffers hold 8"):
        rows.record(1, 9)
    with pytest.raises(ShardingError, match="'x' was not recorded; there are none"):
        rows.view(buffers(), "x")
    rows.record(1, 3)
    with pytest.raises(ShardingError, match="returned 3 rows before and 4 now"):
        rows.record(1, 4)
    with pytest.raises(ShardingError, match="at least 1"):
        StageRows(0)


# --- stages of the reference model -----------------------------------------------------------


def test_stages_together_are_the_model() -> None:
    config = shrunken_config(7)
    assert [list(layers_of(config, 3, s)) for s in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    names: list[str] = []
    for stage in range(3):
        names += dict(KimiK3Stage(config, 3, stage, device="meta").named_parameters())
    whole = sp_passes.models.KimiK3Model(config, device="meta")
    assert sorted(names) == sorted(dict(whole.named_parameters()))


def test_stages_that_are_not_there() -> None:
    with pytest.raises(SPError, match="stage 2 of pp_size 2"):
        layers_of(shrunken_config(4), 2, 2)
    with pytest.raises(SPError, match="each has at least one layer"):
        layers_of(shrunken_config(4), 5, 0)
    with pytest.raises(SPError, match="seams='x'"):
        KimiK3Stage(shrunken_config(4), 2, 0, seams="x")


def full_width(layers: int) -> KimiK3Config:
    return load_config("kimi-k3").with_layers(layers)


@pytest.mark.parametrize("stage", [0, 1])
def test_full_width_figures_at_tp8(stage: int) -> None:
    """Per rank and boundary: 2 B x 7168 x 64 tokens, and as much for each AttnRes block."""
    config = replace(full_width(4), attn_res_block_size=1)
    report = stage_report(config, tp_size=8, pp_size=2, stage=stage, tokens=64)
    sites = {d.name: d for d in report.decisions if d.pattern == "pp_send"}
    hidden, residual = sites["hidden_states"], sites["residual"]
    assert hidden.bytes_moved == {"before": 917_504, "after": 114_688, "tokens": 64}
    assert residual.bytes_moved == {"before": 1_835_008, "after": 229_376, "tokens": 64}
    assert hidden.detail == "2 B x 7168 x M -> /8, 1 all_gather fewer"
    assert report.model == f"stage {stage} of 2, layers {2 * stage} to {2 * stage + 1}"
    again = sp_passes.Report.from_json(report.to_json())
    assert again.decisions == report.decisions
    plain = next(d for d in report.decisions if d.pattern == "replicated_mlp")
    assert "bytes_moved" not in plain.to_dict()


def test_figures_without_the_pattern() -> None:
    report = stage_report(shrunken_config(4), 2, 2, 1, 9, patterns=["replicated_mlp"])
    assert report.applied and not [d for d in report.decisions if d.pattern == "pp_send"]
