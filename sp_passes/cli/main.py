# SPDX-License-Identifier: Apache-2.0
"""``sp-passes``: the commands. Each takes ``--json``; the work is imported when it runs."""

from __future__ import annotations

import sys
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
    tokens: Annotated[int, typer.Option(help="Global tokens of a step.")] = 64,
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
    json: Json = False,
) -> None:
    """What would be rewritten in a model, or one stage, as one rank sees it; nothing is run."""
    from . import report as command

    command.run(command.Asked(model, tp, tokens, layers, pattern, strict, pp, stage), json)


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


def main() -> None:
    """Entry point of the console script."""
    try:
        app(prog_name="sp-passes")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
