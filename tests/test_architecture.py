"""Rules about the source tree that no linter knows."""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import re
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from forecast_autotune.settings import Settings

ROOT = Path(__file__).parents[1]
CODE = ["forecast_autotune", "integrations", "harness", "train"]
PUBLIC = [
    "import forecast_autotune",
    "from forecast_autotune import Space",
    "import forecast_autotune.settings",
    "import forecast_integrations.api",
]
FACES = ["forecast_autotune", "forecast_integrations.api"]
"""Modules that hand names on, lazily: ours to users, and the integrations' to ours."""


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


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("face", FACES)
def test_programs_get_what_type_checkers_are_told(face: str) -> None:
    """A face names every home twice: in an import that only type checkers see, and in a text for run time."""
    blocks = [node for node in modules()[face].body if isinstance(node, ast.If)]
    told = next(block.body for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING")
    homes = {alias.name: n.module for n in told if isinstance(n, ast.ImportFrom) for alias in n.names}
    assert {"autotune", "enable_torch_compile"} <= homes.keys()
    program = (
        f"import {face} as face; from importlib import import_module\n"
        f"homes = {homes}\n"
        "print(sorted(n for n, h in homes.items() if getattr(face, n) is not getattr(import_module(h), n)))\n"
        "print(sorted(homes.keys() - {*dir(face)}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]


@pytest.mark.parametrize("face", FACES)
def test_an_unknown_name_is_refused_as_of_any_module(face: str) -> None:
    module = importlib.import_module(face)
    assert not hasattr(module, "autotunes")
    with pytest.raises(AttributeError, match=f"^module '{face}' has no attribute 'autotunes'$"):
        _ = module.autotunes


def test_the_core_knows_one_module_of_the_outer_packages() -> None:
    """Imports by name are seen by no linter."""
    outer = re.compile(r"forecast_(integrations|harness|train)(\.\w+)*")
    named = {
        (module, node.value)
        for module, tree in modules().items()
        if module.split(".")[0] == "forecast_autotune"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and outer.fullmatch(node.value)
    }
    assert named == {("forecast_autotune", "forecast_integrations.api")}


def test_every_variable_is_declared_in_settings() -> None:
    """A variable that only one module knows is a variable that nobody finds."""
    declared = {f.metadata["variable"] for f in fields(Settings)}
    name = re.compile(r"FORECAST_AUTOTUNE(?:_[A-Z0-9]+)+")
    used = {found: path for path in sources(*CODE) for found in name.findall(path.read_text())}
    assert used, "the pattern finds nothing"
    unknown = {found: str(path.relative_to(ROOT)) for found, path in used.items() if found not in declared}
    assert not unknown


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = parts[1:] if parts[0] in CODE[1:] else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, ast.Module]:
    """Syntax trees of the packages' modules by dotted name, without the packs' solutions, which are data."""
    found = [p for p in sources(*CODE) if "builtin" not in p.parts]
    gc.disable()  # millions of nodes, all of which stay: collections find nothing, and take half of the seconds
    try:
        return {module_name(p): ast.parse(p.read_text(encoding="utf-8")) for p in found}
    finally:
        gc.freeze()
        gc.enable()


def test_a_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(module)
    assert len(homes) > 300
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    assert not twice, f"one name, several classes: {twice}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside of functions count, too: they only hide a circle. The public face hands names on."""
    trees = modules()
    imports: dict[str, set[str]] = {}
    for module, tree in trees.items():
        found = imports.setdefault(module, set())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if name in trees else node.module for name in names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    assert sum(len(found & trees.keys()) for found in imports.values()) > 1000
    del imports["forecast_autotune"]
    # What is imported by nobody that is left cannot lie on a circle; nor can what imports nothing that is left.
    left = {module: found & imports.keys() for module, found in imports.items()}
    while free := {module for module, found in left.items() if not found & left.keys()}:
        for module in free:
            del left[module]
    assert not left, f"a circle of imports, and what leads to it: {sorted(left)}"
