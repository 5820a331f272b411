# SPDX-License-Identifier: Apache-2.0
"""Where the opaque ops of this model take and leave their tensors."""

from __future__ import annotations

from ..placement import along, declare_op


def declare() -> None:
    """Tell ``sp_passes.placement`` about ``torch.ops.sp_passes_models.*``.

    Attention cores work on whole heads: sharded features in, sharded features out. Routed
    experts take a rank's own tokens and a rank's experts, and return the rank's tokens.
    """
    declare_op("sp_passes_models::kda_attention", along((1, 1, 1, 0, 0, 0), 1))
    declare_op("sp_passes_models::mla_attention", along((1, 1, None), 1))
    declare_op("sp_passes_models::routed_experts", along((0, 0, 0, 0, 0), 0))
