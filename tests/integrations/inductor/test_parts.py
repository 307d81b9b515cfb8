"""The parts of the hooks: names of choices, the frozen view, the leash, patches, generated kernels."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from torch._dynamo.source import ConstantSource
from torch._inductor import codecache, config
from torch._inductor.choices import InductorChoices
from torch._inductor.kernel import mm
from torch._inductor.kernel_template_choice import KernelTemplateChoice
from torch.fx.experimental.symbolic_shapes import DimDynamic

from forecast_autotune.errors import SettingsError
from forecast_autotune.records import (
    Argument,
    Candidate,
    Config,
    Device,
    Kernel,
    Outcome,
    Problem,
)
from forecast_autotune.settings import Mode
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_integrations.inductor import api
from forecast_integrations.inductor.choices import records
from forecast_integrations.inductor.choices.records import (
    is_extern,
    parameter_scalar,
    parse_description,
    problem_of,
)
from forecast_integrations.inductor.harvest import failure_outcome
from forecast_integrations.inductor.hooks import selection
from forecast_integrations.inductor.hooks.context import HookContext, PatchSet
from forecast_integrations.inductor.session import SafeSurrogate, TuningSession, WarnOnce
from forecast_integrations.inductor.summary import TorchCompileSummary
from tests.integrations.inductor.graphs import (
    H200,
    graph,
    node,
    product_inputs,
    selection_hooked,
    serving,
)

TWO = [Candidate(Config.of({"i": i})) for i in range(2)]


def a_problem(m: int = 8) -> Problem:
    shape = Argument("in0", "tensor", "float16", (m, 8), (8, 1))
    return Problem.of(Kernel("mm", "inductor"), [shape], Device("somewhere"))


# --- records ---


def test_a_problem_depends_on_what_changes_the_answer() -> None:
    def of(name: str = "mm", m: int = 64, dtype: Any = torch.float16, stride: Any = None) -> Problem:
        operands = [node("a", m, 16, device="cpu", dtype=dtype), node("b", 16, 32, device="cpu", dtype=dtype)]
        if stride is not None:
            operands[0].layout.stride = stride
        return problem_of(name, operands, node("o", m, 32, device="cpu", dtype=dtype).layout)

    with graph():
        problem = of()
        others = [of("bmm"), of(m=65), of(dtype=torch.float32), of(stride=[1, 64])]
        assert of().id == problem.id
    assert len({problem.id, *(p.id for p in others)}) == 5
    assert [(a.name, a.shape, a.stride, a.dtype) for a in problem.arguments] == [
        ("in0", (64, 16), (16, 1), "float16"),
        ("in1", (16, 32), (32, 1), "float16"),
        ("out", (64, 32), (32, 1), "float16"),
    ]
    assert problem.device.backend == "cpu"
    assert {"torch", "threads"} <= dict(problem.toolchain).keys()
    assert Problem.from_json(problem.to_json()).id == problem.id


def test_symbols_count_with_their_hint_and_are_marked() -> None:
    with graph() as lowering:
        size = lowering._shape_env.create_unspecified_symbol(48, ConstantSource("n"), DimDynamic.DYNAMIC)
        rows = node("a", 1, 16, device="cpu")
        rows.layout.size = [size, 16]
        problem = problem_of("mm", [rows], node("o", 4, 4, device="cpu").layout)
    assert problem.arguments[0].shape == (48, 16)
    assert "dynamic" in problem.key


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("BLOCK_M=64, ALLOW_TF32=False, ACC_TYPE='tl.float32', num_stages=3", [64, False, "tl.float32", 3]),
        ("", []),
        ("cutlass3x_sm90_tensorop", ["cutlass3x_sm90_tensorop"]),
    ],
)
def test_parameters_are_read_from_descriptions(text: str, found: list[Any]) -> None:
    assert list(parse_description(text).values()) == found
    assert list(map(type, parse_description(text).values())) == list(map(type, found))


def test_parameters_never_hold_an_address() -> None:
    def rule() -> None: ...

    assert " at 0x" in str(rule)
    assert parameter_scalar(rule) == parameter_scalar(functools.wraps(rule)(lambda: None))
    import sympy

    assert (parameter_scalar(sympy.Integer(3)), parameter_scalar(sympy.true)) == (3, True)


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        ("OutOfResources: out of resource: shared memory", Outcome.OUT_OF_RESOURCES),
        ("CompilationError: at 3:5", Outcome.COMPILE_ERROR),
        ("PTXASError: PTXAS error: Internal Triton PTX codegen error", Outcome.COMPILE_ERROR),
        (
            "CppCompileError: C++ compile error: 'x' was not declared; compilation terminated.",
            Outcome.COMPILE_ERROR,
        ),
        ("RuntimeError: illegal memory access", Outcome.RUNTIME_ERROR),
        ("RuntimeError: invalid signal 11", Outcome.RUNTIME_ERROR),
        ("TimeoutError: 300 s", Outcome.INFRASTRUCTURE),
        (
            "CppCompileError: g++: fatal error: Killed signal terminated program cc1plus",
            Outcome.INFRASTRUCTURE,
        ),
        ("CppCompileError: internal compiler error: Terminated (program cc1plus)", Outcome.INFRASTRUCTURE),
        ("CppCompileError: internal compiler error: Segmentation fault", Outcome.COMPILE_ERROR),
        ("PTXASError: ptxas fatal: Memory allocation failure", Outcome.INFRASTRUCTURE),
        ("CppCompileError: cannot write /tmp/x.so: Read-only file system", Outcome.INFRASTRUCTURE),
        ("CppCompileError: /tmp/x.s: No space left on device", Outcome.INFRASTRUCTURE),
        ("CppCompileError: cc1plus: out of memory allocating 65536 bytes", Outcome.INFRASTRUCTURE),
        ("CppCompileError: virtual memory exhausted: Cannot allocate memory", Outcome.INFRASTRUCTURE),
        ("CalledProcessError: ptxas died with <Signals.SIGKILL: 9>", Outcome.INFRASTRUCTURE),
        ("PTXASError: `ptxas` failed with error code -9", Outcome.INFRASTRUCTURE),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", Outcome.INFRASTRUCTURE),
        ("MemoryError: ", Outcome.INFRASTRUCTURE),
        ("BrokenProcessPool: a process in the process pool was terminated abruptly", Outcome.INFRASTRUCTURE),
        ("", Outcome.INFRASTRUCTURE),
    ],
)
def test_failures_are_named(message: str, outcome: Outcome) -> None:
    assert failure_outcome(message) is outcome


def test_a_service_without_a_choice_says_so() -> None:
    tally = TorchCompileSummary()
    tally.count(graphs=1)
    assert "nothing to choose in 1 graphs" in TorchCompileSummary.total([tally]).line()


# --- the leash ---


class Counting:
    name, version = "counting", "1"

    def __init__(self, wait: threading.Event | None = None) -> None:
        self.wait, self.asked = wait, 0

    def forecast(self, query: Query) -> Forecasts:
        self.asked += 1
        if self.wait is not None:
            self.wait.wait(30)
        n = len(query.candidates)
        return Forecasts(query.candidates, np.zeros(n), np.ones(n), np.zeros(n))


def test_a_surrogate_that_hangs_is_not_asked_again_and_warned_of_once() -> None:
    release = threading.Event()
    surrogate, complain = Counting(release), WarnOnce()
    ask = SafeSurrogate(surrogate, 0.05, complain)
    with pytest.warns(RuntimeWarning, match="no answer within 0.05 s.*all of its own choices") as seen:
        assert ask(Query(a_problem(), TWO)) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ask(Query(a_problem(16), TWO)) is None
    release.set()
    assert (len(seen), surrogate.asked, len(complain.messages)) == (1, 1, 1)


# --- patches ---


class Foreign:
    def method(self) -> str:
        return "original"


# --- enabling ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search_space": "huge"}, "search_space='huge': must be one of default, exhaustive"),
        ({"forecast_timeout_s": 0}, "forecast_timeout_s must be a positive number"),
        ({"mode": "fast"}, "mode='fast': must be one of"),
    ],
)
def test_bad_options_are_refused_and_hook_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        api.enable_torch_compile(surrogate=Counting(), store=Store(None), **options)
    assert api.current() is None


def test_the_identity_follows_the_rules_and_the_surrogate() -> None:
    def of(**settings: Any) -> str:
        return serving(**settings).identity()

    other = serving()
    other.safe_surrogate.surrogate.version = "2"
    names = [of(), of(tolerance=0.5), of(mode=Mode.SKIP), other.identity()]
    names.append(of(inductor_space="exhaustive"))
    assert len(set(names)) == len(names)
    assert of() == names[0]
    assert of(mode=Mode.LISTEN) == ""


# --- what must not happen when something of ours fails ---


ROOT = Path(__file__).parents[3]


@pytest.fixture
def in_graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The record of a GPU that is not there is the only thing that has to be given."""
    monkeypatch.setattr(records, "device_of", lambda d: H200)
    monkeypatch.setattr(records, "tools", lambda d: {"torch": "2.13.0"})
    with graph():
        yield


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template choice stands for its own code, which needs a GPU's compiler."""
    monkeypatch.setattr(KernelTemplateChoice, "choice", property(lambda ktc: ktc))


