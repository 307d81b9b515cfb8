"""The command line: stored measurements, exit statuses and streams."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from forecast_autotune import __version__
from forecast_autotune.commands import grammar, main
from forecast_autotune.commands.registry import Parser
from forecast_autotune.commands.show import key_contains
from forecast_autotune.commands.store_access import first_forecasts
from forecast_autotune.llm import spec
from forecast_autotune.records import Candidate, Config, Decision, Measurement, Outcome
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.testing import example_table
from tests.core.captured_output import Capture, needs_triton, python, shown

pytestmark = pytest.mark.usefixtures("root")  # no test may see the user's own store


# --- help, versions, errors ---


def test_version_and_help(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"forecast-autotune {__version__}\n"
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("run", "replay", "show", "explain", "export", "import", "clear", "doctor", "demo"):
        assert f"\n    {name} " in text


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_load_nothing_heavy(argument: str) -> None:
    code = (
        "import sys; from forecast_autotune.commands import main; status = main(sys.argv[1:]);"
        "print(sorted({'numpy', 'torch', 'triton', 'rich', 'matplotlib'} & set(sys.modules)), status)"
    )
    done = python("-c", code, argument)
    assert done.stdout.splitlines()[-1] == "[] 0"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["show", "--nonsense"],
        ["show", "--kern", "x"],
        ["run"],
        ["run", "--mode"],
        ["explain"],
        ["explain", "k", "--top", "0"],
        ["import"],
        ["import", "/nowhere/table.jsonl"],
        ["export", "/nowhere/table.jsonl"],
        ["export", "--store", "/nowhere"],
        ["export", "out", "--format", "kernel-tuner", "--store", "/nowhere"],
        ["show", "--store", "/nowhere"],
        ["show", "--store", "~nobody-of-this-name/cache"],
        ["show", "--calibration", "--store", "/nowhere"],
        ["explain", "k", "--store", "/nowhere"],
        ["clear", "--yes", "--store", "/nowhere"],
        ["llm", "ask", "--export", "q.jsonl", "--store", "/nowhere"],
        ["warm", "--plan", "--misses", "/nowhere"],
        ["warm", "--plan", "--shapes", "foo"],
        ["run", "--store", "/dev/null", "program.py"],
        ["run", "--store", __file__, "program.py"],
        ["train", "export", "/nowhere", "--out", "out"],
        ["eval", "--out", "/dev/null"],
        ["export", "--json"],
    ],
    ids=" ".join,
)
def test_wrong_usage_and_bad_input_exit_2_with_one_line(arguments: Sequence[str], capsys: Capture) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("forecast-autotune: error: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["replay", "--polcy", "first"],
            "--polcy first; did you mean --policy? (`forecast-autotune replay --help`",
        ),
        (["replay", "--polcy=first", "x"], "--polcy=first; did you mean --policy? ("),
        (
            ["store", "gc", "--stor", "x"],
            "--stor x; did you mean --store? (`forecast-autotune store gc",
        ),
        (["show", "--zzz", "--json"], "--zzz (`forecast-autotune show --help`"),
        (["show", "what"], "arguments: what (`forecast-autotune show --help`"),
        (["--versio", "show"], "--versio show; did you mean --version? (`forecast-autotune --help`"),
        (["serach", "softmax"], "did you mean search? (`forecast-autotune --help`"),
        (["version"], "did you mean --version? (`forecast-autotune --help`"),
        (["advise", "--llm"], "as in `forecast-autotune advise kernels.py:softmax --llm 'http://localhost"),
        (["bench", "softmax"], "SOLUTION, as in `forecast-autotune bench"),
        (["replay", "--policy", "exaustive"], "did you mean exhaustive? (`forecast-autotune replay --help`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_unknown_word_gets_its_command_and_the_nearest_one(
    arguments: Sequence[str], said: str, capsys: Capture
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def _parsers(parser: argparse.ArgumentParser) -> Iterator[Parser]:
    """The parsers of all commands and subcommands."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in nested:
        for below in action.choices.values():
            yield from _parsers(below)
    if not nested:
        assert isinstance(parser, Parser)
        yield parser


