# SPDX-License-Identifier: Apache-2.0
"""A zoo of MLPs, and a printer for graphs.

``Spec`` spells an MLP; ``MLP(spec)`` is the module. ``ZOO`` names the variants that the
numeric tests go through. Widths divide by 1, 2, 3, 4 and 8.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sp_passes import SPConfig

# --- ways to write gate and up as parts of one product ----------------------------------

Split = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def _quarters(z: Tensor, width: int) -> tuple[Tensor, Tensor]:
    a, b, c, d = z.split(width // 2, -1)
    return torch.cat([a, c], -1), torch.cat([b, d], -1)


def _pair(z: Tensor, width: int) -> Tensor:
    return z.view(*z.shape[:-1], 2, width)


def _lanes(z: Tensor, width: int) -> Tensor:
    return z.view(*z.shape[:-1], width, 2)


SPLITS: dict[str, Split] = {
    "chunk": lambda z, n: tuple(z.chunk(2, -1)),  # type: ignore[return-value]
    "split": lambda z, n: tuple(z.split(n, -1)),  # type: ignore[return-value]
    "split_with_sizes": lambda z, n: tuple(z.split([n, n], -1)),  # type: ignore[return-value]
    "slice": lambda z, n: (z[..., :n], z[..., n:]),
    "narrow": lambda z, n: (z.narrow(-1, 0, n), z.narrow(-1, n, n)),
    "swapped": lambda z, n: (z[..., n:], z[..., :n]),
    "view_select": lambda z, n: (_pair(z, n).select(-2, 0), _pair(z, n).select(-2, 1)),
    "view_unbind": lambda z, n: _pair(z, n).unbind(-2),  # type: ignore[return-value]
    "strided": lambda z, n: (z[..., ::2], z[..., 1::2]),
    "lane_unbind": lambda z, n: _lanes(z, n).unbind(-1),  # type: ignore[return-value]
    "lane_select": lambda z, n: (_lanes(z, n)[..., 0], _lanes(z, n)[..., 1]),
    "quarters": _quarters,
}

# --- activations ------------------------------------------------------------------------

Act = Callable[[Tensor, Tensor], Tensor]


def _situ(gate: Tensor, up: Tensor) -> Tensor:
    beta, linear_beta = 4.0, 25.0
    gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return gate * (linear_beta * torch.tanh(up / linear_beta))


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    alpha, limit = 1.702, 1.5
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


def _cast(gate: Tensor, up: Tensor) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


ACTS: dict[str, Act] = {
    "silu": lambda g, u: F.silu(g) * u,
    "gelu": lambda g, u: F.gelu(g) * u,
    "gelu_tanh": lambda g, u: F.gelu(g, approximate="tanh") * u,
    "relu2": lambda g, u: F.relu(g).square() * u,
    "situ": _situ,
    "clamped": _clamped,
    "cast": _cast,
}


@dataclass(frozen=True)
class Spec:
    """How an MLP is written.

    Args:
        form: "merged" (one product, split by ``split``), "separate", or "single" (no gate).
        split: key of ``SPLITS``.
        act: key of ``ACTS``.
        bias1, bias2: biases of the first and the second linear.
        in_first: weights are ``[in, out]`` and multiplied as ``x @ W``.
        rows: a ``[m, 1]`` factor computed from x: "", "inside", "after" or "both".
        vector: a parameter ``[width]`` scales the activation.
        residual: x is added through ``addmm``'s first operand.
        batched: x is ``[B, S, hidden]``.
    """

    hidden: int = 10
    width: int = 24
    form: str = "merged"
    split: str = "chunk"
    act: str = "silu"
    bias1: bool = False
    bias2: bool = False
    in_first: bool = False
    rows: str = ""
    vector: bool = False
    residual: bool = False
    batched: bool = False


class MLP(nn.Module):
    """The MLP that ``spec`` describes: ``[m, hidden]`` -> ``[m, hidden]``."""

    def __init__(self, spec: Spec, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.spec = spec
        made = torch.Generator().manual_seed(seed)

        def parameter(*shape: int) -> nn.Parameter:
            scale = 1.0 if len(shape) == 1 else shape[1] ** -0.5
            data = torch.randn(*shape, generator=made) * scale
            if spec.in_first and len(shape) == 2:
                data = data.t().contiguous()
            return nn.Parameter(data.to(dtype), requires_grad=False)

        h, n = spec.hidden, spec.width
        outs = {"merged": {"gate_up": 2 * n}, "separate": {"gate": n, "up": n}, "single": {"up": n}}
        self.firsts = list(outs[spec.form])
        for name, size in outs[spec.form].items():
            setattr(self, f"{name}_weight", parameter(size, h))
            setattr(self, f"{name}_bias", parameter(size) if spec.bias1 else None)
        self.down_weight = parameter(h, n)
        self.down_bias = parameter(h) if spec.bias2 else None
        self.scale = parameter(n) if spec.vector else None

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.spec.in_first:
            y = x @ weight
            return y if bias is None else y + bias
        return F.linear(x, weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        spec = self.spec
        out = [
            self._linear(x, getattr(self, f"{n}_weight"), getattr(self, f"{n}_bias"))
            for n in self.firsts
        ]
        act = ACTS[spec.act]
        if spec.form == "merged":
            hidden = act(*SPLITS[spec.split](out[0], spec.width))
        elif spec.form == "separate":
            hidden = act(out[0], out[1])
        else:
            hidden = act(out[0], torch.ones_like(out[0]))
        factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) if spec.rows else None
        if self.scale is not None:
            hidden = hidden * self.scale
        if factor is not None and spec.rows in ("inside", "both"):
            hidden = hidden * factor
        if spec.residual:
            y = torch.addmm(x, hidden, self.down_weight.t())
        else:
            y = self._linear(hidden, self.down_weight, self.down_bias)
        return y * factor if factor is not None and spec.rows in ("after", "both") else y

    def weights(self) -> list[str]:
        return [name for name, _ in self.named_parameters() if name != "scale"]


BASE = Spec()

ZOO: dict[str, Spec] = {
    "merged": BASE,
    "separate": Spec(form="separate"),
    "single": Spec(form="single"),
    "interleaved": Spec(split="strided"),
    "interleaved_view": Spec(split="lane_unbind"),
    "swapped": Spec(split="swapped"),
    "gelu": Spec(act="gelu"),
    "gelu_tanh": Spec(act="gelu_tanh"),
    "relu2_single": Spec(form="single", act="relu2"),
    "situ": Spec(act="situ"),
    "gpt_oss": Spec(split="strided", act="clamped", bias1=True, bias2=True),
    "cast": Spec(act="cast"),
    "bias1": Spec(bias1=True),
    "bias2": Spec(bias2=True),
    "both_biases_separate": Spec(form="separate", bias1=True, bias2=True),
    "rows_inside": Spec(rows="inside"),
    "rows_after": Spec(rows="after"),
    "vector": Spec(vector=True),
    "residual": Spec(residual=True),
    "batched": Spec(batched=True, rows="both"),
    "batched_biases": Spec(batched=True, bias1=True, bias2=True, split="view_unbind"),
    "in_first": Spec(in_first=True),
    "in_first_biases": Spec(in_first=True, bias1=True, bias2=True, split="strided"),
}


def rms_error(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference, relative to that of ``wanted``."""
    if wanted.numel() == 0:
        return 0.0
    difference = found.double() - wanted.double()
    return float(difference.square().mean().sqrt() / wanted.double().square().mean().sqrt())


