"""The unit of tuning: `Problem`, a kernel with its arguments on a device."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import (
    SCHEMA,
    Extra,
    Scalar,
    digest,
    read_name,
    read_signed_integers,
    read_text,
    to_scalar,
)

FACTS = "facts"
"""A field of a problem line: `{"version": ..., "units": [[assignment, grid, {fact: value}], ...]}`."""
OPTIONS = "options"
"""A field of a problem line: launch options that the call itself gave, `{name: value}`; not there if it gave none."""


@dataclass(frozen=True)
class Device(Record, label="device", lenient=True):
    """One model of accelerator. Two cards of the same model are the same device.

    Sizes are bytes; `arch` is the backend's target (`"90"` for sm_90); zero means unknown.
    """

    name: str = field(metadata=json_option(read=read_text))
    backend: str = "cuda"
    arch: str = ""
    multiprocessors: int = 0
    shared_memory_bytes: int = 0
    """The most shared memory one program may use."""
    registers_per_multiprocessor: int = 0
    threads_per_multiprocessor: int = 0
    l2_bytes: int = 0
    memory_bytes: int = 0
    warp_size: int = 32
    extra: Extra = field(default_factory=dict, compare=False, repr=False)

    @property
    def slug(self) -> str:
        """A directory name for this device class: model name and architecture."""
        keep = "".join(c if c.isalnum() else "-" for c in f"{self.name}-{self.backend}{self.arch}")
        return "-".join(part for part in keep.split("-") if part).lower() or "unknown"


@dataclass(frozen=True)
class Kernel(Record, label="kernel", lenient=True):
    """A tunable function. `source_sha256` covers the source *and* everything it calls."""

    name: str = field(metadata=json_option(read=read_text))
    language: str = "triton"
    source: str = field(default="", repr=False)
    source_sha256: str = ""
    extra: Extra = field(default_factory=dict, compare=False, repr=False)


ADDRESS = "address"
"""In `Argument.extra`: the bytes, a power of two and 16 at least, that the address of a dot's operand is a multiple of,
where they are fewer than a line's: other configs are the fastest then."""


def _is_tensor(argument: Argument) -> bool:
    return argument.kind == "tensor"


def _has_value(argument: Argument) -> bool:
    return argument.kind not in ("tensor", "none")


@dataclass(frozen=True)
class Argument(Record, label="argument", lenient=True):
    """One argument of a kernel call, as much of it as can matter for speed.

    `kind` is `tensor`, `scalar`, `constexpr`, `none`, `tuple` (an empty one: members are arguments of their own, named
    `x.0` or `x.field`) or `object` (known by its type alone); shapes and strides are in elements.
    """

    name: str
    kind: str
    dtype: str = field(default="", metadata=json_option(when=attrgetter("dtype")))
    shape: tuple[int, ...] = field(default=(), metadata=json_option(when=_is_tensor))
    stride: tuple[int, ...] = field(
        default=(), metadata=json_option(read=read_signed_integers, when=_is_tensor)
    )
    aligned: bool = field(default=False, metadata=json_option(when=_is_tensor))
    """Tensors: the data pointer is a multiple of 16 bytes."""
    value: Scalar = field(default=None, metadata=json_option(read=to_scalar, when=_has_value))
    extra: Extra = field(default_factory=dict, compare=False, repr=False)

    @property
    def layout(self) -> tuple[str, bool, object]:
        """The dtype, and as much of the address as matters for speed."""
        return self.dtype, self.aligned, self.extra.get(ADDRESS)

    def elements_ahead(self, itemsize: int) -> int:
        """Elements of so many bytes between the start of a line of the cache and such a tensor."""
        return int(self.extra.get(ADDRESS, 0)) // itemsize if self.aligned else 1


def _read_toolchain(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping):
        raise RecordError(f" must be an object, not {value!r:.60}")
    return tuple(sorted((str(k), str(v)) for k, v in value.items()))


@dataclass(frozen=True)
class Problem(
    Record,
    tag="problem",
    schema=SCHEMA,
    lenient=True,
    order=("id", "kernel", "arguments", "grid", "key", "ttir", "device", "toolchain"),
):
    """Kernel x arguments x key x device x toolchain: the unit of one decision.

    `id` is the name under which measurements and decisions are filed. Build one with `Problem.of`,
    which derives the id from what may change the answer and from nothing else.
    """

    id: str = field(metadata=json_option(read=read_name))
    kernel: Kernel
    arguments: tuple[Argument, ...] = field(metadata=json_option(default=()))
    device: Device
    key: tuple[str, ...] = ()
    grid: tuple[int, ...] | None = None
    toolchain: tuple[tuple[str, str], ...] = field(
        default=(), metadata=json_option(read=_read_toolchain, write=dict)
    )
    ttir: Mapping[str, str] = field(
        default_factory=dict,
        compare=False,
        repr=False,
        metadata=json_option(write=lambda ttir: dict(ttir) or None),
    )
    """TTIR text by constexpr assignment (`features.ttir.extraction.assignment_key`); empty when not traced."""
    extra: Extra = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        kernel: Kernel,
        arguments: Sequence[Argument],
        device: Device,
        *,
        key: Sequence[str] = (),
        grid: Sequence[int] | None = None,
        toolchain: Mapping[str, str] | None = None,
        identity: Sequence[object] | None = None,
        extra: Extra | None = None,
    ) -> Problem:
        """Build a problem and its id.

        `identity` replaces the arguments in the id, for callers that bucket shapes; by default
        every argument counts exactly. The toolchain's `driver` never counts: its updates do not
        change generated code.
        """
        tools = tuple(sorted((toolchain or {}).items()))
        inputs = [a.to_json() for a in arguments] if identity is None else list(identity)
        compiled_by = [pair for pair in tools if pair[0] != "driver"]
        name = digest(kernel.name, kernel.source_sha256, inputs, list(key), device.slug, compiled_by)
        where = None if grid is None else tuple(int(n) for n in grid)
        return cls(name, kernel, tuple(arguments), device, tuple(key), where, tools, {}, extra or {})

    def joined(self, later: Problem) -> Problem:
        """This record with the TTIR and facts of a later record of the problem; its own where both have some.

        Runs that add configs to a table trace the new ones alone. Facts of different versions are not mixed: then the
        later record's stand.
        """
        extra = dict(self.extra)
        if isinstance(theirs := later.extra.get(FACTS), Mapping):
            extra[FACTS] = _joined_facts(extra.get(FACTS), theirs)
        return replace(self, ttir={**later.ttir, **self.ttir}, extra=extra)


def _joined_facts(own: Any, theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The units of both, `own` first; see `features.traced_texts` for their meaning."""
    if not isinstance(own, Mapping) or own.get("version") != theirs.get("version"):
        return theirs
    units = {**_units(theirs.get("units")), **_units(own.get("units"))}
    return {"version": own.get("version"), "units": list(units.values())}


def _units(units: Any) -> dict[str, Any]:
    """Units by assignment and grid, without malformed ones: people edit and merge stores."""
    whole = [u for u in units if isinstance(u, list) and len(u) == 3] if isinstance(units, list) else []
    return {json.dumps(unit[:2]): unit for unit in whole}
