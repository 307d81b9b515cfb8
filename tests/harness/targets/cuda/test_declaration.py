"""What a user writes beside and in a CUDA kernel, and what is said where it is wrong."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from forecast_autotune.errors import ForecastAutotuneError, RecordError, SettingsError
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.targets.cuda import toolkit
from forecast_harness.targets.cuda.declaration import CUDA_PLACE, read_cuda_declaration
from forecast_harness.targets.cuda.source import (
    KernelSignature,
    check_source_rules,
    launch_comments,
    read_launch,
)
from forecast_harness.targets.novelty import node_identity
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
        ('name = "plain"', 'name = "plain"\nlarge = true', "needs a workload that is not large"),
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


# --- the launch comment and the preprocessor ---


def comment(text: str) -> str:
    return f"/* launch\n{text}\n*/\n"


def test_sizes_are_expressions_of_axes_and_macros() -> None:
    launch = read_launch(SOURCE)
    assert launch.configs == [{"THREADS": 256}]
    result = launch.sizes({"n": 1000}, {})
    assert (result.grid, result.block, result.shared_bytes) == ((8, 1, 1), (128, 1, 1), 0)
    assert launch.sizes({"n": 1000}, {"THREADS": 256}).grid == (4, 1, 1)


def test_configs_are_all_choices_but_the_first() -> None:
    text = 'grid = [1]\nblock = ["A", "B"]\nshared_bytes = "A * B"\n[macros]\nA = [8, 4]\nB = [2, 1]'
    launch = read_launch(comment(text))
    assert launch.configs == [{"B": 1}, {"A": 4}, {"A": 4, "B": 1}]
    assert launch.sizes({}, {"A": 4}).shared_bytes == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grid = [1", "is not TOML"),
        ("[" * 3000, "is not TOML"),
        ("# " + "x" * 4000, "at most 4000 are read"),
        (
            "grid = [1]\nblock = [1]\nstream = 3",
            "has 'stream'; it may have grid, block, shared_bytes, macros",
        ),
        ("block = [1]", "launch.grid must be a list of one to three sizes"),
        ("grid = [1, 1, 1, 1]\nblock = [1]", "launch.grid must be a list of one to three sizes"),
        ("grid = [1.5]\nblock = [1]", "launch.grid[0] must be an integer, or an expression"),
        (f'grid = ["{"9*" * 100}9"]\nblock = [1]', "at most 200 characters"),
        ("grid = [1]\nblock = [1]\nmacros = 3", "launch.macros must be a table"),
        ("grid = [1]\nblock = [1]\n[macros]\nthreads = [1]", "must be an upper-case name"),
        ('grid = [1]\nblock = [1]\n[macros]\n"A=1 --pre-include=x" = [1]', "must be an upper-case name"),
        ("grid = [1]\nblock = [1]\n[macros]\nA = []", "a list of different integers"),
        ("grid = [1]\nblock = [1]\n[macros]\nA = [1, 1]", "a list of different integers"),
        ('grid = [1]\nblock = [1]\n[macros]\nA = ["1; rm"]', "a list of different integers"),
        ("grid = [1]\nblock = [1]\n[macros]\nA = [99999999999]", "a list of different integers"),
        (
            f"grid = [1]\nblock = [1]\n[macros]\nA = {list(range(30))}\nB = {list(range(30))}",
            "make 900 configs; at most 512",
        ),
    ],
)
def test_a_broken_launch_comment_is_told(text: str, said: str) -> None:
    with pytest.raises(RecordError) as caught:
        read_launch(comment(text))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('grid = ["n - 5"]\nblock = [1]', "the grid is (0, 1, 1)"),
        ('grid = ["n * 999999999"]\nblock = [1]', "the grid is (4999999995, 1, 1)"),
        ("grid = [1, 70000]\nblock = [1]", "the grid is (1, 70000, 1)"),
        ("grid = [1]\nblock = [2048]", "the block is (2048, 1, 1)"),
        ("grid = [1]\nblock = [64, 32]", "1024 threads"),
        ("grid = [1]\nblock = [1, 1, 65]", "the block is (1, 1, 65)"),
        ("grid = [1]\nblock = [1]\nshared_bytes = 9999999", "0 to 1048576 can be asked for"),
        ('grid = [1]\nblock = [1]\nshared_bytes = "0 - 4"', "0 to 1048576 can be asked for"),
        ('grid = ["n // 0"]\nblock = [1]', "cannot evaluate"),
        ('grid = ["m"]\nblock = [1]', "m is no axis"),
        ('grid = ["N"]\nblock = [1]\n[macros]\nN = [1]', "macro N has the name of an axis"),
        (f'grid = ["{"9" * 190}"]\nblock = [1]', "the grid is (99999"),
    ],
)
def test_sizes_that_no_device_takes_are_told(text: str, said: str) -> None:
    launch = read_launch(comment(text))
    with pytest.raises(RecordError) as caught:
        launch.sizes({"n": 5, "N": 5}, {})
    assert said in str(caught.value)


def test_a_config_is_one_of_the_source() -> None:
    with pytest.raises(RecordError, match=r"THREADS = 64 is not among the source's macros"):
        read_launch(SOURCE).with_defaults({"THREADS": 64})


def test_two_launch_comments_are_refused_and_an_open_one_is_none() -> None:
    with pytest.raises(RecordError, match="has 2"):
        read_launch(SOURCE + comment("grid = [1]"))
    assert launch_comments("/* launch\n" * 100_000) == []


def test_another_launch_is_another_source() -> None:
    other = SOURCE.replace("[128, 256]", "[128, 512]")
    assert node_identity("t", "cuda", other) != node_identity("t", "cuda", SOURCE)
    same = SOURCE.replace("int at", "/* another remark */ int   at")
    assert node_identity("t", "cuda", same) == node_identity("t", "cuda", SOURCE)


@pytest.mark.parametrize(
    "line",
    [
        '#include "/etc/passwd"',
        "#include </etc/passwd>",
        '#include "../../secret.h"',
        '#include "a/../../b"',
        "# include NAME",
        '#\tinclude "/proc/self/environ"',
        '%:include "/etc/passwd"',
        '??=include "/etc/passwd"',
        '#inc\\\nlude "/etc/passwd"',
        '#include \\\n"/etc/passwd"',
        '#/* */include "/etc/passwd"',
        '# // \ninclude "/etc/passwd"',
        '/* \n */ #include "/etc/passwd"',
        '#include_next "x.h"',
        '#embed "/etc/passwd"',
        '#import "/etc/passwd"',
        '#line 1 "/etc/passwd"',
        "#if __has_include(</etc/shadow>)",
        '#pragma GCC dependency "/etc/passwd"',
        '_Pragma("GCC system_header")',
        "#include\n",
        "int x; \0",
    ],
)
def test_nothing_but_headers_of_the_toolkit_is_read(line: str) -> None:
    with pytest.raises(RecordError):
        check_source_rules(f"{line}\n{SOURCE}")


@pytest.mark.parametrize(
    "line",
    [
        "#include <cuda_fp16.h>",
        '#include "mma.h"  // tensor cores',
        "#include <cub/block/block_reduce.cuh>",
        "#define TWICE(x) (#x)",
        "#pragma unroll 4",
        "#if THREADS > 64\n#endif",
        "// the kernel includes a tail",
    ],
)
def test_what_kernels_need_is_let_through(line: str) -> None:
    check_source_rules(f"{line}\n{SOURCE}")


@pytest.mark.parametrize(
    ("piece", "count"),
    [("#", 500_000), ("# ", 400_000), ("#/*", 300_000), ("#include <", 90_000), ("\\", 900_000)],
)
def test_rules_are_read_in_linear_time(piece: str, count: int) -> None:
    with pytest.raises(RecordError):  # this test ends: the patterns do not go back and forth
        check_source_rules(f"{piece * count}\n??=")


# --- where nvcc is looked for ---


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without nvcc."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolkit, "_USUAL_PLACE", str(tmp_path / "none"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "packages"))
    for result in (toolkit.find_nvcc, toolkit.nvcc_release):
        result.cache_clear()
    yield
    for result in (toolkit.find_nvcc, toolkit.nvcc_release):
        result.cache_clear()


def program(path: Path, said: str = "Cuda compilation tools, release 13.0, V13.0.88") -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho '{said}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.usefixtures("nothing_known")
def test_without_one_it_is_said_what_to_do() -> None:
    with pytest.raises(SettingsError, match=r"forecast-autotune\[cuda\]"):
        toolkit.find_nvcc()


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
@pytest.mark.usefixtures("nothing_known")
def test_a_variable_names_the_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    result = program(tmp_path / "toolkit" / "bin" / "nvcc")
    monkeypatch.setenv(name, str(tmp_path / "toolkit"))
    assert toolkit.find_nvcc() == str(result)
    assert toolkit.nvcc_release() == "13.0"
    assert str(tmp_path / "toolkit") in toolkit.header_roots()


@pytest.mark.parametrize("place", ["nvidia/cu13/bin/nvcc", "nvidia/cuda_nvcc/bin/nvcc"])
@pytest.mark.usefixtures("nothing_known")
def test_a_wheel_brings_one(tmp_path: Path, place: str) -> None:
    result = program(tmp_path / "packages" / place)
    assert toolkit.find_nvcc() == str(result)


@pytest.mark.usefixtures("nothing_known")
def test_a_variable_that_leads_nowhere_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = program(tmp_path / "path" / "nvcc", "nothing known")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(shutil, "which", lambda name: str(result))
    assert toolkit.find_nvcc() == str(result)
    assert toolkit.nvcc_release() == ""
