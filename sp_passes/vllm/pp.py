# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages that exchange one rank's rows: vLLM's transport and model runners.

vLLM takes what stages exchange for replicated over the tensor-parallel group: each rank
sends a slice of it, and the receiver all-gathers. A tensor whose rows are sharded differs
from rank to rank and must travel as it is. Three places have to know:

    transport   ``all_gather_tensors={name: False}``, and a check of the rows on both sides
    runner      the received rows are copied into, and read from, that many rows of its buffers
    graphs      what a captured CUDA graph returned is that many rows of its output buffer

All wrappers are set on the objects of this worker; ``options.stage_tensors`` names the tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ShardingError
from ..stages import StageRows, local_rows
from . import _private
from .session import Session

# Travels instead of the tensors when a sender refuses, so that its receiver does too.
_REFUSAL = "sp_passes.refusal"

Tensors = dict[str, Any]


class StageTransport:
    """Sends and receives shards between two stages of this rank.

    Args:
        pp: the pipeline's ``GroupCoordinator``; its ``isend_tensor_dict`` and
            ``irecv_tensor_dict`` (which the blocking ones call) are wrapped by ``install``.
        tp_size: ranks that the rows are sharded over.
        names: tensors that travel as one rank's rows.
    """

    def __init__(self, pp: Any, tp_size: int, names: Collection[str]) -> None:
        self.pp, self.tp_size, self.names = pp, tp_size, frozenset(names)
        self._made: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        _private.require_version()
        for name in ("isend_tensor_dict", "irecv_tensor_dict"):
            wanted = ["all_gather_group", "all_gather_tensors"]
            wanted += ["tensor_dict", "dst"] if name == "isend_tensor_dict" else ["src"]
            _private.require_parameters(getattr(pp, name), *wanted)
        self._isend: Callable[..., Any] = pp.isend_tensor_dict
        self._irecv: Callable[..., Any] = pp.irecv_tensor_dict

    def install(self) -> None:
        self.pp.isend_tensor_dict = self.isend
        self.pp.irecv_tensor_dict = self.irecv

    def remove(self) -> None:
        del self.pp.isend_tensor_dict, self.pp.irecv_tensor_dict

    def made(self, tensors: Mapping[str, Any], tokens: int) -> None:
        """Note that the stage returned ``tensors`` for a step of ``tokens`` global tokens."""
        for name in self.names & tensors.keys():
            self._made[name] = (weakref.ref(tensors[name]), tokens)

    def _tokens_of(self, tensors: Mapping[str, Any]) -> int | None:
        """Of the step that made ``tensors``; None for others, such as a replayed graph's."""
        for name in self.names & tensors.keys():
            held, tokens = self._made.get(name, (lambda: None, 0))
            if held() is tensors[name]:
                return tokens
        return None

    def isend(
        self,
        tensor_dict: Tensors,
        dst: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> Any:
        """As vLLM's own, but the named tensors travel as they are.

        Raises:
            ShardingError: a named tensor has not this rank's rows of the step; the receiver
                raises the same.
        """
        problem = self.misfit(tensor_dict, self._tokens_of(tensor_dict), "sends")
        if problem is None:
            as_is = {**(all_gather_tensors or {}), **dict.fromkeys(self.names, False)}
            return self._isend(tensor_dict, dst, all_gather_group, as_is)
        text = torch.frombuffer(bytearray(problem.encode()), dtype=torch.uint8)
        for handle in self._isend({_REFUSAL: text}, dst, all_gather_group, {_REFUSAL: False}):
            handle.wait()
        raise ShardingError(problem)

    def irecv(
        self,
        src: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> Any:
        """As vLLM's own; the rows of the named tensors are the sender's.

        Raises:
            ShardingError: the sender refused.
        """
        as_is = {**(all_gather_tensors or {}), **dict.fromkeys((*self.names, _REFUSAL), False)}
        found, handles, after = self._irecv(src, all_gather_group, as_is)
        if found is not None and _REFUSAL in found:
            for handle in handles:
                handle.wait()
            raise ShardingError(f"the stage before refused: {_text(found[_REFUSAL])}")
        return found, handles, after

    def misfit(self, tensors: Mapping[str, Any], tokens: int | None, verb: str) -> str | None:
        """What is wrong with the rows of the named tensors, with both shapes; None if nothing."""
        named = {n: t for n, t in tensors.items() if n in self.names and isinstance(t, Tensor)}
        if tokens is None:
            rows = {n: int(t.shape[0]) for n, t in named.items()}
            same = len(set(rows.values())) < 2
            return None if same else f"this stage {verb} different rows: {rows}"
        expected = local_rows(tokens, self.tp_size)
        for name, tensor in named.items():
            if tensor.shape[0] != expected:
                shape = [expected, *tensor.shape[1:]]
                whole = " (a full tensor)" if tensor.shape[0] == tokens else ""
                return (
                    f"this stage {verb} {name} as {list(tensor.shape)}{whole}, but one rank's rows "
                    f"of {tokens} tokens were agreed: {shape} at TP{self.tp_size}"
                )
        return None


def _text(message: Tensor) -> str:
    return bytes(message.tolist()).decode()


# --- model runners ----------------------------------------------------------------------


class RowBuffer:
    """Stands for a runner's full-size buffer: ``buffer[:num_tokens]`` is one rank's rows.

    Args:
        rows: what was recorded of the graphs; ``rows.buffer_rows`` is the buffer's size.
        tp_size: ranks that the rows are sharded over.
        buffer: ``[buffer_rows, …]``; None: made as the first value that is stored needs it.
    """

    def __init__(self, rows: StageRows, tp_size: int, buffer: Tensor | None = None) -> None:
        self.rows, self.tp_size, self.buffer = rows, tp_size, buffer

    def __getitem__(self, key: slice) -> Tensor:
        if self.buffer is None:
            raise ShardingError("no graph has returned anything to read from this buffer")
        self.rows.record(key.stop, local_rows(key.stop, self.tp_size))
        return self.rows.view({"buffer": self.buffer}, key.stop)["buffer"]

    def __setitem__(self, key: slice, value: Tensor) -> None:
        self.rows.record(key.stop, value)
        if self.buffer is None:
            self.buffer = value.new_empty((self.rows.buffer_rows, *value.shape[1:]))
        self[key].copy_(value)


class GraphOutputs(dict[str, Any]):
    """Output buffers of captured graphs, by tensor; made when a graph first returns one."""

    def __init__(self, rows: StageRows, tp_size: int) -> None:
        super().__init__()
        self.rows, self.tp_size = rows, tp_size

    def __missing__(self, name: str) -> RowBuffer:
        self[name] = RowBuffer(self.rows, self.tp_size)
        return self[name]


def install(session: Session) -> None:
    """Let this worker's stage exchange the tensors that ``options.stage_tensors`` names."""
    names = session.options.stage_tensors
    pp = _private.pp_group() if names else None
    if pp is None or pp.world_size == 1 or session.tp_size == 1:
        return
    runner, rows = session.worker.model_runner, _rows(session)
    transport = StageTransport(pp, session.tp_size, names)
    transport.install()
    _count_tokens(session.model, transport)
    if hasattr(runner, "sync_and_gather_intermediate_tensors"):
        _keep_rows(runner, transport, rows)
        return
    if not pp.is_first_rank:
        held = runner.intermediate_tensors
        for name in transport.names & held.tensors.keys():
            held.tensors[name] = RowBuffer(rows, session.tp_size, held.tensors[name])
    if not pp.is_last_rank:
        _keep_graph_rows(runner, rows, session.tp_size)


def _rows(session: Session) -> StageRows:
    """Buffers have the rows of all tokens: profiling and capture may fill them."""
    return StageRows(buffer_rows=int(session.worker.model_runner.max_num_tokens))


def _count_tokens(model: Any, transport: StageTransport) -> None:
    """After each call of the model: how many tokens the step had, padding included."""

    def after(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        tensors, positions = getattr(out, "tensors", None), kwargs.get("positions")
        if isinstance(tensors, dict) and positions is not None:
            transport.made(tensors, int(positions.shape[-1]))

    model.register_forward_hook(after, with_kwargs=True)


def _keep_rows(runner: Any, transport: StageTransport, rows: StageRows) -> None:
    """The V1 runner copies ``num_tokens`` rows of every received tensor: copy what came."""
    own = runner.sync_and_gather_intermediate_tensors
    _private.require_parameters(own, "num_tokens", "intermediate_tensors", "sync_self")

    def gather(num_tokens: int, intermediate_tensors: Any, sync_self: bool) -> Any:
        received = dict(intermediate_tensors.items()) if sync_self else {}
        problem = transport.misfit(received, num_tokens, "receives")
        if problem is not None:
            raise ShardingError(problem)
        rows.record(num_tokens, local_rows(num_tokens, transport.tp_size))
        held = runner.intermediate_tensors.tensors
        out = {k: v[:num_tokens] for k, v in held.items() if k not in transport.names}
        out |= rows.view({k: v for k, v in held.items() if k in transport.names}, num_tokens)
        for name, value in received.items():
            out[name].copy_(value[: out[name].shape[0]], non_blocking=True)
        return _private.intermediate_tensors(out)

    runner.sync_and_gather_intermediate_tensors = gather


def _keep_graph_rows(runner: Any, rows: StageRows, tp_size: int) -> None:
    """The V2 runner keeps what graphs return in buffers of its own: narrow those."""
    own = runner.capture_model

    def capture(*args: Any, **kwargs: Any) -> Any:
        manager = runner.cudagraph_manager
        if manager.intermediate_tensors is None:
            outputs = GraphOutputs(rows, tp_size)
            manager.intermediate_tensors = _private.intermediate_tensors(outputs)
        return own(*args, **kwargs)

    runner.capture_model = capture
