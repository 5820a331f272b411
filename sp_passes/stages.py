# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages whose tokens stay sharded: how many rows cross, and under which names.

``SPConfig(stage_inputs={"hidden_states": Shard(0)}, stage_outputs=…)`` names the tensors of
a stage that its neighbours exchange. The stage itself is written for whole tensors; the
caller hands in and gets back one rank's rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .config import SPConfig
from .errors import ShardingError, SPError
from .ops.p2p import local_rows as local_rows

_NARROWED = "_sp_passes_narrowed"


class StageRows:
    """How many rows a stage that is not the last returned, for each captured graph.

    A replayed CUDA graph returns nothing new: its results lie in full-size buffers, of which
    the next stage must get exactly the rows that were captured::

        rows = StageRows(buffer_rows=512)
        rows.record(num_tokens, outputs)         # at capture
        send(rows.view(buffers, num_tokens))     # after each replay

    Args:
        buffer_rows: rows of a full-size buffer, ``local_rows(max_tokens, tp_size)`` or more.
    """

    def __init__(self, buffer_rows: int) -> None:
        if buffer_rows < 1:
            raise ShardingError(f"buffer_rows must be at least 1, found {buffer_rows}")
        self.buffer_rows = buffer_rows
        self._rows: dict[Hashable, int] = {}

    def record(self, key: Hashable, rows: int | Tensor | Mapping[str, Tensor]) -> int:
        """Note the rows of the graph ``key``: a number, or the tensors that it returned.

        Raises:
            ShardingError: the tensors differ in rows, do not fit the buffers, or the graph
                was recorded with another number.
        """
        count = rows if isinstance(rows, int) else _common_rows(rows)
        if not 0 <= count <= self.buffer_rows:
            raise ShardingError(
                f"graph {key!r} returns {count} rows, buffers hold {self.buffer_rows}"
            )
        known = self._rows.setdefault(key, count)
        if known != count:
            raise ShardingError(f"graph {key!r} returned {known} rows before and {count} now")
        return count

    def rows(self, key: Hashable) -> int:
        """Rows that the graph ``key`` returns.

        Raises:
            ShardingError: it was never recorded.
        """
        if key not in self._rows:
            known = ", ".join(map(repr, self._rows)) or "none"
            raise ShardingError(f"graph {key!r} was not recorded; there are {known}")
        return self._rows[key]

    def view(self, buffers: Mapping[str, Tensor], key: Hashable) -> dict[str, Tensor]:
        """The recorded rows of each full-size buffer ``[buffer_rows, …]``, without a copy.

        Raises:
            ShardingError: a buffer was narrowed before, or has another size.
        """
        count = self.rows(key)
        return {name: self._narrowed(name, buffer, count) for name, buffer in buffers.items()}

    def _narrowed(self, name: str, buffer: Tensor, count: int) -> Tensor:
        if hasattr(buffer, _NARROWED) or buffer.shape[0] != self.buffer_rows:
            raise ShardingError(
                f"{name} has {buffer.shape[0]} rows, a full-size buffer has {self.buffer_rows}: it "
                "is narrowed already; hand in the buffer itself, which is narrowed exactly once"
            )
        out = buffer.narrow(0, 0, count)
        setattr(out, _NARROWED, True)
        return out


def _common_rows(tensors: Tensor | Mapping[str, Tensor]) -> int:
    named = {"output": tensors} if isinstance(tensors, Tensor) else dict(tensors)
    rows = {name: int(t.shape[0]) for name, t in named.items()}
    if len(set(rows.values())) != 1:
        raise ShardingError(f"a stage returns the same rows of every tensor, found {rows}")
    return next(iter(rows.values()))


# --- a stage under torch.compile --------------------------------------------------------


def staged(module: nn.Module, config: SPConfig) -> Callable[..., Any]:
    """``module`` as a function of named arguments that takes and gives one rank's rows.

    Around the module stand ``stage_input`` and ``stage_output``; alone they gather and cut,
    and the pattern ``pp_send`` takes them out.
    """

    self = module  # names in a compiled graph begin with the variable; these two are left out

    def run(**stage_arguments: Any) -> Any:
        return leave(self(**enter(stage_arguments, config)), config)

    return run


def bind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``module.forward`` by name."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    named = dict(bound.arguments)
    for name, p in bound.signature.parameters.items():
        if p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) and name in named:
            raise SPError(f"a pipeline stage takes its arguments by name; {name} has none")
        if p.kind is p.VAR_KEYWORD:
            named.update(named.pop(name, {}))
    return named


def enter(tree: dict[str, Any], config: SPConfig) -> dict[str, Any]:
    """``tree`` with the tensors named in ``config.stage_inputs`` made whole.

    Names are keys of ``tree``, of dicts in it, or of the ``tensors`` of an object in it.
    """
    return {
        key: _walk(key, item, dict(config.stage_inputs or ()), config, _enter)
        for key, item in tree.items()
    }


def leave(tree: Any, config: SPConfig) -> Any:
    """``tree`` with the tensors named in ``config.stage_outputs`` cut into rows."""
    names = dict(config.stage_outputs or ())
    if isinstance(tree, Tensor) and len(names) == 1:
        return _leave(tree, next(iter(names)), config)
    return _walk("", tree, names, config, _leave)


Wrap = Callable[[Tensor, str, SPConfig], Tensor]


def _enter(x: Tensor, name: str, config: SPConfig) -> Tensor:
    return torch.ops.sp_passes.stage_input(x, name, config.group_name, config.tp_size)


def _leave(x: Tensor, name: str, config: SPConfig) -> Tensor:
    return torch.ops.sp_passes.stage_output(x, name, config.group_name, config.tp_size)


def _walk(key: str, item: Any, names: dict[str, str], config: SPConfig, wrap: Wrap) -> Any:
    if isinstance(item, Tensor):
        return wrap(item, key, config) if key in names else item
    if isinstance(item, dict):
        return {k: _walk(k, v, names, config, wrap) for k, v in item.items()}
    if isinstance(item, (tuple, list)) and not hasattr(item, "_fields"):
        walked = [_walk(str(i), v, names, config, wrap) for i, v in enumerate(item)]
        return tuple(walked) if isinstance(item, tuple) else walked
    if isinstance(getattr(item, "tensors", None), dict):
        return type(item)(_walk(key, item.tensors, names, config, wrap))
    return item


def require(option: str, names: Any, tree: Any) -> None:
    """Raise unless every tensor that ``option`` names is in ``tree``.

    Raises:
        SPError: says which there are.
    """
    found = list(_names("", tree))
    for name, _ in names or ():
        if name not in found and not (option == "stage_outputs" and found == [""]):
            raise SPError(f"{option} names {name!r}; this stage has {', '.join(found) or 'none'}")


def _names(key: str, item: Any) -> Iterator[str]:
    if isinstance(item, Tensor):
        yield key
    elif isinstance(item, dict):
        for k, v in item.items():
            yield from _names(k, v)
    elif isinstance(item, (tuple, list)):
        for i, v in enumerate(item):
            yield from _names(str(i), v)
    elif isinstance(getattr(item, "tensors", None), dict):
        yield from _names(key, item.tensors)
