"""Options of NVIDIA's assembler as ordinary parameters of a config, on a null device."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton

from benchmarks.devices.assembler_options import machine_code
from forecast_autotune import autotune, with_assembler_options
from forecast_autotune.features.devices import datasheet_device
from forecast_autotune.store import Store
from forecast_integrations.triton.null_device import null_device
from tests.integrations.null import by_launch_options, double, fresh, launch

KEPT, DROPPED = "", "--def-load-cache=cg"


@pytest.fixture(autouse=True)
def _clean(clean_environment: None) -> None:
    """No variable of the developer's decides a test, and kernels of a test are compiled in it."""


def test_a_config_is_compiled_as_its_assembler_is_told_and_served_so(tmp_path: Path) -> None:
    plain = [triton.Config({"BLOCK": 128}, num_warps=2, num_stages=2)]
    listed = with_assembler_options(plain, [KEPT, DROPPED])
    assert listed[0] is plain[0], "a config of the user's is never changed"
    assert "ptx_options" not in plain[0].kwargs
    binaries = set()
    with null_device(by_launch_options, device=datasheet_device("h200")):
        for _ in range(2):  # the second finds it in the store
            tuner = autotune(configs=listed, key=["n"], store=tmp_path / "store", mode="exhaustive")(
                fresh(double)
            )
            launch(tuner)
            assert tuner.best_config in listed
        for config in listed:
            launched = launch(autotune(configs=[config], key=["n"], store=False)(fresh(double)))
            binaries.add(machine_code(launched.asm["cubin"]))
    (table,) = Store(tmp_path / "store").tables()
    assert {dict(m.candidate.config.kwargs).get("ptx_options", KEPT) for m in table.measurements} == {
        KEPT,
        DROPPED,
    }
    assert len(binaries) == 2, "the assembler heard it"
    assert len(table.problem.ttir) == 1, "both share a trace"
