"""One local model for many processes: a small server whose waiting requests are written in one pass.

    python -m benchmarks.lib.model_server --model "FOLDER?temperature=0.7&max_tokens=1024" --port-file F --log LOG

Answers `/WHO/v1/chat/completions` on 127.0.0.1 with what the product's own writer writes (`llm.local`). What
is drawn and how long texts may be is said by the model's specification here, not by requests. Each text
becomes a line of the log: who asked, when, what it cost, and the text. The port is in its file once the model
is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.lib.result_files import say
from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.llm.backend import Usage
from forecast_autotune.llm.writers import TextGenerator, UsageCallback
from forecast_integrations.models.factory import text_generator

PATH = "/v1/chat/completions"


class ModelServer(ThreadingHTTPServer):
    """Serves a writer, on any free port."""

    daemon_threads = True
    request_queue_size = 256
    """All proposers of all searches ask at once: a short queue would turn some away for a second."""

    def __init__(self, model: str, log: Path) -> None:
        super().__init__(("127.0.0.1", 0), _CompletionHandler)
        self._heard, self._mutex, self._log = threading.local(), threading.Lock(), log
        self._write = opened(model, self._hear)

    def write(self, who: str, prompt: str) -> tuple[str, Usage]:
        """One text, logged. Raises what the writer raises."""
        begin = time.time()
        (text,) = self._write(prompt, 1)
        usage: Usage = self._heard.usage
        row = {
            "who": who,
            "begin": begin,
            "end": time.time(),
            "prompt_tokens": usage.prompt_tokens,
            "output_tokens": usage.output_tokens,
            "text": text,
        }
        with self._mutex, self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return text, usage

    def _hear(self, usage: Usage) -> None:
        self._heard.usage = usage


def opened(model: str, told: UsageCallback) -> TextGenerator:
    """The product's writer of a local model; `model` is what follows `transformers:` in a specification."""
    return text_generator(f"transformers:{model}", told=told)


class _CompletionHandler(BaseHTTPRequestHandler):
    server: ModelServer

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size))
        if not self.path.endswith(PATH):
            self._reply(404, {"error": f"only {PATH} is served"})
            return
        try:
            text, usage = self.server.write(
                self.path.removesuffix(PATH).strip("/"), body["messages"][-1]["content"]
            )
        except ForecastAutotuneError as error:
            self._reply(500, {"error": str(error)})
            return
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        used = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.output_tokens}
        self._reply(200, {"choices": [choice], "usage": used})

    def _reply(self, status: int, data: Mapping[str, Any]) -> None:
        raw = json.dumps(data).encode()
        # A search whose time is up does not wait for its last texts.
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the log has what matters."""


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", required=True, metavar="FOLDER[?OPTIONS]")
    made.add_argument("--port-file", type=Path, required=True)
    made.add_argument("--log", type=Path, required=True)
    a = made.parse_args()
    server = ModelServer(a.model, a.log)
    begin = time.monotonic()
    server.write("warm-up", "Say yes.")
    say(f"the model was loaded and wrote its first text after {time.monotonic() - begin:.1f} s")
    part = a.port_file.with_name(f".{a.port_file.name}.part")
    part.write_text(str(server.server_address[1]))
    part.replace(a.port_file)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
