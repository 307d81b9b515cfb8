"""Texts that parsers choke on, through everything that reads sources: each is read, or refused with a sentence."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks.lib.search.synthetic_landscape import SEEDS, LandscapeAuthor, LandscapeJudge, settings
from forecast_autotune.errors import ForecastAutotuneError, RecordError
from forecast_autotune.llm.advice.language import parse_cost_function
from forecast_autotune.records import Outcome
from forecast_autotune.variants.contract import read_contract
from forecast_autotune.variants.records import Origin, Provenance, Variant
from forecast_harness.authors import llm
from forecast_harness.authors.author import Draft, defines_entry, new_nodes
from forecast_harness.authors.external import RecordedSources
from forecast_harness.authors.mechanical import RewriteAuthor
from forecast_harness.authors.triton_rewrites import kernel_rewrites
from forecast_harness.records import ConfirmationJob, NodeJob, NodeResult, ProposalRequest, Proposed
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.search.forecasters import LineageForecaster, static_features
from forecast_harness.search.log import read_log
from forecast_harness.search.report.figures import display_source, line_opcodes
from forecast_harness.search.run import LOG_FILE, ask_plugin
from forecast_harness.search.state import SearchState
from forecast_harness.targets.novelty import node_identity, source_tokens
from forecast_harness.targets.packs import load_pack, make_solution
from forecast_harness.targets.packs.schema import source_problem
from forecast_harness.trials.configs.source_configs import apply_config, configs_of
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import static_hints, verify
from forecast_harness.verify.verdict import Judgement, ReasonCode
from tests.core.hostile_sources import hostile_sources
from tests.harness.authors.proposal_examples import node, pack_target, request
from tests.harness.search.simulated_search import run_search
from tests.harness.variant_kernels import DOUBLE

HOSTILE = hostile_sources()
SHORT = {name: text for name, text in HOSTILE.items() if not source_problem(text)}
"""Those that get past the first look."""
QUICK = {name: text for name, text in SHORT.items() if len(text) <= 70_000}
"""Those that take no reader long."""
TARGET, SEED = pack_target()
KERNEL = DOUBLE + '\n\nCONFIGS = [{"BLOCK": 64}]\n'


def proposes(language: str) -> Callable[[str], Any]:
    def propose(text: str) -> Any:
        parent = node(TARGET, text, language=language)
        return RewriteAuthor(TARGET).propose(request(TARGET, parent, style="constants"))

    return propose


def recorded(text: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "one.py").write_text(text, newline="")
        return RecordedSources(folder, TARGET).propose(request(TARGET, SEED))


def answered(text: str) -> Any:
    fenced = f"Faster.\n\n```python\n{text}\n```\n"
    for answer in (text, fenced, f"```python\ndef run(x):\n{text}"):
        with contextlib.suppress(ForecastAutotuneError):
            llm.extract_source(answer, TARGET, SEED)
    return llm.extract_note(text)


def varied(text: str) -> Any:
    return Variant.of("kernel", "b" * 64, text, Provenance(Origin.LLM))


READERS: dict[str, Callable[[str], Any]] = {
    "screen": static_hints,
    "configs": configs_of,
    "applied config": lambda text: apply_config(text, {"BLOCK": 32}),
    "identity": lambda text: [node_identity("t", language, text) for language in ("torch", "triton", "cuda")],
    "tokens": lambda text: [source_tokens(language, text) for language in ("torch", "cuda")],
    "features": lambda text: static_features([(node(TARGET, text), SEED)]),
    "entry": lambda text: defines_entry(text, "run", "torch"),
    "solution": lambda text: make_solution("one", text),
    "PyTorch rewrites": proposes("torch"),
    "Triton rewrites": proposes("triton"),
    "CUDA rewrites": proposes("cuda"),
    "contract": lambda text: read_contract(text, "kernel"),
    "variant": varied,
    "kernel rewrites": lambda text: kernel_rewrites(text, "kernel", {}),
    "recorded": recorded,
    "answer": answered,
    "advice": parse_cost_function,
    "report": lambda text: (display_source(text), line_opcodes(SEED.source, text)),
}


def read_all(reader: str, before: str, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        said = ""
        try:
            READERS[reader](before + text)
        except ForecastAutotuneError as error:
            said = str(error)
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error!s:.200}") from error
        assert len(said) < 2000, name


@pytest.mark.sampled(10)
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_of_sources_reads_or_refuses(reader: str) -> None:
    read_all(reader, "", QUICK)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("before", [SEED.source, KERNEL], ids=["solution", "kernel"])
def test_what_follows_a_good_source_is_read_or_refused(reader: str, before: str) -> None:
    read_all(reader, before, {name: text for name, text in QUICK.items() if len(text) <= 2_000})


def test_what_cannot_be_kept_in_a_file_is_left_out_of_an_answer() -> None:
    class OneAnswer(LandscapeAuthor):
        def propose(self, asked: ProposalRequest) -> Proposed:
            nodes = [replace(SEED, id=name, source=text) for name, text in HOSTILE.items()]
            return Proposed(asked.id, tuple(nodes))

    asked = replace(request(TARGET, SEED), arm="one/all")
    answer = ask_plugin(asked, {"one": OneAnswer()}, None)
    assert isinstance(answer, Proposed)
    left = {name for name in HOSTILE if name not in {n.id for n in answer.nodes}}
    assert left == set(HOSTILE) - set(SHORT) >= {"lone surrogate", "a hundred megabytes in a line"}
    assert answer.problem.startswith(f"{len(left)} sources were left out")


@pytest.mark.parametrize("text", [HOSTILE["lone surrogate"], HOSTILE["a hundred megabytes in a line"]])
def test_no_solution_is_made_of_it(text: str) -> None:
    with pytest.raises(RecordError, match=r"surrogate|characters"):
        make_solution("one", text)


VERIFIED = [
    "chain of minus",
    "parentheses open",
    "tower of elif",
    "NUL",
    "utf-16 cookie",
    "tower of statements in a line",
]


@pytest.mark.parametrize("name", VERIFIED)
def test_a_verdict_comes_of_it(judging: SandboxLane, name: str) -> None:
    verdict = verify(
        load_pack("softmax"), make_solution("one", HOSTILE[name]), judging, plan=VerificationPlan(cases=3)
    )
    assert verdict.judgement is Judgement.REJECTED
    assert verdict.reasons[0].code is ReasonCode.FAILS


class HostileAuthor(LandscapeAuthor):
    """Deals the texts, a few at a time."""

    def propose(self, asked: ProposalRequest) -> Proposed:
        drafts = [Draft(text, Provenance(Origin.LLM)) for text in QUICK.values()]
        nodes = new_nodes(asked, drafts)
        return Proposed(asked.id, nodes, exhausted=not nodes)


class ReadingJudge(LandscapeJudge):
    """Reads a source as a lane does; some run, so that they become parents."""

    def judge(self, job: NodeJob) -> NodeResult:
        with contextlib.suppress(RecordError):
            configs_of(job.node.source)
        ran = int(job.node.id, 16) % 2 == 0
        if ran or job.node.id == SEEDS[0].id:
            return NodeResult(Outcome.OK, job.against.id, -0.01 * len(static_hints(job.node.source)), 0.01)
        return NodeResult(Outcome.RUNTIME_ERROR, job.against.id, feedback="it does not run")

    def confirm(self, confirm: ConfirmationJob) -> dict[str, NodeResult]:
        return {n.id: NodeResult(Outcome.OK, confirm.seed_node.id, 0.0, 0.01) for n in confirm.nodes}


def test_a_search_goes_on_over_hostile_proposals_and_can_be_resumed(tmp_path: Path) -> None:
    def run(measurements: int) -> SearchState:
        chosen = settings(measurements, archive="greedy")
        judges = {"make_judge": lambda _: ReadingJudge(), "proposer": HostileAuthor()}
        return run_search(tmp_path / "search", chosen, forecaster=LineageForecaster(), **judges)  # type: ignore[arg-type]

    done = run(24)
    assert len(done.judged) >= 20
    log = tmp_path / "search" / LOG_FILE
    lines = log.read_bytes().splitlines(keepends=True)
    assert len(read_log(log)) == len(lines)
    # Cut where a process may be killed, it goes on from there to the same end.
    log.write_bytes(b"".join(lines[: len(lines) // 2]))
    assert set(run(24).judged) == set(done.judged)
