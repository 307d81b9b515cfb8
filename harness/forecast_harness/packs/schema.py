"""A problem pack: what is computed (`Definition`), at which sizes (`Workload`), by whom (`Solution`).

The schema follows flashinfer-bench (definition, workloads, solutions, traces): JSON for facts, Python
text for code, nothing else. A pack is plain data. Reading one never imports or runs any of its code; that
happens in a worker only, see `forecast_harness.verify`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records import digest
from forecast_harness.packs.expressions import evaluate
from forecast_harness.packs.specs import (
    AxisSpec,
    TensorSpec,
    ToleranceSpec,
    parse_choice,
    parse_fields,
    parse_size,
    parse_text,
)

PACK_SCHEMA = 1


class Language(StrEnum):
    """What a solution is written in."""

    TORCH = "torch"
    TRITON = "triton"
    CUDA = "cuda"


class PackFormat(StrEnum):
    """Whose convention reference and solutions of a pack follow."""

    OWN = "own"
    """`reference(**inputs)` and `run(**inputs)`, or with outputs as further arguments."""
    KERNELBENCH = "kernelbench"
    """`Model`, `ModelNew`, `get_inputs`, `get_init_inputs`."""
    GPUMODE = "gpumode"
    """`generate_input`, `ref_kernel`, `check_implementation`, `custom_kernel`."""
    CASE = "case"
    """A module with `CASE`: a Triton kernel with its own inputs, reference and tolerance; see `from_case`."""


@dataclass(frozen=True)
class Definition:
    """What is computed, without saying how."""

    name: str
    description: str = ""
    source: str = ""
    """Where the operation was published."""
    format: PackFormat = PackFormat.OWN
    axes: Mapping[str, AxisSpec] = field(default_factory=dict)
    inputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    outputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    destination: bool = False
    """Whether a solution writes into given outputs instead of returning new ones."""
    deterministic: bool = True
    """Whether equal inputs must give equal bits."""
    tolerance: ToleranceSpec = ToleranceSpec()
    flops: str = "0"
    """Useful floating-point operations: an axis expression."""
    bytes: str = ""
    """Bytes that must cross the memory bus, where that is not every input and output once."""

    @classmethod
    def from_json(cls, data: object) -> Definition:
        """Read a `definition.json`. Raises `RecordError` saying which field breaks which rule."""
        known = (
            "schema name description source format axes inputs outputs destination deterministic "
            "tolerance flops bytes"
        )
        found = parse_fields(data, "definition", known, "schema name")
        if found["schema"] != PACK_SCHEMA:
            raise RecordError(f"definition.schema must be {PACK_SCHEMA}, not {found['schema']!r:.20}")
        parts: dict[str, dict[str, Any]] = {}
        for name, kind in (("axes", AxisSpec), ("inputs", TensorSpec), ("outputs", TensorSpec)):
            listed = found.get(name, {})
            if not isinstance(listed, dict) or not all(n.isidentifier() for n in listed):
                raise RecordError(f"definition.{name} must map identifiers to objects")
            parts[name] = {n: kind.from_json(v, f"definition.{name}.{n}") for n, v in listed.items()}
        done = cls(
            parse_text(found, "name", "definition"),
            parse_text(found, "description", "definition", ""),
            parse_text(found, "source", "definition", ""),
            PackFormat(parse_choice(found.get("format", "own"), list(PackFormat), "definition.format")),
            **parts,
            destination=found.get("destination", False) is True,
            deterministic=found.get("deterministic", True) is True,
            tolerance=ToleranceSpec.from_json(found.get("tolerance", {}), "definition.tolerance"),
            flops=str(found.get("flops", "0")),
            bytes=str(found.get("bytes", "")),
        )
        done._check()
        return done

    def _check(self) -> None:
        if self.format is PackFormat.OWN and not (self.inputs and self.outputs):
            raise RecordError("definition needs at least one input and one output")
        ones = {n: (1 if a.value is None else a.value) for n, a in self.axes.items()}
        for tensor in (*self.inputs.values(), *self.outputs.values()):
            tensor.sizes(ones)
        evaluate(self.flops, ones)
        evaluate(self.bytes or "0", ones)
        evaluate(self.tolerance.reduction, ones)

    def to_json(self) -> dict[str, Any]:
        """The object that `from_json` reads."""
        return {
            "schema": PACK_SCHEMA,
            "name": self.name,
            "description": self.description,
            "source": self.source,
            "format": str(self.format),
            "axes": {n: a.to_json() for n, a in self.axes.items()},
            "inputs": {n: t.to_json() for n, t in self.inputs.items()},
            "outputs": {n: t.to_json() for n, t in self.outputs.items()},
            "destination": self.destination,
            "deterministic": self.deterministic,
            "tolerance": self.tolerance.to_json(),
            "flops": self.flops,
            "bytes": self.bytes,
        }


@dataclass(frozen=True)
class Workload:
    """One public size at which solutions are compared; `values` name arguments of foreign generators."""

    name: str
    axes: Mapping[str, int]
    large: bool = False
    """Only timed, and only on a device: too large to be drawn and checked often."""
    host: bool = False
    """Only timed, and only on a CPU: what takes milliseconds there and would be nothing to a device."""

    @classmethod
    def from_json(cls, data: object, definition: Definition) -> Workload:
        """Read `{"name": "...", "axes": {"M": 128}}`; an own-format pack needs every variable axis."""
        found = parse_fields(data, "workload", "name axes large host", "name axes")
        where = {n: found.get(n, False) is True for n in ("large", "host")}
        name = parse_text(found, "name", "workload")
        if not isinstance(found["axes"], dict):
            raise RecordError(f"workload {name}: axes must be an object")
        if definition.format is not PackFormat.OWN:
            return cls(name, dict(found["axes"]), **where)
        wanted = {n for n, a in definition.axes.items() if a.value is None}
        if set(found["axes"]) != wanted:
            raise RecordError(f"workload {name} gives axes {sorted(found['axes'])}, not {sorted(wanted)}")
        axes = {n: parse_size(v, f"workload {name}: {n}") for n, v in found["axes"].items()}
        return cls(name, axes, **where)

    def to_json(self) -> dict[str, Any]:
        """The object that `from_json` reads."""
        where = {n: True for n in ("large", "host") if getattr(self, n)}
        return {"name": self.name, "axes": dict(self.axes), **where}


@dataclass(frozen=True)
class Solution:
    """A candidate's source. Immutable; its identity is the hash of its text and language."""

    name: str
    language: Language
    source: str
    entry: str = "run"
    """The function (KernelBench: the class) that is called."""
    author: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    """What `source` imports beside installed packages: relative path -> text."""

    @property
    def id(self) -> str:
        """A stable name of what would be executed."""
        return digest(str(self.language), self.entry, self.source, dict(self.files))

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return {
            "name": self.name,
            "language": str(self.language),
            "source": self.source,
            "entry": self.entry,
            "author": self.author,
            "files": dict(self.files),
        }

    @classmethod
    def from_json(cls, data: object) -> Solution:
        """Read what `to_json` wrote. Raises `RecordError`."""
        known = "name language source entry author files"
        found = parse_fields(data, "solution", known, "name language source")
        language = Language(parse_choice(found["language"], list(Language), "solution.language"))
        texts = {n: parse_text(found, n, "solution", d) for n, d in (("entry", "run"), ("author", ""))}
        files = found.get("files", {})
        if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
            raise RecordError("solution.files must map paths to texts")
        source = parse_text(found, "source", "solution")
        return cls(parse_text(found, "name", "solution"), language, source, **texts, files=files)


