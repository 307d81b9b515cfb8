"""The code blocks of README.md and docs/**.md run, and print what the pages say.

Every page runs in a process and an empty directory of its own, from top to bottom, with an empty store:

| fence | what happens |
|---|---|
| `python` | executed; names stay for the page's later blocks. A `text` fence right below is its output |
| `console` | lines after `$ ` are executed by bash; the lines below each are its output |
| `bash` | executed by bash; must end with status 0 |
| any, with `title="NAME"` | written to NAME in the page's directory instead, with the files that it includes |
| `python` holding `--8<--` | a file of docs/examples, which test_examples.py runs |
| `json`, `toml` | parsed |

Kernels meet the null device (`forecast_integrations.triton.null_device`): they are really compiled, and only their
times are made up. Tensors that ask for `device="cuda"` lie in host memory.

Outputs are compared line by line: every line that a page shows must be printed, in this order. Numbers, bars and spaces
may differ; `...` stands for anything. Warnings, which go to stderr, are not compared.

A comment right above a fence says that it is not run, and why:

    <!-- not run: downloads a model -->

It is checked all the same: Python and shell syntax, and the options of every `forecast-autotune` command.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from sybil import Document, Example, Region, Sybil
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGE_LIMIT_S = 300
"""Seconds after which a page counts as hung, and is ended with all that it started."""

_FENCES = RawFencedCodeBlockLexer(re.compile(r"(?P<language>\w*)(?P<rest>.*)\n"))
_TITLE = re.compile(r'title="([^"]+)"')
_INCLUDED = re.compile(r'--8<-- "([^":]+)"\n')
_REASON = re.compile(r"<!--\s*not run:\s*\S.*?-->|<!-- test-command -->")
_NUMBER = re.compile(r"\d[\d,.:]*(?:e[+-]?\d+)?(?:T[\d:+]+)?(?: (?:ns|µs|us|ms|s|min|MB|KB|kB)\b)?")
_BARS = re.compile("[\u2581-\u258f\u2500-\u257f]+")
_SAVED = re.compile(", about [^,;]* saved(?=;|$)")
"""Told only where something was: not on a machine that was busy meanwhile."""
_EXACT = re.compile("\u2502 (?:problems|measured|regret) ")
"""Lines whose numbers are the same on every machine."""
_ANYWHERE = "forecast-autotune replay"
"""Seconds of what ships alone, whatever the page: run once."""


@dataclass
class Block:
    """One fence of a page."""

    language: str
    text: str
    title: str = ""
    is_run: bool = True
    output: str | None = None
    """The text that a Python block has to print."""


def blocks_of(document: Document) -> Iterator[Region]:
    """The fences of a page, in order. Raises ValueError for one that is not closed."""
    above: Region | None = None
    for region in _FENCES(document):
        language, text = region.lexemes["language"], str(region.lexemes["source"])
        if not document.text[: region.end].endswith("`"):
            raise ValueError(f"{document.path}: a fence is not closed")
        gap = document.text[above.end if above else 0 : region.start]
        if language == "text" and above and not gap.strip() and above.parsed.language == "python":
            above.parsed.output = text
        title = _TITLE.search(region.lexemes["rest"])
        comment = gap.rstrip().rpartition("\n")[2]
        is_run = not _REASON.search(comment)
        above = Region(
            region.start, region.end, Block(language, text, title[1] if title else "", is_run), evaluate
        )
        yield above


def evaluate(example: Example) -> str | None:
    """Do what the module's docstring says; what is wrong, or None."""
    block: Block = example.parsed
    if block.title and block.is_run:
        target = Path(block.title)
        target.parent.mkdir(parents=True, exist_ok=True)
        whole = _INCLUDED.sub(lambda m: (ROOT / m[1]).read_text(encoding="utf-8"), block.text)
        target.write_text(whole, encoding="utf-8")
    elif "--8<--" in block.text:
        named = re.findall(r'--8<-- "([^":]+)', block.text)
        absent = [n for n in named if not (ROOT / n).is_file() and not (ROOT / "docs" / n).is_file()]
        return f"no such file: {', '.join(absent)}" if absent else None
    elif block.language in ("python", "bash", "console"):
        if not block.is_run:
            return check_unrun(block)
        return run_python(block, example) if block.language == "python" else run_shell(block)
    elif block.is_run and block.language == "json":
        for text in block.text.splitlines() if block.text.startswith('{"') else [block.text]:
            json.loads(text)
    elif block.is_run and block.language == "toml":
        tomllib.loads(block.text)
    return None


