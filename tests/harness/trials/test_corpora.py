"""Every exploit is refused, for a reason that was expected; every honest look-alike is accepted."""

from __future__ import annotations

import re
from dataclasses import replace
from math import log
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from forecast_autotune.errors import RecordError
from forecast_harness.clocks.devices import LaunchTiming
from forecast_harness.clocks.paired_comparison import ComparisonOutcome, ComparisonResult, StoppingRules
from forecast_harness.clocks.times import impossible_time
from forecast_harness.sandbox.api import ResourceLimits, SandboxLane
from forecast_harness.targets.packs import Language, Workload, load_pack, make_solution
from forecast_harness.trials.bench import BenchResult, compare_solutions
from forecast_harness.verify import launch_cell as inside
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problem import compare_outputs
from forecast_harness.verify.tolerance import mismatch
from forecast_harness.verify.verdict import Judgement, ReasonCode
from tests.harness import corpus
from tests.harness.small import checked_only
from tests.harness.timing_attacks.families import FAMILIES, sources

HERE = Path(__file__).parents[1]


def on_host_small(entry: corpus.CorpusEntry) -> corpus.CorpusEntry:
    """What a device is to be fooled about needs sizes that are something to a device."""
    return entry if entry.backend == "gpu" else replace(entry, pack=checked_only(entry.pack))


EXPLOITS = [on_host_small(e) for e in corpus.read_corpus(HERE / "exploits")]
HONEST = [on_host_small(e) for e in corpus.read_corpus(HERE / "honest")]
MODES = {f"{'A' if n < 20 else 'B' if n < 31 else 'C' if n < 44 else 'D'}{n:02}" for n in range(1, 49)}
LIMITS = ResourceLimits(wall_s=90, trusted_s=120)
COMPILING_LIMITS = ResourceLimits(wall_s=400, trusted_s=120, cpu_s=400)
"""For what runs a C++ compiler several times, on a machine that others use."""


def plan(entry: corpus.CorpusEntry) -> VerificationPlan:
    # An interpreted launch takes a hundred times as long as an eager one.
    return (
        VerificationPlan(cases=6, timed=4, launches=1)
        if entry.solution.language is Language.TRITON
        else VerificationPlan(cases=12, timed=30)
    )


def on_cpu(entries: list[corpus.CorpusEntry]) -> list[object]:
    return [
        pytest.param(e, id=e.name, marks=[pytest.mark.slow] if "compiled" in e.name else [])
        for e in entries
        if e.backend == "cpu"
    ]


def test_every_mode_has_an_exploit() -> None:
    assert {e.mode for e in EXPLOITS} == MODES
    assert all(e.name.startswith(e.mode.lower()) for e in EXPLOITS)
    assert all("accepted" not in e.expected for e in EXPLOITS)


def test_a_twin_is_one_of_the_honest() -> None:
    """A trick that gains nothing is shown against the same code without it, which has to be accepted."""
    honest = {e.name for e in HONEST}
    twins = {e.name: e.against.name for e in EXPLOITS if e.against is not None}
    assert {"a01_side_stream", "a16_persisting_l2", "a17_evict_last"} <= set(twins)
    assert set(twins.values()) <= honest


def test_what_exploits_replace_exists() -> None:
    """An exploit that reaches for a name that is no longer there would be refused for that alone."""
    assert {"seconds", "total_seconds"} <= set(LaunchTiming._fields)
    assert all(callable(getattr(inside, name)) for name in ("_clock", "_timed"))
    assert all(callable(f) for f in (mismatch, compare_outputs, impossible_time))


def test_there_are_as_many_honest_ones_as_a_rate_needs() -> None:
    assert len(HONEST) >= 20
    assert all(e.expected == {"accepted"} for e in HONEST)


def attempted(entry: corpus.CorpusEntry, lane: SandboxLane) -> corpus.CorpusResult:
    """Again where the machine may be at fault: under load the incumbent itself may seem to lie about time.

    So may an honest one that starts threads, whose first launches, a millisecond together, find no free processor.
    How often honest ones are refused is measured on an idle machine (`benchmarks.verification.solutions`).
    """
    machine = {str(ReasonCode.HARNESS), *([str(ReasonCode.CLOCK)] if "accepted" in entry.expected else [])}
    limits = COMPILING_LIMITS if "compiled" in entry.name else LIMITS
    for _ in range(3):
        tried = corpus.verify_entry(entry, lane, plan(entry), limits)
        if not any(code in tried.found for code in machine):
            break
    return tried


