"""Arguments too large to travel with every launch: what lies in the cell, what is read, what shows unread."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forecast_harness.sandbox.api import JobStatus, ResourceLimits, SandboxJob, SandboxLane
from forecast_harness.targets.packs import Pack, load_pack, make_solution
from forecast_harness.targets.packs.schema import Workload
from forecast_harness.verify.cell_limits import workload_bytes
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import verify

LIMITS = ResourceLimits(wall_s=60, trusted_s=60)
SOFTMAX = load_pack("softmax").with_(workloads=(Workload("some", {"M": 512, "N": 1024}),))
SWIGLU = load_pack("swiglu").with_(workloads=(Workload("some", {"M": 300, "N": 1024}),))
"""It writes into outputs that lie in the block."""
HONEST = {
    "softmax": "import torch\n\n\ndef run(x):\n    return torch.softmax(x, -1)\n",
    "swiglu": "def run(gate, up, y):\n    y.copy_(gate.float().sigmoid() * gate * up)\n",
}


def launched(lane: SandboxLane, pack: Pack, source: str, **asked: Any) -> dict[str, Any]:
    payload = {"pack": pack.to_json(), "count": 4, **asked}
    result = lane.run(SandboxJob("tests.harness.large:launches", payload, {"solution.py": source}), LIMITS)
    assert result.status is JobStatus.OK, result.detail
    value: dict[str, Any] = result.value
    return value


# --- launches in a real cell ---


@pytest.mark.parametrize("pack", [SOFTMAX, SWIGLU], ids=["returned", "in_the_block"])
def test_a_block_is_sent_once_and_read_when_asked(judging: SandboxLane, pack: Pack) -> None:
    found = launched(judging, pack, HONEST[pack.definition.name], check=True, idle=True)
    assert found["codes"] == [[]] * 4
    assert found["checked"] == []
    placed, *patches = [sent for question, sent, _ in found["log"] if question == "place"]
    assert placed >= found["block"]
    assert len(patches) == 3
    assert 0 < max(patches) < found["block"] / 8
    assert {sent + came for question, sent, came in found["log"] if question in ("launch", "idle")} == {0}
    assert [came >= found["block"] for question, _, came in found["log"] if question == "again"] == [True]


@pytest.mark.parametrize("pack", [SOFTMAX, SWIGLU], ids=["returned", "in_the_block"])
def test_inputs_may_come_with_the_question_of_a_launch_alone(judging: SandboxLane, pack: Pack) -> None:
    found = launched(judging, pack, HONEST[pack.definition.name], check=True, idle=True, late=True)
    assert found["codes"] == [[]] * 4
    assert found["checked"] == []
    launches = [sent for question, sent, _ in found["log"] if question == "launch"]
    # The first idle question needs something to be about; what is launched is told by launches alone.
    assert sum(question == "place" for question, _, _ in found["log"]) == 1
    assert all(0 < sent < found["block"] / 8 for sent in launches[1:])


def test_a_small_block_travels_with_every_launch(judging: SandboxLane) -> None:
    pack = SOFTMAX.with_(workloads=(Workload("few", {"M": 16, "N": 128}),))
    found = launched(judging, pack, HONEST["softmax"], check=True)
    assert found["codes"] == [[]] * 4
    assert {question for question, _, _ in found["log"]} == {"prepare", "launch"}


@pytest.mark.parametrize(
    ("deed", "code"),
    [
        ("x.view(-1)[7] = 0.5", "mutated_input"),
        ("x[-1].zero_()", "mutated_input"),
        ("torch.as_strided(x, (1,), (1,), x.storage_offset() + x.numel() + 3).fill_(0.5)", "out_of_bounds"),
        ("torch.as_strided(x, (1,), (1,), x.storage_offset() - 2).fill_(0.5)", "out_of_bounds"),
    ],
)
def test_what_an_unread_launch_does_to_the_block_shows(judging: SandboxLane, deed: str, code: str) -> None:
    source = (
        f"import torch\n\nn = 0\n\n\ndef run(x):\n    global n\n    n += 1\n"
        f"    y = torch.softmax(x, -1)\n    if n == 3:\n        {deed}\n    return y\n"
    )
    assert launched(judging, SOFTMAX, source)["codes"] == [[], [], [code], []]


LATE = """import _thread
import time

import torch


def later(y):
    time.sleep(0.5)
    y.view(-1)[3] += 0.25


def run({arguments}):
    {compute}
    _thread.start_new_thread(later, (y,))
    {end}
