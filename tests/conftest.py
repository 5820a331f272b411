# SPDX-License-Identifier: Apache-2.0
"""What every test shares: fresh compile caches, and ranks to run on."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported: an artifact of an earlier session must never hide a failure.
_CACHE = tempfile.mkdtemp(prefix="sp_passes_tests_")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _CACHE
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Vector instructions are what the machine says they are: each new cache and each process would
# else compile and load probes for them, six seconds of CPU and one.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import ranks  # noqa: E402


def pytest_sessionstart() -> None:
    os.environ.pop(
        "COLUMNS", None
    )  # a worker is given a narrow one; the tables' own width is tested


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that import vLLM only where they are named: other tests define ops of its names."""
    named = any("test_vllm_" in str(arg) for arg in config.args)
    return True if collection_path.name.startswith("test_vllm_") and not named else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests first: workers share the suite by files."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def pytest_sessionfinish() -> None:
    ranks.stop_pool()
    shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture
def on_ranks() -> Callable[..., list[Any]]:
    """``on_ranks(job, world, *args)``: every rank's result of ``job(rank, *args)``."""
    return ranks.run


@pytest.fixture
def solo() -> Iterator[Any]:
    """A gloo group of one rank in this process."""
    with ranks.single() as group:
        yield group
