# SPDX-License-Identifier: Apache-2.0
"""``--vllm``: the graph of a model that vLLM knows, traced in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from . import weights
from .records import Dump, InspectError
from .text import TextReader

SECONDS = 300.0


def trace_vllm(config: str, tp_size: int) -> list[Dump]:
    """Rank 0's graphs of vLLM's model of ``config``, a config.json or its folder.

    Raises:
        InspectError: no vLLM, or it cannot build or trace the model here.
    """
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise InspectError(f"--vllm {config}: no such config.json")
    command = [sys.executable, "-m", "sp_passes.vllm.traced", str(path), str(tp_size)]
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **quiet}
        )
    except subprocess.TimeoutExpired:
        raise InspectError(f"--vllm {config}: no graph after {SECONDS:.0f} s") from None
    dumps = list(TextReader(path.name).read(run.stdout.splitlines()))
    if run.returncode or not dumps:
        raise InspectError(f"--vllm {config}: vLLM cannot trace it here: {_why(run.stderr)}")
    weights.lend_names(dumps)
    dumps[-1].title = f"vLLM's model, rank 0 of {tp_size}"
    return dumps


def _why(stderr: str) -> str:
    """The line that says what went wrong, of a traceback."""
    lines = [line.strip() for line in stderr.splitlines() if "Error" in line]
    found = lines[-1] if lines else (stderr.strip().splitlines() or ["it gave no graph"])[-1]
    return found.removeprefix("[rank0]:").strip()[:300]
