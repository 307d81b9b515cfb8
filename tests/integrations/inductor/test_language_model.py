"""A language model inside torch.compile: heard where that pays, never in the way, the same for all ranks."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from forecast_autotune.llm.calibration import CalibrationScope, calibration_path, write
from forecast_autotune.records import Candidate, Measurement, Outcome, Problem
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.factory import open_backend
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_integrations.inductor import language_model
from forecast_integrations.inductor.choices import surrogate
from forecast_integrations.inductor.operation_search import OperationSearch
from forecast_integrations.inductor.session import TuningSession
from forecast_integrations.inductor.summary import TorchCompileSummary
from tests.core.llm.words import calibrated
from tests.integrations.inductor.graphs import LATER
from tests.integrations.inductor.test_surrogate import ATEN, H200, matmul, tile
from tests.integrations.models.faults import stall
from tests.integrations.models.faulty_server import FaultyServer

PROBLEM = matmul(4096, 4096, 4096)
TILES = [
    tile(m, n, k, w, s)
    for m in (64, 128)
    for n in (64, 128)
    for k in (32, 64)
    for w in (4, 8)
    for s in (2, 3)
]
CHOICES = [ATEN, *TILES]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what launched the tests decides whether this process is one of several."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer() as running:
        yield running


def settings(
    server: FaultyServer, cache: Path, *, scope: CalibrationScope | None = None, **more: Any
) -> Settings:
    """Settings that name the server's model, with a calibration that vouches for it."""
    spec = f"{server.url}?model=m&kind=completions&attempts=1"
    known = CalibrationScope((H200.slug,), ("inductor",), 4000, 0.0) if scope is None else scope
    write(
        calibration_path(open_backend(spec, cache).name, cache), replace(calibrated(saved=1.0), scope=known)
    )
    return Settings(llm=spec, cache_dir=cache, workers=1).with_(**more)


@pytest.fixture
def given(server: FaultyServer, tmp_path: Path) -> Settings:
    return settings(server, tmp_path)


def serving(given: Settings, until: str = LATER, **more: Any) -> TuningSession:
    return TuningSession.of(given, None, Store(None), until, **more)


def asked(
    ours: TuningSession, problem: Problem = PROBLEM, candidates: Any = CHOICES, **known: Any
) -> Forecasts:
    found = ours.ask(Query(problem, candidates, **known))
    assert found is not None, ours.warn_once.messages
    return found


def plain(**known: Any) -> Forecasts:
    return surrogate.default().forecast(Query(PROBLEM, CHOICES, **known))


def heard(found: Forecasts) -> bool:
    return found.consultation is not None and found.consultation.weight > 0


def same(one: Forecasts, two: Forecasts) -> bool:
    return all(np.array_equal(getattr(one, n), getattr(two, n)) for n in ("mean", "sd", "p_fail"))


def ran(candidate: Candidate, ms: float) -> Measurement:
    return Measurement(PROBLEM.id, candidate, Outcome.OK, ms, at="2026-01-01T00:00:00+00:00")


# --- who is asked ---


def test_the_settings_model_is_heard_beside_the_templates_forecast(
    given: Settings, server: FaultyServer
) -> None:
    found = asked(serving(given))
    assert server.requests
    assert heard(found)
    assert not same(found, plain())
    assert found.mean[0] != found.mean[1]
    assert list(found.candidates) == CHOICES
    shown = str([body for _, body, _ in server.requests])
    assert "BLOCK_M=64" in shown
    assert "aten" not in shown, "the library's kernel has nothing that a model could read"


def test_without_one_it_is_what_ships() -> None:
    assert isinstance(
        language_model.surrogate_for_operations(Settings(), LATER, 10.0), surrogate.TemplateSurrogate
    )
    assert same(asked(serving(Settings())), plain())


def test_a_given_surrogate_is_not_replaced(given: Settings, server: FaultyServer) -> None:
    ours = TuningSession.of(given, surrogate.default(), Store(None), LATER)
    assert same(asked(ours), plain())
    assert (
        ours.identity()
        == TuningSession.of(given.with_(llm="x"), surrogate.default(), Store(None), LATER).identity()
    )
    assert server.requests == []


@pytest.mark.parametrize("count", [2, 12])
def test_the_gate_spares_short_lists(given: Settings, server: FaultyServer, count: int) -> None:
    found = asked(serving(given), candidates=CHOICES[:count])
    assert server.requests == []
    assert not heard(found)


def test_a_model_that_was_never_calibrated_on_such_kernels_is_not_asked(
    server: FaultyServer, tmp_path: Path
) -> None:
    scope = CalibrationScope((H200.slug,), ("triton",), 4000, 0.0)
    assert same(asked(serving(settings(server, tmp_path, scope=scope))), plain())
    assert server.requests == []


def test_one_operation_asks_one_question(given: Settings, server: FaultyServer) -> None:
    """A draft, the plan, and two further rounds."""
    ours = serving(given)
    draft = OperationSearch(PROBLEM, CHOICES, [ATEN], ours)
    draft.first(draft=True)
    assert server.requests == []
    search = OperationSearch(PROBLEM, CHOICES, [ATEN], ours)
    first = search.first()
    count = len(server.requests)
    assert count > 0
    search.add_measurements([ran(c, 1.0 + 0.1 * i) for i, c in enumerate(first)])
    for round_ in range(2):
        more = search.next_plan().measure
        search.add_measurements([ran(c, 0.9 - 0.1 * round_) for c in more])
    assert len(server.requests) == count
    assert search._forecasts.consultation is not None
    decision = search.decide()
    assert decision.llm.asked
    assert decision.cost.llm_s == decision.llm.seconds
    assert decision.reason.endswith(str(decision.llm))


