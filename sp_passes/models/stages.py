# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages of the reference model, written as engines write them: whole at the seams.

Inside a stage tokens are sharded. Where it ends it gathers them, and the next stage cuts its
rows out again, as an engine's default transport wants it::

    tensors   forward(input_ids, hidden_states, residual) -> {"hidden_states", "residual"}
    p2p       the same by pp_send and pp_recv; forward(input_ids) -> None

``hidden_states`` is the running sum ``[M, hidden]``, ``residual`` holds the sums of the
AttnRes blocks written so far, ``[M, blocks, hidden]``. The pattern ``pp_send`` keeps both in
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Replicate, Shard

from ..errors import SPError
from ..ops.p2p import local_rows
from ..report import Report
from . import attn_res
from .config import KimiK3Config, load_config
from .kimi_k3 import KimiDecoderLayer, KimiK3Model
from .layers import TP, ColumnParallelLinear, Linear, Made, RMSNorm, VocabParallelEmbedding
from .weights import init_weights

SEAMS = ("tensors", "p2p")
TENSORS = ("hidden_states", "residual")


def layers_of(config: KimiK3Config, pp_size: int, stage: int) -> range:
    """Layers of one stage; the first stages get one more where they do not divide.

    Raises:
        SPError: there are fewer layers than stages, or no such stage.
    """
    total = config.num_hidden_layers
    if not 1 <= pp_size <= total or not 0 <= stage < pp_size:
        raise SPError(
            f"stage {stage} of pp_size {pp_size} with {total} layers: stages go from 0 to "
            "pp_size - 1, and each has at least one layer"
        )
    each, more = divmod(total, pp_size)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


class KimiK3Stage(nn.Module):
    """One pipeline stage of one tensor-parallel rank.

    Parameters have the names that they have in :class:`KimiK3Model`.

    Args:
        config: sizes of the whole model.
        pp_size, stage: which part of the layers.
        tp_size, tp_rank, group_name, dtype, device: as of :class:`KimiK3Model`.
        seams: ``"tensors"`` or ``"p2p"``.
        pipeline: for p2p, name of the group of the ranks that hold ``tp_rank``'s part of each
            stage, by stage.
    """

    def __init__(
        self,
        config: KimiK3Config,
        pp_size: int,
        stage: int,
        tp_size: int = 1,
        tp_rank: int = 0,
        group_name: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        seams: str = "tensors",
        pipeline: str = "",
    ) -> None:
        super().__init__()
        if seams not in SEAMS:
            raise SPError(f"seams={seams!r} is unknown; use 'tensors' or 'p2p'")
        tp, made = TP(tp_size, tp_rank, group_name), Made(dtype, device)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        mine = layers_of(config, pp_size, stage)
        self.config, self.tp, self.stage = config, tp, stage
        self.is_first, self.is_last = stage == 0, stage == pp_size - 1
        self.seams, self.pipeline = seams, pipeline
        self.blocks = len([i for i in range(mine.start) if i % config.attn_res_block_size == 0])
        self.layers = nn.ModuleDict({str(i): KimiDecoderLayer(config, i, tp, made) for i in mine})
        if self.is_first:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, hidden, tp, made)
        if self.is_last:
            self.output_attn_res_norm = RMSNorm(hidden, eps, made)
            self.output_attn_res_proj = Linear(hidden, 1, made)
            self.norm = RMSNorm(hidden, eps, made)
            self.lm_head = ColumnParallelLinear(hidden, (config.vocab_size,), tp, made)

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Any:
        """Token ids ``[M]``, all of them on every rank, and what the stage before returned.

        Returns:
            Of the last stage the normed hidden states ``[M, hidden]``; of the others both
            tensors by name, or None where they were sent.
        """
        tokens = input_ids.shape[0]
        sources: tuple[Tensor, ...] = ()
        if self.is_first:
            prefix = self.embed_tokens(self._rows(input_ids))
        else:
            if self.seams == "p2p":
                hidden_states, residual = self._receive(tokens)
            assert hidden_states is not None and residual is not None
            prefix, sources = self._rows(hidden_states), self._rows(residual).unbind(1)
        for layer in self.layers.values():
            prefix, sources = layer(prefix, sources)
        if self.is_last:
            x = attn_res.mix(prefix, sources, self.output_attn_res_norm, self.output_attn_res_proj)
            return self.tp.gather(self.norm(x))[:tokens]
        whole = [self.tp.gather(t)[:tokens] for t in (prefix, torch.stack(sources, dim=1))]
        if self.seams == "tensors":
            return dict(zip(TENSORS, whole, strict=True))
        for tag, tensor in enumerate(whole):
            torch.ops.sp_passes.pp_send(tensor, self.stage + 1, tag, self.pipeline)
        return None

    def _rows(self, x: Tensor) -> Tensor:
        """This rank's rows of a whole tensor."""
        if self.tp.size == 1:
            return x
        return torch.ops.sp_passes.token_shard(x, self.tp.group, self.tp.size)

    def _receive(self, tokens: int) -> list[Tensor]:
        weight = next(iter(self.layers.values())).input_layernorm.weight  # type: ignore[union-attr]
        hidden = self.config.hidden_size
        where = (weight.dtype, weight.device, self.stage - 1)
        return [
            torch.ops.sp_passes.pp_recv(size, *where, tag, self.pipeline)
            for tag, size in enumerate([[tokens, hidden], [tokens, self.blocks, hidden]])
        ]


