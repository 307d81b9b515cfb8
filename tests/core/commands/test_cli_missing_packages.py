"""Commands without the packages that they need: the extra to install, and no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forecast_autotune.records.table import write_tables
from forecast_autotune.testing import example_table

pytestmark = pytest.mark.usefixtures("root")

WITHOUT = """
import importlib.util, sys
from importlib.abc import MetaPathFinder
names = sys.argv[2].split(",")
if sys.argv[1] == "absent":
    found = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: (
        None if name.partition(".")[0] in names else found(name, package)
    )
class Refusing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
if sys.argv[1] == "blocked":
    sys.modules.update(dict.fromkeys(names))
else:
    sys.meta_path.insert(0, Refusing())
from forecast_autotune.commands import main
sys.exit(main(sys.argv[3:]))
"""
"""Three ways in which a package may not be there: not found, refused by a finder, or None in its place."""
SERVER = "http://127.0.0.1:9/v1?model=m"
TORCH = "https://pytorch.org/get-started"
KERNEL = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef fn(x):\n    tl.store(x, 1.0)\n"


def extra(name: str) -> str:
    return f"pip install 'forecast-autotune[{name}]'"


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
    (["import", "--triton-cache", "."], "torch,triton", "--device-name"),
    (["replay", "table.jsonl", "--plot", "p.png"], "matplotlib", extra("plot")),
    (["export", "p.parquet"], "pyarrow", extra("parquet")),
    (["train", "data", "table.jsonl", "--out", "d"], "pyarrow", extra("parquet")),
    (["train", "surrogate", "--out", "m.npz"], "lightgbm,sklearn", extra("eval")),
    (["train", "llm", "run.toml"], "transformers", "extra"),
    (["train", "llm", "run.toml"], "torch", TORCH),
    (["train", "grpo", "run.toml"], "trl", extra("train")),
    (["eval", "--seeds", "1"], "lightgbm,sklearn", extra("eval")),
    (["search", "softmax", "--device", "cpu", "--ray", "local", "--out", "s"], "ray", extra("ray")),
    (["llm", "ask", "--export", "q.jsonl", "table.jsonl"], "jinja2", extra("llm")),
    (["replay", "table.jsonl", "--llm", SERVER], "jinja2", extra("llm")),
    (["advise", "--stored", "--llm", SERVER], "httpx", extra("llm")),
    (["variants", "kernel.py:fn", "--llm", SERVER], "httpx", extra("llm")),
    (["train", "calibrate-llm", "table.jsonl", "--llm", SERVER], "jinja2,httpx", "jinja2 and httpx"),
    (["replay", "table.jsonl", "--llm", "transformers:org/name"], "transformers", extra("transformers")),
    (["replay", "table.jsonl", "--llm", "transformers:org/name"], "torch", "torch"),
    (["replay", "table.jsonl", "--llm", "vllm:org/name"], "vllm", "forecast-autotune[vllm]"),
    (["show"], "rich", "pip install --force-reinstall forecast-autotune"),
    (["replay", "table.jsonl"], "numpy", "pip install --force-reinstall forecast-autotune"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kernel.py").write_text(KERNEL)
    write_tables(tmp_path / "table.jsonl", [example_table()])
    head = {"type": "answers", "schema": 1, "model": "m", "provenance": {"author": "a"}}
    (tmp_path / "answers.jsonl").write_text(json.dumps(head) + "\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "run.toml").write_text('model = "org/name"\ndata = "data"\nout = "out"\n')
    return tmp_path


def name_of(value: object) -> str:
    return "-".join(value)[:40] if isinstance(value, list) else str(value)[:20]


@pytest.mark.parametrize(("words", "missing", "said"), CASES, ids=name_of)
def test_the_remedy_is_named(words: list[str], missing: str, said: str, folder: Path) -> None:
    how = ("refused", "absent", "blocked")[len(" ".join(words)) % 3]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, how, missing, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=folder,
    )
    assert done.returncode in (1, 2), (how, done.stdout, done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    assert "internal error" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("forecast-autotune: error: "), done.stderr
    assert said in line or (said == "extra" and "forecast-autotune[" in line), line
    assert not (folder / "s").exists(), "a search that cannot begin leaves nothing"
