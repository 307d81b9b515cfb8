"""Kernels out of files that torch.compile has written: real ones, rendered here, and what cannot be told of one."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 13):
    pytest.skip("rendering without a device is put together for torch 2.13", allow_module_level=True)

from forecast_autotune.commands.output import UsageError
from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.store import Store
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.targets.kernels.inductor_output import kernel_names, standalone_file
from forecast_harness.targets.kernels.user_kernel import UserKernel
from forecast_harness.trials.variants.verify import survey
from forecast_harness.verify.plan import VerificationPlan
from tests.inductor_rendering import inductor_output

HALF = torch.float16
QUICK = VerificationPlan(cases=4, timed=0)

Graph = tuple[Callable[..., Any], list[tuple[tuple[int, ...], Any]]]
GRAPHS: dict[str, Graph] = {
    "pointwise": (lambda x, y: torch.relu(x + y) * 2, [((48, 40), HALF), ((48, 40), HALF)]),
    "in place": (lambda x: x.mul_(3), [((64, 32), torch.float32)]),
    "transposed": (lambda x, y: x.t().contiguous() + y, [((200, 300), HALF), ((300, 200), HALF)]),
    "persistent reduction": (lambda x: x.float().sum(-1), [((96, 256), HALF)]),
    "looped reduction": (lambda x: x.float().amax(-1), [((16, 8192), HALF)]),
    "gather": (lambda table, at: table[at], [((30, 64), HALF), ((12,), torch.int64)]),
}


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    found = {}
    for name, (function, inputs) in GRAPHS.items():
        with pytest.MonkeyPatch.context() as patch:
            found[name] = inductor_output(function, inputs, patch)
    return found


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "store"))


def written(folder: Path, text: str) -> str:
    """FILE:FN of an output's only kernel."""
    (name,) = kernel_names(text)
    path = folder / "output_code.py"
    path.write_text(text)
    return f"{path}:{name}"


@pytest.mark.parametrize("graph", sorted(GRAPHS))
def test_a_kernel_of_every_kind_is_a_kernel_with_configs_and_its_call(
    graph: str, outputs: dict[str, str], tmp_path: Path
) -> None:
    found = UserKernel.of(written(tmp_path, outputs[graph]))
    assert "torch" not in found.text.replace("torch.compile", ""), "what it needs of torch is in its module"
    assert 2 <= len(found.configs) <= 64
    assert {n for c in found.configs for n, _ in c.kwargs} <= {"XBLOCK", "YBLOCK", "R0_BLOCK"}
    call = found.module.inputs(random.Random(0))
    tensors = {n: v for n, v in call.items() if isinstance(v, torch.Tensor)}
    sizes = {tuple(v.shape) for v in tensors.values()}
    assert all(size in sizes for size, _ in GRAPHS[graph][1])
    (subject,) = found.subjects(Store.default())
    assert subject.inputs
    for config in found.configs:
        assert all(n >= 1 for n in call["grid"](dict(config.kwargs)))


PROGRAM = """
import importlib.util, random, sys, torch
for path in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("own", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (kernel,) = (value for value in vars(module).values() if hasattr(value, "configs"))
    given = module.inputs(random.Random(1))
    grid, before = given.pop("grid"), {n: v.clone() for n, v in given.items() if hasattr(v, "clone")}
    chosen = module.CONFIGS[len(module.CONFIGS) // 2].kwargs
    kernel.fn[grid(chosen)](**given, **chosen)
    torch.save([before, {n: given[n] for n in before}], path + ".pt")
"""


@pytest.mark.slow
def test_it_computes_what_the_graph_computes(outputs: dict[str, str], tmp_path: Path) -> None:
    """In Triton's interpreter, which knows no libdevice: none of these needs it."""
    files = {}
    for graph, text in outputs.items():
        files[graph] = str(UserKernel.of(written(tmp_path, text)).path)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", PROGRAM, *files.values()], check=True, env=environment)
    for graph, path in files.items():
        before, after = torch.load(f"{path}.pt")
        function, inputs = GRAPHS[graph]
        given = [v for n, v in before.items() if n.startswith("in")]
        own = [next(v for v in given if (tuple(v.shape), v.dtype) == form) for form in inputs]
        if len({form for form in inputs}) < len(inputs):
            own = given[: len(inputs)]
        expected = function(*(v.clone() for v in own))
        outs = [v for n, v in after.items() if "out" in n and v.numel() == expected.numel()]
        assert any(torch.allclose(v.reshape(expected.shape), expected, atol=1e-2) for v in outs), graph


