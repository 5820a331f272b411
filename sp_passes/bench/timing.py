# SPDX-License-Identifier: Apache-2.0
"""Times on one CUDA device: graph-replayed, medians; and the ceilings to hold them against."""

from __future__ import annotations

import platform
import statistics
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import torch


def need_gpus(parser: ArgumentParser, count: int = 1) -> None:
    """Ends the program with a message where torch sees fewer."""
    found = torch.cuda.device_count()
    if found < count:
        parser.error(f"it needs {count} GPU{'s' * (count > 1)}, torch sees {found or 'none'}")


def versions() -> dict[str, str | None]:
    """What a result was measured with."""
    try:
        import triton

        found = triton.__version__
    except ImportError:
        found = "none"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": found,
        "python": platform.python_version(),
        "device": device,
    }


def capture(calls: Sequence[Callable[[], Any]], warmup: int = 2) -> torch.cuda.CUDAGraph:
    """One CUDA graph that runs ``calls`` in order; they run eagerly ``warmup`` times before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(calls: Sequence[Callable[[], Any]], rounds: int = 20) -> float:
    """Median time of one call in µs, when a graph of all ``calls`` is replayed.

    Give calls that use different weights, several times the L2 cache together: then each
    reads its weights from device memory.
    """
    graph = capture(calls)
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times) / len(calls)


def host_us(call: Callable[[], Any], rounds: int = 200) -> float:
    """Median host time of one eager call in µs, the device kept from filling its queue."""
    import time

    times = []
    for i in range(rounds):
        if i % 20 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    """Measured ceilings: HBM bytes/s of a reading kernel, bf16 flop/s, link bytes/s."""
    big = torch.randn(1 << 30, dtype=torch.float32, device="cuda")
    read = replay_us([big.amax], rounds=5)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    mm = replay_us([lambda: a @ b], rounds=10)
    host = torch.empty(256 << 20, dtype=torch.uint8).pin_memory()
    near = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    link = replay_us([lambda: near.copy_(host, non_blocking=True)], rounds=5)
    torch.cuda.synchronize()
    return {
        "hbm_bytes_per_s": (4 << 30) / read * 1e6,
        "bf16_flop_per_s": 2 * 8192**3 / mm * 1e6,
        "pinned_link_bytes_per_s": (256 << 20) / link * 1e6,
    }


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """``‖out - ref‖ / ‖ref‖`` in float64; NaN anywhere gives NaN, which passes no bound."""
    wide = ref.double()
    return float((out.double() - wide).norm() / wide.norm())