def failing(candidate: Candidate) -> float:
    raise ZeroDivisionError("on purpose")


def listed(ours: TuningSession | None) -> list[Any]:
    """The product's choices as Inductor lists them for CUDA, through the hooks."""
    with selection_hooked(ours), config.patch(max_autotune=True):
        templates: list[Any] = [mm.aten_mm, mm.mm_template]
        return list(InductorChoices().get_template_configs(product_inputs(), templates, "mm"))


@pytest.mark.usefixtures("in_graph", "without_code")
def test_without_forecasts_the_exhaustive_space_shrinks_to_the_users_own() -> None:
    own = listed(None)
    planned = listed(serving(lambda c: float(c.config.num_warps), inductor_space="exhaustive"))
    assert 2 <= len(planned) < len(own)
    ours = serving(failing, inductor_space="exhaustive")
    with pytest.warns(RuntimeWarning, match="on purpose"):
        found = listed(ours)
    assert len(found) == len(own)
    assert sum(map(is_extern, found)) == 1


@pytest.mark.filterwarnings("error")
def test_where_warnings_are_errors_a_failure_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    complain = WarnOnce()
    complain("think", ValueError("no idea"))
    complain("think", ValueError("again"))
    assert len(complain.messages) == 2
    assert capsys.readouterr().err.count("failed to think") == 1


