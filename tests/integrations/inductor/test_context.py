"""What the hooks share: one object per service, one state per thread, and nothing left when it is closed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._inductor.select_algorithm import AlgorithmSelectorCache

from forecast_autotune.store import Store
from forecast_integrations.inductor import api
from forecast_integrations.inductor.hooks import selection
from forecast_integrations.inductor.hooks.context import HookContext, PatchSet
from tests.integrations.inductor.graphs import FunctionSurrogate, serving


class Foreign:
    """A class of others, with one method that is hooked."""

    def method(self) -> str:
        return "original"


def hooked(context: HookContext) -> PatchSet:
    """One hook, which says whether a session is in force."""
    patches = PatchSet()
    patches.replace(
        Foreign, "method", lambda f: lambda self: f(self) if context.session is None else f"{f(self)} hooked"
    )
    patches.replace(Foreign, "absent", lambda f: f)
    return patches


def test_a_group_of_hooks_is_installed_once_and_taken_out_on_closing() -> None:
    before = Foreign.method
    context = HookContext(serving())
    for _ in range(2):
        context.install("foreign", hooked)
    assert Foreign().method() == "original hooked"
    assert context.has("foreign")
    assert context.missing == ["Foreign.absent"]
    context.close()
    assert Foreign.method is before
    assert (context.session, context.missing, context.has("foreign")) == (None, [], False)


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


@pytest.mark.parametrize(("paused", "closed", "kept"), [(0, False, 1), (1, False, 0), (0, True, 0)])
def test_times_are_pending_unless_they_are_of_other_sizes_or_of_nobodys_service(
    paused: int, closed: bool, kept: int
) -> None:
    context = HookContext(serving())

    def benchmark(self: Any, choices: list[Any]) -> dict[Any, float]:
        return dict.fromkeys(choices, 1.0)

    wrapped = selection._benchmark(benchmark, context)
    context.thread.paused = paused
    if closed:
        context.close()
    assert wrapped(None, ["choice"]) == {"choice": 1.0}
    assert len(context.thread.pending.times) == kept


def test_leaving_a_service_that_was_disabled_inside_leaves_it_disabled() -> None:
    before = AlgorithmSelectorCache.__call__
    with api.enable_torch_compile(surrogate=FunctionSurrogate(lambda c: 0.0), store=Store(None)):
        assert AlgorithmSelectorCache.__call__ is not before
        with api.enable_torch_compile(surrogate=FunctionSurrogate(lambda c: 0.0), store=Store(None)):
            api.disable_torch_compile()
            assert AlgorithmSelectorCache.__call__ is before
        assert api.current() is None
        assert api.missing_hooks() == []
    assert api.current() is None
