"""Every file of docs/examples does what its docstring says, in a fresh process with empty caches."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
LONGEST = (
    "budgets_and_modes",
    "dynamic_shapes",
    "export_import",
    "row_maximum",
    "search_tiny",
    "space",
    "tilelang_matmul",
    "torch_compile_cpu",
    "train_surrogate",
)
"""Of more than ten seconds, of what other tests cover."""
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
FACTS = {
    "budgets_and_modes": (
        r"budget of 3: +measured 3,",
        r"exhaustive: +measured 16,",
        r"skip: +measured 0, evidence: forecast",
        r"frozen, stored: measured 0, evidence: stored",
    ),
    "decorate": (r"first call: (?:[2-9]|1\d) of 24 ", r"second call: 1 launch"),
    "dynamic_shapes": (r"exact: 5 sizes, 5 decisions", r"pow2: +5 sizes, 2 decisions"),
    "export_import": (r"here: +measured 16 of 16", r"there: measured 0 of 16, known before: 16,"),
    "row_maximum": (r"(?:[2-9]|1\d) of 60 configs",),
    "patch_library": (r"\npatched: (?:[2-9]|1[0-5]) of 16 ", r"unpatched: 16 of 16 "),
    "space": (r"product of the lists: 144, allowed by the constraints: 114", r"measured: 4"),
    "tilelang_matmul": (r"candidates: 18,", r"a second time: stored, 0 measured"),
    "torch_compile_cpu": (r"measured so far: 2\n(?:.*\n)*.*measured so far: 2",),
}
"""Numbers that must be what the docstring shows, or within bounds: of others only the words are compared."""
UNDECIDED = ("timed again in a fresh process and not shown to be faster", "confirmed in a fresh process")
"""What a search says where its host was too busy for a clock to tell, and what its example shows."""


def docstring(path: Path) -> str:
    """The module's docstring, without importing it."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def expected_lines(path: Path) -> list[str]:
    """The indented lines below `Output` in an example's docstring."""
    _, result, block = docstring(path).partition("\nOutput ")
    assert result, f"{path.name}: its docstring shows no output"
    lines = [line for line in block.splitlines()[1:] if line.startswith("    ")]
    return textwrap.dedent("\n".join(lines)).splitlines()


def words_of(line: str) -> str:
    """A line without its numbers, and without spaces, as columns depend on the lengths of numbers."""
    return "".join(NUMBER.sub("#", line).split())


def fits(expected: str, printed: str) -> bool:
    """Whether a printed line has the expected words; `...` stands for any."""
    pattern = ".*".join(re.escape(words_of(part)) for part in expected.split("..."))
    return re.fullmatch(pattern, words_of(printed)) is not None


def run(path: Path, folder: Path) -> str:
    """Return what an example prints, stdout and stderr in order; it must succeed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FORECAST_AUTOTUNE", "TRITON"))}
    environment |= {
        "FORECAST_AUTOTUNE_CACHE_DIR": str(folder / "store"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "FORECAST_AUTOTUNE_WORKERS": "2",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    done = subprocess.run(
        [sys.executable, "-u", str(path)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.stem in LONGEST)) for p in EXAMPLES]
)
def test_an_example_prints_what_it_says(path: Path, tmp_path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    for text, package in (
        ("import torch", "torch"),
        ("import triton", "triton"),
        ("forecast_train", "lightgbm"),
        ("import tilelang", "tilelang"),
    ):
        if text in source and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    if "torch_compile" in path.stem and not shutil.which("g++"):
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    printed = run(path, tmp_path)
    rest = iter(printed.replace(*UNDECIDED).splitlines())
    for line in expected_lines(path):
        assert any(fits(line, other) for other in rest), f"{line!r} is not in, or out of order in:\n{printed}"
    for fact in FACTS.get(path.stem, ()):
        assert re.search(fact, "\n" + printed), f"{fact} is not in:\n{printed}"
    keeps = path.stem == "row_maximum"  # commands of the README and the quickstart look at it
    assert (tmp_path / "store").exists() == keeps, "it left measurements in the user's store"


def test_facts_are_of_examples() -> None:
    assert {*FACTS, *LONGEST} <= {path.stem for path in EXAMPLES}
    assert len(EXAMPLES) >= 8


def test_tutorials_include_examples_that_exist_and_examples_are_used() -> None:
    included = {
        result
        for page in (*TUTORIALS, ROOT / "docs" / "quickstart.md")
        for result in re.findall(r'--8<-- "([^":]+)"', page.read_text(encoding="utf-8"))
    }
    missing = [name for name in included if not (ROOT / name).is_file()]
    assert not missing
    linked = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    unused = [path.name for path in EXAMPLES if path.name not in linked]
    assert not unused, "examples that no page shows or names"
