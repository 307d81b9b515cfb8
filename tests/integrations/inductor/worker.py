"""A custom operation with several decompositions: on a CPU, too, it has many choices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters
from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning
from torch._inductor.utils import fresh_cache

import forecast_autotune
from forecast_autotune.records import Candidate
from forecast_autotune.surrogates.protocol import Forecasts, Query

SPLITS = (1, 2, 4, 8, 16)
HEARD: list[dict[str, float]] = []
"""What each of Inductor's own feedback savers' calls was told: milliseconds by choice."""


@torch.library.custom_op("fatest::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor, s: int = 1) -> torch.Tensor:
    return a @ b


@product.register_fake
def _(a: torch.Tensor, b: torch.Tensor, s: int = 1) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def split(a: torch.Tensor, b: torch.Tensor, s: int = 1) -> torch.Tensor:
    if s == 1:
        return a @ b
    k = a.shape[1] // s
    return torch.stack([a[:, i * k : (i + 1) * k] @ b[i * k : (i + 1) * k] for i in range(s)]).sum(0)


class Scripted:
    """Forecasts that splits are as slow as they are many; the library comes in the middle."""

    name, version = "scripted", "1"

    def __init__(self, *, hope: float = 0.0) -> None:
        self.hope = hope
        """Doublings by which everything is forecast to be faster than it is."""

    def forecast(self, query: Query) -> Forecasts:
        mean = [self.log2_ms(c) for c in query.candidates]
        sd = np.full(len(mean), 0.01)
        return Forecasts(query.candidates, np.array(mean) - self.hope, sd, np.zeros(len(mean)))

    def log2_ms(self, candidate: Candidate) -> float:
        return float(dict(candidate.config.kwargs).get("s") or 3) if "sub" in candidate.variant else 3.0


def compile_product(n: int = 64) -> dict[str, Any]:
    """Compile and run the custom operation once, with empty caches; what Inductor measured for it."""
    torch._dynamo.reset()
    before, heard = counters["inductor"]["select_algorithm_autotune"], len(HEARD)
    a, b = torch.randn(32, 256), torch.randn(256, n)
    with torch.no_grad(), fresh_cache():
        error = (torch.compile(product)(a, b) - a @ b).abs().max().item()
    return {
        "correct": error < 1e-3,
        "autotunes": counters["inductor"]["select_algorithm_autotune"] - before,
        "rounds": [sorted(timings) for timings in HEARD[heard:]],
    }


def touched() -> dict[str, Any]:
    """Everything of torch's that is hooked, as it is now."""
    from torch._dynamo import package
    from torch._inductor import async_compile, autotune_process, codecache, ir, select_algorithm
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codegen.cpp_template import CppTemplate
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.runtime import benchmarking, triton_heuristics

    selector = select_algorithm.AlgorithmSelectorCache
    cache = select_algorithm.get_algorithm_selector_cache()
    owners = {
        selector: ("__call__", "do_autotuning", "benchmark", "benchmark_choice", "benchmark_choices"),
        select_algorithm: ("_log_autotune_exceptions", "as_completed"),
        InductorChoices: ("get_template_configs", "_finalize_template_configs"),
        select_algorithm.TritonTemplate: ("generate", "maybe_append_choice"),
        CppTemplate: ("generate",),
        TritonScheduling: ("benchmark_codegened_module",),
        benchmarking.InductorBenchmarker: ("benchmark_gpu",),
        benchmarking.Benchmarker: ("benchmark_cpu",),
        package.CompilePackage: ("source_id_from_fn",),
        codecache.FxGraphHashDetails: ("__init__",),
        autotune_process.AsyncAutotuner: ("get_results",),
        triton_heuristics.CachingAutotuner: ("benchmark_all_configs", "coordinate_descent_tuning"),
        async_compile: ("_worker_compile_triton",),
        async_compile.AsyncCompile: ("triton", "wait"),
        ir.UserDefinedTritonKernel: ("__init__",),
    }
    found = {f"{o.__name__}.{n}": vars(o)[n] for o, names in owners.items() for n in names}
    lists = {"preprocessing": cache.preprocessing_fns, "feedback": cache.feedback_saver_fns}
    return found | {
        f"{name}[{i}]": entry for name, entries in lists.items() for i, entry in enumerate(entries)
    }


def changed(before: dict[str, Any]) -> list[str]:
    """Names of what is not the very same object as before."""
    after = touched()
    return sorted(n for n in {*before, *after} if before.get(n) is not after.get(n))


def session(folder: Path) -> dict[str, Any]:
    """Enable, compile, extend in rounds, disable."""
    from forecast_integrations.inductor.api import current

    store = folder / "session"
    found: dict[str, Any] = {}
    before = touched()
    enable = forecast_autotune.enable_torch_compile
    handle = enable(surrogate=Scripted(), store=store)
    found["hooked"] = changed(before)
    once = touched()
    second = enable(surrogate=Scripted(), store=store)
    found["hooked_again"] = changed(once)
    found["sure"] = compile_product(64)
    found["again"] = compile_product(64)
    found["tally"] = second.session.tally.line()
    with enable(surrogate=Scripted(hope=30), store=store) as inner:
        found["unsure"] = compile_product(48)
        found["nested"] = current() is inner.session
    with enable(surrogate=Scripted(), store=store, frozen_at="2020-01-01T00:00:00"):
        found["before"] = compile_product(64)
    found["outer_is_back"] = current() is second.session
    forecast_autotune.disable_torch_compile()
    found["left"] = changed(before)
    found["plain"] = compile_product(40)
    del handle
    return found


def prepare() -> None:
    """Register the decompositions of the custom operation, and a listener of Inductor's own."""
    gen = lambda fake: torch.randn(tuple(fake.shape))  # noqa: E731
    configs = [CustomOpConfig(split, s=s) for s in SPLITS]
    register_custom_op_autotuning(product, configs=configs, input_gen_fns={"a": gen, "b": gen})
    from torch._inductor.select_algorithm import add_feedback_saver

    def saver(timings: Any, *_: Any) -> None:
        HEARD.append({getattr(c, "_wrapped", c).name: ms for c, ms in timings.items()})

    add_feedback_saver(saver)
