# SPDX-License-Identifier: Apache-2.0
"""Every example prints what its docstring shows."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_output_is_the_one_shown(path: Path) -> None:
    shown = ast.get_docstring(ast.parse(path.read_text()))
    assert shown is not None
    expected = textwrap.dedent(shown.partition(f"$ python examples/{path.name}\n")[2])
    run = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [line.rstrip() for line in run.stdout.splitlines()] == expected.splitlines()
