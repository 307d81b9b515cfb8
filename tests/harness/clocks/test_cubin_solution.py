"""How a cell launches a CUDA kernel: on a driver that runs one kernel on the host."""

from __future__ import annotations

import subprocess
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks.lib.machine_code import fake_code
from forecast_harness.clocks.compilation import cubin_solution
from forecast_harness.clocks.compilation.cubin_solution import CubinLauncher, LaunchFailed, host_solution
from forecast_harness.clocks.compilation.nvcc import CompiledSource
from forecast_harness.targets.cuda.source import KernelParameter, KernelSignature, read_launch

SIGNATURE = KernelSignature(
    "twice",
    (
        KernelParameter("x", "float32", ("n",)),
        KernelParameter("y", "float32", ("n",), output=True),
        KernelParameter("n", "int32", value="n"),
        KernelParameter("factor", "float32", value="2.5"),
    ),
)
LAUNCH = """/* launch
grid = ["(n + T - 1) // T", 3, 2]
block = ["T", 2]
shared_bytes = "1000 * T"
[macros]
T = [32, 64]
*/"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of CUDA's; tensors lie on the host."""
    if not fake_code.has_compiler():
        pytest.skip("needs g++ to build the driver")
    result = tmp_path / "liblaunching.so"
    source = Path(__file__).with_name("launching_driver.cpp")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(result), str(source)], check=True)
    monkeypatch.setattr(cubin_solution, "_LIBRARY", str(result))
    stream = types.SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)


def launcher(config: dict[str, int], image: bytes = b"\x7fELF code") -> CubinLauncher:
    """What the module of a solution makes."""
    solution = host_solution("it", CompiledSource(image, read_launch(LAUNCH)), SIGNATURE, config)
    result: dict[str, object] = {}
    exec(compile(solution.source, "solution.py", "exec"), result)
    new = result["_LAUNCHER"]
    assert isinstance(new, CubinLauncher)
    return new


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(("config", "threads", "blocks"), [({}, 32, 4), ({"T": 64}, 64, 2)])
def test_grid_block_and_arguments_are_the_sources_own(
    config: dict[str, int], threads: int, blocks: int
) -> None:
    result = launcher(config)
    for n in (100, 3, 100):
        x, y = torch.arange(n, dtype=torch.float32), torch.zeros(n)
        result.launch({"x": x, "y": y})
        if n == 100:
            assert y[:5].tolist() == [blocks, 6, threads, 2, 1000 * threads]
        assert torch.equal(y[5:], 2.5 * x[5:])
        assert n > 4 or torch.equal(y, 2.5 * x)


@pytest.mark.usefixtures("driver")
def test_what_the_driver_refuses_is_a_failure_of_the_candidate() -> None:
    with pytest.raises(LaunchFailed, match="cuModuleLoadData failed with error 200"):
        launcher({}, b"no code")
