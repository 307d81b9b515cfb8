"""How a command names a kernel: a file and a function, or an installed module and a function."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from forecast_autotune.commands.output import CommandError, UsageError
from forecast_autotune.errors import SettingsError
from forecast_autotune.records import Argument, Candidate, Device, Measurement, Outcome, Problem
from forecast_autotune.store import Store
from forecast_harness.targets.kernels.user_kernel import KERNEL_PLACE, UserKernel, import_file, import_place

OPS = """import triton
import triton.language as tl

from .helpers import scaled


@triton.autotune([triton.Config({"BLOCK": b}) for b in (64, 128)], key=["n"])
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, scaled(tl.load(x + i, mask=i < n)), mask=i < n)
"""
HELPERS = """import triton


@triton.jit
def scaled(value):
    return value * 2
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an importable package whose `ops` has a kernel; another name for every test."""
    name = f"library_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / name
    folder.mkdir()
    for file, text in (
        ("__init__", ""),
        ("ops", OPS),
        ("helpers", HELPERS),
        ("broken", "import gone_for_good"),
    ):
        (folder / f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_kernel_of_an_installed_package_is_that_of_its_file(package: str, tmp_path: Path) -> None:
    named = UserKernel.of(f"{package}.ops:double")
    assert named.path == tmp_path / package / "ops.py"
    assert named.name == "double"
    assert [dict(c.kwargs) for c in named.configs] == [{"BLOCK": 64}, {"BLOCK": 128}]
    assert "def scaled" in named.text, "helpers of other modules are in its self-contained module"
    by_file = UserKernel.of(f"{named.path}:double")
    assert (by_file.text, by_file.kernel) == (named.text, named.kernel)


def test_what_only_a_module_below_triton_language_has_is_imported_from_there(tmp_path: Path) -> None:
    kernel = tmp_path / "squashed.py"
    kernel.write_text(
        """import triton
import triton.language as tl
from triton.language import exp
from triton.language.extra.libdevice import tanh as squash


@triton.jit
def squashed(x, BLOCK: tl.constexpr):
    at = x + tl.arange(0, BLOCK)
    tl.store(at, exp(squash(tl.load(at))))
"""
    )
    made = tmp_path / "alone.py"
    made.write_text(UserKernel.of(f"{kernel}:squashed").text)
    alone = import_file(made)
    assert alone.squash.__module__ == "triton.language.extra.libdevice"
    assert "from triton.language import exp" in made.read_text()


@pytest.mark.parametrize("what", ["nothing", "a/b:fn", "kernel.py:", ":fn", "a..b:fn", "a.b:f n"])
def test_what_names_no_kernel_is_wrong_usage(what: str) -> None:
    assert not KERNEL_PLACE.match(what)
    with pytest.raises(UsageError, match=r"KERNEL\.py:FN or package\.module:FN"):
        UserKernel.of(what)


@pytest.mark.parametrize("where", ["{}.gone", "no_such_package_anywhere", "no_such_package_anywhere.ops"])
def test_a_module_that_is_not_there_is_named(package: str, where: str) -> None:
    with pytest.raises(SettingsError, match="can be imported"):
        import_place(where.format(package))


def test_a_package_that_the_module_needs_is_not_mistaken_for_it(package: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="gone_for_good"):
        import_place(f"{package}.broken")


def test_a_module_without_a_python_source_is_refused() -> None:
    with pytest.raises(SettingsError, match="no Python source"):
        import_place("math")


def test_a_package_of_the_users_may_be_called_as_an_installed_one_that_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "installed" / "kernels_of_one_name"
    own = tmp_path / "own" / "kernels_of_one_name" / "part"
    for folder in (installed, own, own.parent):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text("")
    (installed / "hub.py").write_text("WHERE = 'installed'\n")
    (own / "helper.py").write_text("WHERE = 'own'\n")
    (own / "code.py").write_text("from kernels_of_one_name.part.helper import WHERE\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed"), *sys.path])
    hub = importlib.import_module("kernels_of_one_name.hub")
    try:
        assert import_file(own / "code.py").WHERE == "own"
        assert importlib.import_module("kernels_of_one_name.hub") is hub
        assert "kernels_of_one_name.part" not in sys.modules
    finally:
        for name in [n for n in sys.modules if n.startswith("kernels_of_one_name")]:
            del sys.modules[name]


def test_a_kernel_whose_caller_makes_descriptors_is_refused_by_name_when_it_is_opened(
    package: str, tmp_path: Path
) -> None:
    base = UserKernel.of(f"{package}.ops:double")
    described = {"descriptor": {"block": [64]}}
    call = [Argument("x", "tensor", "float32", (64,), (1,), True, extra=described)]
    store = Store(tmp_path / "store")
    problem = Problem.of(base.kernel, call, Device("NVIDIA H200"))
    store.add(problem, Measurement(problem.id, Candidate(base.configs[0]), Outcome.COMPILE_ERROR))
    with pytest.raises(
        CommandError, match=r"double takes x, a tensor descriptor .*tl\.make_tensor_descriptor"
    ):
        base.subjects(store)
