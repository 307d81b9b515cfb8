"""The runner's own kernels: the assembler takes them, and those that watch buffers miss nothing."""

from __future__ import annotations

import math
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("torch")

import torch

from benchmarks.lib.machine_code.device_sums import BODIES, compile_sums
from benchmarks.lib.machine_code.sums import SumCall, objection
from forecast_harness.clocks.compilation.workers import BuildRequest, CompileWorkers
from forecast_harness.clocks.records import Program
from forecast_harness.clocks.runner import kernels as texts
from forecast_harness.clocks.runner.client import RunnerClient, facts_for_workers
from forecast_harness.clocks.runner.driver import CudaDriver
from forecast_harness.clocks.runner.kernels import COMPARED_TYPES, RunnerKernels, error_kernel_text
from forecast_harness.sandbox.jobs import tensor_to_bytes
from forecast_harness.targets.packs.load import load_pack
from forecast_harness.targets.packs.schema import Language
from forecast_harness.trials.kernel_cell import relative_error
from forecast_harness.trials.machine_code.targets import PackCalls

TEXTS = (
    *(texts.HEADER, texts.ADD, texts.PAUSE, texts.OVERWRITE, texts.MASK, texts.GAPS, texts.RENEW),
    *(make(unit) for make in (texts.compare_text, texts.digest_text) for unit in (1, 8)),
    *(error_kernel_text(dtype) for dtype in sorted(COMPARED_TYPES)),
)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_assembler_takes_them(tmp_path: Path, arch: str) -> None:
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not assembler.exists():
        pytest.skip("this Triton has no ptxas")
    source = tmp_path / "kernel.ptx"
    source.write_text("\n".join(TEXTS))
    command = [str(assembler), f"--gpu-name={arch}", str(source), "-o", str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def driver(fake_driver: Path) -> CudaDriver:
    return CudaDriver(str(fake_driver))


@pytest.fixture(scope="module")
def kernels(driver: CudaDriver) -> RunnerKernels:
    return RunnerKernels(driver)


Runner = tuple[CudaDriver, RunnerKernels]


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def each(request: pytest.FixtureRequest) -> Runner:
    driver = request.getfixturevalue("driver") if request.param == "fake" else CudaDriver()
    return driver, RunnerKernels(driver)


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


COUNT = 10_001
"""No multiple of a block."""


def told_error(each: Runner, got: torch.Tensor, right: torch.Tensor) -> float:
    """What the device says of two tensors, each behind one element that is nobody's."""
    driver, kernels = each
    late, places = got.element_size(), list[int]()
    for tensor in (got, right):
        data = bytes(tensor_to_bytes(tensor).data)
        places.append(driver.allocate(late + len(data)) + late)
        driver.upload(places[-1], data)
    dtype = str(got.dtype).removeprefix("torch.")
    result = kernels.relative_error(places[0], places[1], got.numel() * late, dtype)
    for place in places:
        driver.free(place - late)
    return result


@pytest.mark.parametrize("dtype", [*sorted(COMPARED_TYPES), "complex64"])
def test_errors_of_elements_are_relative_to_the_largest_right_value(each: Runner, dtype: str) -> None:
    """Equal, a little off, far off: as the host has it."""
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(3)
    right = (torch.rand(COUNT, generator=generator) * 100).to(kind)
    assert told_error(each, right.clone(), right) == 0.0
    for place in (0, COUNT // 2, COUNT - 1):
        got = right.clone()
        got[place] = 0 if bool(right[place]) else 1
        if dtype not in COMPARED_TYPES:
            assert told_error(each, got, right) == math.inf
            continue
        assert math.isclose(told_error(each, got, right), relative_error(got, right), rel_tol=1e-5)


def test_what_is_finite_in_one_only_is_infinitely_wrong(each: Runner) -> None:
    right = torch.tensor([1.0, math.inf, math.nan, -2.0])
    assert told_error(each, torch.tensor([1.0, -math.inf, math.inf, -2.5]), right) == 0.25
    for got in ([1.0, 7.0, math.nan, -2.0], [math.nan, math.inf, math.nan, -2.0]):
        assert told_error(each, torch.tensor(got), right) == math.inf


_ALL = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
WORD = 8


def mixed(value: int) -> int:
    """As splitmix64 mixes 64 bits."""
    value &= _ALL
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _ALL
    return value ^ value >> 31


def units(data: bytes, size: int) -> list[int]:
    """The whole words of some bytes, or the bytes."""
    return [int.from_bytes(data[n : n + size], "little") for n in range(0, len(data) - size + 1, size)]


def buffer_digest(data: bytes, key: int) -> int:
    """Of a buffer at a whole word."""
    whole = len(data) // WORD * WORD
    result = 0
    for size, part in ((WORD, data[:whole]), (1, data[whole:])):
        result += sum(mixed((n * _STEP + key) ^ unit) for n, unit in enumerate(units(part, size)))
    return result & _ALL


def gap_digest(address: int, data: bytes, key: int) -> int:
    """Of a gap's units and their addresses."""
    size = 1 if address % WORD or len(data) % WORD else WORD
    return (
        sum(mixed(((address + size * n) * _STEP + key) ^ unit) for n, unit in enumerate(units(data, size)))
        & _ALL
    )


@pytest.mark.parametrize("size", [200, 4096, 40_001])
def test_digests_are_as_the_host_has_them(each: Runner, size: int) -> None:
    """A buffer of that size, and gaps from one byte to that size, some at no whole word."""
    driver, kernels = each
    chance = random.Random(size)
    data, key = chance.randbytes(size), chance.getrandbits(64)
    address = driver.allocate(size + WORD)
    driver.upload(address, data)
    assert kernels.digest(address, size, key) == buffer_digest(data, key)
    gaps = [(address + late, length) for late in (0, 1, 3, 8) for length in (1, 8, 129, size - 8)]
    kernels.queue_gaps(gaps, key)
    wanted = sum(gap_digest(at, data[at - address : at - address + length], key) for at, length in gaps)
    assert kernels.gaps_digest() == wanted & _ALL
    driver.free(address)


# --- a real device ---


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


@pytest.mark.gpu
def test_the_device_adds(device: RunnerClient) -> None:
    assert device.check_health() == ""


@pytest.mark.gpu
@pytest.mark.parametrize("what", BODIES)
def test_only_what_is_right_is_accepted(device: RunnerClient, sums: dict[str, Program], what: str) -> None:
    message = objection(device, sums[what], SumCall(), sums["right"])
    assert bool(message) == (what != "right")
    assert message.startswith(BODIES[what][1])
    assert objection(device, sums["right"], SumCall(), sums["right"]) == ""


@pytest.mark.gpu
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
