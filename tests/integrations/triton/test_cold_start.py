"""Two programs on the null device: recorded, warmed from the record alone, and compiling nothing then."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from triton import knobs

from forecast_autotune.commands import main
from forecast_autotune.records.compilation import Compilation, PlannedCompilation
from forecast_autotune.store import Store
from forecast_integrations.commands.warm import binaries_of
from forecast_integrations.triton.compile import ahead
from forecast_integrations.triton.compile.ahead import compile_ahead
from forecast_integrations.triton.compile.lazy_packages import complete_packages, lazy_packages
from forecast_integrations.triton.problem.compilations import CompilationRecorder
from forecast_integrations.triton.problem.source import imported, source_hash

_KERNELS = """
import triton
import triton.language as tl
"""
_PLAIN = """
@triton.jit
def plain{number}(x, out, n, m, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + at, tl.load(x + at, mask=at < n) * m + {number}.0, mask=at < n)
"""
_TUNED = """
@triton.autotune(configs=[triton.Config({{"B": 64}}, num_warps=w) for w in (1, 2)], key=["n"])
@triton.jit
def tuned{number}(x, out, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + at, tl.load(x + at, mask=at < n) + {number}.0, mask=at < n)
"""
_PROGRAM = """
import json

import torch

from forecast_autotune import patch_triton, ready
from forecast_autotune.features.devices import datasheet_device
from forecast_integrations.triton.null_device import null_device

compiled = []
with null_device(device=datasheet_device("a100")):
    patch_triton()
    from triton import knobs

    ours = knobs.compilation.listener

    def listen(**told):
        compiled.append((told["src"].name, told["cache_hit"]))
        ours(**told)

    knobs.compilation.listener = listen
    import {kernels} as kernels

    for n in {sizes}:
        if n == 0:
            ready()
            continue
        x = torch.zeros(256)
        for number in range({plain}):
            getattr(kernels, f"plain{{number}}")[(1,)](x, x, n, 3, B=64)
        for number in range({tuned} if n > 1 else 0):
            getattr(kernels, f"tuned{{number}}")[(1,)](x, x, n)