def worst_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest of ``wanted`` (at least one)."""
    if found.shape != wanted.shape:
        raise AssertionError(f"shape {list(found.shape)} instead of {list(wanted.shape)}")
    if wanted.numel() == 0:
        return 0.0
    scale = max(1.0, float(wanted.abs().max()))
    return float((found.double() - wanted.double()).abs().max()) / scale


def exact(module: nn.Module, *args: Any, dtype: torch.dtype = torch.float64) -> Any:
    """What ``module`` gives in ``dtype``, from a copy."""
    wide = copy.deepcopy(module).to(dtype)
    cast = [a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    with torch.no_grad():
        return wide(*cast)


def tokens(spec: Spec, rank: int, rows: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rank's own tokens: different numbers, and magnitudes, on each rank."""
    made = torch.Generator().manual_seed(1000 + rank)
    shape = (rows, 3, spec.hidden) if spec.batched else (rows, spec.hidden)
    return (torch.randn(shape, generator=made) * (1 + rank)).to(dtype)


def config(tp_size: int | None = None, **options: Any) -> SPConfig:
    """Options with this pattern alone, so that others do not change what a test counts."""
    return SPConfig(tp_size=tp_size, **{"patterns": ["replicated_mlp"], **options})


def with_(spec: Spec, **changes: Any) -> Spec:
    return replace(spec, **changes)


# --- graphs as text ---------------------------------------------------------------------


def show(gm: fx.GraphModule) -> str:
    """A graph, one node a line: ``name = op(args) : shape``; weights by FQN, plans elided."""
    names: dict[fx.Node, str] = {}
    counts: dict[str, int] = {}
    lines = []
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            names[node] = str(node.target)
            lines.append(f"{names[node]} : {_shape(node)}")
        elif node.op == "output":
            lines.append(f"return {_text(node.args[0], names)}")
        else:
            base = _op(node.target)
            at = counts[base] = counts.get(base, -1) + 1
            names[node] = f"{base}_{at}" if at else base
            args = [_text(a, names) for a in node.args]
            if base == "prepare":
                args[3] = "plan"
            args += [f"{k}={_text(v, names)}" for k, v in node.kwargs.items()]
            lines.append(f"{names[node]} = {base}({', '.join(args)}) : {_shape(node)}")
    return "\n".join(lines) + "\n"


def _op(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return schema.name.partition("::")[2] if schema is not None else target.__name__


def _shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        return ", ".join("-" if v is None else str(list(v.shape)) for v in value)
    return str(list(value.shape)) if isinstance(value, Tensor) else str(value)


def _text(arg: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(arg, fx.Node):
        return names[arg]
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(_text(a, names) for a in arg)}]"
    return repr(arg)
