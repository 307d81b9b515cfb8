"""The nouns of the sandbox: a lane's jobs, their limits and their results."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeAlias

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.records.codec import Record

FILES_FOLDER = "files"
"""The folder of a candidate's files, below the working directory of its cell."""


class Resource(ABC):
    """Held for the length of a `with`, and closed at its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End the resource, and free its memory and processes."""


class SandboxError(ForecastAutotuneError):
    """The sandbox was asked for something it cannot do; the message says what and what to do instead."""


class WireError(SandboxError, ValueError):
    """Bytes from the other side of a channel that break the format."""


class JobStatus(StrEnum):
    """The party that a result is due to."""

    OK = "ok"
    """The trusted code returned a value. Whether the candidate is correct is in that value."""
    CANDIDATE_ERROR = "candidate_error"
    """The candidate's fault, and the lane was shown to be healthy afterwards."""
    INFRA_ERROR = "infra_error"
    """Ours, the machine's or another tenant's: never a label."""
    SUSPICIOUS = "suspicious"
    """Something that honest code does not do: quarantine, never a label."""


class Fault(StrEnum):
    """The cause of a failure, one word each."""

    NONE = ""
    EXCEPTION = "exception"
    """The candidate raised."""
    CRASH = "crash"
    """A signal of its own making: SIGSEGV, SIGABRT, SIGFPE, SIGBUS, SIGILL."""
    EXIT = "exit"
    """The candidate left with a non-zero status before it had answered."""
    TIMEOUT = "timeout"
    CPU_TIME = "cpu_time"
    MEMORY = "memory"
    PROCESSES = "processes"
    """More processes and threads than allowed, by the watchdog's count."""
    STORAGE = "storage"
    """More bytes in scratch than allowed, by the watchdog's count."""
    EXIT_UNFINISHED = "exit_unfinished"
    """The candidate left with status 0 before it had answered, as if to pass for finished."""
    FORBIDDEN_CALL = "forbidden_call"
    """A system call that only an attack makes (ptrace, mount, bpf, ...)."""
    FORGED = "forged"
    """Bytes on the channel that are no answer to the question."""
    KILLED = "killed"
    """SIGKILL or SIGTERM from somebody, with no limit exceeded."""
    RAN_WHILE_STOPPED = "ran_while_stopped"
    """A process of it used a processor while all of them were stopped."""
    REJECTED = "rejected"
    """The trusted code judged so by raising `Suspicion`."""
    TRUSTED_ERROR = "trusted_error"
    """The trusted code itself raised, died or took too long."""
    SERVER_LOST = "server_lost"
    DEVICE_UNHEALTHY = "device_unhealthy"
    """The canary failed after this job, so nothing can be said about the candidate."""

    @property
    def status(self) -> JobStatus:
        """The party that it is due to."""
        if self is Fault.NONE:
            return JobStatus.OK
        if self in (Fault.TRUSTED_ERROR, Fault.SERVER_LOST, Fault.DEVICE_UNHEALTHY):
            return JobStatus.INFRA_ERROR
        if self in (
            Fault.EXIT_UNFINISHED,
            Fault.FORBIDDEN_CALL,
            Fault.FORGED,
            Fault.KILLED,
            Fault.RAN_WHILE_STOPPED,
            Fault.REJECTED,
        ):
            return JobStatus.SUSPICIOUS
        return JobStatus.CANDIDATE_ERROR


@dataclass(frozen=True, slots=True)
class ResourceLimits(Record, label="limits"):
    """Limits of one cell: the process that runs a candidate, with all its children.

    Raises `SandboxError` for a limit that is not positive.
    """

    wall_s: float = 60.0
    """From the cell's start to its end, the trusted code's pauses included."""
    cpu_s: float = 120.0
    """CPU seconds of each process."""
    memory_bytes: int = 4 << 30
    """On top of what the warm interpreter holds, all processes of the cell together, counted by a watchdog
    ten times a second. Without a device also a hard limit of each process's address space, of which a
    thread takes some 70 MB; CUDA reserves address space by the terabyte, so not with one."""
    processes: int = 256
    """Processes and threads of the cell."""
    output_bytes: int = 256 << 20
    """All files in scratch together."""
    answer_bytes: int = 256 << 20
    """The largest answer."""
    trusted_s: float = 60.0
    """Seconds of trusted code on top of `wall_s` for each cell; beyond it the job is an `infra_error`."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool) or not (value > 0 and math.isfinite(value)):
                raise SandboxError(f"limits.{f.name} must be a positive number, got {value!r}")


_ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}


def byte_size(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a contiguous tensor. Raises `WireError` for an unknown dtype or an impossible shape."""
    if dtype not in _ITEM_BYTES:
        raise WireError(f"array dtype must be one of {sorted(_ITEM_BYTES)}, got {dtype!r:.40}")
    if len(shape) > 32 or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in shape):
        raise WireError(f"array shape must be at most 32 sizes of at least 0, got {shape!r:.80}")
    return math.prod(shape) * _ITEM_BYTES[dtype]


