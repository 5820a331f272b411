# SPDX-License-Identifier: Apache-2.0
"""The graphs that Inductor makes for GPUs, which are not those for CPUs, read without a GPU.

Parameters and inputs are fake CUDA tensors. The pass sees its graph; compiling ends there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch._inductor.fx_passes import fuse_attention, misc_patterns
from torch._subclasses.fake_tensor import FakeTensorMode

import sp_passes
from sp_passes import passes
from sp_passes.api import _declared
from sp_passes.backend import Backend
from sp_passes.bench.model_check import small_config
from sp_passes.models import KimiK3Model
from sp_passes.report import Report

# Patterns of Inductor's own that look for themselves by tracing on a real device.
TRACED = ((misc_patterns, "_misc_patterns_init"), (fuse_attention, "_sfdp_init"))


class Seen(BaseException):
    """The pass has run; it must not be caught on the way out."""


def decided(monkeypatch: pytest.MonkeyPatch, device: str, dynamic: bool) -> Report:
    """What the pass decides on a small Kimi-K3, one of two ranks, under torch.compile."""
    for module, name in TRACED:
        monkeypatch.setattr(module, name, lambda *args, **kwargs: None)
    reports: list[Report] = []
    run = passes.run

    def recorded(*args: Any) -> Any:
        reports.append(run(*args))
        raise Seen

    monkeypatch.setattr(passes, "run", recorded)
    torch._dynamo.reset()
    with FakeTensorMode(), torch.no_grad(), pytest.raises(BaseException):  # noqa: B017
        model = KimiK3Model(small_config(), 2, 0, "", torch.bfloat16, device)
        backend = Backend(sp_passes.SPConfig(tp_size=2), "sharded", (), _declared(model))
        ids = torch.zeros(8, dtype=torch.long, device=device)
        torch.compile(model, backend=backend, dynamic=dynamic)(ids)
    (report,) = reports
    return report


@pytest.mark.parametrize("dynamic", [True, False])
def test_gpu_graphs_are_rewritten_as_cpu_graphs_are(
    monkeypatch: pytest.MonkeyPatch, dynamic: bool
) -> None:
    with monkeypatch.context() as patched:
        wanted = decided(patched, "cpu", dynamic)
    found = decided(monkeypatch, "cuda", dynamic)
    assert Counter(d.pattern for d in found.applied) == Counter(
        d.pattern for d in wanted.applied
    ), str(found)
    assert found.bytes_saved_per_rank == wanted.bytes_saved_per_rank > 0
    assert not any("no placement rule" in d.reason for d in found.skipped), str(found)
