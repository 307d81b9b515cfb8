"""Statistics of timing, proved by simulation: false promotions, power, plausibility."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forecast_harness.clocks import devices
from forecast_harness.clocks.devices import ReplayBuffers, left_untouched
from forecast_harness.clocks.paired_comparison import (
    CANDIDATE,
    DEFAULT_RULES,
    INCUMBENT,
    ComparisonOutcome,
    SignTest,
    StoppingRules,
    measure_block,
    run_comparison,
    sign_interval,
)
from forecast_harness.clocks.times import (
    HOST_PEAKS,
    DevicePeaks,
    TimingSummary,
    clocks_disagree,
    impossible_time,
    roofline_seconds,
    slow_at_first,
    underreported_share,
)
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.targets.packs import load_pack, make_solution
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import verify
from tests.harness.clocks.simulated_clock import SimulatedPairedClock

DUELS = 200
NOISES: list[dict[str, float]] = [
    {"noise": 0.036},
    {"noise": 0.02, "drift": 0.03},
    {"noise": 0.02, "drift": 0.05, "burst": 0.05},
]
"""What 5.2 of the survey of kernel searches reports: 1.4 to 3.6 % at 5 us, co-tenants, clocks that wander."""
H200 = DevicePeaks(4.8e12, 2e15)


# --- the sequential test ---


def test_capital_of_a_fair_coin_stays_fair() -> None:
    """Its mean after any number of tosses is 1: summed over all 2^n outcomes, exactly.

    So it ever reaches 1 / alpha with a probability of at most alpha, by Ville's inequality.
    """
    n = 12
    mean = sum(math.comb(n, k) * math.exp(SignTest(0.0, k, n - k).log_evidence) for k in range(n + 1)) / 2**n
    assert mean == pytest.approx(1.0)
    for wins in range(1, 12):
        test = SignTest(0.0, wins, 0)
        assert test.reached(0.05) == (math.exp(test.log_evidence) >= 20.0), wins


def test_a_difference_equal_to_the_margin_is_nobodys() -> None:
    test = SignTest(margin=0.01)
    test.add(0.01)
    assert (test.wins, test.losses, test.log_evidence) == (0, 0, pytest.approx(0.0))
    test.add(0.02)
    test.add(-0.02)
    assert (test.wins, test.losses) == (1, 1)


# --- duels ---


@pytest.mark.parametrize("conditions", NOISES, ids=str)
def test_equal_candidates_are_seldom_promoted(conditions: dict[str, float]) -> None:
    clocks = [SimulatedPairedClock(2e-4, seed=n, **conditions) for n in range(DUELS)]
    result = [run_comparison(clock, StoppingRules(most=150), seed=n) for n, clock in enumerate(clocks)]
    assert sum(d.outcome is ComparisonOutcome.FASTER for d in result) <= 0.05 * DUELS
    gains = sorted(d.gain for d in result)
    assert abs(gains[DUELS // 2]) < 0.005


@pytest.mark.parametrize("conditions", NOISES, ids=str)
def test_two_percent_are_found_within_the_budget(conditions: dict[str, float]) -> None:
    clocks = [SimulatedPairedClock(5e-3, 0.02, seed=n, **conditions) for n in range(60)]
    result = [run_comparison(clock, seed=n) for n, clock in enumerate(clocks)]
    assert sum(d.outcome is ComparisonOutcome.FASTER for d in result) >= 0.9 * len(result)
    assert max(clock.spent for clock in clocks) < 60.0


def test_a_comparison_that_goes_on_for_too_long_ends_undecided() -> None:
    request = iter([False] * 11 + [True])
    result = run_comparison(SimulatedPairedClock(1e-6), too_long=lambda: next(request))
    assert (result.outcome, len(result.differences)) == (ComparisonOutcome.UNDECIDED, 12)
    assert "12 blocks" in result.reason


def test_the_slower_a_candidate_is_the_sooner_it_is_called_slower() -> None:
    hopeless, slower = (run_comparison(SimulatedPairedClock(1e-3, gain)) for gain in (-0.5, -0.03))
    assert hopeless.outcome is slower.outcome is ComparisonOutcome.SLOWER
    assert len(hopeless.differences) == DEFAULT_RULES.first
    assert DEFAULT_RULES.second <= len(slower.differences) < DEFAULT_RULES.most


def test_drift_within_a_block_cancels() -> None:
    """A device that warms up slows every launch a little more than the one before (cheat A19)."""

    class Warming:
        launches = 0

        def sample(self, which: int, fresh: bool) -> float:
            self.launches += 1
            return math.exp(0.001 * self.launches)

    clock = Warming()
    rng = random.Random(1)
    assert [measure_block(clock, rng)[0] for _ in range(5)] == pytest.approx([0.0] * 5, abs=1e-12)


def test_both_contestants_open_blocks_equally_often() -> None:
    """... so that whoever leaves the device hot or cold for the next one gains nothing."""
    openers = []

    class Noting(SimulatedPairedClock):
        def sample(self, which: int, fresh: bool) -> float:
            openers.append(which)
            return super().sample(which, fresh)

    rng, clock = random.Random(5), Noting(1e-3)
    for _ in range(200):
        measure_block(clock, rng)
    first = openers[::4]
    assert 70 < first.count(INCUMBENT) < 130
    assert openers.count(INCUMBENT) == openers.count(CANDIDATE)


def test_an_interval_holds_the_median_as_often_as_it_says() -> None:
    rng = random.Random(3)
    held = 0
    for _ in range(400):
        low, high = sign_interval([rng.gauss(0.01, 0.02) for _ in range(40)], 0.95)
        held += low <= 0.01 <= high
    assert held >= 0.94 * 400
    assert sign_interval([3.0, 1.0], 0.95) == (1.0, 3.0)


def test_a_duel_reports_all_it_rests_on() -> None:
    result = run_comparison(SimulatedPairedClock(1e-3, 0.05)).to_json()
    assert result["outcome"] == "faster"
    assert result["blocks"] == len(result["differences"])
    assert result["interval"][0] < 0.05 / 0.95 < result["interval"][1]
    assert result["evidence"] > 20


# --- plausibility ---


def test_faster_than_the_bytes_allow_is_impossible() -> None:
    """Cheats A07, A16 and A17: a launch that claims more than the memory can carry."""
    moved, flops = 1e9, 1e9
    least = roofline_seconds(moved, flops, H200)
    assert least == pytest.approx(1e9 / 4.8e12)
    assert impossible_time(1.01 * least, moved, flops, H200) == ""
    assert "at the device's peak" in impossible_time(0.99 * least, moved, flops, H200)
    # A persisting L2 once showed 3530 GB/s on a card of 864.
    assert impossible_time(moved / 3530e9, moved, 0, DevicePeaks(864e9 * 1.15, 1e15))
    for seconds in (0.0, -1.0, math.nan, math.inf):
        assert "no time" in impossible_time(seconds, 1, 1, HOST_PEAKS)


@pytest.mark.parametrize(
    ("reported", "outside", "idle", "disagree"),
    [
        ([1e-3] * 9, [1.2e-3] * 9, [1.5e-4] * 9, False),
        # A01: the work runs on another stream and the events see none of it.
        ([5e-6] * 9, [2.2e-3] * 9, [1.5e-4] * 9, True),
        # A busy machine: half of the questions are held up, the others are not.
        ([1e-3] * 9, [1.2e-3] * 5 + [2.0e-3] * 4, [1.5e-4] * 9, False),
        # A lie about most launches, the truth about the others.
        ([5e-6] * 6 + [2e-3] * 3, [2.2e-3] * 9, [1.5e-4] * 9, True),
        # A claim of more time than the question took is a lie, too.
        ([1e-3] * 9, [9e-4] * 9, [1e-4] * 9, True),
        # A handful of launches says nothing.
        ([5e-6] * 7, [2.2e-3] * 7, [1.5e-4] * 9, False),
        # Below the cost of asking nothing can be told apart.
        ([5e-6] * 9, [1.6e-4] * 9, [1.5e-4] * 9, False),
    ],
)
def test_two_clocks(reported: list[float], outside: list[float], idle: list[float], disagree: bool) -> None:
    assert bool(clocks_disagree(reported, outside, idle)) is disagree


def test_a_lie_about_some_launches_shows_beside_an_honest_contestant() -> None:
    """A busy machine delays both; one of them claims that three launches in ten took no time."""
    rng = random.Random(2)
    idle = [1.5e-4 * math.exp(rng.gauss(0, 0.3)) for _ in range(40)]

    def answers(lies: float) -> float:
        true = [1e-3 * math.exp(rng.gauss(0, 0.02)) for _ in range(200)]
        message = [5e-6 if rng.random() < lies else t for t in true]
        delay = [3e-3 if rng.random() < 0.1 else 0.0 for _ in true]
        return underreported_share(message, [t + 1.5e-4 + d for t, d in zip(true, delay, strict=True)], idle)

    honest, other, liar = answers(0.0), answers(0.0), answers(0.3)
    assert abs(honest - other) < 0.1
    assert liar - honest > 0.2


def test_a_slow_start_shows() -> None:
    assert slow_at_first([5e-3] * 10 + [1e-4] * 30)
    assert slow_at_first([5e-3] * 8 + [1e-4] * 32) == ""
    assert slow_at_first([1e-4] * 40) == ""
    assert slow_at_first([5e-3] * 2 + [1e-4]) == ""


# --- labels ---


def test_a_label_carries_its_circumstances() -> None:
    label = TimingSummary.of(
        [1e-3, 2e-3, 3e-3, 4e-3, 5e-3],
        protocol="p",
        harness="h",
        device_uuid="GPU-1",
        clocks={"sm_mhz": 1755},
    )
    assert (label.median_ms, label.n) == (pytest.approx(3.0), 5)
    assert label.spread == pytest.approx((5 - 2) / 3)
    data = label.to_json()
    assert (data["device_uuid"], data["clocks"], data["harness"]) == ("GPU-1", {"sm_mhz": 1755}, "h")


# --- the device's side, without a device ---


def test_peaks_of_a_known_device() -> None:
    result = devices.device_peaks("NVIDIA H200")
    assert result.bytes_per_s == pytest.approx(4800e9 * 1.15)
    assert result.flops_per_s > 989e12


def test_a_device_is_held_by_one_process(tmp_path: Path) -> None:
    """Another process gets it only after this one is done."""
    program = (
        "import sys, pathlib\n"
        "from forecast_harness.clocks.devices import DeviceBusy, exclusive\n"
        "try:\n"
        "    with exclusive('GPU-1', 0.05, pathlib.Path(sys.argv[1])):\n"
        "        print('held')\n"
        "except DeviceBusy as error:\n"
        "    print('busy' if 'GPU-1' in str(error) else error)\n"
    )

    words = [sys.executable, "-c", program, str(tmp_path)]
    with devices.exclusive("GPU-1", 5.0, tmp_path):
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "busy"
    with devices.exclusive("GPU-1", 0.05, tmp_path):
        pass


def test_lanes_on_two_devices_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Not even where the driver tells no UUIDs."""
    data = VerificationPlan(device="cuda", index=1, uuid="GPU-1").device_lock
    untold = [VerificationPlan(device="cuda", index=n).device_lock for n in range(2)]
    with (
        devices.exclusive(data, 1.0, tmp_path),
        devices.exclusive(untold[0], 1.0, tmp_path),
        devices.exclusive(untold[1], 1.0, tmp_path),
        devices.exclusive(VerificationPlan().device_lock, 1.0, tmp_path),
        pytest.raises(devices.DeviceBusy, match="timing on the host"),
        devices.exclusive(VerificationPlan().device_lock, 0.05, tmp_path),
    ):
        pass


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [("NVIDIA H200", "GPU-5a1"), ("NVIDIA H200", "GPU-5b2")]
    monkeypatch.setattr(devices, "device_count", lambda: len(known))
    monkeypatch.setattr(devices, "identity", lambda index: known[index])


