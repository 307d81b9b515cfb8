"""What importing the decorator loads: programs and commands that launch nothing pay for it, too."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "statement",
    ["import forecast_integrations.triton.decorator", "from forecast_autotune import forecast_autotune"],
)
def test_the_decorator_loads_neither_torch_nor_what_serves_inductor(statement: str) -> None:
    code = (
        f"{statement}; import sys; unwanted = "
        "{'torch', 'sklearn', 'fsspec', 'opentelemetry', 'forecast_integrations.inductor'}; "
        "print(sorted(unwanted & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
