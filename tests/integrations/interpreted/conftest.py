"""Fixtures that hand each test the decorator under test: Triton's own, then ours.

These tests need TRITON_INTERPRET=1 before triton is imported, while the rest of the suite needs the real
compiler, and a process has one triton. So nothing here is collected unless the variable is set;
`tests/integrations/test_interpreted.py` sets it and runs this folder in a process of its own.
"""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.integrations.interpreted.support import Decorator, decorator

    @pytest.fixture(autouse=True)
    def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
        """A FORECAST_AUTOTUNE_* or TRITON_* tuning variable of the developer must not decide a test."""
        for name in os.environ:
            if name.startswith("FORECAST_AUTOTUNE_") or name.endswith("_AUTOTUNING"):
                monkeypatch.delenv(name)

    @pytest.fixture(params=["triton", "forecast"])
    def implementation(request: pytest.FixtureRequest) -> str:
        """Whose decorator the test sees; what passes for both is Triton's behaviour, and ours."""
        return str(request.param)

    @pytest.fixture
    def autotune(implementation: str) -> Decorator:
        """The decorator as users get it: ours may time fewer configs than Triton."""
        return decorator(implementation)

    @pytest.fixture
    def exhaustive(implementation: str) -> Decorator:
        """The decorator measuring every config, for tests about what is timed and which time wins."""
        return decorator(implementation, exhaustive=True)

    @pytest.fixture
    def forecast() -> Decorator:
        """Only our decorator, for what differs from Triton on purpose."""
        return decorator("forecast")

    @pytest.fixture
    def forecast_exhaustive() -> Decorator:
        """Only our decorator, measuring every config."""
        return decorator("forecast", exhaustive=True)