"""


@pytest.mark.parametrize("pack", [SOFTMAX, SWIGLU], ids=["returned", "in_the_block"])
def test_an_output_that_changes_before_it_is_read_shows(judging: SandboxLane, pack: Pack) -> None:
    parts = {
        "softmax": ("x", "y = torch.softmax(x, -1)", "return y"),
        "swiglu": ("gate, up, y", "y.copy_(torch.sigmoid(gate.float()) * gate * up)", "return None"),
    }[pack.definition.name]
    source = LATE.format(**dict(zip(("arguments", "compute", "end"), parts, strict=True)))
    found = launched(judging, pack, source, check=True, count=1, wait_s=1.5)
    assert found["codes"] == [[]]
    assert found["checked"] == ["late_write"]


def test_an_input_that_changes_before_it_is_read_shows(judging: SandboxLane) -> None:
    source = LATE.format(arguments="x", compute="y = x", end="return torch.softmax(x, -1)")
    found = launched(judging, SOFTMAX, source, check=True, count=1, wait_s=1.5)
    assert found["codes"] == [[]]
    assert "mutated_input" in found["checked"]


@pytest.mark.parametrize(
    "key", ["0", "x.data_ptr()", "(id(x), x._version)", "(x.view(-1)[::100003].sum().item())"]
)
def test_a_result_of_before_is_wrong_after_a_patch(judging: SandboxLane, key: str) -> None:
    source = (
        "import torch\n\nkept = {}\n\n\ndef run(x):\n"
        f"    key = {key}\n    if key not in kept:\n        kept[key] = torch.softmax(x, -1)\n"
        "    return kept[key]\n"
    )
    found = launched(judging, SOFTMAX, source, check=True, count=2)
    assert found["codes"] == [[], []]
    assert found["checked"] == ["wrong_values"]


@pytest.mark.parametrize(
    ("forged", "codes", "checked"),
    [
        ("[0 for _ in honest(*args)]", "late_write", ["late_write"]),
        ("[honest(*args)[0], 0]", "", ["late_write"]),
        ("['many']", "forged", []),
    ],
)
def test_a_forged_digest_is_no_way_around_reading(
    judging: SandboxLane, forged: str, codes: str, checked: list[str]
) -> None:
    source = (
        "import sys\n\nimport torch\n\ninside = sys.modules['forecast_harness.verify.inside']\n"
        f"honest = inside._digests\ninside._digests = lambda *args: {forged}\n\n\n"
        "def run(x):\n    return torch.softmax(x, -1)\n"
    )
    found = launched(judging, SOFTMAX, source, check=True, count=1)
    assert codes in str(found["codes"])
    assert found["checked"] == checked


def test_who_reaches_the_pristine_copy_gains_nothing(judging: SandboxLane) -> None:
    """It lies in the candidate's process; the judge's own digest is what the block is held against."""
    source = (
        "import gc\n\nimport torch\n\n\ndef run(x):\n    for found in gc.get_objects():\n"
        "        if type(found).__name__ == 'BlockStore':\n            for kept in found._pristine.values():\n"
        "                kept.zero_()\n    return torch.softmax(x, -1)\n"
    )
    assert [*launched(judging, SOFTMAX, source, count=2)["codes"][1]] != []


def test_verification_takes_the_large_path(judging: SandboxLane) -> None:
    pack = load_pack("softmax")
    host = next(w for w in pack.workloads if w.host)
    limits = replace(LIMITS, answer_bytes=1 << 16)  # widened to what the pack needs
    plan = VerificationPlan(cases=2, timed=6)
    assert sum(workload_bytes(pack, host)) > 1 << 20
    verdict = verify(pack, make_solution("honest", HONEST["softmax"]), judging, plan=plan, limits=limits)
    assert verdict.accepted, verdict.reasons
    mutating = "import torch\n\n\ndef run(x):\n    y = torch.softmax(x, -1)\n    if x.numel() > 1 << 18:\n"
    mutating += "        x[0, 0] = 1\n    return y\n"
    verdict = verify(pack, make_solution("mutating", mutating), judging, plan=plan, limits=limits)
    assert [str(r.code) for r in verdict.reasons] == ["mutated_input"]


@pytest.mark.parametrize(
    ("result", "code"),
    [("x", "aliases_input"), ("[1.0]", "wrong_structure"), ("x.to_sparse()", "wrong_structure")],
)
def test_what_is_no_output_shows_unread(judging: SandboxLane, result: str, code: str) -> None:
    found = launched(judging, SOFTMAX, f"def run(x):\n    return {result}\n", count=1)
    assert found["codes"] == [[code]]


def test_an_output_without_elements_is_checked_like_others(judging: SandboxLane) -> None:
    source = "def run(x):\n    return x.new_empty(2, 3)[2:]\n"
    assert launched(judging, SOFTMAX, source, check=True)["checked"] == ["wrong_shape"]


def test_a_mode_that_sees_all_operations_is_global_state(judging: SandboxLane) -> None:
    source = (
        "import torch\nfrom torch.overrides import TorchFunctionMode\n\n\n"
        "class Eye(TorchFunctionMode):\n    def __torch_function__(self, f, types, args=(), kwargs=None):\n"
        "        return f(*args, **(kwargs or {}))\n\n\neye = Eye()\n\n\n"
        "def run(x):\n    eye.__enter__()\n    return torch.softmax(x, -1)\n"
    )
    assert launched(judging, SOFTMAX, source, count=1)["codes"] == [["global_state"]]


@pytest.mark.parametrize(
    ("most_s", "launches"), [(0.0, range(5, 6)), (1e9, range(10, 21))], ids=["no time", "time"]
)
def test_launches_are_timed_until_a_third_are_or_the_time_is_up(
    judging: SandboxLane, most_s: float, launches: range
) -> None:
    plan = VerificationPlan(timed=10)
    payload = {"pack": SOFTMAX.to_json(), "plan": plan.to_json(), "most_s": most_s}
    files = {"solution.py": HONEST["softmax"]}
    result = judging.run(SandboxJob("tests.harness.timed_launches:timed_launches", payload, files), LIMITS)
    assert result.status is JobStatus.OK, result.detail
    assert result.value["launches"] in launches
    assert result.value["codes"] == []
