"""The benchmark kernels: right on ragged shapes, compilable for sm_90, honest about their work.

Kernels of every family and of every hand are interpreted and compiled to the end here; the others are traced,
interpreted with `-m slow`, and `benchmarks/data/compiled_sm90.jsonl.xz` records what compiling all of them gave.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

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


def interpreted(chosen: list[Case]) -> dict[str, list[dict[str, str]]]:
    """The worker's results of these cases."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(WORKER), *(case.name for case in chosen)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, list[dict[str, str]]] = {}
    for result in map(json.loads, done.stdout.splitlines()):
        results.setdefault(result["case"], []).append(result)
    return results


@pytest.fixture(scope="module")
def some() -> dict[str, list[dict[str, str]]]:
    return interpreted(COMPILED)


@pytest.fixture(scope="module")
def others() -> dict[str, list[dict[str, str]]]:
    return interpreted(OTHERS)


def by_name(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", COMPILED, ids=by_name)
def test_small_shapes_agree_with_the_reference(case: Case, some: dict[str, list[dict[str, str]]]) -> None:
    assert_right(case, some[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=by_name)
def test_small_shapes_of_the_others_agree_with_the_reference(
    case: Case, others: dict[str, list[dict[str, str]]]
) -> None:
    assert_right(case, others[case.name])


def assert_right(case: Case, results: list[dict[str, str]]) -> None:
    """The results of all configs of a case agree with its reference."""
    assert len({r["config"] for r in results}) >= (3 if case.wide is None else 5)
    assert [r for r in results if r["error"]] == []


def traced(case: Case, config: triton.Config, target: GPUTarget | None = None) -> str:
    """The IR of a case."""
    data = case.make("meta")
    with null_device():
        given = [dict(config.kwargs)]
        ((_, text),) = trace_many(case.kernel, data["args"], data["kwargs"], given, target=target)
    assert isinstance(text, str), text
    return text


@pytest.mark.parametrize("case", COMPILED, ids=by_name)
def test_kernels_of_every_family_and_hand_compile_for_sm_90(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    # Large tiles take longer to compile, and show no more than small ones.
    config = min(configs(case), key=lambda c: math.prod(v for v in c.kwargs.values() if isinstance(v, int)))
    target = GPUTarget("cuda", 90, 32)
    (tmp_path / "kernel.ttir").write_text(traced(case, config, target))
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    assert "cubin" in triton.compile(str(tmp_path / "kernel.ttir"), target=target, options=options).asm


@pytest.mark.parametrize("case", FIRST, ids=by_name)
def test_every_kernel_is_traced_and_read(case: Case) -> None:
    read = extract_facts(traced(case, configs(case)[0]), (), (1, 1, 1))
    assert read.load_bytes > 0
    assert read.store_bytes + read.atomic_elements > 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_spaces_names_and_work_match_the_arguments(kernel: str) -> None:
    for case in cases([kernel]):
        assert_fits(case)


def assert_fits(case: Case) -> None:
    """A plausible list without duplicates, and what the case says of its kernel's arguments."""
    names, space = case.kernel.arg_names, configs(case)
    assert 24 <= len(space) <= 110, case.name
    assert len({str(c) for c in space}) == len(space), case.name
    assert {name for c in space for name in c.kwargs} <= set(names), case.name
    assert case.key, case.name
    assert {*case.key, *case.reset_to_zero} <= set(names), case.name
    data = case.make("meta")
    tensors = [a for a in data["args"] if isinstance(a, torch.Tensor)]
    if case.bytes:
        assert case.bytes == sum(t.numel() * t.element_size() for t in tensors), case.name
    assert all(any(output is t for t in tensors) for output in data["outputs"]), case.name
    # Positional arguments, named ones and a config's own fill the signature; heuristics may add more.
    given = {*names[: len(data["args"])], *data["kwargs"], *space[0].kwargs}
    heuristics = set(getattr(case.kernel, "values", ()))
    jit = case.kernel.fn if heuristics else case.kernel
    defaults = {p.name for p in jit.params if p.has_default}
    assert set(names) - given <= heuristics | defaults, case.name
    grid = data["grid"](space[0].kwargs)
    assert 1 <= len(grid) <= 3, case.name
    assert all(isinstance(n, int) and n >= 1 for n in grid), case.name


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
