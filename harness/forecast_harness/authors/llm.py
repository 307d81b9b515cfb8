"""Proposals of a language model: `llm:SPEC` with what FORECAST_AUTOTUNE_LLM accepts.

    llm:http://127.0.0.1:8000/v1?model=NAME&kind=chat
    llm:transformers:PATH_OR_ID

The styles are `rewrite` and `repair` (what the compiler, the checks or the clock said of a failed child, in this
order). Where a request has no failure, a rewrite is asked for instead.

Where an answer's text shows that it breaks a rule, the model is told so, once, and may answer again. Every
text is kept by the question, the model and the request, with what it cost; that cost is told again when the
text is read from there, so that a search which was killed in between adds up to the same. Deadlines,
retries and budgets are those of `forecast_autotune.llm`.

Texts are kept on disk by what was asked, one JSON file per question and model. The question holds the request's id, so
that another request for the same parent gets texts of its own. An error is never kept; fewer texts than were asked for
are, and only the others are asked for the next time.
"""

from __future__ import annotations

import ast
import hashlib
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from forecast_autotune import python_parser
from forecast_autotune.errors import ForecastAutotuneError, RecordError
from forecast_autotune.llm.backend import LLMError, Usage, run_parallel
from forecast_autotune.llm.providers import answers_directory, provider
from forecast_autotune.llm.spec import parsed
from forecast_autotune.printable import printable_line
from forecast_autotune.records import Outcome, digest
from forecast_autotune.records.json_fields import read_integer, read_number
from forecast_autotune.settings import Settings
from forecast_autotune.store.answer_files import AnswerFiles
from forecast_autotune.variants.contract import read_contract
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.authors.author import Draft, defines_entry, draft_identity, draw_seed, new_nodes
from forecast_harness.records import (
    Node,
    NodeResult,
    ProposalRequest,
    Proposed,
    SearchCost,
    SearchTarget,
    TargetKind,
)
from forecast_harness.targets.cuda.source import check_source_rules, read_launch
from forecast_harness.targets.packs.schema import Pack, PackFormat
from forecast_harness.targets.search_target import cuda_signature_of, is_cuda_kernel, subjects_of

