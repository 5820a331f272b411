# SPDX-License-Identifier: Apache-2.0
"""What is checked of a rewritten model: the subjects, what is expected of them, the calls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from .. import SPConfig, compile, load_full_state_dict
from ..errors import SPError
from ..models import KimiK3Config, KimiK3Model, init_weights, shrunken_config
from ..models.layers import Made, RMSNorm
from ..models.moe import SituMLP
from ..ops import copy_engine, gather_engine, hopper, hopper_copy, one_shot, triton_gemm
from .devices import Place

ROWS = (24, 3, 8)
DECODE_ROWS = (8, 1)

# What runs where a fused kernel applies; a model that never calls it has proven nothing.
LAUNCHERS: dict[str, tuple[Any, str]] = {
    "copy_engine ag_gemm": (copy_engine, "gather_products"),
    "copy_engine gemm_rs": (copy_engine, "product_reduce"),
    "copy_engine gemm_gather": (gather_engine, "product_gather"),
    "triton ag_gemm": (triton_gemm, "gather_products"),
    "hopper ag_gemm": (hopper, "gather_products"),
    "hopper gemm_rs": (hopper, "product_reduce"),
    "hopper_copy ag_gemm": (hopper_copy, "gather_products"),
    "hopper_copy gemm_rs": (hopper_copy, "product_reduce"),
    "one_shot mlp": (one_shot.OneShot, "mlp"),
}
EXPECTED = {
    "copy_engine": ("copy_engine ag_gemm", "copy_engine gemm_rs"),
    "triton": ("triton ag_gemm",),
    "hopper": ("hopper ag_gemm", "hopper gemm_rs"),
    "hopper_copy": ("hopper_copy ag_gemm", "hopper_copy gemm_rs"),
}


def small_config() -> KimiK3Config:
    """Two layers with both kinds of attention, the dense MLP and the MoE.

    Every width is a multiple of 16 bytes on each of 8 ranks, as the fused kernels need, but for
    the router's and the decay's, as at full width.
    """
    return replace(
        shrunken_config(2),
        layer_types=("kda", "mla"),
        attn_res_block_size=1,
        hidden_size=512,
        intermediate_size=2048,
        routed_expert_hidden_size=256,
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        linear_head_dim=64,
    )


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each of ``LAUNCHERS`` is called inside, in eager calls and captures."""
    calls: Counter[str] = Counter()
    with ExitStack() as stack:
        for name, (owner, attribute) in LAUNCHERS.items():
            inner = getattr(owner, attribute)

            def outer(*args: Any, _name: str = name, _inner: Any = inner, **kwargs: Any) -> Any:
                calls[_name] += 1
                return _inner(*args, **kwargs)

            stack.enter_context(patch.object(owner, attribute, outer))
        yield calls


@dataclass
class Errors:
    """Squares of differences and of the reference, added up over calls, and later over ranks."""

    difference: float = 0.0
    reference: float = 0.0

    def add(self, found: Tensor, wanted: Tensor) -> None:
        self.difference += float((found.double() - wanted.double()).square().sum())
        self.reference += float(wanted.double().square().sum())

    @property
    def relative(self) -> float:
        return math.sqrt(self.difference / self.reference) if self.reference else math.inf


def merged(errors: Sequence[Errors]) -> Errors:
    """Over all ranks; infinite where one has compared nothing."""
    if not all(e.reference for e in errors):
        return Errors()
    return Errors(sum(e.difference for e in errors), sum(e.reference for e in errors))


@dataclass
class Subject:
    """What is tested: how to build it, weights for two states of it, and its inputs.

    Attributes:
        make: an uninitialised module of this rank in a dtype.
        states: two full state dicts, of which the second replaces the first in place.
        draw: the input ``[rows, …]`` of this rank, by number.
        rows: local rows, each a captured graph.
    """

    name: str
    make: Callable[[torch.dtype], nn.Module]
    states: tuple[dict[str, Tensor], dict[str, Tensor]]
    draw: Callable[[int, int], Tensor]
    rows: tuple[int, ...]

    def built(self, dtype: torch.dtype, state: int = 0) -> nn.Module:
        module = self.make(dtype)
        module.load_state_dict(self.states[state])
        return module


def kimi(place: Place, rows: tuple[int, ...] = ROWS) -> Subject:
    """The model of :func:`small_config`; token ids in, hidden states out."""
    config, group = small_config(), str(place.pg.group_name)

    def make(dtype: torch.dtype) -> KimiK3Model:
        return KimiK3Model(config, place.size, place.rank, group, dtype, place.device)

    def draw(rows: int, number: int) -> Tensor:
        seed = torch.Generator().manual_seed((rows * 4001 + number) * 64 + place.rank)
        return torch.randint(0, config.vocab_size, (rows,), generator=seed).to(place.device)

    first, second = (init_weights(make(torch.bfloat16), seed).state_dict() for seed in (0, 1))
    return Subject("kimi", make, (first, second), draw, rows)


class DecodeMLPs(nn.Module):
    """``layers`` times ``x + mlp(norm(x))``, with Kimi-K3's SiTU MLP."""

    def __init__(self, config: KimiK3Config, layers: int, made: Made) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.shared_intermediate_size
        self.norms = nn.ModuleList(
            RMSNorm(hidden, config.rms_norm_eps, made) for _ in range(layers)
        )
        self.mlps = nn.ModuleList(SituMLP(config, width, made) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.mlps, strict=True):
            x = x + layer(norm(x))
        return x


