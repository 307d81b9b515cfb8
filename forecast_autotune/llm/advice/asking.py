"""Asking for advice: the question, one chance to mend an answer that is out of the language, and revision.

Takes a model of any kind as a function from a prompt to texts; nothing is asked in a launch's way.
"""

from __future__ import annotations

from collections.abc import Sequence

from forecast_autotune.llm.advice.checks import check_function
from forecast_autotune.llm.advice.language import parse_cost_function
from forecast_autotune.llm.advice.question import (
    ADVICE_VERSION,
    AdviceSample,
    advice_prompt,
    cost_function_text,
)
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.llm.advice.subject import AdviceError
from forecast_autotune.llm.writers import TextGenerator
from forecast_autotune.records import Kernel

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
    return _asked(generate, kernel, samples, advice_prompt(samples, source), model, at, "written blind")


def revise_advice(
    generate: TextGenerator,
    advice: Advice,
    kernel: Kernel,
    samples: Sequence[AdviceSample],
    measured: Sequence[tuple[str, float, float]],
    *,
    source: str = "",
    at: str = "",
) -> Advice:
    """The advice corrected by its author, who is shown what the first measurements contradicted.

    `measured`: candidate as text, and log2 slow-down over the fastest measured, as forecast and as measured.
    Raises as `ask_for_advice` does.
    """
    rows = [
        f"- {shown}: forecast {2.0**said:.2f}x the fastest, measured {2.0**true:.2f}x"
        for shown, said, true in measured
    ]
    text = "\n".join(
        [
            advice_prompt(samples, source),
            "Your cost function was:\n",
            f"```python\n{advice.text.strip()}\n```",
            "These candidates were measured at size 1:",
            *rows,
            "Say in a comment what the measurements contradict, and answer with the corrected module.",
        ]
    )
    return _asked(
        generate, kernel, samples, text, advice.model, at, f"revised after {len(rows)} measurements"
    )


def _asked(
    generate: TextGenerator,
    kernel: Kernel,
    samples: Sequence[AdviceSample],
    prompt: str,
    model: str,
    at: str,
    provenance: str,
) -> Advice:
    asked, trouble = prompt, "there was no answer"
    for _ in range(ATTEMPTS):
        texts = generate(asked, 1)
        if not texts:
            break
        text = cost_function_text(texts[0])
        try:
            check_function(parse_cost_function(text), samples)
        except AdviceError as error:
            trouble = str(error)
            asked = f"{prompt}\nYour last answer was refused: {error}\nAnswer again with the whole module.\n"
            continue
        return Advice(kernel.name, kernel.source_sha256, text, model, ADVICE_VERSION, at, provenance)
    raise AdviceError(f"no cost function of {kernel.name}: {trouble}")
