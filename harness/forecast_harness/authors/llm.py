"""Proposals of a language model: `llm:SPEC` with what FORECAST_AUTOTUNE_LLM accepts.

    llm:http://127.0.0.1:8000/v1?model=NAME&kind=chat
    llm:transformers:PATH_OR_ID

The styles are `rewrite`, `diff` (edits that must fit exactly once), `crossover` (two parents), `repair`
(what the compiler, the checks or the clock said of a failed child, in this order) and `profile` (figures of
the parent). Where a request has no second parent or no failure, a rewrite is asked for instead.

An answer that breaks a rule which can be read off its text is told so, once, and may be given again. Every
text is kept by the question, the model and the request, with what it cost; that cost is told again when the
text is read from there, so that a search which was killed in between adds up to the same. Deadlines,
retries and budgets are those of `forecast_autotune.llm`.

Texts are kept on disk by what was asked, one JSON file per question and model. The question holds the request's id, so
that another request for the same parent gets texts of its own. An error is never kept; fewer texts than were asked for
are, and only the others are asked for the next time.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from forecast_autotune.errors import ForecastAutotuneError, RecordError
from forecast_autotune.llm.backend import LLMError, Usage, run_parallel
from forecast_autotune.llm.providers import answers_directory, provider
from forecast_autotune.llm.spec import parsed
from forecast_autotune.records import digest
from forecast_autotune.records.json_fields import read_integer, read_number
from forecast_autotune.settings import Settings
from forecast_autotune.store.answer_files import AnswerFiles
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.authors import llm_answers, llm_prompts
from forecast_harness.authors.author import Draft, draw_seed, new_nodes
from forecast_harness.records import ProposalRequest, Proposed, SearchCost, SearchTarget

SCHEMA = 1
MAX_CACHE_BYTES = 256 * 2**20
"""Most bytes of kept texts; those written longest ago go first."""
MAX_FILE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class GeneratedTexts:
    """Texts that a model wrote, and their cost when it was asked."""

    texts: tuple[str, ...] = field(default=(), repr=False)
    spent: SearchCost = SearchCost()


@dataclass(frozen=True)
class WrittenDrafts:
    """What a model wrote for a request."""

    drafts: Sequence[Draft]
    reasons: Sequence[str]
    """Why there are no more: one sentence for each answer that is no source, and for what kept the model from one."""
    spent: SearchCost


class TextCache:
    """Texts below a directory, by what was asked of a model."""

    def __init__(self, directory: Path, model: str) -> None:
        self._model = model
        self._files = AnswerFiles(
            directory, f"texts of {model}", limit_bytes=MAX_CACHE_BYTES, most_file_bytes=MAX_FILE_BYTES
        )

    def read(self, *question: str) -> GeneratedTexts:
        """The texts kept for a question; none where a file is missing, damaged or of another kind."""
        try:
            data = self._files.read(self._path(question))
            if data["schema"] != SCHEMA or not all(isinstance(t, str) for t in data["texts"]):
                return GeneratedTexts()
            tokens, money = read_integer(data["tokens"], "tokens"), read_number(data["money"], "money") or 0.0
            return GeneratedTexts(tuple(data["texts"]), SearchCost(tokens=tokens, money=money))
        except (OSError, ValueError, LookupError, TypeError):
            return GeneratedTexts()

    def write(self, texts: GeneratedTexts, *question: str) -> None:
        """Keep texts for a question, in place of what was kept for it."""
        spent = {"tokens": texts.spent.tokens, "money": texts.spent.money}
        data = {"schema": SCHEMA, "model": self._model, "texts": list(texts.texts), **spent}
        self._files.write(self._path(question), data)

    def _path(self, question: Sequence[str]) -> Path:
        return self._files.directory / f"{digest(SCHEMA, self._model, list(question))}.json"


CACHE_FOLDER = "written"
"""Below the directory of language models' answers."""
_MAX_CONCURRENT_RETRIES = 8
"""Second turns under way at a time."""
_MAX_SHOWN_REASONS = 3


def open_llm_author(text: str, target: SearchTarget, *, settings: Settings | None = None) -> LLMAuthor:
    """The proposer over the model that a specification names; nothing is loaded or asked before its use.

    Raises `SettingsError` for a specification that is not understood, that holds a key, or whose model does
    not generate text.
    """
    return LLMAuthor(text, target, settings or Settings.from_environment())


