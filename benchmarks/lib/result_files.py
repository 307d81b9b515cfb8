"""Options that every script takes, and the file that its result goes to.

A script that is started with `--null` does everything it would do on the GPU, compilation included,
on a null device whose times are invented: it shows that the script works, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import environment

_ALIKE = ("device", "torch", "triton", "python")
"""Fields of an environment that parts of one report have in common."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what every script takes: `--out FILE`, `--null`, and the children's own options."""
    command_line = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command_line.add_argument("--out", type=Path, help="the result file (JSON)")
    command_line.add_argument(
        "--null", action="store_true", help="dry run without a GPU; its times are invented"
    )
    command_line.add_argument("--child", default="", help=argparse.SUPPRESS)
    command_line.add_argument("--given", type=json.loads, default={}, help=argparse.SUPPRESS)
    return command_line


def parse_arguments(parser: argparse.ArgumentParser, *, on_host: bool = False) -> argparse.Namespace:
    """Parse; a run that is no child must say where its result goes, before it costs anything.

    Unless all of it is `on_host`, it also needs a CUDA device.
    """
    arguments = parser.parse_args()
    if not arguments.child and arguments.out is None:
        parser.error("--out FILE is required: a run that is not recorded is wasted")
    hostly = on_host or arguments.null or any(getattr(arguments, n, False) for n in ("stub_only", "fit_only"))
    if not hostly:
        import torch

        if not torch.cuda.is_available():
            parser.error("there is no CUDA device here; --null makes a dry run")
    return arguments


def say(text: str) -> None:
    """One line of progress, at once."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _option_to_json(value: Any) -> Any:
    """An option as JSON has it; files by their names, since their folders are this machine's affair."""
    if isinstance(value, Path):
        return value.name
    return [_option_to_json(v) for v in value] if isinstance(value, list) else value


def read_parts(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Results that were measured apart and are to be merged.

    Raises `SystemExit` where they are of several devices or releases, or some of them of a dry run.
    """
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    seen = {(part["null"], *(part["environment"].get(key) for key in _ALIKE)) for part in parts}
    if len(seen) > 1:
        raise SystemExit(f"parts of one report come from one environment, got {sorted(map(str, seen))}")
    return parts


def write_result(path: Path, data: Mapping[str, Any]) -> None:
    """Put a result into its file at once, so that nobody meets half of it. Raises `ValueError` for NaN."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


class ResultFile:
    """One result file, rewritten after every step, so that a run cut short leaves what it had."""

    def __init__(self, arguments: argparse.Namespace, claim: str, seed: int | None = None) -> None:
        hidden = ("out", "null", "child", "given", "numbers")
        given = {k: _option_to_json(v) for k, v in vars(arguments).items()}
        self.path: Path = arguments.out
        self.data: dict[str, Any] = {
            "claim": claim,
            "null": bool(getattr(arguments, "null", False)),
            "environment": environment(seed),
            "options": {k: v for k, v in given.items() if k not in hidden},
            "summary": None,
            "raw": {},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def add(self, name: str, value: Any) -> None:
        """Append one raw result under a name."""
        self.data["raw"].setdefault(name, []).append(value)
        self._write()

    def put(self, name: str, values: Sequence[Any]) -> None:
        """Have these raw results under a name, and no others."""
        self.data["raw"][name] = list(values)
        self._write()

    def finish(self, summary: dict[str, Any]) -> None:
        """Set the summary, and print it."""
        self.data["summary"] = summary
        self._write()
        print(json.dumps(summary, indent=1), flush=True)
        say(f"written: {self.path}")

    def _write(self) -> None:
        write_result(self.path, self.data)