def test_rules_that_cannot_be_named_share_no_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unspeakable:
        def plan(self, state: Any) -> Any:
            raise NotImplementedError

        def __repr__(self) -> str:
            raise ValueError("no words")

    class Details:
        def __init__(self) -> None:
            self.theirs = 1

    monkeypatch.setattr(codecache, "FxGraphHashDetails", Details)
    context = HookContext(serving(policy=Unspeakable()))
    patches = selection.install(context)
    try:
        with pytest.warns(RuntimeWarning, match="no words"):
            names = [vars(Details())["forecast_autotune"] for _ in range(2)]
        assert len(set(names)) == 2
        context.session = None
        assert vars(Details()) == {"theirs": 1}
    finally:
        patches.restore()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"FORECAST_AUTOTUNE": "perhaps"}, "FORECAST_AUTOTUNE='perhaps'"),
        ({"FORECAST_AUTOTUNE": "1", "FORECAST_AUTOTUNE_MODE": "sing"}, "FORECAST_AUTOTUNE_MODE='sing'"),
        ({"FORECAST_AUTOTUNE_MODE": "sing"}, ""),
        ({"FORECAST_AUTOTUNE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, ""),
    ],
)
def test_importing_torch_survives_our_settings_even_where_warnings_are_errors(
    variables: dict[str, str], said: str
) -> None:
    """What torch calls, called as torch does, at the end of its import."""
    code = "import torch\nfrom forecast_autotune.activate import autoload\nautoload()\nprint(1 + 1)"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FORECAST_AUTOTUNE")}
    kept |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::RuntimeWarning"} | variables
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    assert said in done.stderr
    assert said or "FORECAST_AUTOTUNE" not in done.stderr


def test_the_entry_point_loads_nothing_while_the_variable_is_unset() -> None:
    """It runs in every `import torch` of an environment that we are installed in."""
    code = (
        "import sys; from forecast_autotune.activate import autoload; before = set(sys.modules);"
        "autoload(); print(sorted(set(sys.modules) - before),"
        "[n for n in ('numpy', 'torch', 'triton', 'forecast_autotune.settings') if n in sys.modules])"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FORECAST_AUTOTUNE")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "[] []\n", done.stderr


# --- what the hooks share ---


def hooked(context: HookContext) -> PatchSet:
    """One hook, which says whether a session is in force."""
    patches = PatchSet()
    patches.replace(
        Foreign, "method", lambda f: lambda self: f(self) if context.session is None else f"{f(self)} hooked"
    )
    patches.replace(Foreign, "absent", lambda f: f)
    return patches


def test_a_hook_that_others_have_wrapped_does_nothing_after_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = HookContext(serving()), HookContext(serving())
    monkeypatch.setattr(Foreign, "method", Foreign.method)
    first.install("foreign", hooked)
    ours = Foreign.method
    monkeypatch.setattr(Foreign, "method", lambda self: ours(self) + " wrapped")
    first.close()
    assert Foreign().method() == "original wrapped"
    second.install("foreign", hooked)
    assert Foreign().method() == "original wrapped hooked", "once, by the service in force"
    second.close()
