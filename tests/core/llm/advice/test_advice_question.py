"""The question for advice: it tells the whole language, the kernel and its sizes, and no time."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from forecast_autotune.llm.advice.asking import ATTEMPTS, ask_for_advice
from forecast_autotune.llm.advice.expressions import ROOTS
from forecast_autotune.llm.advice.functions import OF_DEVICE, PURE
from forecast_autotune.llm.advice.language import MAX_CONSTANTS, MAX_TURNS
from forecast_autotune.llm.advice.question import (
    ADVICE_VERSION,
    MAX_SOURCE_CHARS,
    advice_prompt,
    cost_function_texts,
    language_text,
)
from forecast_autotune.llm.advice.subject import (
    DEVICE_ATTRIBUTES,
    TENSOR_ATTRIBUTES,
    AdviceError,
)
from forecast_autotune.records import LAUNCH_OPTIONS
from forecast_autotune.testing import example_table
from forecast_autotune.tuning.advice_samples import stored_samples
from tests.core.llm.advice.functions import BLOCKS, sample

HIDDEN = {"aligned"}
"""Attributes that are understood and not offered: a kernel's alignment seldom differs."""


def test_the_question_tells_the_whole_language() -> None:
    text = language_text()
    for name in (*PURE, *OF_DEVICE, *DEVICE_ATTRIBUTES, *LAUNCH_OPTIONS, "constant", "term", "same_binary"):
        assert re.search(rf"\b{name}\b", text), name
    for name in set(TENSOR_ATTRIBUTES) - HIDDEN:
        assert re.search(rf"\.{name}\b", text), name
    assert f"def cost({', '.join(ROOTS)})" in text
    for limit in (MAX_CONSTANTS, MAX_TURNS):
        assert re.search(rf"\b{limit}\b", text), limit


def test_the_question_offers_no_function_that_is_not_there() -> None:
    (line,) = [x for x in language_text().splitlines() if x.startswith("- Functions:")]
    offered = set(re.findall(r"[a-z]\w*", line.partition(":")[2].partition(";")[0]))
    assert offered <= set(PURE)


def test_the_question_shows_kernel_sizes_and_ranges() -> None:
    prompt = advice_prompt([sample(), sample(77)])
    assert prompt.startswith(language_text()[:40])
    assert "Device: NVIDIA H200 (sm_90): 132 SMs" in prompt
    assert "def rows(): ..." in prompt
    assert "1. x: float16[4096, 1024], n=1024, ACTIVATION=relu, bias=None" in prompt
    assert "2. x: float16[77, 1024]" in prompt
    assert "12 configs; BLOCK in {64, 128, 256, 1024}; num_warps in {2, 4, 8}; always num_stages=3" in prompt
    assert "grid [65536, 1, 1]" in prompt
    assert "@helper" in advice_prompt([sample()], "@helper\ndef rows(): ...")


def test_a_long_source_keeps_both_ends() -> None:
    prompt = advice_prompt([sample()], "first\n" + "x" * (2 * MAX_SOURCE_CHARS) + "\nlast")
    assert "first\n" in prompt
    assert "\nlast\n" in prompt
    assert "characters left out" in prompt


def test_no_time_is_in_a_question_about_recorded_problems() -> None:
    table = example_table()
    first, *others = table.measurements
    told = replace(first, extra={"registers": 40, "spills": 0, "shared": 1024})
    table = replace(table, measurements=[told, *others])
    slower = [
        replace(m, median_ms=None if m.median_ms is None else 3 * m.median_ms) for m in table.measurements
    ]
    other = replace(table, measurements=list(reversed(slower)))
    assert advice_prompt(stored_samples([table])) == advice_prompt(stored_samples([other]))
    prompt = advice_prompt(stored_samples([table])).removeprefix(language_text())
    assert not re.search(r"\b(ms|us|measured|fastest)\b", prompt)
    assert prompt.count("compiled_registers=40 compiled_spills=0 compiled_shared=1024") == 1


def test_the_module_in_an_answer() -> None:
    fenced = f"Thoughts.\n```python\nx = 1\n```\nfinal\n```python\n{BLOCKS}```\nThat is all."
    assert cost_function_texts(fenced) == [BLOCKS]
    assert cost_function_texts(BLOCKS, 2) == [BLOCKS]
    assert cost_function_texts(fenced + fenced, 2) == [BLOCKS] * 2


SHRINKING = "def cost(config, args, device, launch):\n    return 2 ** 60 / args.x.numel + config.num_warps\n"


@pytest.mark.parametrize("second", ["two", "one right", "none right"])
def test_a_function_that_contradicts_itself_at_other_sizes_is_asked_about_as_two(second: str) -> None:
    answers = {"two": [BLOCKS, BLOCKS], "one right": ["import os", BLOCKS], "none right": ["import os"] * 2}
    fenced = "\n".join(f"```python\n# def cost(\n{text}```" for text in answers[second])
    given, prompts = [SHRINKING, fenced], list[str]()

    def answer(prompt: str, n: int) -> list[str]:
        prompts.append(prompt)
        return [given[len(prompts) - 1]]

    advice = ask_for_advice(answer, sample().problem.kernel, [sample()])
    assert "at other sizes (all extents times four) half of the candidates take less" in prompts[1]
    assert "two whole modules in two fenced blocks" in prompts[1]
    assert (advice.text == SHRINKING) == (second == "none right")
    assert len(advice.others) == (second == "two")


def test_an_answer_that_is_refused_is_asked_about_once_more() -> None:
    prompts: list[str] = []
    kernel = sample().problem.kernel

    def answer(prompt: str, n: int) -> list[str]:
        prompts.append(prompt)
        return ["import os" if len(prompts) < ATTEMPTS else BLOCKS]

    advice = ask_for_advice(answer, kernel, [sample()], model="m", at="now")
    assert advice.text == BLOCKS
    assert (advice.model, advice.at, advice.version) == ("m", "now", ADVICE_VERSION)
    assert advice.source_sha256 == kernel.source_sha256
    assert "Your last answer was refused: line 1: a module holds" in prompts[1]
    with pytest.raises(AdviceError, match="no cost function of rows: there was no answer"):
        ask_for_advice(lambda prompt, n: [], kernel, [sample()])
    with pytest.raises(AdviceError, match="no cost function of rows: line 1"):
        ask_for_advice(lambda prompt, n: ["import os"], kernel, [sample()])
