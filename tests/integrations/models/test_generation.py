"""Texts of a model in this process: callers take turns, and each gets and pays for its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from forecast_autotune.errors import SettingsError
from forecast_autotune.llm.backend import LLMError, Usage
from forecast_integrations.models.factory import text_generator
from forecast_integrations.models.transformers.generation import LocalGenerator
from forecast_integrations.models.transformers.loading import LoadedModel, ModelSource
from tests.integrations.models import tiny_models

LONG_S = 300.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.saved(tmp_path_factory.mktemp("models"), "qwen2")


class Told(LocalGenerator):
    """A model whose texts repeat their prompts, and which notes the rows of its passes."""

    fails: Exception | None = None

    def __init__(self, model: str, **options: Any) -> None:
        self.passes: list[list[str]] = []
        self.heard: list[Usage] = []
        super().__init__(
            ModelSource(model, device="cpu"), timeout_s=LONG_S, on_usage=self.heard.append, **options
        )

    def run_pass(self, loaded: LoadedModel, prompts: Sequence[str]) -> list[tuple[str, int, int]]:
        self.passes.append(list(prompts))
        if self.fails is not None:
            raise self.fails
        return [(f"after {p}", len(p), 7) for p in prompts]


def together(write: LocalGenerator, asked: Sequence[tuple[str, int]]) -> list[list[str] | Exception]:
    """What callers get who ask at once."""
    found: list[list[str] | Exception] = [[]] * len(asked)

    def ask(number: int, prompt: str, n: int) -> None:
        try:
            found[number] = write(prompt, n)
        except LLMError as error:
            found[number] = error

    threads = [threading.Thread(target=ask, args=(i, *one)) for i, one in enumerate(asked)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    return found


def test_callers_take_turns_and_get_texts_of_their_own(model: str) -> None:
    write = Told(model)
    assert together(write, [("a", 2), ("bb", 1), ("ccc", 3)]) == [
        ["after a"] * 2,
        ["after bb"],
        ["after ccc"] * 3,
    ]
    assert sorted(map(sorted, write.passes)) == [["a", "a"], ["bb"], ["ccc", "ccc", "ccc"]]
    heard = sorted((u.prompt_tokens, u.output_tokens) for u in write.heard)
    assert heard == [(1, 14), (2, 7), (3, 21)]


def test_after_a_failure_the_next_call_is_served(model: str) -> None:
    write = Told(model)
    write.fails = LLMError("the model failed")
    found = together(write, [("a", 1), ("b", 1)])
    assert all(isinstance(one, LLMError) for one in found)
    write.fails = None
    assert write("c", 1) == ["after c"]


def test_a_pass_that_needs_too_much_memory_is_halved(model: str) -> None:
    write = Told(model)

    def short(loaded: LoadedModel, prompts: Sequence[str]) -> list[tuple[str, int, int]]:
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("out of memory")
        write.passes.append(list(prompts))
        return [(p, 1, 1) for p in prompts]

    write.run_pass = short  # type: ignore[method-assign]
    assert write("x", 5) == ["x"] * 5
    assert [len(p) for p in write.passes] == [2, 1, 2]

    def none(loaded: LoadedModel, prompts: Sequence[str]) -> list[tuple[str, int, int]]:
        raise torch.OutOfMemoryError("out of memory")

    write.run_pass = none  # type: ignore[method-assign]
    with pytest.raises(LLMError, match="not enough memory"):
        write("x", 2)


def test_a_model_that_cannot_be_loaded_is_told_to_each_caller(tmp_path: Path) -> None:
    write = text_generator(f"transformers:{tmp_path / 'none'}")
    for _ in range(2):
        with pytest.raises(LLMError, match="no tokenizer at"):
            write("x", 1)


def test_texts_are_drawn_and_what_they_cost_is_told(model: str) -> None:
    heard: list[Usage] = []
    write = text_generator(f"transformers:{model}?device=cpu&max_tokens=9", on_usage=heard.append)
    texts = write("kernel", 4)
    assert len(set(texts)) > 1
    assert (heard[0].requests, heard[0].prompt_tokens > 0) == (1, True)
    assert 4 <= heard[0].output_tokens <= 4 * 9
    with pytest.raises(SettingsError, match="top_p"):
        text_generator(f"transformers:{model}?top_p=1")


def test_a_model_with_a_chat_template_answers_and_another_one_goes_on(tmp_path: Path) -> None:
    folder = tiny_models.saved(tmp_path / "chats", "qwen2")
    write = LocalGenerator(ModelSource(folder, device="cpu"), timeout_s=LONG_S, temperature=0.0, max_tokens=4)
    write("kernel", 1)
    seen: list[Any] = []
    tokenizer = write._loaded.tokenizer
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
    generate = write._loaded.model.generate

    def noted(**given: Any) -> Any:
        seen.append(tokenizer.decode(given["input_ids"][0]))
        return generate(**given)

    write._loaded.model.generate = noted
    write("kernel", 1)
    tokenizer.chat_template = None
    write("kernel", 1)
    assert seen == ["<user>kernel<answer>", "kernel"]
