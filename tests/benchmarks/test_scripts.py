"""Every benchmark script loads and says how it is called, and areas share code through `benchmarks.lib` alone."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
NO_AREAS = {"claims", "data", "kernels", "lib", "plots", "results"}
AREAS = sorted(
    p.name for p in FOLDER.iterdir() if p.is_dir() and p.name not in NO_AREAS and p.name[0] not in "._"
)
SCRIPTS = sorted(f"benchmarks.{area}.{p.stem}" for area in AREAS for p in (FOLDER / area).glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_how_it_is_called(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(script).main()
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"python -m {script}" in text, "the help shows the command as it is run from the repository's root"


def test_areas_share_code_through_lib_alone() -> None:
    allowed = {area: {area, "kernels", "lib"} for area in AREAS} | {"lib": {"kernels", "lib"}}
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for area, homes in allowed.items()
        for path in (FOLDER / area).rglob("*.py")
        for module in benchmark_imports(path)
        if module.split(".")[1] not in homes
    ]
    assert not wrong


def benchmark_imports(path: Path) -> list[str]:
    """`benchmarks.X...` modules that a file imports, anywhere in it."""
    results = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "benchmarks":
            results += [f"benchmarks.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks."):
            results.append(node.module or "")
        elif isinstance(node, ast.Import):
            results += [alias.name for alias in node.names if alias.name.startswith("benchmarks.")]
    return results
