"""Solutions in a cell without a device: what they launch becomes a plan, what they compute is host code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from forecast_harness.clocks.compilation.cubin import cubin_sections, referred_sections
from forecast_harness.clocks.compilation.workers import (
    BuildRequest,
    BuildResult,
    CallCase,
    CompileWorkers,
    TensorArgument,
)
from forecast_harness.clocks.recording.solution import HostCode, TensorRecorder, flat_tensors
from forecast_harness.clocks.records import BufferRole, Program
from forecast_harness.clocks.runner.messages import ObservedLaunch
from forecast_harness.targets.packs.load import load_pack
from forecast_harness.targets.packs.schema import Language
from forecast_harness.trials.machine_code.targets import PackCalls

FACTS = {"arch": 90, "properties": {"multiprocessor_count": 7}}
ROWS = CallCase({"x": TensorArgument("float32", (5, 40), (40, 1))})
HEADER = """import torch, triton, triton.language as tl

@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

"""


@pytest.fixture(scope="module")
def workers() -> Iterator[CompileWorkers]:
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux")
    with CompileWorkers(FACTS, 1) as result:
        yield result


def build(workers: CompileWorkers, source: str, case: CallCase = ROWS, **more: object) -> BuildResult:
    request = BuildRequest("candidate", source, "run", (case,), **more)  # type: ignore[arg-type]
    return workers.submit(request).result(120)


def program(result: BuildResult) -> Program:
    assert (result.error, result.host_code, result.infrastructure) == ("", "", "")
    (matches,) = result.programs
    return matches


def test_code_with_a_function_of_cudas_library_is_told_of_no_memory_that_outlives_a_launch(
    workers: CompileWorkers,
) -> None:
    """The function leaves its names, in memory that a kernel may write."""
    source = HEADER.replace("2 * tl.load", "tl.extra.cuda.libdevice.tanh(tl.load", 1).replace(
        "mask=at < n), mask", "mask=at < n)), mask", 1
    )
    source += "def run(x):\n    y = torch.empty_like(x)\n    double[(1,)](x, y, 200, 256)\n    return y\n"
    (kernel,) = program(build(workers, source)).kernels
    sections = cubin_sections(kernel.image)
    assert [s.contents for s in sections if s.name == ".nv.global.init"] == [b"__CUDA_FTZ\0"]
    assert not referred_sections(sections) & {
        n for n, s in enumerate(sections) if s.name == ".nv.global.init"
    }


@pytest.mark.parametrize("name", ["matmul", "layer_norm", "cross_entropy"])
def test_the_triton_solutions_of_our_packs_become_machine_code(
    workers: CompileWorkers, tmp_path: Path, name: str
) -> None:
    pack = load_pack(name)
    call = PackCalls(pack, tmp_path, seed="1").draw()
    (solution,) = [s for s in pack.solutions if s.language is Language.TRITON]
    assert program(build(workers, solution.source, call.arguments)).kernels


def test_a_packs_solution_becomes_machine_code_and_a_plan(workers: CompileWorkers, tmp_path: Path) -> None:
    pack = load_pack("softmax")
    call = PackCalls(pack, tmp_path, seed="1").draw({"M": 5, "N": 40})
    result = program(build(workers, pack.solution("triton_rows").source, call.arguments))
    (kernel,) = result.kernels
    assert (kernel.arch, kernel.parameters[:3]) == (90, ("*fp32", "*fp32", "i32"))
    (step,) = result.plan.steps
    assert step.grid == (5, 1, 1)
    roles = {b.name: (b.role, b.size) for b in result.plan.buffers}
    assert roles["x"] == (BufferRole.INPUT, 800)
    (output,) = result.plan.returned
    assert roles[output.buffer] == (BufferRole.SCRATCH, 800)
    assert (output.dtype, output.shape) == ("float32", (5, 40))
    assert call.case.right is not None
    (right,) = call.case.right()
    same = ObservedLaunch({}, (right.numpy().tobytes(),))
    assert call.wrong(result, [same, same]) == ""
    turned = torch.softmax(torch.roll(call.case.tensors["x"].reshape(-1), -7).reshape(5, 40), 1)
    rolled = ObservedLaunch({"x": 28}, (turned.numpy().tobytes(),))
    assert call.wrong(result, [same, rolled]) == ""
    assert "wrong_values" in call.wrong(result, [same, ObservedLaunch({"x": 28}, same.outputs)])
    other = ObservedLaunch({}, (bytes(4) + same.outputs[0][4:],))
    assert "different bits" in call.wrong(result, [same, other])


def test_outputs_that_are_given_are_no_scratch(workers: CompileWorkers, tmp_path: Path) -> None:
    pack = load_pack("swiglu")
    call = PackCalls(pack, tmp_path, seed="1").draw()
    result = program(build(workers, pack.solution("triton_rows").source, call.arguments))
    roles = {b.name: b.role for b in result.plan.buffers}
    assert roles == {"gate": BufferRole.INPUT, "up": BufferRole.INPUT, "y": BufferRole.OUTPUT}


def test_views_fills_and_several_launches_are_steps(workers: CompileWorkers) -> None:
    source = (
        HEADER
        + """def run(x):
    y = torch.zeros((10, 40), dtype=x.dtype, device=x.device)
    flat = x.view(-1)
    double[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](flat, y[5:], 100, BLOCK=32)
    double[(2,)](flat[100:], y, 100, BLOCK=64, num_warps=2)
    return y