@pytest.mark.parametrize("entry", on_cpu(EXPLOITS))
def test_exploit_is_refused(entry: corpus.CorpusEntry, judging: SandboxLane) -> None:
    tried = attempted(entry, judging)
    assert tried.as_expected, str(tried)
    if tried.verdict is not None and "neutralised" not in tried.found:
        assert tried.verdict.judgement in (Judgement.REJECTED, Judgement.SUSPICIOUS)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("entry", on_cpu(HONEST))
def test_honest_solution_is_accepted(entry: corpus.CorpusEntry, judging: SandboxLane) -> None:
    tried = attempted(entry, judging)
    assert tried.as_expected, str(tried)


@pytest.mark.gpu
@pytest.mark.parametrize("entry", [pytest.param(e, id=e.name) for e in EXPLOITS if e.backend == "gpu"])
def test_exploit_is_refused_on_a_device(entry: corpus.CorpusEntry) -> None:
    from forecast_harness.clocks import devices as device

    name, uuid = device.identity(0)
    with SandboxLane(device="0") as lane:
        tried = corpus.verify_entry(
            entry, lane, VerificationPlan(device="cuda", peaks=device.device_peaks(name), uuid=uuid), LIMITS
        )
    assert tried.as_expected, str(tried)


def test_hidden_intent_is_a_hint_only(judging: SandboxLane) -> None:
    """Static screening notices the obfuscated exploit, and the honest one that talks about exploits not."""
    hidden = next(e for e in EXPLOITS if e.name == "d48_obfuscated")
    tried = corpus.verify_entry(hidden, judging, plan(hidden), LIMITS)
    assert any("globals" in hint for hint in tried.verdict.hints)
    talking = next(e for e in HONEST if e.name == "softmax_words_in_comments")
    tried = corpus.verify_entry(talking, judging, plan(talking), LIMITS)
    assert tried.verdict.hints == ()
    assert tried.verdict.accepted


def test_the_checker_on_disk_survives_an_exploit(judging: SandboxLane) -> None:
    from forecast_harness.verify import tolerance

    file = Path(str(tolerance.__file__))
    before = file.read_bytes()
    entry = next(e for e in EXPLOITS if e.name == "d46_edits_harness")
    if judging.level < 3:
        pytest.skip(f"level {judging.level.name} does not contain writes")
    corpus.verify_entry(entry, judging, plan(entry), LIMITS)
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
        corpus.read_corpus(tmp_path / "corpus")


HEAD = "# mode: A01\n# title: x\n# backend: cpu\n# pack: {pack}\n# language: torch\n# expected: {expected}\n"