_FENCE_START = r"(?:^[ \t]*```[^\n`]*|```(?:python|py)[ \t]*)\n"
"""A fence; one that names its language may end a line of text, as small models have it."""
_CODE_BLOCK = re.compile(rf"{_FENCE_START}(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_UNCLOSED_BLOCK = re.compile(rf"{_FENCE_START}(.*)\Z", re.MULTILINE | re.DOTALL)
_MAX_NOTE_CHARS = 300
MAX_SOURCE_CHARS = 200_000
"""Characters of a source."""
_MAX_ANSWER_CHARS = 4 * MAX_SOURCE_CHARS


def extract_source(answer: str, target: SearchTarget, parent: Node) -> str:
    """The source in an answer: its last code block that defines the entry.

    Raises `RecordError` saying, to the model, what is wrong.
    """
    if len(text := _without_reasoning(answer)) > _MAX_ANSWER_CHARS:
        raise RecordError(f"it has {len(text)} characters; at most {_MAX_ANSWER_CHARS} are read")
    blocks = [block for block in _CODE_BLOCK.findall(text) if _names_entry(block, target.entry)]
    if not blocks and "```" not in text and _names_entry(text, target.entry):
        blocks = [text]  # code and nothing else
    if not blocks:
        if (cut := _UNCLOSED_BLOCK.search(_CODE_BLOCK.sub("", text))) and _names_entry(cut[1], target.entry):
            raise RecordError(
                f"the code block that defines {target.entry} is not closed: write a shorter one"
            )
        raise RecordError(f"it holds no code block that defines {target.entry}")
    return check_source(blocks[-1], target, parent)


def extract_note(answer: str) -> str:
    """The model's own sentence: the text before the code, as one line."""
    before = _without_reasoning(answer)[:_MAX_ANSWER_CHARS].partition("```")[0]
    return printable_line(before, _MAX_NOTE_CHARS)


def check_source(source: str, target: SearchTarget, parent: Node) -> str:
    """The source if it keeps the rules that can be read off it. Raises `RecordError` naming one it breaks."""
    source = source.strip() + "\n"
    if len(source) > MAX_SOURCE_CHARS:
        raise RecordError(f"the source has {len(source)} characters, more than {MAX_SOURCE_CHARS}")
    if is_cuda_kernel(target):
        return _check_cuda_source(source, target, parent)
    try:
        tree = python_parser.parse_module(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RecordError(f"the source is not Python: {error}") from error
    if target.kind is TargetKind.KERNEL:
        contract = read_contract(source, target.entry)
        subjects_of(target)[0].require_fit(contract)
    else:
        _check_solution(tree, source, target)
    if ast.dump(tree) == ast.dump(python_parser.parse_module(parent.source)):
        raise RecordError("the source is the one that was given: change something")
    return source


def _check_cuda_source(source: str, target: SearchTarget, parent: Node) -> str:
    check_source_rules(source)
    read_launch(source)
    if not re.search(rf"\b{target.entry}\s*\(", source):
        raise RecordError(f"the source must define {cuda_signature_of(target).text}")
    if draft_identity(target, Draft(source, parent.provenance, parent.language)) == parent.id:
        raise RecordError("the source is the one that was given: change something")
    return source


def _check_solution(tree: ast.Module, source: str, target: SearchTarget) -> None:
    if not defines_entry(source, target.entry, "torch"):
        names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        raise RecordError(
            f"the source must define {target.entry!r} at its top level; it defines "
            f"{', '.join(names) or 'nothing'}"
        )
    arguments = _entry_arguments(target)
    for node in tree.body:
        if arguments and isinstance(node, ast.FunctionDef) and node.name == target.entry:
            a = node.args
            parameters = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
            optional = len(a.defaults) + sum(d is not None for d in a.kw_defaults)
            fits = set(arguments) <= set(parameters) and len(parameters) - optional <= len(arguments)
            if not (fits or a.kwarg) or a.posonlyargs:
                raise RecordError(
                    f"{target.entry} is called with the arguments {', '.join(arguments)} by name; it has "
                    f"{', '.join(parameters) or 'none'}"
                )


def _entry_arguments(target: SearchTarget) -> list[str]:
    """Names that a pack's entry is called with; none where that is the format's business."""
    data = target.payload.get("pack")
    if data is None:
        return []
    about = Pack.from_json(data).definition
    if about.format is not PackFormat.OWN:
        return []
    return [*about.inputs, *(about.outputs if about.destination else ())]


def _without_reasoning(answer: str) -> str:
    """An answer without the thoughts before it."""
    return answer.rpartition("</think>")[2].replace("\r\n", "\n")


def _names_entry(block: str, entry: str) -> bool:
    return (
        re.search(
            rf"\b(?:def|class)\s+{re.escape(entry)}\b|^{re.escape(entry)}\s*=|__global__[^;{{}}]*\b{re.escape(entry)}\s*\(",
            block,
            re.M,
        )
        is not None
    )


# --- questions ---


PROMPT_VERSION = "2"
STYLES = ("rewrite", "repair")
LAUNCH_IDEA = (
    "the launch: num_warps, num_stages, several rows or another tile for each program; with constants and "
    "CONFIGS the fastest is found for you: WARPS = 4, num_warps=WARPS at the launch, and "
    'CONFIGS = [{"WARPS": 2}, {"WARPS": 4}, {"WARPS": 8}, {"WARPS": 16}]'
)
"""An idea where the launch belongs to the source: the safest change, also for a model that gets little else right."""
KERNEL_IDEAS = (
    "fewer passes over memory, or values kept in registers between passes",
    "another order of programs or tiles, so that neighbours share what lies in the cache",
    "persistent programs that take tile after tile",
    "full tiles without masks, and a remainder of their own",
    "another order or shape of the reductions, with as many significant digits",
    "software pipelining that the compiler does not do by itself, or loads issued earlier",
    "splitting a long sum over programs, whose parts the last one adds, or which add atomically into zeroed memory",
    "wider or better aligned accesses, tensor descriptors, cache modifiers, eviction policies",
)
TORCH_IDEAS = (
    "fewer passes over memory: fused operations of torch, in-place operations, results written with out=",
    "rows or blocks at a time, so that what lies between steps stays in the cache",
    "a product of matrices in place of loops, einsum or broadcasting, in the layout that is fastest",
    "less work: what does not change is worked out once, sums are not taken twice, small operands are scaled",
    "less of the host: fewer and larger operations, no Python loops over rows",
    "lower precision where the tolerance allows it, higher only where it is needed",
)
CUDA_IDEAS = (
    "wider loads, coalesced accesses, values kept in registers or shared memory between passes",
    "warp shuffles for reductions, several elements for each thread",
    "another number of threads, unrolled loops, launch bounds",
)
_MAX_SHOWN_FAILURES = 6
_MAX_SOURCE_CHARS = 24_000
_MAX_FEEDBACK_CHARS = 3_000
_MAX_FACTS = 16
_HIDDEN_FACTS = frozenset(
    ("harness", "launches", "level", "blocks", "ended", "checks", "contests", "standing")
)


def prompt(request: ProposalRequest, style: str) -> str:
    """The whole question for a style; `feasible_style` says which one can be asked. The same for equal requests."""
    parent, target = request.parents[0], request.target
    result = request.judged.get(parent.id)
    values: dict[str, Any] = {
        "statement": target.statement.strip(),
        "title": "The source to start from",
        "standing": _standing_text(request.score),
        "fence": "cpp" if is_cuda_kernel(target) else "python",
        "source": _shorten(parent.source),
        "facts": list(_fact_lines(result)) if style == "rewrite" else [],
        "tried": [_failure_text(f, request) for f in request.failures[-_MAX_SHOWN_FAILURES:]],
        "entry": target.entry,
        "ideas": _ideas(target),
    }
    if style == "repair":
        failure = failure_to_repair(request)
        assert failure is not None
        failure_result = request.judged[failure.id]
        values["tried"] = [
            _failure_text(f, request) for f in request.failures[-_MAX_SHOWN_FAILURES:] if f is not failure
        ]
        values |= {
            "failed": _shorten(failure.source),
            "stage": repair_stage(failure_result),
            "verdict": _verdict_text(failure_result),
            "feedback": failure_result.feedback[:_MAX_FEEDBACK_CHARS].strip(),
        }
    return str(_template(style).render(values))


def feasible_style(request: ProposalRequest, style: str) -> str:
    """The style that a request can be asked in: without a failure it is a rewrite."""
    if style == "repair" and failure_to_repair(request) is None:
        return "rewrite"
    return style if style in STYLES else "rewrite"


def failure_to_repair(request: ProposalRequest) -> Node | None:
    """The failure to repair: the newest one that did not get as far as being timed, else the newest."""
    failures = [f for f in request.failures if f.id in request.judged]
    refusals = [f for f in failures if request.judged[f.id].outcome is not Outcome.OK]
    candidates = refusals or failures
    return candidates[-1] if candidates else None


def repair_stage(result: NodeResult) -> str:
    """The next stage of a repair: `compile`, then `correct`, then `fast`."""
    if result.outcome is Outcome.OK:
        return "fast"
    return "correct" if result.outcome is Outcome.INCORRECT else "compile"


def _standing_text(score: float) -> str:
    return f"{2.0**-score:.3g} times as fast as the first one" if score else "the first one"


def _fact_lines(result: NodeResult | None) -> Iterator[str]:
    """Facts of the measurement of a source, one line each."""
    if result is None:
        return
    if result.config:
        yield "best config: " + ", ".join(f"{k}={v}" for k, v in result.config.items())
    count = 0
    for name, value in result.facts.items():
        plain = isinstance(value, str | int | float) and not isinstance(value, bool)
        if name not in _HIDDEN_FACTS and plain and value != "" and count < _MAX_FACTS:
            count += 1
            yield f"{name.replace('_', ' ')}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}"


def _failure_text(node: Node, request: ProposalRequest) -> str:
    note = " ".join(node.provenance.note.split())[:160] or "a change without a note"
    result = request.judged.get(node.id)
    return f"{note} ({_verdict_text(result)})" if result is not None else note


def _verdict_text(result: NodeResult) -> str:
    if result.log2_ratio is not None:
        ratio = 2.0**result.log2_ratio
        return (
            f"took {ratio:.3g} times as long as the best" if ratio >= 1 else "was not faster than its parent"
        )
    return {
        Outcome.INCORRECT: "gave wrong results",
        Outcome.COMPILE_ERROR: "did not compile",
        Outcome.OUT_OF_RESOURCES: "needed more than the device has",
        Outcome.TIMEOUT: "took too long",
    }.get(result.outcome, "failed when it ran")


def _ideas(target: SearchTarget) -> tuple[str, ...]:
    if target.language == "triton":
        return (LAUNCH_IDEA, *KERNEL_IDEAS) if target.kind is TargetKind.PACK else KERNEL_IDEAS
    return CUDA_IDEAS if target.language == "cuda" else TORCH_IDEAS


def _shorten(text: str) -> str:
    text = text.strip()
    if len(text) <= _MAX_SOURCE_CHARS:
        return text
    half = _MAX_SOURCE_CHARS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


@cache
def _template(style: str) -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise RecordError("prompts need jinja2: pip install 'forecast-autotune[llm]'") from error
    # Plain text for a model: nothing to escape; an unknown name is a mistake, not an empty word.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("forecast_harness", "authors/prompts"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    return environment.get_template(f"{style}-{PROMPT_VERSION}.j2")


# --- the author ---


SCHEMA = 1
MAX_CACHE_BYTES = 256 * 2**20
"""Most bytes of kept texts; those written longest ago go first."""
MAX_FILE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class GeneratedTexts:
    """Texts that a model wrote, and their cost when it was asked."""

    texts: tuple[str, ...] = field(default=(), repr=False)
    spent: SearchCost = SearchCost()


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
        costs = {"tokens": texts.spent.tokens, "money": texts.spent.money}
        data = {"schema": SCHEMA, "model": self._model, "texts": list(texts.texts), **costs}
        self._files.write(self._path(question), data)

    def _path(self, question: Sequence[str]) -> Path:
        return self._files.directory / f"{digest(SCHEMA, self._model, list(question))}.json"


CACHE_FOLDER = "written"
"""A folder below that of language models' answers."""
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
    """Asks a language model for sources. Thread-safe."""

    styles: Sequence[str] = STYLES

    def __init__(self, text: str, target: SearchTarget, settings: Settings) -> None:
        spec = parsed(text, writing=True)
        model = str(spec.options.get("model", spec.location))
        self.name = f"llm:{model}"
        options = [f"{k}={v}" for k, v in sorted(spec.options.items()) if k != "model"]
        self._author = f"{model} ({', '.join(options)})" if options else model
        self._target = target
        self._usage_by_thread = threading.local()
        self._write = provider().text_generator(text, settings=settings, on_usage=self._record_usage)
        question = f"{spec.kind}:{spec.location}?{sorted(spec.options.items())}"
        self._cache = TextCache(answers_directory(settings) / CACHE_FOLDER, question)

    def propose(self, request: ProposalRequest) -> Proposed:
        """See `Author`."""
        begin = time.monotonic()
        try:
            drafts, reasons, cost = self.write(request)
        except RecordError as error:
            return Proposed(request.id, (), problem=f"{self.name}: {error}")
        nodes = new_nodes(request, drafts)
        cost = replace(cost, wall_seconds=time.monotonic() - begin)
        problem = ""
        if not nodes:
            duplicates = ["nothing new among its sources"] if drafts else []
            most = [text for text, _ in Counter(reasons).most_common(_MAX_SHOWN_REASONS)]
            problem = f"{self.name}: {'; '.join([*most, *duplicates])}"
        return Proposed(request.id, nodes, cost, problem)

    def write(self, request: ProposalRequest) -> tuple[list[Draft], list[str], SearchCost]:
        """The drafts of the model for a request; refused answers are asked for once more.

        With them: a sentence for each answer and each failure that gave no source, and the cost.
        Raises `RecordError` for no jinja2.
        """
        style = feasible_style(request, request.arm.rpartition("/")[2])
        question = prompt(request, style)
        texts, trouble = self._generate(question, request.n, draw_seed(request))
        drafts: list[Draft] = []
        refusals: list[tuple[str, str]] = []
        for answer in texts.texts:
            try:
                drafts.append(self._draft(answer, request, style, question))
            except RecordError as error:
                refusals.append((answer, str(error)))
        second, reasons, more = self._retry(request, style, question, refusals)
        return [*drafts, *second], [*trouble, *reasons], texts.spent + more

    def close(self) -> None:
        """Servers keep no connection; a model in this process keeps its memory until the process ends."""

    def _retry(
        self, request: ProposalRequest, style: str, question: str, refusals: Sequence[tuple[str, str]]
    ) -> tuple[list[Draft], list[str], SearchCost]:
        """Drafts of a second turn, in which the model is told which rule its answer broke."""

        def turn(number: int, answer: str, complaint: str) -> tuple[Draft | None, str, SearchCost]:
            values = {"prompt": question, "answer": _shorten(answer), "complaint": complaint}
            retry_prompt = str(_template("again").render(values))
            texts, trouble = self._generate(retry_prompt, 1, f"{draw_seed(request)}/{number}")
            if not texts.texts:
                return None, trouble[0] if trouble else complaint, texts.spent
            try:
                return self._draft(texts.texts[0], request, style, question), "", texts.spent
            except RecordError as error:
                return None, str(error), texts.spent

        turns = [partial(turn, number, *pair) for number, pair in enumerate(refusals)]
        drafts, reasons, total = [], [], SearchCost()
        for outcome in run_parallel(turns, _MAX_CONCURRENT_RETRIES):
            if isinstance(outcome, LLMError):
                reasons.append(str(outcome))
                continue
            draft, reason, cost = outcome
            total += cost
            if draft is not None:
                drafts.append(draft)
            elif reason:
                reasons.append(reason)
        return drafts, reasons, total

    def _generate(self, question: str, n: int, mark: str) -> tuple[GeneratedTexts, list[str]]:
        """Up to `n` texts, cached ones first, and the reasons why there are not more."""
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
        cost = SearchCost(tokens=usage.prompt_tokens + usage.output_tokens, money=usage.money)
        texts = GeneratedTexts((*texts.texts, *fresh), texts.spent + cost)
        if fresh:
            self._cache.write(texts, question, mark)
        return texts, trouble

    def _record_usage(self, usage: Usage) -> None:
        """Called by the writer in the thread that asked it."""
        self._usage_by_thread.usage = usage

    def _draft(self, answer: str, request: ProposalRequest, style: str, question: str) -> Draft:
        """Raises `RecordError` saying, to the model, which rule its answer breaks."""
        parent = request.parents[0]
        source = extract_source(answer, self._target, parent)
        failure = failure_to_repair(request) if style == "repair" else None
        provenance = Provenance(
            Origin.LLM,
            author=self._author,
            prompt_sha256=hashlib.sha256(question.encode("utf-8", "surrogatepass")).hexdigest(),
            note=extract_note(answer),
        )
        return Draft(source, provenance, parents=(parent.id, *([failure.id] if failure else [])))
