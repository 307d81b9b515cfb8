"""What importing the decorator loads, and what deciding does: who launches nothing pays for it, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_the_decorator_loads_neither_torch_nor_what_serves_inductor() -> None:
    code = (
        "from forecast_autotune import forecast_autotune; import sys; "
        "assert 'forecast_integrations.triton.decorator' in sys.modules; unwanted = "
        "{'torch', 'sklearn', 'fsspec', 'opentelemetry', 'forecast_integrations.inductor'}; "
        "print(sorted(unwanted & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_decision_loads_no_module_that_it_can_do_without(tmp_path: Path) -> None:
    """Masked arrays take 15 ms of a first decision, and longer from a disk that was not read before."""
    pytest.importorskip("triton")
    code = (
        "from forecast_autotune import forecast_autotune; "
        "from forecast_integrations.triton.null_device import null_device; "
        "from tests.integrations.null import by_launch_options, configs, double, launch; import sys; "
        "tuner = forecast_autotune(configs=configs(), key=['n'])(double)\n"
        "with null_device(by_launch_options): launch(tuner), launch(tuner, 300_000)\n"
        "print(tuner.decision.measured > 0, sorted({'numpy.ma', 'sklearn', 'scipy.stats'} & sys.modules.keys()))"
    )
    environment = {**os.environ, "FORECAST_AUTOTUNE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )
    assert done.stdout.strip() == "True []", done.stderr
