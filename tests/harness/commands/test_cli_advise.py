"""`forecast-autotune advise`: from a kernel in a file, the store or a library to advice, by recorded answers."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from forecast_autotune.commands import main
from forecast_autotune.llm.advice.question import advice_prompt
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.llm.open_question import question_key
from forecast_autotune.store import Store, installed_advice
from forecast_autotune.store.installed_advice import advice_for
from forecast_autotune.testing import example_table
from forecast_harness.targets.kernels.advised_kernels import AdvisedKernel, library_kernels
from forecast_harness.targets.kernels.user_kernel import UserKernel
from tests.core.captured_output import Capture, shown
from tests.harness.authors.chat_model import StubModel
from tests.harness.commands.test_cli_variants import INPUTS, KERNEL
from tests.integrations.models.faulty_server import FaultyServer

ANSWER = """The kernel reads and writes once.

```python
SUMMARY = "memory bound, one wave"
def cost(config, args, device, launch):
    per = constant(2.0, spread=2.0, label="cost of a program")
    return 3 + term(config.BLOCK / config.num_warps, "work of a warp") * per
```
"""
BETTER = ANSWER.replace("one wave", "large blocks win")
OUTSIDE = "```python\nimport os\ndef cost(config, args, device, launch):\n    return 1\n```"

pytestmark = pytest.mark.usefixtures("alone")


def recorded(tmp_path: Path, answers: Sequence[tuple[str, str]]) -> str:
    """SPEC of a model that answers these prompts."""
    path = tmp_path / "answers.jsonl"
    head = {"type": "answers", "schema": 1, "model": "writer-1", "provenance": {"author": "a test"}}
    lines = [{"type": "answer", "key": question_key("", p, ()), "text": text} for p, text in answers]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (head, *lines)))
    return f"recorded:{path}"


def prompt_of(kernel: str, tmp_path: Path) -> str:
    asked = AdvisedKernel.of(UserKernel.of(kernel), Store(tmp_path / "store"))
    return advice_prompt(asked.samples, asked.source)


def kept(tmp_path: Path) -> list[Advice]:
    return Store(tmp_path / "store").advice_of()


def measured_store(tmp_path: Path) -> AdvisedKernel:
    """A store with a measured problem."""
    store = Store(tmp_path / "store")
    store.import_tables([example_table()])
    return next(AdvisedKernel.of_tables(store.tables()))


def test_a_kernel_of_a_file_is_advised_on_once(kernel: str, tmp_path: Path, capsys: Capture) -> None:
    prompt = prompt_of(kernel, tmp_path)
    assert "def scaled(value)" in prompt, "helpers belong to the kernel"
    assert "{64, 128}" in prompt
    assert "grid [" in prompt
    spec = recorded(tmp_path, [(prompt, ANSWER)])
    assert main(["advise", kernel, "--llm", spec, "--json"]) == 0
    said = shown(capsys)
    assert (said["written"], said["model"]) == (1, "writer-1")
    (row,) = said["advice"]
    assert row["summary"] == "memory bound, one wave"
    assert row["terms"] == ["work of a warp"]
    assert row["constants"] == {"cost of a program": 2.0}
    (advice,) = kept(tmp_path)
    assert (advice.kernel, advice.model, advice.provenance) == ("double", "writer-1", "written blind")
    # It is there now: nobody is asked, not even a model that has no answer.
    assert main(["advise", kernel, "--llm", recorded(tmp_path, [])]) == 0
    assert "double: kept: memory bound, one wave" in capsys.readouterr().out
    assert main(["advise", kernel, "--llm", recorded(tmp_path, [(prompt, BETTER)]), "--again"]) == 0
    assert "large blocks win" in kept(tmp_path)[0].text


def test_an_answer_outside_the_language_is_asked_about_once_more(
    kernel: str, tmp_path: Path, capsys: Capture
) -> None:
    prompt = prompt_of(kernel, tmp_path)
    why = "line 1: a module holds helpers, `cost`, and SUMMARY, CONFIDENCE and SPREAD"
    second = f"{prompt}\nYour last answer was refused: {why}\nAnswer again with the whole module.\n"
    assert main(["advise", kernel, "--llm", recorded(tmp_path, [(prompt, OUTSIDE), (second, ANSWER)])]) == 0
    assert "1 written" in capsys.readouterr().out
    spec = recorded(tmp_path, [(prompt, OUTSIDE), (second, OUTSIDE)])
    assert main(["advise", kernel, "--llm", spec, "--again", "--json"]) == 1
    (row,) = shown(capsys)["advice"]
    assert row["outcome"] == "refused"
    assert why in row["why"]
    assert "one wave" in kept(tmp_path)[0].text, "a refused answer replaces nothing"


def test_every_kernel_of_the_store(tmp_path: Path, capsys: Capture) -> None:
    asked = measured_store(tmp_path)
    prompt = advice_prompt(asked.samples, asked.source)
    assert " ms" not in prompt.partition("Kernel `")[2], "nothing that was measured is told"
    assert main(["advise", "--stored", "--llm", recorded(tmp_path, [(prompt, ANSWER)])]) == 0
    assert "example: written: memory bound, one wave" in capsys.readouterr().out
    assert main(["advise", "--stored", "--kernel", "nobody", "--llm", recorded(tmp_path, [])]) == 1
    assert "whose name contains 'nobody'" in capsys.readouterr().err


def test_advice_of_another_language_is_replaced(tmp_path: Path, capsys: Capture) -> None:
    asked = measured_store(tmp_path)
    Store(tmp_path / "store").put_advice(Advice("example", asked.kernel.source_sha256, "import os", "old"))
    assert main(["advise", "--list"]) == 0
    assert "not within the language" in capsys.readouterr().out
    spec = recorded(tmp_path, [(advice_prompt(asked.samples, asked.source), ANSWER)])
    assert main(["advise", "--stored", "--llm", spec]) == 0
    assert kept(tmp_path)[0].model == "writer-1"


def test_a_library(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"library_{tmp_path.name.replace('-', '_')}"
    (tmp_path / name / "ops").mkdir(parents=True)
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "broken.py").write_text("import nobody_has_this\n")
    (tmp_path / name / "exits.py").write_text("print('loaded')\nraise SystemExit(3)\n")
    (tmp_path / name / "ops" / "__init__.py").write_text("from .scale import double as again\n")
    plain = KERNEL[KERNEL.index("@triton.autotune") :].replace("double", "untuned").split("\n", 1)[1]
    (tmp_path / name / "ops" / "scale.py").write_text(KERNEL + INPUTS + "\n\n" + plain)
    monkeypatch.syspath_prepend(str(tmp_path))
    prompt = prompt_of_library(name, tmp_path)
    assert main(["advise", "--library", name, "--llm", recorded(tmp_path, [(prompt, ANSWER)]), "--json"]) == 0
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    assert [row["kernel"] for row in said["advice"]] == ["double"]
    assert f"skipped: {name}.broken: ModuleNotFoundError" in printed.err
    assert f"skipped: {name}.exits: SystemExit" in printed.err
    assert main(["advise", "--library", "nobody_has_this", "--llm", recorded(tmp_path, [])]) == 2
    assert "install it, or correct the name" in capsys.readouterr().err


def prompt_of_library(name: str, tmp_path: Path) -> str:
    (target,) = library_kernels(name).kernels
    asked = AdvisedKernel.of(target, Store(tmp_path / "store"))
    return advice_prompt(asked.samples, asked.source)


def test_a_kernel_that_nobody_has_called(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / f"quiet_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(KERNEL)
    assert main(["advise", f"{path}:double", "--llm", recorded(tmp_path, [])]) == 1
    said = capsys.readouterr().err
    assert "advice needs sizes that double is called with" in said
    assert "forecast-autotune run" in said
    assert main(["advise", f"{path}:nothing", "--llm", recorded(tmp_path, [])]) == 2
    path.write_text(f"{path.read_text()}\nraise RuntimeError('0 active drivers')\n")
    capsys.readouterr()
    assert main(["advise", f"{path}:double", "--llm", recorded(tmp_path, [])]) == 1
    assert 'below if __name__ == "__main__":' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["advise"], "advise takes one of"),
        (["advise", "--stored", "--list"], "given: --stored and --list"),
        (["advise", "--stored"], "as in --llm 'http://localhost"),
        (["advise", "--stored", "--llm", "recorded:nowhere.jsonl"], "does not exist"),
        (["advise", "--from", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str, capsys: Capture) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_an_interruption_keeps_what_was_written(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    tables = [example_table(), example_table()]
    for name, table in zip("ab", tables, strict=True):
        kernel = replace(table.problem.kernel, name=f"example_{name}", source_sha256=name * 64)
        table.problem = replace(table.problem, id=name, kernel=kernel)
        table.measurements = [replace(m, problem=name) for m in table.measurements]
    store.import_tables(tables)
    from forecast_integrations.models import factory

    def writer(*_: Any, **__: Any) -> Any:
        def write(prompt: str, n: int) -> list[str]:
            if "example_b" in prompt:
                raise KeyboardInterrupt
            return [ANSWER]

        return write

    monkeypatch.setattr(factory, "text_generator", writer)
    assert main(["advise", "--stored", "--llm", recorded(tmp_path, [])]) == 130
    assert "the 1 written so far are kept" in capsys.readouterr().err
    assert [a.kernel for a in kept(tmp_path)] == ["example_a"]


def test_taking_listing_and_clearing(tmp_path: Path, capsys: Capture) -> None:
    text = ANSWER.partition("```python\n")[2].partition("```")[0]
    one = Advice("example", "0" * 64, text, "writer-1")
    bad = Advice("odd", "1" * 64, "import os", "writer-1")
    path = tmp_path / "advice.jsonl"
    path.write_text("".join(f"{json.dumps(a.to_json())}\n" for a in (one, bad)))
    assert main(["advise", "--from", str(path), "--json"]) == 1
    assert [r["outcome"] for r in shown(capsys)["advice"]] == ["written", "refused"]
    assert main(["advise", "--list", "--json"]) == 0
    assert [r["kernel"] for r in shown(capsys)["advice"]] == ["example"]
    # It travels in exported tables and in stores.
    measured_store(tmp_path)
    assert main(["export", str(tmp_path / "table.jsonl")]) == 0
    other = str(tmp_path / "other")
    assert main(["advise", "--from", str(tmp_path / "table.jsonl"), "--store", other]) == 0
    assert main(["advise", "--from", str(tmp_path / "store"), "--store", other]) == 0
    assert "1 there already" in capsys.readouterr().out
    assert Store(tmp_path / "other").advice("0" * 64) == one
    assert main(["clear", "--advice"]) == 2, "nobody can be asked here"
    assert main(["clear", "--advice", "--device", "H200", "--yes"]) == 2
    assert main(["clear", "--advice", "--yes", "--kernel", "nobody"]) == 0
    assert kept(tmp_path)
    assert main(["clear", "--advice", "--yes"]) == 0
    assert not kept(tmp_path)
    assert "removed advice on 1 kernel source" in capsys.readouterr().out


def test_several_functions_of_one_source_are_followed_together(tmp_path: Path, capsys: Capture) -> None:
    text = ANSWER.partition("```python\n")[2].partition("```")[0]
    records = [
        Advice("example", "0" * 64, text + end, model) for end, model in (("", "a"), ("\n", "b"), ("", "a"))
    ]
    path = tmp_path / "advice.jsonl"
    path.write_text("".join(f"{json.dumps(a.to_json())}\n" for a in records))
    assert main(["advise", "--from", str(path)]) == 0
    (advice,) = kept(tmp_path)
    assert (advice.text, advice.others, advice.model) == (text, (text + "\n",), "a, b")
    assert len(advice.functions) == 2


def test_by_answers_from_afar(tmp_path: Path, capsys: Capture) -> None:
    measured_store(tmp_path)
    store, questions, got, answers = (str(tmp_path / n) for n in ("store", "q.jsonl", "got.jsonl", "a.jsonl"))
    assert main(["llm", "ask", "--export", questions, "--kind", "advice", "--store", store]) == 0
    (question,) = [
        d for d in map(json.loads, Path(questions).read_text().splitlines()) if d["type"] == "question"
    ]
    assert (question["kernel"], question["suffixes"]) == ("example", [])
    reply = {"type": "answer", "key": question["key"], "text": ANSWER}
    Path(got).write_text(json.dumps(reply) + "\n")
    named = ["--model", "assistant", "--author", "Ada", "--blind", "--questions", questions, "--to", answers]
    assert main(["llm", "ask", "--import", got, *named]) == 0
    assert main(["advise", "--stored", "--llm", f"recorded:{answers}"]) == 0
    assert [(a.kernel, a.model) for a in kept(tmp_path)] == [("example", "assistant")]


def test_a_chat_server_answers(kernel: str, tmp_path: Path, capsys: Capture) -> None:
    with FaultyServer(StubModel(OUTSIDE, ANSWER)) as server:
        model = f"{server.url}?model=parrot&kind=chat"
        assert main(["advise", kernel, "--llm", model, "--json"]) == 0
        said = shown(capsys)
        assert (said["model"], said["written"]) == ("parrot", 1)
        assert (said["usage"]["requests"], said["usage"]["output_tokens"]) == (2, 40)
        assert kept(tmp_path)[0].model == "parrot"
        assert main(["advise", kernel, "--llm", model, "--again"]) == 0
    assert "120 tokens each" in capsys.readouterr().out


def test_a_file_that_lists_cases(tmp_path: Path) -> None:
    path = Path(__file__).parents[3] / "benchmarks" / "kernels" / "functional" / "mv.py"
    asked = AdvisedKernel.of(UserKernel.of(f"{path}:fn_mv"), Store(tmp_path))
    assert len(asked.samples) == 4
    for sample in asked.samples:
        assert set(sample.grids) == set(sample.candidates), "grids of all configs, by a formula"
        rows = next(a.value for a in sample.problem.arguments if a.name == "M")
        meta = dict(sample.candidates[0].config.kwargs)
        assert sample.grids[sample.candidates[0]] == (-(-int(str(rows)) // int(str(meta["TILE_M"]))),)


def test_a_library_ships_advice_in_its_package(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From advice in a store to a layer in an installed package, which is followed without importing that."""
    name = f"shipped_{tmp_path.name.replace('-', '_')}"
    project = tmp_path / "project"
    (project / name / "data").mkdir(parents=True)
    (project / name / "__init__.py").write_text("")
    (project / name / "scale.py").write_text(KERNEL + INPUTS)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(project))
        layer = project / name / "data" / "tuned.jsonl"
        assert main(["advise", "--library", name, "--to", str(layer)]) == 1
        assert "have it written first" in capsys.readouterr().err
        spec = recorded(tmp_path, [(prompt_of_library(name, tmp_path), f"# quoted\n{ANSWER}")])
        assert main(["advise", "--library", name, "--llm", spec]) == 0
        assert main(["advise", "--library", name, "--to", str(layer), "--json"]) == 0
        (target,) = library_kernels(name).kernels
    assert "quoted" not in layer.read_text()
    site = tmp_path / "site"
    about = site / f"{name}-1.5.dist-info"
    about.mkdir(parents=True)
    (about / "entry_points.txt").write_text(f"[{installed_advice.GROUP}]\n{name} = {name}.data.tuned\n")
    shutil.copytree(project / name, site / name)
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    (site / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.setattr(installed_advice.sysconfig, "get_path", lambda _: str(site))
    monkeypatch.setattr(installed_advice, "_results", {})  # other tests ask about the same source
    later = replace(target.kernel, source_sha256="8" * 64)
    advice = advice_for(Store(None), later, ["BLOCK"])
    assert advice is not None
    assert advice.origin.endswith("same name and parameters")
    exact = advice_for(Store(None), target.kernel)
    assert exact is not None
    assert exact.functions[0].summary
