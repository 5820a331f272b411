# SPDX-License-Identifier: Apache-2.0
"""Tiny configurations of vLLM's architectures for the survey: shapes that load, made up here.

Two layers, hidden size 256; weights are random. Only the structure matters.
"""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
_QWEN_MOE = {**_EXPERTS, "num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_DEEPSEEK = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
_GRANITE = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64,
    "sliding_window": 64,
}
_MAMBA = {
    "hybrid_override_pattern": "M-*-",
    "num_hidden_layers": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 32,
    "mlp_hidden_act": "relu2",
}

# name: (architecture, model_type, what differs from _BASE)
_TABLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", {}),
    "llama4": (
        "Llama4ForCausalLM",
        "llama4_text",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 512,
            "no_rope_layers": [1, 1],
            "attention_chunk_size": 64,
            "layer_types": ["full_attention", "full_attention"],
        },
    ),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", {}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {**_QWEN_MOE, "shared_expert_intermediate_size": 256},
    ),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3_moe", _QWEN_MOE),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {**_DEEPSEEK, "topk_method": "greedy", "scoring_func": "softmax"},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {**_DEEPSEEK, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "mixtral": ("MixtralForCausalLM", "mixtral", _MIXTRAL),
    "gemma2": (
        "Gemma2ForCausalLM",
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _GEMMA),
    "phi3": ("Phi3ForCausalLM", "phi3", {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "granite": ("GraniteForCausalLM", "granite", _GRANITE),
    "granitemoe": ("GraniteMoeForCausalLM", "granitemoe", {**_GRANITE, **_MIXTRAL}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "gpt_oss",
        {
            **_MIXTRAL,
            "sliding_window": 64,
            "swiglu_limit": 7.0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "glm4": ("Glm4ForCausalLM", "glm4", {"pad_token_id": 0, "eos_token_id": [1]}),
    "nemotron_h": ("NemotronHForCausalLM", "nemotron_h", _MAMBA),
}

MODELS = tuple(_TABLE)
# Those with experts: vLLM keeps their tokens sharded under data and expert parallelism.
EXPERTS = ("llama4", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "granitemoe")


def config(name: str) -> dict[str, Any]:
    """The ``config.json`` of a tiny model, by the names of ``MODELS``."""
    architecture, kind, changed = _TABLE[name]
    return {**_BASE, "architectures": [architecture], "model_type": kind, **changed}
