"""The fast suite runs where neither torch nor an extra is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import conftest

ROOT = Path(__file__).parents[1]


def test_collecting_the_fast_suite_loads_no_torch() -> None:
    program = (
        "import sys, pytest; pytest.main(['--collect-only', '-q', '-q', '-m', 'fast', '-p', 'no:cacheprovider']);"
        "print(sorted({'torch', 'triton', 'transformers', 'sklearn', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "[]"
    collected = {line.partition(":")[0] for line in lines}
    assert {"tests/core/policy/test_policy.py", "tests/core/tuning/test_tuner.py"} <= collected


def test_modules_that_are_listed_by_name_exist() -> None:
    names = [*conftest.NOT_FAST, *conftest.LONGEST]
    assert [name for name in names if not (ROOT / "tests" / name).is_file()] == []