class LLMAuthor:
    """See the module. Thread-safe."""

    styles: Sequence[str] = llm_prompts.STYLES

    def __init__(self, text: str, target: SearchTarget, settings: Settings) -> None:
        spec = parsed(text, writing=True)
        model = str(spec.options.get("model", spec.location))
        self.name = f"llm:{model}"
        how = [f"{k}={v}" for k, v in sorted(spec.options.items()) if k != "model"]
        self._author = f"{model} ({', '.join(how)})" if how else model
        self._target = target
        self._usage_by_thread = threading.local()
        self._write = provider().text_generator(text, settings=settings, on_usage=self._record_usage)
        question = f"{spec.kind}:{spec.location}?{sorted(spec.options.items())}"
        self._cache = TextCache(answers_directory(settings) / CACHE_FOLDER, question)

    def propose(self, request: ProposalRequest) -> Proposed:
        """See `Author`."""
        begin = time.monotonic()
        try:
            written = self.write(request)
        except RecordError as error:
            return Proposed(request.id, (), problem=f"{self.name}: {error}")
        nodes = new_nodes(request, written.drafts)
        spent = replace(written.spent, wall_seconds=time.monotonic() - begin)
        problem = ""
        if not nodes:
            known = ["nothing new among its sources"] if written.drafts else []
            most = [text for text, _ in Counter(written.reasons).most_common(_MAX_SHOWN_REASONS)]
            problem = f"{self.name}: {'; '.join([*most, *known])}"
        return Proposed(request.id, nodes, spent, problem)

    def write(self, request: ProposalRequest) -> WrittenDrafts:
        """What the model answers a request, refused answers asked for once more. Raises `RecordError` for no jinja2."""
        style = llm_prompts.feasible_style(request, request.arm.rpartition("/")[2])
        question = llm_prompts.prompt(request, style)
        generated, trouble = self._generate(question, request.n, draw_seed(request))
        drafts: list[Draft] = []
        refused: list[tuple[str, str]] = []
        for answer in generated.texts:
            try:
                drafts.append(self._draft(answer, request, style, question))
            except RecordError as error:
                refused.append((answer, str(error)))
        second, reasons, more = self._retry_refused(request, style, question, refused)
        return WrittenDrafts([*drafts, *second], [*trouble, *reasons], generated.spent + more)

    def close(self) -> None:
        """Servers keep no connection; a model in this process keeps its memory until the process ends."""

    def _retry_refused(
        self, request: ProposalRequest, style: str, question: str, refused: Sequence[tuple[str, str]]
    ) -> tuple[list[Draft], list[str], SearchCost]:
        """Drafts of a second turn, in which the model is told which rule its answer broke."""

        def turn(number: int, answer: str, complaint: str) -> tuple[Draft | None, str, SearchCost]:
            prompt = llm_prompts.retry_prompt(question, answer, complaint)
            generated, trouble = self._generate(prompt, 1, f"{draw_seed(request)}/{number}")
            if not generated.texts:
                return None, trouble[0] if trouble else complaint, generated.spent
            try:
                return self._draft(generated.texts[0], request, style, question), "", generated.spent
            except RecordError as error:
                return None, str(error), generated.spent

        turns = [partial(turn, number, *pair) for number, pair in enumerate(refused)]
        drafts, reasons, spent = [], [], SearchCost()
        for outcome in run_parallel(turns, _MAX_CONCURRENT_RETRIES):
            if isinstance(outcome, LLMError):
                reasons.append(str(outcome))
                continue
            draft, reason, cost = outcome
            spent += cost
            if draft is not None:
                drafts.append(draft)
            elif reason:
                reasons.append(reason)
        return drafts, reasons, spent

    def _generate(self, question: str, n: int, mark: str) -> tuple[GeneratedTexts, list[str]]:
        """Up to `n` texts, kept ones first, and why there are not more."""
        texts = self._cache.read(question, mark)
        if len(texts.texts) >= n:
            return replace(texts, texts=texts.texts[:n]), []
        self._usage_by_thread.usage = Usage()
        fresh: list[str] = []
        trouble: list[str] = []
        try:
            fresh = self._write(question, n - len(texts.texts))
        except (ForecastAutotuneError, ImportError) as error:
            trouble = [str(error)]
        usage: Usage = self._usage_by_thread.usage
        spent = SearchCost(tokens=usage.prompt_tokens + usage.output_tokens, money=usage.money)
        texts = GeneratedTexts((*texts.texts, *fresh), texts.spent + spent)
        if fresh:
            self._cache.write(texts, question, mark)
        return texts, trouble

    def _record_usage(self, usage: Usage) -> None:
        """Called by the writer in the thread that asked it."""
        self._usage_by_thread.usage = usage

    def _draft(self, answer: str, request: ProposalRequest, style: str, question: str) -> Draft:
        """Raises `RecordError` saying, to the model, which rule its answer breaks."""
        parent = request.parents[0]
        read = llm_answers.apply_edits if style == "diff" else llm_answers.extract_source
        source = read(answer, self._target, parent)
        others = {
            "crossover": request.parents[1:2],
            "repair": tuple(filter(None, [llm_prompts.failure_to_repair(request)])),
        }.get(style, ())
        provenance = Provenance(
            Origin.LLM,
            author=self._author,
            prompt_sha256=hashlib.sha256(question.encode("utf-8", "surrogatepass")).hexdigest(),
            note=llm_answers.extract_note(answer),
        )
        return Draft(source, provenance, parents=(parent.id, *(o.id for o in others)))
