# SPDX-License-Identifier: Apache-2.0
"""What must not start: unsupported combinations, and workers that were told different things."""

from __future__ import annotations

from ..errors import SPError
from ..proof import agree
from ..residents import entry_of
from . import _private
from .session import Session


def refuse(session: Session) -> None:
    """Before the weights are loaded. Every worker of the group calls it.

    Raises:
        SPError: something that is on does not go together with sp_passes, one line each; or
            the workers have different options, which all of them are told.
    """
    found = _private.unsupported(session.vllm_config, session.options.kernels)
    if found:
        lines = "".join(f"\n  {what}: {why}" for what, why in found)
        raise SPError(
            f"sp_passes does not support what this server has on, so nothing starts:{lines}\n"
            'turn it off, or leave sp_passes out of the configuration ("sp_passes": false)'
        )
    if session.tp_size > 1:
        options = session.options
        agree(options.digest(), 0, f"options {options}", session.tp_group)


def refuse_reload(session: Session) -> None:
    """Before vLLM writes new weights over the old ones: shards would not see that.

    Nor does the memory of a weight exist that was freed.

    Raises:
        SPError: names a weight that is sharded; nothing was changed.
    """
    held = [name for name, tensor in session.model.named_parameters() if entry_of(tensor)]
    if held:
        raise SPError(
            f"reload_weights: sp_passes sharded {len(held)} weights, such as {held[0]}, where vLLM "
            "would write the full ones; start the server anew, with the new weights or without "
            "sp_passes"
        )
