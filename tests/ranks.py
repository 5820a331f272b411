# SPDX-License-Identifier: Apache-2.0
"""Ranks to run tests on.

``run(job, world, *args)`` calls ``job(rank, *args)`` on ``world`` real processes (gloo on
127.0.0.1) and returns what each gave back; an exception comes back as a :class:`Failed`.
The processes start once a session and are reused. They are killed by pid, and started afresh
for the next job, when a job exceeds its time or a process dies.

``run_fresh`` does the same in processes of its own, for what must start cold. All of them come
from ``nursery``.

``lockstep(gm, tp_size, inputs)`` runs a rewritten graph for all ranks in this process, node
by node, with collectives and shards written out by hand (none of the package's own code).
"""

from __future__ import annotations

import operator
import os
import pickle
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import nursery
import torch
import torch.distributed as dist
from torch import fx

from sp_passes import config
from sp_passes.version import code_digest

POOL_SIZE = 4


@dataclass(frozen=True)
class Failed:
    """An exception on one rank."""

    kind: str
    text: str
    trace: str
    bases: tuple[str, ...] = ()


@dataclass
class Rank:
    """What a job knows of its place."""

    rank: int
    world: int
    group: Any


# --- real processes ---------------------------------------------------------------------


class Pool:
    """``size`` processes of one gloo world, with one group for each smaller world."""

    def __init__(
        self,
        size: int,
        env: Mapping[str, str] | None = None,
        modules: Sequence[str] = nursery.TORCH,
        first: int = 0,
    ) -> None:
        self.size = size
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # Of one instant: a file saved while the processes start must not part the ranks.
        code = code_digest()
        self.processes = [
            nursery.child(
                first + rank, _serve, (rank, size, self.store.port, dict(env or {}), code), modules
            )
            for rank in range(size)
        ]
        self.pipes = [process.pipe for process in self.processes]

    def run(
        self, job: Callable[..., Any], world: int, args: tuple[Any, ...], timeout: float
    ) -> Any:
        message = pickle.dumps((job, world, args))
        for rank, pipe in enumerate(self.pipes[:world]):
            try:
                pipe.send_bytes(message)
            except OSError:
                raise self._died(rank) from None
        out: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(out) < world:
            waiting = {self.pipes[r]: r for r in range(world) if r not in out}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(waiting.values())
                self.kill()
                raise TimeoutError(f"ranks {missing} did not finish within {timeout:.0f} s: {out}")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    out[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    raise self._died(rank) from None
        return [out[rank] for rank in range(world)]

    def _died(self, rank: int) -> RuntimeError:
        code = self.processes[rank].join(5)
        self.kill()
        return RuntimeError(f"the process of rank {rank} died (exit code {code})")

    def kill(self) -> None:
        """End this pool's own processes, by pid."""
        global _pool
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(5)
        if _pool is self:
            _pool = None

    def stop(self) -> None:
        for pipe in self.pipes:
            with suppress(OSError):
                pipe.send_bytes(pickle.dumps(None))
        for process in self.processes:
            process.join(3)
        self.kill()


_pool: Pool | None = None
_fresh = 0


def run(
    job: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0, check: bool = True
) -> list[Any]:
    """Every rank's ``job(rank, *args)``, by rank.

    Args:
        job: a top-level function of a test module.
        world: ranks, at most ``POOL_SIZE``.
        timeout: seconds until the processes are killed.
        check: raise when a rank failed; else its :class:`Failed` is returned.
    """
    global _pool
    if _pool is None:
        _pool = Pool(POOL_SIZE)
    return _checked(_pool.run(job, world, args, timeout), check)


def run_fresh(
    job: Callable[..., Any],
    world: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    check: bool = True,
    modules: Sequence[str] = nursery.TORCH,
) -> list[Any]:
    """As ``run``, in new processes with ``env`` that end afterwards.

    A rank of the next call hashes strings differently, as in another start of the same job.
    """
    global _fresh
    _fresh += 1
    pool = Pool(world, env, modules, first=_fresh)
    try:
        return _checked(pool.run(job, world, args, timeout), check)
    finally:
        pool.stop()


def stop_pool() -> None:
    if _pool is not None:
        _pool.stop()
    nursery.close()


def _checked(results: list[Any], check: bool) -> list[Any]:
    failed = [(r, x) for r, x in enumerate(results) if isinstance(x, Failed)]
    if check and failed:
        rank, first = failed[0]
        raise AssertionError(f"rank {rank} (and {len(failed) - 1} more) failed:\n{first.trace}")
    return results


def _serve(
    pipe: Connection, rank: int, size: int, port: int, env: Mapping[str, str], code: str
) -> None:
    config.code_digest = lambda: code
    os.environ.update(env)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    groups = {n: dist.new_group(list(range(n))) for n in range(1, size)}
    groups[size] = dist.group.WORLD
    while True:
        try:
            message = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        if message is None:
            return
        job, world, args = message
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            result: Any = pickle.dumps(job(Rank(rank, world, groups[world]), *args))
        except BaseException as err:
            bases = tuple(kind.__name__ for kind in type(err).__mro__)
            failed = Failed(type(err).__name__, str(err), traceback.format_exc(), bases)
            result = pickle.dumps(failed)
        pipe.send_bytes(result)


@contextmanager
def single() -> Iterator[Any]:
    """A gloo group of one rank, as the default group of this process."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


# --- all ranks in one process -----------------------------------------------------------


def blocks(layout: str, rank: int, tp_size: int) -> tuple[int, list[int]]:
    """Dimension and indices that ``rank`` owns under ``S<dim>[<segments>]``; all of ``=<size>``."""
    found = re.fullmatch(r"S(\d+)\[([\d,=]+)\]", layout)
    assert found, layout
    index: list[int] = []
    start = 0
    for text in found[2].split(","):
        size = int(text.lstrip("="))
        if text[0] == "=":
            index.extend(range(start, start + size))
        else:
            assert size % tp_size == 0, (layout, tp_size)
            part = size // tp_size
            index.extend(range(start + rank * part, start + (rank + 1) * part))
        start += size
    return int(found[1]), index


def shard(full: torch.Tensor, layout: str, rank: int, tp_size: int) -> torch.Tensor:
    dim, index = blocks(layout, rank, tp_size)
    return full.index_select(dim, torch.tensor(index))


Values = list[Any]


def _gather(n: int, x: Values, *_: Any) -> Values:
    return [torch.cat(x)] * n


def _scatter(n: int, x: Values, *_: Any) -> Values:
    total = sum(part.to(torch.promote_types(part.dtype, torch.float32)) for part in x)
    return [t.to(x[0].dtype).clone() for t in total.chunk(n)] if len(total) else x  # type: ignore


def _ag_gemm(
    n: int, x: Values, weights: Values, biases: Values, layouts: Values, *rest: Any
) -> Values:
    full = torch.cat(x)
    out = []
    for r in range(n):
        products = []
        for w, b, layout in zip(weights[r], biases[r], layouts[r], strict=True):
            dim, index = blocks(layout, r, n)
            part = shard(w, layout, r, n)
            y = full.double() @ (part.t() if dim == 0 else part).double()
            y = y if b is None else y + b[torch.tensor(index)].double()
            products.append(y.to(w.dtype))
        gathered = len(rest) > 4 and rest[4][r]
        out.append([*products, full] if gathered else products)
    return out


def _gemm_rs(n: int, x: Values, weight: Values, bias: Values, layout: Values, *_: Any) -> Values:
    parts = []
    for r in range(n):
        part = shard(weight[r], layout[r], r, n)
        parts.append(x[r].double() @ (part.t() if layout[r][1] == "1" else part).double())
    sums = _scatter(n, parts)
    return [
        (s if b is None else s + b.double()).to(v.dtype)
        for s, b, v in zip(sums, bias, x, strict=True)
    ]


def _gemm_gather(
    n: int, x: Values, weight: Values, bias: Values, layout: Values, *_: Any
) -> Values:
    """Each rank's features put where the rows of its shard lie in the whole weight."""
    out = [
        v.new_empty(*v.shape[:-1], w.shape[int(lay[1])])
        for v, w, lay in zip(x, weight, layout, strict=True)
    ]
    for r in range(n):
        dim, index = blocks(layout[r], r, n)
        part = shard(weight[r], layout[r], r, n)
        y = x[r].double() @ (part.t() if dim == 0 else part).double()
        if bias[r] is not None:
            y = y + bias[r][torch.tensor(index)].double()
        for other in (*(q for q in range(n) if q != r), r):
            theirs = set(index) & set(blocks(layout[r], other, n)[1]) if other != r else set()
            keep = [i for i, at in enumerate(index) if at not in theirs]
            at = torch.tensor([index[i] for i in keep], dtype=torch.long)
            out[other][..., at] = y[..., keep].to(out[other].dtype)
    return out


def _feature_to_token(n: int, x: Values, layout: Values, *_: Any) -> Values:
    rows = x[0].shape[0] // n
    out = []
    for r in range(n):
        owned = [v[r * rows : (r + 1) * rows] for v in x]
        whole = x[r].new_empty(*owned[r].shape[:-1], owned[r].shape[-1] * n)
        for sender, part in enumerate(owned):
            whole[..., torch.tensor(blocks(layout[r], sender, n)[1])] = part
        out.append(whole)
    return out


def _token_to_feature(n: int, x: Values, *_: Any) -> Values:
    return [part.clone() for part in torch.cat(x).chunk(n, -1)]


def _local_shard(n: int, x: Values, layout: Values, *_: Any) -> Values:
    return [shard(x[r], layout[r], r, n) for r in range(n)]


def _nothing(n: int, *_: Any) -> Values:
    return [None] * n


def _collectives() -> dict[Any, Callable[..., Values]]:
    ours = torch.ops.sp_passes
    return {
        ours.all_gather.default: _gather,
        ours.reduce_scatter.default: _scatter,
        ours.ag_gemm.default: _ag_gemm,
        ours.gemm_rs.default: _gemm_rs,
        ours.gemm_gather.default: _gemm_gather,
        ours.feature_to_token.default: _feature_to_token,
        ours.token_to_feature.default: _token_to_feature,
        ours.local_shard.default: _local_shard,
        ours.prepare.default: _nothing,
        ours.agree.default: _nothing,
        torch.ops._c10d_functional.all_gather_into_tensor.default: _gather,
        torch.ops._c10d_functional.reduce_scatter_tensor.default: _scatter,
    }


def lockstep(
    gm: fx.GraphModule,
    tp_size: int,
    inputs: Sequence[Sequence[Any]],
    weights: Mapping[str, Sequence[torch.Tensor]] | None = None,
) -> Values:
    """Every rank's output of ``gm`` on ``inputs[rank]``; the ranks advance together.

    ``weights`` gives those that differ between ranks, by FQN.
    """
    special = _collectives()
    env: dict[fx.Node, Values] = {}
    position = 0
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = [given[position] for given in inputs]
            position += 1
        elif node.op == "get_attr":
            value = operator.attrgetter(node.target)(gm)
            env[node] = [value.detach()] * tp_size
            if weights and node.target in weights:
                env[node] = list(weights[node.target])
        elif node.op == "output":
            return [_load(node.args[0], env, r) for r in range(tp_size)]
        elif node.target in special:
            args = [[_load(arg, env, r) for r in range(tp_size)] for arg in node.args]
            if node.kwargs.get("gathered"):
                args += [["auto"] * tp_size, [True] * tp_size]
            env[node] = special[node.target](tp_size, *args)
        else:
            env[node] = [
                node.target(*_load(node.args, env, r), **_load(node.kwargs, env, r))
                for r in range(tp_size)
            ]
    raise AssertionError("the graph has no output")


def _load(tree: Any, env: Mapping[fx.Node, Values], rank: int) -> Any:
    return fx.map_arg(tree, lambda node: env[node][rank])
