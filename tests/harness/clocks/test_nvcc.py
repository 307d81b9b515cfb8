"""CUDA C++ through nvcc in a cell without a device: what is compiled, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

from forecast_harness.clocks.compilation import nvcc
from forecast_harness.clocks.compilation.cubin import (
    cubin_facts,
    cubin_sections,
    kernel_names,
    referred_sections,
)
from forecast_harness.clocks.compilation.nvcc import (
    CompiledSource,
    CudaBuild,
    CudaCompileError,
    compile_source,
    compiler_messages,
)
from forecast_harness.clocks.compilation.workers import (
    BuildRequest,
    BuildResult,
    CallCase,
    CompileWorkers,
    TensorArgument,
)
from forecast_harness.clocks.records import MachineCodeError
from forecast_harness.sandbox.jobs import ResourceLimits
from forecast_harness.targets.cuda.declaration import CudaDeclaration
from tests.harness.cuda_kernels.declared_kernel import SOURCE, declared, needs_nvcc

pytestmark = needs_nvcc
LIMITS = ResourceLimits(wall_s=60.0, cpu_s=120.0)
BODY = "  int at = blockIdx.x * THREADS + threadIdx.x;\n"


@pytest.fixture(scope="module")
def workers() -> Iterator[CompileWorkers]:
    with CompileWorkers({"arch": 90}, 1) as result:
        yield result


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> CudaDeclaration:
    return declared(tmp_path_factory.mktemp("kernel"))


def compiled(workers: CompileWorkers, kernel: CudaDeclaration, source: str = SOURCE) -> CompiledSource:
    return compile_source(source, kernel.signature, {}, 90, lambda job: workers.run_jobs([job], LIMITS)[0])


def built(
    workers: CompileWorkers,
    kernel: CudaDeclaration,
    source: str = SOURCE,
    config: dict[str, int] | None = None,
    sizes: Sequence[int] = (64, 1000),
) -> BuildResult:
    cases = tuple(
        CallCase(
            {
                "x": TensorArgument("float32", (n,), (1,)),
                "y": TensorArgument("float32", (n,), (1,), role="output"),
            }
        )
        for n in sizes
    )
    build = CudaBuild(kernel.signature, config or {}, tuple({"n": n} for n in sizes))
    return workers.submit(BuildRequest("me", source, "twice", cases, cuda=build)).result(120)


def test_a_source_becomes_one_program_for_each_call(workers: CompileWorkers, kernel: CudaDeclaration) -> None:
    result = built(workers, kernel, config={"THREADS": 256})
    assert (result.error, result.infrastructure) == ("", "")
    assert [p.plan.steps[0].grid for p in result.programs] == [(1, 1, 1), (4, 1, 1)]
    for program, n in zip(result.programs, (64, 1000), strict=True):
        (new,) = program.kernels
        assert (new.name, new.arch, new.threads, new.num_warps) == ("twice", 90, (256, 1, 1), 8)
        assert new.parameters == ("*fp32", "*fp32", "i32")
        given = [a.buffer or a.value for a in program.plan.steps[0].arguments]
        assert given == ["x", "y", n]


def test_a_cubin_says_what_its_kernel_needs(workers: CompileWorkers, kernel: CudaDeclaration) -> None:
    source = SOURCE.replace(
        BODY,
        f"{BODY}  __shared__ float part[64]; part[threadIdx.x % 64] = n; __syncthreads(); n = part[3];\n",
    ).replace("void twice", "void __launch_bounds__(128) twice")
    facts = cubin_facts(compiled(workers, kernel, source).image, "twice")
    assert facts.parameter_bytes == (8, 8, 4)
    assert 8 <= facts.registers <= 255
    assert facts.static_shared_bytes >= 256
    assert facts.most_threads == 128
    image = compiled(workers, kernel).image
    assert kernel_names(image) == ["twice"]
    with pytest.raises(MachineCodeError):
        cubin_facts(image[:200], "twice")


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("2 * x[at]", "2 * z[at]", 'solution.cu(9): error: identifier "z" is undefined'),
        ("twice(", "thrice(", "has no kernel twice, but thrice: define extern"),
        ('extern "C" ', "", "has no kernel twice, but _Z5twice"),
        ("int n)", "long long n)", "take [8, 8, 8] bytes, those declared [8, 8, 4]"),
        (", int n)", ", int n, int m)", "take [8, 8, 4, 4] bytes"),
        ('extern "C"', '__device__ float kept[9];\nextern "C"', "keeps 36 bytes from launch to launch"),
        ("2 * x[at]", "kept++ * x[at]", "keeps 4 bytes from launch to launch"),
        ("2 * x[at]", "table[at % 64] * x[at]", "constants that a launch can change"),
        ("void twice", "void __launch_bounds__(64) twice", "launch bounds allow 64"),
        ("[128, 256]", "[4096]", "the block is (4096, 1, 1)"),
        ('["(n + THREADS - 1) // THREADS"]', '["n - n"]', "the grid is (0, 1, 1)"),
        ("extern", "#include <no_such_header.h>\nextern", "no_such_header.h: No such file"),
        (BODY, BODY + '  printf("%d", at);\n', "'vprintf' is the driver's own, so leave out printf"),
        (BODY, BODY + "  y = (float*)malloc(4 * n);\n", "'malloc' is the driver's own"),
        (BODY, BODY + '  asm("bad instruction;");\n', "ptxas"),
        (BODY, BODY + "  __shared__ float part[99999];\n  part[at] = 1; n = part[n];\n", "ptxas"),
        (BODY, BODY + '  #pragma unroll\n  static_assert(THREADS == 1, "odd");\n', "odd"),
    ],
)
def test_a_source_that_breaks_a_rule_is_a_failure_of_its_own(
    workers: CompileWorkers, kernel: CudaDeclaration, old: str, new: str, said: str
) -> None:
    more = {"kept++": "__device__ float kept;\n", "table[": "__constant__ float table[64] = {1};\n"}
    head = next((text for word, text in more.items() if word in new), "")
    result = built(workers, kernel, head + SOURCE.replace(old, new))
    assert (result.programs, result.infrastructure) == ((), "")
    assert result.error.startswith("CompilationError: ")
    assert said in result.error


@pytest.mark.parametrize("header", ["cooperative_groups/reduce.h", "cub/block/block_reduce.cuh"])
def test_what_headers_leave_behind_is_no_memory_of_the_kernels(
    workers: CompileWorkers, kernel: CudaDeclaration, header: str
) -> None:
    result = compiled(workers, kernel, f"#include <{header}>\n{SOURCE}")
    sections = cubin_sections(result.image)
    kept = {n for n, s in enumerate(sections) if s.name.startswith(".nv.global") and s.size}
    assert kept, "else there is nothing to see here"
    assert not kept & referred_sections(sections)


def test_memory_that_borrows_a_librarys_name_has_no_known_address(
    workers: CompileWorkers, kernel: CudaDeclaration
) -> None:
    source = "namespace cuda { __device__ float kept; }\n" + SOURCE.replace(
        "2 * x[at]", "cuda::kept++ * x[at]"
    )
    sections = cubin_sections(compiled(workers, kernel, source).image)
    (kept,) = (n for n, s in enumerate(sections) if s.name == ".nv.global")
    assert kept not in referred_sections(sections)
    both = "__device__ float other;\n" + source
    with pytest.raises(CudaCompileError, match="keeps 8 bytes from launch to launch"):
        compiled(workers, kernel, both)


def test_messages_about_other_files_are_not_shown() -> None:
    message = (
        '/etc/passwd(1): error: identifier "root" is undefined\n'
        "  root:x:0:0:root\n"
        "          ^\n"
        'solution.cu(3): error: identifier "y" is undefined\x1b[31m\n'
        "ptxas error   : Entry function 'twice' uses too much shared data\n"
        "1 error detected in the compilation\n"
    )
    assert compiler_messages(message).splitlines() == [
        'solution.cu(3): error: identifier "y" is undefined\ufffd[31m',
        "ptxas error   : Entry function 'twice' uses too much shared data",
    ]
    headers = (
        "/opt/cuda/bin/../include/cub/x.cuh(7): error: static assertion failed\n"
        "/opt/cuda/include/../../../etc/passwd(1): error: root:x:0\n"
        "/opt/cudas/x.h(1): error: no header\n"
    )
    assert compiler_messages(headers, ["/opt/cuda"]) == headers.splitlines()[0]
    assert len(compiler_messages("solution.cu(1): error: x\n" * 9999).splitlines()) == 12


def test_the_compiler_sees_no_files_of_the_users(
    workers: CompileWorkers, kernel: CudaDeclaration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the rules about sources are passed over, the cell is what there is."""
    secret = tmp_path / "secret.h"
    secret.write_text("my_password_7\n")
    monkeypatch.setattr("forecast_harness.clocks.compilation.nvcc.check_source_rules", lambda _: None)
    with pytest.raises(CudaCompileError) as caught:
        compiled(workers, kernel, f'#include "{secret}"\n{SOURCE}')
    assert "my_password_7" not in str(caught.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "text",
    [
        "template <int N> struct Bomb { static constexpr int v = Bomb<N - 1>::v + Bomb<N - 2>::v; };\n"
        "template <int N, int M> struct Pair { using left = typename Pair<N - 1, 2 * M>::left; "
        "using right = typename Pair<N - 1, 2 * M + 1>::right; };\nusing Big = Pair<40, 1>::left;\n",
        "constexpr long spin(long n) { long s = 0; for (long i = 0; i < n; ++i) s += i; return s; }\n"
        'static_assert(spin(1L << 60) == 1, "");\n',
        '#include "solution.cu"\n#include "solution.cu"\n',
        "#define A B B B B B B B B\n#define B C C C C C C C C\n#define C D D D D D D D D\n#define D E E E E E E E E\n"
        "#define E F F F F F F F F\n#define F G G G G G G G G\n#define G H H H H H H H H\n#define H x x x x x x x x\n"
        "#define x int a; int b; int c; int d; int e; int f; int g;\nA A A A A A A A\n",
        "error \n" * 90_000,
    ],
)
def test_a_source_that_the_compiler_chokes_on_ends(
    workers: CompileWorkers, kernel: CudaDeclaration, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    source = text + SOURCE
    limits = ResourceLimits(wall_s=6.0, cpu_s=5.0, memory_bytes=1 << 30, output_bytes=32 << 20)
    with pytest.raises(CudaCompileError) as caught:
        compile_source(source, kernel.signature, {}, 90, lambda job: workers.run_jobs([job], limits)[0])
    assert len(str(caught.value)) <= 4000
    assert len(compiled(workers, kernel).image) > 1000  # the worker goes on with the next
    assert nvcc.COMPILE_S < 60
