"""What is tuned: `Problem`, a kernel with its arguments on a device."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records.base import SCHEMA, Extra, Scalar, check_line, digest, to_scalar
from forecast_autotune.records.json_fields import (
    read_integer,
    read_integers,
    read_list,
    read_signed_integers,
    unknown_fields,
)

FACTS = "facts"
"""Of a problem line: `{"version": ..., "units": [[assignment, grid, {fact: value}], ...]}`."""


@dataclass(frozen=True)
class Device:
    """One model of accelerator. Two cards of the same model are the same device.

    Sizes are bytes; `arch` is the backend's target (`"90"` for sm_90); zero means unknown.
    """

    name: str
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

    def to_json(self) -> dict[str, Any]:
        """The `device` object of a problem line."""
        names = _DEVICE_FIELDS
        return {**dict(self.extra), **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Device:
        """Read a `device` object; only `name` is required. Raises `RecordError`."""
        if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
            raise RecordError(f"device must be an object with a name, not {data!r:.80}")
        known = {name: data[name] for name in _DEVICE_FIELDS if data.get(name) is not None}
        for name, value in known.items():
            known[name] = str(value) if name in _DEVICE_TEXTS else read_integer(value, f"device.{name}")
        return cls(**known, extra=unknown_fields(data, _DEVICE_FIELDS))


_DEVICE_FIELDS = (
    "name",
    "backend",
    "arch",
    "multiprocessors",
    "shared_memory_bytes",
    "registers_per_multiprocessor",
    "threads_per_multiprocessor",
    "l2_bytes",
    "memory_bytes",
    "warp_size",
)
_DEVICE_TEXTS = _DEVICE_FIELDS[:3]


@dataclass(frozen=True)
class Kernel:
    """A tunable function. `source_sha256` covers the source *and* everything it calls."""

    name: str
    language: str = "triton"
    source: str = field(default="", repr=False)
    source_sha256: str = ""
    extra: Extra = field(default_factory=dict, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        """The `kernel` object of a problem line."""
        return {
            **dict(self.extra),
            "name": self.name,
            "language": self.language,
            "source": self.source,
            "source_sha256": self.source_sha256,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Kernel:
        """Read a `kernel` object; only `name` is required."""
        if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
            raise RecordError(f"kernel must be an object with a name, not {data!r:.80}")
        known = ("name", "language", "source", "source_sha256")
        values = {name: str(data[name]) for name in known if data.get(name) is not None}
        return cls(**values, extra=unknown_fields(data, known))


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel call, as much of it as can matter for speed.

    `kind` is `tensor`, `scalar`, `constexpr` or `none`; shapes and strides are in elements.
    """

    name: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    aligned: bool = False
    """Tensors: the data pointer is a multiple of 16 bytes."""
    value: Scalar = None
    extra: Extra = field(default_factory=dict, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        """One entry of a problem line's `arguments`."""
        data: dict[str, Any] = {**dict(self.extra), "name": self.name, "kind": self.kind}
        if self.dtype:
            data["dtype"] = self.dtype
        if self.kind == "tensor":
            data |= {"shape": list(self.shape), "stride": list(self.stride), "aligned": self.aligned}
        elif self.kind != "none":
            data["value"] = self.value
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Argument:
        """Read one entry of `arguments`; `name` and `kind` are required."""
        known = ("name", "kind", "dtype", "shape", "stride", "aligned", "value")
        try:
            return cls(
                name=str(data["name"]),
                kind=str(data["kind"]),
                dtype=str(data.get("dtype") or ""),
                shape=read_integers(data.get("shape"), "shape"),
                stride=read_signed_integers(data.get("stride"), "stride"),
                aligned=bool(data.get("aligned", False)),
                value=to_scalar(data.get("value")),
                extra=unknown_fields(data, known),
            )
        except RecordError as error:
            raise RecordError(f"argument {data['name']!r:.40}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"argument needs a name and a kind: {data!r:.120} ({error})") from error


@dataclass(frozen=True)
class Problem:
    """Kernel x arguments x key x device x toolchain: the unit of one decision.

    `id` is the name under which measurements and decisions are filed. Build one with `Problem.of`,
    which derives the id from what may change the answer and from nothing else.
    """

    id: str
    kernel: Kernel
    arguments: tuple[Argument, ...]
    device: Device
    key: tuple[str, ...] = ()
    grid: tuple[int, ...] | None = None
    toolchain: tuple[tuple[str, str], ...] = ()
    ttir: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """TTIR text by constexpr assignment (`features.ttir.assignment_key`); empty when not traced."""
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
    ) -> Problem:
        """Build a problem and its id.

        `identity` replaces the arguments in the id, for callers that bucket shapes; by default
        every argument counts exactly. The toolchain's `driver` never counts: it changes under a
        running system and does not change generated code.
        """
        tools = tuple(sorted((toolchain or {}).items()))
        shown = [a.to_json() for a in arguments] if identity is None else list(identity)
        compiled_by = [pair for pair in tools if pair[0] != "driver"]
        name = digest(kernel.name, kernel.source_sha256, shown, list(key), device.slug, compiled_by)
        where = None if grid is None else tuple(int(n) for n in grid)
        return cls(name, kernel, tuple(arguments), device, tuple(key), where, tools)

    def joined(self, later: Problem) -> Problem:
        """This record with the TTIR and facts of a later record of the problem; its own where both have some.

        Runs that add configs to a table trace those alone. Facts that another release read are not mixed
        with these: then the later record's stand.
        """
        extra = dict(self.extra)
        if isinstance(theirs := later.extra.get(FACTS), Mapping):
            extra[FACTS] = _joined_facts(extra.get(FACTS), theirs)
        return replace(self, ttir={**later.ttir, **self.ttir}, extra=extra)

    def to_json(self) -> dict[str, Any]:
        """The `problem` line of a table."""
        return {
            **dict(self.extra),
            "type": "problem",
            "schema": SCHEMA,
            "id": self.id,
            "kernel": self.kernel.to_json(),
            "arguments": [a.to_json() for a in self.arguments],
            "grid": None if self.grid is None else list(self.grid),
            "key": list(self.key),
            "ttir": dict(self.ttir) or None,
            "device": self.device.to_json(),
            "toolchain": dict(self.toolchain),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Problem:
        """Read a `problem` line. Raises `RecordError` naming the field that is wrong."""
        check_line(data, "problem")
        known = ("type", "schema", "id", "kernel", "arguments", "grid", "key", "ttir", "device", "toolchain")
        if not isinstance(data.get("id"), str) or not data["id"]:
            raise RecordError("a problem line needs a non-empty string id")
        ttir, grid, tools = data.get("ttir") or {}, data.get("grid"), data.get("toolchain") or {}
        if not isinstance(ttir, Mapping) or not isinstance(tools, Mapping):
            raise RecordError(f"problem {data['id']}: ttir and toolchain must be objects or null")
        return cls(
            id=data["id"],
            kernel=Kernel.from_json(data.get("kernel", {})),
            arguments=tuple(Argument.from_json(a) for a in read_list(data.get("arguments"), "arguments")),
            device=Device.from_json(data.get("device", {})),
            key=tuple(str(k) for k in read_list(data.get("key"), "key")),
            grid=None if grid is None else read_integers(grid, "grid"),
            toolchain=tuple(sorted((str(k), str(v)) for k, v in tools.items())),
            ttir={str(k): str(v) for k, v in ttir.items()},
            extra=unknown_fields(data, known),
        )


def _joined_facts(own: Any, theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The units of both, the first one's where both have some; see `features.kept` for what they mean."""
    if not isinstance(own, Mapping) or own.get("version") != theirs.get("version"):
        return theirs
    units = {**_units(theirs.get("units")), **_units(own.get("units"))}
    return {"version": own.get("version"), "units": list(units.values())}


def _units(listed: Any) -> dict[str, Any]:
    """Units by assignment and grid; stores are edited and merged by people, so others are passed over."""
    whole = [u for u in listed if isinstance(u, list) and len(u) == 3] if isinstance(listed, list) else []
    return {json.dumps(unit[:2]): unit for unit in whole}
