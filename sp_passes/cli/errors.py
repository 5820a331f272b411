# SPDX-License-Identifier: Apache-2.0
"""How commands end: 0, 1 for a difference found, 2 for a wrong argument, 130 for Ctrl-C."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from ..errors import SPError

WRONG_ARGUMENT, INTERRUPTED = 2, 130
F = TypeVar("F", bound=Callable[..., Any])


def one_line(err: SPError) -> str:
    """The message without a traceback that it may carry."""
    return str(getattr(err, "summary", err)).replace("\n", " ")


def handled(command: F) -> F:
    """Turn errors that sp_passes raises on purpose into one line on stderr."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except SPError as err:
            print(f"sp-passes: error: {one_line(err)}", file=sys.stderr)
            raise typer.Exit(WRONG_ARGUMENT) from None
        except KeyboardInterrupt:
            print("sp-passes: interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None

    return run  # type: ignore[return-value]
