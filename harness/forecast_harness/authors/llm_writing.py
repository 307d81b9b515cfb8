"""Asking a language model for variants: the prompt, and what becomes of its answers.

Nothing of an answer is run here. A text becomes a `Variant` when it holds one code block that keeps the rules
of `read_contract`; then it is a candidate for verification, and for nothing else.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError
from forecast_autotune.printable import printable_line
from forecast_autotune.records import Argument, Config, Device
from forecast_autotune.variants.contract import read_contract
from forecast_autotune.variants.records import Origin, Provenance, Variant
from forecast_harness.targets.statement import CONFIGS_RULES

if TYPE_CHECKING:
    from forecast_autotune.llm.backend import TextGenerator

PROMPT_VERSION = "write-2"
"""Version of the prompt; a changed template is a new one."""
_FENCE = re.compile(r"^```[^\n`]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TITLE_WORDS = 4
_MAX_NOTE_CHARS = 300
_SHOWN_CONFIGS = 6

IDEAS = (
    "fewer passes over memory, or values kept in registers between passes",
    "another order of programs or tiles, so that neighbours share what lies in the cache",
    "persistent programs that take tile after tile",
    "full tiles without masks, and a remainder of their own",
    "another order or shape of the reductions, with as many significant digits",
    "software pipelining that the compiler does not do by itself, or loads issued earlier",
    "splitting a long sum over programs, whose parts the last one adds, or which add atomically into zeroed memory",
    "wider or better aligned accesses, tensor descriptors, cache modifiers, eviction policies",
)
"""Ideas to try; a prompt lists them all, and the model chooses."""


@dataclass(frozen=True)
class WritingBrief:
    """The facts of the base kernel for a writer."""

    kernel: str
    base_sha256: str
    source: str = field(repr=False)
    """Its self-contained module."""
    device: Device | None = None
    calls: Sequence[Sequence[Argument]] = ()
    """How it is called; the first few are shown."""
    configs: Sequence[Config] = ()


@dataclass(frozen=True)
class WritingResult:
    """The result of a round of writing."""

    variants: tuple[Variant, ...]
    refused: tuple[str, ...] = ()
    """One sentence per answer that is no variant."""


def write_variants(writer: TextGenerator, brief: WritingBrief, n: int, *, author: str = "") -> WritingResult:
    """Ask for `n` variants in one prompt. `author` is the model and its version, for the provenance.

    Answers that cannot be read, that break the contract, or that repeat the base or another answer are
    refused with a reason. Raises what the writer raises when it has not a single text.
    """
    text = build_prompt(brief)
    origin = Provenance(
        Origin.LLM,
        author=author,
        prompt_sha256=hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    variants: dict[str, Variant] = {}
    refused: list[str] = []
    seen = {_normal_form(brief.source)}
    for number, answer in enumerate(writer(text, n), 1):
        try:
            variant = read_answer(answer, brief, origin)
        except RecordError as error:
            refused.append(f"answer {number}: {error}")
            continue
        if (form := _normal_form(variant.source)) in seen:
            refused.append(f"answer {number}: the same code as the base or an earlier answer")
            continue
        seen.add(form)
        variants[variant.name] = variant
    return WritingResult(tuple(variants.values()), tuple(refused))


def read_answer(answer: str, brief: WritingBrief, origin: Provenance) -> Variant:
    """The variant in an answer: its one code block that defines the kernel.

    Raises `RecordError` saying why there is none.
    """
    blocks = [b for b in _FENCE.findall(answer) if f"def {brief.kernel}(" in b]
    if not blocks and f"def {brief.kernel}(" in answer and "```" not in answer:
        blocks = [answer]  # code and nothing else
    if len(blocks) != 1:
        raise RecordError(
            f"it holds {len(blocks) or 'no'} code blocks that define {brief.kernel}; one is wanted: "
            f"{answer.strip()[:80]!r}"
        )
    source = blocks[0].strip() + "\n"
    promised = read_contract(source, brief.kernel)
    promised.require_fit(read_contract(brief.source, brief.kernel), brief.configs, brief.calls)
    note = _note(answer, source)
    provenance = Provenance(**{**vars(origin), "note": note})
    title = "-".join(["llm", *re.findall(r"[a-z0-9]+", note.lower())[:_TITLE_WORDS]])
    return Variant.of(
        brief.kernel, brief.base_sha256, source, provenance, title=title, configs=promised.configs
    )


def build_prompt(brief: WritingBrief) -> str:
    """The whole question, the same for the same brief."""
    calls = "\n".join(f"- {_call(c)}" for c in brief.calls[:4]) or "- not recorded"
    listed = brief.configs[:: max(1, len(brief.configs) // _SHOWN_CONFIGS)][:_SHOWN_CONFIGS]
    configs = "\n".join(f"- {c}" for c in listed) or "- none: give CONFIGS"
    ideas = "\n".join(f"- {idea}" for idea in IDEAS)
    base, rules = read_contract(brief.source, brief.kernel), "\n".join(CONFIGS_RULES)
    return f"""Rewrite a Triton kernel so that it runs faster, without changing what it computes.

