"""The same runner on a real device, with kernels that Triton compiled in cells without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.lib.machine_code.device_sums import BODIES, compile_sums
from benchmarks.lib.machine_code.sums import SumCall, objection
from forecast_harness.clocks.compilation.requests import BuildRequest
from forecast_harness.clocks.compilation.workers import CompileWorkers
from forecast_harness.clocks.records import Program
from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.clocks.runner.driver import CudaDriver
from forecast_harness.clocks.runner.health import facts_for_workers
from forecast_harness.clocks.runner.kernel_texts import COMPARED_TYPES
from forecast_harness.clocks.runner.kernels import RunnerKernels
from forecast_harness.targets.packs.load import load_pack
from forecast_harness.targets.packs.schema import Language
from forecast_harness.trials.machine_code.targets import PackCalls
from tests.harness.clocks.element_errors import check_errors, check_unlike
from tests.harness.clocks.host_digests import check_digests

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Iterator[RunnerClient]:
    with RunnerClient(launch_s=3.0) as result:
        yield result


@pytest.fixture(scope="module")
def workers(device: RunnerClient) -> Iterator[CompileWorkers]:
    with CompileWorkers(facts_for_workers(device)) as result:
        yield result


@pytest.fixture(scope="module")
def sums(workers: CompileWorkers) -> dict[str, Program]:
    result, missing = compile_sums(workers)
    assert not missing
    return result


def test_the_device_adds(device: RunnerClient) -> None:
    assert device.check_health() == ""


@pytest.mark.parametrize("what", BODIES)
def test_only_what_is_right_is_accepted(device: RunnerClient, sums: dict[str, Program], what: str) -> None:
    message = objection(device, sums[what], SumCall(), sums["right"])
    assert bool(message) == (what != "right")
    assert message.startswith(BODIES[what][1])
    assert objection(device, sums["right"], SumCall(), sums["right"]) == ""


@pytest.mark.parametrize("name", ["softmax", "matmul", "layer_norm", "swiglu", "cross_entropy"])
def test_packs_solutions_are_right_and_take_time(
    device: RunnerClient, workers: CompileWorkers, tmp_path: Path, name: str
) -> None:
    pack = load_pack(name)
    (solution, *_) = [s for s in pack.solutions if s.language is Language.TRITON]
    call = PackCalls(pack, tmp_path).draw()
    built = workers.submit(BuildRequest(name, solution.source, solution.entry, (call.arguments,))).result()
    (program,) = built.programs
    answer = device.check(program, call.given)
    assert not answer.violations
    assert call.wrong(program, answer.launches) == ""
    seconds = device.time([program], call.given).seconds[0]
    assert all(1e-7 <= s < 1e-2 for s in seconds)


@pytest.mark.parametrize("dtype", sorted(COMPARED_TYPES))
def test_errors_of_elements_are_as_the_host_has_them(dtype: str) -> None:
    driver = CudaDriver()
    check_errors(driver, RunnerKernels(driver), dtype)


@pytest.mark.parametrize("size", [200, 4096, 1_000_001])
def test_digests_are_as_the_host_has_them(size: int) -> None:
    driver = CudaDriver()
    check_digests(driver, RunnerKernels(driver), size)


def test_values_that_are_not_finite_are_told_apart() -> None:
    driver = CudaDriver()
    check_unlike(driver, RunnerKernels(driver))