"""
    )
    result = program(build(workers, source))
    fill, first, second = result.plan.steps
    assert (fill.fill, fill.size, fill.pattern) == (result.plan.returned[0].buffer, 1600, 0)
    assert (first.grid, second.grid) == ((4, 1, 1), (2, 1, 1))
    assert [a.offset for a in first.arguments[:2]] == [0, 800]
    assert [a.offset for a in second.arguments[:2]] == [400, 0]
    assert [k.num_warps for k in result.kernels] == [4, 2]


def test_a_kernels_own_memory_is_scratch_whose_counters_are_zeroed_before_each_launch(
    workers: CompileWorkers,
) -> None:
    source = HEADER.replace("y, n, BLOCK", "y, n, WORKSPACE, COUNTERS, BLOCK").replace(
        "import torch, ", "import "
    ) + (
        "def workspace(meta, arguments, base, grid):\n"
        "    return (grid[0] * meta['BLOCK'], base[0]) if meta['BLOCK'] == 32 else (0, 0)\n"
    )
    case = CallCase({n: TensorArgument("float32", (200,), (1,)) for n in ("x", "y")})
    launch = {"grid": [7], "scalars": {"n": 200}, "meta": {"BLOCK": 32}, "options": {"num_warps": 1}}
    request = BuildRequest("candidate", source, "double", (case,), launches=(launch,))
    plan = program(workers.submit(request).result(120)).plan
    fill, step = plan.steps
    sizes = {b.name: b.size for b in plan.buffers if b.role is BufferRole.SCRATCH}
    assert (fill.fill in sizes, fill.size, fill.pattern) == (True, 28, 0)
    assert sorted(sizes.values()) == [28, 7 * 32 * 4]
    assert [sizes.get(a.buffer) for a in step.arguments if a.buffer] == [None, None, 7 * 32 * 4, 28]
    launch |= {"grid": [4], "meta": {"BLOCK": 64}}
    plan = program(workers.submit(replace(request, launches=(launch,))).result(120)).plan
    assert len(plan.steps) == 1  # nothing is to be zeroed
    assert [b.size for b in plan.buffers if b.role is BufferRole.SCRATCH] == [0, 0]


def test_options_and_a_decorated_kernels_first_config_are_taken(workers: CompileWorkers) -> None:
    source = (
        HEADER.replace(
            "@triton.jit",
            """@triton.autotune(
    [triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64}, num_warps=8)], key=["n"])
@triton.jit""",
        )
        + """def run(x):
    y = torch.empty_like(x)
    double[lambda meta: (triton.cdiv(200, meta["BLOCK"]),)](x, y, 200)
    return y
