# SPDX-License-Identifier: Apache-2.0
"""Long steps show a spinner and their time, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Say = Callable[[str], None]


@contextmanager
def step(text: str) -> Iterator[Say]:
    """A line with a spinner while the block runs, and the seconds it took.

    The block may call what it gets with a word on where it is. Where stderr is no
    terminal, the line is printed once, at the end.
    """
    console = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(finished_text="·"), TextColumn("{task.description}", markup=False))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(text, total=1)
        yield lambda now: progress.update(task, description=f"{text}: {now}")
        progress.update(task, description=text, completed=1)