BytesLike: TypeAlias = bytes | bytearray | memoryview
"""Bytes that are read and not written; hundreds of megabytes of them are not copied to say so."""


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A contiguous tensor as bytes: dtype by torch's name, shape, row-major little-endian data.

    Raises `WireError` for an unknown dtype, a negative size or a length that does not fit.
    """

    dtype: str
    shape: tuple[int, ...]
    data: BytesLike = field(repr=False)

    def __post_init__(self) -> None:
        expected = byte_size(self.dtype, self.shape)
        size = memoryview(self.data).nbytes
        if size != expected:
            raise WireError(f"{self.dtype}{list(self.shape)} takes {expected} bytes, got {size}")


TensorArrays = Mapping[str, TensorBytes]


@dataclass(frozen=True, slots=True)
class CellAnswer:
    """A JSON-able value and named arrays, from an entry function or from a cell."""

    value: Any = None
    arrays: TensorArrays = field(default_factory=lambda: MappingProxyType({}))
    seconds: float = 0.0
    """Wall seconds from question to answer, by the clock of the process that asked."""


@dataclass(frozen=True, slots=True)
class SandboxJob:
    """One thing for a lane to do. Raises `SandboxError` for a bad entry, payload or file name."""

    entry: str
    """`module:function` of trusted code. Called as `function(work: Work)`; see `JobContext`."""
    payload: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """JSON-able; only trusted code sees it."""
    files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The candidate's files, name -> text; plain names or relative paths below the cell's `files/`."""

    def __post_init__(self) -> None:
        check_entry(self.entry)
        try:
            json.dumps(dict(self.payload), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SandboxError(f"a job's payload must be JSON without NaN and infinity: {error}") from error
        for name in self.files:
            parts = name.split("/")
            if not all(p and p not in (".", "..") and "\0" not in p for p in parts) or len(name) > 200:
                raise SandboxError(f"a file's name must be a relative path without '..', got {name!r:.80}")


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write a job's files below a new folder, for whichever user reads them. It may be done hundreds of times."""
    folder.mkdir(parents=True)
    folders = {folder}
    for name, text in files.items():
        path = folder / name
        if path.parent not in folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            folders |= {p for p in path.parents if p.is_relative_to(folder)}
        path.write_text(text)
        path.chmod(0o444)
    for result in folders:
        result.chmod(0o755)  # whatever the umask: the candidate may be another user


def printable(text: str) -> str:
    """Text from a candidate without the control characters that could command a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def check_entry(entry: str) -> tuple[str, str]:
    """Split `module:function`. Raises `SandboxError` for anything else."""
    module, _, function = entry.partition(":")
    if not function.isidentifier() or not all(p.isidentifier() for p in module.split(".")):
        raise SandboxError(f"an entry must be 'module:function', got {entry!r:.80}")
    return module, function


@dataclass(frozen=True, slots=True)
class JobResult:
    """The end of a job."""

    status: JobStatus
    fault: Fault = Fault.NONE
    value: Any = None
    arrays: TensorArrays = field(default_factory=lambda: MappingProxyType({}))
    seconds: float = 0.0
    """Wall seconds of the whole job, by the parent's clock."""
    detail: str = ""
    """One sentence for a person: the exception, the signal, the limit."""
    canary: str = ""
    """`ok` or the canary's sentence, after a fault; empty if none ran."""

    @property
    def is_label(self) -> bool:
        """Whether a surrogate may learn from it."""
        return self.status in (JobStatus.OK, JobStatus.CANDIDATE_ERROR)


def describe_end(end: Mapping[str, Any], limits: ResourceLimits) -> str:
    """The end of a judge that sent no message, as a sentence, from its server's report."""
    if end["why"] == "overdue":
        return f"trusted code took more than trusted_s={limits.trusted_s:g} s on top of its cells' time"
    return f"the judge ended with {end['code']} before it had answered"


def tensor_to_bytes(tensor: Any) -> TensorBytes:
    """The bytes of a tensor of any strides and device, row-major. Raises `WireError` for other dtypes."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return TensorBytes(str(plain.dtype).removeprefix("torch."), tuple(plain.shape), raw)


def tensor_from_bytes(array: TensorBytes) -> Any:
    """A new contiguous tensor of the array's shape and dtype."""
    import torch

    dtype = getattr(torch, array.dtype)
    if not array.data:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).reshape(array.shape)
