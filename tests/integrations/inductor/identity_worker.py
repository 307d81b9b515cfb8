"""What decides for what: compilations that share a store and no cache, `python identity_worker.py FOLDER SCENARIO...`.

Each `compiled` is as a process of its own to the store: Inductor's caches are empty, and so is the session. Prints
one JSON line with the answer of each scenario.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning
from torch._inductor.utils import fresh_cache

import forecast_autotune
from forecast_autotune.records import Decision
from forecast_autotune.store import Store
from forecast_integrations.inductor import summary
from forecast_integrations.inductor.choices.records import candidate_of

TUNED = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
DECIDED: list[Decision] = []
TAKEN: list[Any] = []
"""What Inductor took."""
TIMED: list[str] = []
"""Choices that Inductor's clock was asked for."""


@contextlib.contextmanager
def clock(*, fails: Callable[[str], Exception | None] = lambda name: None) -> Iterator[None]:
    """Note what Inductor times; `fails` says which choice raises instead."""
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    original = AlgorithmSelectorCache.benchmark_choice.__func__
    select = AlgorithmSelectorCache.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = select(self, *args, **kwargs)
        if answer[1] is not None:
            TAKEN.append(candidate_of(answer[1]))
        return answer

    def benchmark_choice(cls: Any, choice: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(choice, "_wrapped", choice).name
        TIMED.append(name)
        if (error := fails(name)) is not None:
            raise error
        return original(cls, choice, *args, **kwargs)

    AlgorithmSelectorCache.benchmark_choice = classmethod(benchmark_choice)
    AlgorithmSelectorCache.__call__ = call
    try:
        yield
    finally:
        AlgorithmSelectorCache.benchmark_choice = classmethod(original)
        AlgorithmSelectorCache.__call__ = select


def compiled(
    function: Any,
    inputs: Sequence[Any],
    store: Path,
    options: Mapping[str, Any] = TUNED,
    *,
    shared: bool = False,
    **enabled: Any,
) -> dict[str, Any]:
    """Compile and call once with the service on; what was timed, decided and stored."""
    torch._dynamo.reset()
    counters.clear()
    DECIDED.clear()
    TIMED.clear()
    TAKEN.clear()
    caches = contextlib.nullcontext() if shared else fresh_cache()
    service = forecast_autotune.enable_torch_compile(store=store, **enabled)
    with torch.no_grad(), caches, config.patch(freezing=True), service as handle, clock():
        result = torch.compile(function, options=dict(options))(*inputs)
    found = [str(getattr(c, "variant", c)) for c in TAKEN]
    right = torch.allclose(result.float(), function(*inputs).float(), atol=0.1, rtol=0.05)
    return {
        "right": right,
        "timed": sorted(name.rpartition("_")[0] for name in TIMED),
        "chosen": [d.chosen.variant for d in DECIDED],
        "taken": found,
        "risks": [d.stated_risk for d in DECIDED],
        "measured": [d.measured for d in DECIDED],
        "evidence": [str(d.evidence) for d in DECIDED],
        "reasons": [d.reason for d in DECIDED],
        "stored": sum(Store(store).decision(t.problem) is not None for t in Store(store).tables()),
        "said": handle.session.warn_once.messages,
        "misses": counters["inductor"]["fxgraph_cache_miss"],
    }


class Layer(torch.nn.Module):
    """A frozen layer in bfloat16, and what follows it."""

    def __init__(self, follows: Callable[..., Any], rows: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(rows, 64, dtype=torch.bfloat16)
        self.follows = follows

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return self.follows(self.linear(x), *more)


def activations(folder: Path) -> dict[str, Any]:
    """Layers that differ in what is fused to them."""
    x, other = torch.ones(512, 8, dtype=torch.bfloat16), torch.ones(512, 64, dtype=torch.bfloat16)
    functions = {
        "relu": torch.relu,
        "tanh": torch.tanh,
        "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
        "clamp_1": lambda y: torch.clamp(y, -1.0, 1.0),
        "clamp_2": lambda y: torch.clamp(y, -2.0, 2.0),
        "relu_again": torch.relu,
    }
    found = {name: compiled(Layer(f).eval(), (x,), folder / "unary") for name, f in functions.items()}
    for name, f in {"add": torch.add, "subtract": torch.sub, "add_again": torch.add}.items():
        found[name] = compiled(Layer(f).eval(), (x, other), folder / "binary")
    return found


def batches(folder: Path) -> dict[str, Any]:
    """Products of no matrix, and of two; each in two processes."""
    found = {}
    for n in (0, 2):
        factors = torch.ones(n, 8, 32), torch.ones(n, 32, 16)
        for when in ("first", "again"):
            found[f"{when}_{n}"] = compiled(torch.bmm, factors, folder / str(n))
    return found


SOURCE = """
import torch

def scaled(a, s=1):
    return a * {factor}

def {name}(a: torch.Tensor, b: torch.Tensor, s: int = 1) -> torch.Tensor:
    return {helper}(a) @ b
"""


def implementation(folder: Path, name: str, **values: str) -> Any:
    """A function of a module of its own, as a program would import it after an edit."""
    folder.mkdir(parents=True, exist_ok=True)
    module = f"{name}_{len(list(folder.iterdir()))}_{folder.parent.name}"
    text = SOURCE.format(name=name, **{"factor": "1", "helper": "scaled"} | values)
    (folder / f"{module}.py").write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        return getattr(importlib.import_module(module), name)
    finally:
        sys.path.remove(str(folder))


def split(a: torch.Tensor, b: torch.Tensor, s: int = 1) -> torch.Tensor:
    k = a.shape[1] // s
    return sum(a[:, i * k : (i + 1) * k] @ b[i * k : (i + 1) * k] for i in range(s))  # type: ignore[return-value]


def register(
    name: str, body: Any, configs: Sequence[CustomOpConfig] = (CustomOpConfig(split, s=4),), **options: Any
) -> Any:
    """A custom operator with decompositions; a later definition of the same name replaces the earlier one."""
    from torch._inductor.select_algorithm import ExternKernelChoice, extern_kernels

    if ExternKernelChoice._registry.pop(f"faident_{name}_fallback", None) is not None:
        delattr(extern_kernels, f"faident_{name}_fallback")  # it holds what the earlier definition was
    operator = torch.library.custom_op(f"faident::{name}", mutates_args=())(body)
    operator.register_fake(lambda a, b, s=1: a.new_empty(a.shape[0], b.shape[1]))
    random = lambda fake: torch.randn(tuple(fake.shape))  # noqa: E731
    generated = {"a": random, "b": random}
    register_custom_op_autotuning(operator, configs=list(configs), input_gen_fns=generated, **options)
    return operator


FACTORS = (torch.randn(16, 64), torch.randn(64, 16))


def product(name: str, code: Path, values: Mapping[str, str] = {}, **options: Any) -> Any:
    """A call of such an operator, whose body lies in this folder."""
    operator = register(name, implementation(code, name, **values), **options)
    return lambda a, b: operator(a, b)


def operators(folder: Path) -> dict[str, Any]:
    """One operator before and after its body was edited, or a function that the body calls."""
    found = {}
    edits: dict[str, dict[str, str]] = {"first": {}, "same": {}, "body": {"helper": "1.0 * scaled"}}
    edits["helper"] = {"factor": "(1 + 0)"}
    for name, values in edits.items():
        edited = product("edited", folder / "code", values)
        found[name] = compiled(edited, FACTORS, folder / "store")
    return found


def thresholds(folder: Path) -> dict[str, Any]:
    """A decomposition that has to be a thousand times as fast; a later process, and one without a threshold."""
    found = {}
    for name, threshold in {"first": 1000.0, "second": 1000.0, "none": 1.0, "third": 1000.0}.items():
        fast = product("threshold", folder / "code", min_speedup_threshold=threshold)
        found[name] = compiled(fast, FACTORS, folder / "store")
    return found


ASKED: list[int] = []


class Overriding(InductorChoices):
    """Takes the slowest choice."""

    def uuid(self) -> str:
        return "slowest"

    def override_best_choice(self, best_choice: Any, timings: dict[Any, float]) -> Any:
        ASKED.append(len(timings))
        return max(timings, key=timings.__getitem__)


def hooks(folder: Path) -> dict[str, Any]:
    """A user's hook that takes a choice by all times, in two processes; then none."""
    from torch._inductor.virtualized import V

    hooked, found = product("hooked", folder / "code"), {}
    for name in ("first", "second"):
        with V.set_choices_handler(Overriding()):
            found[name] = compiled(hooked, FACTORS, folder / "store")
    found["none"] = compiled(hooked, FACTORS, folder / "store")
    return {**found, "asked": ASKED}


def failures(folder: Path) -> dict[str, Any]:
    """A choice whose compiler was killed once, and one that does not compile."""
    found = {}
    for name, text in {
        "killed": "Killed signal terminated program cc1plus",
        "broken": "no such type",
    }.items():
        failed = product(name, folder / "code")
        failing = lambda choice, t=text: RuntimeError(f"CompileError: {t}") if "split" in choice else None  # noqa: E731
        with clock(fails=failing):
            first = compiled(failed, FACTORS, folder / name)
        found[name] = {"first": first, "again": compiled(failed, FACTORS, folder / name)}
    return found


def foreign_times(folder: Path) -> dict[str, Any]:
    """Times of Inductor's own cache that nobody of us has taken; then the same store with empty caches."""
    foreign = product("foreign", folder / "code")
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(foreign, options=TUNED)(*FACTORS)
    found = {"obeyed": compiled(foreign, FACTORS, folder / "store", shared=True)}
    return {**found, "measured": compiled(foreign, FACTORS, folder / "store")}


def disturbed(folder: Path) -> dict[str, Any]:
    """Each call of a choice is interrupted by the scheduler, as beside busy processes; then none is."""
    import resource

    from forecast_integrations.inductor import choice_timing

    slow = product("disturbed", folder / "code")
    counts = iter(range(10**9))
    usage = resource.getrusage
    resource.getrusage = lambda who: type("", (), {"ru_nivcsw": next(counts)})()
    choice_timing._TURNS_S = 0.2
    try:
        beside = compiled(slow, FACTORS, folder / "store")
    finally:
        resource.getrusage = usage
    choice_timing._TURNS_S = 5.0
    return {"beside": beside, "alone": compiled(slow, FACTORS, folder / "store")}


def relu_of_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.bmm(a, b))


def compile_once(folder: Path) -> dict[str, Any]:
    """Compile one graph under the caches and variables of this process.

    The variable STEP is `NAME` or `NAME:INPUT`: artifacts of the step INPUT are loaded, and its own are saved as NAME,
    which begins with `served` where the service is on.
    """
    folder = folder.parent
    name, _, given = os.environ["STEP"].partition(":")
    if given:
        torch.compiler.load_cache_artifacts((folder / given).read_bytes())
    factors = torch.ones(3, 8, 32), torch.ones(3, 32, 16)
    served = (
        forecast_autotune.enable_torch_compile(store=folder / f"store {name}")
        if name.startswith("served")
        else None
    )
    with torch.no_grad():
        torch.compile(relu_of_product, options=TUNED)(*factors)
    if artifacts := torch.compiler.save_cache_artifacts():
        (folder / name).write_bytes(artifacts[0])
    return {
        "precompiled": counters["dynamo_cache"]["dynamo_cache_hit"],
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
        "operations": 0 if served is None else served.session.tally.operations,
        "said": [] if served is None else served.session.warn_once.messages,
    }


def main() -> None:
    folder = Path(sys.argv[1])
    summary.LISTENERS.append(lambda label, decision: DECIDED.append(decision))
    print(json.dumps({name: globals()[name](folder / name) for name in sys.argv[2:]}))


if __name__ == "__main__":
    main()
