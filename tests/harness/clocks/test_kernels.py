"""The runner's own kernels: the assembler takes them, and those that watch buffers miss nothing."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from forecast_harness.clocks.runner import kernel_texts
from forecast_harness.clocks.runner.driver import CudaDriver
from forecast_harness.clocks.runner.kernel_texts import COMPARED_TYPES, error_kernel_text
from forecast_harness.clocks.runner.kernels import RunnerKernels
from tests.harness.clocks.element_errors import check_errors, check_unlike
from tests.harness.clocks.host_digests import check_digests

triton = pytest.importorskip("triton")


TEXTS = {
    "add": kernel_texts.ADD,
    "pause": kernel_texts.PAUSE,
    "overwrite": kernel_texts.OVERWRITE,
    "mask": kernel_texts.MASK,
    "gaps": kernel_texts.GAPS,
    "renew": kernel_texts.RENEW,
    **{f"compare {unit}": kernel_texts.compare_text(unit) for unit in (1, 8)},
    **{f"digest {unit}": kernel_texts.digest_text(unit) for unit in (1, 8)},
    **{f"error {dtype}": error_kernel_text(dtype) for dtype in sorted(COMPARED_TYPES)},
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_assembler_takes_it(tmp_path: Path, name: str, arch: str) -> None:
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not assembler.exists():
        pytest.skip("this Triton has no ptxas")
    source = tmp_path / "kernel.ptx"
    source.write_text(kernel_texts.HEADER + TEXTS[name])
    command = [str(assembler), f"--gpu-name={arch}", str(source), "-o", str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def driver(fake_driver: Path) -> CudaDriver:
    return CudaDriver(str(fake_driver))


@pytest.fixture(scope="module")
def kernels(driver: CudaDriver) -> RunnerKernels:
    return RunnerKernels(driver)


@pytest.mark.parametrize("late", [0, 1, 8])
@pytest.mark.parametrize("size", [1, 7, 8, 64, 1001, 4096])
def test_what_differs_is_told_whatever_the_place_and_the_size(
    driver: CudaDriver, kernels: RunnerKernels, late: int, size: int
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
    driver: CudaDriver, kernels: RunnerKernels, dtype: str
) -> None:
    check_errors(driver, kernels, dtype)


@pytest.mark.parametrize("size", [200, 4096, 40_001])
def test_digests_are_as_the_host_has_them(driver: CudaDriver, kernels: RunnerKernels, size: int) -> None:
    check_digests(driver, kernels, size)


def test_what_is_finite_in_one_only_is_infinitely_wrong(driver: CudaDriver, kernels: RunnerKernels) -> None:
    check_unlike(driver, kernels)


def test_what_is_masked_is_noise_until_it_is_unmasked(driver: CudaDriver, kernels: RunnerKernels) -> None:
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


def test_a_part_of_a_buffer_is_renewed_and_made_a_copy_again(
    driver: CudaDriver, kernels: RunnerKernels
) -> None:
    size, turn = 1 << 16, 1 << 10
    data = random.Random(0).randbytes(size)
    copied, work = driver.allocate(size), driver.allocate(size)
    driver.upload(copied, data)
    driver.upload(work, data)
    rotated = data[turn:] + data[:turn]
    before, seen = 0, []
    for key in (11, 12):
        kernels.renew(work, copied, size, turn, before, key)
        got = bytes(driver.download(work, size))
        parts = [slice(n, n + 32) for n in range(0, size, 32)]
        renewed = [p.start for p in parts if got[p] == rotated[p]]
        assert all(got[p] in (data[p], rotated[p]) for p in parts)
        assert len(parts) / 32 < len(renewed) < len(parts) / 8
        seen.append(renewed)
        before = key
    assert seen[0] != seen[1]
    kernels.renew(work, copied, size, 0, before, 0)
    assert bytes(driver.download(work, size)) == data


@pytest.mark.parametrize("count", [1, 5, 40])
def test_gaps_are_watched_together_whatever_their_place_and_size(
    driver: CudaDriver, kernels: RunnerKernels, count: int
) -> None:
    chance = random.Random(count)
    memory = driver.allocate(count * 1024)
    gaps = [(memory + 1024 * n + chance.choice((0, 3, 8)), chance.choice((1, 64, 513))) for n in range(count)]
    for address, size in gaps:
        driver.upload(address, chance.randbytes(size))

    def digest(key: int) -> int:
        kernels.queue_gaps(gaps, key)
        return kernels.gaps_digest()

    known = digest(7)
    assert (digest(7), digest(8) == known) == (known, False)
    for address, size in gaps:
        last = driver.download(address + size - 1, 1)
        driver.upload(address + size - 1, bytes([last[0] ^ 1]))
        assert digest(7) != known
        driver.upload(address + size - 1, last)
    assert digest(7) == known