@pytest.mark.usefixtures("two_devices")
def test_a_device_is_found_by_what_names_it() -> None:
    assert [devices.device_index(text) for text in ("3", "GPU-5b2", "GPU-5a")] == [3, 1, 0]
    assert [devices.device_index(text) for text in ("GPU-5", "GPU-6", "MIG-5a1", "")] == [None] * 4


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(
    ("told", "numbers"),
    [
        (None, [0, 1]),
        ("", []),
        ("1", [1]),
        ("1, 0", [1, 0]),
        ("GPU-5b,0", [1, 0]),
        ("1,7,0", [1]),
        ("0,0,1", [0]),
        ("-1", []),
        ("MIG-5a1", []),
    ],
)
def test_only_devices_that_this_process_may_use_are_visible(
    monkeypatch: pytest.MonkeyPatch, told: str | None, numbers: list[int]
) -> None:
    if told is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    assert devices.visible_devices() == numbers


def test_without_a_driver_nothing_is_claimed() -> None:
    if devices.device_count():
        pytest.skip("there is a device here")
    assert devices.identity(0) == ("", "")
    assert devices.device_conditions(0) == {}


def test_equals_are_dropped_long_before_the_budget() -> None:
    """An undecided duel may take hundreds of blocks: not where a gain is out of reach."""
    equal = [run_comparison(SimulatedPairedClock(1e-4, 0.0, seed=n), DEFAULT_RULES, n) for n in range(40)]
    assert {e.outcome for e in equal} <= {ComparisonOutcome.UNDECIDED, ComparisonOutcome.SLOWER}
    assert sum(len(e.differences) <= DEFAULT_RULES.most / 2 for e in equal) > 20
    early = [
        e
        for e in equal
        if e.outcome is ComparisonOutcome.UNDECIDED and len(e.differences) < DEFAULT_RULES.most
    ]
    assert all("out of reach" in e.reason for e in early)