@dataclass(frozen=True)
class Pack:
    """A definition with its reference code, public workloads and known solutions."""

    definition: Definition
    reference: str
    """Python text: `reference(**inputs)` and optionally `make(axes, draw)`; or a foreign module."""
    workloads: tuple[Workload, ...]
    solutions: tuple[Solution, ...] = ()

    @property
    def id(self) -> str:
        """A stable name of what is asked: equal packs give comparable traces."""
        return digest(self.definition.to_json(), self.reference, [w.to_json() for w in self.workloads])

    @property
    def checked_workloads(self) -> tuple[Workload, ...]:
        """Those at which results are checked many times."""
        return tuple(w for w in self.workloads if not w.large and not w.host)

    def timed_workloads(self, device: str, *languages: Language) -> tuple[Workload, ...]:
        """Those at which solutions in these languages are compared: those meant for the device, if any.

        On a CPU Triton is interpreted, which takes minutes at any size that would say something; and what
        one solution cannot be timed at, none is that it is compared with.
        """
        if device == "cpu" and Language.TRITON in languages:
            return self.checked_workloads
        meant = tuple(w for w in self.workloads if (w.host if device == "cpu" else w.large))
        return meant or self.checked_workloads

    def solution(self, name: str) -> Solution:
        """The solution of this name. Raises `RecordError` listing those there are."""
        for one in self.solutions:
            if one.name == name:
                return one
        names = [s.name for s in self.solutions]
        raise RecordError(f"pack {self.definition.name} has no solution {name!r}; it has {names}")

    def with_(self, **changes: Any) -> Pack:
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Everything but the solutions, for a worker."""
        return {
            "definition": self.definition.to_json(),
            "reference": self.reference,
            "workloads": [w.to_json() for w in self.workloads],
        }

    @classmethod
    def from_json(cls, data: object) -> Pack:
        """Read what `to_json` wrote. Raises `RecordError`."""
        found = parse_fields(data, "pack", "definition reference workloads", "definition reference workloads")
        definition = Definition.from_json(found["definition"])
        works = tuple(Workload.from_json(w, definition) for w in found["workloads"])
        if all(w.large or w.host for w in works):
            raise RecordError(f"pack {definition.name} has only workloads that are large or for the host")
        return cls(definition, parse_text(found, "reference", "pack"), works)


def parse_json(text: str, what: str) -> Any:
    """JSON text -> object, without NaN. Raises `RecordError` naming the file."""
    from forecast_autotune.records.json_fields import decode_json

    try:
        return decode_json(text)
    except (ValueError, json.JSONDecodeError) as error:
        raise RecordError(f"{what} is not JSON: {error}") from error
