# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Stages before and after ``pp_send``, as text; every form that is legal, and every skip.

``EXPECTTEST_ACCEPT=1 pytest tests/test_pp_send_golden.py`` rewrites the texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlps
import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor, fx, nn
from torch.distributed.tensor import Replicate, Shard

import sp_passes
from sp_passes import PlacementError, SPConfig, SPError

TP = 4
ops = torch.ops.sp_passes
FUNCTIONAL = torch.ops._c10d_functional


class Stage(nn.Module):
    """``fn(*tensors)`` with a positional argument for each."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return self.fn(x) if y is None else self.fn(x, y)


def traced(fn: Callable[..., Any], *sizes: tuple[int, ...]) -> fx.GraphModule:
    return sp_passes.trace(Stage(fn), *(torch.empty(s) for s in sizes))


def rewritten(
    fn: Callable[..., Any],
    *sizes: tuple[int, ...],
    rank: int = 1,
    tokens: str = "sharded",
    **options: Any,
) -> tuple[fx.GraphModule, sp_passes.Report]:
    gm = traced(fn, *sizes)
    config = SPConfig(tp_size=TP, tp_rank=rank, patterns=["pp_send"], **options)
    report = sp_passes.rewrite(gm, config, tokens=tokens)
    sp_passes.check(gm, config, stage_placements(config), tokens)
    return gm, report


def stage_placements(config: SPConfig) -> dict[str, Any]:
    return {name: Shard(0) for name, _ in config.stage_inputs or ()}


def gather(x: Tensor) -> Tensor:
    return ops.all_gather(x, "", TP)


def recv(*size: int, tag: int = 0) -> Tensor:
    return ops.pp_recv(size, torch.float32, torch.device("cpu"), 0, tag, "pp")


def rows(x: Tensor, rank: int = 1) -> Tensor:
    """As engines write it: pad, then narrow."""
    m = -(-x.shape[0] // TP)
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, m * TP - x.shape[0]))[rank * m : (rank + 1) * m]


class Golden(TestCase):
    maxDiff = None

    def test_send(self) -> None:
        def stage(x: Tensor) -> Tensor:
            y = torch.relu(x)
            ops.pp_send(gather(y)[:10], 1, 0, "pp")
            return y

        self.assertExpectedInline(
            mlps.show(traced(stage, (3, 4))),
            """\
x : [3, 4]
relu = relu(x) : [3, 4]
all_gather = all_gather(relu, '', 4) : [12, 4]
slice = slice(all_gather, 0, 0, 10) : [10, 4]
pp_send = pp_send(slice, 1, 0, 'pp') : [0]
return relu
""",
        )
        gm, report = rewritten(stage, (3, 4))
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [3, 4]
relu = relu(x) : [3, 4]
pp_send_ = pp_send_([], relu, 1, 0, 'pp', placement='S0', check=True) : [0]
return relu
""",
        )
        self.assertExpectedInline(
            str(report),
            """\
sp_passes, tp_size 4: 1 of 1 sites applied, 0 B saved per rank
  applied  pp_send  send 0 to stage 1: 0 B saved, -1 all_gather; 4 B x 4 x M -> /4, 1 all_gather fewer""",
        )

    def test_receive(self) -> None:
        def stage(x: Tensor) -> Tensor:
            return x + rows(recv(10, 4))

        self.assertExpectedInline(
            mlps.show(traced(stage, (3, 4))),
            """\
x : [3, 4]
pp_recv = pp_recv([10, 4], torch.float32, device(type='cpu'), 0, 0, 'pp') : [10, 4]
constant_pad_nd = constant_pad_nd(pp_recv, [0, 0, 0, 2], 0.0) : [12, 4]
slice = slice(constant_pad_nd, 0, 3, 6) : [3, 4]
add = add(x, slice) : [3, 4]
return add
""",
        )
        gm, report = rewritten(stage, (3, 4))
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [3, 4]
pp_recv = pp_recv([3, 4], torch.float32, device(type='cpu'), 0, 0, 'pp', placement='S0', check=True) : [3, 4]
add = add(x, pp_recv) : [3, 4]
return add
""",
        )
        self.assertExpectedInline(
            str(report),
            """\
