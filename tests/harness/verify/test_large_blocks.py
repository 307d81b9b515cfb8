"""Large arguments: sent once, changed in place, read by digests."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forecast_autotune.errors import RecordError
from forecast_harness.sandbox.api import (
    CellAnswer,
    JobStatus,
    ResourceLimits,
    SandboxJob,
    SandboxLane,
    TensorBytes,
)
from forecast_harness.targets.packs import Pack, load_pack, make_solution
from forecast_harness.targets.packs.load import builtin_names
from forecast_harness.targets.packs.schema import PackFormat, Workload
from forecast_harness.verify.blocks import BlockHasher, build_arena, complement_spans, digest_values
from forecast_harness.verify.inputs import integer_view
from forecast_harness.verify.launch_cell import BlockStore
from forecast_harness.verify.launcher import Launcher, LaunchResult, ResidentBlock
from forecast_harness.verify.plan import MAX_LAUNCH_BYTES, VerificationPlan, cell_limits_for, workload_bytes
from forecast_harness.verify.problem import DrawSpec, problem_of
from forecast_harness.verify.run import verify


def generator(seed: int = 0) -> Any:
    return torch.Generator().manual_seed(seed)


# --- the cell's blocks ---


def test_restoring_overwrites_all_that_a_candidate_left() -> None:
    x = torch.randn(300, 7)
    arena = build_arena({"x": x}, {"y": torch.full((5,), torch.nan)}, {}, random.Random(3))
    held = BlockStore("cpu")
    held.put("a", TensorBytes("uint8", (len(arena.data()),), arena.data()))
    held.restore("a")
    before = held.views(arena.slots)
    address, versions = before["x"].data_ptr(), [t._version for t in before.values()]
    held.bytes().fill_(7)
    held.restore("a")
    after = held.views(arena.slots)
    assert held.bytes().numpy().tobytes() == bytes(arena.data())
    assert all(after[n] is t for n, t in before.items())
    assert after["x"].data_ptr() == address
    assert [t._version for t in after.values()] == versions


# --- digests ---


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, (1 << 18) - 1, (1 << 18) + 3, (5 << 18) + 17])
def test_any_byte_shows_in_a_digest(size: int) -> None:
    digest = BlockHasher(11)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator())
    (before,) = digest_values([digest.of(data, 5)])
    for place in {0, size - 1, size // 2, size // 3}:
        changed = data.clone()
        changed[place] ^= 128
        assert digest_values([digest.of(changed, 5)]) != [before]
    assert digest_values([BlockHasher(11).of(data, 5)]) == [before]
    assert digest_values([digest.of(data, 6)]) != [before]
    assert digest_values([BlockHasher(12).of(data, 5)]) != [before]
    # Where the bytes lie makes no difference.
    moved = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]
    assert digest_values([digest.of(moved, 5)]) == [before]


@pytest.mark.parametrize("written", [[], [(64, 67)], [(0, 9)], [(128, 300_001), (300_032, 300_040)]])
def test_a_digest_of_spans_leaves_out_the_rest(written: list[tuple[int, int]]) -> None:
    size = 400_000
    digest, data = BlockHasher(1), torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator())
    kept = complement_spans(written, size)
    (before,) = digest_values([digest.of(data, 2, kept)])
    for start, stop in written:
        other = data.clone()
        other[start:stop] ^= 255
        assert digest_values([digest.of(other, 2, kept)]) == [before]
    for start, stop in kept:
        for place in (start, stop - 1):
            other = data.clone()
            other[place] ^= 1
            assert digest_values([digest.of(other, 2, kept)]) != [before]
    parts = [digest.of(data, 2, [span]) for span in sorted([*kept, *written])]
    (together,) = digest_values([digest.of(data, 2)])
    assert (sum(digest_values(parts)) - together) % (1 << 64) == 0


# --- drifts ---


def some_case(name: str) -> Any:
    import tempfile

    pack = load_pack(name)
    with tempfile.TemporaryDirectory() as folder:
        problem = problem_of(pack, Path(folder))
        return problem.case(
            pack.workloads[0].axes, DrawSpec("normal", "contiguous", generator())
        ).with_mutator()


@pytest.mark.parametrize("name", builtin_names())
def test_the_judge_and_the_cell_follow_a_drift_alike(name: str) -> None:
    """Every shipped pack's arguments: what is sent makes of the old block the new one, digest included."""
    case = some_case(name)
    assert case.mutator is not None
    resident, held = ResidentBlock(case, random.Random(1), 99), BlockStore("cpu")
    before = {n: t.clone() for n, t in case.tensors.items()}
    for step in range(4):
        question = resident.update()
        assert question is not None
        payload, arrays = question
        if step == 0:
            held.put("a", arrays["block"])
        for n, slot in enumerate(payload["patches"]):
            by_name = {s.name: s for s in resident.arena.slots}
            held.patch("a", by_name[slot["name"]], arrays[f"at{n}"], arrays[f"to{n}"])
        assert resident.update() is None
        held.restore("a")
        assert held.bytes().numpy().tobytes() == bytes(resident.arena.data())
        views = held.views(resident.arena.slots)
        assert all(torch.equal(_bits(views[n]), _bits(t)) for n, t in case.tensors.items())
        fresh = ResidentBlock(case, random.Random(1), 99)
        assert fresh.digest == resident.digest
        case.next(generator(step))
    assert any(not torch.equal(_bits(before[n]), _bits(t)) for n, t in case.tensors.items())
    assert case.check(case.right())[0] is None  # the reference sees the same arguments


