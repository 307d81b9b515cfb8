"""Questions to a language model: texts from templates, each with a version in its name.

A changed template is a new version: what was written by another prompt is not comparable, nor is it reused.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Outcome
from forecast_harness.records import Node, NodeResult, ProposalRequest, SearchTarget, TargetKind
from forecast_harness.targets.search_target import is_cuda_kernel
from forecast_harness.targets.statement import timed_work

PROMPT_VERSION = "2"
STYLES = ("rewrite", "diff", "crossover", "repair", "profile")
LAUNCH_IDEA = (
    "the launch: num_warps, num_stages, several rows or another tile for each program; with constants and "
    "CONFIGS the fastest is found for you: WARPS = 4, num_warps=WARPS at the launch, and "
    'CONFIGS = [{"WARPS": 2}, {"WARPS": 4}, {"WARPS": 8}, {"WARPS": 16}]'
)
"""Where the launch belongs to the source: the safest change, also for a model that gets little else right."""
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
    judged = request.judged.get(parent.id)
    known: dict[str, Any] = {
        "statement": target.statement.strip(),
        "title": "The source to start from",
        "standing": _standing_text(request.score),
        "fence": "cpp" if is_cuda_kernel(target) else "python",
        "source": _shortened(parent.source),
        "facts": list(_fact_lines(judged)) if style in ("profile", "rewrite") else [],
        "tried": [_failure_text(f, request) for f in request.failures[-_MAX_SHOWN_FAILURES:]],
        "entry": target.entry,
        "ideas": _ideas(target),
    }
    if style == "crossover":
        other = request.parents[1]
        known |= {"other": _shortened(other.source), "other_standing": other.provenance.note}
    if style == "repair":
        failed = failure_to_repair(request)
        assert failed is not None
        judged_failure = request.judged[failed.id]
        known["tried"] = [
            _failure_text(f, request) for f in request.failures[-_MAX_SHOWN_FAILURES:] if f is not failed
        ]
        known |= {
            "failed": _shortened(failed.source),
            "stage": repair_stage(judged_failure),
            "verdict": _verdict_text(judged_failure),
            "feedback": judged_failure.feedback[:_MAX_FEEDBACK_CHARS].strip(),
        }
    if style == "profile":
        known["rates"] = list(workload_rates(target, judged))
    return str(_template(style).render(known))


def retry_prompt(prompt: str, answer: str, complaint: str) -> str:
    """The second turn, after an answer that broke a rule."""
    return str(_template("again").render(prompt=prompt, answer=_shortened(answer), complaint=complaint))


def feasible_style(request: ProposalRequest, style: str) -> str:
    """The style that a request can be asked in: without a second parent, or a failure, it is a rewrite."""
    if style == "crossover" and len(request.parents) < 2:
        return "rewrite"
    if style == "repair" and failure_to_repair(request) is None:
        return "rewrite"
    return style if style in STYLES else "rewrite"


def failure_to_repair(request: ProposalRequest) -> Node | None:
    """The failure to repair: the newest one that did not get as far as being timed, else the newest."""
    judged = [f for f in request.failures if f.id in request.judged]
    refused = [f for f in judged if request.judged[f.id].outcome is not Outcome.OK]
    chosen = refused or judged
    return chosen[-1] if chosen else None


def repair_stage(judged: NodeResult) -> str:
    """The next stage of a repair: `compile`, then `correct`, then `fast`."""
    if judged.outcome is Outcome.OK:
        return "fast"
    return "correct" if judged.outcome is Outcome.INCORRECT else "compile"


def workload_rates(target: SearchTarget, judged: NodeResult | None) -> Iterator[str]:
    """Time, memory traffic and arithmetic of each workload of a pack, by its definition's counts."""
    if judged is None or "pack" not in target.payload:
        return
    every = timed_work(target)
    for name, seconds in judged.seconds.items():
        text = f"{name}: {1e6 * seconds:.4g} us"
        if (work := every.get(name)) is not None and seconds > 0:
            moved, flops = work["bytes"], work["flops"]
            text += f", at least {moved / seconds / 1e9:.3g} GB/s and {flops / seconds / 1e9:.3g} Gflop/s"
            text += f" ({flops / max(moved, 1):.3g} flop per byte)"
        yield text


def _standing_text(score: float) -> str:
    return f"{2.0**-score:.3g} times as fast as the first one" if score else "the first one"


def _fact_lines(judged: NodeResult | None) -> Iterator[str]:
    """Facts of the measurement of a source, one line each."""
    if judged is None:
        return
    if judged.config:
        yield "best config: " + ", ".join(f"{k}={v}" for k, v in judged.config.items())
    shown = 0
    for name, value in judged.facts.items():
        plain = isinstance(value, str | int | float) and not isinstance(value, bool)
        if name not in _HIDDEN_FACTS and plain and value != "" and shown < _MAX_FACTS:
            shown += 1
            yield f"{name.replace('_', ' ')}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}"


def _failure_text(node: Node, request: ProposalRequest) -> str:
    note = " ".join(node.provenance.note.split())[:160] or "a change without a note"
    judged = request.judged.get(node.id)
    return f"{note} ({_verdict_text(judged)})" if judged is not None else note


def _verdict_text(judged: NodeResult) -> str:
    if judged.log2_ratio is not None:
        ratio = 2.0**judged.log2_ratio
        return (
            f"took {ratio:.3g} times as long as the best" if ratio >= 1 else "was not faster than its parent"
        )
    return {
        Outcome.INCORRECT: "gave wrong results",
        Outcome.COMPILE_ERROR: "did not compile",
        Outcome.OUT_OF_RESOURCES: "needed more than the device has",
        Outcome.TIMEOUT: "took too long",
    }.get(judged.outcome, "failed when it ran")


def _ideas(target: SearchTarget) -> tuple[str, ...]:
    if target.language == "triton":
        return (LAUNCH_IDEA, *KERNEL_IDEAS) if target.kind is TargetKind.PACK else KERNEL_IDEAS
    return CUDA_IDEAS if target.language == "cuda" else TORCH_IDEAS


def _shortened(text: str) -> str:
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
