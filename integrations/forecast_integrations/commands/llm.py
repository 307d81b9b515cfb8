"""`llm ask`: questions to a language model that is served nowhere near, and its answers, as files."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from forecast_autotune.commands.output import Output, UsageError
from forecast_autotune.commands.store_access import check_folder
from forecast_autotune.llm.open_question import OpenQuestion
from forecast_autotune.printable import printable
from forecast_integrations.models.answer_files import extend, read_answers, read_questions, write_questions
from forecast_integrations.models.recorded import SUFFIXES, RecordedAnswers

_MAX_SHOWN_REFUSALS = 20


def ask(options: argparse.Namespace, output: Output) -> int:
    """Write the open questions, or take answers to them; the exit status is 1 where an answer was refused."""
    return _export(options, output) if options.export is not None else _import(options, output)


def _export(options: argparse.Namespace, output: Output) -> int:
    from forecast_autotune.report.table import shown_text
    from forecast_integrations.commands.open_questions import questions_of

    path, source = _jsonl(options.export, "--export"), questions_of(options.kind)
    if options.store is not None:
        check_folder("--store", options.store)
    known = _known_answers(options.to)
    count = write_questions(path, _open(source(options), known, output))
    answered = f"; left out what {options.to} answers" if options.to else ""
    told = f"{count} open question{'' if count == 1 else 's'} written to {path}{answered}\n"
    told += f"answers: forecast-autotune llm ask --import ANSWERS.jsonl --questions {path} --model NAME --author NAME "
    told += f"--to {options.to or 'FILE.jsonl'}"
    output.emit({"path": str(path), "kind": options.kind, "questions": count}, shown_text(told, lines=True))
    return 0


def _open(questions: Iterable[OpenQuestion], known: Iterable[str], output: Output) -> Iterator[OpenQuestion]:
    done = set(known)
    with output.progress("asking") as progress:
        for number, question in enumerate(questions, 1):
            progress(number, number, question.label)
            if question.key not in done:
                yield question


def _import(options: argparse.Namespace, output: Output) -> int:
    from forecast_autotune.report.table import shown_text

    if missing := [f"--{name}" for name in ("model", "author", "to") if not getattr(options, name)]:
        raise UsageError(
            f"--import needs {' and '.join(missing)}: who answered, who vouches, and where to keep it"
        )
    path = _jsonl(options.to, "--to")
    questions = None if options.questions is None else read_questions(Path(options.questions))
    found = read_answers(Path(options.imported), questions)
    if found.taken:
        provenance = {
            "author": options.author,
            "how": options.how or "",
            "date": options.date or datetime.now(UTC).date().isoformat(),
            "blind": options.blind,
        }
        extend(path, options.model, provenance, found.taken)
    refused = [{"line": number, "why": why} for number, why in found.refused]
    lines = [f"{len(found.taken)} answers taken into {path}, {len(refused)} refused"]
    lines += [f"{options.imported}, line {n}: {why}" for n, why in found.refused[:_MAX_SHOWN_REFUSALS]]
    if len(refused) > _MAX_SHOWN_REFUSALS:
        lines.append(f"and {len(refused) - _MAX_SHOWN_REFUSALS} more")
    if found.taken:
        lines.append(f"use: FORECAST_AUTOTUNE_LLM=recorded:{path}")
    data = {"path": str(path), "taken": len(found.taken), "refused": refused}
    output.emit(data, shown_text("\n".join(map(printable, lines)), lines=True))
    return 1 if refused or not found.taken else 0


def _jsonl(name: str, option: str) -> Path:
    path = Path(name).expanduser()
    if not path.name.endswith(SUFFIXES) or not path.absolute().parent.is_dir():
        raise UsageError(
            f"{option} {name}: the name must end in {' or '.join(SUFFIXES)}, in a directory that exists"
        )
    return path


def _known_answers(name: str | None) -> list[str]:
    return (
        []
        if name is None or not Path(name).expanduser().exists()
        else list(RecordedAnswers.read(name).answers)
    )