def _bits(tensor: Any) -> Any:
    return integer_view(tensor.contiguous())


def test_what_a_pack_promises_survives_a_drift() -> None:
    case = some_case("gdn_recompute_w_u")
    for step in range(5):
        case.next(generator(step))
    a = case.tensors["A"]
    b, t, h, c = a.shape
    assert torch.equal(a, (a.reshape(b, t // c, c, h, c) * torch.ones(c, c).tril()[:, None, :]).reshape_as(a))


# --- limits and effort ---


def test_a_workload_beyond_what_can_be_judged_is_named() -> None:
    axes = {"M": 1 << 16, "N": 8192}
    pack = load_pack("softmax").with_(workloads=(Workload("huge", axes, large=True),))
    assert sum(workload_bytes(pack, pack.workloads[0])) > MAX_LAUNCH_BYTES
    with pytest.raises(RecordError, match="workload huge: arguments and outputs take 4294967296 bytes"):
        cell_limits_for(pack, ResourceLimits(), "cuda")


# --- replies ---


def test_only_the_latest_launch_can_be_read() -> None:
    case = some_case("softmax")
    launcher = Launcher(Nobody(), PackFormat.OWN, random.Random(0), "cpu")
    launcher.trials = 2
    with pytest.raises(ValueError, match="launch 1 cannot be read after launch 2"):
        launcher.read(LaunchResult(0.1, 0.1, 0.2, "host", case, 1, []))


class Nobody:
    def ask(self, entry: str, payload: Any, arrays: Any) -> CellAnswer:
        raise AssertionError("nothing is to be asked")


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
    result = launched(judging, pack, HONEST[pack.definition.name], check=True, idle=True)
    assert result["codes"] == [[]] * 4
    assert result["checked"] == []
    placed, *patches = [sent for question, sent, _ in result["log"] if question == "place"]
    assert placed >= result["block"]
    assert len(patches) == 3
    assert 0 < max(patches) < result["block"] / 8
    assert {sent + came for question, sent, came in result["log"] if question in ("launch", "idle")} == {0}
    assert [came >= result["block"] for question, _, came in result["log"] if question == "again"] == [True]


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
    time.sleep(0.1)
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
    result = launched(judging, pack, source, check=True, count=1, wait_s=1.0)
    assert result["codes"] == [[]]
    assert result["checked"] == ["late_write"]


def test_an_input_that_changes_before_it_is_read_shows(judging: SandboxLane) -> None:
    source = LATE.format(arguments="x", compute="y = x", end="return torch.softmax(x, -1)")
    result = launched(judging, SOFTMAX, source, check=True, count=1, wait_s=1.0)
    assert result["codes"] == [[]]
    assert "mutated_input" in result["checked"]


@pytest.mark.parametrize(
    "key", ["0", "x.data_ptr()", "(id(x), x._version)", "(x.view(-1)[::100003].sum().item())"]
)
def test_a_result_of_before_is_wrong_after_a_patch(judging: SandboxLane, key: str) -> None:
    source = (
        "import torch\n\nkept = {}\n\n\ndef run(x):\n"
        f"    key = {key}\n    if key not in kept:\n        kept[key] = torch.softmax(x, -1)\n"
        "    return kept[key]\n"
    )
    result = launched(judging, SOFTMAX, source, check=True, count=2)
    assert result["codes"] == [[], []]
    assert result["checked"] == ["wrong_values"]


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
        "import sys\n\nimport torch\n\ninside = sys.modules['forecast_harness.verify.launch_cell']\n"
        f"honest = inside._digests\ninside._digests = lambda *args: {forged}\n\n\n"
        "def run(x):\n    return torch.softmax(x, -1)\n"
    )
    result = launched(judging, SOFTMAX, source, check=True, count=1)
    assert codes in str(result["codes"])
    assert result["checked"] == checked


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
    match = launched(judging, SOFTMAX, f"def run(x):\n    return {result}\n", count=1)
    assert match["codes"] == [[code]]


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
    result = judging.run(SandboxJob("tests.harness.large:timed_launches", payload, files), LIMITS)
    assert result.status is JobStatus.OK, result.detail
    assert result.value["launches"] in launches
    assert result.value["codes"] == []
