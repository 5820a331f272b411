# SPDX-License-Identifier: Apache-2.0
"""What must not start under vLLM, and one line for each reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import vllm_ranks

from sp_passes.errors import SPError


def setup_module() -> None:
    vllm_ranks.needs_vllm()


def config(**changed: Any) -> Any:
    """A server with everything off that is not supported; the parts are vLLM's own classes."""
    from vllm.config import ParallelConfig
    from vllm.config.offload import OffloadConfig, UVAOffloadConfig

    offload = OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=changed.get("offload", 0)))
    return SimpleNamespace(
        model_config=SimpleNamespace(
            enable_sleep_mode=changed.get("sleep", False),
            quantization=changed.get("quantization"),
        ),
        parallel_config=ParallelConfig(enable_dbo=changed.get("dbo", False)),
        offload_config=offload,
        lora_config=changed.get("lora"),
        weight_transfer_config=changed.get("transfer"),
    )


def refusal(vllm_config: Any, **options: Any) -> str:
    from sp_passes.vllm import safety
    from sp_passes.vllm.config import Options
    from sp_passes.vllm.session import Session

    try:
        safety.refuse(Session(None, vllm_config, Options(**options)))
    except SPError as err:
        return str(err)
    return ""


def test_the_fields_are_vllms_own() -> None:
    """A renamed field would turn a check off."""
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

    assert {"enable_sleep_mode", "quantization"} <= ModelConfig.__dataclass_fields__.keys()
    parts = {"lora_config", "weight_transfer_config", "offload_config"}
    assert parts <= VllmConfig.__dataclass_fields__.keys()
    assert not ParallelConfig().use_ubatching and not ParallelConfig().enable_elastic_ep


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"lora": object()}, "LoRA: adapters add to whole layers"),
        ({"sleep": True}, "sleep mode: it saves and restores whole weights"),
        ({"quantization": "theirs"}, "quantisation 'theirs': not one of vLLM's own"),
        ({"dbo": True}, "ubatching: the collectives of its two threads would interleave"),
        ({"offload": 1}, "weight offloading: it moves whole weights"),
        ({"transfer": object()}, "weight transfer: it writes whole weights"),
    ],
)
def test_unsupported_combinations_refuse(changed: dict[str, Any], line: str) -> None:
    text = refusal(config(**changed))
    assert f"\n  {line}" in text
    assert text.count("\n  ") == 1
    assert text.endswith('("sp_passes": false)')


def test_sharded_weights_are_not_reloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would copy into memory that does not exist, and end with a segmentation fault."""
    import torch

    from sp_passes.vllm import safety
    from sp_passes.vllm.config import Options
    from sp_passes.vllm.session import Session

    model = torch.nn.Linear(4, 2, bias=False)
    session = Session(
        SimpleNamespace(model_runner=SimpleNamespace(model=model)), config(), Options()
    )
    safety.refuse_reload(session)
    monkeypatch.setattr(safety, "entry_of", lambda tensor: tensor is model.weight)
    with pytest.raises(SPError, match="reload_weights: sp_passes sharded 1 weights, such as weig"):
        safety.refuse_reload(session)


def test_what_is_supported_starts() -> None:
    """A quantised model may start: a site whose weight is quantised is skipped with its reason."""
    assert refusal(config()) == ""
    assert refusal(config(quantization="fp8")) == ""


def test_every_reason_is_told_at_once() -> None:
    text = refusal(config(lora=object(), sleep=True, dbo=True))
    assert [line.split(":")[0] for line in text.split("\n  ")[1:]] == [
        "LoRA",
        "sleep mode",
        "ubatching",
    ]


def test_batch_invariant_mode_needs_the_kernels_in_rank_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert 'set "kernels": "unfused"' in refusal(config())
    assert refusal(config(), kernels="unfused") == ""
