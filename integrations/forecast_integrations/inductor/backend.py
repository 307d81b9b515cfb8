"""`torch.compile(backend="forecast_autotune")`: max-autotune, served by us, without another line of code."""

from __future__ import annotations

from typing import Any


def forecast_autotune(
    gm: Any, example_inputs: Any, *, options: dict[str, Any] | None = None, mode: str | None = None, **_: Any
) -> Any:
    """Compile a graph with Inductor's max-autotune; `options` and `mode` are those of `torch.compile`.

    The service stays on in this process, as after `enable_torch_compile()`: a backward graph is compiled
    long after this function has returned.
    """
    import torch
    from torch._inductor.compile_fx import compile_fx

    from forecast_integrations.inductor.api import current, enable_torch_compile

    if current() is None:
        enable_torch_compile()
    patches: dict[str, Any] = {"max_autotune": True}
    if mode:
        patches |= torch._inductor.list_mode_options(mode)
    patches |= options or {}
    return compile_fx(gm, example_inputs, config_patches=patches)
