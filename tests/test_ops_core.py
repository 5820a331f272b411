# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.sp_passes``: schemas, fakes, refusals, and results on real ranks."""

from __future__ import annotations

from typing import Any

import mlps
import pytest
import ranks
import torch
from ranks import Rank
from torch import Tensor

from sp_passes import ShardingError, ShardLayout, SPError
from sp_passes.ops import _ALL, kernels

ours = torch.ops.sp_passes


def calls(group: str) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    x = torch.randn(4, 6)
    w, b = torch.randn(8, 6), torch.randn(8)
    return {
        "all_gather": (ours.all_gather, (x, group, 1), {}),
        "reduce_scatter": (ours.reduce_scatter, (x, group, 1), {}),
        "ag_gemm": (ours.ag_gemm, (x, [w], [b], ["S0[4,4]"], None, group, 1), {}),
        "ag_gemm of two": (
            ours.ag_gemm,
            (x, [w, w.t().contiguous()], [None, b], ["S0[8]", "S1[8]"], None, group, 1),
            {},
        ),
        "ag_gemm with x": (
            ours.ag_gemm, (x, [w], [None], ["S0[8]"], None, group, 1), {"gathered": True},
        ),
        "ag_gemm of 3-D": (
            ours.ag_gemm, (torch.randn(2, 3, 6), [w], [b], ["S0[8]"], None, group, 1), {},
        ),
        "gemm_rs": (
            ours.gemm_rs, (torch.randn(4, 8), torch.randn(6, 8), None, "S1[8]", None, group, 1), {},
        ),
        "gemm_rs with bias": (
            ours.gemm_rs,
            (torch.randn(4, 8), torch.randn(8, 6), torch.randn(6), "S0[8]", None, group, 1),
            {"kernel": "unfused"},
        ),
        "local_shard": (ours.local_shard, (w, "S1[6]", group, 1), {}),
        "no rows": (ours.ag_gemm, (x[:0], [w], [b], ["S0[8]"], None, group, 1), {}),
    }  # fmt: skip


