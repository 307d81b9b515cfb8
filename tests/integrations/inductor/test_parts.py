"""The parts of the hooks: names of choices, the frozen view, the leash, patches, generated kernels."""

from __future__ import annotations

import functools
import threading
import warnings
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic

from forecast_autotune.errors import SettingsError
from forecast_autotune.records import (
    Argument,
    Candidate,
    Config,
    Device,
    Kernel,
    Measurement,
    Outcome,
    Problem,
)
from forecast_autotune.settings import Mode
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_integrations.inductor import api
from forecast_integrations.inductor.choices import records
from forecast_integrations.inductor.choices.records import parameter_scalar, parse_description, problem_of
from forecast_integrations.inductor.harvest import failure_outcome
from forecast_integrations.inductor.hooks.context import PatchSet
from forecast_integrations.inductor.session import SafeSurrogate, StoreSnapshot, WarnOnce
from tests.integrations.inductor.graphs import graph, node, serving

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
        ("TimeoutError: 300 s", Outcome.TIMEOUT),
        ("RuntimeError: illegal memory access", Outcome.RUNTIME_ERROR),
        ("", Outcome.RUNTIME_ERROR),
    ],
)
def test_failures_are_named(message: str, outcome: Outcome) -> None:
    assert failure_outcome(message) is outcome


# --- the view ---


def row(problem: Problem, ms: float, at: str) -> Measurement:
    return Measurement(problem.id, TWO[0], Outcome.OK, ms, at=at)


def test_a_view_does_not_see_what_came_later_but_what_this_process_adds() -> None:
    store, problem, other = Store(None), a_problem(), a_problem(16)
    for where in (problem, other):
        store.add(where, row(where, 1.0, "2026-01-01T00:00:00+00:00"))
        store.add(where, row(where, 2.0, "2026-01-03T00:00:00+00:00"))
    view = StoreSnapshot(store, "2026-01-02T00:00:00+00:00")
    assert [m.ms for m in view.rows(problem)] == [1.0]
    assert [[m.ms for m in r.measurements] for r in view.relatives(problem)] == [[1.0]]
    store.add(problem, row(problem, 3.0, "2026-01-01T00:00:00+00:00"))
    assert [m.ms for m in view.rows(problem)] == [1.0]
    view.add(problem, row(problem, 4.0, "2026-01-04T00:00:00+00:00"))
    assert [m.ms for m in view.rows(problem)] == [1.0, 4.0]
    assert [m.ms for m in store.measurements(problem)] != [m.ms for m in view.rows(problem)]


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


def test_the_same_question_is_asked_once() -> None:
    surrogate, complain = Counting(), WarnOnce()
    ask = SafeSurrogate(surrogate, 5.0, complain)
    first = ask(Query(a_problem(), TWO))
    assert first is not None
    assert ask(Query(a_problem(), list(TWO))) is first
    assert ask(Query(a_problem(), TWO[:1])) is not first
    assert (surrogate.asked, complain.messages) == (2, [])


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
    entries: ClassVar[list[Any]] = ["theirs"]

    def plain(self, x: int) -> int:
        """Foreign words."""
        return x

    @classmethod
    def of_class(cls, x: int) -> tuple[str, int]:
        return cls.__name__, x

    @staticmethod
    def static(x: int) -> int:
        return x


def test_patches_keep_the_kind_and_are_taken_back_exactly() -> None:
    before = dict(vars(Foreign))
    patches = PatchSet()
    patches.replace(Foreign, "plain", lambda f: lambda self, x: f(self, x) + 1)
    patches.replace(Foreign, "of_class", lambda f: lambda cls, x: f(cls, x + 1))
    patches.replace(Foreign, "static", lambda f: lambda x: f(x) + 1)
    patches.replace(Foreign, "absent", lambda f: f)
    patches.append(Foreign.entries, "ours")
    assert (Foreign().plain(1), Foreign.of_class(1), Foreign.static(1)) == (2, ("Foreign", 2), 2)
    assert Foreign.plain.__doc__ == "Foreign words."
    assert patches.missing == ["Foreign.absent"]
    patches.restore()
    assert dict(vars(Foreign)) == before
    assert all(vars(Foreign)[name] is value for name, value in before.items())
    assert Foreign.entries == ["theirs"]


# --- enabling ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search_space": "huge"}, "inductor_space='huge': must be one of default, exhaustive"),
        ({"forecast_timeout_s": 0}, "forecast_timeout_s must be a positive number"),
        ({"mode": "fast"}, "mode='fast': must be one of"),
    ],
)
def test_bad_options_are_refused_and_hook_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        api.enable_torch_compile(surrogate=Counting(), store=Store(None), **options)
    assert api.current() is None


def test_this_release_of_torch_has_everything_that_is_hooked() -> None:
    with api.enable_torch_compile(surrogate=Counting(), store=Store(None)) as handle:
        assert api.current() is handle.session
        assert api.missing_hooks() == []
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


def test_a_cpu_is_named_after_its_model() -> None:
    device = records.device_of(torch.device("cpu"))
    assert (device.backend, device.name != "") == ("cpu", True)
    assert device == records.device_of(torch.device("cpu"))
