"""From a CUDA source to checked programs: rules, nvcc in a cell, the cubin's own facts, launches in numbers.

All but the compiler runs on the trusted side, on numbers and bytes: a source decides its grid, its block and its
dynamic shared memory by expressions, and nothing else of a launch. In the cell, which has no device, no code of the
source runs; a source that takes over the compiler has a cell and nothing more.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records.codec import Record
from forecast_harness.clocks.compilation.cubin import (
    CubinFacts,
    check_cubin,
    cubin_facts,
    kernel_names,
    without_references,
)
from forecast_harness.clocks.records import (
    CompiledKernel,
    KernelArgument,
    LaunchPlan,
    MachineCodeError,
    PlanBuffer,
    PlanStep,
    Program,
)
from forecast_harness.sandbox.jobs import (
    FILES_FOLDER,
    CellAnswer,
    JobResult,
    JobStatus,
    ResourceLimits,
    SandboxError,
    SandboxJob,
    TensorBytes,
    printable,
)
from forecast_harness.sandbox.judge_process import JobContext
from forecast_harness.targets.cuda.source import (
    CudaConfig,
    KernelSignature,
    LaunchSizes,
    SourceLaunch,
    check_source_rules,
    read_launch,
)
from forecast_harness.targets.cuda.toolkit import find_nvcc, header_roots

COMPILE_LIMITS = ResourceLimits(wall_s=60.0, cpu_s=120.0, memory_bytes=4 << 30, trusted_s=30.0)
"""Limits of a cell in which a source is compiled."""
_JOB = "forecast_harness.clocks.compilation.nvcc:main"
SOURCE_NAME = "solution.cu"
COMPILE_S = 40.0
_NEW_NAMES_SINCE = 90
"""Compute capability from which on instructions of the architecture alone have a target of their own, as sm_90a."""
_REGISTERS_OF_A_BLOCK = 65536
_MOST_SHARED_BYTES = 228 << 10
"""Bytes of a block, on any device so far."""
_WARP = 32
_OWN_MESSAGE = re.compile(rf"^{re.escape(SOURCE_NAME)}[(:]\d+[):].*")
_HEADER_MESSAGE = re.compile(r"^(?P<file>/[^\s():]+)[(:]\d+[):].*(?:error|assert)")
_PROGRAM_MESSAGE = re.compile(r"^(?:nvcc|ptxas|cicc|cudafe\+\+|nvlink|gcc|g\+\+|cc1plus)\b.*")
_MOST_MESSAGES = 12
_MOST_MESSAGE_CHARACTERS = 300


class CudaCompileError(RecordError):
    """A source that cannot be compiled or launched; the text tells its author why."""


class CompilerUnavailable(SandboxError):
    """A failure of our own: nothing is known of the source."""


@dataclass(frozen=True)
class CudaBuild(Record):
    """The use of a CUDA source: who calls it with what, at which sizes, with which macros."""

    signature: KernelSignature
    config: Mapping[str, int] = field(default_factory=dict)
    axes: tuple[Mapping[str, int], ...] = ()
    """Axes of each case."""


@dataclass(frozen=True)
class CompiledSource:
    """A source's machine code in one config."""

    image: bytes = field(repr=False)
    launch: SourceLaunch


RunJob = Callable[[SandboxJob], JobResult]


def compile_source(
    source: str, signature: KernelSignature, config: CudaConfig, arch: int, run_job: RunJob
) -> CompiledSource:
    """Compile by nvcc in a sandbox. Raises `CudaCompileError`, and `CompilerUnavailable` for failures of our own."""
    try:
        check_source_rules(source)
        launch = read_launch(source)
        macros = launch.with_defaults(config)
    except RecordError as error:
        raise CudaCompileError(str(error)) from error
    payload = {"nvcc": find_nvcc(), "arch": architecture(arch), "macros": macros}
    result = run_job(SandboxJob(_JOB, payload, {SOURCE_NAME: source}))
    if result.status is JobStatus.INFRA_ERROR:
        raise CompilerUnavailable(result.detail[:2000])
    if result.status is not JobStatus.OK:
        raise CudaCompileError(f"nvcc was ended: {result.detail}"[:2000])
    value = result.value
    if "cubin" not in result.arrays or not isinstance(value, dict):
        raise CudaCompileError(_failure(value, header_roots()))
    try:
        image = without_references(bytes(result.arrays["cubin"].data))
        _check_image(image, signature, arch)
    except MachineCodeError as error:
        raise CudaCompileError(str(error)) from error
    return CompiledSource(image, launch)


def architecture(arch: int) -> str:
    """nvcc's name of a compute capability, with all of its instructions."""
    return f"sm_{arch}{'a' if arch >= _NEW_NAMES_SINCE else ''}"


def compiler_messages(message: str, roots: Sequence[str] = ()) -> str:
    """The lines of a compiler's output about the source itself, a header below `roots`, or from a program.

    Lines about other files, and those that quote a line of one, are left out.
    """
    lines = [
        line.strip()[:_MOST_MESSAGE_CHARACTERS]
        for line in message.splitlines()
        if _OWN_MESSAGE.match(line) or _PROGRAM_MESSAGE.match(line) or _is_about_header(line, roots)
    ]
    return printable("\n".join(lines[:_MOST_MESSAGES]))


def _is_about_header(line: str, roots: Sequence[str]) -> bool:
    result = _HEADER_MESSAGE.match(line)
    place = "" if result is None else os.path.normpath(result["file"])
    return any(place.startswith(f"{root}{os.sep}") for root in roots)


