"""Every exploit is refused, for a reason that was expected; every honest look-alike is accepted."""

from __future__ import annotations

import re
from dataclasses import replace
from math import log
from operator import attrgetter
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from forecast_harness.clocks.devices import LaunchTiming
from forecast_harness.clocks.paired_comparison import ComparisonOutcome, ComparisonResult, StoppingRules
from forecast_harness.clocks.times import impossible_time
from forecast_harness.sandbox import cell_process, wire
from forecast_harness.sandbox.api import ContainmentLevel, ResourceLimits, SandboxLane
from forecast_harness.targets.packs import Language, Workload, load_pack, make_solution
from forecast_harness.trials.bench import BenchResult, compare_solutions
from forecast_harness.verify import launch_cell as inside
from forecast_harness.verify import tolerance
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problem import compare_outputs
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
    if entry.solution.language is Language.TRITON:
        return VerificationPlan(cases=6, timed=4, launches=1)
    whole = VerificationPlan(cases=12, timed=30)
    return replace(whole, launches=1) if entry.expected == {"accepted"} else whole


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
    honest = {(e.name, e.pack.definition.name) for e in HONEST}
    twins = {e.name: (e.against.name, e.pack.definition.name) for e in EXPLOITS if e.against is not None}
    assert set(twins) == {e.name for e in EXPLOITS if "neutralised" in e.expected}
    assert {"a01_side_stream", "a16_persisting_l2", "a17_evict_last"} <= set(twins)
    assert set(twins.values()) <= honest


def test_what_exploits_replace_exists() -> None:
    """An exploit that reaches for a name that is no longer there would be refused for that alone."""
    assert {"seconds", "total_seconds"} <= set(LaunchTiming._fields)
    assert all(callable(getattr(inside, name)) for name in ("_clock", "_timed"))
    assert all(callable(f) for f in (tolerance.mismatch, compare_outputs, impossible_time))


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
    checker = Path(tolerance.__file__)
    before = checker.read_bytes()
    tried = attempted(entry, judging)
    assert tried.as_expected, str(tried)
    assert checker.read_bytes() == before or judging.level < ContainmentLevel.FILES
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


def test_attacks_replace_functions_that_are_there() -> None:
    """An attack on a name that is gone would end at its import, and test nothing."""
    places = {"inside": inside, "wire": wire, "process": cell_process}
    replaced = set(
        re.findall(r'^ *replace\((\w+)((?:\.\w+)*), "(\w+)"', "\n".join(sources(PACK).values()), re.M)
    )
    assert len(replaced) > 20
    for root, path, name in replaced:
        attrgetter(f"{path}.{name}".lstrip("."))(places[root])


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
    plan = replace(PLAN, launches=1, contest_launches=1)
    result = compare_solutions(
        PACK, [plain], judging, against=make_solution("slow", slow), plan=plan, rules=RULES
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
