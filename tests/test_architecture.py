"""Rules about the source tree that no linter knows."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from forecast_autotune.settings import Settings

ROOT = Path(__file__).parents[1]
CODE = ["forecast_autotune", "integrations", "harness", "train"]
LONGEST = 420
PUBLIC = [
    "import forecast_autotune",
    "from forecast_autotune import Space",
    "import forecast_autotune.settings",
]


def sources(*folders: str) -> list[Path]:
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not {"__pycache__", ".venv", "build", "dist"} & set(path.parts)
    ]


def test_the_outer_folders_are_no_packages() -> None:
    """With an `__init__.py` there, `import integrations.forecast_integrations` would load a second copy."""
    for folder in CODE[1:]:
        assert (ROOT / folder).is_dir()
        assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("statement", PUBLIC)
def test_importing_the_core_is_cheap(statement: str) -> None:
    """Neither torch nor triton, which take seconds, nor numpy, which a stored decision does not need."""
    program = f"{statement}; import sys; print(sorted({{'torch', 'triton', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_every_public_name_resolves() -> None:
    program = "import forecast_autotune as f; print([n for n in f.__all__ if getattr(f, n, None) is None])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_are_short() -> None:
    found = sources(*CODE, "tests", "benchmarks")
    assert len(found) > 50
    long = {str(p.relative_to(ROOT)): n for p in found if (n := len(p.read_text().splitlines())) > LONGEST}
    assert not long, f"over {LONGEST} lines, so it has two jobs: {long}"


def test_every_variable_is_declared_in_settings() -> None:
    """A variable that only one module knows is a variable that nobody finds."""
    declared = {f.metadata["variable"] for f in fields(Settings)}
    name = re.compile(r"FORECAST_AUTOTUNE(?:_[A-Z]+)+")
    used = {found: path for path in sources(*CODE) for found in name.findall(path.read_text())}
    assert used, "the pattern finds nothing"
    unknown = {found: str(path.relative_to(ROOT)) for found, path in used.items() if found not in declared}
    assert not unknown
