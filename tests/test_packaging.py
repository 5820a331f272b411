# SPDX-License-Identifier: Apache-2.0
"""What an installation holds: a built wheel, its data and its entry points."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

_USE = """
import sp_passes, sp_passes.patterns
from sp_passes.models import load_config
from sp_passes.cli.main import main
print(sp_passes.__file__)
print(sorted(sp_passes.patterns.PATTERNS))
print(load_config("kimi-k3").num_hidden_layers)
"""


def test_entry_points() -> None:
    (backend,) = entry_points(group="torch_dynamo_backends", name="sp_passes")
    assert callable(backend.load())
    (script,) = entry_points(group="console_scripts", name="sp-passes")
    assert callable(script.load())


def test_the_torch_pin_is_in_the_development_extra_alone() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '"torch>=2.11"' in text and text.count("torch==2.13.0") == 1


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the sources: building leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    keep = ("sp_passes", "patterns", "pyproject.toml", "README.md", "LICENSE")
    for name in keep:
        source, target = ROOT / name, folder / "source" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source")]
    subprocess.run(command, check=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.slow
def test_a_wheel_holds_every_module_and_the_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in (("sp_passes", "sp_passes"), ("patterns", "sp_passes/patterns"))
        for pattern in ("*.py", "*.cu", "*.h")
        for path in (ROOT / folder).rglob(pattern)
    }
    assert not modules - names
    assert {"sp_passes/models/data/kimi_k3_config.json", "sp_passes/ops/measured.json"} <= names
    assert "sp_passes/py.typed" in names
    assert not [n for n in names if n.startswith(("tests/", "patterns/", "examples/"))]


@pytest.mark.slow
def test_an_unpacked_wheel_works(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", _USE],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    file, patterns, layers = run.stdout.splitlines()
    assert Path(file).is_relative_to(tmp_path)
    assert "replicated_mlp" in patterns and layers == "93"
