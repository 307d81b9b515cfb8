"""Whether the judge's own clock agrees with a claimed gain: the arithmetic, and real cells on a host."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forecast_harness.clocks.paired_comparison import CANDIDATE, INCUMBENT
from forecast_harness.sandbox.api import JobStatus, ResourceLimits, SandboxJob, SandboxLane
from forecast_harness.targets.packs import Pack, load_pack
from forecast_harness.verify.blocks import Slot
from forecast_harness.verify.launch_windows import BARE, NULL, AuditVerdict, Glimpse, WindowAudit
from tests.harness.lanes import lane
from tests.harness.small import checked_only

SECONDS = {INCUMBENT: 4e-3, CANDIDATE: 2e-3, NULL: 2e-4, BARE: 1.5e-4}


class Windows:
    """Cells whose windows take what they are told to, with some noise."""

    def __init__(self, net_s: Mapping[int, float], noise: float = 0.01) -> None:
        self.workloads: Sequence[str] = ("a", "b")
        self._net, self._noise, self._rng = net_s, noise, random.Random(1)
        self.checked = False

    def window(self, which: int, workload: str) -> float:
        return (self._net.get(which, 0.0) + SECONDS[NULL if which != BARE else BARE]) * (
            1 + self._noise * self._rng.random()
        )

    def check_outputs(self) -> None:
        self.checked = True


def audited(claimed: float, own: float, rounds: int = 200, noise: float = 0.01) -> WindowAudit:
    audit = WindowAudit(math.log(claimed), 0.005)
    audit.run(Windows({INCUMBENT: 4e-3, CANDIDATE: own}, noise), random.Random(0), rounds, 60.0)
    return audit


@pytest.mark.parametrize(
    ("claimed", "own", "verdict"),
    [
        (2.0, 2e-3, AuditVerdict.AGREES),
        (2.0, 4e-3, AuditVerdict.CONTRADICTS),
        (2.0, 5e-3, AuditVerdict.CONTRADICTS),
        (1.1, 4e-3 / 1.1, AuditVerdict.AGREES),
        (1.5, 4e-3 / 1.2, AuditVerdict.AGREES),
    ],
)
def test_windows_say_whether_there_is_a_gain(claimed: float, own: float, verdict: AuditVerdict) -> None:
    audit = audited(claimed, own)
    assert audit.verdict() is verdict
    assert audit.gain == pytest.approx(math.log(4e-3 / own), abs=0.02)


@pytest.mark.parametrize(("own", "checks"), [(2e-3, True), (4e-3, False)])
def test_outputs_are_checked_before_a_gain_is_believed(own: float, checks: bool) -> None:
    cells = Windows({INCUMBENT: 4e-3, CANDIDATE: own})
    WindowAudit(math.log(2.0), 0.005).run(cells, random.Random(0), 200, 60.0)
    assert cells.checked == checks


def test_a_gain_that_noise_hides_is_unclear() -> None:
    audit = audited(1.05, 4e-3 / 1.02, rounds=40, noise=0.5)
    assert audit.verdict() is AuditVerdict.UNCLEAR
    assert len(audit.differences()) == 40


def test_what_lighter_serving_code_could_gain_is_no_gain() -> None:
    audit = WindowAudit(math.log(1.2), 0.005)
    audit.run(Windows({INCUMBENT: 3e-4, CANDIDATE: 2.5e-4}, 0.0), random.Random(0), 30, 60.0)
    assert audit.serving_gain() > audit.gain
    assert audit.verdict() is AuditVerdict.UNCLEAR


# --- real cells ---

LIMITS = ResourceLimits(wall_s=240, cpu_s=240, trusted_s=240)
PLAIN = "import torch\n\n\ndef run(x):\n    return torch.softmax(x, -1)\n"
SLOW = PLAIN.replace("    return", "    for _ in range(40):\n        y = torch.softmax(x, -1)\n    return")
STALE = (
    "import torch\n\nKEPT = []\n\n\ndef run(x):\n    if not KEPT:\n"
    "        KEPT.append(torch.softmax(x, -1))\n    return KEPT[0]\n"
)
SKIPS = (
    "import torch\n\nKEPT = []\n\n\ndef run(x):\n    KEPT.append(None)\n"
    "    if len(KEPT) % 20 == 7 and KEPT[0] is not None and KEPT[0].shape == x.shape:\n        return KEPT[0]\n"
    "    y = torch.softmax(x, -1)\n    KEPT[0] = y\n    return y\n"
)
"""Answers one launch in twenty with an earlier one's outputs."""
needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")


@pytest.fixture(scope="module")
def judge() -> Iterator[Callable[..., dict[str, Any]]]:
    pack = checked_only(load_pack("softmax"))
    with lane(warm=("torch", "tests.harness.large")) as opened:
        yield lambda *sources, **asked: ask(opened, pack, sources, **asked)