# --- replays ---


def test_a_replay_that_leaves_outputs_alone_is_noticed() -> None:
    written = torch.arange(1000, dtype=torch.uint8)
    spoiled = torch.full_like(written, 255)
    other = written.clone()
    other[::3] += 1  # added up in another order
    assert not left_untouched([written], [spoiled], [written])
    assert not left_untouched([written], [spoiled], [other])
    half = written.clone()
    half[:500] = 255
    assert left_untouched([written], [spoiled], [half])
    assert left_untouched([written], [spoiled], [spoiled])
    assert left_untouched([written], [spoiled], [written[:10]])
    assert not left_untouched([], [], [])
    nothing_to_do = torch.full_like(written, 255)
    assert not left_untouched([nothing_to_do], [spoiled], [nothing_to_do])


# --- a real device ---


class Vector(ReplayBuffers):
    """An input that is doubled by whoever is timed."""

    def __init__(self) -> None:
        self.x = torch.empty(1 << 16, device="cuda")
        self.restore(None)

    def clear(self) -> None:
        self.x.zero_()

    def restore(self, result: Any) -> None:
        if result is not None:
            result.fill_(float("nan"))
        torch.arange(1 << 16, out=self.x)

    def output_copies(self, result: Any) -> list[Any]:
        return [result.clone().view(torch.uint8)]


