"""Options of NVIDIA's assembler as a parameter of configs."""

from __future__ import annotations

import pytest

from forecast_autotune.errors import SettingsError
from forecast_autotune.features.devices import with_assembler_options
from forecast_autotune.records import Config


def test_each_config_is_told_to_the_assembler_in_every_way() -> None:
    listed = [Config.of({"A": a}, num_warps=2, num_stages=3) for a in (1, 2)]
    options = with_assembler_options(listed, ["", "--opt-level=1"])
    assert options[::2] == listed
    assert options[1::2] == [
        Config.of({"A": a, "ptx_options": "--opt-level=1"}, num_warps=2, num_stages=3) for a in (1, 2)
    ]
    assert len(set(with_assembler_options(listed))) > 2 * len(listed), "there are some by default"
    with pytest.raises(SettingsError, match="already"):
        with_assembler_options(options)
