"""Asking for advice: the question, and one chance to mend an answer that is out of the language.

A cost function has to hold elsewhere as well: finite and positive at other sizes and configs, on two devices.

Takes a model of any kind as a function from a prompt to texts; nothing is asked in a launch's way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from forecast_autotune.features.devices import device_spec
from forecast_autotune.llm.advice.language import CostFunction, parse_cost_function
from forecast_autotune.llm.advice.question import (
    ADVICE_VERSION,
    AdviceSample,
    advice_prompt,
    cost_function_texts,
)
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.llm.advice.subject import AdviceError, AdviceSubject
from forecast_autotune.llm.backend import TextGenerator
from forecast_autotune.records import Argument, Device, Kernel

ATTEMPTS = 2
"""Answers to one question: a second one is shown what was wrong with the first."""


def ask_for_advice(
    generate: TextGenerator,
    kernel: Kernel,
    samples: Sequence[AdviceSample],
    *,
    source: str = "",
    model: str = "",
    at: str = "",
) -> Advice:
    """Advice on a kernel's source. Raises `AdviceError` where no answer is a cost function, and `LLMError`."""
    prompt = query = advice_prompt(samples, source)
    trouble, texts = "there was no answer", list[str]()
    for attempt in range(ATTEMPTS):
        answers = generate(query, 1)
        if not answers:
            break
        sound = []
        for text in cost_function_texts(answers[0], 1 + attempt):
            try:
                check_function(parse_cost_function(text), samples)
                sound.append(text)
            except AdviceError as error:
                trouble = str(error)
        texts = sound or texts
        if texts and not (trouble := contradiction(parse_cost_function(texts[0]), samples)):
            break
        again = _TWO if texts or _ELSEWHERE in trouble else "Answer again with the whole module."
        query = f"{prompt}\nYour last answer was refused: {trouble}\n{again}\n"
    if not texts:
        raise AdviceError(f"no cost function of {kernel.name}: {trouble}")
    text, *more = texts
    return Advice(
        kernel.name, kernel.source_sha256, text, model, ADVICE_VERSION, at, "written blind", tuple(more)
    )


_ELSEWHERE = "at other sizes"
_TWO = """Answer with two whole modules in two fenced blocks: the mended one, and one written independently of it, from
another belief of what decides. State in each SPREAD, its expected error, as wide as your doubt is."""


def contradiction(function: CostFunction, samples: Sequence[AdviceSample]) -> str:
    """How a cost function contradicts itself: most candidates take less time for four times the sizes; else empty."""
    for sample in samples:
        subject = AdviceSubject.of(sample.problem, sample.candidates, sample.grids)
        here, there = (
            function.evaluate(s).log2 for s in (subject, _resized_subject(subject, _four_times, 4.0))
        )
        if float(np.median(there - here)) < -0.1:
            return f"{_ELSEWHERE} (all extents times four) half of the candidates take less time than here"
    return ""


def _four_times(extent: int) -> int:
    return extent if extent <= _SMALLEST_SIZE else 4 * extent


_TRIALS = 16
"""Sizes that are drawn, each on every device."""
DEVICES = (Device("NVIDIA H200", arch="90"), Device("NVIDIA A100-SXM4-80GB", arch="80"))
MOST_SPREAD = 40.0
"""log2 of the slowest over the fastest candidate beyond which a cost function is out of its mind."""
_SMALLEST_SIZE = 8
"""Extents below are kinds (channels, flags) rather than sizes, and stay."""


def check_function(function: CostFunction, samples: Sequence[AdviceSample], seed: int = 0) -> None:
    """Evaluate a cost function where it was asked about and at sizes drawn around it, on two devices.

    Raises `AdviceError` saying where it failed. Sizes are scaled by powers of two, equal ones alike; launch grids
    grow by the same factors as the elements of all tensors do.
    """
    if not samples:
        raise AdviceError("a cost function is checked on at least one size")
    for sample in samples:
        subject = AdviceSubject.of(sample.problem, sample.candidates, sample.grids)
        costs = function.evaluate(subject)
        if len(costs.log2) > 1 and float(np.ptp(costs.log2)) > MOST_SPREAD:
            raise AdviceError(
                f"its slowest candidate would take 2^{float(np.ptp(costs.log2)):.0f} times as long as its fastest"
            )
    generator = random.Random(seed)
    for trial in range(_TRIALS):
        sample = samples[trial % len(samples)]
        subject = AdviceSubject.of(sample.problem, sample.candidates, sample.grids)
        draw = _scaled(subject, generator)
        for device in DEVICES:
            here = replace(draw, device=device_spec(device))
            shifts = {c.name: generator.uniform(-2.0, 2.0) for c in function.constants}
            try:
                function.evaluate(here, shifts)
            except AdviceError as error:
                sizes = ", ".join(f"{a.name}={a.value or list(a.shape)}" for a in draw.arguments.values())
                raise AdviceError(f"{_ELSEWHERE} ({sizes:.300}) on {device.name}: {error}") from error


def _scaled(subject: AdviceSubject, generator: random.Random) -> AdviceSubject:
    """The subject at other sizes."""
    factors: dict[int, int] = {}

    def size(extent: int) -> int:
        if extent <= _SMALLEST_SIZE:
            return extent
        if extent not in factors:
            factors[extent] = max(
                1, int(extent * 2.0 ** generator.randint(-3, 3)) + generator.choice((0, 0, 3))
            )
        return factors[extent]

    return _resized_subject(subject, size, 2.0 ** generator.randint(-3, 3))


def _resized_subject(subject: AdviceSubject, size: Callable[[int], int], more: float) -> AdviceSubject:
    """The subject with other extents, and `more` times as many programs along the grid's first axis."""
    arguments = {name: _resized(argument, size) for name, argument in subject.arguments.items()}
    first, *axes = subject.grid or (1.0,)
    grid = (np.maximum(1.0, np.floor(first * more)), *axes) if subject.grid else ()
    return replace(subject, arguments=arguments, grid=grid)


def _resized(argument: Argument, size: Callable[[int], int]) -> Argument:
    if argument.kind == "tensor":
        shape = tuple(size(n) for n in argument.shape)
        stride = tuple(s if s <= _SMALLEST_SIZE else size(s) for s in argument.stride)
        return replace(argument, shape=shape, stride=stride)
    value = argument.value
    if argument.kind == "scalar" and isinstance(value, int) and not isinstance(value, bool):
        return replace(argument, value=size(value))
    return argument