@pytest.fixture
def timed() -> tuple[devices.DeviceTimer, Vector]:
    return devices.DeviceTimer(torch), Vector()


def wanted() -> Any:
    return 2 * torch.arange(1 << 16, device="cuda", dtype=torch.float32)


@pytest.mark.gpu
def test_a_short_launch_is_replayed_and_right(timed: tuple[devices.DeviceTimer, Vector]) -> None:
    timer, vector = timed
    for _ in range(5):
        taken = timer.time(lambda: vector.x * 2, vector)
        assert torch.equal(taken.result, wanted())
        assert 0 < taken.seconds <= taken.total_seconds
    assert taken.protocol == devices.GRAPH_PROTOCOL
    assert taken.total_seconds > 10 * taken.seconds
    timer.idle(vector, None)
    plain = timer.time(lambda: vector.x * 2, vector, protocol=devices.EVENTS_PROTOCOL)
    assert plain.protocol == devices.EVENTS_PROTOCOL
    assert plain.result.equal(wanted())
    assert plain.seconds > taken.seconds


@pytest.mark.gpu
def test_what_waits_for_the_device_is_launched(timed: tuple[devices.DeviceTimer, Vector]) -> None:
    timer, vector = timed

    def waits() -> Any:
        return vector.x * (2 if float(vector.x[1]) == 1 else 3)

    for _ in range(3):
        taken = timer.time(waits, vector)
        assert torch.equal(taken.result, wanted())
        assert taken.protocol == devices.EVENTS_PROTOCOL
    assert torch.equal(timer.time(lambda: vector.x * 2, vector, "another").result, wanted())


@pytest.mark.gpu
def test_work_on_a_stream_of_its_own_gains_nothing(timed: tuple[devices.DeviceTimer, Vector]) -> None:
    """While it is recorded, the inputs hold nothing that could be computed ahead."""
    timer, vector = timed
    other = torch.cuda.Stream()

    def aside() -> Any:
        with torch.cuda.stream(other):
            result = vector.x * 2
        return result.clone()

    for _ in range(4):
        taken = timer.time(aside, vector)
        torch.cuda.synchronize()
    assert taken.protocol == devices.EVENTS_PROTOCOL or not torch.equal(taken.result, wanted())


HONEST = {
    "plain": "import torch\n\n\ndef run(x):\n    return torch.softmax(x, -1)\n",
    "waits": "import torch\n\n\ndef run(x):\n    torch.cuda.synchronize()\n    return torch.softmax(x, -1)\n",
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_solution_is_accepted_however_it_is_timed(name: str) -> None:
    pack = load_pack("softmax")
    solution = make_solution(name, HONEST[name], pack.definition.format)
    called, uuid = devices.identity(0)
    plan = VerificationPlan(device="cuda", peaks=devices.device_peaks(called), uuid=uuid)
    with SandboxLane(device="0") as lane:
        verdict = verify(pack, solution, lane, plan=plan)
    assert verdict.accepted, verdict.reasons
