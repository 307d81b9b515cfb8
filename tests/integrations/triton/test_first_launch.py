"""What a first launch needs besides binaries: the hash of Triton's files, and launchers built ahead."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia import driver as cuda
from triton.runtime import build
from triton.tools.tensor_descriptor import TensorDescriptor

from forecast_autotune import autotune
from forecast_integrations.triton.compile import first_launch
from forecast_integrations.triton.compile.first_launch import CompilerHash, LauncherStubs
from forecast_integrations.triton.null_device import NullDevice
from tests.integrations.null import binaries, blocks, child, configs, double, fresh, kernel_call, launch
from tests.integrations.parallel_children import run_in_children

module = first_launch._module()
HERE = os.getpid()


def compute_after(before: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let something happen before the hash is computed, which this process then knows no more."""
    compute = module.triton_key

    @functools.lru_cache
    def triton_key() -> str:
        before()
        return str(compute())

    monkeypatch.setattr(module, "triton_key", triton_key)


@pytest.fixture
def computed_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process that knows no hash; every computation leaves its pid in this file, on a line of its own."""
    record = tmp_path / "computed"
    record.touch()
    module.triton_key()

    def note() -> None:
        with record.open("a") as file:
            file.write(f"{os.getpid()}\n")

    compute_after(note, monkeypatch)
    yield record
    first_launch.COMPILER_HASH.stop()


def adopted(shared: CompilerHash, count: int) -> list[str]:
    """What so many children use, as they compile."""

    def adopt() -> str:
        shared.adopt()
        return str(module.triton_key())

    return list(run_in_children([adopt] * count, 20.0))


def test_children_take_it_from_this_process(computed_by: Path) -> None:
    shared = CompilerHash()
    shared.start()
    assert adopted(shared, 3) == [module.triton_key()] * 3
    assert computed_by.read_text().split() == [str(HERE)]
    assert shared._shared is None, "they have it by inheritance"


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch, computed_by: Path) -> Iterator[threading.Event]:
    """A machine with a GPU's driver, where the hash takes until this is set."""
    may_end = threading.Event()
    compute_after(lambda: os.getpid() == HERE and may_end.wait(60), monkeypatch)
    monkeypatch.setattr(first_launch, "_DEVICE_FILES", (__file__,))
    yield may_end
    may_end.set()


