# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine dumps its graphs; what would be rewritten in them, and why not more?

Two ranks on the CPU, about a minute. In the list of layers ``*`` marks a linear that would be
rewritten; the last line is where the ranks' programs first differ (rank 0's vocabulary begins
at 0, which Inductor folds away).

$ python examples/inspect_vllm_dump.py
inductor_post_grad_graph: 3 layers, A B 2xC D, tokens replicated
  1 x A: [embedding]
  1 x B: AR fused_qkv_a_proj* q_b_proj [unified_mla_kv_cache_update] [unified_mla_attention_with_output] o_proj AR gate_up_proj down_proj AR
  2 x C: fused_qkv_a_proj* q_b_proj [unified_mla_kv_cache_update] [unified_mla_attention_with_output] o_proj AR gate* [cpu_fused_moe] gate_up_proj down_proj AR
  1 x D:
3 x applied latent_projection layers.*.self_attn.mla_attn.fused_qkv_a_proj: 528.00 KiB, +1 all_gather
2 x applied latent_projection layers.*.mlp.experts.gate: 2.00 KiB, +1 all_gather
2 x skipped replicated_mlp layers.*.mlp.experts.shared_experts.layer: already sharded: layers.1.mlp.experts.shared_experts.layer.gate_up_proj.weight is S(0)
1 x skipped replicated_mlp layers.0.mlp: already sharded: layers.0.mlp.gate_up_proj.weight is S(0)
weights unknown whole: 1.98 MiB
weights proven sharded: 1.22 MiB
graph 5 (after_joint_graph), rank 0 against rank 1: node full_default is torch.ops.aten.full.default, the other's mul is torch.ops.aten.mul.Tensor
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import sp_passes
from sp_passes.inspect import inspect, load, view
from sp_passes.inspect.choose import choose
from sp_passes.inspect.diff import rank_diff
from sp_passes.inspect.segments import layers
from sp_passes.report import format_bytes

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="0|1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_DISABLE_COMPILE_CACHE="1",
    HF_HUB_OFFLINE="1",
)
TP = 2
MODEL = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "torch_dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


class PlainLinears:
    """Worker extension: the CPU build's linears as plain products, as graphs on GPUs have them."""


def keep_plain() -> None:
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    def keep(layer, remove_weight):  # type: ignore[no-untyped-def]
        layer.cpu_linear = linear

    for module in (utils, sys.modules["vllm.model_executor.layers.linear"]):
        if hasattr(module, "dispatch_cpu_unquantized_gemm"):
            module.dispatch_cpu_unquantized_gemm = keep


if __name__ != "__main__" and "vllm.model_executor.layers.linear" in sys.modules:
    keep_plain()  # imported by a worker


def make_dump(folder: Path) -> Path:
    """Run one prompt; vLLM writes the graphs of every rank below the folder it returns."""
    from vllm import LLM, SamplingParams

    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    dump = folder / "dump"
    # On GPUs compilation_config={"debug_dump_path": …} does it; vLLM's CPU mode has no such dump.
    os.environ["TORCH_TRACE"] = str(dump)
    engine = LLM(
        model=str(folder / "model"),
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=TP,
        max_model_len=128,
        max_num_seqs=2,
        worker_extension_cls="inspect_vllm_dump.PlainLinears",
    )
    params = SamplingParams(max_tokens=2, detokenize=False)
    engine.generate([{"prompt_token_ids": [3, 1, 4]}], params, use_tqdm=False)
    return dump


def show(path: Path) -> None:
    """What is in the dump, and what the pass would do with it."""
    dumps = load(path).dumps
    (graph,) = choose(dumps)
    made = inspect(graph.dump, sp_passes.SPConfig(tp_size=TP))
    found = layers(made.before)
    print(f"{made.title}: {made.layers} layers, {found.pattern()}, tokens {made.tokens}")
    for letter, times, _, what in view.kind_rows(found, made.before):
        print(f"  {times} x {letter}: {what}")
    for site in view.site_classes(made.rows):
        saved = format_bytes(site["bytes_saved_per_rank"])
        what = f"{saved}, {site['collectives']}" if site["collectives"] else site["reason"]
        print(f"{site['count']} x {site['decision']} {site['pattern']} {site['name']}: {what}")
    for basis, count in made.bytes_by_basis().items():
        print(f"weights {basis}: {format_bytes(count)}")
    print(rank_diff(dumps).first)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        show(make_dump(Path(folder)))
