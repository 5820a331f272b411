# SPDX-License-Identifier: Apache-2.0
"""The reference model: config, known figures, numerics on one rank and on several."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import Rank
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from sp_passes.declare import declared_placement
from sp_passes.errors import ShardingError, SPError
from sp_passes.models import KimiK3Model, attn_res, init_weights, load_config, shrunken_config
from sp_passes.models.config import PACKAGED
from sp_passes.models.layers import Linear, Made, RMSNorm, layout_of
from sp_passes.models.ops import situ
from sp_passes.placement import check

GIB, MIB = 2**30, 2**20


# --- config -----------------------------------------------------------------------------


def k3_json() -> dict[str, Any]:
    return json.loads(PACKAGED["kimi-k3"].read_text())


def test_packaged_config() -> None:
    config = load_config("kimi-k3")
    assert config.num_hidden_layers == 93
    assert config.layer_types.count("mla") == 24 and config.layer_types.count("kda") == 69
    assert config.layer_types[:4] == ("kda", "kda", "kda", "mla")
    assert config.shared_intermediate_size == 6144
    assert not config.is_moe_layer(0) and config.is_moe_layer(1)
    assert config == load_config(PACKAGED["kimi-k3"]) == load_config(PACKAGED["kimi-k3"])


def test_config_of_a_folder_and_of_the_text_model_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(k3_json()["text_config"]))
    assert load_config(tmp_path) == load_config("kimi-k3")


def test_layer_count() -> None:
    config = load_config("kimi-k3")
    assert config.with_layers(6).layer_types == config.layer_types[:6]
    assert config.with_layers(372).layer_types == config.layer_types * 4
    with pytest.raises(SPError, match="at least 1 layer, got layers=0"):
        config.with_layers(0)


def text(**changes: Any) -> dict[str, Any]:
    return {"model_type": "kimi_k3", "text_config": k3_json()["text_config"] | changes}


def without(*keys: str) -> dict[str, Any]:
    data = k3_json()
    for key in keys:
        del data["text_config"][key]
    return data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("\xff", "is no JSON"),
        ([1], "holds a list, not an object"),
        ({}, "model_type is None"),
        (text(model_type="llama"), "model_type is 'llama'"),
        (without("q_lora_rank", "hidden_size"), "missing hidden_size, q_lora_rank"),
        (without("linear_attn_config"), "missing linear_attn_config"),
        (text(linear_attn_config={"num_heads": 1}), "missing linear_attn_config.full_attn_layers"),
        (text(linear_attn_config=3), "linear_attn_config is 3"),
        (text(hiden_size=1), "unknown key hiden_size"),
        (text(hidden_size="7168"), "hidden_size is '7168', not a positive integer"),
        (text(hidden_size=0), "hidden_size is 0"),
        (text(moe_renormalize=1), "moe_renormalize is 1, not true or false"),
        (text(mla_use_nope=False), "mla_use_nope is False, only True is implemented"),
        (text(num_hidden_layers=92), "num_hidden_layers=92"),
    ],
)
def test_config_errors_are_one_line(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "config.json"
    raw = content if isinstance(content, str) else json.dumps(content)
    path.write_bytes(raw.encode("latin-1"))
    with pytest.raises(SPError) as err:
        load_config(path)
    assert message in str(err.value) and str(path) in str(err.value)
    assert "\n" not in str(err.value)


def test_config_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(SPError, match=r"there is no file .*give the path of a config.json or one"):
        load_config(tmp_path / "no.json")
    with pytest.raises(SPError, match="there is no file 'kimi-k4'"):
        load_config("kimi-k4")


# --- sizes ------------------------------------------------------------------------------


def nbytes(model: KimiK3Model, *suffixes: str) -> int:
    named = model.named_parameters()
    return sum(p.numel() * p.element_size() for name, p in named if name.endswith(suffixes))


@pytest.fixture(scope="module")
def full_model() -> KimiK3Model:
    return KimiK3Model(load_config("kimi-k3"), tp_size=8, dtype=torch.bfloat16, device="meta")


def test_known_figures(full_model: KimiK3Model) -> None:
    """The replicated bytes of one rank, in GiB of 2^30 and MB of 10^6 bytes."""
    shared = nbytes(full_model, "shared_experts.gate_up_proj.weight")
    shared += nbytes(full_model, "shared_experts.down_proj.weight")
    assert round(shared / 92 / 1e6, 2) == 264.24
    assert round(shared / GIB, 2) == 22.64
    dense = nbytes(full_model, "mlp.gate_up_proj.weight", "mlp.down_proj.weight")
    assert round(dense / GIB, 3) == 1.354
    latent = nbytes(full_model, "routed_expert_down_proj.weight", "routed_expert_up_proj.weight")
    qkv_a = nbytes(full_model, "fused_qkv_a_proj.weight")
    f_a = nbytes(full_model, "f_a_proj.weight")
    assert qkv_a == 24 * 2112 * 7168 * 2
    assert latent == 92 * 2 * 7168 * 3584 * 2
    assert f_a == 69 * 128 * 7168 * 2
    for tp, saved in {4: 16.98, 8: 19.81, 16: 21.23}.items():
        assert round(shared * (tp - 1) / tp / GIB, 2) == saved
    for tp, saved in {4: 1.015, 8: 1.184, 16: 1.269}.items():
        assert abs(dense * (tp - 1) / tp / GIB - saved) < 1e-3
    for tp, saved in {4: 0.508, 8: 0.592, 16: 0.634}.items():
        assert abs(qkv_a * (tp - 1) / tp / GIB - saved) < 1e-3
    for tp, saved in {4: 6.60, 8: 7.70, 16: 8.25}.items():
        assert abs(latent * (tp - 1) / tp / GIB - saved) < 1e-2
    for tp, saved in {4: 90.6, 8: 105.7, 16: 113.2}.items():
        assert abs(f_a * (tp - 1) / tp / MIB - saved) < 1e-1


def test_full_model_on_meta(full_model: KimiK3Model) -> None:
    ids = torch.empty(8, dtype=torch.long, device="meta")
    hidden = full_model(ids)
    assert hidden.shape == (8, 7168) and hidden.dtype == torch.bfloat16
    assert full_model.compute_logits(hidden).shape == (64, 163840)


def test_full_model_on_fake_tensors() -> None:
    with FakeTensorMode():
        model = KimiK3Model(load_config("kimi-k3").with_layers(5), 8, 3, dtype=torch.bfloat16)
        assert model(torch.empty(4, dtype=torch.long)).shape == (4, 7168)


def test_constructible_in_a_device_context() -> None:
    with torch.device("meta"):
        model = KimiK3Model(load_config("kimi-k3"))
    assert all(p.is_meta and not p.requires_grad for p in model.parameters())


def test_declared_placements(full_model: KimiK3Model) -> None:
    column = {"qkv_proj", "g_proj", "b_proj", "f_b_proj", "conv1d", "q_b_proj", "kv_b_proj"}
    column |= {"embed_tokens", "lm_head", "A_log", "dt_bias", "w13_weight", "w2_weight"}
    for name, param in full_model.named_parameters():
        parts = set(name.split("."))
        if parts & column:
            assert declared_placement(param) == Shard(0), name
        elif "o_proj" in parts:
            assert declared_placement(param) == Shard(1), name
        else:
            assert declared_placement(param) is None, name


def test_sizes_that_do_not_divide() -> None:
    config = load_config("kimi-k3").with_layers(4)
    with pytest.raises(ShardingError, match=r"96 linear attention heads .* tp_size 7; use"):
        KimiK3Model(config, tp_size=7, device="meta")
    with pytest.raises(ShardingError, match="tp_rank 4 of tp_size 4"):
        KimiK3Model(config, tp_size=4, tp_rank=4, device="meta")
    padded = KimiK3Model(config, tp_size=12, tp_rank=11, device="meta")
    assert padded.layers[1].block_sparse_moe.experts.w2_weight.shape[0] == 75
    assert padded(torch.empty(2, dtype=torch.long, device="meta")).shape == (2, 7168)


# --- one rank ---------------------------------------------------------------------------


def test_shrunken_config() -> None:
    config = shrunken_config()
    assert config.num_hidden_layers == 8 and set(config.layer_types) == {"kda", "mla"}
    model = KimiK3Model(config, tp_size=4)
    assert [layer.opens_block for layer in model.layers].count(True) == 2
    mlps = nbytes(model, "gate_up_proj.weight", "down_proj.weight")
    assert mlps > 0.75 * nbytes(model, "")
    for tp in (1, 2, 4, 8):
        KimiK3Model(config, tp_size=tp, device="meta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_is_finite_and_of_order_one(dtype: torch.dtype) -> None:
    model = init_weights(KimiK3Model(shrunken_config(), dtype=dtype))
    hidden = model(tokens(48))
    assert hidden.shape == (48, 256) and hidden.dtype == dtype
    assert hidden.isfinite().all() and 0.5 < hidden.float().std() < 2
    assert model.compute_logits(hidden).shape == (48, 1024)


def test_causal_so_that_padding_at_the_end_changes_nothing() -> None:
    model = init_weights(KimiK3Model(shrunken_config()))
    ids = tokens(20)
    padded = torch.cat([ids, ids.new_zeros(5)])
    close(model(padded)[:20], model(ids))


def test_weights_of_the_ranks_together_are_the_whole_model() -> None:
    config = shrunken_config(4)
    whole = dict(init_weights(KimiK3Model(config), seed=3).named_parameters())
    ranks = [init_weights(KimiK3Model(config, 4, r), seed=3) for r in range(4)]
    for rank, model in enumerate(ranks):
        for name, param in model.named_parameters():
            layout = layout_of(param)
            full = whole[name]
            assert torch.equal(param, full if layout is None else layout.take(full, rank, 4)), name
    other = dict(init_weights(KimiK3Model(config), seed=4).named_parameters())
    assert not torch.equal(other["norm.weight"], whole["norm.weight"])


def test_attn_res_is_a_softmax_over_the_sources() -> None:
    """Token by token, from the definition."""
    made = Made()
    norm, proj = RMSNorm(16, 1e-5, made), Linear(16, 1, made)
    draw = torch.Generator().manual_seed(0)
    norm.weight.copy_(torch.randn(16, generator=draw))
    proj.weight.copy_(torch.randn(1, 16, generator=draw))
    first, second, prefix = (torch.randn(3, 16, generator=draw) for _ in range(3))
    mixed = attn_res.mix(prefix, (first, second), norm, proj)
    for row in range(3):
        values = [x[row] for x in (first, second, prefix)]
        logits = torch.stack([proj(norm(x)) for x in values]).flatten()
        shares = logits.exp() / logits.exp().sum()
        close(mixed[row], sum(s * x for s, x in zip(shares, values, strict=True)))
    assert attn_res.mix(prefix, (), norm, proj) is prefix


def test_situ_with_both_betas() -> None:
    gate, up = torch.tensor([0.5, -3.0, 40.0]), torch.tensor([1.0, -50.0, 100.0])
    expected = 4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate)) * 25 * torch.tanh(up / 25)
    close(situ(gate, up, 4.0, 25.0), expected)
    close(situ(gate, up, 4.0, None), expected / (25 * torch.tanh(up / 25)) * up)


def test_opaque_ops_are_well_formed() -> None:
    seen: dict[Any, tuple] = {}

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func.namespace == "sp_passes_models":
                seen[func] = args
            return func(*args, **(kwargs or {}))

    model = init_weights(KimiK3Model(shrunken_config(4)))
    with Record():
        model(tokens(6))
    assert len(seen) == 3
    for op, args in seen.items():
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def test_compiles_as_one_graph_for_any_number_of_tokens() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = init_weights(KimiK3Model(shrunken_config(5)))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    compiled(tokens(12))
    first = counter.frame_count
    for count in (12, 7, 33):
        close(compiled(tokens(count)), model(tokens(count)))
    assert counter.frame_count == first


@pytest.mark.parametrize(("tp_size", "tokens_at"), [(1, Replicate()), (4, Shard(0))])
def test_placements_of_the_whole_graph(tp_size: int, tokens_at: Any) -> None:
    """Tokens leave as they came; no partial sum reaches a norm, an activation or a gate."""
    with FakeTensorMode():
        model = KimiK3Model(shrunken_config(), tp_size)
        names, params = zip(*model.named_parameters(), strict=True)

        def forward(ids: Tensor, *weights: Tensor) -> Tensor:
            return functional_call(model, dict(zip(names, weights, strict=True)), (ids,))

        graph = make_fx(forward, tracing_mode="fake")(torch.empty(6, dtype=torch.long), *params)
    ids, *weights = (n.name for n in graph.graph.nodes if n.op == "placeholder")
    where = {
        name: declared_placement(param) or Replicate()
        for name, param in zip(weights, params, strict=True)
    }
    found = check(graph, SimpleNamespace(tp_size=tp_size), {ids: tokens_at, **where})
    (result,) = graph.graph.output_node().all_input_nodes
    assert found[result.name] == tokens_at


# --- several ranks ----------------------------------------------------------------------


def tokens(count: int) -> Tensor:
    return torch.randint(0, 1024, (count,), generator=torch.Generator().manual_seed(count))


def _sharded_equals_whole(at: Rank, path: str, config_changes: dict) -> None:
    config = replace(shrunken_config(), **config_changes)
    model = init_weights(KimiK3Model(config, at.world, at.rank, at.group.group_name))
    expected = torch.load(path)
    ids = expected["ids"].chunk(at.world)[at.rank]
    hidden = model(ids)
    logits = model.compute_logits(hidden)
    close(hidden, expected["hidden"].chunk(at.world)[at.rank], at.rank)
    close(logits, expected["logits"], at.rank)


def close(found: Tensor, expected: Tensor, rank: int = 0) -> None:
    error = (found - expected).abs().max() / expected.abs().max()
    assert found.shape == expected.shape and error < 1e-5, f"rank {rank}: relative error {error}"


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("world", "changes"),
    [(2, {}), (4, {}), (4, {"num_experts": 15, "vocab_size": 1022})],
    ids=["2 ranks", "4 ranks", "4 ranks, padded experts and vocabulary"],
)
def test_ranks_with_their_own_tokens_equal_one_rank(
    on_ranks: Any, tmp_path: Path, world: int, changes: dict[str, int]
) -> None:
    config = replace(shrunken_config(), **changes)
    model = init_weights(KimiK3Model(config))
    ids = tokens(64) % config.vocab_size
    hidden = model(ids)
    path = str(tmp_path / "expected.pt")
    torch.save({"ids": ids, "hidden": hidden, "logits": model.compute_logits(hidden)}, path)
    on_ranks(_sharded_equals_whole, world, path, changes)