def decode_mlps(
    place: Place, config: KimiK3Config, layers: int = 2, rows: tuple[int, ...] = DECODE_ROWS
) -> Subject:
    """Decode steps of at most 128 global tokens on MLPs of the config's shared experts."""

    def make(dtype: torch.dtype) -> nn.Module:
        return DecodeMLPs(config, layers, Made(dtype, place.device))

    def state(seed: int) -> dict[str, Tensor]:
        module = make(torch.bfloat16)
        draw = torch.Generator(place.device).manual_seed(seed)
        for name, weight in module.named_parameters():
            noise = torch.randn(weight.shape, generator=draw, device=place.device)
            vector = 1 + 0.1 * noise
            weight.copy_(vector if name.startswith("norms") else noise * weight.shape[-1] ** -0.5)
        return module.state_dict()

    def inputs(rows: int, number: int) -> Tensor:
        seed = torch.Generator(place.device).manual_seed((rows * 4001 + number) * 64 + place.rank)
        shape = (rows, config.hidden_size)
        return torch.randn(shape, generator=seed, device=place.device).to(torch.bfloat16)

    return Subject("ag_mlp_rs", make, (state(0), state(1)), inputs, rows)


class Expected:
    """Of the unrewritten model in float32 and in the tested dtype, for the first few inputs."""

    INPUTS = 2

    def __init__(self, subject: Subject, dtype: torch.dtype) -> None:
        wide, own = subject.make(torch.float32), subject.make(dtype)
        self.wanted: dict[tuple[int, int, int], Tensor] = {}
        self.own = Errors()
        for state, weights in enumerate(subject.states):
            for module in (wide, own):
                module.load_state_dict(weights)
            for rows in subject.rows:
                for number in range(self.INPUTS):
                    x = subject.draw(rows, number)
                    reference = wide(x.float() if x.is_floating_point() else x)
                    x = x.to(dtype) if x.is_floating_point() else x
                    self.wanted[state, rows, number] = reference
                    self.own.add(own(x), reference)


class Check:
    """One rewritten model: eager calls, then replays, against :class:`Expected`."""

    def __init__(
        self, place: Place, subject: Subject, expected: Expected, dtype: torch.dtype, **options: Any
    ) -> None:
        self.place, self.subject, self.expected, self.dtype = place, subject, expected, dtype
        mode = options.pop("mode", None)
        # Fixed sizes for decode steps: dynamic=True makes inputs of a module's floats as well,
        # and the pattern ag_mlp_rs reads the activation's as numbers.
        dynamic = mode is None and "token_range" not in options
        self.module = subject.built(dtype)
        most = max(subject.rows) * place.size
        config = SPConfig(group=place.pg, max_tokens=most, **options)
        kwargs = {"mode": mode} if mode else {}
        self.model = compile(self.module, config, dynamic=dynamic, **kwargs)
        self.errors = {"eager": Errors(), "replayed": Errors()}
        self.state = 0

    def input(self, rows: int, number: int) -> Tensor:
        x = self.subject.draw(rows, number)
        return x.to(self.dtype) if x.is_floating_point() else x

    def note(self, what: str, out: Tensor, rows: int, number: int) -> None:
        wanted = self.expected.wanted.get((self.state, rows, number))
        if wanted is not None:
            self.errors[what].add(out, wanted)

    def eager(self) -> None:
        for rows in self.subject.rows:
            for number in range(Expected.INPUTS):
                self.note("eager", self.model(self.input(rows, number)), rows, number)

    def reload(self, state: int) -> None:
        """Other weights into the resident shards, where captured graphs read them."""
        load_full_state_dict(self.module, self.subject.states[state])
        self.state = state

    def reloaded(self, replays: int) -> int:
        """Replays, with other weights in the second half; on a CPU, eager calls with them.

        Returns:
            The number of replays that differ from an eager call of the same model.
        """
        if self.place.cuda:
            return self.replay(replays)
        self.reload(1)
        for rows in self.subject.rows:
            self.note("replayed", self.model(self.input(rows, 0)), rows, 0)
        return 0

    def replay(self, replays: int) -> int:
        """Captured for every batch size in one pool; the number of replays that differ."""
        graphs, pool = {}, None
        for rows in sorted(self.subject.rows, reverse=True):
            x = self.input(rows, 0)
            self.model(x)
            self.place.meet()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                out = self.model(x)
            pool = graph.pool()
            graphs[rows] = (graph, x, out)
        wrong = 0
        for at in range(replays):
            if at == replays // 2:
                self.reload(1)
            rows, number = self.subject.rows[at % len(graphs)], at // len(graphs)
            number %= max(replays // (2 * len(graphs)), 1)  # so that both halves begin with 0
            graph, x, out = graphs[rows]
            x.copy_(self.input(rows, number))
            graph.replay()
            found = out.clone()
            self.note("replayed", found, rows, number)
            wrong += not found.equal(self.model(x))
        self.place.sync()
        return wrong

    def through_mode(self) -> None:
        """Calls that torch.compile's mode warms up, captures and replays."""
        for rows in self.subject.rows:
            for again in range(4):
                number = again % Expected.INPUTS
                torch.compiler.cudagraph_mark_step_begin()
                out = self.model(self.input(rows, number)).clone()
                self.note("eager" if again < 2 else "replayed", out, rows, number)

    def report(self) -> Any:
        if self.model.report is None or not self.model.report.applied:
            raise SPError(f"nothing was rewritten: {self.model.report}")
        return self.model.report


def toy_config() -> KimiK3Config:
    """Narrow MLPs for a dry run, of widths that the decode launches take."""
    return replace(small_config(), hidden_size=1024, moe_intermediate_size=256)
