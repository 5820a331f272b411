# SPDX-License-Identifier: Apache-2.0
"""Who holds which bytes: release, restore, reload, share, and the proof before it all."""

from __future__ import annotations

import copy
import gc
import time
from typing import Any

import mlps
import pytest
import ranks
import torch
from ranks import Failed, Rank
from torch import Tensor, nn

import sp_passes
from sp_passes import ReplicationError, ShardingError, SPError
from sp_passes import residents as table

pytestmark = pytest.mark.multirank
FP32 = 1e-5
SPEC = mlps.ZOO["gpt_oss"]


def nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def start(
    at: Rank, spec: mlps.Spec = SPEC, **options: Any
) -> tuple[Any, nn.Module, Tensor, Tensor]:
    """A compiled MLP that was called once, its original, an input, and the exact result."""
    module = mlps.MLP(spec)
    original = copy.deepcopy(module)
    x = mlps.tokens(spec, at.rank)
    wanted = mlps.exact(original, x)
    run = sp_passes.compile(module, mlps.config(group=at.group, **options))
    assert mlps.worst_error(run(x), wanted) < FP32
    return run, original, x, wanted


def raised(kind: type[Exception], call: Any, *args: Any) -> str:
    try:
        call(*args)
    except kind as err:
        return str(err)
    raise AssertionError(f"{call} did not raise {kind.__name__}")


# --- release ------------------------------------------------------------------------------


def release(at: Rank) -> None:
    run, original, x, wanted = start(at)
    module = run._orig_mod
    sharded = ("gate_up_weight", "gate_up_bias", "down_weight")
    for name in sharded:
        weight = getattr(module, name)
        assert nbytes(weight) == 0, name
        assert weight.shape == getattr(original, name).shape
    assert nbytes(module.down_bias) > 0
    full = sum(nbytes(getattr(original, n)) for n in sharded)
    kept = sp_passes.resident_bytes(module)
    assert kept == full // at.world + nbytes(original.down_bias)  # type: ignore[arg-type]
    assert sp_passes.resident_bytes(run) == kept
    assert mlps.worst_error(run(x), wanted) < FP32
    text = raised(SPError, module, x)
    assert "eager forward of gate_up_weight" in text and "sp_passes.unshard" in text
    for holder in (module, run):
        text = raised(SPError, holder.state_dict)
        assert "state_dict()" in text and "sp_passes.unshard" in text


def keep(at: Rank) -> None:
    run, original, x, wanted = start(at, release_weights=False)
    module = run._orig_mod
    for name, weight in original.named_parameters():
        assert torch.equal(module.get_parameter(name), weight)
    assert torch.equal(module.state_dict()["down_weight"], original.down_weight)  # type: ignore
    assert mlps.worst_error(module(x), wanted) < FP32


def restore(at: Rank) -> None:
    run, original, x, wanted = start(at)
    module = run._orig_mod
    names = sp_passes.unshard(run)
    assert sorted(names) == ["down_weight", "gate_up_bias", "gate_up_weight"]
    for name, weight in original.named_parameters():
        assert torch.equal(module.get_parameter(name), weight), name
    assert set(module.state_dict()) == set(original.state_dict())
    assert mlps.worst_error(module(x), wanted) < FP32
    assert sp_passes.resident_bytes(module) == sp_passes.resident_bytes(original)
    assert sp_passes.unshard(module) == []
    assert mlps.worst_error(run(x), wanted) < FP32
    assert nbytes(module.down_weight) == 0, "the next call shards again"