Device: {_device(brief.device)}
Calls:
{calls}
Some of its configs:
{configs}

```python
{brief.source.strip()}
```

Rules, checked before anything is run:
- Answer with one sentence on what you change and why, then one ```python block that holds a whole module.
- It imports triton and triton.language, and nothing else. It holds @triton.jit functions and constants.
- `{brief.kernel}` keeps its runtime parameters ({", ".join(base.parameters)}) by these names, in this order.
  Its tl.constexpr parameters may be dropped, added or changed.
{rules}
- Optional: RESET_TO_ZERO = [names of arguments that must be zero before a launch].
- Parameters named BASE_GRID_0, BASE_GRID_1 and BASE_GRID_2, if you add them, are filled with the call's own
  launch grid.
- A plain function workspace(meta, arguments, base, grid), if you define it, returns how many float32 and how many
  int32 elements one launch needs as memory of its own; parameters named WORKSPACE (any values) and COUNTERS (zeros)
  are filled with them.
- It is compared with the original on random shapes, ragged ones among them, and random values, large ones
  among them. Nothing outside of the outputs may be written. Precision must not get worse.

Ideas; choose what promises most for these shapes and this device:
{ideas}
"""


def _call(arguments: Sequence[Argument]) -> str:
    shown = []
    for a in arguments:
        if a.kind == "tensor":
            plain = "" if a.aligned else ", not 16-byte aligned"
            shown.append(f"{a.name}: {a.dtype}{list(a.shape)} strides {list(a.stride)}{plain}")
        else:
            shown.append(f"{a.name}={a.value!r}")
    return ", ".join(shown)


def _device(device: Device | None) -> str:
    if device is None:
        return "not known"
    facts = {
        "multiprocessors": device.multiprocessors,
        "bytes of shared memory per program": device.shared_memory_bytes,
        "bytes of L2": device.l2_bytes,
    }
    known = [f"{n} {name}" for name, n in facts.items() if n]
    return ", ".join([f"{device.name} ({device.backend} {device.arch})", *known])


def _note(answer: str, source: str) -> str:
    """The model's own sentence: what stands before the code, or its docstring or first comment."""
    before = answer.partition("```")[0].strip() if "```" in answer else ""
    try:
        docstring = ast.get_docstring(python_parser.parse_module(source)) or ""
    except SyntaxError:
        docstring = ""
    comments = [line.lstrip("# ").strip() for line in source.splitlines() if line.startswith("#")]
    text = next((t for t in (before, docstring, *comments) if t), "")
    # A single line: it is shown in tables.
    return printable_line(text, _MAX_NOTE_CHARS)


def _normal_form(source: str) -> str:
    """The code without names of constants that say nothing, comments and layout."""
    tree = python_parser.parse_module(source)
    kept = [n for n in tree.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    return ast.dump(ast.Module(kept, []))
