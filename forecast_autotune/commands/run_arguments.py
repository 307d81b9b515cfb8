"""`run`'s command line: where its own options end and those of the program begin."""

from __future__ import annotations

from collections.abc import Sequence

_VALUES = ("--mode", "--store", "--tolerance", "--risk", "--max-measurements")


def split_run(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a `run` command line before the program's own arguments: (ours, theirs).

    The first word that is neither an option of ours nor an option's value is SCRIPT; `-m MODULE` ends
    our part likewise. argparse alone would take `run script.py --json` for our `--json`.
    """
    position = 1
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            ours, rest = list(arguments[:position]), list(arguments[position + 1 :])
            return [*ours, *rest[:1]], rest[1:]
        if word == "-m":
            end = position + 2
        elif word in _VALUES:
            position += 2
            continue
        elif word.startswith("-") and word != "-" and not word.startswith("-m"):
            position += 1
            continue
        else:
            end = position + 1
        return list(arguments[:end]), list(arguments[end:])
    return list(arguments), []
