"""What is searched, from a text: packs, foreign tasks, kernels; and the configs of a source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.records import codec
from forecast_harness.records import SearchTarget, TargetKind
from forecast_harness.targets.packs import load_pack
from forecast_harness.targets.search_target import open_target, pack_of, solution_of
from forecast_harness.trials.configs.source_configs import apply_config, configs_of, diverse_configs

TASKS = Path(__file__).parents[1] / "tasks"
TUNABLE = """import torch

CHUNK, OTHER = 1, 2
WIDTH = 64  # elements
MODE = "é"; DEPTH: int = 2
CONFIGS = [{"WIDTH": w, "DEPTH": d} for w in (16, 32, 64, 128) for d in (1, 2)]


def run(x):
    return torch.softmax(x, -1)
"""


def test_a_pack_is_rebuilt_from_its_payload() -> None:
    target, seeds = open_target("softmax", device="cpu")
    again = codec.from_json(SearchTarget, json.loads(json.dumps(codec.to_json(target))))
    assert pack_of(again).id == target.id == load_pack("softmax").id
    assert (target.kind, target.entry, target.language) == (TargetKind.PACK, "run", "torch")
    assert [s.language for s in seeds] == ["torch"]
    assert solution_of(target, seeds[0]).source == load_pack("softmax").solution("torch_plain").source


def test_the_language_of_seeds_is_the_devices() -> None:
    target, seeds = open_target("softmax", device="cuda")
    assert (target.language, [s.language for s in seeds]) == ("triton", ["triton"])
    # A pack without a Triton solution starts from what it has.
    target, seeds = open_target("cumsum", device="cuda")
    assert (target.language, [s.language for s in seeds]) == ("triton", ["torch"])


def test_a_statement_says_what_a_source_must_do() -> None:
    text = open_target("swiglu", device="cpu")[0].statement
    assert "run(gate, up, y) writes its results into y" in text
    assert "- host: M=512, N=1024" in text
    assert "M=8192" not in text  # that size is timed on devices only
    on_device = open_target("swiglu", device="cuda")[0].statement
    assert "- large: M=8192" in on_device
    assert "host" not in on_device
    assert load_pack("swiglu").reference.strip() in text


@pytest.mark.parametrize(("task", "entry"), [("linear.py", "ModelNew"), ("gpumode_scale", "custom_kernel")])
def test_foreign_tasks_start_from_their_reference(task: str, entry: str) -> None:
    target, (seed,) = open_target(str(TASKS / task), device="cpu")
    assert target.entry == entry
    assert entry in seed.source
    assert "import make_match_reference" not in seed.source


def test_what_cannot_be_searched_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="neither a shipped pack"):
        open_target("no-such-pack", device="cpu")
    with pytest.raises(SettingsError, match="says nothing about how fast"):
        open_target(f"{tmp_path}/kernels.py:scale", device="cpu")
    with pytest.raises(SettingsError, match="cpu or cuda"):
        open_target("softmax", device="tpu")


def test_configs_are_read_without_running_the_source() -> None:
    found = configs_of(TUNABLE)
    assert len(found) == 8
    assert found[0] == {"WIDTH": 16, "DEPTH": 1}
    assert configs_of("def run(x):\n    return x\n") == configs_of("not python (") == ()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("CONFIGS = [{'MISSING': 1}]", "MISSING"),
        ("CONFIGS = [{'CHUNK': 1}]", "CHUNK"),  # bound together with another name
        ("CONFIGS = [{'WIDTH': [1]}]", "list"),
        ("CONFIGS = 3", "must be a list"),
        ("CONFIGS = make()", "literals"),
    ],
)
def test_a_list_that_cannot_be_used_says_why(line: str, said: str) -> None:
    lines = ["CHUNK = OTHER = 1", "WIDTH = 2", line]
    with pytest.raises(RecordError, match=said):
        configs_of("\n".join(lines))


def test_a_config_changes_its_constants_and_nothing_else() -> None:
    made = apply_config(TUNABLE, {"WIDTH": 256, "DEPTH": 1, "MODE": "b"})
    want = TUNABLE.replace("WIDTH = 64 ", "WIDTH = 256 ").replace("DEPTH: int = 2", "DEPTH: int = 1")
    assert made == want.replace('MODE = "é"', "MODE = 'b'")
    assert apply_config(TUNABLE, {}) == TUNABLE
    with pytest.raises(RecordError, match="LENGTH"):
        apply_config(TUNABLE, {"LENGTH": 1})


def test_few_configs_of_many_are_far_apart() -> None:
    found = configs_of(TUNABLE)
    assert diverse_configs(found, 3) == (
        {"WIDTH": 16, "DEPTH": 1},
        {"WIDTH": 128, "DEPTH": 2},
        {"WIDTH": 32, "DEPTH": 2},
    )
    assert diverse_configs(found, 99) == found
