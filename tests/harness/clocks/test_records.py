"""Plans, scalars and machine code are held against what the trusted side knows."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest

from benchmarks.lib.machine_code.fake_code import addition, honest, image
from benchmarks.lib.machine_code.sums import COUNT
from forecast_autotune.errors import ForecastAutotuneError
from forecast_harness.clocks.compilation.cubin import (
    check_cubin,
    cubin_sections,
    referred_sections,
    without_references,
)
from forecast_harness.clocks.records import CompiledKernel, KernelArgument, MachineCodeError, Program
from forecast_harness.clocks.runner.contestant import pack_scalar, scratch_sizes
from forecast_harness.clocks.runner.messages import ObservedLaunch, decode_launches, encode_launches

GIVEN = {"x": 4 * COUNT, "y": 4 * COUNT}
PROGRAM = addition("candidate", honest(), COUNT)


def test_records_survive_json() -> None:
    for one in (PROGRAM, PROGRAM.plan, PROGRAM.kernels[0]):
        again = type(one).from_json(one.to_json())
        assert again.to_json() == one.to_json()
    PROGRAM.plan.check(PROGRAM.kernels, GIVEN, scratch_limit=1 << 20)


def test_other_inputs_than_the_problems_are_refused() -> None:
    for given in ({"x": 4 * COUNT}, {**GIVEN, "z": 4}, {**GIVEN, "y": 4}):
        with pytest.raises(MachineCodeError, match="inputs and outputs must be"):
            PROGRAM.plan.check(PROGRAM.kernels, given, scratch_limit=1 << 20)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 1.5, True, float("nan")])
def test_scalars_that_do_not_fit_are_refused(value: float) -> None:
    step = PROGRAM.plan.steps[0]
    steps = (replace(step, arguments=(*step.arguments[:3], KernelArgument(value=value))),)
    with pytest.raises(MachineCodeError, match="step 0, argument 3"):
        replace(PROGRAM.plan, steps=steps).check(PROGRAM.kernels, GIVEN, scratch_limit=1 << 20)


@pytest.mark.parametrize(
    ("kind", "value", "bits"),
    [
        ("i32", -2, "feffffff"),
        ("u8", 200, "c8"),
        ("i64", 1 << 40, "0000000000010000"),
        ("i1", True, "01"),
        ("fp16", 1.5, "003e"),
        ("bf16", 1.0, "803f"),
        ("bf16", 1.00390625, "803f"),
        ("bf16", 1.01171875, "823f"),
        ("fp32", 0.5, "0000003f"),
        ("fp64", -1, "000000000000f0bf"),
    ],
)
def test_scalars_are_packed_as_the_kernel_reads_them(kind: str, value: float, bits: str) -> None:
    assert pack_scalar(kind, value).hex() == bits


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "a b"),
        ("parameters", ["tensordesc<fp16[32]>"]),
        ("num_warps", 0),
        ("shared_bytes", 1 << 21),
        ("num_ctas", 32),
        ("arch", 7),
        ("scratch_parameters", 3),
        ("num_warps", "4"),
        ("unheard_of", 1),
    ],
)
def test_a_kernel_that_cannot_be_launched_is_refused(field: str, value: object) -> None:
    data = {**PROGRAM.kernels[0].to_json(), field: value}
    with pytest.raises(ForecastAutotuneError):
        CompiledKernel.from_json(data)


def test_scratch_of_the_compiler_counts_blocks_and_clusters() -> None:
    kernel = replace(PROGRAM.kernels[0], global_scratch_bytes=128, num_ctas=2, scratch_parameters=2)
    step = replace(PROGRAM.plan.steps[0], grid=(3, 5, 1))
    program = Program("candidate", (kernel,), replace(PROGRAM.plan, steps=(step,)))
    assert scratch_sizes(program, "0/") == {"0/sum": 4 * COUNT, "0/own-0": 128 * 2 * 15}
    with pytest.raises(MachineCodeError, match="scratch takes"):
        program.plan.check(program.kernels, GIVEN, scratch_limit=4 * COUNT)


def test_sections_are_read_and_memory_of_its_own_is_seen() -> None:
    result = image("kernel", ("*fp32",), honest(), global_bytes=64)
    assert [(s.name, s.size) for s in cubin_sections(result) if s.name.startswith(".nv")] == [
        (".nv.global", 64)
    ]
    with pytest.raises(MachineCodeError, match="from launch to launch"):
        check_cubin(CompiledKernel("kernel", 90, ("*fp32",), image=result))


def test_names_that_the_compiler_leaves_behind_are_no_memory_of_a_kernels_own() -> None:
    def kernel(initial: bytes) -> CompiledKernel:
        return CompiledKernel(
            "kernel", 90, ("*fp32",), image=image("kernel", ("*fp32",), honest(), initial=initial)
        )

    check_cubin(kernel(b"__CUDA_FTZ\0__CUDA_PREC_SQRT\0"))
    data = image("kernel", ("*fp32",), honest(), initial=b"__CUDA_FTZ\0", referred=True)
    with pytest.raises(MachineCodeError, match="from launch to launch"):
        check_cubin(CompiledKernel("kernel", 90, ("*fp32",), image=data))
    untold = without_references(data)
    check_cubin(CompiledKernel("kernel", 90, ("*fp32",), image=untold))
    assert without_references(untold) == untold != data
    assert not referred_sections(cubin_sections(untold))
    counter = image("kernel", ("*fp32",), honest(), initial=b"counter\0", referred=True)
    assert without_references(counter) == counter
    for other in (b"__CUDA_FTZ\0\1", b"counter\0", b"\1" * 28, bytes(28), b"__CUDA_FTZ\0" * 8):
        with pytest.raises(MachineCodeError, match="from launch to launch"):
            check_cubin(kernel(other))


def test_memory_that_no_section_of_the_code_holds_is_refused() -> None:
    """The address of `malloc`, and constants of a module, to which a store goes all the same."""
    whole = image("kernel", ("*fp32",), honest(), initial=b"__CUDA_FTZ\0", referred=True)
    constants = whole.replace(b".nv.global.init", b".nv.constant3\0\0")
    with pytest.raises(MachineCodeError, match="constants that a launch can change"):
        check_cubin(CompiledKernel("kernel", 90, ("*fp32",), image=constants))
    sections = cubin_sections(whole)
    symbols = next(s for s in sections if s.kind == 2).contents
    nowhere = whole.replace(symbols, bytes(6) + bytes(2) + bytes(len(symbols) - 8))
    with pytest.raises(MachineCodeError, match="names a symbol in section 0"):
        referred_sections(cubin_sections(nowhere))


@pytest.mark.parametrize("referred", [False, True])
def test_no_bytes_break_the_reading_of_sections(referred: bool) -> None:
    result = bytearray(image("kernel", ("*fp32",), honest(), initial=b"__CUDA_FTZ\0", referred=referred))
    for at in range(0, len(result)):
        for value in (0, 0x7F, 0xFF):
            changed = bytes(result[:at] + bytes([value]) + result[at + 1 :])
            try:
                referred_sections(cubin_sections(changed))
                without_references(changed)
            except MachineCodeError:
                continue
    with pytest.raises(MachineCodeError):
        cubin_sections(b"")
    with pytest.raises(MachineCodeError):
        cubin_sections(struct.pack("<16s", b"\x7fELF\x02\x01"))


def test_outputs_and_errors_of_launches_arrive_as_they_are() -> None:
    launches = (
        ObservedLaunch({"x": 4}, (b"aa", b"")),
        ObservedLaunch({}, errors={"out": 0.5, "other": float("inf")}),
    )
    facts, arrays = encode_launches(launches, "0")
    assert decode_launches(json.loads(json.dumps(facts, allow_nan=False)), arrays, "0") == launches
    with pytest.raises(KeyError):
        decode_launches(facts, {}, "0")
