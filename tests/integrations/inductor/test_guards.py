"""What must not happen when something of ours fails: no error, no larger space, no shared cache key."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from torch._inductor import codecache, config
from torch._inductor.choices import InductorChoices
from torch._inductor.kernel import mm
from torch._inductor.kernel_template_choice import KernelTemplateChoice

from forecast_autotune.records import Candidate
from forecast_autotune.surrogates.protocol import Query
from forecast_integrations.inductor import harvest
from forecast_integrations.inductor.choices import records
from forecast_integrations.inductor.choices.records import is_extern
from forecast_integrations.inductor.hooks import selection
from forecast_integrations.inductor.hooks.context import HookContext
from forecast_integrations.inductor.pruning import SelectionCall, prune_before_compilation
from forecast_integrations.inductor.session import SafeSurrogate, TuningSession, WarnOnce
from tests.integrations.inductor.graphs import H200, FunctionSurrogate, graph, product_inputs, serving
from tests.integrations.inductor.test_parts import TWO, a_problem

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
    patches = selection.install(HookContext(ours))
    try:
        with config.patch(max_autotune=True):
            found: list[Any] = InductorChoices().get_template_configs(
                product_inputs(), [mm.aten_mm, mm.mm_template], "mm"
            )
            return found
    finally:
        patches.restore()


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


@pytest.mark.usefixtures("in_graph", "without_code")
def test_a_surrogate_that_fails_later_does_not_bring_the_exhaustive_reserve_back() -> None:
    surrogate = FunctionSurrogate(lambda c: float(c.config.num_warps))
    ours = serving(inductor_space="exhaustive")
    ours.safe_surrogate.surrogate = surrogate
    drafted = listed(ours)
    surrogate.log2_ms = failing
    operation = SelectionCall("mm", product_inputs().nodes(), drafted[0].layout)
    ours.safe_surrogate._answers.clear()
    with pytest.warns(RuntimeWarning, match="on purpose"):
        assert prune_before_compilation(ours, operation, drafted) == drafted


@pytest.mark.filterwarnings("error")
def test_where_warnings_are_errors_a_failure_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    complain = WarnOnce()
    complain("think", ValueError("no idea"))
    complain("think", ValueError("again"))
    assert len(complain.messages) == 2
    assert capsys.readouterr().err.count("failed to think") == 1


def test_what_was_measured_is_part_of_the_question() -> None:
    surrogate = FunctionSurrogate(lambda c: 0.0)
    ask = SafeSurrogate(surrogate, 5.0, WarnOnce())
    problem = a_problem()
    rows = [harvest.Measurement(problem.id, c, harvest.Outcome.OK, 1.0) for c in TWO]
    for measured in ([rows[0]], [rows[1]], [rows[0]]):
        assert ask(Query(problem, TWO, measured=measured)) is not None
    assert len(surrogate.queries) == 2


@pytest.mark.parametrize(("alike", "asked"), [(True, 1), (False, 2)])
def test_a_drafts_answer_is_the_operations_where_the_surrogate_knows_no_more(alike: bool, asked: int) -> None:
    surrogate = FunctionSurrogate(lambda c: 0.0)
    surrogate.answers_drafts_alike = alike  # type: ignore[attr-defined]
    ask, problem = SafeSurrogate(surrogate, 5.0, WarnOnce()), a_problem()
    assert all(ask(Query(problem, TWO, provisional=draft)) is not None for draft in (True, False))
    assert len(surrogate.queries) == asked


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


def test_a_graph_tuned_in_the_middle_of_a_round_leaves_the_outer_rounds_failures() -> None:
    """A choice may be a graph whose operations are tuned while the outer operation's are timed."""
    context, found = HookContext(serving()), []

    def inner(self: Any, *args: Any, **kwargs: Any) -> dict[Any, float]:
        context.thread.pending.errors["theirs"] = "RuntimeError: inside"
        return {}

    def outer(self: Any, *args: Any, **kwargs: Any) -> dict[Any, float]:
        context.thread.pending.errors["mine"] = "OutOfResources: outside"
        selection._autotuning(inner, context)(self, "mm", [], None, None, "key", [], None)
        found.append(dict(context.thread.pending.errors))
        return {}

    cache = SimpleNamespace(feedback_saver_fns=[])
    selection._autotuning(outer, context)(cache, "mm", [], None, None, "key", [], None)
    assert found == [{"mine": "OutOfResources: outside"}]
    assert context.thread.pending.errors == {}


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