def init_stage(stage: KimiK3Stage, seed: int = 0) -> KimiK3Stage:
    """Fill ``stage`` in place with its part of the weights of the whole model."""
    init_weights(cast(KimiK3Model, stage), seed)
    return stage


def seams_of(pp_size: int, stage: int) -> dict[str, dict[str, Shard]]:
    """``stage_inputs`` and ``stage_outputs`` of one stage, for ``SPConfig``."""
    names = {name: Shard(0) for name in TENSORS}
    found = {"stage_inputs": names if stage else {}}
    return {**found, "stage_outputs": names if stage < pp_size - 1 else {}}


def stage_report(
    model: str | KimiK3Config,
    tp_size: int,
    pp_size: int,
    stage: int,
    tokens: int,
    patterns: Sequence[str] | None = None,
    strict: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Report:
    """What would be rewritten in one stage, as one rank sees it; nothing is run.

    Args:
        model: a config, or what :func:`load_config` reads.
        tokens: global tokens of a step.
        patterns: names, or None for all; without ``pp_send`` the seams stay whole.

    Returns:
        The report; sites of pattern ``pp_send`` have ``bytes_moved`` of one rank for
        ``tokens`` tokens, ``before`` and ``after``. ``seconds`` holds the stages' times.
    """
    config = model if isinstance(model, KimiK3Config) else load_config(model)
    graph = trace_stage(config, tp_size, pp_size, stage, tokens, dtype)
    return rewrite_stage(graph, config, tp_size, pp_size, stage, patterns, strict)


def trace_stage(
    config: KimiK3Config,
    tp_size: int,
    pp_size: int,
    stage: int,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
) -> fx.GraphModule:
    """The graph of one rank's stage for ``tokens`` global tokens; no weights are allocated."""
    from .. import trace

    module = KimiK3Stage(config, pp_size, stage, tp_size, dtype=dtype, device="meta")
    inputs = {"input_ids": torch.empty(tokens, dtype=torch.long, device="meta")}
    if stage:
        hidden = config.hidden_size
        sizes = ((tokens, hidden), (tokens, module.blocks, hidden))
        inputs |= {
            name: torch.empty(size, dtype=dtype, device="meta")
            for name, size in zip(TENSORS, sizes, strict=True)
        }
    return trace(module, **inputs)


def rewrite_stage(
    graph: fx.GraphModule,
    config: KimiK3Config,
    tp_size: int,
    pp_size: int,
    stage: int,
    patterns: Sequence[str] | None = None,
    strict: bool = False,
) -> Report:
    """Rewrite the graph of ``trace_stage`` in place, with its seams named; see ``stage_report``."""
    from .. import rewrite
    from ..config import SPConfig

    with_seams = patterns is None or "pp_send" in patterns
    options = SPConfig(
        tp_size=tp_size,
        patterns=None if patterns is None else tuple(patterns),
        strict=strict,
        **(seams_of(pp_size, stage) if with_seams else {}),  # type: ignore[arg-type]
    )
    report = rewrite(graph, options, {"input_ids": Replicate()}, tokens="replicated")
    mine = layers_of(config, pp_size, stage)
    report.model = f"stage {stage} of {pp_size}, layers {mine.start} to {mine.stop - 1}"
    return report


__all__ = [
    "KimiK3Stage",
    "init_stage",
    "layers_of",
    "local_rows",
    "rewrite_stage",
    "seams_of",
    "stage_report",
    "trace_stage",
]
