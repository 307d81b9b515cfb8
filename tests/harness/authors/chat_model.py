"""A chat model behind a real HTTP server that says what it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from tests.integrations.models.faulty_server import Handler


class StubModel:
    """Answers prompts with the given texts in turn, the last one again and again; None is an HTTP 500."""

    def __init__(self, *answers: str | None) -> None:
        self.answers = list(answers)
        self.prompts: list[str] = []
        self._mutex = threading.Lock()

    def __call__(self, path: str, body: Any) -> Callable[[Handler, Any], None]:
        with self._mutex:
            self.prompts.append(body["messages"][-1]["content"])
            text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

        def say(handler: Handler, _: Any) -> None:
            if text is None:
                handler.reply(500, b"{}")
                return
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 100, "completion_tokens": 20}
            handler.reply(200, json.dumps({"choices": [choice], "usage": usage}).encode())

        return say
