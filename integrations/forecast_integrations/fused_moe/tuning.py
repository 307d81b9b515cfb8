"""Tunes the `fused_moe_kernel` of vLLM or SGLang for one layer, at the batch sizes that are served.

    from vllm.model_executor.layers.fused_moe.fused_moe import fused_moe_kernel
    tune_moe(fused_moe_kernel, MoeLayer(experts=128, width=768, hidden=2048, top_k=8), [1, 64, 1024])

Measurements lie in the store, from which `forecast-autotune export --format vllm-moe` (or `sglang-moe`) writes the
file that the server reads. Weights are not quantized.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from forecast_autotune.store import Store
from forecast_integrations.fused_moe.layer import (
    Assignment,
    MoeLayer,
    Product,
    assignment,
    chosen_experts,
    drawn_weights,
    is_unsorted,
    named_arguments,
    products,
)
from forecast_integrations.triton.decorator import autotune

KEY = ("num_valid_tokens", "N", "K")
_ROWS = "BLOCK_SIZE_M"
_BLOCKS = (_ROWS, "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
_COMPUTE_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_BY_CONFIG: Mapping[str, Callable[[Assignment], Any]] = {
    "sorted_token_ids_ptr": lambda of: of.sorted_tokens,
    "expert_ids_ptr": lambda of: of.experts,
    "num_tokens_post_padded_ptr": lambda of: of.padded,
    "EM": lambda of: of.rows,
}
"""Arguments that depend on a config's rows of a block."""


@dataclass(frozen=True)
class TunedMoe:
    """The config of one batch size, for both products of the layer."""

    config: triton.Config
    ms: float
    """Milliseconds of both products together."""
    measured: int
    """Configs that were timed for the first product."""
    candidates: int


