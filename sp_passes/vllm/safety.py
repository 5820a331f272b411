# SPDX-License-Identifier: Apache-2.0
"""What must not start: unsupported combinations, and workers that were told different things."""

from __future__ import annotations

from ..errors import SPError
from ..proof import agree
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
