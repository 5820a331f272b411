# SPDX-License-Identifier: Apache-2.0
"""The shape of a Kimi-K3 text model, read from a Hugging-Face-style ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..errors import SPError

PACKAGED = {"kimi-k3": Path(__file__).parent / "data" / "kimi_k3_config.json"}

_FAMILY = ("kimi_k3", "kimi_linear")

# What the model here computes; another value would be another architecture.
_REQUIRED_VALUES: dict[str, Any] = {
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
}

# Keys that do not change what is computed in a forward pass over one sequence.
# fmt: off
_IGNORED_KEYS = frozenset((
    "_attn_implementation", "_name_or_path", "architectures", "attention_bias",
    "attention_dropout", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "head_dim", "id2label", "initializer_range", "is_encoder_decoder",
    "label2id", "max_position_embeddings", "model_max_length", "model_type",
    "num_key_value_heads", "num_nextn_predict_layers", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
    "problem_type", "quantization_config", "return_dict", "rope_parameters", "rope_scaling",
    "rope_theta", "torch_dtype", "transformers_version", "use_cache", "use_grouped_topk",
))
# fmt: on


@dataclass(frozen=True)
class KimiK3Config:
    """Sizes and constants of the text model; names as in the checkpoint's ``config.json``.

    ``layer_types`` says ``"kda"`` (Kimi Delta Attention) or ``"mla"`` (multi-head latent
    attention) for each layer, from layer 0. The ``linear_*``, ``short_conv_kernel_size``
    and ``gate_lower_bound`` fields are those of ``linear_attn_config``.
    """

    hidden_size: int
    intermediate_size: int
    first_k_dense_replace: int
    num_attention_heads: int
    activation_situ_beta: float
    activation_situ_linear_beta: float | None
    rms_norm_eps: float
    vocab_size: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    moe_renormalize: bool
    routed_scaling_factor: float
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    attn_res_block_size: int
    linear_num_heads: int
    linear_head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float | None
    layer_types: tuple[str, ...]

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared experts, which are merged into one MLP."""
        return self.moe_intermediate_size * self.num_shared_experts

    @property
    def linear_projection_size(self) -> int:
        """Features of q, of k and of v in a KDA layer, over all heads."""
        return self.linear_num_heads * self.linear_head_dim

    def is_moe_layer(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    def with_layers(self, layers: int) -> KimiK3Config:
        """The same model with ``layers`` layers: cut off, or with the layer kinds repeated.

        Raises:
            SPError: ``layers`` is less than 1.
        """
        if layers < 1:
            raise SPError(f"a model needs at least 1 layer, got layers={layers}")
        kinds = self.layer_types
        return replace(self, layer_types=tuple(kinds[i % len(kinds)] for i in range(layers)))

    def shrunken(self, layers: int = 8) -> KimiK3Config:
        """The same architecture at toy widths, for tests and demos on a CPU.

        Every size that tensor parallelism cuts is divisible by 8. The AttnRes blocks hold
        4 layers, so a boundary lies inside; the replicated MLPs hold most of the bytes.
        """
        return replace(
            self.with_layers(layers),
            hidden_size=256,
            intermediate_size=2048,
            num_attention_heads=8,
            vocab_size=1024,
            num_experts=16,
            num_experts_per_token=4,
            num_shared_experts=8,
            moe_intermediate_size=128,
            routed_expert_hidden_size=64,
            q_lora_rank=64,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            attn_res_block_size=4,
            linear_num_heads=8,
            linear_head_dim=16,
        )


def shrunken_config(layers: int = 8) -> KimiK3Config:
    """Kimi-K3 at toy widths; see :meth:`KimiK3Config.shrunken`."""
    return load_config("kimi-k3").shrunken(layers)


def load_config(path_or_name: str | Path) -> KimiK3Config:
    """Read a ``config.json`` of the Kimi-K3 family, or a packaged one by name.

    Args:
        path_or_name: ``"kimi-k3"``, a JSON file, or a folder that holds a ``config.json``.

    Raises:
        SPError: there is no such file, it is no JSON, or it is no config of this family.
    """
    asked = str(path_or_name)
    path = PACKAGED.get(asked, Path(path_or_name))
    if path.is_dir():
        path = path / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = ", ".join(map(repr, PACKAGED))
        raise SPError(
            f"model {asked!r}: there is no file {str(path)!r}; "
            f"give the path of a config.json or one of the names {names}"
        ) from None
    except OSError as err:
        reason = err.strerror or type(err).__name__
        raise SPError(
            f"model {asked!r}: {str(path)!r} cannot be read ({reason}); "
            "give the path of a config.json"
        ) from None
    except ValueError as err:
        raise SPError(
            f"model {asked!r}: {str(path)!r} is no JSON ({err}); give the path of a config.json"
        ) from None
    return parse_config(data, asked)


def parse_config(data: Any, source: str = "config") -> KimiK3Config:
    """The config that ``data``, the content of a ``config.json``, describes.

    Args:
        data: the text model's keys, or an object that holds them under ``text_config``.
        source: how error messages name it.

    Raises:
        SPError: a key is missing, unknown, or has a value this architecture does not take.
    """
    if not isinstance(data, Mapping):
        raise _refused(source, f"the JSON holds a {type(data).__name__}, not an object")
    text = data.get("text_config", data)
    if not isinstance(text, Mapping):
        raise _refused(source, f"text_config is {text!r}, not an object")
    kind = text.get("model_type", data.get("model_type"))
    if kind not in _FAMILY:
        raise _refused(source, f"model_type is {kind!r}, not {' or '.join(map(repr, _FAMILY))}")
    linear = text.get("linear_attn_config", {})
    if not isinstance(linear, Mapping):
        raise _refused(source, f"linear_attn_config is {linear!r}, not an object")
    _check_keys(text, linear, source)
    values = {name: text[key] for name, key in _text_keys().items()}
    values |= {name: linear.get(key) for name, key in _LINEAR_KEYS.items()}
    for name, value in values.items():
        _check_value(name, value, source)
    return KimiK3Config(**values, layer_types=_layer_types(text, linear, source))


_LINEAR_KEYS = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "short_conv_kernel_size": "short_conv_kernel_size",
    "gate_lower_bound": "gate_lower_bound",
}
_LAYER_LISTS = ("kda_layers", "full_attn_layers")