@pytest.mark.parametrize("what", ["never comes", "is too long to share"])
def test_a_hash_that_is_not_shared_is_computed(
    hashing: threading.Event, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "never comes":
        monkeypatch.setattr(first_launch, "_WAIT_S", 0.05)
    else:
        monkeypatch.setattr(first_launch, "_BYTES", 16)
        hashing.set()
    shared = CompilerHash()
    shared.start_early()
    shared.start()
    (text,) = adopted(shared, 1)
    hashing.set()
    assert text == module.triton_key()
    shared.stop()


def test_a_forked_process_computes_its_own(hashing: threading.Event) -> None:
    """What its parent has begun is not the fork's to wait for, nor to end."""
    shared = CompilerHash()
    shared.start_early()
    shared.start()

    def restart() -> None:
        shared.start()
        shared.settle()

    assert os.waitpid(child(restart), 0)[1] == 0
    hashing.set()
    assert adopted(shared, 1) == [module.triton_key()]
    shared.stop()


@pytest.mark.parametrize("begun_first", [True, False])
def test_children_take_it_from_the_thread_that_began_early(
    hashing: threading.Event, computed_by: Path, begun_first: bool
) -> None:
    shared = CompilerHash()
    shared.start_early()
    shared.start_early()
    if begun_first:
        shared.start()
        threading.Timer(0.1, hashing.set).start()
    else:
        hashing.set()
        shared.settle()
        shared.start()
    answers = adopted(shared, 2)
    shared.settle()
    assert answers == [module.triton_key()] * 2
    assert computed_by.read_text().split() == [str(HERE)], "once, in this process"
    shared.stop()


def test_without_a_driver_nothing_begins_early(computed_by: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_launch, "_DEVICE_FILES", ("/nowhere/driver",))
    shared = CompilerHash()
    shared.start_early()
    assert shared._thread is None
    assert computed_by.read_text() == ""


def test_a_hash_that_cannot_be_computed_early_is_computed_later(
    computed_by: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [OSError("the disk")]

    def fail_once() -> None:
        if errors:
            raise errors.pop()

    compute_after(fail_once, monkeypatch)
    monkeypatch.setattr(first_launch, "_DEVICE_FILES", (__file__,))
    shared = CompilerHash()
    shared.start_early()
    shared.settle()
    assert computed_by.read_text().split() == [str(HERE)]


def test_a_decision_computes_it_once(device: Any, computed_by: Path) -> None:
    tuner = autotune(configs=blocks(128, 256, 512, 1024), key=["n"], store=False, mode="exhaustive")(
        fresh(double)
    )
    launch(tuner)
    assert tuner.decision.measured == 4
    assert computed_by.read_text().split() == [str(HERE)]
    assert binaries() == 4, "what children compiled is what this process looked for"


generates = pytest.mark.skipif(
    not hasattr(cuda, "make_launcher"), reason="launchers are generated by Triton before 3.7"
)

_SYMBOLS = """cuGetErrorString cuFuncSetAttribute cuPointerGetAttribute cuCtxGetCurrent cuDeviceGet
cuDevicePrimaryCtxRetain cuCtxSetCurrent cuLaunchKernelEx"""


@triton.jit
def copy_tile(source, target, offset: tl.int32, BLOCK: tl.constexpr):
    """Through descriptors of the host's."""
    target.store([offset, 0], source.load([offset, 0]))


@triton.jit
def add_scaled(x, out, n, scale, BLOCK: tl.constexpr):
    """A float and a pair of tensors besides."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, scale * tl.load(x + i, mask=i < n), mask=i < n)


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A folder with a CUDA driver library that does nothing; None where there is a real one."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        folder = tmp_path_factory.mktemp("libcuda")
        source, library = folder / "libcuda.c", folder / "libcuda.so.1"
        source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in _SYMBOLS.split()))
        named = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
        subprocess.run(["gcc", str(source), *named], check=True)
        (folder / "libcuda.so").symlink_to(library.name)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        return folder
    return None


class BuiltHere:
    """Which launchers Triton asks for in this process, and for which it runs a C compiler here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = self.compiled = 0
        ask, compile_c = cuda.compile_module_from_src, build._build

        def asking(*args: Any, **kwargs: Any) -> Any:
            self.asked += 1
            return ask(*args, **kwargs)

        def compiling(*args: Any, **kwargs: Any) -> Any:
            self.compiled += 1
            return compile_c(*args, **kwargs)

        monkeypatch.setattr(cuda, "compile_module_from_src", asking)
        monkeypatch.setattr(build, "_build", compiling)


@pytest.fixture
def generating(device: Any, libcuda: Path | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[BuiltHere]:
    """The null device, launched through the launchers that Triton generates."""

    class CountedLauncher(cuda.CudaLauncher):  # type: ignore[misc]
        def __init__(self, source: Any, metadata: Any) -> None:
            super().__init__(source, metadata)
            self._metadata = metadata

        def __call__(self, *args: object) -> None:
            device.launches += 1
            device.now_ms += device.clock(self._metadata)

    device.launcher_cls = CountedLauncher
    if libcuda is not None:
        monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(libcuda))
    for remembered in (cuda.libcuda_dirs, cuda.library_dirs):
        remembered.cache_clear()
    yield BuiltHere(monkeypatch)
    for remembered in (cuda.libcuda_dirs, cuda.library_dirs):
        remembered.cache_clear()


def stubs_on_disk(folder: Path) -> int:
    return len(list(folder.rglob("__triton_launcher*.so")))


def launched(kernel: Any, *args: Any, **keywords: Any) -> None:
    """Start and wait for the stubs of a call, then launch it without them."""
    tuner = triton.autotune(blocks(32, 64), key=[])(kernel)
    call, found = kernel_call(tuner, *args, grid=(1,), **keywords)
    stubs = LauncherStubs(call, 60.0)
    stubs.start(found)
    stubs.wait()
    stubs.close()
    for candidate in found:
        call.launcher(candidate)()


@generates
def test_a_decision_compiles_no_launcher_in_this_process(
    device: Any, generating: BuiltHere, tmp_path: Path
) -> None:
    tuner = autotune(configs=configs(), key=["n"], store=False)(fresh(double))
    launch(tuner)
    assert tuner.decision.measured > 1
    assert device.launches > 0
    assert generating.asked > 1
    assert generating.compiled == 0
    assert stubs_on_disk(tmp_path / "binaries") == 1
    # A scalar of another kind is another signature.
    launch(tuner, n=2**31 + 128)
    assert generating.compiled == 0
    assert stubs_on_disk(tmp_path / "binaries") == 2


@generates
def test_without_children_this_process_compiles_it(
    device: Any, generating: BuiltHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test before counts does happen."""
    monkeypatch.setenv("FORECAST_AUTOTUNE_COMPILER", "threads")
    launch(autotune(configs=configs(), key=["n"], store=False)(fresh(double)))
    assert generating.compiled == 1


@generates
@pytest.mark.parametrize("scale", [1, 2.5, 3])
def test_scalars_are_typed_as_a_launch_types_them(device: Any, generating: BuiltHere, scale: float) -> None:
    x = torch.empty(64)
    launched(fresh(add_scaled), x, x, 64, scale)
    launched(fresh(add_scaled), x, x, n=1, scale=scale)
    assert generating.asked >= 4
    assert generating.compiled == 0


@generates
def test_heuristics_and_optional_tensors_are_as_at_a_launch(device: Any, generating: BuiltHere) -> None:
    @triton.jit
    def shifted(x, bias, out, n, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.arange(0, BLOCK)
        value = tl.load(x + i, mask=i < n)
        if HAS_BIAS:
            value += tl.load(bias + i, mask=i < n)
        tl.store(out + i, value, mask=i < n)

    x = torch.empty(64)
    for bias in (None, x):
        kernel = triton.heuristics({"HAS_BIAS": lambda given: given["bias"] is not None})(fresh(shifted))
        launched(kernel, x, bias, x, 64)
    assert generating.asked == 4
    assert generating.compiled == 0


@generates
def test_descriptors_of_the_host(device: Any, generating: BuiltHere) -> None:
    x = TensorDescriptor.from_tensor(torch.empty(128, 64, dtype=torch.float16), [32, 64])
    launched(fresh(copy_tile), x, x, 32)
    assert generating.asked == 2
    assert generating.compiled == 0


@generates
def test_a_c_compiler_that_fails_ahead_changes_nothing(
    device: Any, generating: BuiltHere, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The launch builds the launcher itself, as without us, and says itself what is wrong."""
    monkeypatch.setattr(cuda, "make_launcher", lambda *args, make=cuda.make_launcher: make(*args) + "!")
    x = torch.empty(64)
    with pytest.raises(subprocess.CalledProcessError):
        launched(fresh(add_scaled), x, x, 64, 2.5)
    assert generating.compiled == 1
    assert stubs_on_disk(tmp_path / "binaries") == 0


def test_nothing_is_built_for_a_launcher_that_is_not_tritons(device: NullDevice, tmp_path: Path) -> None:
    x = torch.empty(64)
    launched(fresh(add_scaled), x, x, 64, 2.5)
    assert device.launches == 2
    assert stubs_on_disk(tmp_path / "binaries") == 0