@pytest.mark.parametrize("graph", ["pointwise", "persistent reduction"])
def test_variants_of_it_can_be_verified(
    graph: str, outputs: dict[str, str], tmp_path: Path, judging: SandboxLane
) -> None:
    (subject,) = UserKernel.of(written(tmp_path, outputs[graph])).subjects(Store.default())
    known = survey(subject, judging, plan=QUICK)
    assert len(known.writes) == 1
    assert known.writes[0].startswith(("out_ptr", "in_out_ptr"))
    assert known.deterministic
    assert all(not isinstance(word, str) for word in known.words.values()), "its sizes are compiled in"


def test_the_same_output_is_the_same_file(outputs: dict[str, str], tmp_path: Path) -> None:
    place = written(tmp_path, outputs["pointwise"])
    assert UserKernel.of(place).path == UserKernel.of(place).path


def test_a_kernel_that_the_output_has_not_is_told_with_those_that_it_has(
    outputs: dict[str, str], tmp_path: Path
) -> None:
    place = written(tmp_path, outputs["pointwise"])
    path, _, name = place.rpartition(":")
    assert standalone_file(outputs["pointwise"], "gone") is None
    with pytest.raises(SettingsError, match=rf"has no kernel 'gone'; it has {name}"):
        UserKernel.of(f"{path}:gone")


def swapped(before: str, after: str) -> Callable[[str], str]:
    return lambda text: re.sub(before, after, text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swapped(r"'grid_type': 'Grid1D'", "'grid_type': 'SplitScanGrid'"), "launched on a SplitScanGrid"),
        (swapped(r"'grid_type': 'Grid1D',", ""), "has no grid_type: torch 2.7"),
        (swapped(r"\(48, 40\), \(40, 1\)", "(s0, 40), (40, 1)"), "dynamic=False"),
        (swapped(r", 1920, stream", ", s0*40, stream"), "dynamic=False"),
        (swapped(r"XBLOCK : tl\.constexpr", "XBLOCK : tl.constexpr, RSPLIT : tl.constexpr"), "RSPLIT"),
        (swapped(r"\w+\.run\(", "call_somehow("), "is called nowhere"),
        (swapped(r"'\*fp16'", "'*fp3'"), "unknown type"),
        (swapped(r"size_hints=\{'x': \d+\}", "size_hints={'x': s0}"), "dynamic=False"),
        (swapped(r"size_hints=", "sizes="), "has no size_hints"),
        (swapped(r"size_hints=\{'x': (\d+)\}", r"size_hints=[\1]"), "names neither sizes"),
        (swapped(r"size_hints=\{'x': \d+\}", "size_hints={[]: 1}"), "is no constant"),
        (swapped("'Grid1D'", "['Grid1D']"), "is launched on a"),
        (swapped(r"(assert_size_stride|rand_strided|empty_strided_cuda)\(.*\)", r"\1()"), "dynamic=False"),
        (swapped("'Grid1D'", "'Grid2D'"), "ynumel=None"),
        (swapped("xnumel", "elements"), "xnumel=None"),
    ],
)
def test_what_cannot_be_told_of_a_call_is_an_error(
    change: Callable[[str], str], said: str, outputs: dict[str, str]
) -> None:
    text = outputs["pointwise"]
    (name,) = kernel_names(text)
    assert change(text) != text
    with pytest.raises(RecordError, match=said):
        standalone_file(change(text), name)


@pytest.mark.parametrize("rest", ["(", "x = " + "-" * 60_000 + "1", "x = " + "(" * 400, "\0"])
def test_a_hostile_text_is_refused_in_one_line(rest: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.py"
    path.write_text(f"async_compile.triton('k', 'pass')\n{rest}")
    with pytest.raises(UsageError, match="must be Python") as told:
        UserKernel.of(f"{path}:k")
    assert len(str(told.value)) < 1000


@pytest.mark.parametrize(
    "source", ["pass", "def k(x): pass", "import os", "@a(1)\n@b(2)\ndef k(x): pass", "("]
)
def test_a_kernels_text_of_another_form_is_refused(source: str) -> None:
    with pytest.raises(RecordError):
        standalone_file(f"async_compile.triton('k', {source!r})", "k")