NAMES = list(calls(""))


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(solo: Any, name: str) -> None:
    op, args, kwargs = calls(solo.group_name)[name]
    torch.library.opcheck(op.default, args, kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_no_input_is_returned_and_none_is_changed(solo: Any, name: str) -> None:
    """Inductor may reuse the buffer of a result: it must be nobody else's."""
    op, args, kwargs = calls(solo.group_name)[name]
    flat = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
    before = [t.clone() for t in flat]
    out = op(*args, **kwargs)
    for result in out if isinstance(out, list) else [out]:
        assert (
            all(result.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() for t in flat)
            or not result.numel()
        )
        result.fill_(float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(flat, before, strict=True))
    again = op(*args, **kwargs)
    for result in again if isinstance(again, list) else [again]:
        assert not result.isnan().any(), "a result shares memory with a resident shard"


@pytest.mark.parametrize("name", [n for n in NAMES if n != "local_shard"])
def test_gradients_are_refused(solo: Any, name: str) -> None:
    op, (x, *rest), kwargs = calls(solo.group_name)[name]
    with pytest.raises(SPError, match=r"sp_passes::\w+ has no gradient.*torch\.no_grad"):
        op(x.requires_grad_(), *rest, **kwargs)


def test_gradients_are_refused_without_a_layer_of_python() -> None:
    """An Autograd kernel of our own would cost every call, under no_grad too."""
    for name in _ALL:
        for key in ("Autograd", "AutogradCPU", "AutogradCUDA"):
            has = torch._C._dispatch_has_kernel_for_dispatch_key(f"sp_passes::{name}", key)
            assert not has, (name, key)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_made_offline_cannot_run(name: str) -> None:
    op, args, kwargs = calls("")[name]
    with pytest.raises(SPError, match=r"offline.*SPConfig\(group=\.\.\.\)"):
        op(*args, **kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_the_group_must_have_the_size_of_the_graph(solo: Any, name: str) -> None:
    op, args, kwargs = calls(solo.group_name)[name]
    wrong = (*args[:-1], 2)
    with pytest.raises(ShardingError, match=r"rewritten for tp_size 2.* has 1 ranks"):
        op(*wrong, **kwargs)


def fake(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")


WRONG: dict[str, tuple[Any, str]] = {
    "rows that do not divide": (
        lambda: ours.reduce_scatter(fake(7, 4), "g", 4),
        "7 rows over 4 ranks.*pad the tokens",
    ),
    "rows of a product": (
        lambda: ours.gemm_rs(fake(7, 2), fake(6, 8), None, "S1[8]", None, "g", 4),
        "7 rows over 4 ranks",
    ),
    "layout of another size": (
        lambda: ours.ag_gemm(fake(4, 6), [fake(8, 6)], [None], ["S0[12]"], None, "g", 4),
        r"S0\[12\] needs 12 along dimension 0.*\[8, 6\]",
    ),
    "segment that does not divide": (
        lambda: ours.ag_gemm(fake(4, 6), [fake(8, 6)], [None], ["S0[6,2]"], None, "g", 4),
        "segment of 6.*not divisible by tp_size 4",
    ),
    "features of another width": (
        lambda: ours.gemm_rs(fake(8, 3), fake(6, 8), None, "S1[8]", None, "g", 4),
        "3 input features.*leaves 2",
    ),
    "layout that is none": (
        lambda: ours.local_shard(fake(8), "S[8]", "g", 4),
        r"'S\[8\]' is not a shard layout such as",
    ),
    "dimension that is not there": (
        lambda: ours.local_shard(fake(8), "S1[8]", "g", 4),
        "needs 8 along dimension 1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_geometry(name: str) -> None:
    call, text = WRONG[name]
    with pytest.raises(ShardingError, match=text):
        call()


def test_unknown_kernel(solo: Any) -> None:
    op, args, _ = calls(solo.group_name)["ag_gemm"]
    with pytest.raises(SPError, match="no kernel 'fast' for ag_gemm; there are"):
        op(*args, kernel="fast")
    with pytest.raises(SPError, match="no op 'gemm'"):
        kernels.register_kernel("fast", "gemm", lambda: None)


# --- layouts --------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [(8,), (4, 8), (8, 4, 4), (16,) * 3])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layout_takes_each_element_once_and_puts_it_back(
    segments: tuple[int, ...], dim: int, tp: int
) -> None:
    layout = ShardLayout(dim, segments)
    assert ShardLayout.parse(str(layout)) == layout
    shape = [3, 3]
    shape[dim] = layout.size
    full = torch.arange(3 * layout.size).view(shape)
    parts = [layout.take(full, r, tp) for r in range(tp)]
    for r, part in enumerate(parts):
        assert torch.equal(part, ranks.shard(full, str(layout), r, tp))
    whole = torch.full_like(full, -1)
    for r, part in enumerate(parts):
        layout.put(whole, part, r, tp)
    assert torch.equal(whole, full)


def test_layout_refusals() -> None:
    layout = ShardLayout(0, (128, 6))
    with pytest.raises(ShardingError, match=r"128.*tp_size 12"):
        layout.local_size(12)
    assert (layout.indivisible(2), layout.indivisible(4)) == (None, 6)
    for text in ("", "S0", "S0[]", "S0[4,]", "R", "S-1[4]", "S0[4] "):
        with pytest.raises(ShardingError, match="not a shard layout"):
            ShardLayout.parse(text)


# --- real ranks -----------------------------------------------------------------------------


def results(at: Rank, dtype: torch.dtype) -> dict[str, float]:
    n, name = at.world, at.group.group_name
    made = torch.Generator().manual_seed(0)
    full = torch.randn(n * 3, 5, generator=made).to(dtype)
    mine = full[at.rank * 3 : (at.rank + 1) * 3]
    w, b = torch.randn(16, 5, generator=made).to(dtype), torch.randn(16, generator=made).to(dtype)
    w2, b2 = torch.randn(7, 8, generator=made).to(dtype), torch.randn(7, generator=made).to(dtype)
    hidden = torch.randn(n * 3, 8, generator=made).to(dtype)
    rows, cols = (
        slice(at.rank * 3, at.rank * 3 + 3),
        slice(at.rank * 8 // n, (at.rank + 1) * 8 // n),
    )
    out: dict[str, float] = {}

    def check(what: str, found: Tensor, wanted: Tensor) -> None:
        assert found.dtype == dtype and found.is_contiguous(), what
        out[what] = mlps.worst_error(found, wanted)

    check("all_gather", ours.all_gather(mine, name, n), full)
    check("all_gather of a view", ours.all_gather(mine.t().contiguous().t(), name, n), full)
    sums = torch.stack([full * (r + 1) for r in range(n)]).double().sum(0)
    check("reduce_scatter", ours.reduce_scatter(full * (at.rank + 1), name, n), sums[rows])
    y, x = ours.ag_gemm(mine, [w], [b], ["S0[8,8]"], None, name, n, gathered=True)
    part = [torch.cat([t[:8].chunk(n)[at.rank], t[8:].chunk(n)[at.rank]]).double() for t in (w, b)]
    check("ag_gemm", y, full.double() @ part[0].t() + part[1])
    check("ag_gemm's x", x, full)
    whole = hidden.double() @ w2.double().t() + b2.double()
    found = ours.gemm_rs(hidden[:, cols].contiguous(), w2, b2, "S1[8]", None, name, n)
    check("gemm_rs", found, whole[rows])
    check("local_shard", ours.local_shard(w, "S0[8,8]", name, n), part[0])
    empty = ours.gemm_rs(hidden[:0, cols], w2, b2, "S1[8]", None, name, n)
    check("gemm_rs of no rows", empty, whole[:0])
    assert w.untyped_storage().nbytes() > 0, "an op alone releases nothing"
    return out


@pytest.mark.multirank
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_results(on_ranks: Any, world: int, dtype: torch.dtype, limit: float) -> None:
    for errors in on_ranks(results, world, dtype):
        assert {k: e for k, e in errors.items() if not e < limit} == {}


def batch_invariance(at: Rank) -> bool:
    """A token's sum has the same bits whichever rank owns it, and whatever is beside it."""
    n, name = at.world, at.group.group_name
    made = torch.Generator().manual_seed(at.rank)
    token = torch.randn(1, 32, generator=made) * 10.0**at.rank
    found = []
    for rows, where in ((1, 0), (1, n - 1), (3, 4), (3, 3 * n - 1)):
        x = torch.randn(rows * n, 32, generator=made)
        x[where] = token
        whole = ours.all_gather(ours.reduce_scatter(x, name, n), name, n)
        found.append(whole[where].clone())
    return all(torch.equal(f, found[0]) for f in found)


@pytest.mark.multirank
def test_reduction_order_does_not_depend_on_the_owner(on_ranks: Any) -> None:
    assert all(on_ranks(batch_invariance, 4))
