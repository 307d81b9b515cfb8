"""Tuner contexts: which decision of which workload it was, and configs as JSON that any process compares alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ContextId = str
"""JSON of [workload, kernel, [key values and dtypes as text]]: the same whoever tunes."""

ENVIRONMENT = ".environment.json"
"""How the file beside an arm's ends that says where and with what it ran."""


def context_id(workload: str, tuner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ContextId:
    """The context of one call of a tuner, from what `triton.autotune` makes its key of."""
    named = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    key = [str(named[name]) for name in tuner.keys if name in named]
    key += [str(v.dtype) for k, v in named.items() if k in tuner.arg_names and hasattr(v, "dtype")]
    return json.dumps([workload, tuner.base_fn.__name__, key])


def config_record(config: Any) -> dict[str, Any]:
    """A `triton.Config` as JSON: meta-parameters and launch options, those that are not set left out."""
    return {k: v for k, v in sorted(config.all_kwargs().items()) if v is not None}


def config_key(record: Mapping[str, Any]) -> str:
    """A config's record as text, for comparisons between processes."""
    return json.dumps(record, sort_keys=True, default=str)


def pruned_configs(tuner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The configs that the tuner would try for a call."""
    before = getattr(tuner, "nargs", None)
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    try:
        return list(tuner.prune_configs(dict(kwargs)))
    finally:
        tuner.nargs = before


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file of JSON lines; a last line that was cut short is passed over."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def by_context(rows: Iterable[Mapping[str, Any]]) -> dict[ContextId, Mapping[str, Any]]:
    """Rows of decisions by their context, the first of each."""
    result: dict[ContextId, Mapping[str, Any]] = {}
    for row in rows:
        if "id" in row:
            result.setdefault(str(row["id"]), row)
    return result
