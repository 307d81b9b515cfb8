"""What a user writes beside a CUDA kernel, and what is said where it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from forecast_autotune.errors import ForecastAutotuneError, SettingsError
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.targets.cuda.declaration import CUDA_PLACE, read_cuda_declaration
from forecast_harness.targets.cuda.signature import KernelSignature
from forecast_harness.targets.packs.schema import Pack
from forecast_harness.targets.search_target import open_target
from forecast_harness.targets.statement import timed_work
from forecast_harness.verify.run import check_pack
from tests.harness.cuda_kernels.declared_kernel import (
    DECLARATION,
    SOURCE,
    cuda_target,
    declared,
    write_kernel,
)

X = '{ name = "x", dtype = "float32", shape = ["n"] }'
N = '{ name = "n", dtype = "int32", value = "n" }'


def test_a_declaration_is_a_pack_and_a_signature(tmp_path: Path) -> None:
    result = declared(tmp_path)
    signature = 'extern "C" __global__ void twice(const float* x, float* y, int n)'
    assert result.signature.text == signature
    assert result.signature.kinds == ("*fp32", "*fp32", "i32")
    assert result.signature.axes_of({"x": (7,), "y": (7,)}) == {"n": 7}
    assert KernelSignature.from_json(result.signature.to_json()) == result.signature
    about = result.pack.definition
    assert (about.destination, list(about.inputs), list(about.outputs)) == (True, ["x"], ["y"])
    assert result.pack.reference.endswith("reference = doubled\n")
    assert Pack.from_json(result.pack.to_json()).id == result.pack.id


def test_a_model_is_told_how_its_source_is_called_and_launched(tmp_path: Path) -> None:
    target = cuda_target(declared(tmp_path))
    for text in ("void twice(const float* x, float* y, int n)", "/* launch", "n: 1 to 3000", "def doubled"):
        assert text in target.statement
    assert timed_work(target) == {"plain": {"axes": {"n": 2000}, "bytes": 16000, "flops": 0}}


def test_a_declared_problem_tells_right_from_wrong(tmp_path: Path, judging: SandboxLane) -> None:
    assert check_pack(declared(tmp_path).pack, judging) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[axes]", "[axes", "is not TOML"),
        ("description", "describtion", "'describtion', which is none of reference, parameters"),
        ('reference = "reference.py:doubled"\n', "", "lacks 'reference'"),
        ("reference.py:doubled", "reference.doubled", 'must be "FILE.py:FUNCTION"'),
        ("reference.py:doubled", "reference.py:halved", "has no function halved at its top level"),
        ("reference.py:doubled", "other.py:doubled", "other.py: it holds the reference"),
        ('dtype = "int32"', 'dtype = "int33"', "dtype must be one of"),
        ('dtype = "int32"', 'dtype = "bool"', "a number is int32, int64, float32, float64, not bool"),
        ('value = "n" }', 'value = "n", output = true }', "is a number: leave out shape, output"),
        (N, '{ name = "count", dtype = "int32", value = "m" }', "m is no axis"),
        (N, '{ name = "count", dtype = "int32", value = "__import__(1)" }', "cannot evaluate"),
        ('value = "n" }', f'value = "{"n+" * 150}n" }}', "at most 200 characters"),
        ('name = "x"', 'name = "x y"', "must be an identifier"),
        ('name = "x"', 'name = "y"', "each with a name of its own"),
        ('name = "x", dtype = "float32"', 'name = "n", dtype = "float32"', "each with a name of its own"),
        (", output = true", "", "no parameter is an output"),
        (f"  {X},\n", "", "every tensor is an output"),
        ('shape = ["n"]', 'shape = "n"', "must be a list of sizes"),
        ('shape = ["n"]', 'shape = ["2 * n"]', "axis n is no size of any tensor"),
        ("n = { low = 1, high = 3000 }", "n = { low = 5, high = 4 }", "no multiple of 1 in"),
        ('name = "plain"', 'name = "plain"\nlarge = true', "needs a workload that is not large"),
        ("axes = { n = 2000 }", "axes = { m = 2000 }", "gives axes"),
        (N, '{ name = "count", dtype = "int32", value = "2 * n" }', ""),
        (f"  {N},\n", "", ""),
        (N, '{ name = "eps", dtype = "float32", value = 1e-5 }', ""),
        (
            N,
            '{ name = "n", dtype = "int32", value = "n + 1" }',
            "has the name of an axis and is not that axis",
        ),
    ],
)
def test_a_broken_declaration_is_told_with_its_remedy(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in DECLARATION
    place = write_kernel(tmp_path, declaration=DECLARATION.replace(old, new))
    if not said:
        assert read_cuda_declaration(place).signature.entry == "twice"
        return
    with pytest.raises(ForecastAutotuneError) as caught:
        read_cuda_declaration(place)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (SOURCE.partition("*/\n")[2], "needs one launch comment, and has 0"),
        (SOURCE.replace("twice", "thrice"), "has no kernel twice: define extern"),
        ('#include "/etc/passwd"\n' + SOURCE, "is refused"),
    ],
)
def test_a_broken_source_is_told_before_anything_is_compiled(tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(ForecastAutotuneError, match=said):
        read_cuda_declaration(write_kernel(tmp_path, source))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"there is no .*none\.cu"):
        read_cuda_declaration(f"{tmp_path}/none.cu:fn")
    write_kernel(tmp_path)
    (tmp_path / "twice.toml").unlink()
    with pytest.raises(SettingsError, match=r"twice\.toml: it holds what twice is called with"):
        read_cuda_declaration(f"{tmp_path}/twice.cu:twice")


def test_a_cuda_kernel_is_not_searched_on_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="can only be searched on a CUDA device"):
        open_target(write_kernel(tmp_path), device="cpu")


@pytest.mark.parametrize(("text", "names"), [("a/b.cu:fn", True), ("b.cu", False), ("b.py:fn", False)])
def test_what_names_a_cuda_kernel(text: str, names: bool) -> None:
    assert (CUDA_PLACE.match(text) is not None) == names