sp_passes, tp_size 4: 1 of 1 sites applied, 0 B saved per rank
  applied  pp_send  recv 0 from stage 0: 0 B saved, no collectives added; 4 B x 4 x M -> /4, one split fewer""",
        )

    def test_functional_send(self) -> None:
        def stage(x: Tensor) -> Tensor:
            sent = FUNCTIONAL.isend(gather(x), 1, 0, "pp")
            FUNCTIONAL.wait_tensor(sent)
            return torch.relu(x)

        gm, _ = rewritten(stage, (3, 4))
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [3, 4]
pp_send_ = pp_send_([], x, 1, 0, 'pp', placement='S0', check=False) : [0]
relu = relu(x) : [3, 4]
return relu
""",
        )

    def test_functional_receive(self) -> None:
        def stage(x: Tensor) -> Tensor:
            got = FUNCTIONAL.irecv(torch.empty(12, 4), 0, 0, "pp")
            return x + FUNCTIONAL.wait_tensor(got)[3:6]

        gm, _ = rewritten(stage, (3, 4))
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [3, 4]
pp_recv = pp_recv([3, 4], torch.float32, device(type='cpu'), 0, 0, 'pp', placement='S0', check=False) : [3, 4]
add = add(x, pp_recv) : [3, 4]
return add
""",
        )

    def test_outputs_by_name(self) -> None:
        def stage(x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"hidden_states": gather(torch.relu(x)), "residual": gather(y)[:10]}

        outputs = {"hidden_states": Shard(0), "residual": Shard(0)}
        gm, report = rewritten(stage, (3, 4), (3, 2, 4), stage_outputs=outputs)
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [3, 4]
y : [3, 2, 4]
relu = relu(x) : [3, 4]
return {'hidden_states': relu, 'residual': y}
""",
        )
        self.assertExpectedInline(
            str(report),
            """\
sp_passes, tp_size 4: 2 of 2 sites applied, 0 B saved per rank
  applied  pp_send  hidden_states: 0 B saved, -1 all_gather; 4 B x 4 x M -> /4, 1 all_gather fewer
  applied  pp_send  residual: 0 B saved, -1 all_gather; 4 B x 2 x 4 x M -> /4, 1 all_gather fewer""",
        )

    def test_inputs_by_name(self) -> None:
        def stage(x: Tensor, y: Tensor) -> Tensor:
            return rows(x) + rows(y)[:, 1]

        inputs = {"x": Shard(0), "y": Shard(0)}
        gm, report = rewritten(stage, (10, 4), (10, 2, 4), stage_inputs=inputs)
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [3, 4]
y : [3, 2, 4]
select = select(y, 1, 1) : [3, 4]
add = add(x, select) : [3, 4]
return add
""",
        )
        self.assertExpectedInline(
            str(report),
            """\
sp_passes, tp_size 4: 2 of 2 sites applied, 0 B saved per rank
  applied  pp_send  x: 0 B saved, -1 all_gather; 4 B x 4 x M -> /4, 1 all_gather fewer
  applied  pp_send  y: 0 B saved, -1 all_gather; 4 B x 2 x 4 x M -> /4, 1 all_gather fewer""",
        )

    def test_only_the_blocks_written_so_far(self) -> None:
        """A residual buffer of 8 blocks, of which two are written."""

        def stage(x: Tensor, y: Tensor) -> Tensor:
            ops.pp_send(gather(y).narrow(1, 0, 2), 1, 0, "pp")
            return torch.relu(x)

        gm, _ = rewritten(stage, (3, 4), (3, 8, 4))
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [3, 4]
y : [3, 8, 4]
slice = slice(y, 1, 0, 2) : [3, 2, 4]
pp_send_ = pp_send_([], slice, 1, 0, 'pp', placement='S0', check=True) : [0]
relu = relu(x) : [3, 4]
return relu
""",
        )

    def test_several_tensors_keep_their_order(self) -> None:
        def stage(x: Tensor, y: Tensor) -> Tensor:
            a, b = rows(recv(12, 4, tag=0)), rows(recv(12, 2, 4, tag=1))
            ops.pp_send(gather(b), 2, 1, "pp")
            ops.pp_send(gather(a), 2, 0, "pp")
            return x

        gm, _ = rewritten(stage, (3, 4), (3, 4))
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [3, 4]
y : [3, 4]
pp_recv = pp_recv([3, 4], torch.float32, device(type='cpu'), 0, 0, 'pp', placement='S0', check=True) : [3, 4]
pp_recv_1 = pp_recv([3, 2, 4], torch.float32, device(type='cpu'), 0, 1, 'pp', placement='S0', check=True, after=pp_recv) : [3, 2, 4]
pp_send_ = pp_send_([], pp_recv_1, 2, 1, 'pp', placement='S0', check=True, after=pp_recv_1) : [0]
pp_send__1 = pp_send_([], pp_recv, 2, 0, 'pp', placement='S0', check=True, after=pp_send_) : [0]
return x
""",
        )

    def test_a_stage_that_only_passes_on(self) -> None:
        def stage(x: Tensor) -> Tensor:
            ops.pp_send(recv(10, 4), 2, 0, "pp")
            return x

        gm, _ = rewritten(stage, (3, 4))
        self.assertExpectedInline(
            mlps.show(gm),
            """\
