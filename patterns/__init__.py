# SPDX-License-Identifier: Apache-2.0
"""Every pattern file of this folder, by name, in the order the pass manager uses them.

A pattern is a module with ``find``, ``check`` and ``rewrite`` (``sp_passes.site``) and a
number ``ORDER``: lower runs first. A new file here is found by itself.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any


def _load() -> dict[str, Any]:
    modules = [
        (name, import_module(f"{__name__}.{name}"))
        for _, name, _ in iter_modules(__path__)
        if not name.startswith("_")
    ]
    return dict(sorted(modules, key=lambda item: (item[1].ORDER, item[0])))


PATTERNS: dict[str, Any] = {name: None for _, name, _ in iter_modules(__path__)}
"""Pattern names; :func:`pattern` gives the module."""


def pattern(name: str) -> Any:
    """The module of the pattern ``name``."""
    return _load()[name]


def patterns(names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """The chosen patterns' modules (all for None), in their order."""
    return {n: m for n, m in _load().items() if names is None or n in names}