def _refused(source: str, found: str) -> SPError:
    return SPError(f"model {source!r} is no Kimi-K3 config: {found}; give one such as 'kimi-k3'")


def _text_keys() -> dict[str, str]:
    names = (f.name for f in fields(KimiK3Config) if f.name != "layer_types")
    return {name: name for name in names if name not in _LINEAR_KEYS}


def _check_keys(text: Mapping[str, Any], linear: Mapping[str, Any], source: str) -> None:
    wanted = {*_text_keys(), "num_hidden_layers", "linear_attn_config", *_REQUIRED_VALUES}
    in_linear = {*_LINEAR_KEYS.values(), *_LAYER_LISTS, "use_full_rank_gate"}
    missing = sorted(wanted - set(text))
    if "linear_attn_config" in text:
        optional = {"gate_lower_bound"}
        missing += [f"linear_attn_config.{k}" for k in sorted(in_linear - optional - set(linear))]
    if missing:
        raise _refused(source, f"missing {', '.join(missing)}")
    unknown = sorted(set(text) - wanted - _IGNORED_KEYS)
    unknown += [f"linear_attn_config.{k}" for k in sorted(set(linear) - in_linear)]
    if unknown:
        raise SPError(
            f"model {source!r}: unknown key {', '.join(unknown)}, which may change what the model "
            "computes; remove it or correct its spelling"
        )
    for key, value in _REQUIRED_VALUES.items():
        if text[key] != value:
            raise _refused(source, f"{key} is {text[key]!r}, only {value!r} is implemented")
    if linear["use_full_rank_gate"] is not True:
        raise _refused(source, "linear_attn_config.use_full_rank_gate is not true")


_KINDS = {f.name: str(f.type) for f in fields(KimiK3Config)}


def _check_value(name: str, value: Any, source: str) -> None:
    kind = _KINDS[name]
    if kind.endswith("| None") and value is None:
        return
    if kind == "bool":
        good = isinstance(value, bool)
    elif kind == "int":
        least = 0 if name == "first_k_dense_replace" else 1
        good = isinstance(value, int) and not isinstance(value, bool) and value >= least
    else:
        good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good:
        wanted = {"bool": "true or false", "int": "a positive integer"}.get(kind, "a number")
        raise _refused(source, f"{name} is {value!r}, not {wanted}")


def _layer_types(
    text: Mapping[str, Any], linear: Mapping[str, Any], source: str
) -> tuple[str, ...]:
    """Layer kinds from the two lists of layer numbers, which count from 1."""
    layers = text["num_hidden_layers"]
    kda, full = (linear[key] for key in _LAYER_LISTS)
    lists_ok = isinstance(kda, list) and isinstance(full, list) and isinstance(layers, int)
    if not lists_ok or sorted([*kda, *full], key=str) != sorted(range(1, layers + 1), key=str):
        raise _refused(
            source,
            "linear_attn_config.kda_layers and full_attn_layers do not name each of the "
            f"num_hidden_layers={layers!r} layers once, counting from 1",
        )
    if layers < 1:
        raise _refused(source, f"num_hidden_layers is {layers}, not a positive integer")
    return tuple("kda" if i in set(kda) else "mla" for i in range(1, layers + 1))
