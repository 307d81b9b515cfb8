"""`torch.compile(backend="forecast_autotune")`: max-autotune, served by us, without another line of code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forecast_integrations.inductor.api import current, enable_torch_compile

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule


def forecast_autotune(
    gm: GraphModule,
    example_inputs: Sequence[torch.Tensor],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
    **_: object,
) -> Callable[..., Any]:
    """Compile a graph with Inductor's max-autotune; `options` and `mode` are those of `torch.compile`.

    The service stays on in this process, as after `enable_torch_compile()`: a backward graph is compiled
    long after this function has returned.
    """
    import torch
    from torch._inductor.compile_fx import compile_fx

    if current() is None:
        enable_torch_compile()
    patches: dict[str, object] = {"max_autotune": True}
    if mode:
        patches |= torch._inductor.list_mode_options(mode)
    patches |= options or {}
    return compile_fx(gm, example_inputs, config_patches=patches)
