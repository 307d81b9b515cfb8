"""The benchmark kernels: right on ragged shapes, compilable for sm_90, honest about their work.

Kernels of every family and of every hand are interpreted and compiled to the end here; the others are traced,
interpreted with `-m slow`, and
`benchmarks/data/compiled_sm90.jsonl.xz` records what compiling all of them gave.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels import Case, cases, configs, mismatch, reset
from forecast_autotune.features.trace import trace_many
from forecast_autotune.features.ttir.extraction import extract_facts
from forecast_integrations.triton.null_device import null_device

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("kernel_worker.py")
CASES = cases()
KERNELS = list(dict.fromkeys(c.name.partition("/")[0] for c in CASES))
FIRST = [cases([kernel])[0] for kernel in KERNELS]
"""One case of each kernel: the small shape is the same for most of its cases."""


def one_of_each(found: list[Case]) -> list[Case]:
    """Cases that have every family, and every hand, among them."""
    chosen = list({c.hand: c for c in reversed(found)}.values())
    seen = {c.family for c in chosen}
    return chosen + list({c.family: c for c in reversed(found) if c.family not in seen}.values())


COMPILED = one_of_each(FIRST)
OTHERS = [c for c in FIRST if c not in COMPILED]


def start(mode: str, names: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """A worker whose lines, and errors, go to files of `folder`."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "TRITON_INTERPRET": "1" if mode == "interpret" else "0",
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TRITON_DEFAULT_FP_FUSION": "1",
        "OMP_NUM_THREADS": "1",  # there are two of them
    }
    folder.mkdir()
    command = [sys.executable, str(WORKER), mode, *names]
    with (folder / "lines").open("wb") as lines, (folder / "errors").open("wb") as errors:
        return subprocess.Popen(command, env=environment, stdout=lines, stderr=errors)


def results_of(worker: subprocess.Popen[bytes], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what a worker reports, by case."""
    assert worker.wait(600) == 0, (folder / "errors").read_text()[-4000:]
    fields: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / "lines").read_text().splitlines():
        result = json.loads(line)
        fields.setdefault(result["case"], []).append(result)
    return fields


@pytest.fixture(scope="module")
def workers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], Path]]]:
    """Both workers, with their folders: one runs while the other does."""
    folder = tmp_path_factory.mktemp("workers")
    given = {"interpret": COMPILED, "compile": COMPILED}
    running = {
        mode: (start(mode, [c.name for c in chosen], folder / mode), folder / mode)
        for mode, chosen in given.items()
    }
    yield running
    for worker, _ in running.values():
        worker.kill()
        worker.wait()


@pytest.fixture(scope="module")
def interpreted(
    workers: dict[str, tuple[subprocess.Popen[bytes], Path]],
) -> dict[str, list[dict[str, Any]]]:
    return results_of(*workers["interpret"])


@pytest.fixture(scope="module")
def interpreted_others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("others") / "interpret"
    return results_of(start("interpret", [c.name for c in OTHERS], folder), folder)


@pytest.fixture(scope="module")
def compiled(
    workers: dict[str, tuple[subprocess.Popen[bytes], Path]],
) -> dict[str, list[dict[str, Any]]]:
    return results_of(*workers["compile"])


def by_name(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", COMPILED, ids=by_name)
def test_small_shapes_agree_with_the_reference(
    case: Case, interpreted: dict[str, list[dict[str, Any]]]
) -> None:
    assert_right(case, interpreted[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=by_name)
def test_small_shapes_of_the_others_agree_with_the_reference(
    case: Case, interpreted_others: dict[str, list[dict[str, Any]]]
) -> None:
    assert_right(case, interpreted_others[case.name])


def assert_right(case: Case, results: list[dict[str, Any]]) -> None:
    """The results of all configs of a case agree with its reference."""
    assert len({r["config"] for r in results}) >= (3 if case.wide is None else 5)
    assert [r for r in results if r["error"]] == []


@pytest.mark.parametrize("case", COMPILED, ids=by_name)
def test_kernels_of_every_family_and_hand_compile_for_sm_90(
    case: Case, compiled: dict[str, list[dict[str, Any]]]
) -> None:
    assert all("cubin" in result["stages"] for result in compiled[case.name])


@pytest.mark.parametrize("case", FIRST, ids=by_name)
def test_every_kernel_is_traced_and_read(case: Case) -> None:
    data, config = case.make("meta"), configs(case)[0]
    with null_device():
        ((_, text),) = trace_many(case.kernel, data["args"], data["kwargs"], [dict(config.kwargs)])
    assert isinstance(text, str), text
    read = extract_facts(text, (), (1, 1, 1))
    assert read.load_bytes > 0
    assert read.store_bytes + read.atomic_elements > 0


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_space_is_a_plausible_list_without_duplicates(case: Case) -> None:
    result = configs(case)
    assert 24 <= len(result) <= 110
    assert len({str(c) for c in result}) == len(result)
    assert {name for c in result for name in c.kwargs} <= set(case.kernel.arg_names)


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_names_and_work_match_the_arguments(case: Case) -> None:
    names = case.kernel.arg_names
    assert case.key
    assert {*case.key, *case.reset_to_zero} <= set(names)
    data = case.make("meta")
    tensors = [a for a in data["args"] if isinstance(a, torch.Tensor)]
    if case.bytes:
        assert case.bytes == sum(t.numel() * t.element_size() for t in tensors)
    assert all(any(output is t for t in tensors) for output in data["outputs"])
    # Positional arguments, named ones and a config's own fill the signature; heuristics may add more.
    given = {*names[: len(data["args"])], *data["kwargs"], *configs(case)[0].kwargs}
    heuristics = set(getattr(case.kernel, "values", ()))
    jit = case.kernel.fn if heuristics else case.kernel
    defaults = {p.name for p in jit.params if p.has_default}
    assert set(names) - given <= heuristics | defaults
    grid = data["grid"](configs(case)[0].kwargs)
    assert 1 <= len(grid) <= 3
    assert all(isinstance(n, int) and n >= 1 for n in grid)


@pytest.mark.parametrize("case", FIRST, ids=by_name)
def test_inputs_are_the_same_every_time_and_wrong_outputs_are_noticed(case: Case) -> None:
    data, again = case.make("cpu", small=True), case.make("cpu", small=True)
    outputs = {id(o) for o in data["outputs"]}
    for one, two in zip(data["args"], again["args"], strict=True):
        if isinstance(one, torch.Tensor) and id(one) not in outputs:
            assert torch.equal(one, two)

    reset(case, data)
    assert mismatch(case, data), "outputs that nobody wrote must not pass"
    expected = case.reference(data)
    for output, want in zip(data["outputs"], expected, strict=True):
        output.copy_(want)
    assert mismatch(case, data) == ""
    data["outputs"][-1].view(-1)[-1] += 1.0
    assert f"output {len(expected) - 1}: 1 of " in mismatch(case, data, expected)
