"""Packs: strict readers, foreign formats, and that every shipped one can tell right from wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.records import codec
from forecast_harness.records import SearchTarget, TargetKind
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.targets.packs import (
    Definition,
    Language,
    Pack,
    builtin_names,
    load_pack,
    load_solution,
    make_solution,
)
from forecast_harness.targets.packs.schema import evaluate
from forecast_harness.targets.search_target import open_target, pack_of, solution_of
from forecast_harness.trials.configs.source_configs import apply_config, configs_of
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import check_pack, verify
from tests.harness.small import checked_only

TASKS = Path(__file__).parents[1] / "tasks"
LOOSE = {"compute": "bfloat16", "safety": 900}
DEFINITION: dict[str, Any] = {
    "schema": 1,
    "name": "double",
    "axes": {"M": {"low": 1, "high": 9}, "K": {"value": 4}},
    "inputs": {"x": {"shape": ["M", "K"], "dtype": "float32"}},
    "outputs": {"y": {"shape": ["M", "2 * K"], "dtype": "float32"}},
}


# --- the schema ---


@pytest.mark.parametrize(
    "text", ["M ** 9", "Q", "().__class__", "M.bit_length()", "M / 2", "1.5", "M //", "f(M)"]
)
def test_axis_expressions_know_nothing_else(text: str) -> None:
    with pytest.raises(RecordError, match="cannot evaluate"):
        evaluate(text, {"M": 2})


def test_a_definition_survives_json() -> None:
    definition = Definition.from_json(DEFINITION)
    assert Definition.from_json(json.loads(json.dumps(definition.to_json()))) == definition
    assert definition.outputs["y"].sizes({"M": 3, "K": 4}) == (3, 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "schema must be 1"),
        ({"surprise": 1}, "unknown fields"),
        ({"inputs": {}}, "at least one input"),
        ({"inputs": {"x": {"shape": ["M", "Q"], "dtype": "float32"}}}, "Q is no axis"),
        ({"inputs": {"x": {"shape": ["M"], "dtype": "float31"}}}, "dtype must be one of"),
        ({"inputs": {"x": {"shape": "M", "dtype": "float32"}}}, "list of axis expressions"),
        ({"inputs": {"x-y": {"shape": ["M"], "dtype": "float32"}}}, "identifiers"),
        (
            {"inputs": {"x": {"shape": ["M"], "dtype": "float32", "values": ["odd"]}}},
            r"values\[0\] must be one of",
        ),
        ({"axes": {"M": {"value": 3, "low": 1}}}, "constant or variable"),
        ({"axes": {"M": {"low": 5, "high": 7, "multiple": 4}}}, "no multiple of 4"),
        ({"axes": {"M": {"low": -1}}}, "from 0 to"),
        ({"tolerance": {"safety": 1e6}}, "safety must be"),
        ({"tolerance": {"floor": -1}}, "floor must be"),
        ({"format": "other"}, "format must be one of"),
        ({"bytes": "4 * Q"}, "Q is no axis"),
    ],
)
def test_a_broken_definition_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordError, match=said):
        Definition.from_json({**DEFINITION, **change})


def test_a_folder_is_a_pack(tmp_path: Path) -> None:
    (tmp_path / "definition.json").write_text(json.dumps(DEFINITION))
    (tmp_path / "reference.py").write_text("def reference(x):\n    return x\n")
    (tmp_path / "workloads.json").write_text('[{"name": "one", "axes": {"M": 3}}]')
    pack = load_pack(tmp_path)
    assert (pack.definition.name, pack.solutions) == ("double", ())
    assert Pack.from_json(json.loads(json.dumps(pack.to_json()))).id == pack.id
    for text, said in (('[{"name": "one", "axes": {}}]', "gives axes"), ("[]", "at least one"), ("{", "no")):
        (tmp_path / "workloads.json").write_text(text)
        with pytest.raises(RecordError, match=said):
            load_pack(tmp_path)


WORKS = {name: {"name": name, "axes": {"M": 3}} for name in ("plain", "host", "large")}
WORKS["host"]["host"] = WORKS["large"]["large"] = True


def _sized(*names: str) -> Pack:
    """The pack above with these workloads."""
    works = [WORKS[name] for name in names]
    return Pack.from_json({"definition": DEFINITION, "reference": "x", "workloads": works})


@pytest.mark.parametrize(
    ("names", "on_host", "on_device"),
    [
        (("plain", "host", "large"), ["host"], ["large"]),
        (("plain", "host"), ["host"], ["plain"]),
        (("plain", "large"), ["plain"], ["large"]),
        (("plain",), ["plain"], ["plain"]),
    ],
)
def test_a_workload_is_timed_where_it_is_meant_to_be(
    names: tuple[str, ...], on_host: list[str], on_device: list[str]
) -> None:
    pack = _sized(*names)
    assert [w.name for w in pack.timed_workloads("cpu")] == on_host
    assert [w.name for w in pack.timed_workloads("cuda")] == on_device
    assert [w.name for w in pack.checked_workloads] == ["plain"]


def test_what_an_interpreted_solution_cannot_be_timed_at_none_is() -> None:
    pack = _sized("plain", "host", "large")
    for languages in ((Language.TRITON,), (Language.TORCH, Language.TRITON)):
        assert [w.name for w in pack.timed_workloads("cpu", *languages)] == ["plain"]
        assert [w.name for w in pack.timed_workloads("cuda", *languages)] == ["large"]
    assert [w.name for w in pack.timed_workloads("cpu", Language.TORCH)] == ["host"]


@pytest.mark.parametrize("names", [("host",), ("large",), ("host", "large")])
def test_a_pack_needs_a_workload_that_is_checked(names: tuple[str, ...]) -> None:
    with pytest.raises(RecordError, match="only workloads that are large or for the host"):
        _sized(*names)


# --- solutions ---


@pytest.mark.parametrize(
    ("source", "language"),
    [
        ("import torch\n\n\ndef run(x):\n    return x\n", Language.TORCH),
        ("@triton.jit\ndef k(x):\n    pass\n", Language.TRITON),
        ("from torch.utils.cpp_extension import load_inline\n", Language.CUDA),
        ("# language: triton\nimport torch\n", Language.TRITON),
    ],
)
def test_a_solutions_language(source: str, language: Language) -> None:
    assert make_solution("s", source).language is language


def test_solutions_by_name_and_file(tmp_path: Path) -> None:
    pack = load_pack("softmax")
    assert load_solution("torch_plain", pack) == pack.solution("torch_plain")
    (tmp_path / "mine.py").write_text("def run(x):\n    return x\n")
    assert load_solution(tmp_path / "mine.py", pack).name == "mine"
    (tmp_path / "theirs.py").write_bytes(b"def run(x):\r\n    return x\r\n")
    mine, theirs = (load_solution(tmp_path / f"{name}.py", pack) for name in ("mine", "theirs"))
    assert theirs.source == mine.source, "how lines end on another system changes no solution"
    for text in (
        "from torch import softmax as run",
        "if True:\n    run = len",
        "globals()['r' + 'un'] = len",
        "def (",
    ):
        (tmp_path / "mine.py").write_text(text)
        assert load_solution(tmp_path / "mine.py", pack).source == text
    (tmp_path / "mine.py").write_text("def softmax(x):\n    run(x)\n")
    with pytest.raises(RecordError, match=r"mine\.py defines no run, which is what softmax calls"):
        load_solution(tmp_path / "mine.py", pack)
    with pytest.raises(RecordError, match="neither a file nor a solution"):
        load_solution("nobody", pack)
    with pytest.raises(RecordError, match="no solution 'nobody'"):
        pack.solution("nobody")


# --- foreign formats ---


def test_a_file_that_is_no_kernelbench_task(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("class Model:\n    pass\n")
    with pytest.raises(RecordError, match="get_init_inputs"):
        load_pack(tmp_path / "task.py")


# --- admission ---


@pytest.mark.parametrize("name", [*builtin_names(), "linear.py"])
def test_a_pack_is_admitted(name: str, judging: SandboxLane) -> None:
    pack = load_pack(name if name in builtin_names() else TASKS / name)
    assert check_pack(pack, judging) == []


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", builtin_names())
def test_a_packs_own_solutions_pass(name: str, judging: SandboxLane) -> None:
    pack = load_pack(name)
    for solution in pack.solutions:
        if (name, solution.name) == ("cross_entropy", "triton_rows"):
            continue  # Triton's interpreter cuts float32 to bfloat16 where compiled code rounds
        triton = solution.language is Language.TRITON
        verdict = verify(
            checked_only(pack) if triton else pack,
            solution,
            judging,
            plan=VerificationPlan(cases=3 if triton else 6, timed=1 if triton else 10),
        )
        assert verdict.accepted, verdict.reasons


def _pack(reference: str, **definition: Any) -> Pack:
    data = {**DEFINITION, "outputs": {"y": {"shape": ["M", "K"], "dtype": "float32"}}, **definition}
    return Pack.from_json(
        {"definition": data, "reference": reference, "workloads": [{"name": "w", "axes": {"M": 6}}]}
    )


@pytest.mark.parametrize(
    ("reference", "definition", "said"),
    [
        ("def reference(x):\n    return x * 0", {}, "zeros"),
        ("def reference(x):\n    return x * 0 + 2", {}, "a constant"),
        ("def reference(x):\n    return x + 0", {}, "a copy of x"),
        ("def reference(x):\n    return x * 2", {"tolerance": LOOSE}, "hundredth"),
        ("def other(x):\n    return x", {}, "lacks a function"),
        ("def reference(x):\n    return x, x", {}, "2 outputs"),
        (
            "def reference(x):\n    raise ValueError('no')",
            {},
            "could not be run: trusted_error, ValueError: no",
        ),
    ],
)
def test_a_pack_that_cannot_tell_is_refused(
    reference: str, definition: dict[str, Any], said: str, judging: SandboxLane
) -> None:
    found = check_pack(_pack(reference, **definition), judging)
    assert any(said in sentence for sentence in found), found


# --- what is searched, from a text ---


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


def test_a_statement_says_what_a_source_must_do() -> None:
    text = open_target("swiglu", device="cpu")[0].statement
    assert "run(gate, up, y) writes its results into y" in text
    assert "- host: M=512, N=1024" in text
    assert "M=8192" not in text  # that size is timed on devices only
    on_device = open_target("swiglu", device="cuda")[0].statement
    assert "- large: M=8192" in on_device
    assert "host" not in on_device
    assert load_pack("swiglu").reference.strip() in text


def test_foreign_tasks_start_from_their_reference() -> None:
    target, (seed,) = open_target(str(TASKS / "linear.py"), device="cpu")
    assert target.entry == "ModelNew"
    assert "class ModelNew(Model)" in seed.source


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
        (
            "CONFIGS = [{'WIDTH': 4, 'num_warps': 8}]",
            "line 3: .*NUM_WARPS.*num_warps=NUM_WARPS at the launch",
        ),
        ("CONFIGS = 3", "must be a list"),
        ("CONFIGS = make()", "literals"),
    ],
)
def test_a_list_that_cannot_be_used_says_why(line: str, said: str) -> None:
    lines = ["CHUNK = OTHER = 1", "WIDTH = 2", line]
    with pytest.raises(RecordError, match=said):
        configs_of("\n".join(lines))


def test_packs_read_the_configs_of_kernels() -> None:
    head = "CHUNKS = (32, 64)\nCHUNK = 64\nNUM_WARPS = 4\n"
    flat = configs_of(head + 'CONFIGS = [{"CHUNK": c, "num_warps": 8} for c in CHUNKS]')
    nested = configs_of(head + 'CONFIGS = [{"kwargs": {"CHUNK": c}, "num_warps": 8} for c in CHUNKS]')
    assert flat == nested == ({"CHUNK": 32, "NUM_WARPS": 8}, {"CHUNK": 64, "NUM_WARPS": 8})


def test_a_config_changes_its_constants_and_nothing_else() -> None:
    made = apply_config(TUNABLE, {"WIDTH": 256, "DEPTH": 1, "MODE": "b"})
    want = TUNABLE.replace("WIDTH = 64 ", "WIDTH = 256 ").replace("DEPTH: int = 2", "DEPTH: int = 1")
    assert made == want.replace('MODE = "é"', "MODE = 'b'")
    assert apply_config(TUNABLE, {}) == TUNABLE
    with pytest.raises(RecordError, match="LENGTH"):
        apply_config(TUNABLE, {"LENGTH": 1})