def launched_programs(
    candidate: str,
    compiled: CompiledSource,
    signature: KernelSignature,
    arch: int,
    cases: Sequence[tuple[Mapping[str, int], Sequence[PlanBuffer]]],
    config: CudaConfig,
) -> tuple[Program, ...]:
    """The one launch at each case's axes, on its buffers. Raises `CudaCompileError` for what cannot be launched."""
    facts = cubin_facts(compiled.image, signature.entry)
    result = []
    for axes, buffers in cases:
        try:
            sizes = compiled.launch.sizes(axes, config)
            _check_block(sizes, facts)
            kernel = CompiledKernel(
                signature.entry,
                arch,
                signature.kinds,
                shared_bytes=sizes.shared_bytes,
                num_warps=-(-math.prod(sizes.block) // _WARP),
                block=sizes.block,
                image=compiled.image,
            )
            arguments = tuple(
                KernelArgument(value=p.number(axes)) if p.is_number else KernelArgument(p.name)
                for p in signature.parameters
            )
            plan = LaunchPlan(tuple(buffers), (PlanStep(0, sizes.grid, arguments),))
            plan.check((kernel,), {b.name: b.size for b in buffers}, scratch_limit=0)
        except (RecordError, MachineCodeError) as error:
            raise CudaCompileError(str(error)) from error
        result.append(Program(candidate, (kernel,), plan))
    return tuple(result)


def _check_image(image: bytes, signature: KernelSignature, arch: int) -> None:
    """Raises `MachineCodeError` for machine code that differs from the signature, or keeps memory of its own."""
    names = kernel_names(image)
    if signature.entry not in names:
        raise MachineCodeError(
            f"the source has no kernel {signature.entry}, but {', '.join(names)[:200] or 'none'}: define "
            f"{signature.text}"
        )
    check_cubin(CompiledKernel(signature.entry, arch, signature.kinds, image=image))
    result = cubin_facts(image, signature.entry).parameter_bytes
    expected = tuple(8 if k.startswith("*") else int(k.lstrip("iufp")) // 8 for k in signature.kinds)
    if result is not None and result != expected:
        raise MachineCodeError(
            f"the parameters of {signature.entry} take {list(result)} bytes, those declared {list(expected)}: define "
            f"{signature.text}"
        )


def _check_block(sizes: LaunchSizes, facts: CubinFacts) -> None:
    """Compare a block with the cubin's facts of the kernel. Raises `MachineCodeError`."""
    threads, registers = math.prod(sizes.block), facts.registers
    if facts.most_threads and threads > facts.most_threads:
        raise MachineCodeError(
            f"the block has {threads} threads, and the kernel's launch bounds allow {facts.most_threads}: change one"
        )
    if threads * registers > _REGISTERS_OF_A_BLOCK:
        raise MachineCodeError(
            f"{threads} threads of {registers} registers take {threads * registers}, and a block has "
            f"{_REGISTERS_OF_A_BLOCK}: fewer threads, or __launch_bounds__({threads})"
        )
    if (shared_bytes := facts.static_shared_bytes + sizes.shared_bytes) > _MOST_SHARED_BYTES:
        raise MachineCodeError(
            f"the block takes {shared_bytes} bytes of shared memory, {sizes.shared_bytes} of them dynamic; at most "
            f"{_MOST_SHARED_BYTES} are there"
        )


def _failure(value: object, roots: Sequence[str]) -> str:
    data = value if isinstance(value, dict) else {}
    if data.get("ended", 0) is None:
        return f"nvcc was at it for more than {COMPILE_S:g} s: make the source simpler"
    messages = compiler_messages(str(data.get("said", "")), roots)
    return messages or "nvcc refused the source, for a reason that lies in none of its own lines"


_MOST_MESSAGE_BYTES = 1 << 16
_PROGRAMS = "/usr/local/bin:/usr/bin:/bin"


def main(work: JobContext) -> CellAnswer:
    """Have a cell compile: the payload and the answer are those of `run_nvcc`."""
    with work.cell() as cell:
        answer = cell.ask(f"{__name__}:run_nvcc", work.payload)
    return CellAnswer(answer.value, answer.arrays)


def run_nvcc(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Compile for `arch` (such as `sm_90a`) by `nvcc`, with `macros` defined.

    The value has `said`, the compiler's messages, and `ended`: its exit status, or None where it had not ended after
    `COMPILE_S` seconds. The array `cubin` is there where it succeeded.
    """
    cubin, messages = Path("solution.cubin").absolute(), Path("messages.txt").absolute()
    macros = [f"-D{name}={value}" for name, value in payload["macros"].items()]
    command = [payload["nvcc"], "-cubin", f"-arch={payload['arch']}", "-std=c++17", "-O3", "-w", *macros]
    command += ["-o", str(cubin), SOURCE_NAME]
    environment = {"PATH": f"{Path(payload['nvcc']).parent}:{_PROGRAMS}", "LC_ALL": "C"}
    environment |= {"TMPDIR": os.environ["TMPDIR"], "HOME": os.environ["HOME"]}
    exit_status: int | None = None
    with messages.open("wb") as stream:
        child = subprocess.Popen(
            command, cwd=FILES_FOLDER, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
        )
        try:
            exit_status = child.wait(COMPILE_S)
        except subprocess.TimeoutExpired:  # its children end with the cell
            child.kill()
    with messages.open("rb") as stream:
        message = stream.read(_MOST_MESSAGE_BYTES).decode(errors="replace")
    if exit_status != 0 or not cubin.is_file():
        return CellAnswer({"said": message, "ended": exit_status})
    image = cubin.read_bytes()
    return CellAnswer({"said": "", "ended": 0}, {"cubin": TensorBytes("uint8", (len(image),), image)})
