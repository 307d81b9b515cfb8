"""Run the code blocks of README.md and docs/**.md, and compare what they print.

    python docs/tools/blocks.py [PAGE.md ...] [--json]

Every page runs in a process and an empty directory of its own, from top to bottom, with an empty store:

| fence | what happens |
|---|---|
| `python` | executed; names stay for the page's later blocks. A `text` fence right below is its output |
| `console` | lines after `$ ` are executed by bash; the lines below each are its output |
| `bash` | executed by bash; must end with status 0 |
| any, with `title="NAME"` | written to NAME in the page's directory instead |
| `python` holding `--8<--` | a file of docs/examples, which tests/docs/test_examples.py runs |
| `json`, `toml` | parsed |

Kernels meet the null device (`forecast_integrations.triton.null_device`): they are really compiled, and only
their times are made up. Tensors that ask for `device="cuda"` lie in host memory.

Outputs are compared line by line: every line that a page shows must be printed, in this order. Numbers, bars
and spaces may differ; `...` stands for anything. Warnings, which go to stderr, are not compared.

A comment right above a fence says that it is not run, and why:

    <!-- not run: downloads a model -->

It is checked all the same: Python and shell syntax, and the options of every `forecast-autotune` command.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE_LIMIT_S = 300
"""Seconds after which a page counts as hung, and is ended with all that it started."""
PROCESSES = 2
"""Pages at a time."""

_FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<ticks>`{3,})(?P<language>\w*)(?P<rest>.*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_REASON = re.compile(r"<!--\s*not run:\s*(.+?)\s*-->")
_TEST_COMMAND = "<!-- test-command -->"
_NUMBER = re.compile(r"\d[\d,.:]*(?:e[+-]?\d+)?(?:T[\d:+]+)?(?: (?:ns|µs|us|ms|s|min|MB|KB|kB)\b)?")
_BARS = re.compile("[\u2581-\u258f\u2500-\u257f]+")
_SAVED = re.compile(", about [^,;]* saved(?=;|$)")
"""Told only where something was: not on a machine that was busy meanwhile."""
_EXACT = re.compile("\u2502 (?:problems|measured|regret) ")
"""Lines whose numbers are the same on every machine."""
_SAME_ON_ALL_PAGES = ("forecast-autotune replay",)
"""Commands that read nothing of a page's, and take seconds: run once for all of them."""


@dataclass(frozen=True)
class Block:
    """One fence of a page; `line` is the number of its opening line."""

    line: int
    language: str
    text: str
    title: str = ""
    reason: str = ""
    """Why it is not run; empty for one that is."""
    output: str | None = None
    """What a Python block has to print."""

    @property
    def is_example(self) -> bool:
        """Whether it includes a file of docs/examples."""
        return "--8<--" in self.text


@dataclass
class PageReport:
    """What became of one page's blocks."""

    page: str
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def pages() -> list[Path]:
    """README.md and every page of the site."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(text: str) -> list[Block]:
    """The fences of a page, in order. Raises ValueError for one that is not closed."""
    lines, number = text.splitlines(), 0
    found: list[Block] = []
    last_end = -1
    while number < len(lines):
        match = _FENCE.match(lines[number])
        if match is None or not match["ticks"]:
            number += 1
            continue
        begin, closing, indent = number, match["ticks"], match["indent"]
        number += 1
        body = []
        while number < len(lines) and lines[number].strip() != closing:
            body.append(lines[number].removeprefix(indent))
            number += 1
        if number == len(lines):
            raise ValueError(f"line {begin + 1}: the fence is not closed")
        above = [line for line in lines[max(0, begin - 3) : begin] if line.strip()]
        comment = above[-1].strip() if above else ""
        reason = _REASON.search(comment)
        title = _TITLE.search(match["rest"])
        block = Block(
            begin + 1,
            match["language"],
            "\n".join(body) + "\n",
            title[1] if title else "",
            "the test suite itself" if comment == _TEST_COMMAND else reason[1] if reason else "",
        )
        directly = found and not any(line.strip() for line in lines[last_end + 1 : begin])
        if block.language == "text" and directly and found[-1].language == "python":
            found[-1] = Block(**{**asdict(found[-1]), "output": block.text})
        found.append(block)
        last_end = number
        number += 1
    return found


def comparable(line: str) -> str:
    """A line of output without what differs from run to run: bars, spaces, and mostly numbers with their units."""
    plain = _SAVED.sub("", _BARS.sub("", line).replace("…", "").rstrip())
    return " ".join((plain if _EXACT.match(line) else _NUMBER.sub("0", plain)).split())


def missing_line(expected: str, actual: str) -> str | None:
    """The first expected line that the output does not have in its place; None when all are there."""
    rest = iter([comparable(line) for line in actual.splitlines()])
    for line in expected.splitlines():
        wanted = comparable(line)
        pattern = re.compile(".*".join(map(re.escape, wanted.split("..."))))
        if wanted and wanted != "..." and not any(pattern.fullmatch(printed) for printed in rest):
            return line
    return None


def check_unrun(block: Block) -> str | None:
    """What is wrong with a block that is not run; None if nothing is."""
    if block.language == "python":
        try:
            ast.parse(block.text)
        except SyntaxError as error:
            return f"no Python: {error}"
    if block.language in ("bash", "console"):
        commands = shell_commands(block)
        done = subprocess.run(["bash", "-n"], input="\n".join(commands), capture_output=True, text=True)
        if done.returncode:
            return f"no shell: {done.stderr}"
        for command in commands:
            if problem := _check_options(command):
                return problem
    return None


def shell_commands(block: Block) -> list[str]:
    """The commands of a `bash` or `console` block, continued lines joined."""
    text = block.text.replace("\\\n", " ")
    if block.language == "bash":
        return text.splitlines()
    return [line[2:] for line in text.splitlines() if line.startswith("$ ")]


def _check_options(command: str) -> str | None:
    """Whether the command line's own grammar takes what a page says."""
    from forecast_autotune.commands import grammar
    from forecast_autotune.commands.output import UsageError
    from forecast_autotune.commands.process import split_run

    for part in re.split(r"&&|\|\||;|\|", command.split(" #")[0]):
        try:
            words = shlex.split(part, comments=True)
        except ValueError:
            continue  # a quote that holds one of the separators
        while words and re.match(r"^[A-Z_]+=", words[0]):
            del words[0]
        if not words or Path(words[0]).name != "forecast-autotune":
            continue
        arguments = words[1:]
        if ">" in arguments:
            arguments = arguments[: arguments.index(">")]
        ours = split_run(arguments)[0] if arguments[:1] == ["run"] else arguments
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                grammar.build().parse_args(ours)
        except SystemExit:
            continue  # --help and --version
        except UsageError as error:
            return f"`{part.strip()}`: {error}"
    return None