def moe_configs() -> list[triton.Config]:
    """The 1,920 configs that vLLM's own tuner tries on NVIDIA's devices."""
    sizes = itertools.product((16, 32, 64, 128, 256), (32, 64, 128, 256), (64, 128, 256), (1, 16, 32, 64))
    return [
        triton.Config(
            {_ROWS: m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": group},
            num_warps=warps,
            num_stages=stages,
        )
        for (m, n, k, group), warps, stages in itertools.product(sizes, (4, 8), (2, 3, 4, 5))
    ]


def usual_config(layer: MoeLayer, tokens: int) -> triton.Config:
    """The config of vLLM 0.33 for a batch of a layer without a file: the rule of its `get_default_config`."""
    rows = next((rows for most, rows in ((32, 16), (96, 32), (512, 64)) if tokens <= most), 128)
    few = tokens <= 64
    blocks = {
        _ROWS: rows,
        "BLOCK_SIZE_N": 64 if few else 128,
        "BLOCK_SIZE_K": 128 if few else 64,
        "GROUP_SIZE_M": 16 if tokens // layer.experts > 128 else 1,
    }
    return triton.Config(blocks, num_warps=4 if tokens <= 128 else 8, num_stages=4 if tokens <= 32 else 3)


def tune_moe(
    kernel: Any,
    layer: MoeLayer,
    tokens: Sequence[int],
    *,
    configs: Sequence[triton.Config] | None = None,
    store: Store | Path | None = None,
    shortlist: int = 8,
    device: str = "cuda",
    seed: int = 0,
) -> dict[int, TunedMoe]:
    """Tune a `triton.jit` kernel of either server for a layer; the config for each number of tokens in a batch.

    Each product is decided by forecasts. As the server runs both with one config, the best `shortlist` of either are
    then measured for the other, and the least time of both together wins. The server's config without a file
    (`usual_config`) is among them where it is listed, so that nothing slower is chosen. `configs` defaults to
    `moe_configs()`, `store` to the user's own. Experts are drawn by chance.

    Raises ValueError for a kernel that asks for what is not known here, a data type it is not written for, a batch
    without tokens, and configs without the kernel's block sizes.
    """
    listed = list(configs) if configs is not None else moe_configs()
    kept = store if isinstance(store, Store) else Store(store) if store is not None else Store.default()
    weights = drawn_weights(layer, device)
    tuned = {}
    for batch in tokens:
        known = usual_config(layer, batch)
        calls = [
            MoeCall(kernel, product, layer, batch, listed, device, seed)
            for product in products(layer, batch, weights)
        ]
        usual = [known] if known in listed else []
        tuned[batch] = _tune_both(calls, listed, usual, kept, shortlist)
    return tuned


class MoeCall:
    """One product of a layer for one batch: a call of the kernel under any of some configs."""

    def __init__(
        self,
        kernel: Any,
        product: Product,
        layer: MoeLayer,
        tokens: int,
        configs: Sequence[triton.Config],
        device: str,
        seed: int = 0,
    ) -> None:
        """Raises as `tune_moe`."""
        if layer.dtype not in _COMPUTE_TYPES:
            raise ValueError(f"layers are of bfloat16 or float16 here, not {layer.dtype}")
        if tokens < 1:
            raise ValueError(f"a batch has 1 token or more, not {tokens}")
        if without := [str(config) for config in configs if not {*_BLOCKS} <= config.kwargs.keys()]:
            raise ValueError(f"every config must have {', '.join(_BLOCKS)}; this one has not: {without[0]}")
        parameters = inspect.signature(kernel.fn).parameters
        chosen = self.chosen = chosen_experts(layer, tokens, device, seed)
        wanted = torch.rand(tokens, layer.top_k, device=device)
        unsorted = "naive_block_assignment" in parameters and is_unsorted(chosen.numel(), layer.experts)
        self.product = product
        self.assignments = {
            rows: assignment(chosen, layer.experts, rows, unsorted=unsorted)
            for rows in dict.fromkeys(config.kwargs[_ROWS] for config in configs)
        }
        known = {
            **named_arguments(product, wanted, _COMPUTE_TYPES[layer.dtype]),
            "naive_block_assignment": unsorted,
        }
        self._by_config: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            name: partial(self._of_rows, take) for name, take in _BY_CONFIG.items()
        }
        self._by_config["even_Ks"] = lambda given: given["K"] % given["BLOCK_SIZE_K"] == 0
        self._by_config = {n: f for n, f in self._by_config.items() if n in parameters}
        own = {name for config in configs for name in config.kwargs}
        self.arguments = {n: v for n, v in known.items() if n in parameters and n not in own}
        unknown = [
            name
            for name, one in parameters.items()
            if one.default is inspect.Parameter.empty
            and name not in self.arguments.keys() | self._by_config.keys() | own
        ]
        if unknown:
            raise ValueError(
                f"{kernel.fn.__name__} asks for {', '.join(unknown)}, which is not known here: this is for the "
                "fused_moe_kernel of vLLM 0.33 and SGLang 0.5.23, and configs with their block sizes"
            )
        self.kernel = triton.heuristics(self._by_config)(kernel)

    def grid(self, meta: Mapping[str, Any]) -> tuple[int]:
        """Programs: blocks of rows times blocks of columns."""
        rows = triton.cdiv(self.assignments[meta[_ROWS]].rows, meta[_ROWS])
        return (rows * triton.cdiv(self.product.weights.shape[1], meta["BLOCK_SIZE_N"]),)

    def launch(self, config: triton.Config) -> None:
        """Once, with this config."""
        self.kernel[self.grid](**self.arguments, **config.all_kwargs())

    def tune(
        self, configs: Sequence[triton.Config], store: Store, mode: str | None = None
    ) -> dict[triton.Config, float]:
        """Decide among these configs; milliseconds of those that were timed and ran."""
        tuner = autotune(configs, KEY, store=store, mode=mode)(self.kernel)
        tuner[self.grid](**self.arguments)
        times_ms = {}
        # A tuner of one config times nothing, and has no such attribute then.
        for config, times in (getattr(tuner, "configs_timings", None) or {}).items():
            ms = times[0] if isinstance(times, Sequence) else times
            if math.isfinite(ms):
                times_ms[config] = float(ms)
        return times_ms

    def _of_rows(self, take: Callable[[Assignment], Any], given: Mapping[str, Any]) -> Any:
        return take(self.assignments[given[_ROWS]])


def _tune_both(
    calls: Sequence[MoeCall],
    configs: Sequence[triton.Config],
    usual: Sequence[triton.Config],
    store: Store,
    shortlist: int,
) -> TunedMoe:
    """Decide each call, then both together; the `usual` are measured in any case."""
    measured = [call.tune(configs, store) for call in calls]
    first = [config for of in measured for config in sorted(of, key=of.__getitem__)[:shortlist]]
    both = list(dict.fromkeys([*usual, *first]))
    if len(both) == 1:  # of one config alone nobody takes the time
        both += [config for config in configs if config not in both][:1]
    for call, of in zip(calls, measured, strict=True):
        of |= call.tune(both, store, "exhaustive")
    able = [config for config in both if all(config in of for of in measured)]
    if not able:
        raise ValueError(
            "no config runs for both products: the list has none with few enough rows and stages"
        )
    best = min(able, key=lambda config: sum(of[config] for of in measured))
    return TunedMoe(best, sum(of[best] for of in measured), len(measured[0]), len(configs))
