"""The nouns of the project: frozen, typed, and JSON both ways.

Every record knows how to become one JSON object (`to_json`) and how to be read back (`from_json`).
Fields that a newer version wrote and this one does not know are kept in `extra` and written out
again, so a table survives a round trip through an older release. Nothing here imports numpy, torch
or triton: the records must be cheap to load and safe to read on any machine.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from forecast_autotune.errors import RecordError
from forecast_autotune.fields import listed, rest, signed, whole, wholes

SCHEMA = 1
"""Version written into every `problem` and `measurement` line of a table."""

Scalar: TypeAlias = int | float | bool | str | None
"""A value that JSON, a config and a hash all agree on."""

Extra: TypeAlias = Mapping[str, Any]


class Outcome(StrEnum):
    """What became of one candidate that was tried for real. Only `OK` has a time."""

    OK = "ok"
    OUT_OF_RESOURCES = "out_of_resources"
    """More shared memory, registers or threads than the device has."""
    COMPILE_ERROR = "compile_error"
    RUNTIME_ERROR = "runtime_error"
    INCORRECT = "incorrect"
    TIMEOUT = "timeout"
    INFRASTRUCTURE = "infrastructure"
    """The harness failed, not the candidate: never a label, never a reason to skip it later."""

    @property
    def is_label(self) -> bool:
        """Whether a surrogate may learn from it and a later process may rely on it."""
        return self is not Outcome.INFRASTRUCTURE


class Evidence(StrEnum):
    """What a decision rests on."""

    MEASURED = "measured"
    """The chosen candidate was timed for this decision."""
    FORECAST = "forecast"
    """The chosen candidate was never timed; the surrogate chose it."""
    STORED = "stored"
    """An earlier decision or earlier measurements were enough; nothing was timed now."""
    ONLY = "only"
    """There was one candidate, so there was nothing to decide."""


_PLAIN = (bool, int, str)


def plain(value: object) -> Scalar:
    """Reduce a meta-parameter's value to something JSON can hold; other types become their `str`."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)


def digest(*parts: object) -> str:
    """A stable 24-hex-digit name for JSON-able parts; equal parts give equal names everywhere."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class Config:
    """Launch and meta-parameters of one candidate, the JSON-able twin of `triton.Config`.

    `kwargs` holds sorted (name, value) pairs, so equal configs are equal keys whatever the order in
    which a user spelled them.
    """

    kwargs: tuple[tuple[str, Scalar], ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    maxnreg: int | None = None
    ir_override: str | None = None

    @classmethod
    def of(
        cls,
        kwargs: Mapping[str, object],
        *,
        num_warps: int = 4,
        num_stages: int = 3,
        num_ctas: int = 1,
        maxnreg: int | None = None,
        ir_override: str | None = None,
    ) -> Config:
        """Build a config from a mapping of meta-parameters (any order, any value type)."""
        pairs = tuple(sorted([(str(name), plain(value)) for name, value in kwargs.items()]))
        return cls(pairs, num_warps, num_stages, num_ctas, maxnreg, ir_override)

    def parameters(self) -> dict[str, Scalar]:
        """Every meta-parameter and launch option by name, as `triton.Config.all_kwargs` gives them."""
        launch: dict[str, Scalar] = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "num_ctas": self.num_ctas,
            "maxnreg": self.maxnreg,
            "ir_override": self.ir_override,
        }
        return {**dict(self.kwargs), **{k: v for k, v in launch.items() if v is not None}}

    def to_json(self) -> dict[str, Any]:
        """The `config` object of a measurement line."""
        data: dict[str, Any] = {
            "kwargs": dict(self.kwargs),
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "num_ctas": self.num_ctas,
            "maxnreg": self.maxnreg,
        }
        if self.ir_override is not None:
            data["ir_override"] = self.ir_override
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Config:
        """Read a `config` object; missing launch options take Triton's defaults. Raises `RecordError`."""
        kwargs, override = data.get("kwargs", {}), data.get("ir_override")
        if not isinstance(kwargs, Mapping):
            raise RecordError(f"config.kwargs must be an object, not {type(kwargs).__name__}")
        if not isinstance(override, str | None):
            raise RecordError(f"config.ir_override must be a text or null, not {override!r:.40}")
        names = ("num_warps", "num_stages", "num_ctas", "maxnreg")
        options = {k: whole(data[k], f"config.{k}") for k in names if data.get(k) is not None}
        return cls.of(kwargs, ir_override=override, **options)

    def __str__(self) -> str:
        shown = [f"{name}={value}" for name, value in self.kwargs]
        shown += [f"warps={self.num_warps}", f"stages={self.num_stages}"]
        if self.num_ctas != 1:
            shown.append(f"ctas={self.num_ctas}")
        if self.maxnreg is not None:
            shown.append(f"maxnreg={self.maxnreg}")
        return " ".join(shown)


HOOKED = "base hook "
"""How the variant of a candidate is named whose config differs from another in its `pre_hook` alone."""


def of_base(variant: str) -> bool:
    """Whether candidates of this variant run the user's own source; configs that differ in hooks alone do."""
    return variant == "base" or variant.startswith(HOOKED)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A (variant, config) pair not yet judged. `variant` is `base` for the user's own source."""

    config: Config
    variant: str = "base"

    def __str__(self) -> str:
        return str(self.config) if self.variant == "base" else f"{self.variant}: {self.config}"

    @property
    def of_base(self) -> bool:
        """Whether it runs the user's own source; see `of_base`."""
        return of_base(self.variant)

    @property
    def id(self) -> str:
        """A stable name, used where a candidate is a JSON key."""
        return digest(self.variant, self.config.to_json())


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
            known[name] = str(value) if name in _DEVICE_TEXTS else whole(value, f"device.{name}")
        return cls(**known, extra=rest(data, _DEVICE_FIELDS))


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
        return cls(**values, extra=rest(data, known))


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
                shape=wholes(data.get("shape"), "shape"),
                stride=signed(data.get("stride"), "stride"),
                aligned=bool(data.get("aligned", False)),
                value=plain(data.get("value")),
                extra=rest(data, known),
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
            arguments=tuple(Argument.from_json(a) for a in listed(data.get("arguments"), "arguments")),
            device=Device.from_json(data.get("device", {})),
            key=tuple(str(k) for k in listed(data.get("key"), "key")),
            grid=None if grid is None else wholes(grid, "grid"),
            toolchain=tuple(sorted((str(k), str(v)) for k, v in tools.items())),
            ttir={str(k): str(v) for k, v in ttir.items()},
            extra=rest(data, known),
        )


def check_line(data: object, kind: str) -> None:
    """Refuse a table line that is not an object of this `type` and a schema we can read."""
    if not isinstance(data, Mapping) or data.get("type") != kind:
        raise RecordError(f'expected a line of type "{kind}", got {data!r:.80}')
    schema = data.get("schema", SCHEMA)
    if not isinstance(schema, int) or schema > SCHEMA:
        raise RecordError(
            f"line has schema {schema!r}, this release reads up to {SCHEMA}: upgrade forecast-autotune"
        )