def run_page(path: Path, directory: Path) -> PageReport:
    """Run one page in this process; to be called in a process of its own."""
    report = PageReport(str(path.relative_to(ROOT)))
    counts: Counter[str] = Counter()
    begin = time.perf_counter()
    namespace: dict[str, Any] = {"__name__": "page"}
    try:
        found = blocks_of(path.read_text(encoding="utf-8"))
    except ValueError as error:
        report.failures.append(f"{report.page}: {error}")
        return report
    for block in found:
        kind, failure = _treat(block, path, directory, namespace)
        if kind:
            counts[kind] += 1
        if failure:
            report.failures.append(f"{report.page}:{block.line}: {failure}")
    report.counts, report.seconds = dict(counts), time.perf_counter() - begin
    return report


def _treat(block: Block, path: Path, directory: Path, namespace: dict[str, Any]) -> tuple[str, str | None]:
    """What kind of treatment a block got, and what went wrong."""
    if block.title and not block.reason:
        target = directory / block.title
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(block.text, encoding="utf-8")
        return "files", None
    if block.is_example:
        named = re.findall(r'--8<-- "([^":]+)', block.text)
        absent = [
            name for name in named if not (ROOT / name).is_file() and not (ROOT / "docs" / name).is_file()
        ]
        return "examples", f"no such file: {', '.join(absent)}" if absent else None
    if block.reason:
        return (
            ("not run", check_unrun(block)) if block.language in ("python", "bash", "console") else ("", None)
        )
    if block.language == "python":
        return "python", _run_python(block, path, directory, namespace)
    if block.language in ("bash", "console"):
        return block.language, _run_shell(block, directory)
    try:
        if block.language == "json":
            for line in block.text.splitlines() if block.text.startswith('{"') else [block.text]:
                json.loads(line)
        elif block.language == "toml":
            tomllib.loads(block.text)
        else:
            return "", None
    except ValueError as error:
        return "data", f"does not parse: {error}"
    return "data", None


def _run_python(block: Block, path: Path, directory: Path, namespace: dict[str, Any]) -> str | None:
    # A real file: Triton reads the source text of kernels.
    file = directory / f"{path.stem}_line_{block.line}.py"
    file.write_text(block.text, encoding="utf-8")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(block.text, str(file), "exec"), namespace)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        trace = "".join(traceback.format_exception(error)[-3:])
        return f"the block raised:\n{trace}"
    if block.output is not None and (line := missing_line(block.output, printed.getvalue())) is not None:
        return f"the output has no line\n    {line}\nbut is\n{printed.getvalue()}"
    return None


