"""The whole computation for some rows at a time, so that what lies between its steps stays in the cache."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from forecast_harness.authors.torch.loops import insert_definition
from forecast_harness.authors.torch.protocol import InputFacts, TorchEdit
from forecast_harness.authors.torch.source_code import ParsedSource
from forecast_harness.authors.triton.analysis.source_unit import fresh_name, names, parse_statements

CHUNK_SIZES = (16, 128, 1024)
"""First guesses at rows per chunk; constants that are tuned afterwards."""


def chunk_rows(code: ParsedSource, facts: InputFacts) -> Iterator[TorchEdit]:
    """The entry calls what it was for `CHUNK` rows at a time and puts the results together.

    Which arguments have rows is told by the definition (`facts.rows`); without it nothing is done.
    """
    entry = code.entry_function
    if entry is None or not facts.rows or code.uses_autograd:
        return
    a = entry.args
    given = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    if a.vararg or a.kwarg or not set(facts.rows) <= set(given):
        return
    for rows in CHUNK_SIZES:
        draft = code.copy()
        taken = names(draft.tree) | {f.name for f in draft.functions}
        constant, inner = fresh_name("CHUNK", taken), fresh_name("part_of", taken)
        twin = draft.twin(entry)
        twin.name = inner
        passed = ", ".join(f"{n}={n}[rows]" if n in facts.rows else f"{n}={n}" for n in given)
        signature = ast.unparse(a)
        lines = [
            f"def {code.entry}({signature}):",
            f"    parts = [{inner}({passed}) for rows in "
            f"(slice(i, i + {constant}) for i in range(0, {facts.rows[0]}.shape[0], {constant}))]",
        ]
        if facts.outputs == 1:
            lines.append("    return torch.cat(parts)")
        elif facts.outputs > 1:
            lines.append("    return tuple(torch.cat(part) for part in zip(*parts))")
        # An empty first axis still needs a result of the right form: one call on nothing.
        lines[1] = lines[1].replace(
            f"{facts.rows[0]}.shape[0], {constant}))", f"max(1, {facts.rows[0]}.shape[0]), {constant}))"
        )
        draft.tree.body += parse_statements("\n".join(lines))
        insert_definition(draft.tree, f"{constant} = {rows}")
        yield TorchEdit(
            draft.text(), f"{rows} rows at a time, so that what lies between steps stays in the cache"
        )
