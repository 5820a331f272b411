# SPDX-License-Identifier: Apache-2.0
"""``Options``: what a user may say to sp_passes inside vLLM.

From ``--additional-config '{"sp_passes": {...}}'`` or, where that says nothing, from the
environment variable ``SP_PASSES_CONFIG`` (JSON). ``{}`` or ``true`` means: on, all defaults.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from ..config import SPConfig
from ..errors import SPError
from ..patterns import patterns
from ..policy import POLICIES

KEY = "sp_passes"
ENV = "SP_PASSES_CONFIG"
ROUTES = ("graph", "regional")


@dataclass(frozen=True)
class Options:
    """What to rewrite in a vLLM worker.

    Args:
        patterns: names of patterns; None means every default pattern.
        kernels: as in ``SPConfig``.
        routes: ``graph`` (the pass in vLLM's compiled graphs) and ``regional`` (single modules,
            compiled after the weights are loaded); both by default.
        include: FQN patterns (``fnmatch``); given, only weights that one of them matches are
            sharded.
        exclude: FQN patterns of weights that stay whole.
        strict: an error where a site's weights stay whole, or no site is found at all.
        release_weights: free the full weights.
        policy: ``memory`` shards at every legal site, each in the form that is fastest for the
            tokens of the graph; ``latency`` and ``balanced`` as in ``SPConfig``: what they leave
            whole in the first graph that has a weight is whole in all.
        token_range: ``(lo, hi)`` global tokens that decide; None means those of each of vLLM's
            compile ranges.
        hardware: profile of the cost model, as in ``SPConfig``.
        stage_tensors: of what pipeline stages hand on, the tensors that are one rank's rows, such
            as ``hidden_states`` and ``residual`` of a model that keeps its tokens sharded.
        report_dir: folder for report files; None means vLLM's debug dump path, if set.

    Raises:
        SPError: a value does not fit; the message says what to write.
    """

    patterns: tuple[str, ...] | None = None
    kernels: str = "auto"
    routes: tuple[str, ...] = ROUTES
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strict: bool = False
    release_weights: bool = True
    policy: str = "memory"
    token_range: tuple[int, int] | None = None
    hardware: str | None = None
    stage_tensors: tuple[str, ...] = ()
    report_dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("patterns", "routes", "include", "exclude", "stage_tensors"):
            self._to_names(name)
        for route in self.routes:
            if route not in ROUTES:
                raise SPError(f"{KEY}: unknown route {route!r}; there are {', '.join(ROUTES)}")
        if not self.routes:
            raise SPError(f"{KEY}: routes is empty; name one of {', '.join(ROUTES)}")
        if self.policy not in POLICIES:
            raise SPError(
                f"{KEY}: policy={self.policy!r} is unknown; use one of {', '.join(POLICIES)}"
            )
        if self.report_dir is not None and not isinstance(self.report_dir, str):
            raise SPError(f"{KEY}: report_dir must be a path, found {self.report_dir!r}")
        if self.token_range is not None and isinstance(self.token_range, list):
            object.__setattr__(self, "token_range", tuple(self.token_range))
        if not isinstance(self.strict, bool):
            raise SPError(f"{KEY}: strict must be True or False, found {self.strict!r}")
        self.sp_config(tp_size=1).digest()  # its own checks, before any worker starts

    def _to_names(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name == "patterns":
            return
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise SPError(f"{KEY}: {name} must be a list of names, found {value!r}")
        object.__setattr__(self, name, tuple(value))

    def covers(self, fqn: str) -> bool:
        """Whether the user lets the weight ``fqn`` be sharded."""
        if any(fnmatchcase(fqn, p) for p in self.exclude):
            return False
        return not self.include or any(fnmatchcase(fqn, p) for p in self.include)

    def sp_config(self, **given: Any) -> SPConfig:
        """The options of one compilation; ``given`` adds the group and the tokens.

        Patterns that shard activations only are left out of the defaults under ``memory``.
        """
        given.setdefault("token_range", self.token_range)
        if given["token_range"] is not None:
            given["policy"] = self.policy
        return SPConfig(
            patterns=self.patterns if self.patterns or self.policy != "memory" else _saving(),
            kernels=self.kernels,
            release_weights=self.release_weights,
            strict=False,  # a model is many graphs: judged over all of them, by the session
            hardware=self.hardware,
            **given,
        )

    def digest(self) -> str:
        """Hash of all that changes compiled graphs."""
        rows = {k: v for k, v in asdict(self).items() if k not in ("report_dir", "strict")}
        text = json.dumps([rows, self.sp_config(tp_size=1).digest()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _saving() -> tuple[str, ...]:
    """The patterns that need no estimate."""
    found = patterns().items()
    return tuple(n for n, module in found if not getattr(module, "ONLY_WITH_TOKEN_RANGE", False))


def parse(data: Any, source: str) -> Options | None:
    """Options from JSON-like ``data``; None when it says off (``None`` or ``False``).

    Raises:
        SPError: an unknown key or a value that does not fit, naming ``source``.
    """
    if not _is_on(data):
        return None
    if data is True:
        data = {}
    if not isinstance(data, Mapping):
        raise SPError(
            f"{source} must be a JSON object of options, true or false, found {data!r}; "
            f"write {{}} for the defaults"
        )
    known = [f.name for f in fields(Options)]
    for key in data:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise SPError(f"{source}: unknown key {key!r}{hint}; there are {', '.join(known)}")
    try:
        return Options(**data)
    except SPError as err:
        raise SPError(f"{source}: {err}") from None


def from_env() -> Options | None:
    """Options of ``SP_PASSES_CONFIG``; None where it is unset or empty."""
    text = os.environ.get(ENV, "").strip()
    if not text:
        return None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as err:
        raise SPError(f"{ENV} is not valid JSON ({err}); write for example {ENV}='{{}}'") from None
    return parse(data, ENV)


def is_off(additional_config: Any) -> bool:
    """Whether a ``VllmConfig.additional_config`` says that sp_passes is off."""
    if not isinstance(additional_config, Mapping):
        return False
    return KEY in additional_config and not _is_on(additional_config[KEY])


def _is_on(value: Any) -> bool:
    return value is not None and value is not False


def from_vllm(additional_config: Any) -> Options | None:
    """Options of a ``VllmConfig.additional_config``, else of the environment.

    An explicit ``false`` in the former turns sp_passes off whatever the latter says.
    """
    if isinstance(additional_config, Mapping) and KEY in additional_config:
        return parse(additional_config[KEY], f"additional_config[{KEY!r}]")
    return from_env()