def test_what_the_model_moved_is_found_among_templates_and_libraries(given: Settings) -> None:
    found = asked(serving(given))
    assert same(found.without_llm, plain())
    assert list(found.without_llm.candidates) == CHOICES


def test_trust_is_part_of_a_graphs_name_and_never_asks_nobody(server: FaultyServer, tmp_path: Path) -> None:
    auto, always, never = (
        serving(settings(server, tmp_path, llm_trust=t)) for t in ("auto", "always", "never")
    )
    assert len({auto.identity(), always.identity(), never.identity()}) == 3
    found = asked(never)
    assert same(found, plain())
    assert found.consultation.why == "FORECAST_AUTOTUNE_LLM_TRUST=never"
    assert not heard(asked(auto, candidates=CHOICES[:12]))
    assert server.requests == []
    assert heard(asked(always, candidates=CHOICES[:12])), "the gate would spare so short a list"
    tally = TorchCompileSummary()
    search = OperationSearch(PROBLEM, CHOICES, [ATEN], never)
    search.add_measurements([ran(c, 1.0) for c in search.first()])
    decision = search.decide()
    assert decision is not None
    tally.add_decision("mm", decision, False)
    told = "language model: asked in 0 of 1 decision"
    assert told in tally.line()
    assert "asked in 0 of 2 decisions" in TorchCompileSummary.total([tally, tally]).line()


# --- what goes wrong ---


def test_a_server_that_stalls_leaves_the_plain_forecast(tmp_path: Path) -> None:
    with FaultyServer(lambda path, body: stall) as server:
        ours = serving(settings(server, tmp_path), limit_s=2.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = asked(ours, once=True)
            assert server.requests
            assert same(found, plain())
            assert same(asked(ours, measured=[ran(TILES[0], 1.0)]), plain(measured=[ran(TILES[0], 1.0)]))
    assert ours.warn_once.messages == [], "the model is late; the surrogate is not hung"


def test_a_surrogate_is_never_hung_for_the_models_sake(server: FaultyServer, tmp_path: Path) -> None:
    """Whoever waits for a model waits for less than a forecast may take."""
    given = settings(server, tmp_path, llm_timeout_s=30.0)
    for limit_s in (0.5, 10.0):
        found = language_model.surrogate_for_kernels(given, LATER, limit_s)
        assert isinstance(found, language_model.LLMAssistedSurrogate)
        assert found.timeout_s < limit_s


@pytest.mark.parametrize("strict", [False, True], ids=["warning", "error"])
def test_a_model_that_is_named_wrongly_costs_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strict: bool
) -> None:
    given = Settings(llm="nonsense", cache_dir=tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("error" if strict else "always")
        ours = serving(given)
    text = capsys.readouterr().err if strict else str(said[0].message)
    assert text.count("FORECAST_AUTOTUNE_LLM") == 1
    assert same(asked(ours), plain())
    assert ours.identity() != serving(Settings()).identity()


def test_warnings_as_errors_do_not_cost_the_forecast(tmp_path: Path) -> None:
    with FaultyServer(lambda path, body: stall) as server:
        ours = serving(settings(server, tmp_path, llm_timeout_s=0.1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert same(asked(ours, once=True), plain())
    assert ours.warn_once.messages == []


# --- ranks ---


def test_ranks_hear_what_was_answered_before_their_moment(
    given: Settings, server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = asked(serving(given))
    count = len(server.requests)
    assert heard(live)
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = [asked(serving(given)) for _ in range(2)]
    assert all(map(heard, ranks))
    assert same(*ranks)
    assert same(ranks[0], live)
    early = [asked(serving(given, until="2020-01-01T00:00:00+00:00")) for _ in range(2)]
    assert all(same(one, plain()) for one in early)
    assert len(server.requests) == count


def test_deterministic_mode_knows_no_model(server: FaultyServer, tmp_path: Path) -> None:
    given = settings(server, tmp_path, mode="deterministic")
    assert same(asked(serving(given), once=True), plain())
    assert server.requests == []
    assert given.mode is Mode.DETERMINISTIC
    assert serving(given).identity() == serving(given.with_(llm="http://h:1/v1?model=n")).identity()


# --- the keys of compiled graphs ---


def test_the_keys_of_compiled_graphs_name_the_model(
    given: Settings, server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = given.with_(llm=given.llm + "&concurrency=2")
    names = [serving(s).identity() for s in (Settings(cache_dir=tmp_path, workers=1), given, other)]
    assert len(set(names)) == 3
    assert serving(given).identity() == names[1]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert serving(given).identity() != names[1]
    assert server.requests == []
    assert "http" not in "".join(names)


def test_a_users_kernels_share_one_model(given: Settings) -> None:
    one, two = (
        language_model.surrogate_for_kernels(given.with_(tolerance=t), LATER, 10.0) for t in (0.01, 0.05)
    )
    assert one is two
    assert language_model.surrogate_for_kernels(Settings(), LATER, 10.0) is language_model.default_surrogate(
        None
    )


def test_threads_are_given_the_same_answer(given: Settings) -> None:
    """Inductor may lower in several threads; nobody is kept from an answer that is there."""
    ours = serving(given)
    asked(ours)
    found: list[Forecasts] = []
    work = [
        threading.Thread(
            target=lambda: found.append(ours.safe_surrogate.surrogate.forecast(Query(PROBLEM, CHOICES)))
        )
        for _ in range(4)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join(30)
    assert len(found) == 4
    assert all(map(heard, found))
