# SPDX-License-Identifier: Apache-2.0
"""Full-width layers of Kimi-K3: step time and memory, replicated against rewritten.

    python -m sp_passes.bench.stack --layers 8 --out FILE      a GPU a rank, NCCL
    python -m sp_passes.bench.stack --toy --ranks 2            a dry run, on a CPU too

Layers are those of ``short_context``: no routed experts, a context of one token. Times are
medians of replayed CUDA graphs on the slowest rank, all variants in one run on the same weights.
``pair`` is one MLP of the shared experts alone, for few to many tokens, in every form the ops
have.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import SPConfig, compile, resident_bytes, unshard
from .._private import constant_floats, drop_cublas_workspaces
from ..errors import SPError
from ..models import KimiK3Config, load_config, shrunken_config
from ..models.layers import TP, Made
from ..ranks import run_ranks
from ..report import GIB
from . import mlp_pair
from .devices import Place, collectives, environment, join, will_share
from .parts import Watchdog, hearing, tell_result
from .short_context import Layers
from .steps import REPLICATED, crossover, own_rows, step_us
from .timing import relative_error, versions

TOKENS = (8, 64, 256, 1024, 4096, 8192)
MOST_COMPARED = 1024
"""Tokens up to which results are kept to be compared; more would show in the memory."""


@dataclass(frozen=True)
class Asked:
    """What to measure.

    Attributes:
        layers: 0: the pair alone.
        tokens: global tokens of a step.
        kernels: variants of the rewritten layers: kernels at every legal site, or, as
            ``auto@64``, at those that the cost model picks for 1 to 64 tokens.
        pair: measure the pair too.
        toy: toy widths and few rounds, to try the bench itself.
        limit: seconds after which a variant of the layers counts as hanging.
    """

    layers: int = 8
    tokens: tuple[int, ...] = TOKENS
    kernels: tuple[str, ...] = ("auto", "unfused", "auto@64")
    pair: bool = True
    toy: bool = False
    limit: float = 120.0

    def config(self) -> KimiK3Config:
        return (
            shrunken_config(self.layers)
            if self.toy
            else load_config("kimi-k3").with_layers(self.layers)
        )


# --- layers -----------------------------------------------------------------------------


Found = Callable[[dict[str, Any]], None]


def measure_layers(place: Place, asked: Asked, dog: Watchdog, done: Found) -> None:
    """The layers replicated, then rewritten in each way: one module, so the same weights.

    Args:
        done: is given what was measured so far, after each variant.
    """
    config = asked.config()
    tp = TP(place.size, place.rank, str(place.pg.group_name))
    module = Layers(config, tp, Made(torch.bfloat16, place.device))
    inputs = {m: own_rows(place, m, config.hidden_size) for m in asked.tokens}
    times: dict[str, dict[int, float]] = {}
    before: dict[str, int] = {}
    variants: dict[str, Any] = {}
    outs: dict[int, Tensor] = {}
    for variant in (REPLICATED, *asked.kernels):
        place.say(f"{variant}: compiling")
        dog.start(variant)
        torch._dynamo.reset()
        start = time.perf_counter()
        model = _model(place, module, variant, asked)
        errors = {}
        for m in sorted(inputs, reverse=True):  # so that shared buffers are made once
            with constant_floats():
                out = model(inputs[m])
            if m <= MOST_COMPARED:
                errors[m] = relative_error(out, outs.setdefault(m, out))
        seconds = time.perf_counter() - start
        place.say(f"{variant}: {seconds:.0f} s to the first results")
        times[variant] = {m: _us(place, model, x) for m, x in inputs.items()}
        if variant == REPLICATED:
            del model, out
            before = memory(place, module)  # with what NCCL and the kernels' code take
        else:
            report = model.report
            variants[variant] = {
                "sites": len(report.applied), "report_saves": report.bytes_saved_per_rank,
                "error_against_replicated": max(errors.values(), default=None),
                "crossover": crossover(times[REPLICATED], times[variant]),
                "seconds": round(seconds, 1), "report": str(report),
            }  # fmt: skip
            del model, out
            variants[variant]["after"] = memory(place, module)
            unshard(module)
        dog.stop()
        done({
            "layers": list(config.layer_types), "hidden_size": config.hidden_size,
            "left_out": "routed experts; attention has a context of one token",
            "rows": [{"tokens": m, "us": {v: t[m] for v, t in times.items()}} for m in inputs],
            "before": before, "variants": variants,
        })  # fmt: skip


def _us(place: Place, model: Any, x: Tensor) -> float:
    return step_us(place, lambda: model(x))


def _model(place: Place, module: Layers, variant: str, asked: Asked) -> Any:
    if variant == REPLICATED:  # a dry run saves itself this compile
        return module if asked.toy else torch.compile(module, dynamic=True)
    kernels, _, most = variant.partition("@")
    config = SPConfig(
        group=place.pg, kernels=kernels, max_tokens=max(asked.tokens),
        token_range=(1, int(most)) if most else None,
    )  # fmt: skip
    return compile(module, config, dynamic=True)


def memory(place: Place, module: torch.nn.Module) -> dict[str, int]:
    """Bytes of this rank: weights and shards, what the allocator gave out, what the GPU holds.

    The last has everything in it: the buffers of NCCL and of symmetric memory, and the context.
    """
    gc.collect()
    found = {"parameters": resident_bytes(module)}
    if place.cuda:
        place.sync()
        drop_cublas_workspaces()
        torch.cuda.empty_cache()
        found["allocated"] = torch.cuda.memory_allocated(place.device)
        free, total = torch.cuda.mem_get_info(place.device)
        found["device"] = total - free
    return found


# --- the run ----------------------------------------------------------------------------


def work(rank: int, size: int, asked: Asked) -> None:
    """All that is asked for, in one rank."""
    place = join(rank, size)
    if not place.cuda:
        from ..demo.shrunken import quiet_inductor

        quiet_inductor()
    result: dict[str, Any] = {"ranks": size, "asked": asdict(asked), **versions()}
    dog = Watchdog(asked.limit)
    with torch.no_grad(), collectives(place):
        if asked.pair:
            dog.start("the MLP pair")
            mlp_pair.measure(place, asked.toy, partial(_note, place, result, "pair"))
        if asked.layers:
            measure_layers(place, asked, dog, partial(_note, place, result, "stack"))


def _note(place: Place, result: dict[str, Any], part: str, found: dict[str, Any]) -> None:
    result[part] = found
    tell_result(place, result)


def run(
    ranks: int,
    asked: Asked,
    timeout: float = 500,
    notify: Callable[[int, str], None] | None = None,
    save: Path | None = None,
) -> dict[str, Any]:
    """Measure on ``ranks`` local processes.

    Args:
        timeout: seconds for everything.
        notify: called with (rank, text) for progress.
        save: a file for the result as JSON, written whenever there is more of it.

    Returns:
        ``stack`` and ``pair``: rows ``{"tokens", "us": {variant: µs}}`` and the ``crossover`` in
        tokens; ``stack["variants"]`` has bytes of rank 0 and what each report says was saved.

    Raises:
        SPError: there is not a GPU for each rank, and this is no dry run.
        RankError: a rank failed, a variant took more than ``asked.limit`` seconds, or everything
            more than ``timeout``.
    """
    if not asked.toy and (not torch.cuda.is_available() or will_share(ranks)):
        raise SPError(
            f"full-width layers on {ranks} ranks need {ranks} GPUs, torch sees "
            f"{torch.cuda.device_count()}; give fewer ranks, or --toy to try the command"
        )
    if asked.toy:
        asked = replace(asked, tokens=tuple(m for m in asked.tokens if m <= 64))
    result: dict[str, Any] = {}

    def more(found: dict[str, Any]) -> None:
        result.update(found)
        if save is not None:
            save.write_text(json.dumps(result, indent=1))

    with environment(ranks):
        run_ranks(work, ranks, asked, timeout=timeout, notify=hearing(more, notify))
    return result


def lines(result: dict[str, Any]) -> list[str]:
    """The result as text."""
    out = [f"{result['device']}, {result['ranks']} ranks, {result['date']}"]
    pair, stack = result.get("pair"), result.get("stack")
    if pair is not None:
        out.append(f"MLP {' → '.join(map(str, pair['widths']))}, µs; best form, its gain")
        for row in pair["rows"]:
            us = "  ".join(f"{name} {t:.1f}" for name, t in row["us"].items())
            gain = row["us"][REPLICATED] / row["us"][row["best"]]
            out.append(f"{row['tokens']:6}  {us}  ({row['best']} {gain:.2f}x)")
        out.append(f"crossover: {tokens_text(pair['crossover'])}")
    if stack is not None:
        out.append(f"{len(stack['layers'])} layers, {stack['left_out']}; µs a step (gain)")
        for row in stack["rows"]:
            whole = row["us"][REPLICATED]
            us = "  ".join(f"{n} {t:.0f} ({whole / t:.2f}x)" for n, t in row["us"].items())
            out.append(f"{row['tokens']:6}  {us}")
        out += summaries(stack)
    return out


def freed(stack: dict[str, Any], variant: str) -> int:
    """Bytes of weights that a rank no longer holds, as counted; see ``report_saves``."""
    after = stack["variants"][variant]["after"]
    count: int = stack["before"]["parameters"] - after["parameters"]
    return count


def agrees(stack: dict[str, Any]) -> bool:
    """Whether every report claimed the bytes that were freed."""
    found = stack["variants"]
    return all(freed(stack, name) == one["report_saves"] for name, one in found.items())


def summaries(stack: dict[str, Any]) -> list[str]:
    """Of each variant: where it crosses over, and what it freed."""
    before = stack["before"]
    whole = before["parameters"] / GIB
    out = []
    for name, one in stack["variants"].items():
        gone, saves = freed(stack, name), one["report_saves"]
        agree = "equal" if gone == saves else f"DIFFERENT by {gone - saves} bytes"
        text = f"{name}: {one['sites']} sites, crossover {tokens_text(one['crossover'])}; "
        text += f"weights of a rank {whole:.3f} GiB, freed {gone / GIB:.3f}, the report says "
        text += f"{saves / GIB:.3f}: {agree}"
        for what in sorted(before.keys() - {"parameters"}):
            text += f"; {what} {(before[what] - one['after'][what]) / GIB:.3f} GiB less"
        if one["error_against_replicated"] is not None:
            text += f"; {one['error_against_replicated']:.1e} from the replicated results"
        out.append(text)
    return out


def tokens_text(found: float | None) -> str:
    if found is None:
        return "none, sharded is faster at every count"
    return f"{found:.0f} tokens" if found else "sharded is faster at no count"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--layers", type=int, default=8, help="0: the pair alone")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--kernels", default="auto,unfused,auto@64")
    parser.add_argument("--no-pair", action="store_true")
    parser.add_argument("--toy", action="store_true", help="toy widths: a dry run")
    parser.add_argument("--limit", type=float, default=Asked.limit, help="seconds for a variant")
    parser.add_argument("--timeout", type=float, default=500, help="seconds for everything")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    asked = Asked(
        args.layers, tuple(map(int, args.tokens.split(","))), tuple(args.kernels.split(",")),
        not args.no_pair, args.toy, args.limit,
    )  # fmt: skip

    def progress(rank: int, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    result = run(args.ranks, asked, args.timeout, progress, args.out)
    print("\n".join(lines(result)))
    stack = result.get("stack")
    return int(stack is not None and not agrees(stack))


if __name__ == "__main__":
    sys.exit(main())