x : [3, 4]
pp_recv = pp_recv([3, 4], torch.float32, device(type='cpu'), 0, 0, 'pp', placement='S0', check=True) : [3, 4]
pp_send_ = pp_send_([], pp_recv, 2, 0, 'pp', placement='S0', check=True, after=pp_recv) : [0]
return x
""",
        )


# --- forms -------------------------------------------------------------------------------


def chunked(x: Tensor) -> Tensor:
    return x.chunk(TP)[1]


def cat_padded(x: Tensor) -> Tensor:
    pad = -x.shape[0] % TP
    whole = torch.cat([x, x.new_zeros(pad, *x.shape[1:])]) if pad else x
    return whole.narrow(0, whole.shape[0] // TP, whole.shape[0] // TP)


CUTS = {
    "slice": lambda x: x[x.shape[0] // TP : 2 * x.shape[0] // TP],
    "narrow": cat_padded,
    "padded": rows,
    "chunk": chunked,
    "op": lambda x: ops.token_shard(x, "", TP),
    "cast first": lambda x: rows(x.double()).float(),
    "columns first": lambda x: rows(x[:, :4]),
    "unsqueezed": lambda x: rows(x.unsqueeze(1)).squeeze(1),
    "reshaped": lambda x: rows(x.reshape(x.shape[0], 2, 2)).reshape(-1, 4),
    "twice": lambda x: rows(x) * rows(x.double()).float(),
}


@pytest.mark.parametrize("tokens", [12, 10])
@pytest.mark.parametrize("name", CUTS)
def test_cuts(name: str, tokens: int) -> None:
    if tokens % TP and name in ("slice", "chunk"):
        pytest.skip("cuts without padding")
    cut = CUTS[name]
    gm, report = rewritten(lambda x: x + cut(recv(tokens, 4)), (3, 4))
    assert [d.applied for d in report.decisions] == [True], report
    names = [mlps._op(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    assert names.count("pp_recv") == 1 and "token_shard" not in names
    received = gm.graph.find_nodes(op="call_function", target=ops.pp_recv.default)[0]
    assert received.meta["val"].shape == (3, 4) and received.kwargs["placement"] == "S0"


SENT = {
    "trimmed": lambda x: gather(x)[:10],
    "cast": lambda x: gather(x).bfloat16(),
    "stacked": lambda x: torch.stack([gather(x), gather(x * 2)], dim=1),
    "joined": lambda x: torch.cat([gather(x), gather(x * 2)], dim=-1)[:11],
    "summed": lambda x: gather(x) + gather(x * 2),
    "reshaped": lambda x: gather(x).reshape(12, 2, 2),
    "functional": lambda x: FUNCTIONAL.wait_tensor(FUNCTIONAL.all_gather_into_tensor(x, TP, "0")),
}


@pytest.mark.parametrize("name", SENT)
def test_sent(name: str) -> None:
    def stage(x: Tensor) -> Tensor:
        ops.pp_send(SENT[name](x), 1, 0, "pp")
        return torch.relu(x)

    gm, report = rewritten(stage, (3, 4))
    (decision,) = report.decisions
    assert decision.applied, report
    gathers = 2 if name in ("stacked", "joined", "summed") else 1
    assert decision.collectives_removed == {"all_gather": gathers}
    names = [mlps._op(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    assert "all_gather" not in names and names.count("pp_send_") == 1
    sent = gm.graph.find_nodes(op="call_function", target=ops.pp_send_.default)[0]
    assert sent.args[1].meta["val"].shape[0] == 3


def test_a_gather_that_is_read_stays() -> None:
    def stage(x: Tensor) -> Tensor:
        whole = gather(x)
        ops.pp_send(whole, 1, 0, "pp")
        return whole.sum(0)

    _, report = rewritten(stage, (3, 4))
    assert report.applied[0].collectives_removed == {}
    assert "no all_gather fewer" in str(report)


# --- skips -------------------------------------------------------------------------------


def sending(value: Callable[[Tensor], Tensor], **options: Any) -> Callable[[Tensor], Tensor]:
    def stage(x: Tensor) -> Tensor:
        ops.pp_send(value(x), 1, 0, "pp", **options)
        return torch.relu(x)

    return stage


SKIPS: dict[str, tuple[Callable[..., Any], str]] = {
    "row mixing": (sending(lambda x: gather(x).cumsum(0)), "not gathered: cumsum"),
    "computed": (
        sending(lambda x: ops.all_gather(x, "", TP).sum(0, keepdim=True).expand(12, 4)),
        "not gathered: ",
    ),
    "other rows": (sending(lambda x: gather(x)[:4]), "not gathered: slice_1 keeps 4 of 12 rows"),
    "shard": (sending(lambda x: x, placement="S0"), "already sharded: "),
    "partial": (sending(lambda x: x), "not whole: x is Shard(0), needs Replicate()"),
    "whole use": (lambda x: x + recv(10, 4).sum(0), "used whole: recv 0 from stage 0 by sum"),
    "one whole use": (
        lambda x: x + (r := recv(12, 4))[3:6] + r.sum(0),
        "used whole: recv 0 from stage 0 by sum",
    ),
    "wrong rows": (lambda x: x + recv(12, 4)[2:5], "used whole: recv 0 from stage 0 by slice"),
    "unused": (lambda x: (recv(12, 4), x + 1)[1], "unused: nothing reads what is received"),
    "received rows": (
        lambda x: x + ops.pp_recv([3, 4], x.dtype, x.device, 0, 0, "pp", "S0"),
        "already sharded: ",
    ),
    "batched": (
        lambda x: (FUNCTIONAL.batch_p2p_ops(["isend"], [1], [0], [gather(x)], "0"), x + 1)[1],
        "spelling: batched",
    ),
}


@pytest.mark.parametrize("name", SKIPS)
def test_skips(name: str) -> None:
    stage, why = SKIPS[name]
    gm = traced(stage, (3, 4))
    before = [n.target for n in gm.graph.nodes]
    config = SPConfig(tp_size=TP, tp_rank=1, patterns=["pp_send"])
    report = sp_passes.rewrite(gm, config)
    assert not report.applied
    assert report.skipped[0].reason.startswith(why), report.skipped[0].reason
    kept = [n.target for n in gm.graph.nodes]
    assert kept.count(ops.pp_recv.default) == before.count(ops.pp_recv.default)
    assert kept.count(ops.pp_send_.default) == before.count(ops.pp_send.default)
    if not why.startswith(("already sharded", "spelling")):
        with pytest.raises(SPError, match="strict: pp_send"):
            sp_passes.rewrite(
                traced(stage, (3, 4)),
                SPConfig(tp_size=TP, tp_rank=1, patterns=["pp_send"], strict=True),
            )


def test_one_rank() -> None:
    gm = traced(lambda x: x + recv(3, 4), (3, 4))
    report = sp_passes.rewrite(gm, SPConfig(tp_size=1, patterns=["pp_send"]))
    assert report.skipped[0].reason.startswith("one rank")


def test_an_output_that_was_never_gathered_is_cut() -> None:
    gm, report = rewritten(
        lambda x: x.cumsum(0), (12, 4), tokens="replicated", stage_outputs={"out": Shard(0)}
    )
    assert "its rows are cut without a collective" in report.skipped[0].reason
    assert gm.graph.find_nodes(op="output")[0].args[0].meta["val"].shape == (3, 4)


def test_an_output_that_is_sharded_already_is_refused() -> None:
    with pytest.raises(PlacementError, match="stage_outputs names 'out', which is Shard"):
        rewritten(lambda x: torch.relu(x), (3, 4), stage_outputs={"out": Shard(0)})


def test_a_stage_input_that_is_read_whole_is_gathered() -> None:
    gm, report = rewritten(lambda x: x.sum(0), (12, 4), stage_inputs={"x": Shard(0)})
    assert report.skipped[0].reason.startswith("used whole: x by ")
    assert gm.graph.find_nodes(op="call_function", target=ops.stage_input.default)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage_inputs": {"hidden": Shard(0)}}, "stage_inputs names 'hidden'; this graph has x"),
        ({"stage_outputs": {"a": Shard(0), "b": Shard(0)}}, "stage_outputs names 'a'"),
    ],
)
def test_names_that_are_not_there(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SPError, match=message):
        rewritten(lambda x: torch.relu(x), (12, 4), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage_inputs": {"x": Replicate()}}, "travel as Shard"),
        ({"stage_inputs": {"x": Shard(1)}}, "travel as Shard"),
        ({"stage_outputs": "x"}, "must map names"),
        ({"stage_outputs": {"x": Shard(0)}, "patterns": ["replicated_mlp"]}, "needs the pattern"),
    ],
)
def test_config_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SPError, match=message):
        SPConfig(tp_size=2, **options)


def test_config_round_trip() -> None:
    a = SPConfig(tp_size=2, stage_inputs={"b": Shard(0), "a": Shard(0)}, stage_outputs={})
    b = SPConfig(tp_size=2, stage_inputs={"a": "S0", "b": "S0"})
    assert a == b and hash(a) == hash(b) and a.digest() == b.digest()
    assert SPConfig.from_json(a.to_json()) == a and '"stage_inputs": {"a": "S0"' in a.to_json()
    assert a.digest() != SPConfig(tp_size=2).digest()
