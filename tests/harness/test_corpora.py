"""Every exploit is refused, for a reason that was expected; every honest look-alike is accepted."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from forecast_autotune.errors import RecordError
from forecast_harness.packs import Language
from forecast_harness.sandbox.api import Lane, Limits
from forecast_harness.verify import corpus
from forecast_harness.verify.plan import Plan
from forecast_harness.verify.verdict import Judgement
from tests.harness.small import checked_only

pytest.importorskip("torch")
pytest.importorskip("triton")

HERE = Path(__file__).parent
EXPLOITS = [replace(e, pack=checked_only(e.pack)) for e in corpus.read(HERE / "exploits")]
HONEST = [replace(e, pack=checked_only(e.pack)) for e in corpus.read(HERE / "honest")]
MODES = {f"{'A' if n < 20 else 'B' if n < 31 else 'C' if n < 44 else 'D'}{n:02}" for n in range(1, 49)}
LIMITS = Limits(wall_s=90, trusted_s=120)


def plan(entry: corpus.Entry) -> Plan:
    # An interpreted launch takes a hundred times as long as an eager one.
    return Plan(cases=6, timed=4) if entry.solution.language is Language.TRITON else Plan(cases=12, timed=30)


def on_cpu(entries: list[corpus.Entry]) -> list[object]:
    return [pytest.param(e, id=e.name) for e in entries if e.backend == "cpu"]


def test_every_mode_has_an_exploit() -> None:
    assert {e.mode for e in EXPLOITS} == MODES
    assert all(e.name.startswith(e.mode.lower()) for e in EXPLOITS)
    assert all("accepted" not in e.expected for e in EXPLOITS)


def test_there_are_as_many_honest_ones_as_a_rate_needs() -> None:
    assert len(HONEST) >= 20
    assert all(e.expected == {"accepted"} for e in HONEST)


@pytest.mark.parametrize("entry", on_cpu(EXPLOITS))
def test_exploit_is_refused(entry: corpus.Entry, judging: Lane) -> None:
    tried = corpus.attempt(entry, judging, plan(entry), LIMITS)
    assert tried.as_expected, str(tried)
    if tried.verdict is not None and "neutralised" not in tried.found:
        assert tried.verdict.judgement in (Judgement.REJECTED, Judgement.SUSPICIOUS)


@pytest.mark.parametrize("entry", on_cpu(HONEST))
def test_honest_solution_is_accepted(entry: corpus.Entry, judging: Lane) -> None:
    tried = corpus.attempt(entry, judging, plan(entry), LIMITS)
    assert tried.as_expected, str(tried)


@pytest.mark.gpu
@pytest.mark.parametrize("entry", [pytest.param(e, id=e.name) for e in EXPLOITS if e.backend == "gpu"])
def test_exploit_is_refused_on_a_device(entry: corpus.Entry) -> None:
    from forecast_harness.timing import device

    name, uuid = device.identity(0)
    with Lane(device="0") as lane:
        tried = corpus.attempt(entry, lane, Plan(device="cuda", peaks=device.peaks(name), uuid=uuid), LIMITS)
    assert tried.as_expected, str(tried)


def test_hidden_intent_is_a_hint_only(judging: Lane) -> None:
    """Static screening notices the obfuscated exploit, and the honest one that talks about exploits not."""
    hidden = next(e for e in EXPLOITS if e.mode == "D48")
    tried = corpus.attempt(hidden, judging, plan(hidden), LIMITS)
    assert tried.verdict is not None
    assert any("globals" in hint for hint in tried.verdict.hints)
    talking = next(e for e in HONEST if e.name == "softmax_words_in_comments")
    tried = corpus.attempt(talking, judging, plan(talking), LIMITS)
    assert tried.verdict is not None
    assert tried.verdict.hints == ()
    assert tried.verdict.accepted


def test_the_checker_on_disk_survives_an_exploit(judging: Lane) -> None:
    from forecast_harness.verify import tolerance

    file = Path(str(tolerance.__file__))
    before = file.read_bytes()
    entry = next(e for e in EXPLOITS if e.name == "d46_edits_harness")
    if judging.level < 3:
        pytest.skip(f"level {judging.level.name} does not contain writes")
    corpus.attempt(entry, judging, plan(entry), LIMITS)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch\n", "lacks"),
        ("# mode: A01\n# title: x\n# backend: cpu\n# pack: softmax\n# language: torch\n", "expected"),
        (
            "# mode: A01\n# title: x\n# backend: cpu\n# pack: softmax\n# language: torch\n# expected: fine\n",
            "unknown words",
        ),
    ],
)
def test_an_entry_without_its_header_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "new.py").write_text(text)
    with pytest.raises(RecordError, match=re.escape(str(tmp_path)) + f".*{said}"):
        corpus.read(tmp_path / "corpus")
