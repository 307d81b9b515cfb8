"""Commands without the packages that they need: the extra to install, and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forecast_autotune.records.table import write_tables
from forecast_autotune.store import Store
from forecast_autotune.testing import example_table

WITHOUT = """
import importlib.util, json, os, sys
from importlib.abc import MetaPathFinder
def lose(how, names):
    assert not names & {name.partition(".")[0] for name in sys.modules}, names
    class Refusing(MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in names:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    found = importlib.util.find_spec
    if how == "absent":
        importlib.util.find_spec = lambda name, package=None: (
            None if name.partition(".")[0] in names else found(name, package)
        )
    if how == "blocked":
        sys.modules.update(dict.fromkeys(names))
    else:
        sys.meta_path.insert(0, Refusing())
def run(folder, how, names, words):
    os.chdir(folder)
    lose(how, set(names.split(",")))
    for descriptor, name in ((1, "said.txt"), (2, "errors.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
    from forecast_autotune.commands import main
    return main(words)
cases = json.loads(sys.argv[1])
if len(cases) > 1:  # what all of them need, once
    import numpy, rich.console, rich.table
    from forecast_autotune.commands import main
    from forecast_autotune.commands import grammar, process
    grammar.build()
for folder, *case in cases:
    child = os.fork()
    if child == 0:
        os._exit(run(folder, *case))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(os.path.join(folder, "status.txt"), "w") as file:
        file.write(str(status))
"""
"""Three ways in which a package may not be there: not found, refused by a finder, or None in its place."""
SERVER = "http://127.0.0.1:9/v1?model=m"
TORCH = "https://pytorch.org/get-started"
KERNEL = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef fn(x):\n    tl.store(x, 1.0)\n"


def extra(name: str) -> str:
    return f"pip install 'forecast-autotune[{name}]'"


OURS = ("rich", "numpy")
"""What the command line itself needs: to be without it, Python must begin anew."""
CASES = [
    (["verify", "softmax", "torch_plain", "--device", "cpu"], "torch", TORCH),
    (["verify", "softmax", "--device", "cpu"], "torch,triton", TORCH),
    (["bench", "softmax", "torch_plain", "torch_plain", "--device", "cpu"], "torch", TORCH),
    (["search", "softmax", "--device", "cpu", "--out", "s"], "torch,triton", TORCH),
    (["search", "kernel.py:fn", "--out", "s"], "torch,triton", TORCH),
    (["variants", "kernel.py:fn", "--mechanical"], "torch", TORCH),
    (["variants", "kernel.py:fn", "--mechanical"], "triton", extra("triton")),
    (["advise", "kernel.py:fn", "--llm", "recorded:answers.jsonl"], "triton", extra("triton")),
    (["demo"], "torch,triton", "torch and triton"),
    (["run", "kernel.py"], "torch,triton", extra("triton")),
    (["import", "cache"], "torch,triton", "--device-name"),
    (["train", "data", "table.jsonl", "--out", "d"], "pyarrow", extra("train")),
    (["train", "surrogate", "--out", "m.npz"], "lightgbm,sklearn", extra("eval")),
    (["train", "llm", "run.toml"], "transformers", "extra"),
    (["train", "llm", "run.toml"], "torch", TORCH),
    (["train", "grpo", "run.toml"], "trl", extra("train")),
    (["eval", "--seeds", "1"], "lightgbm,sklearn", extra("eval")),
    (["llm", "ask", "--export", "q.jsonl", "table.jsonl"], "jinja2", extra("llm")),
    (["replay", "table.jsonl", "--llm", SERVER], "jinja2", extra("llm")),
    (["advise", "--stored", "--llm", SERVER], "openai", extra("llm")),
    (["variants", "kernel.py:fn", "--llm", SERVER], "openai", extra("llm")),
    (["train", "calibrate-llm", "table.jsonl", "--llm", SERVER], "jinja2,openai", "jinja2 and openai"),
    (["replay", "table.jsonl", "--llm", "transformers:org/name"], "transformers", extra("transformers")),
    (["replay", "table.jsonl", "--llm", "transformers:org/name"], "torch", "torch"),
    (["replay", "table.jsonl", "--llm", "vllm:org/name"], "vllm", "forecast-autotune[vllm]"),
    (["show"], "rich", "pip install --force-reinstall forecast-autotune"),
    (["replay", "table.jsonl"], "numpy", "pip install --force-reinstall forecast-autotune"),
]


def make_files(folder: Path) -> None:
    """What the commands are given."""
    folder.mkdir()
    (folder / "kernel.py").write_text(KERNEL)
    write_tables(folder / "table.jsonl", [example_table()])
    head = {"type": "answers", "schema": 1, "model": "m", "provenance": {"author": "a"}}
    (folder / "answers.jsonl").write_text(json.dumps(head) + "\n")
    (folder / "data").mkdir()
    (folder / "cache").mkdir()
    (folder / "cache" / "fn.autotune.json").write_text("{}")
    Store(folder / "filled").import_tables([example_table()])
    (folder / "run.toml").write_text('model = "org/name"\ndata = "data"\nout = "out"\n')


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of each case, where its command has run; what it said, and its status, are there."""
    base = tmp_path_factory.mktemp("missing")
    given = []
    for number, (words, missing, _) in enumerate(CASES):
        make_files(base / str(number))
        how = ("refused", "absent", "blocked")[len(" ".join(words)) % 3]
        given.append((str(base / str(number)), how, missing, words))
    forkable = [case for case in given if case[2] not in OURS]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FORECAST_AUTOTUNE")}
    environment |= {"FORECAST_AUTOTUNE_CACHE_DIR": str(base / "store"), "COLUMNS": "150"}
    for cases in (forkable, *([case] for case in given if case[2] in OURS)):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT, json.dumps(cases)],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
    return [base / str(number) for number in range(len(CASES))]


def name_of(value: object) -> str:
    return "-".join(value)[:40] if isinstance(value, list) else str(value)[:20]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: "-".join(map(name_of, CASES[n])))
def test_the_remedy_is_named(number: int, folders: list[Path]) -> None:
    _, _, message = CASES[number]
    folder = folders[number]
    output, errors = ((folder / name).read_text() for name in ("said.txt", "errors.txt"))
    assert (folder / "status.txt").read_text() in ("1", "2"), (output, errors)
    assert "Traceback" not in output + errors
    assert "internal error" not in errors
    line = errors.splitlines()[-1]
    assert line.startswith("forecast-autotune: error: "), errors
    assert message in line or (message == "extra" and "forecast-autotune[" in line), line
    assert not (folder / "s").exists(), "a search that cannot begin leaves nothing"
