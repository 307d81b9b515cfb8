"""What importing the decorator loads: programs and commands that launch nothing pay for it, too."""

from __future__ import annotations

import subprocess
import sys


def test_the_decorator_does_not_load_torch() -> None:
    code = (
        "import sys, forecast_integrations.triton.decorator; "
        "print(sorted({'torch', 'sklearn', 'fsspec', 'opentelemetry'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
