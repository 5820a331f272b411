# SPDX-License-Identifier: Apache-2.0
"""``SPConfig``: the one frozen set of options that every entry point takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Shard

from .errors import SPError
from .ops.kernels import kernel_names
from .version import code_digest

MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class SPConfig:
    """What to rewrite, for which group.

    Args:
        group: the tensor-parallel process group (or 1-D ``DeviceMesh``); tp_size and
            tp_rank are read from it. None means offline use: nothing communicates.
        tp_size: ranks of the group; needed when ``group`` is None.
        tp_rank: this rank, 0 when not given offline.
        patterns: names of the patterns to use; None means every default pattern.
        kernels: which implementation the fused ops take, ``"auto"`` or a name from
            ``sp_passes.ops.kernels.kernel_names()``.
        token_range: ``(lo, hi)`` *global* tokens that the graph serves. Given, the cost
            model decides per site; None, every legal site is rewritten.
        release_weights: free the full weight once its shard is made. A weight that is kept may
            change at any time: each use takes this rank's part of it, a copy where that is not
            contiguous.
        strict: an error where a site's weights stay whole, or there is no site at all.
        hardware: name of a hardware profile, or path of one, for the cost model.
        max_tokens: most *global* tokens of a step; sizes the workspaces of fused kernels.
        stage_inputs: of a pipeline stage that is not the first: the tensors that arrive as one
            rank's rows, such as ``{"hidden_states": Shard(0), "residual": Shard(0)}``, by
            argument name or key.
        stage_outputs: the same of what a stage that is not the last returns.
        policy: with a token range, ``"latency"`` (shard where that is faster; the default),
            ``"memory"`` (every legal site, in its fastest sharded form) or ``"balanced"`` (unless
            it is more than a tenth slower).
        need_gib: instead of a policy, a budget: the cheapest sites that free so much memory
            of one rank in each graph. Needs a token range.
        shard_group: shard over parts of the group only: a number of ranks that divides
            tp_size, or ``"node"``; each part holds every weight once, and collectives of the
            rewrite stay inside it. None: over the whole group.

    Raises:
        SPError: an argument does not fit; the message says what to change.
    """

    group: Any = None
    tp_size: int | None = None
    tp_rank: int | None = None
    patterns: tuple[str, ...] | None = None
    kernels: str = "auto"
    token_range: tuple[int, int] | None = None
    release_weights: bool = True
    strict: bool = False
    hardware: str | None = None
    max_tokens: int | None = None
    stage_inputs: Any = None
    stage_outputs: Any = None
    policy: str | None = None
    need_gib: float | None = None
    shard_group: str | int | None = None

    def __post_init__(self) -> None:
        self._read_group()
        self._check_ranks()
        self._check_patterns()
        if self.kernels not in kernel_names():
            raise SPError(
                f"kernels={self.kernels!r} is unknown; use one of {', '.join(kernel_names())}"
            )
        self._check_tokens()
        self._check_stages()
        for name in ("release_weights", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise SPError(f"{name} must be True or False, found {getattr(self, name)!r}")
        if self.hardware is not None and not isinstance(self.hardware, str):
            raise SPError(
                f"hardware must be the name or path of a profile, found {self.hardware!r}"
            )
        self._check_policy()
        self._check_shard_group()

    def __deepcopy__(self, memo: dict[int, Any]) -> SPConfig:
        """Itself: it is frozen, and a process group cannot be copied."""
        return self

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _read_group(self) -> None:
        group = self.group
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise SPError(
                    f"group is a {group.ndim}-D DeviceMesh; pass its tensor-parallel dimension, "
                    "for example mesh['tp']"
                )
            group = group.get_group()
            self._set("group", group)
        if group is None:
            return
        if not isinstance(group, dist.ProcessGroup):
            raise SPError(
                f"group must be a torch.distributed ProcessGroup or a 1-D DeviceMesh, found "
                f"{type(group).__name__}; this rank may not be a member of the group"
            )
        for name, found in (("tp_size", group.size()), ("tp_rank", group.rank())):
            asked = getattr(self, name)
            if asked is not None and asked != found:
                raise SPError(
                    f"{name}={asked} disagrees with the group, which says {found}; leave {name} "
                    "out, it is read from the group"
                )
            self._set(name, found)

    def _check_ranks(self) -> None:
        if self.tp_size is None:
            raise SPError("give SPConfig a group, or tp_size for offline use")
        _require_int("tp_size", self.tp_size, 1)
        if self.tp_rank is None:
            self._set("tp_rank", 0)
        _require_int("tp_rank", self.tp_rank, 0)
        assert self.tp_rank is not None
        if self.tp_rank >= self.tp_size:
            raise SPError(
                f"tp_rank={self.tp_rank} is not below tp_size={self.tp_size}; ranks count from 0"
            )

    def _check_patterns(self) -> None:
        if self.patterns is None:
            return
        from .patterns import PATTERNS

        if isinstance(self.patterns, str) or not isinstance(self.patterns, Sequence):
            raise SPError(
                f"patterns must be a list of names, found {self.patterns!r}; "
                f"for one pattern write patterns=[{self.patterns!r}]"
            )
        for name in self.patterns:
            if name not in PATTERNS:
                near = get_close_matches(str(name), list(PATTERNS), n=1)
                hint = f", did you mean {near[0]!r}?" if near else ""
                raise SPError(f"unknown pattern {name!r}{hint}; there are {', '.join(PATTERNS)}")
        self._set("patterns", tuple(self.patterns))

    def _check_tokens(self) -> None:
        if self.token_range is not None:
            try:
                lo, hi = self.token_range
            except (TypeError, ValueError):
                raise SPError(
                    f"token_range must be (lowest, highest) global tokens, "
                    f"found {self.token_range!r}"
                ) from None
            _require_int("token_range's lowest", lo, 0)
            _require_int("token_range's highest", hi, 0)
            if lo > hi:
                raise SPError(f"token_range=({lo}, {hi}) is reversed; write ({hi}, {lo})")
            self._set("token_range", (lo, hi))
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, 1)
            if self.max_tokens > MOST_TOKENS:
                raise SPError(f"max_tokens may be at most {MOST_TOKENS}, found {self.max_tokens}")

    def _check_policy(self) -> None:
        from .policy import POLICIES

        if self.policy is not None and self.policy not in POLICIES:
            raise SPError(f"policy={self.policy!r} is unknown; use one of {', '.join(POLICIES)}")
        need = self.need_gib
        if need is not None:
            number = isinstance(need, (int, float)) and not isinstance(need, bool)
            if not number or not 0 < need < float("inf"):
                raise SPError(f"need_gib must be a number above 0, found {need!r}")
            if self.policy is not None:
                raise SPError(
                    f"need_gib={need!r} and policy={self.policy!r} are two ways to decide; leave "
                    "one out"
                )
            self._set("need_gib", float(need))
        given = f"need_gib={need!r}" if need is not None else f"policy={self.policy!r}"
        if self.token_range is None and (need is not None or self.policy not in (None, "memory")):
            raise SPError(
                f"{given} compares times, which depend on the tokens; give a token_range, "
                "such as (1, 256)"
            )

    def _check_shard_group(self) -> None:
        from .policy.groups import NODE, shard_size

        asked = self.shard_group
        if asked is None:
            return
        if asked != NODE:
            if isinstance(asked, str):
                raise SPError(
                    f"shard_group={asked!r} is unknown; use {NODE!r} or a number of ranks"
                )
            _require_int("shard_group", asked, 1)
        assert self.tp_size is not None
        shard_size(asked, self.tp_size, self.hardware)

    @property
    def shard_size(self) -> int:
        """Ranks that one copy of each sharded weight is spread over; tp_size by default."""
        from .policy.groups import shard_size

        assert self.tp_size is not None
        return shard_size(self.shard_group, self.tp_size, self.hardware)

    @property
    def sharding(self) -> Any:
        """The process group of ``shard_size`` ranks that this one shards weights with.

        Made at its first use, by all of its members; None offline.
        """
        from .policy.groups import part_of

        return part_of(self.group, self.shard_size)

    @property
    def sharding_name(self) -> str:
        """The name under which collectives find ``sharding``; empty offline."""
        return "" if self.group is None else str(self.sharding.group_name)

    def _check_stages(self) -> None:
        """Keep them as sorted pairs of name and text, which hash and compare."""
        for option in ("stage_inputs", "stage_outputs"):
            given = getattr(self, option)
            rows = sorted(dict(given).items()) if _is_pairs(given) else None
            if given is not None and rows is None:
                raise SPError(
                    f"{option} must map names to Shard(0), found {given!r}; write "
                    f'{option}={{"hidden_states": Shard(0)}}'
                )
            for name, placement in rows or ():
                if placement not in (Shard(0), "S0"):
                    raise SPError(
                        f"{option}[{name!r}] is {placement!r}; boundary tensors travel as Shard(0)"
                    )
            if rows and self.patterns is not None and "pp_send" not in self.patterns:
                raise SPError(f"{option} needs the pattern 'pp_send', patterns={self.patterns}")
            self._set(option, tuple((name, "S0") for name, _ in rows) if rows else None)

    @property
    def group_name(self) -> str:
        """The name under which collectives find the group; empty offline."""
        return "" if self.group is None else str(self.group.group_name)

    def to_dict(self) -> dict[str, Any]:
        """Every option but the live group, which has no JSON form."""
        out = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "group"}
        for name in ("patterns", "token_range"):
            if out[name] is not None:
                out[name] = list(out[name])
        for name in ("stage_inputs", "stage_outputs"):
            if out[name] is not None:
                out[name] = dict(out[name])
        return out

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_dict(cls, data: dict[str, Any], group: Any = None) -> SPConfig:
        """Options from a mapping; an unknown key is an SPError that names it."""
        if not isinstance(data, dict):
            raise SPError(f"a config is a JSON object, found {type(data).__name__}")
        known = {f.name for f in fields(cls)} - {"group"}
        for key in data:
            if key not in known:
                near = get_close_matches(key, sorted(known), n=1)
                hint = f", did you mean {near[0]!r}?" if near else ""
                raise SPError(
                    f"unknown option {key!r} in the config{hint}; there are "
                    f"{', '.join(sorted(known))}"
                )
        return cls(group=group, **data)

    @classmethod
    def from_json(cls, text: str, group: Any = None) -> SPConfig:
        """What ``to_json`` wrote; the group, if any, is given beside it."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as err:
            raise SPError(f"the config is not valid JSON: {err}") from None
        return cls.from_dict(data, group)

    def digest(self) -> str:
        """Hash of all that decides how a graph is rewritten; the same on every rank."""
        from .ops import tuned
        from .policy import hardware

        parts: dict[str, Any] = {**self.to_dict(), "group": self.group_name}
        parts["kernel_table"] = sorted(map(repr, tuned.named().items()))
        parts["hardware"] = [self.hardware, asdict(hardware(self.hardware))]
        parts["shard_size"] = self.shard_size
        del parts["tp_rank"]
        text = json.dumps([code_digest(), torch.__version__, parts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _require_int(name: str, value: Any, lowest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise SPError(f"{name} must be a whole number of at least {lowest}, found {value!r}")


def _is_pairs(given: Any) -> bool:
    """A mapping of names to placements, or its pairs."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    return isinstance(pairs, (tuple, list)) and all(
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], (Placement, str))
        for pair in pairs
    )