"""
    )
    first = program(build(workers, source))
    assert (first.plan.steps[0].grid, first.kernels[0].num_warps) == ((7, 1, 1), 4)
    forced = program(build(workers, source, options={"num_warps": 1}))
    assert forced.kernels[0].num_warps == 1


def test_a_device_is_asked_for_its_size(workers: CompileWorkers) -> None:
    source = (
        HEADER
        + """def run(x):
    y = torch.empty_like(x)
    blocks = torch.cuda.get_device_properties(x.device).multi_processor_count
    double[(blocks,)](x, y, 200, BLOCK=32)
    return y
"""
    )
    assert program(build(workers, source)).plan.steps[0].grid == (7, 1, 1)


HOST_CODE = {
    "a library's operation": "return torch.softmax(x, 1)",
    "one that is caught": "\n    try: torch.relu(x)\n    except Exception: pass\n    return torch.empty_like(x)",
    "reading a value": "return torch.empty((int(x[0, 0]) + 1,), device=x.device)",
    "a copy": "return x.clone()",
    "an operation in place": "x.mul_(2); return x",
    "another layout": "return x.t().contiguous()",
    "an output that is not contiguous": "return x.t()",
    "a tensor from the host": "return torch.tensor([1.0], device=x.device)",
}


@pytest.mark.parametrize("what", HOST_CODE)
def test_what_computes_outside_of_kernels_is_refused(what: str) -> None:
    named: dict[str, Any] = {}
    exec(f"import torch\ndef run(x):\n    {HOST_CODE[what]}\n", named)
    recorder, refused = TensorRecorder(), False
    with recorder.active():
        x = recorder.give("x", "float32", (5, 40), (40, 1), 0)
        try:
            returned = named["run"](x)
            refused = not all(t.is_contiguous() for t in flat_tensors(returned))
        except HostCode:
            refused = True
    assert refused or recorder.refused


def test_a_solution_that_computes_with_torch_is_host_code(workers: CompileWorkers) -> None:
    result = build(workers, HEADER + "def run(x):\n    return torch.softmax(x, 1)\n")
    assert "softmax" in result.host_code
    assert (result.error, result.programs) == ("", ())


VIEWS = ("x[1]", "x[1:3, ::2]", "x[..., 4]", "x[-1, None, 3:]", "x.view(-1)[7:9]", "x.t()", "x[None]")


@pytest.mark.parametrize("text", VIEWS)
def test_views_lie_where_torch_has_them(text: str) -> None:
    real = torch.arange(200.0).reshape(5, 40)
    recorder = TensorRecorder()
    with recorder.active():
        got = eval(text, {"x": recorder.give("x", "float32", (5, 40), (40, 1), 0)})
        place = recorder.place(got)
    wanted = eval(text, {"x": real})
    assert place == ("x", 4 * wanted.storage_offset())
    assert (tuple(got.shape), got.stride()) == (tuple(wanted.shape), wanted.stride())


FAILURES = {
    "raises": ("def run(x):\n    1 / 0", "ZeroDivisionError"),
    "kernel does not compile": (HEADER + "def run(x):\n    double[(1,)](x, x, 1, BLOCK=33)", "power of 2"),
    "leaves": ("import os\nos._exit(0)", "status 0"),
    "launches nothing": ("import torch\ndef run(x):\n    return torch.empty_like(x)", "1 to 64 steps"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_source_that_cannot_be_compiled_says_why(workers: CompileWorkers, what: str) -> None:
    source, says = FAILURES[what]
    result = build(workers, source)
    assert says in result.error
    assert not result.infrastructure


def test_an_answer_that_is_forged_is_refused(workers: CompileWorkers) -> None:
    source = (
        HEADER
        + """import forecast_harness.clocks.recording.solution as recording
from forecast_harness.clocks.records import PlanStep
taken = recording._PlanWriter._step
def forged(self, launch):
    step = taken(self, launch)
    return PlanStep(step.kernel, (2**40, 1, 1), step.arguments)
recording._PlanWriter._step = forged
def run(x):
    y = torch.empty_like(x)
    double[(2,)](x, y, 100, BLOCK=64)
    return y
"""
    )
    result = build(workers, source)
    assert "grid" in result.error
    assert not result.programs