@pytest.mark.parametrize(
    ("expected", "against", "said"),
    [
        ("neutralised", "", "need each other"),
        ("clock", "# against: torch_plain\n", "need each other"),
        ("clock neutralised", "# against: nobody\n", "'nobody' must name one solution; .*torch_plain"),
        ("neutralised", "# against: other\n", "'other' solves swiglu, not softmax"),
        ("neutralised", "# against: headless\n", "headless.py: the header lacks"),
        ("neutralised", "# against: torch_plain_too\n", "must name one solution; .*honest/.*more/"),
    ],
)
def test_a_twin_that_is_none_is_named(tmp_path: Path, expected: str, against: str, said: str) -> None:
    for folder, name, text in (
        ("corpus", "new", HEAD.format(pack="softmax", expected=expected) + against),
        ("honest", "other", HEAD.format(pack="swiglu", expected="accepted")),
        ("honest", "headless", "import torch\n"),
        ("honest", "torch_plain_too", HEAD.format(pack="softmax", expected="accepted")),
        ("more", "torch_plain_too", HEAD.format(pack="softmax", expected="accepted")),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.py").write_text(f"{text}\n\ndef run(x):\n    return x\n")
    with pytest.raises(RecordError, match=said):
        corpus.read_corpus(tmp_path / "corpus")


def test_a_twin_may_be_of_the_pack_or_a_file(tmp_path: Path) -> None:
    for folder, name, against in (
        ("corpus", "one", "# against: torch_plain\n"),
        ("corpus", "two", "# against: twin\n"),
        ("corpus", "twin", "# against: torch_plain\n"),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        text = HEAD.format(pack="softmax", expected="neutralised") + against
        (tmp_path / folder / f"{name}.py").write_text(f"{text}\n\ndef run(x):\n    return {name!r}\n")
    one, twin, two = corpus.read_corpus(tmp_path / "corpus")
    assert one.against == twin.against == one.pack.solution("torch_plain")
    assert two.against.source == twin.solution.source


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("twin", "found"),
    [
        ("import time\ndef run(x):\n    time.sleep(0.03)\n    return x.softmax(-1)\n", "accepted"),
        ("def run(x):\n    return x.softmax(-1)\n", "neutralised"),
        ("def run(x):\n    return x\n", "twin refused"),
    ],
    ids=["faster", "as fast", "refused"],
)
def test_a_trick_is_neutralised_unless_it_is_faster(judging: SandboxLane, twin: str, found: str) -> None:
    entry = next(e for e in EXPLOITS if e.name == "a19_leaves_caches_cold")
    plain = make_solution("plain", "import torch\ndef run(x):\n    return torch.softmax(x, -1)\n")
    entry = replace(entry, solution=plain, against=make_solution("twin", twin))
    tried = corpus.verify_entry(entry, judging, plan(entry), LIMITS)
    assert tried.found == {found}, str(tried)
    assert tried.as_expected == (found == "neutralised")


PACK = load_pack("softmax").with_(
    workloads=(Workload("few", {"M": 9, "N": 64}), Workload("host", {"M": 256, "N": 512}, host=True))
)
PLAN = VerificationPlan(cases=3, timed=4)
RULES = StoppingRules(most=20)
CHEAP = {
    "lighter serving code": ["a_lean_window_that_flatters"],
    "work before the clock": ["while_binding"],
    "work in the idle phase": ["before_the_question_is_read"],
    "wakes itself while stopped": ["by_a_slow_timer"],
    "more processors": ["a_wider_affinity"],
    "inflated cost of asking": ["slow_when_nothing_is_asked"],
    "smaller times reported": ["half_a_clock"],
    "forged outputs and digests": ["computes_when_it_is_read"],
    "incremental recomputation": ["rows_that_changed"],
    "finishes after the answer": ["the_answer_comes_first_and_the_copy_after"],
    "odd forms of outputs": ["huge_strides_are_claimed"],
    "noise in the other's turns": ["spinning_daemons"],
    "memory and cache pressure": ["holds_much_memory"],
    "children that compute": ["a_child_that_watches_the_memory"],
}


def test_every_family_is_tried() -> None:
    assert set(CHEAP) == set(FAMILIES)
    assert all(len(variants) >= 4 for variants in FAMILIES.values())
    assert all(set(picked) <= set(FAMILIES[family]) for family, picked in CHEAP.items())


def compare(lane: SandboxLane, source: str) -> BenchResult:
    attack = make_solution("attack", source)
    return compare_solutions(
        PACK, [attack], lane, against=PACK.solution("torch_plain"), plan=PLAN, rules=RULES
    )[1]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("family", "variant"), [(family, one) for family, picked in CHEAP.items() for one in picked]
)
def test_no_cheat_is_called_faster(judging: SandboxLane, family: str, variant: str) -> None:
    result = compare(judging, sources(PACK)[family, variant])
    assert result.outcome in ("", "slower", "undecided", "unconfirmed"), result
    if not result.outcome:
        assert result.verdict.reasons, "who is refused is told why"


def test_what_is_faster_is_called_so(judging: SandboxLane) -> None:
    """The same contest finds a gain, so that it is not for being blind that it finds no cheat."""
    slow = PACK.solution("torch_plain").source.replace("def run(", "def once(")
    slow += "\n\ndef run(x):\n    for _ in range(30):\n        y = once(x)\n    return y\n"
    plain = PACK.solution("torch_plain")
    result = compare_solutions(
        PACK, [plain], judging, against=make_solution("slow", slow), plan=PLAN, rules=RULES
    )[1]
    assert result.outcome == "faster", result
    assert result.gain <= result.duels[-1]["own_gain"] + 1e-4


@pytest.mark.parametrize(
    ("own", "outcome", "gain"),
    [
        (None, ComparisonOutcome.FASTER, 0.5),
        (0.4, ComparisonOutcome.FASTER, 0.4),
        (0.9, ComparisonOutcome.FASTER, 0.5),
        (0.004, ComparisonOutcome.UNDECIDED, 0.004),
        (-0.2, ComparisonOutcome.UNDECIDED, -0.2),
    ],
)
def test_who_is_faster_is_so_by_both_clocks(
    own: float | None, outcome: ComparisonOutcome, gain: float
) -> None:
    ended = ComparisonResult(
        ComparisonOutcome.FASTER, (log(1.5),) * 20, 1e6, 0.1, "faster in 20 of 20 blocks"
    )
    result = ended.with_own_gain(own, 0.005)
    assert (result.outcome, result.gain) == (outcome, pytest.approx(gain))
    slower = ComparisonResult(ComparisonOutcome.SLOWER, (-0.5,) * 20, 0.0, 0.1, "slower in 20 of 20 blocks")
    assert slower.with_own_gain(own, 0.005).outcome is ComparisonOutcome.SLOWER
