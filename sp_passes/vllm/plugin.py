# SPDX-License-Identifier: Apache-2.0
"""The ``vllm.general_plugins`` entry point.

vLLM calls ``register`` in every process. It wraps three calls that executors make of a
worker, and does nothing in them unless the user configured sp_passes:

    load_model                  before  refuse what is not supported, set up the routes
                                after   shard single modules, name the weights
    determine_available_memory  before  run the compiled graph once, give the bytes back
                                after   log and write what was done
    reload_weights              before  refuse where weights are sharded
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from ..errors import SPError
from . import _private, config
from .session import Session

log = logging.getLogger("vllm.sp_passes")

Step = tuple[str, str]
# (module of sp_passes.vllm, function), each called with the Session; in this order.
BEFORE_LOAD: Sequence[Step] = (("safety", "refuse"), ("graph_pass", "install"))
AFTER_LOAD: Sequence[Step] = (
    ("names", "introduce"),
    ("regional", "apply"),
    ("pp", "install"),
)
BEFORE_PROFILE: Sequence[Step] = (("memory", "settle"),)
AFTER_PROFILE: Sequence[Step] = (("reports", "publish"),)
BEFORE_RELOAD: Sequence[Step] = (("safety", "refuse_reload"),)

_MARK = "_sp_passes_wrapped"
_SESSION = "_sp_passes_session"


def register() -> None:
    """Hook into this process's workers. Called again, it changes nothing.

    vLLM does not start when this raises: it only does where the environment asks for sp_passes.
    """
    try:
        _private.require_version()
        _hook(_private.worker_wrapper())
    except SPError as err:
        if config.from_env() is not None:
            raise
        log.warning("sp_passes stays off: %s", err)


def _hook(wrapper: Any) -> None:
    if _MARK in wrapper.__dict__:
        return
    around = {
        "load_model": (BEFORE_LOAD, AFTER_LOAD),
        "determine_available_memory": (BEFORE_PROFILE, AFTER_PROFILE),
        "reload_weights": (BEFORE_RELOAD, ()),
    }
    for name in around:
        # WorkerWrapperBase forwards unknown names to its worker, so there is nothing to replace.
        if name in wrapper.__dict__:
            raise SPError(
                f"vLLM {_private.version()}'s WorkerWrapperBase has a method {name} of its own; "
                "sp_passes does not know what it does"
            )
    for name, (before, after) in around.items():
        setattr(wrapper, name, _around(name, before, after))
    setattr(wrapper, _MARK, True)


def _around(name: str, before: Sequence[Step], after: Sequence[Step]) -> Callable[..., Any]:
    """A method of the wrapper that runs the steps around the worker's own ``name``."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        method: Callable[..., Any] = getattr(self.worker, name)
        session = session_of(self)
        if session is None:
            return method(*args, **kwargs)
        with session.stack:
            _run(before, session)
            out = method(*args, **kwargs)
            _run(after, session)
        return out

    call.__name__ = name
    return call


def session_of(wrapper: Any) -> Session | None:
    """The session of a worker's wrapper; None where sp_passes is not configured."""
    if _SESSION not in wrapper.__dict__:
        wrapper.__dict__[_SESSION] = _new_session(wrapper)
    found: Session | None = wrapper.__dict__[_SESSION]
    return found


def _new_session(wrapper: Any) -> Session | None:
    vllm_config = wrapper.vllm_config
    named = _take_placeholder(vllm_config)
    options = config.from_vllm(vllm_config.additional_config)
    if options is None and named and not config.is_off(vllm_config.additional_config):
        options = config.Options(routes=("graph",))
    if options is None:
        return None
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        log.warning("sp_passes: tensor_parallel_size is 1, so there is nothing to shard")
        return None
    return Session(wrapper.worker, vllm_config, options)


def _take_placeholder(vllm_config: Any) -> bool:
    """Whether ``--compilation-config`` named the pass, which then needs no other option.

    What it named is no pass and must not be compiled with: it is taken out.
    """
    passes = vllm_config.compilation_config.inductor_compile_config
    found = type(passes.get(_private.PASS_KEY))
    if (found.__module__, found.__name__) != (f"{__package__}.graph_pass", "Placeholder"):
        return False
    del passes[_private.PASS_KEY]
    return True


def _run(steps: Sequence[Step], session: Session) -> None:
    for module, function in steps:
        getattr(import_module(f"sp_passes.vllm.{module}"), function)(session)
