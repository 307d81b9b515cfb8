"""What a run of `benchmarks.devices.assembler_options` says of its rows."""

from __future__ import annotations

from typing import Any

from benchmarks.devices.assembler_options import best_configs, summary_of


def compiled(kernel: str, option: str, changed: bool) -> dict[str, Any]:
    return {"kernel": kernel, "option": option, "changed": changed}


def timed(kernel: str, option: str, ms: float, *turns: float) -> dict[str, Any]:
    """A row; `turns` of the plain one, the fastest and the plain one again."""
    row = {"kernel": kernel, "option": option, "ms": ms}
    return row | dict(zip(("plain_ms", "best_ms", "again_ms"), turns, strict=False))


def test_kernels_are_counted_by_option_and_gains_are_over_the_plain_config() -> None:
    rows = [
        compiled("a", "", False),
        compiled("a", "--opt-level=1", True),
        compiled("b", "", False),
        compiled("b", "--opt-level=1", False),
    ]
    assert summary_of(rows, []) == {"kernels": 2, "changed": {"--opt-level=1": 1}}
    times = [
        timed("a", "", 2.0, 2.0, 1.6, 2.1),
        timed("a", "--opt-level=1", 1.0),
        timed("b", "", 3.0, 3.0, 3.0, 3.0),
        timed("b", "--opt-level=1", 4.0),
    ]
    result = summary_of(rows, times)
    assert result["best"] == {
        "a": {"option": "--opt-level=1", "gain": 1.25, "noise": 1.05},
        "b": {"option": "", "gain": 1.0, "noise": 1.0},
    }
    assert result["median_gain"] == 1.125


def test_the_recorded_best_config_of_each_kernel_is_taken() -> None:
    result = list(best_configs(3))
    assert len({case.family for case, _ in result}) >= 2
    assert all("ptx_options" not in config.kwargs for _, config in result)