def _run_shell(block: Block, directory: Path) -> str | None:
    if block.language == "bash":
        status, out = _bash(block.text, directory)
        return f"status {status}:\n{out[-2000:]}" if status else None
    for part in re.split(r"^\$ ", block.text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        status, out = _bash(command, directory)
        line = missing_line(expected, out)
        if line is not None:
            return f"`{command}` (status {status}) printed no line\n    {line}\nbut\n{out[-4000:]}"
        if status and not expected.strip():
            return f"`{command}` ended with status {status}:\n{out[-2000:]}"
    return None


def _bash(command: str, directory: Path) -> tuple[int, str]:
    if command.strip() not in _SAME_ON_ALL_PAGES:
        return _run_bash(command, directory)
    kept = directory.parent / f"command_{_SAME_ON_ALL_PAGES.index(command.strip())}.json"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.is_file():
            kept.write_text(json.dumps(_run_bash(command, directory)), encoding="utf-8")
    status, printed = json.loads(kept.read_text(encoding="utf-8"))
    return status, printed


def _run_bash(command: str, directory: Path) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout + done.stderr


def _environment(directory: Path, shared: Path) -> dict[str, str]:
    """Of a page: nothing of ours that the caller set, and an empty store."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FORECAST_AUTOTUNE", "TRITON_"))}
    return {
        **kept,
        "FORECAST_AUTOTUNE_CACHE_DIR": str(directory / "store"),
        "TRITON_CACHE_DIR": str(shared / "triton"),
        "TRITON_DEFAULT_FP_FUSION": "1",  # else Triton 3.9 warns in every process
        "PATH": f"{shared / 'bin'}:{kept.get('PATH', '')}",
        "COLUMNS": "110",
        "NO_COLOR": "1",
    }


def _write_commands(folder: Path) -> None:
    """`python` and `forecast-autotune` of this interpreter, wherever those of the PATH belong to."""
    folder.mkdir()
    for name, arguments in (("python", ""), ("forecast-autotune", "-m forecast_autotune ")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        script.chmod(0o755)


@contextlib.contextmanager
def _stand_in_for_a_gpu() -> Iterator[None]:
    from torch.overrides import TorchFunctionMode

    from forecast_integrations.triton.null_device import null_device

    class OnHost(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            given = dict(kwargs or {})
            if str(given.get("device", "")).startswith("cuda"):
                given["device"] = "cpu"
            return func(*args, **given)

    with null_device(), OnHost():
        yield


def _in_child(path: Path, directory: Path, shared: Path, result: Path) -> int:
    """Fork a process for one page; its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()  # so that it can be ended with its children
        environment = _environment(directory, shared)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        with _stand_in_for_a_gpu() if "torch" in sys.modules else contextlib.nullcontext():
            result.write_text(json.dumps(asdict(run_page(path, directory))), encoding="utf-8")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


def run_pages(chosen: Sequence[Path]) -> list[PageReport]:
    """Run pages in processes of their own, a few at a time; reports in the order of the pages."""
    needs_torch = any(
        b.language == "python" and not b.reason and not b.is_example
        for p in chosen
        for b in blocks_of(p.read_text(encoding="utf-8"))
    )
    if needs_torch:  # once, before the forks
        import torch  # noqa: F401
        import triton  # noqa: F401

        import forecast_integrations.triton.decorator
        import forecast_integrations.triton.null_device  # noqa: F401
    with tempfile.TemporaryDirectory(prefix="forecast-autotune-docs-") as name:
        shared = Path(name)
        _write_commands(shared / "bin")
        results = {path: shared / f"{i}.json" for i, path in enumerate(chosen)}
        waiting, running = list(chosen), dict[int, float]()
        try:
            while waiting or running:
                while waiting and len(running) < PROCESSES:
                    path = waiting.pop(0)
                    directory = shared / f"page{len(waiting)}"
                    directory.mkdir()
                    running[_in_child(path, directory, shared, results[path])] = time.monotonic()
                time.sleep(0.02)
                for child, begin in list(running.items()):
                    if os.waitpid(child, os.WNOHANG)[0]:
                        del running[child]
                    elif time.monotonic() - begin > PAGE_LIMIT_S:
                        _end(child)
                        del running[child]
        finally:
            for child in running:
                _end(child)
        reports = []
        for path, result in results.items():
            if result.is_file():
                reports.append(PageReport(**json.loads(result.read_text(encoding="utf-8"))))
            else:
                page = str(path.relative_to(ROOT))
                reports.append(
                    PageReport(page, failures=[f"{page}: its process died, or took over {PAGE_LIMIT_S} s"])
                )
        return reports


def summary(reports: Sequence[PageReport]) -> str:
    """One line: how many blocks were run, and how many only checked."""
    total: Counter[str] = Counter()
    for report in reports:
        total.update(report.counts)
    run = total["python"] + total["console"] + total["bash"]
    return (
        f"{run + total['examples']} blocks executed ({total['python']} python, "
        f"{total['console'] + total['bash']} shell, {total['examples']} by tests/docs/test_examples.py), "
        f"{total['not run']} checked without running, {total['data']} parsed, {total['files']} files written"
    )


def main() -> int:
    """Run the pages named, or all; 1 if a block failed."""
    parser = argparse.ArgumentParser(description="Run the code blocks of README.md and docs/**.md.")
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--json", action="store_true", help="print the reports as one JSON list")
    options = parser.parse_args()
    chosen = [page.resolve() for page in options.pages] or pages()
    reports = run_pages(chosen)
    if options.json:
        print(json.dumps([asdict(r) for r in reports]))
    else:
        for report in reports:
            print(f"{report.seconds:6.1f} s  {report.page}  {report.counts or ''}")
            for failure in report.failures:
                print(f"  FAILED {failure}")
        print(summary(reports))
    return int(any(r.failures for r in reports))


if __name__ == "__main__":
    sys.exit(main())
