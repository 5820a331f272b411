# SPDX-License-Identifier: Apache-2.0
"""``SPConfig``: what it accepts, how it refuses, what it hashes and stores."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from sp_passes.patterns import PATTERNS
from torch.distributed.device_mesh import DeviceMesh

from sp_passes import SPConfig, SPError

# Each message must name what was asked, and what to do about it.
WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["group", "tp_size"]),
    ({"tp_size": 0}, ["tp_size", "at least 1", "0"]),
    ({"tp_size": -2}, ["tp_size", "-2"]),
    ({"tp_size": 2.0}, ["tp_size", "2.0"]),
    ({"tp_size": "4"}, ["tp_size", "'4'"]),
    ({"tp_size": True}, ["tp_size", "True"]),
    ({"tp_size": 4, "tp_rank": 4}, ["tp_rank=4", "tp_size=4", "count from 0"]),
    ({"tp_size": 4, "tp_rank": -1}, ["tp_rank", "-1"]),
    ({"tp_size": 4, "patterns": "replicated_mlp"}, ["patterns", "['replicated_mlp']"]),
    ({"tp_size": 4, "patterns": ["replicated_mpl"]}, ["'replicated_mpl'", "did you mean 'repl"]),
    ({"tp_size": 4, "patterns": ["zebra"]}, ["'zebra'", "there are", "replicated_mlp"]),
    ({"tp_size": 4, "patterns": [3]}, ["unknown pattern 3"]),
    ({"tp_size": 4, "patterns": 3}, ["patterns", "3"]),
    ({"tp_size": 4, "kernels": "fast"}, ["'fast'", "auto", "unfused"]),
    ({"tp_size": 4, "kernels": None}, ["None", "auto"]),
    ({"tp_size": 4, "token_range": (64, 1)}, ["(64, 1)", "reversed", "(1, 64)"]),
    ({"tp_size": 4, "token_range": 64}, ["token_range", "64", "lowest, highest"]),
    ({"tp_size": 4, "token_range": (1, 2, 3)}, ["token_range", "(1, 2, 3)"]),
    ({"tp_size": 4, "token_range": (-1, 3)}, ["token_range", "-1"]),
    ({"tp_size": 4, "token_range": (1.5, 3)}, ["token_range", "1.5"]),
    ({"tp_size": 4, "max_tokens": 0}, ["max_tokens", "0"]),
    ({"tp_size": 4, "max_tokens": 2**31}, ["max_tokens", "at most 2147483647"]),
    ({"tp_size": 4, "release_weights": 1}, ["release_weights", "1"]),
    ({"tp_size": 4, "strict": "yes"}, ["strict", "'yes'"]),
    ({"tp_size": 4, "hardware": 200}, ["hardware", "200"]),
    ({"group": "tp"}, ["group", "str", "ProcessGroup"]),
    ({"group": 8}, ["group", "int"]),
]


@pytest.mark.parametrize("options, words", WRONG, ids=[str(w[0]) for w in WRONG])
def test_wrong_arguments(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SPError) as error:
        SPConfig(**options)
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_group_gives_size_and_rank(solo: Any) -> None:
    config = SPConfig(group=solo)
    assert (config.tp_size, config.tp_rank) == (1, 0)
    assert config.group_name == solo.group_name
    assert SPConfig(group=DeviceMesh("cpu", [0])).tp_size == 1
    for name, value in (("tp_size", 8), ("tp_rank", 1)):
        with pytest.raises(SPError, match=rf"{name}={value} disagrees with the group"):
            SPConfig(group=solo, **{name: value})
    with pytest.raises(SPError, match=r"2-D DeviceMesh.*mesh\['tp'\]"):
        SPConfig(group=DeviceMesh("cpu", [[0]], mesh_dim_names=("dp", "tp")))


def test_not_a_member_of_the_group(solo: Any) -> None:
    with pytest.raises(SPError, match="may not be a member"):
        SPConfig(group=torch.distributed.GroupMember.NON_GROUP_MEMBER)


def test_frozen_hashable_and_equal_by_value() -> None:
    a = SPConfig(tp_size=4, patterns=["replicated_mlp"], token_range=[1, 8])  # type: ignore
    b = SPConfig(tp_size=4, patterns=("replicated_mlp",), token_range=(1, 8))
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    assert a != SPConfig(tp_size=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.tp_size = 8  # type: ignore[misc]


FULL = {
    "tp_size": 8, "tp_rank": 3, "patterns": ["replicated_mlp"], "kernels": "unfused",
    "token_range": [1, 64], "release_weights": False, "strict": True, "hardware": "h200",
    "max_tokens": 512,
}  # fmt: skip


@pytest.mark.parametrize("options", [{"tp_size": 4}, FULL])
def test_json_round_trip(options: dict[str, Any]) -> None:
    config = SPConfig(**options)
    assert SPConfig.from_json(config.to_json()) == config
    assert SPConfig.from_dict(json.loads(config.to_json())) == config
    assert set(config.to_dict()) == {f.name for f in dataclasses.fields(SPConfig)} - {"group"}


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"tp_size": 4, "tp_sise": 4}', ["unknown option 'tp_sise'", "did you mean 'tp_size'"]),
        ('{"tp_size": 4, "zebra": 1}', ["unknown option 'zebra'", "there are", "tp_size"]),
        ('{"tp_size": 4', ["not valid JSON"]),
        ("[4]", ["JSON object", "list"]),
        ('{"tp_size": 4, "group": "x"}', ["unknown option 'group'"]),
        ('{"tp_size": 4, "token_range": [9, 1]}', ["reversed"]),
    ],
)
def test_wrong_json(text: str, words: list[str]) -> None:
    with pytest.raises(SPError) as error:
        SPConfig.from_json(text)
    for word in words:
        assert word in str(error.value)


def test_json_with_a_group(solo: Any) -> None:
    config = SPConfig(group=solo, strict=True)
    assert SPConfig.from_json(config.to_json(), group=solo) == config


@pytest.mark.parametrize(
    "change",
    [
        {"tp_size": 8}, {"patterns": []}, {"kernels": "unfused"}, {"token_range": (1, 8)},
        {"release_weights": False}, {"strict": True}, {"hardware": "h200"}, {"max_tokens": 64},
    ],
    ids=str,
)  # fmt: skip
def test_every_option_changes_the_digest(change: dict[str, Any]) -> None:
    assert SPConfig(**{"tp_size": 4, **change}).digest() != SPConfig(tp_size=4).digest()


def test_the_digest_is_the_same_on_every_rank() -> None:
    assert SPConfig(tp_size=4, tp_rank=0).digest() == SPConfig(tp_size=4, tp_rank=3).digest()


def test_every_pattern_can_be_chosen_by_name() -> None:
    for name in PATTERNS:
        assert SPConfig(tp_size=2, patterns=[name]).patterns == (name,)  # type: ignore[arg-type]
    assert "replicated_mlp" in PATTERNS
