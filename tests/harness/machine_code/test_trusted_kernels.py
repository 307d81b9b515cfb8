"""The runner's own kernels: the assembler takes them, and those that watch buffers miss nothing."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from forecast_harness.machine_code.runner import trusted_kernels
from forecast_harness.machine_code.runner.driver import CudaDriver
from forecast_harness.machine_code.runner.error_kernels import COMPARED_TYPES, error_kernel_text
from forecast_harness.machine_code.runner.trusted_kernels import TrustedKernels
from tests.harness.machine_code.element_errors import check_errors, check_unlike

triton = pytest.importorskip("triton")


TEXTS = {
    "add": trusted_kernels._ADD,
    "pause": trusted_kernels._PAUSE,
    "overwrite": trusted_kernels._OVERWRITE,
    "mask": trusted_kernels._MASK,
    **{f"compare {unit}": trusted_kernels._compare_text(unit) for unit in (1, 8)},
    **{f"digest {unit}": trusted_kernels._digest_text(unit) for unit in (1, 8)},
    **{f"error {dtype}": error_kernel_text(dtype) for dtype in sorted(COMPARED_TYPES)},
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_assembler_takes_it(tmp_path: Path, name: str, arch: str) -> None:
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not assembler.exists():
        pytest.skip("this Triton has no ptxas")
    source = tmp_path / "kernel.ptx"
    source.write_text(trusted_kernels._HEADER + TEXTS[name])
    command = [str(assembler), f"--gpu-name={arch}", str(source), "-o", str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def driver(fake_driver: Path) -> CudaDriver:
    return CudaDriver(str(fake_driver))


@pytest.fixture(scope="module")
def kernels(driver: CudaDriver) -> TrustedKernels:
    return TrustedKernels(driver)


@pytest.mark.parametrize("late", [0, 1, 8])
@pytest.mark.parametrize("size", [1, 7, 8, 64, 1001, 4096])
def test_what_differs_is_told_whatever_the_place_and_the_size(
    driver: CudaDriver, kernels: TrustedKernels, late: int, size: int
) -> None:
    chance = random.Random(size)
    data = chance.randbytes(size)
    first, second = driver.allocate(size + 16) + late, driver.allocate(size + 16) + late
    driver.upload(first, data)
    for turn in sorted({0, size // 2, size // 16 * 8}):
        driver.upload(second, data[-turn:] + data[:-turn] if turn else data)
        assert not kernels.differ(first, second, size, turn)
        for place in (0, size - 1):
            before = driver.download(second + place, 1)
            driver.upload(second + place, bytes([before[0] ^ 1]))
            assert kernels.differ(first, second, size, turn)
            driver.upload(second + place, before)
    known = kernels.digest(first, size, 5)
    assert kernels.digest(first, size, 5) == known
    assert kernels.digest(first, size, 6) != known
    driver.upload(first + size - 1, bytes([data[-1] ^ 128]))
    assert kernels.digest(first, size, 5) != known


@pytest.mark.parametrize("dtype", [*sorted(COMPARED_TYPES), "complex64"])
def test_errors_of_elements_are_relative_to_the_largest_right_value(
    driver: CudaDriver, kernels: TrustedKernels, dtype: str
) -> None:
    check_errors(driver, kernels, dtype)


def test_what_is_finite_in_one_only_is_infinitely_wrong(driver: CudaDriver, kernels: TrustedKernels) -> None:
    check_unlike(driver, kernels)


def test_what_is_masked_is_noise_until_it_is_unmasked(driver: CudaDriver, kernels: TrustedKernels) -> None:
    data = bytes(8000)
    address = driver.allocate(len(data) + 8)
    driver.upload(address, data + b"untouche")
    kernels.mask(address, len(data), (1, 2))
    masked = bytes(driver.download(address, len(data) + 8))
    assert len({masked[n : n + 8] for n in range(0, len(data), 8)}) == 1000
    assert masked[len(data) :] == b"untouche"
    kernels.mask(address, len(data), (1, 3))
    assert bytes(driver.download(address, len(data))) != data
    kernels.mask(address, len(data), (1, 3))
    kernels.mask(address, len(data), (1, 2))
    assert bytes(driver.download(address, len(data))) == data