def run_python(block: Block, example: Example) -> str | None:
    # A real file: Triton reads the source text of kernels.
    file = Path.cwd() / f"{Path(example.path).stem}_line_{example.line}.py"
    file.write_text(block.text, encoding="utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block.text, str(file), "exec"), example.namespace)
    if block.output is not None and (line := missing_line(block.output, printed.getvalue())) is not None:
        return f"the output has no line\n    {line}\nbut is\n{printed.getvalue()}"
    return None


def run_shell(block: Block) -> str | None:
    if block.language == "bash":
        status, out = bash(block.text)
        return f"status {status}:\n{out[-2000:]}" if status else None
    for part in re.split(r"^\$ ", block.text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        status, out = bash(command)
        line = missing_line(expected, out)
        if line is not None:
            return f"`{command}` (status {status}) printed no line\n    {line}\nbut\n{out[-4000:]}"
        if status and not expected.strip():
            return f"`{command}` ended with status {status}:\n{out[-2000:]}"
    return None


def bash(command: str) -> tuple[int, str]:
    kept = Path(os.environ["SHARED"], "replay")
    if command == _ANYWHERE and kept.is_file():
        return 0, kept.read_text(encoding="utf-8")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if command == _ANYWHERE and not done.returncode:
        kept.write_text(done.stdout + done.stderr, encoding="utf-8")
    return done.returncode, done.stdout + done.stderr


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
    """Return what is wrong with a block that is not run; None if nothing is."""
    if block.language == "python":
        try:
            ast.parse(block.text)
        except SyntaxError as error:
            return f"no Python: {error}"
        return None
    lines = block.text.replace("\\\n", " ").splitlines()
    commands = lines if block.language == "bash" else [line[2:] for line in lines if line.startswith("$ ")]
    done = subprocess.run(["bash", "-n"], input="\n".join(commands), capture_output=True, text=True)
    if done.returncode:
        return f"no shell: {done.stderr}"
    return next(filter(None, map(check_options, commands)), None)


def check_options(command: str) -> str | None:
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


@contextlib.contextmanager
def stand_in_for_a_gpu() -> Iterator[None]:
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


def run_page(page: Path, directory: Path, shared: Path, answer: Connection) -> None:
    """Run one page, and send what is wrong; to be called in a process of its own."""
    os.setsid()  # so that it can be ended with its children
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FORECAST_AUTOTUNE", "TRITON_"))}
    os.environ.clear()
    os.environ.update(kept)
    os.environ.update(
        FORECAST_AUTOTUNE_CACHE_DIR=str(directory / "store"),
        SHARED=str(shared),
        TRITON_CACHE_DIR=str(shared / "triton"),
        TRITON_DEFAULT_FP_FUSION="1",  # else Triton 3.9 warns in every process
        PATH=f"{shared / 'bin'}:{kept.get('PATH', '')}",
        COLUMNS="110",
        NO_COLOR="1",
    )
    os.chdir(directory)
    failures = []
    document = Sybil([blocks_of]).parse(page)
    document.namespace["__name__"] = "page"
    examples = list(document.examples())
    needs_device = any(e.parsed.is_run and e.parsed.language == "python" for e in examples)
    with stand_in_for_a_gpu() if needs_device else contextlib.nullcontext():
        for example in examples:
            try:
                example.evaluate()
            except (Exception, SystemExit) as error:
                failures.append("".join(traceback.format_exception(error)[-3:]))
    answer.send(failures)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`python` and `forecast-autotune` of this interpreter in `bin`, whatever the PATH has."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "bin").mkdir()
    for name, arguments in (("python", ""), ("forecast-autotune", "-m forecast_autotune ")):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        script.chmod(0o755)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="pages run in forked processes")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs_and_prints_what_the_page_says(page: Path, tmp_path: Path, shared: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "sybil", "torch", "forecast_integrations.triton.decorator"])
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=run_page, args=(page, tmp_path, shared, sender))
    child.start()
    sender.close()
    try:
        assert receiver.poll(PAGE_LIMIT_S), f"the page takes longer than {PAGE_LIMIT_S} s"
        failures = receiver.recv()  # EOFError where the process died
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid or 0, signal.SIGKILL)
        child.kill()
        child.join()
    assert not failures, "\n\n".join(failures)


def parsed(text: str) -> list[Block]:
    return [region.parsed for region in blocks_of(Document(text, "page.md"))]


def test_a_text_fence_below_python_is_its_output() -> None:
    page = "```python\nprint(1)\n```\n```text\n1\n```\n\nand\n\n```text\nno output\n```\n"
    first, second, third = parsed(page)
    assert (first.language, first.output) == ("python", "1\n")
    assert second.output is None
    assert third.text == "no output\n"


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("python", "def f(:\n"),
        ("bash", "if true; then\n"),
        ("bash", "forecast-autotune replay --no-such-option\n"),
        ("console", "$ forecast-autotune no-such-command\n"),
    ],
)
def test_a_block_that_is_not_run_is_still_checked(language: str, text: str) -> None:
    assert check_unrun(Block(language, text, is_run=False)) is not None


@pytest.mark.parametrize(
    ("expected", "actual", "missing"),
    [
        ("measured 3 of 12", "measured 8 of 12\n", None),
        ("0.33 s spent", "1.2 ms spent", None),
        ("a ███ b", "a ▏ b", None),
        ("first\n...\nlast", "first\nmore\nlast\n", None),
        ("spent 0.8 s...", "spent 1.2 s, 6 s saved", None),
        ("1 s spent, about 3 s saved; chose b", "16 s spent; chose b", None),
        ("1 s spent, about 3 s saved", "nothing spent", "1 s spent, about 3 s saved"),
        ("last\nfirst", "first\nlast\n", "first"),
        ("measured", "forecast\n", "measured"),
        ("│ measured  28 % of the configs │", "│ measured   28 % of the configs  │", None),
        ("│ measured  29 % of it │", "│ measured  28 % of it │", "│ measured  29 % of it │"),
        ("│ tuning  70.2 s │", "│ tuning   61.6 s   │", None),
    ],
)
def test_outputs_are_compared_up_to_numbers_and_bars(expected: str, actual: str, missing: str | None) -> None:
    assert missing_line(expected, actual) == missing


def test_a_fence_that_is_not_closed_is_an_error() -> None:
    with pytest.raises(ValueError, match="a fence is not closed"):
        parsed("```python\nprint(1)\n")


@pytest.mark.parametrize("row", ["measured", "regret"])
def test_the_readme_shows_what_a_replay_measures(row: str) -> None:
    assert f"\n│ {row} " in (ROOT / "README.md").read_text(encoding="utf-8")