def test_every_command_shows_examples_that_its_grammar_takes() -> None:
    whole = grammar.build()
    groups = [a for a in whole._actions if isinstance(a, argparse._SubParsersAction)]
    for listed in (whole, *groups[0].choices.values()):
        assert "\nexamples:\n  forecast-autotune " in listed.format_help()
    for parser in _parsers(whole):
        assert parser.examples, parser.prog
        for example in parser.examples:
            words = shlex.split(example)
            assert example.startswith(parser.prog), example
            options = whole.parse_args(words[1:])
            models = getattr(options, "llm", None) or []
            for model in [models] if isinstance(models, str) else models:
                spec.parsed(model, writing=True)
            assert f"  {example}\n" in parser.format_help()


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (
            ["export", "out.csv"],
            "FILE out.csv: the name must end in .jsonl, .jsonl.gz or .jsonl.xz",
        ),
        (["export", "/no/such/place/t.jsonl"], "there is no directory /no/such/place"),
        (["show", "--page", "s.pdf"], "--page s.pdf: the name must end in .html or .htm"),
    ],
)
def test_a_file_name_that_promises_another_format_is_refused(
    arguments: Sequence[str], rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert rule in capsys.readouterr().err
    assert not list(tmp_path.glob("*.*"))


def test_a_variable_that_breaks_its_rule_is_named(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_RISK", "certainly")
    assert main(["replay", str(file)]) == 2
    assert "FORECAST_AUTOTUNE_RISK='certainly'" in capsys.readouterr().err


# --- show, explain ---


def test_show_counts_what_was_measured_and_decided(tuned: Table, root: Path, capsys: Capture) -> None:
    rows = Store(root).measurements(tuned.problem)
    assert main(["show", "--json"]) == 0
    data = shown(capsys)
    (row,) = data["kernels"]
    assert data["store"] == str(root)
    assert (row["kernel"], row["device"]) == ("example", "example GPU")
    assert (row["problems"], row["decided"]) == (1, 1)
    assert row["candidates"] == row["ok"] + row["failed"] == len(rows)
    assert row["best_ms"] == min(m.ms for m in rows if m.ok)
    assert main(["show"]) == 0
    assert "example GPU" in capsys.readouterr().out


def test_filters_and_another_store(tuned: Table, tmp_path: Path, capsys: Capture) -> None:
    for arguments, count in (
        (["--kernel", "EXAM"], 1),
        (["--kernel", "other"], 0),
        (["--device", "gpu"], 1),
        (["--device", "mi300"], 0),
        (["--store", str(tmp_path)], 0),
    ):
        assert main(["show", "--json", *arguments]) == 0
        assert len(shown(capsys)["kernels"]) == count, arguments
    assert main(["show", "--kernel", "other"]) == 0
    assert "nothing that matches" in capsys.readouterr().out


def test_explain_gives_the_decision_with_its_evidence_and_forecasts(
    tuned: Table, root: Path, capsys: Capture
) -> None:
    decision = Store(root).decision(tuned.problem)
    assert decision is not None
    assert main(["explain", "example", "--json"]) == 0
    (problem,) = shown(capsys)["problems"]
    assert Decision.from_json(problem["decision"]) == decision
    listed = problem["measurements"]
    times = [m["median_ms"] for m in listed if m["outcome"] == "ok"]
    assert times == sorted(times)
    assert listed[0]["candidate"] == problem["decision"]["candidate"]
    for m in listed:
        assert m["forecast"]["low_ms"] < m["forecast"]["ms"] < m["forecast"]["high_ms"]
    assert main(["explain", "example", "--top", "2"]) == 0
    text = capsys.readouterr().out
    assert str(decision.chosen) in text
    assert decision.reason in text
    assert f"{len(times) - 2} slower ones ran" in text


def test_an_unknown_kernel_gets_the_nearest_names(tuned: Table, tmp_path: Path, capsys: Capture) -> None:
    assert main(["explain", "exampel"]) == 1
    assert capsys.readouterr().err.endswith("nearest: example\n")
    assert main(["explain", "example", "--store", str(tmp_path)]) == 1
    assert "holds no kernel yet" in capsys.readouterr().err
    assert main(["explain", "example", "--key", "8192"]) == 1
    assert "stored keys: 4096" in capsys.readouterr().err


def test_a_key_is_matched_in_order_and_without_torch() -> None:
    key = ("64", "128", "torch.float16", "torch.float32")
    assert key_contains(key, [])
    assert key_contains(key, ["64", "float16"])
    assert key_contains(key, ["torch.float16", "float32"])
    assert not key_contains(key, ["128", "64"])
    assert not key_contains(key, ["64", "64"])
    assert not key_contains(key, ["float"])


def test_forecasts_are_those_made_before_the_first_measurement() -> None:
    problem = example_table().problem
    null = replace(problem, device=replace(problem.device, name="null H200"))

    def row(ms: float, forecast: object, size: int = 1) -> Measurement:
        name = Candidate(Config.of({"B": size}))
        extra = {} if forecast is None else {"forecast": forecast}
        return Measurement("p", name, Outcome.OK, ms, extra=extra)

    first, later = {"log2_ms": 1.0, "sd": 1.0, "p_fail": 0.1}, {"log2_ms": 5.0, "sd": 1.0, "p_fail": 0.1}
    rows = [row(1.0, first), row(1.1, None), row(1.2, later)]
    (forecast,) = first_forecasts(problem, rows).values()
    assert list(first_forecasts(null, [*rows, row(1.0, later, 2)])) == [row(1.0, None, 2).candidate]
    assert forecast["ms"] == 2.0
    assert forecast["low_ms"] * forecast["high_ms"] == pytest.approx(4.0)
    odd = [{"log2_ms": "x"}, {"log2_ms": 1e9, "sd": 1, "p_fail": 0}, [1, 2], "forecast"]
    assert first_forecasts(problem, [row(1.0, value, size) for size, value in enumerate(odd)]) == {}


# --- doctor, demo ---


def test_doctor_reports_every_part_with_a_remedy_where_one_is_needed(root: Path, capsys: Capture) -> None:
    status = main(["doctor", "--json"])
    data = shown(capsys)
    checks = {check["name"]: check for check in data["checks"]}
    assert {"numpy", "torch", "triton", "store", "settings", "surrogate", "replay tables"} <= set(checks)
    assert data["ok"] == (status == 0) == all(check["status"] != "fail" for check in checks.values())
    assert all(check["remedy"] for check in checks.values() if check["status"] != "ok")
    assert checks["store"]["detail"].startswith(str(root))
    values = {row["variable"]: row["value"] for row in data["settings"]}
    assert list(values) == [row[0] for row in Settings().describe()]
    assert (values["FORECAST_AUTOTUNE_SUMMARY"], values["FORECAST_AUTOTUNE_LLM_KEY"]) == ("0", "not set")
    assert not root.exists(), "looking makes no store"


def test_doctor_fails_for_a_bad_setting_and_an_unusable_store(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain").write_text("", encoding="utf-8")
    monkeypatch.setenv("FORECAST_AUTOTUNE_MODE", "fast")
    assert main(["doctor", "--store", str(tmp_path / "plain"), "--json"]) == 1
    failed = {check["name"] for check in shown(capsys)["checks"] if check["status"] == "fail"}
    assert failed == {"settings", "store"}


def test_doctor_warns_of_what_is_set_and_not_there_and_shows_no_secret(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {
        "STORES": os.pathsep.join(["/nowhere", str(tmp_path)]),
        "MODEL": "/nowhere/model.npz",
        "SUMMARY": "1",
        "LLM_KEY": "sesame",
        "TOLERANCES": "0.1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"FORECAST_AUTOTUNE_{name}", value)
    main(["doctor", "--json"])
    captured = capsys.readouterr().out
    assert "sesame" not in captured
    data = json.loads(captured)
    values = {row["variable"]: row["value"] for row in data["settings"]}
    assert (values["FORECAST_AUTOTUNE_SUMMARY"], values["FORECAST_AUTOTUNE_LLM_KEY"]) == ("1", "set")
    results = [(c["name"], c["detail"]) for c in data["checks"] if c["status"] == "warn" and c["remedy"]]
    assert ("bundles", "/nowhere is not there") in results
    assert ("bundles", f"{tmp_path} is no bundle") in results
    assert ("model", "/nowhere/model.npz is no file") in results
    assert ("settings", "unknown: FORECAST_AUTOTUNE_TOLERANCES") in results
    monkeypatch.setenv("FORECAST_AUTOTUNE_STORES", "~no-such-user/bundle")
    main(["doctor"])
    assert "nobody's home directory" in " ".join(capsys.readouterr().out.split())


@needs_triton
def test_the_demo_needs_a_device(capsys: Capture) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert main(["demo"]) == 1
    assert "replay" in capsys.readouterr().err


NULL_DEMO = """
import gc, sys
from forecast_autotune.commands import grammar, main
from forecast_autotune.commands.registry import Parser
from forecast_autotune.llm import spec
from forecast_integrations import demo
from forecast_integrations.triton.null_device import null_device

every = demo.configs()
assert len(every) == len({str(c) for c in every}) == 72
demo.configs = lambda: [c for c in every if c.kwargs["BLOCK_M"] * c.kwargs["BLOCK_N"] <= 8192][:3]
compare = demo.compare
demo.compare = lambda say: compare(size=128, say=say)
with null_device():
    status = main(["demo", *sys.argv[1:]])
    gc.collect()
sys.exit(status)
"""


@needs_triton
def test_the_demo_compares_both_tuners_on_one_problem() -> None:
    done = python("-c", NULL_DEMO, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["candidates"] == data["exhaustive"]["measured"] == 3
    assert 1 <= data["forecast"]["measured"] <= 3
    # The null device's clock is a function of the config: no noise, so the best is known to both.
    assert data["exhaustive"]["ms"] <= data["forecast"]["ms"]
    assert data["regret"] == pytest.approx(data["forecast"]["ms"] / data["exhaustive"]["ms"] - 1)
    assert data["speedup"] == pytest.approx(data["exhaustive"]["seconds"] / data["forecast"]["seconds"])
