"""The question that asks a language model for advice, and the cost function in its answer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from forecast_autotune.features.devices import DeviceSpec, device_spec
from forecast_autotune.records import LAUNCH_OPTIONS, Argument, Candidate, Problem

ADVICE_VERSION = "advice-2"
"""Version of the question whose answer is a cost function."""
MAX_SOURCE_CHARS = 24_000
MAX_PROBLEMS = 4
"""Sizes that are shown."""
MAX_VALUES = 24
"""Values of one meta-parameter that are shown."""
_SAMPLES = 6
"""Candidates that are shown with their launch grid."""
COMPILED = "compiled_"
"""Begins the names of facts that the compiler told, of one candidate."""
_FENCE = re.compile(r"```(?:python)?[ \t]*\n(.*?)```", re.DOTALL)


@cache
def language_text() -> str:
    """The part of the question that is the same for every kernel: the task and the language of the answer."""
    path = files("forecast_autotune") / "assets" / "prompts" / f"{ADVICE_VERSION}.md"
    return path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class AdviceSample:
    """One problem of a kernel, as it is described when advice is asked for."""

    problem: Problem
    candidates: Sequence[Candidate]
    grids: Mapping[Candidate, tuple[int, ...]]
    facts: Mapping[Candidate, Mapping[str, float]] = field(default_factory=dict)
    """Facts of some candidates' IR, by name."""


def advice_prompt(samples: Sequence[AdviceSample], source: str = "") -> str:
    """The question about a kernel whose problems these are; nothing that was measured is in it.

    `source` is the whole call tree as one module; by default what the problem's record has.
    """
    first = samples[0].problem
    text = source or first.kernel.source
    if len(text) > MAX_SOURCE_CHARS:
        half = MAX_SOURCE_CHARS // 2
        text = f"{text[:half]}\n# ... {len(text) - MAX_SOURCE_CHARS} characters left out ...\n{text[-half:]}"
    parts = [
        language_text(),
        f"Device: {first.device.name} (sm_{first.device.arch}): {_device_text(device_spec(first.device))}",
        f"Kernel `{first.kernel.name}`:\n\n```python\n{text.strip()}\n```",
        "Sizes it is called with:",
        *(
            f"{number}. {', '.join(map(_argument_text, s.problem.arguments))}"
            for number, s in enumerate(samples[:MAX_PROBLEMS], 1)
        ),
        "Candidates: " + _ranges_text([c for s in samples for c in s.candidates]),
        "Some of them at size 1: launch grid, and what the IR (before the compiler's back end) says of one program:",
        *_grid_texts(samples[0]),
    ]
    return "\n".join(parts) + "\n"


def cost_function_texts(answer: str, most: int = 1) -> list[str]:
    """The modules in an answer: its last fenced blocks with a `cost`, else all of it."""
    return [block for block in _FENCE.findall(answer) if "def cost(" in block][-most:] or [answer]


def _device_text(spec: DeviceSpec) -> str:
    return (
        f"{spec.multiprocessors} SMs, {spec.clock_ghz} GHz, memory {spec.memory_gb_s:.0f} GB/s, "
        f"L2 {spec.l2_bytes / 2**20:.0f} MiB, tensor cores {spec.tensor_tflops:.0f} TFLOP/s (fp16), "
        f"shared memory {spec.shared_memory_bytes} bytes per program"
    )


def _argument_text(argument: Argument) -> str:
    if argument.kind == "tensor":
        contiguous = _is_contiguous(argument)
        stride = "" if contiguous else f" stride {list(argument.stride)}"
        return f"{argument.name}: {argument.dtype}{list(argument.shape)}{stride}"
    if argument.kind == "none":
        return f"{argument.name}=None"
    return f"{argument.name}={argument.value}"


def _is_contiguous(argument: Argument) -> bool:
    strides = [math.prod(argument.shape[i + 1 :]) for i in range(len(argument.shape))]
    return list(argument.stride) == strides


def _ranges_text(candidates: Sequence[Candidate]) -> str:
    distinct = list(dict.fromkeys(candidates))
    values: dict[str, dict[str, None]] = {}
    for candidate in distinct:
        config = candidate.config
        for name, value in (*config.kwargs, *((o, getattr(config, o)) for o in LAUNCH_OPTIONS)):
            values.setdefault(name, {})[str(value)] = None
    texts = [
        f"{name} in {{{', '.join(sorted(result, key=_numeric)[:MAX_VALUES])}}}"
        for name, result in values.items()
        if len(result) > 1 or name not in LAUNCH_OPTIONS
    ]
    same = [
        f"{name}={next(iter(result))}"
        for name, result in values.items()
        if len(result) == 1 and name in LAUNCH_OPTIONS
    ]
    return f"{len(distinct)} configs; " + "; ".join(texts) + (f"; always {', '.join(same)}" if same else "")


def _numeric(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return math.inf, text


def _grid_texts(sample: AdviceSample) -> list[str]:
    step = max(1, len(sample.candidates) // _SAMPLES)
    with_facts = [c for c in sample.candidates if any(COMPILED in name for name in sample.facts.get(c, ()))]
    candidates = dict.fromkeys([*with_facts[:1], *list(sample.candidates)[::step]][:_SAMPLES])
    texts = []
    for candidate in candidates:
        grid = sample.grids.get(candidate) or sample.problem.grid
        facts = " ".join(f"{n}={value:.4g}" for n, value in sample.facts.get(candidate, {}).items())
        texts.append(
            f"- {candidate.config}: grid {'not known' if grid is None else list(grid)} {facts}".rstrip()
        )
    return texts
