# SPDX-License-Identifier: Apache-2.0
"""``sp-passes``: the commands. Each takes ``--json``; the work is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from ..version import __version__
from .errors import INTERRUPTED, handled

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Shard the weights that sequence-parallel serving keeps whole on every rank.",
)
bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure.")
app.add_typer(bench, name="bench")
vllm = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look into vLLM.")
app.add_typer(vllm, name="vllm")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"sp-passes {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
@handled
def demo(json: Json = False) -> None:
    """The main job, start to end, in under three minutes.

    A full-width Kimi-K3 rewritten on fake tensors, a shrunken one run on 4 local ranks, and
    a wrong design refused.
    """
    from . import demo as command

    command.run(json)


@app.command()
@handled
def report(
    model: Annotated[str, typer.Option(help="'kimi-k3' or the path of such a config.json.")],
    tp: Annotated[int, typer.Option(help="Ranks of the tensor-parallel group.")] = 8,
    tokens: Annotated[
        str, typer.Option(help="Global tokens of a step, or a range such as 1:65536.")
    ] = "64",
    layers: Annotated[Optional[int], typer.Option(help="Cut or repeat the layers.")] = None,  # noqa: UP045
    pattern: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Use this pattern only; may be given several times."),
    ] = None,
    strict: Annotated[bool, typer.Option(help="A skipped site is an error.")] = False,
    pp: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Stages of a pipeline; report the one that --stage says."),
    ] = None,
    stage: Annotated[Optional[int], typer.Option(help="Stage to report, from 0.")] = None,  # noqa: UP045
    hardware: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="h100, h200, b200, gb200, gb300, or a file of `calibrate`."),
    ] = None,
    policy: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="latency, memory or balanced: which sites are sharded."),
    ] = None,
    need_gib: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Instead: the cheapest sites that free so many GiB of a rank."),
    ] = None,
    shard_group: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Shard over parts of so many ranks, or 'node'."),
    ] = None,
    plot: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="With a range: draw step time over tokens into this PNG."),
    ] = None,
    gpu_memory: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="GiB of a GPU: print the memory budget; 0 takes the profile's."),
    ] = None,
    utilization: Annotated[float, typer.Option(help="Share of the memory to use.")] = 0.95,
    ep: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Ranks that share the routed experts; as --tp by default."),
    ] = None,
    experts: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Routed experts of a layer, if a checkpoint keeps fewer."),
    ] = None,
    expert_bits: Annotated[
        float, typer.Option(help="Bits of a routed expert's weight with its scales.")
    ] = 4.25,
    kv_bytes: Annotated[int, typer.Option(help="Bytes of a cached latent: 2, or 1 for fp8.")] = 2,
    sequences: Annotated[int, typer.Option(help="Sequences whose KDA states are held.")] = 0,
    json: Json = False,
) -> None:
    """What would be rewritten in a model, or one stage, as one rank sees it; nothing is run.

    With a range of tokens: which form of each site is the fastest where, and step time.
    """
    from . import report as command
    from .crossover import parse_tokens

    low, high = parse_tokens(tokens)
    asked = command.Asked(
        model=model,
        tp=tp,
        tokens=low,
        layers=layers,
        patterns=pattern,
        strict=strict,
        pp=pp,
        stage=stage,
        high=high,
        hardware=hardware,
        policy=policy,
        need_gib=need_gib,
        shard_group=shard_group,
        plot=plot,
        gpu_memory=gpu_memory,
        utilization=utilization,
        ep=ep,
        experts=experts,
        expert_bits=expert_bits,
        kv_bytes=kv_bytes,
        sequences=sequences,
    )
    command.run(asked, json)


@app.command()
@handled
def calibrate(
    out: Annotated[str, typer.Option(help="File to write the profile to.")] = "hardware.json",
    ranks: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Local ranks; as many as there are GPUs by default."),
    ] = None,
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Name of the profile; the device's by default."),
    ] = None,
    base: Annotated[
        str, typer.Option(help="Profile that gives what cannot be measured here.")
    ] = "h200",
    json: Json = False,
) -> None:
    """Measure this machine for the cost model, in about a minute, and write a profile."""
    from . import calibrate as command

    command.run(out, ranks, name, base, json)


@app.command()
@handled
def inspect(
    paths: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="PATH", help="A dump: file, log, folder or archive."),
    ] = None,
    tp: Annotated[int, typer.Option(help="Ranks of the tensor-parallel group.")] = 8,
    tokens: Annotated[str, typer.Option(help="sharded, replicated, or auto.")] = "auto",
    graph: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="One graph, by number or a part of its name."),
    ] = None,
    pattern: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Use this pattern only; may be given several times."),
    ] = None,
    declare: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Where a weight lives, such as '*.o_proj.weight=S1'."),
    ] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Compare two dumps.")] = False,
    rank_diff: Annotated[
        bool, typer.Option("--rank-diff", help="Do all ranks' dumps in the folder agree?")
    ] = False,
    html: Annotated[Optional[str], typer.Option(help="Write a report to this file.")] = None,  # noqa: UP045
    vllm: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Trace vLLM's model of this config.json instead; nothing is served."),
    ] = None,
    json: Json = False,
) -> None:
    """Why was a dumped graph not rewritten, and what would a rewrite buy?"""
    from . import inspect as command

    asked = command.Asked(
        paths or [], tp, tokens, graph, pattern, declare, diff, rank_diff, html, vllm
    )
    command.run(asked, json)


@app.command()
@handled
def verify(
    model: Annotated[str, typer.Option(help="'shrunk', Kimi-K3 at toy widths.")] = "shrunk",
    tp: Annotated[int, typer.Option(help="Local ranks.")] = 2,
    tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Global tokens of a step; several counts when left out."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 6,
    json: Json = False,
) -> None:
    """Run a model replicated and rewritten on local ranks; exit 1 if the results differ."""
    from . import verify as command

    if not command.run(model, tp, tokens, dtype, layers, json):
        raise typer.Exit(1)


@bench.callback()
def bench_options() -> None:
    pass


@bench.command()
@handled
def passes(json: Json = False) -> None:
    """What the pass itself costs: tracing against rewriting, compile time, host overhead."""
    from .bench import passes as command

    command(json)


@bench.command()
@handled
def kernels(
    ops: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--ops", "--op", help="These alone, such as ag_gemm,all_gather."),
    ] = None,
    tokens: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Global tokens, such as 1024,4096; rounded up to the ranks."),
    ] = None,
    shapes: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Of one rank, n x k, such as 3648x7168,gemm_rs:7168x1536."),
    ] = None,
    kernels: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="These alone beside unfused, such as triton,copy_engine."),
    ] = None,
    seconds: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Begin no row after so many."),
    ] = None,
    tp: Annotated[int, typer.Option(help="Ranks that one process stands in for.")] = 8,
    link: Annotated[
        str, typer.Option(help="Its stand-in for a link: pinned or device.")
    ] = "pinned",
    mlp: Annotated[bool, typer.Option(help="The decode MLP too, over real links.")] = True,
    write: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Extend this table of kernels with the winners; over real links."),
    ] = None,
    plot: Annotated[Optional[Path], typer.Option(help="Draw the times to this PNG.")] = None,  # noqa: UP045
    save: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write the JSON there after each row."),
    ] = None,
    json: Json = False,
) -> None:
    """Fused kernels on this machine's GPUs, against the product and the transfer alone.

    For real links: torchrun --nproc-per-node N -m sp_passes bench kernels.
    """
    from . import bench_kernels as command

    asked = command.Asked(
        ops, tokens, shapes, kernels, seconds, tp, link, mlp, write, plot, save
    )  # fmt: skip
    command.run(asked, json)


@bench.command()
@handled
def stack(
    ranks: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Local ranks, a GPU each; as many as there are by default."),
    ] = None,
    layers: Annotated[int, typer.Option(help="Full-width layers; 0: the MLP pair alone.")] = 8,
    tokens: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Global tokens of a step, such as 8,256,4096."),
    ] = None,
    kernels: Annotated[
        str,
        typer.Option(help="Kernels; auto@64: where the cost model says so for 1 to 64 tokens."),
    ] = "auto,unfused,auto@64",
    pair: Annotated[bool, typer.Option(help="The shared experts' MLP alone, too.")] = True,
    toy: Annotated[bool, typer.Option("--toy", help="Toy widths, to try the command.")] = False,
    out: Annotated[Optional[Path], typer.Option(help="Write the JSON here too.")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """Kimi-K3's layers at full width on this machine's GPUs: step time and memory.

    Replicated against rewritten; exit 1 if the report claims other bytes than were freed.
    """
    from . import bench_models as command

    asked = command.stacking.Asked(
        layers, command.tokens_of(tokens), command.variants_of(kernels), pair, toy
    )
    if not command.stack(ranks, asked, out, json):
        raise typer.Exit(1)


@bench.command()
@handled
def soak(
    minutes: Annotated[float, typer.Option(help="How long.")] = 10.0,
    ranks: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Local ranks; as many as there are GPUs by default."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides every call.")] = 0,
    first: Annotated[int, typer.Option(help="Number of the first call.")] = 0,
    small: Annotated[bool, typer.Option("--small", help="Narrow shapes, as on a CPU.")] = False,
    json: Json = False,
) -> None:
    """Random calls of every op by every kernel, each result checked; exit 1 if one is wrong."""
    from . import bench_models as command

    if not command.soak(minutes, ranks, seed, first, small, json):
        raise typer.Exit(1)


@vllm.callback()
def vllm_options() -> None:
    pass


@vllm.command()
@handled
def survey(
    model: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Look at this model only; may be given several times."),
    ] = None,
    tp: Annotated[int, typer.Option(help="Ranks of the tensor-parallel group.")] = 2,
    policy: Annotated[
        str, typer.Option(help="latency, memory or balanced: which sites are sharded.")
    ] = "memory",
    json: Json = False,
) -> None:
    """What the passes find in vLLM's own models, at tiny widths; exit 1 if one cannot be built."""
    from . import vllm as command

    if not command.survey(model or (), tp, policy, json):
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the console script."""
    try:
        app(prog_name="sp-passes")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