def ask(
    opened: SandboxLane,
    pack: Pack,
    sources: Sequence[str],
    claimed: float = 2.0,
    rounds: int = 25,
    device: str = "cpu",
    seconds: float = 1e-4,
) -> dict[str, Any]:
    files = {f"{n}.py": source for n, source in enumerate(sources)}
    payload = {"pack": pack.to_json(), "files": list(files), "seconds": seconds, "claimed": math.log(claimed)}
    payload |= {"rounds": rounds, "device": device}
    job = SandboxJob("tests.harness.large:audited_windows", payload, files)
    result = opened.run(job, LIMITS)
    assert result.status is JobStatus.OK, result.detail
    results: dict[str, Any] = result.value
    return results


@needs_linux
def test_outputs_of_an_earlier_window_are_caught(judge: Callable[..., dict[str, Any]]) -> None:
    result = judge(SLOW, STALE)
    assert result["caught"] == CANDIDATE
    assert result["reasons"][0]["code"] in (
        "wrong_values",
        "wrong_shape",
    )  # by the workload that is looked at first


@needs_linux
def test_one_launch_in_twenty_that_is_left_out_is_caught(judge: Callable[..., dict[str, Any]]) -> None:
    result = judge(PLAIN, SKIPS)
    assert result.get("caught") == CANDIDATE, result
    assert result["reasons"][0]["code"] == "wrong_values"


def glimpse(data: torch.Tensor, **form: Any) -> Glimpse:
    kind = str(data.dtype).removeprefix("torch.")
    slot = Slot("", kind, tuple(data.shape), (data.shape[1], 1), 0)
    return Glimpse(data.contiguous().view(torch.uint8), replace(slot, **form))


def test_rounding_is_like_and_other_values_are_not() -> None:
    right = torch.randn(5, 64)
    rounded, stale = right.bfloat16().float(), right.clone()
    stale[3] = torch.randn(64)
    assert glimpse(rounded).unlike(glimpse(right)) == []
    assert glimpse(stale).unlike(glimpse(right)) == [3]
    assert glimpse(stale).unlike(glimpse(right, stride=(1, 64))) == [], "other strides are other elements"
    odd = torch.tensor([[math.nan, math.inf, -math.inf, 1.0]])
    assert glimpse(odd).unlike(glimpse(odd.clone())) == []
    assert glimpse(torch.tensor([[1, 2, 3]])).unlike(glimpse(torch.tensor([[1, 7, 8]]))) == [0]
    eight = right.to(torch.float8_e4m3fn)
    assert glimpse(eight).unlike(glimpse(eight.clone())) == []
    assert glimpse(eight).unlike(glimpse(stale.to(eight.dtype))) == [3]


# --- on a device ---


TWICE = "import torch\n\n\ndef run(x):\n    torch.softmax(x, -1)\n    return torch.softmax(x, -1)\n"
WAITS = "import torch\n\n\ndef run(x):\n    y = torch.softmax(x, -1)\n    float(y[0, 0])\n    return y\n"
SPINS = (
    "import torch\n\n\ndef run(x):\n    y = torch.softmax(x, -1)\n    torch.cuda._sleep(20_000_000)\n"
    "    return y\n"
)


@pytest.fixture(scope="module")
def device_judge() -> Iterator[Callable[..., dict[str, Any]]]:
    pack = load_pack("softmax")
    with lane(warm=("torch", "tests.harness.large"), device="0") as opened:
        yield lambda *sources, **asked: ask(opened, pack, sources, device="cuda", **asked)


MANY_KERNELS = """import torch

scratch = None


def run(x):
    global scratch
    scratch = torch.ones(4096, device=x.device) if scratch is None else scratch
    for _ in range({turns}):
        scratch.mul_(1.0)
    return torch.softmax(x, -1)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("incumbent", "candidate", "low", "high"),
    [
        (TWICE, PLAIN, 0.3, math.inf),
        (PLAIN, PLAIN, -0.05, 0.05),
        (WAITS, WAITS, -math.inf, math.inf),
        (PLAIN, SPINS, -math.inf, 0.0),
    ],
    ids=["half the work", "equals", "cannot be recorded", "left on the device"],
)
def test_only_half_the_work_is_faster(
    device_judge: Callable[..., dict[str, Any]], incumbent: str, candidate: str, low: float, high: float
) -> None:
    result = device_judge(incumbent, candidate, rounds=60)
    assert (result.get("verdict") == "agrees") == (incumbent is TWICE), result
    assert "gain" not in result or low < result["gain"] < high


@pytest.mark.gpu
def test_outputs_of_an_earlier_window_are_caught_on_a_device(
    device_judge: Callable[..., dict[str, Any]],
) -> None:
    result = device_judge(PLAIN, STALE)
    assert result.get("caught") == CANDIDATE, result


@pytest.mark.gpu
def test_two_percent_are_seen(device_judge: Callable[..., dict[str, Any]]) -> None:
    """Graphs of thousands of kernels differ by 1 % between processes."""
    slow, fast = (MANY_KERNELS.format(turns=turns) for turns in (3000, 2940))
    result = device_judge(slow, fast, claimed=1.02, rounds=60, seconds=6e-3)
    assert 0.0 < result["gain"] < 0.06, result
