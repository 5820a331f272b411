# SPDX-License-Identifier: Apache-2.0
"""Make what would read or overwrite a released parameter an error instead of a crash.

The storage is gone while the shape stays: a kernel would follow a null pointer. The usual
ways to a parameter's bytes from outside (``state_dict``, ``load_state_dict``, ``deepcopy``,
``torch.save``) call these methods of the tensor object; they are replaced on the object
itself, whichever way its module was compiled. Dynamo, which traces a model's own use of
them, sees the originals. Operators and ``repr`` find their methods on the type and are not
covered.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from .errors import SPError

METHODS = {
    "detach": "call sp_passes.unshard(module) on every rank first",
    "__deepcopy__": "call sp_passes.unshard(module) on every rank first",
    "__reduce_ex__": "call sp_passes.unshard(module) on every rank first",
    "share_memory_": "call sp_passes.unshard(module) on every rank first",
    "copy_": "use sp_passes.load_full_state_dict(module, state_dict) on every rank",
}


def refuse(weight: Tensor, name: str) -> None:
    """Let the methods of ``weight`` raise, naming it ``name``."""
    for method, instead in METHODS.items():
        weight.__dict__[method] = _raiser(weakref.ref(weight), method, name, instead)


def allow(weight: Tensor) -> None:
    """Give ``weight`` its methods back."""
    for method in METHODS:
        weight.__dict__.pop(method, None)


def _raiser(weight: weakref.ref[Tensor], method: str, name: str, instead: str) -> Any:
    def refused(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return getattr(Tensor, method)(weight(), *args, **kwargs)
        raise SPError(
            f"{method} of {name}: only this rank's shard exists, the full weight was released; "
            f"{instead}"
        )

    return refused