def restore_bits(at: Rank) -> None:
    """Every bit, NaN payloads and negative zeros too, for each dtype and orientation."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for in_first in (False, True):
            module = mlps.MLP(mlps.with_(SPEC, in_first=in_first), dtype=dtype)
            module.gate_up_weight.view(-1)[3] = float("nan")
            module.down_weight.view(-1)[5] = -0.0
            original = copy.deepcopy(module)
            run = sp_passes.compile(module, mlps.config(group=at.group))
            run(mlps.tokens(SPEC, at.rank, dtype=dtype))
            assert nbytes(module.down_weight) == 0
            sp_passes.unshard(module)
            for name, weight in original.named_parameters():
                mine = module.get_parameter(name)
                assert torch.equal(mine.view(torch.uint8), weight.view(torch.uint8)), (name, dtype)


def reload(at: Rank) -> None:
    run, _, x, _ = start(at)
    module = run._orig_mod
    shards = {k: e.shard.data_ptr() for k, e in table._table.items() if e.shard is not None}
    new = mlps.MLP(SPEC, seed=7)
    sp_passes.load_full_state_dict(run, new.state_dict())
    after = {k: e.shard.data_ptr() for k, e in table._table.items() if e.shard is not None}
    assert shards == after, "addresses changed"
    assert nbytes(module.down_weight) == 0
    assert mlps.worst_error(run(x), mlps.exact(new, x)) < FP32
    sp_passes.unshard(module)
    for name, weight in new.named_parameters():
        assert torch.equal(module.get_parameter(name), weight), name


def reload_kept(at: Rank) -> None:
    """release_weights=False: the full weight and the shard both follow."""
    run, _, x, _ = start(at, release_weights=False)
    new = mlps.MLP(SPEC, seed=7)
    sp_passes.load_full_state_dict(run, new.state_dict())
    wanted = mlps.exact(new, x)
    assert mlps.worst_error(run(x), wanted) < FP32
    assert mlps.worst_error(run._orig_mod(x), wanted) < FP32


def reload_wrong(at: Rank) -> None:
    run, original, x, wanted = start(at)
    state = original.state_dict()
    missing = {k: v for k, v in state.items() if k != "down_weight"}
    text = raised(SPError, sp_passes.load_full_state_dict, run, missing)
    assert "down_weight" in text and "missing" in text
    text = raised(
        SPError, sp_passes.load_full_state_dict, run, {**state, "stranger": torch.ones(1)}
    )
    assert "stranger" in text
    part = {**state, "down_weight": state["down_weight"][:, :12]}
    text = raised(ShardingError, sp_passes.load_full_state_dict, run, part)
    assert "down_weight" in text and "[10, 12]" in text and "[10, 24]" in text
    odd = {k: v.clone() for k, v in state.items()}
    odd["gate_up_weight"] += 1
    odd["down_weight"].view(-1)[at.rank] += 1
    text = raised(ReplicationError, sp_passes.load_full_state_dict, run, odd)
    assert "down_weight" in text
    assert mlps.worst_error(run(x), wanted) < FP32, "a refused load changed weights"
    sp_passes.load_full_state_dict(run, missing, strict=False)
    assert mlps.worst_error(run(x), wanted) < FP32


def reload_before_first_call(at: Rank) -> None:
    module = mlps.MLP(SPEC)
    new = mlps.MLP(SPEC, seed=9)
    run = sp_passes.compile(module, mlps.config(group=at.group))
    sp_passes.load_full_state_dict(run, new.state_dict())
    x = mlps.tokens(SPEC, at.rank)
    assert mlps.worst_error(run(x), mlps.exact(new, x)) < FP32


class Tied(nn.Module):
    """Two MLPs with one gate_up, which has two names."""

    def __init__(self, split: str = "chunk") -> None:
        super().__init__()
        self.a = mlps.MLP(mlps.BASE, 0)
        self.b = mlps.MLP(mlps.with_(mlps.BASE, split=split), 1)
        self.b.gate_up_weight = self.a.gate_up_weight

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def tied(at: Rank) -> None:
    module = Tied()
    original = copy.deepcopy(module)
    x = mlps.tokens(mlps.BASE, at.rank)
    run = sp_passes.compile(module, mlps.config(group=at.group))
    before = sp_passes.resident_bytes(module)
    assert mlps.worst_error(run(x), mlps.exact(original, x)) < FP32
    assert len(run.report.applied) == 2
    assert before - sp_passes.resident_bytes(module) == run.report.bytes_saved_per_rank
    new = Tied()
    with torch.no_grad():
        for weight in new.parameters():
            weight.mul_(2)
    sp_passes.load_full_state_dict(run, new.state_dict())
    assert mlps.worst_error(run(x), mlps.exact(new, x)) < FP32
    sp_passes.unshard(module)
    for name, weight in new.state_dict().items():
        assert torch.equal(module.state_dict()[name], weight), name


def shared_by_two_graphs(at: Rank) -> None:
    """Compiled one by one, the MLPs share the shard of their common weight."""
    module = Tied()
    original = copy.deepcopy(module)
    config = mlps.config(group=at.group)
    a, b = sp_passes.compile(module.a, config), sp_passes.compile(module.b, config)
    x = mlps.tokens(mlps.BASE, at.rank)
    for _ in range(2):
        assert mlps.worst_error(a(x), mlps.exact(original.a, x)) < FP32
        assert mlps.worst_error(b(x), mlps.exact(original.b, x)) < FP32
    whole = sp_passes.resident_bytes(original)
    assert sp_passes.resident_bytes(module) * at.world == whole


def two_layouts_in_two_graphs(at: Rank) -> None:
    """One reads gate_up in halves, the other interleaved: it is kept whole, and right."""
    module = Tied(split="strided")
    original = copy.deepcopy(module)
    config = mlps.config(group=at.group)
    a, b = sp_passes.compile(module.a, config), sp_passes.compile(module.b, config)
    x = mlps.tokens(mlps.BASE, at.rank)
    for _ in range(2):
        assert mlps.worst_error(a(x), mlps.exact(original.a, x)) < FP32
        assert mlps.worst_error(b(x), mlps.exact(original.b, x)) < FP32
    assert torch.equal(module.a.gate_up_weight, original.a.gate_up_weight)
    new = Tied(split="strided")
    with torch.no_grad():
        new.a.gate_up_weight.mul_(3)
    sp_passes.load_full_state_dict(module, new.state_dict(), strict=False)
    assert mlps.worst_error(a(x), mlps.exact(new.a, x)) < FP32
    assert mlps.worst_error(b(x), mlps.exact(new.b, x)) < FP32
    sp_passes.unshard(module)
    assert torch.equal(module.b.down_weight, new.b.down_weight)


def storage_of_someone_else(at: Rank) -> None:
    """A weight that is a part of a larger buffer is not freed: others live there too."""
    module = mlps.MLP(mlps.BASE)
    flat = torch.cat([module.gate_up_weight.view(-1), torch.full((8,), 5.0)])
    module.gate_up_weight = nn.Parameter(flat[:-8].view(48, 10), requires_grad=False)
    original = copy.deepcopy(module)
    x = mlps.tokens(mlps.BASE, at.rank)
    run = sp_passes.compile(module, mlps.config(group=at.group))
    for _ in range(2):
        assert mlps.worst_error(run(x), mlps.exact(original, x)) < FP32
    assert nbytes(flat) > 0 and flat[-8:].eq(5).all()
    assert nbytes(module.down_weight) == 0


def two_weights_in_one_storage(at: Rank) -> None:
    """gate and up as views of one flat buffer, at different offsets."""
    module = mlps.MLP(mlps.Spec(form="separate"))
    flat = torch.cat([module.gate_weight.view(-1), module.up_weight.view(-1)])
    module.gate_weight = nn.Parameter(flat[:240].view(24, 10), requires_grad=False)
    module.up_weight = nn.Parameter(flat[240:].view(24, 10), requires_grad=False)
    original = copy.deepcopy(module)
    x = mlps.tokens(mlps.BASE, at.rank)
    run = sp_passes.compile(module, mlps.config(group=at.group))
    for _ in range(2):
        assert mlps.worst_error(run(x), mlps.exact(original, x)) < FP32
    sp_passes.unshard(module)
    assert torch.equal(module.up_weight, original.up_weight)


def two_views_of_one_storage(at: Rank) -> None:
    """W and its transpose as two parameters, in two modules: one storage, two shapes."""
    a = mlps.MLP(mlps.Spec(form="single", hidden=24))
    b = mlps.MLP(mlps.Spec(form="single", hidden=24, in_first=True), seed=1)
    b.up_weight = nn.Parameter(a.up_weight.t(), requires_grad=False)
    originals = copy.deepcopy([a, b])
    config = mlps.config(group=at.group)
    runs = [sp_passes.compile(m, config) for m in (a, b)]
    x = torch.randn(3, 24) * (at.rank + 1)
    for _ in range(2):
        for run, original in zip(runs, originals, strict=True):
            assert mlps.worst_error(run(x), mlps.exact(original, x)) < FP32


def deleted(at: Rank) -> None:
    gc.collect()
    table._sweep()
    before = set(table._table)
    run, _, _, _ = start(at)
    assert len(set(table._table) - before) == 3
    del run
    torch._dynamo.reset()
    gc.collect()
    table._sweep()
    assert set(table._table) <= before, "shards outlive their module"


def moved_weights(at: Rank) -> None:
    """Assigning new parameters after compiling: the new values are used."""
    run, _, x, _ = start(at)
    module = run._orig_mod
    new = mlps.MLP(SPEC, seed=11)
    for name, weight in copy.deepcopy(new).named_parameters():
        setattr(module, name, weight)
    assert mlps.worst_error(run(x), mlps.exact(new, x)) < FP32
    assert nbytes(module.down_weight) == 0


@pytest.mark.parametrize(
    "job",
    [
        release, keep, restore, restore_bits, reload, reload_kept, reload_wrong,
        reload_before_first_call, tied, shared_by_two_graphs, two_layouts_in_two_graphs,
        storage_of_someone_else, two_weights_in_one_storage, two_views_of_one_storage, deleted,
        moved_weights,
    ],
    ids=lambda job: job.__name__,
)  # fmt: skip
def test_two_ranks(on_ranks: Any, job: Any) -> None:
    on_ranks(job, 2)


@pytest.mark.parametrize("job", [release, restore, reload], ids=lambda job: job.__name__)
def test_four_ranks(on_ranks: Any, job: Any) -> None:
    on_ranks(job, 4)


# --- proof ----------------------------------------------------------------------------------


def one_bit(at: Rank, name: str, odd: int) -> str:
    module = mlps.MLP(SPEC)
    if at.rank == odd:
        words = getattr(module, name).view(-1).view(torch.int32)
        words[-1] ^= 1
    held = copy.deepcopy(module.state_dict())
    before = sp_passes.resident_bytes(module)
    x = mlps.tokens(SPEC, at.rank)
    run = sp_passes.compile(module, mlps.config(group=at.group))
    text = raised(ReplicationError, run, x)
    assert sp_passes.resident_bytes(module) == before
    for key, value in module.state_dict().items():
        assert torch.equal(value, held[key]), f"{key} changed"
    if at.rank == odd:
        words[-1] ^= 1
    good = mlps.MLP(SPEC)
    assert mlps.worst_error(run(x), mlps.exact(good, x)) < FP32, "not usable after the repair"
    assert nbytes(module.down_weight) == 0
    return text


@pytest.mark.parametrize("name", ["gate_up_weight", "gate_up_bias", "down_weight"])
@pytest.mark.parametrize("odd", [0, 3])
def test_one_bit_on_one_rank(on_ranks: Any, name: str, odd: int) -> None:
    texts = on_ranks(one_bit, 4, name, odd)
    assert len(set(texts)) == 1, "every rank must say the same"
    assert f"{name} (rank {odd} differs)" in texts[0] and "nothing was freed" in texts[0]


def different_first_calls(at: Rank, how: str) -> tuple[str, float]:
    spec, options = mlps.BASE, {}
    odd = at.rank == 1
    if how == "model" and odd:
        spec = mlps.with_(spec, width=48)
    if how == "layout" and odd:
        spec = mlps.with_(spec, split="strided")
    if how == "token_range":
        options["token_range"] = (1, 64 if odd else 32)
    if how == "patterns" and odd:
        options["patterns"] = []
    if how == "release" and odd:
        options["release_weights"] = False
    if how == "nothing to rewrite" and odd:
        spec = mlps.with_(spec, width=25)
    module = mlps.MLP(spec)
    held = copy.deepcopy(module.state_dict())
    run = sp_passes.compile(module, mlps.config(group=at.group, **options))
    began = time.monotonic()
    text = raised(SPError, run, mlps.tokens(spec, at.rank))
    for key, value in module.state_dict().items():
        assert torch.equal(value, held[key]), f"{key} changed"
    return text, time.monotonic() - began


HOW = ["model", "layout", "token_range", "patterns", "release", "nothing to rewrite"]


@pytest.mark.parametrize("how", HOW)
def test_ranks_that_decide_differently(on_ranks: Any, how: str) -> None:
    """An error on every rank within 10 s (compilation included), and nothing is touched."""
    found = on_ranks(different_first_calls, 3, how, timeout=60)
    for text, seconds in found:
        assert "decided differently" in text
        assert "rank 0" in text and "rank 1" in text
        assert seconds < 10


def hangs(at: Rank) -> None:
    if at.rank == 0:
        time.sleep(60)


def test_the_harness_ends_a_hang() -> None:
    """Its own processes by pid, and the next job gets fresh ones."""
    with pytest.raises(TimeoutError, match=r"ranks \[0\]"):
        ranks.run(hangs, 2, timeout=2)
    assert ranks.run(ranks_of, 4) == [0, 1, 2, 3]


def ranks_of(at: Rank) -> int:
    return at.rank


def test_the_harness_starts_again_where_an_idle_rank_has_died() -> None:
    """It costs the next job only."""
    assert ranks.run(ranks_of, 2) == [0, 1]
    assert ranks._pool is not None
    ranks._pool.processes[1].kill()
    ranks._pool.processes[1].join(5)
    with pytest.raises(RuntimeError, match=r"the process of rank 1 died \(exit code -9\)"):
        ranks.run(ranks_of, 2)
    assert ranks.run(ranks_of, 2) == [0, 1]


def failing(at: Rank) -> None:
    raise SPError(f"rank {at.rank}")


def test_the_harness_reports_failures() -> None:
    assert [f.text for f in ranks.run(failing, 2, check=False)] == ["rank 0", "rank 1"]
    assert all(isinstance(f, Failed) for f in ranks.run(failing, 2, check=False))
    with pytest.raises(AssertionError, match="rank 0"):
        ranks.run(failing, 2)
