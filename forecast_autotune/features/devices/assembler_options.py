"""What NVIDIA's assembler is told, as a parameter of configs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from forecast_autotune.errors import SettingsError
from forecast_autotune.features.devices.launch_options import BACKEND_OPTIONS
from forecast_autotune.records import Config

_ASSEMBLER = "ptx_options"
AnyConfig = TypeVar("AnyConfig")


def with_assembler_options(
    configs: Iterable[AnyConfig], values: Sequence[str] | None = None
) -> list[AnyConfig]:
    """Each of these configs once with every option of NVIDIA's assembler: experimental, for a kernel's last per cent.

    `configs` are `triton.Config`s, or the configs of a `Space`; `values` are what `ptxas` is told, "" for nothing, by
    default those that change machine code and no result. The list is as many times as long, so give it the configs that
    are known to be good. Raises `SettingsError` for a config that tells the assembler something already.

    Examples:
        >>> [str(c) for c in with_assembler_options([Config.of({"BLOCK": 64})], ["", "--opt-level=1"])]
        ['BLOCK=64 warps=4 stages=3', 'BLOCK=64 ptx_options=--opt-level=1 warps=4 stages=3']
    """
    if values is None:
        (option,) = (one for one in BACKEND_OPTIONS["cuda"] if one.name == _ASSEMBLER)
        values = [str(value) for value in option.values]
    return [_told(config, value) for config in configs for value in values]


def _told(config: Any, value: str) -> Any:
    meta = dict(config.kwargs)
    if _ASSEMBLER in meta:
        raise SettingsError(
            f"{config} has {_ASSEMBLER} already: give with_assembler_options configs without it"
        )
    if not value:
        return config
    meta[_ASSEMBLER] = value
    if isinstance(config, Config):
        return replace(config, kwargs=tuple(sorted(meta.items())))
    made = copy.copy(config)
    made.kwargs = meta
    return made