print(json.dumps([name for name, hit in compiled if not hit]))
"""


class Programs:
    """Programs in a folder, with a store and a cache of Triton's."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.folder, self._capsys = folder, capsys
        monkeypatch.chdir(folder)
        monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(folder / "store"))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        monkeypatch.setattr(sys, "path", ["", *sys.path])

    def write(self, name: str, plain: int, tuned: int, sizes: tuple[int, ...]) -> None:
        """Write a program and its kernels; 0 among the sizes is where it is ready."""
        texts = [_PLAIN.format(number=n) for n in range(plain)] + [
            _TUNED.format(number=n) for n in range(tuned)
        ]
        (self.folder / f"{name}_kernels.py").write_text(_KERNELS + "\n".join(texts))
        text = _PROGRAM.format(kernels=f"{name}_kernels", sizes=sizes, plain=plain, tuned=tuned)
        (self.folder / f"{name}.py").write_text(text)

    def run(self, *command: str, code: int = 0, **variables: str) -> str:
        """Run Python; what it prints, or its errors where it fails."""
        done = subprocess.run(
            [sys.executable, *command],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def command(self, *words: str, code: int = 0) -> str:
        """Run a command of ours in this process; what it prints."""
        for name in [n for n in sys.modules if n.endswith("_kernels")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        assert main(words) == code
        return self._capsys.readouterr().out

    def compiled_by(self, name: str, **variables: str) -> list[str]:
        """Run a program; the kernels that it compiled, and did not find."""
        compiled: list[str] = json.loads(self.run(f"{name}.py", **variables).splitlines()[-1])
        return compiled

    def warm(self, *options: str, code: int = 0) -> list[dict[str, Any]]:
        """Run the command; its report on compilations."""
        listed: list[dict[str, Any]] = json.loads(self.command("warm", "--json", *options, code=code))[
            "compilations"
        ]
        return listed

    def other_assembler(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        """Variables of a program, none of them the command's: an assembler as of torch's wheel, and a switch."""
        path = self.folder / "ptxas"
        release = 'if [ "$1" = --version ]; then echo "release 12.5, V12.5.9"; exit; fi'
        path.write_text(f'#!/bin/sh\n{release}\nexec {knobs.nvidia.ptxas.path} "$@"\n')
        path.chmod(0o755)
        monkeypatch.setattr(ahead, "torch_assemblers", lambda: [str(path)])
        return {"TRITON_PTXAS_PATH": str(path), "TRITON_DISABLE_LINE_INFO": "1"}

    def forget_binaries(self) -> None:
        """Leave Triton's cache behind."""
        (self.folder / "cache").rename(self.folder / f"cache{len(list(self.folder.iterdir()))}")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Programs:
    return Programs(tmp_path, monkeypatch, capsys)


def test_a_program_compiles_nothing_after_a_warm_by_the_records_of_a_bundle(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.write("varying", 2, 1, (64, 65))
    variables = programs.other_assembler(monkeypatch)
    assert programs.compiled_by("varying", **variables) == ["plain0", "plain1"] * 2, (
        "children compile for a tuner"
    )
    lines = (programs.folder / "store" / "compilations.jsonl").read_text().splitlines()
    plain_sizes = [one["sizes"] for one in map(json.loads, lines) if "plain" in one["kernel"]]
    assert {*map(json.dumps, plain_sizes)} == {json.dumps({"n": n, "m": 3}) for n in (64, 65)}
    programs.forget_binaries()
    programs.command("store", "bundle", "bundle")
    monkeypatch.setenv("FORECAST_AUTOTUNE_STORES", str(programs.folder / "bundle"))
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(programs.folder / "empty"))
    forecast = [one for one in programs.warm("--plan") if one["probability"] < 1]
    assert {(one["kernel"], one["states"]["n"]) for one in forecast} == {
        (f"varying_kernels:{kernel}", "1") for kernel in ("plain0", "plain1", "tuned0")
    }
    assert all(one["states"].get("m", "neither") == "neither" for one in forecast), "it never changed"
    assert not any("trouble" in one for one in programs.warm())
    programs.write("varying", 2, 1, (64, 1, 65))
    assert programs.compiled_by("varying", **variables) == [], "neither what it had met nor what was forecast"
    assert all(one["cached"] for one in programs.warm()), "each a second time: they are there"


def test_a_compilation_of_a_ready_program_is_recorded_with_its_cause(programs: Programs) -> None:
    programs.write("late", 1, 0, (64, 0, 1))
    text = programs.run("late.py", code=1, FORECAST_AUTOTUNE_ON_COMPILE="error")
    assert "UnexpectedCompilationError: late_kernels:plain0 was compiled" in text
    assert f"(n was 1 for the first time; {programs.folder / 'late.py'}:" in text
    shown = programs.command("show", "--compilations")
    assert "2 binaries, 1 of them compiled after a program was ready" in shown
    programs.forget_binaries()
    programs.warm()
    assert programs.compiled_by("late", FORECAST_AUTOTUNE_ON_COMPILE="error") == []


def test_a_compilation_that_cannot_be_described_reaches_whoever_listened_before() -> None:
    told: list[dict[str, Any]] = []
    recorder = CompilationRecorder()
    recorder._previous = lambda **compilation: told.append(compilation)
    recorder._hear(src=object(), metadata={}, cache_hit=False)
    assert len(told) == 1


def test_what_cannot_be_compiled_again_is_named(programs: Programs) -> None:
    programs.write("gone", 2, 0, (64,))
    programs.compiled_by("gone")
    file = programs.folder / "store" / "compilations.jsonl"
    record = json.loads(file.read_text().splitlines()[0])
    other = {**record, "triton": "3.1.0"}
    damaged = [{**record, "specialization": {}}, {**record, "states": {"n": "2"}, "types": {"n": "i32"}}]
    backend = record["environment"]
    ours = re.findall(r"V[\d.]+", backend["backend"])[0]
    others = [  # the same kernel as another process would name it
        {**record, "environment": {**backend, "LLVM_PASS_PLUGIN_PATH": "mine.so"}},
        {**record, "environment": {"backend": "release 99.1, V99.1.2-80"}},
        {**record, "environment": {**backend, "DISABLE_LLVM_OPT": "true"}},
    ]
    lines = ['{"type": "compilation", "torn', *map(json.dumps, damaged + others)]
    file.write_text("\n".join([file.read_text() + json.dumps(other), *lines]) + "\n")
    kernels = programs.folder / "gone_kernels.py"
    kernels.write_text(kernels.read_text().replace("+ 1.0", "+ 2.0"))
    listed = programs.warm(code=1)
    # The record of another Triton is forgotten: there is one of this.
    assert {(one["kernel"][-1], one.get("trouble", "")) for one in listed} == {
        ("0", ""),
        ("1", "its source has changed"),
        ("0", "the program ran with LLVM_PASS_PLUGIN_PATH=mine.so: run `warm` with it, too"),
        ("0", f"the program's assembler (V99.1.2) is not here (Triton has {ours}): set TRITON_PTXAS_PATH"),
        ("0", "Triton names it otherwise than in the program, which will compile it"),
    }
    assert "3.1.0" not in file.read_text()


def test_a_package_runs_its_own_file_only_for_a_name_that_it_makes(programs: Programs) -> None:
    package = programs.folder / "lazy_library"
    package.mkdir()
    for name, text in {
        "__init__": "from .models import *\nfrom .sizes import SIZE as WIDTH\nfrom . import sizes\n"
        "VERSION = 3\nMADE = sizes.SIZE + 1",
        "models": "from lazy_library import kernels\nMODEL = kernels.FOUR",
        "sizes": "SIZE = 4",
        "kernels": "import other_library\nimport used_library.part\n"
        "from lazy_library import VERSION, WIDTH, sizes\nFOUR = WIDTH",
    }.items():
        (package / f"{name}.py").write_text(text)
    replaced = "import sys, types\nsys.modules[__name__] = types.SimpleNamespace(SIX=6)"
    for name, text in {"other_library": replaced, "used_library": "FIVE = 5"}.items():
        (programs.folder / name).mkdir()
        (programs.folder / name / "__init__.py").write_text(text)
    (programs.folder / "used_library" / "part.py").write_text("from used_library import FIVE")
    with lazy_packages(["lazy_library"]):
        kernels = imported("lazy_library.kernels", "sizes")
        assert kernels.SIZE == 4
        assert "lazy_library.models" not in sys.modules
        other = sys.modules["other_library"]
        assert "_pending" in vars(other), "nobody has used it"
        assert other.SIX == 6
        assert imported("lazy_library", "MADE") == 5
    assert sys.modules["lazy_library"].MODEL == 4
    assert not complete_packages("lazy_library.kernels"), "it is complete"


def test_a_compiler_that_dies_or_never_ends_costs_its_binary(programs: Programs) -> None:
    """The compiler meets these modules when it looks up a constant."""
    programs.write("hard", 1, 0, ())
    for name, line in (
        ("dies", "os.kill(os.getpid(), 9)"),
        ("leaves", "os._exit(0)"),
        ("hangs", "time.sleep(60)"),
    ):
        (programs.folder / f"{name}.py").write_text(f"import os, time\n{line}\n")
    kernel = source_hash(imported("hard_kernels", "plain0"))
    target = {"backend": "cuda", "arch": 90, "warp_size": 32}
    planned = [
        PlannedCompilation(Compilation(
            "hard_kernels", "plain0", kernel, triton.__version__, target,
            {"signature": {"x": "constexpr"}, "options": {}, "attributes": [], "constants": [[[0], constant]]},
        ))
        for constant in [{"function": [name, "f"]} for name in ("dies", "leaves", "hangs")]
    ]  # fmt: skip
    compile_ahead(planned, 3, timeout_s=3.0)
    assert sorted(one.trouble for one in planned) == [
        "not compiled after 3 s",
        "the compiler ended with status 0",
        "the compiler ended with status 9",
    ]


def test_a_binary_whose_compilation_nobody_timed_is_planned_like_the_others(tmp_path: Path) -> None:
    store, target = Store(tmp_path), {"backend": "cuda", "arch": 90, "warp_size": 32}
    parts = {"signature": {}, "options": {}, "attributes": [], "constants": []}
    for name, seconds in (("cached", 0.0), ("short", 1.0), ("long", 3.0)):
        store.compilations.add(
            Compilation("kernels", name, "5" * 64, "3.9.0", target, parts, seconds=seconds)
        )
    planned = {one.compilation.kernel: one.expected_s for one in binaries_of(store, None)}
    assert planned == {"cached": 2.0, "short": 1.0, "long": 3.0}
