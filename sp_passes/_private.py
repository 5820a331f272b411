# SPDX-License-Identifier: Apache-2.0
"""Every private PyTorch name that sp_passes uses, in one place.

A name that a PyTorch release moved or dropped fails here, with the release and the
name, and nowhere else. Written for torch 2.11 to 2.14.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from .errors import SPError


def _get(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as err:
        raise SPError(
            f"sp_passes needs {module}.{name}, which torch {torch.__version__} does not have; "
            "use torch 2.11 to 2.14"
        ) from err


def resolve_process_group(name: str) -> Any:
    """The process group that functional collectives know under ``name``."""
    return _get("torch.distributed.distributed_c10d", "_resolve_process_group")(name)
