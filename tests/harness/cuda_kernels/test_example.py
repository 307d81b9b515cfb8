"""The files of the page on CUDA kernels, and of docs/examples/cuda, which a device searches."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from forecast_autotune.commands import main
from forecast_autotune.records import Outcome
from forecast_harness.clocks.compilation.nvcc import COMPILE_LIMITS, compile_source, launched_programs
from forecast_harness.clocks.records import BufferRole, PlanBuffer
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.search.log import read_log
from forecast_harness.search.state import SearchState, replay_events
from forecast_harness.targets.cuda.declaration import read_cuda_declaration
from forecast_harness.targets.statement import cuda_statement
from tests.harness.cuda_kernels.declared_kernel import needs_nvcc

DOCS = Path(__file__).parents[3] / "docs"
EXAMPLE = DOCS / "examples" / "cuda"
FENCE = re.compile(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def test_the_page_shows_the_files_of_the_example() -> None:
    shown = dict(FENCE.findall((DOCS / "how_to" / "cuda_kernels.md").read_text()))
    assert shown == {
        name: (EXAMPLE / name).read_text() for name in ("softmax.cu", "softmax.toml", "reference.py")
    }


@needs_nvcc
@pytest.mark.parametrize("file", ["softmax.cu", "faster/block_per_row.cu"])
def test_its_sources_compile_and_launch_at_every_size(file: str) -> None:
    declared = read_cuda_declaration(f"{EXAMPLE}/softmax.cu:row_softmax")
    signature, source = declared.signature, (EXAMPLE / file).read_text()
    with SandboxLane() as lane:
        made = compile_source(source, signature, {}, 90, lambda job: lane.run(job, COMPILE_LIMITS))
    axes = [dict(w.axes) for w in declared.pack.workloads] + [{"rows": 1, "columns": 1}]
    cases = [
        (
            one,
            [
                PlanBuffer("x", BufferRole.INPUT, 4 * one["rows"] * one["columns"]),
                PlanBuffer("y", BufferRole.OUTPUT, 4 * one["rows"] * one["columns"]),
            ],
        )
        for one in axes
    ]
    for config in [{}, *made.launch.configs]:
        assert len(launched_programs("it", made, signature, 90, cases, config)) == 3


def test_the_statement_has_an_example_that_is_read() -> None:
    declared = read_cuda_declaration(f"{EXAMPLE}/softmax.cu:row_softmax")
    text = cuda_statement(declared.pack, declared.signature, "cuda")
    assert "rows=8192, columns=1024" in text
    assert "terms explains" in text


KERNEL = f"{EXAMPLE}/softmax.cu:row_softmax"
FASTER = EXAMPLE / "faster" / "block_per_row.cu"
LAST = "y[i] = expf(x[i] - most) / sum;"
HOSTILE = {
    "wrong": (LAST, "y[i] = expf(x[i] - most) / (sum + 1);", Outcome.INCORRECT),
    "outside": (LAST, f"{LAST} y[(int)threadIdx.x - 300] = 7;", Outcome.INCORRECT),
    "mutates": (LAST, f"{LAST} const_cast<float*>(x)[threadIdx.x] = 7;", Outcome.INCORRECT),
    "illegal": (LAST, f"{LAST} *(float*)16 = sum;", Outcome.RUNTIME_ERROR),
    "endless": (LAST, f"{LAST} while (*(volatile float*)y >= 0) {{}}", Outcome.TIMEOUT),
    "keeps": ("extern", "__device__ float kept;\nextern", Outcome.COMPILE_ERROR),
    "borrows": (
        "{\n  x +=",
        "{\n  cuda::kept[0] += 1;\n  x +=",
        Outcome.RUNTIME_ERROR,
    ),
    "reads": ("template", '#include "/etc/passwd"\ntemplate', Outcome.COMPILE_ERROR),
    "signature": ("int rows,", "long long rows,", Outcome.COMPILE_ERROR),
    "huge": ('grid = ["rows"]', 'grid = ["rows * 2147483647"]', Outcome.COMPILE_ERROR),
}


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[SearchState, Path]:
    sources = tmp_path_factory.mktemp("sources")
    text = FASTER.read_text()
    (sources / "faster.cu").write_text(text)
    for name, (old, new, _) in HOSTILE.items():
        assert old in text
        head = "namespace cuda { __device__ float kept[9]; }\n" if name == "borrows" else ""
        (sources / f"{name}.cu").write_text(head + text.replace(old, new, 1))
    folder = tmp_path_factory.mktemp("search") / "found"
    words = ["search", KERNEL, "--out", str(folder), "--proposer", f"recorded:{sources}", "--trials", "3"]
    words += ["--surrogate", "none", "--samples", "12", "--k", "12", "--gpu-budget", "16"]
    words += ["--parents", "1", "--path", "machine-code"]
    assert main(words) == 0
    return replay_events(read_log(folder / "log.jsonl")), folder


@pytest.mark.gpu
@needs_nvcc
def test_the_faster_source_is_verified_and_confirmed(searched: tuple[SearchState, Path]) -> None:
    state, folder = searched
    assert state.nodes[state.best].provenance.note == "faster.cu"
    told = json.loads((folder / "summary.json").read_text())
    print(f"{told['speedup']:.2f} times the first seed, {told['evidence']}")
    assert told["confirmed"]
    assert told["speedup"] > 1.5
    assert (folder / "best.cu").is_file()


@pytest.mark.gpu
@needs_nvcc
def test_sources_that_break_rules_are_refused(searched: tuple[SearchState, Path]) -> None:
    state, _ = searched
    found = {state.nodes[n].provenance.note.removesuffix(".cu"): j for n, j in state.judged.items()}
    for name, (_, _, outcome) in HOSTILE.items():
        judged = found[name]
        print(f"{name}: {judged.outcome}: {judged.feedback[:160]}")
        assert judged.outcome is outcome, f"{name}: {judged.feedback}"
        assert "root:" not in judged.feedback


@pytest.mark.gpu
@needs_nvcc
def test_sources_are_verified_and_compared_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", KERNEL, str(FASTER), "--json"]) == 0
    capsys.readouterr()
    assert main(["bench", KERNEL, str(FASTER), "--against", "base", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    print({e["solution"]: (e["outcome"], e["gain"]) for e in entries})
    assert {e["solution"]: e["outcome"] for e in entries} == {"base": "incumbent", "block_per_row": "faster"}
