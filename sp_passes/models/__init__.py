# SPDX-License-Identifier: Apache-2.0
"""Reference models, to trace, measure and test rewrites on."""

from __future__ import annotations

from .config import KimiK3Config, load_config, parse_config, shrunken_config
from .kimi_k3 import KimiK3Model
from .weights import init_weights

__all__ = [
    "KimiK3Config",
    "KimiK3Model",
    "init_weights",
    "load_config",
    "parse_config",
    "shrunken_config",
]
