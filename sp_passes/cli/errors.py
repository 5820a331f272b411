# SPDX-License-Identifier: Apache-2.0
"""How commands end: 0; 1 for a difference or a crash; 2 for a wrong argument; 130 for Ctrl-C."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from ..errors import SPError
from ..ranks import RankError

CRASHED, WRONG_ARGUMENT, INTERRUPTED = 1, 2, 130
F = TypeVar("F", bound=Callable[..., Any])


def handled(command: F) -> F:
    """Turn errors that sp_passes raises on purpose into one line on stderr."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except RankError as err:
            print(f"sp-passes: error: {err.summary if err.expected else err}", file=sys.stderr)
            raise typer.Exit(WRONG_ARGUMENT if err.expected else CRASHED) from None
        except SPError as err:
            print(f"sp-passes: error: {' '.join(str(err).split())}", file=sys.stderr)
            raise typer.Exit(WRONG_ARGUMENT) from None
        except KeyboardInterrupt:
            print("sp-passes: interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None

    return run  # type: ignore[return-value]
