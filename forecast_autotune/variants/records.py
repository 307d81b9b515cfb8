"""A variant: another source for the same kernel, with its origin and the checks it has passed.

A variant's source is the text of one self-contained module: imports of triton only, and `@triton.jit`
functions. The entry has the name of the base kernel and the base's runtime parameters, by the same names
in the same order; meta-parameters may be dropped, added or changed. Four more names may be defined:

- `CONFIGS`: a list of objects like `{"BLOCK": 128, "num_warps": 4, "num_stages": 3}`, in place of the base's
  list; parameters may stand under `kwargs`, too;
- `grid(meta, arguments)`, or `grid(meta, arguments, base)`: the launch grid from the meta-parameters (launch
  options such as `num_warps` among them), the call's arguments by name and the call's own grid, where the
  variant needs another one than the call gives. Parameters named `BASE_GRID_0`, `_1` and `_2` are filled with
  the call's own grid;
- `RESET_TO_ZERO`: names of arguments that must be zero before a launch; zeroing them is part of its time;
- `workspace(meta, arguments, base, grid)`: how many float32 and how many int32 elements one launch needs as memory of
  its own, from the same and the grid that is launched. Parameters named `WORKSPACE` and `COUNTERS` are filled with
  them: float32 elements of any value, and int32 elements that are zero. Making them is part of its time."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from enum import StrEnum

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError
from forecast_autotune.records import Config, Extra, digest
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import read_name

SCHEMA = 1


class Origin(StrEnum):
    """The author of a variant."""

    LLM = "llm"
    REWRITE = "mechanical"
    """A rewrite of `forecast_harness.authors.mechanical`, without a language model."""
    HAND = "hand"


@dataclass(frozen=True)
class Provenance(Record, label="provenance", lenient=True):
    """Where a variant comes from; empty texts mean: not known."""

    origin: Origin
    author: str = ""
    """Model and version, rewrite, or person."""
    parent: str = ""
    """Name of the variant from which it was derived; empty for the base kernel."""
    prompt_sha256: str = ""
    """Hash of the whole prompt, for variants of a language model."""
    note: str = ""
    """The change and its reason, in a sentence."""
    at: str = ""
    """UTC, ISO 8601."""


@dataclass(frozen=True)
class Check(Record, label="check", lenient=True):
    """One verification that a variant passed or failed."""

    device: str
    """Slug of the device it ran on; `interpreter` for Triton's interpreter."""
    signature: str
    """The conditions of the verification: see `signature_of`."""
    passed: bool
    detail: str = ""
    """Trials and harness version, or the first reason for a refusal."""
    at: str = ""


@dataclass(frozen=True)
class Variant(Record, tag="variant", schema=SCHEMA):
    """Another source of a kernel; see the module."""

    name: str = field(metadata=json_option(read=read_name))
    """Unique among a kernel's variants; build it with `Variant.of`."""
    kernel: str = field(metadata=json_option(read=read_name))
    """Name of the base kernel, and of the entry."""
    base_sha256: str = field(metadata=json_option(read=read_name))
    """`Kernel.source_sha256` of the base it may stand in for."""
    source: str = field(repr=False, metadata=json_option(read=read_name))
    provenance: Provenance
    configs: tuple[Config, ...] = ()
    """Its own configs; empty: the base's."""
    checks: tuple[Check, ...] = ()
    extra: Extra = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        kernel: str,
        base_sha256: str,
        source: str,
        provenance: Provenance,
        *,
        title: str = "",
        configs: tuple[Config, ...] = (),
    ) -> Variant:
        """Build a variant and its name: `title` and a digest of the source.

        Raises `RecordError` for a source that is not Python or does not define the entry.
        """
        try:
            tree = python_parser.parse_module(source)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise RecordError(f"the variant's source is not Python: {error}") from error
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        if kernel not in functions:
            raise RecordError(
                f"the variant must define {kernel!r} at its top level, as the base does; it defines "
                f"{', '.join(functions) or 'nothing'}"
            )
        words = "-".join((title or str(provenance.origin)).lower().split())
        name = f"{words}-{digest(ast.dump(tree))[:8]}"
        return cls(name, kernel, base_sha256, source, provenance, configs)
