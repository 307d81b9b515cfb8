"""From a model's answer to a source: the block that defines the entry, or edits that fit exactly once.

Nothing of an answer is run here.
"""

from __future__ import annotations

import ast
import re

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError
from forecast_autotune.printable import printable_line
from forecast_autotune.variants.contract import read_contract
from forecast_harness.authors.author import Draft, defines_entry, draft_identity
from forecast_harness.records import Node, SearchTarget, TargetKind
from forecast_harness.targets.cuda.source import check_source_rules, read_launch
from forecast_harness.targets.packs.schema import Pack, PackFormat
from forecast_harness.targets.search_target import cuda_signature_of, is_cuda_kernel, subjects_of

_FENCE_START = r"(?:^[ \t]*```[^\n`]*|```(?:python|py)[ \t]*)\n"
"""A fence; one that names its language may end a line of text, as small models have it."""
_CODE_BLOCK = re.compile(rf"{_FENCE_START}(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_UNCLOSED_BLOCK = re.compile(rf"{_FENCE_START}(.*)\Z", re.MULTILINE | re.DOTALL)
_EDIT_BLOCK = re.compile(
    # The text that is searched for holds no second head, so that heads without an end are passed over in linear time.
    r"^[ \t]*<{5,9}[ \t]*SEARCH[^\n]*\n(?P<old>(?:(?![ \t]*<{5,9}[ \t]*SEARCH)[^\n]*\n)*?)[ \t]*={5,9}[ \t]*\n"
    r"(?P<new>(?:(?![ \t]*<{5,9}[ \t]*SEARCH)[^\n]*\n)*?)[ \t]*>{5,9}[ \t]*REPLACE",
    re.MULTILINE | re.DOTALL,
)
_MAX_NOTE_CHARS = 300
MAX_SOURCE_CHARS = 200_000
"""Characters of a source."""
_MAX_ANSWER_CHARS = 4 * MAX_SOURCE_CHARS


def extract_source(answer: str, target: SearchTarget, parent: Node) -> str:
    """The source in an answer: its last code block that defines the entry.

    Raises `RecordError` saying, to the model, what is wrong.
    """
    text = _readable_part(answer)
    blocks = _entry_blocks(text, target.entry)
    if not blocks and "```" not in text and _names_entry(text, target.entry):
        blocks = [text]  # code and nothing else
    if not blocks:
        if (cut := _UNCLOSED_BLOCK.search(_CODE_BLOCK.sub("", text))) and _names_entry(cut[1], target.entry):
            raise RecordError(
                f"the code block that defines {target.entry} is not closed: write a shorter one"
            )
        raise RecordError(f"it holds no code block that defines {target.entry}")
    return check_source(blocks[-1], target, parent)


def apply_edits(answer: str, target: SearchTarget, parent: Node) -> str:
    """The parent's source with the edits in an answer. Raises `RecordError` as `extract_source` does.

    An answer without edits may hold a whole source instead: small models write nothing else.
    """
    text = _readable_part(answer)
    edits = [(m["old"], m["new"]) for m in _EDIT_BLOCK.finditer(text)]
    if not edits and _entry_blocks(text, target.entry):
        return extract_source(answer, target, parent)
    if not edits:
        raise RecordError("it holds no block of the form <<<<<<< SEARCH ... ======= ... >>>>>>> REPLACE")
    source = parent.source
    for number, (old, new) in enumerate(edits, 1):
        source = _apply_edit(source, _without_fences(old), _without_fences(new), number)
    return check_source(source, target, parent)


def extract_note(answer: str) -> str:
    """The model's own sentence: what stands before the code, as one line."""
    before = re.split(r"```|<{5,9}[ \t]*SEARCH", _without_reasoning(answer)[:_MAX_ANSWER_CHARS], maxsplit=1)[
        0
    ]
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
        promised = read_contract(source, target.entry)
        subjects_of(target)[0].require_fit(promised)
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
        named = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        raise RecordError(
            f"the source must define {target.entry!r} at its top level; it defines "
            f"{', '.join(named) or 'nothing'}"
        )
    wanted = _entry_arguments(target)
    for node in tree.body:
        if wanted and isinstance(node, ast.FunctionDef) and node.name == target.entry:
            a = node.args
            given = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
            optional = len(a.defaults) + sum(d is not None for d in a.kw_defaults)
            fits = set(wanted) <= set(given) and len(given) - optional <= len(wanted)
            if not (fits or a.kwarg) or a.posonlyargs:
                raise RecordError(
                    f"{target.entry} is called with the arguments {', '.join(wanted)} by name; it has "
                    f"{', '.join(given) or 'none'}"
                )


def _entry_arguments(target: SearchTarget) -> list[str]:
    """Names that a pack's entry is called with; none where that is the format's business."""
    given = target.payload.get("pack")
    if given is None:
        return []
    about = Pack.from_json(given).definition
    if about.format is not PackFormat.OWN:
        return []
    return [*about.inputs, *(about.outputs if about.destination else ())]


def _without_reasoning(answer: str) -> str:
    """An answer without the thoughts before it."""
    return answer.rpartition("</think>")[2].replace("\r\n", "\n")


def _readable_part(answer: str) -> str:
    """An answer without the thoughts before it. Raises `RecordError` for one that is too long to be searched."""
    if len(text := _without_reasoning(answer)) > _MAX_ANSWER_CHARS:
        raise RecordError(f"it has {len(text)} characters; at most {_MAX_ANSWER_CHARS} are read")
    return text


def _entry_blocks(text: str, entry: str) -> list[str]:
    """Code blocks that define the entry."""
    return [block for block in _CODE_BLOCK.findall(text) if _names_entry(block, entry)]


def _names_entry(block: str, entry: str) -> bool:
    return (
        re.search(
            rf"\b(?:def|class)\s+{re.escape(entry)}\b|^{re.escape(entry)}\s*=|__global__[^;{{}}]*\b{re.escape(entry)}\s*\(",
            block,
            re.M,
        )
        is not None
    )


def _without_fences(text: str) -> str:
    """The lines of an edit without fences that a model puts around them."""
    lines = text.split("\n")[:-1] if text.endswith("\n") else text.split("\n")
    if len(lines) > 1 and lines[0].lstrip().startswith("```") and lines[-1].strip() == "```":
        lines = lines[1:-1]
    return "\n".join(lines)


def _apply_edit(source: str, old: str, new: str, number: int) -> str:
    """One edit: exact lines first, then without trailing blanks, then with another indentation."""
    lines, wanted = source.split("\n"), old.split("\n")
    if not old.strip():
        raise RecordError(f"edit {number} searches for nothing: copy lines of the source")
    for form in (str, str.rstrip, str.strip):
        looked = [form(line) for line in wanted]
        places = [
            i
            for i in range(len(lines) - len(wanted) + 1)
            if [form(line) for line in lines[i : i + len(wanted)]] == looked
        ]
        if len(places) > 1:
            raise RecordError(
                f"the lines that edit {number} searches for occur {len(places)} times: copy more of them"
            )
        if places:
            at = places[0]
            put = new.split("\n") if new else []
            if form is str.strip:
                put = _reindented(put, wanted, lines[at : at + len(wanted)])
            return "\n".join([*lines[:at], *put, *lines[at + len(wanted) :]])
    raise RecordError(
        f"the lines that edit {number} searches for are not in the source: {wanted[0].strip()[:60]!r} ..."
    )


def _reindented(put: list[str], wanted: list[str], replaced: list[str]) -> list[str]:
    """Replacing lines, moved as far as the lines they replace stand from the lines searched for."""
    index = next(i for i, line in enumerate(wanted) if line.strip())
    have = len(wanted[index]) - len(wanted[index].lstrip())
    want = len(replaced[index]) - len(replaced[index].lstrip())
    if want >= have:
        return [" " * (want - have) + line if line.strip() else line for line in put]
    return [line[min(have - want, len(line) - len(line.lstrip())) :] for line in put]
