"""`manifest.json` of a bundle: every file with its SHA-256, and what the bundle covers.

The bytes of a manifest follow from what it says, and what it says from the files beside it, but for compiled
kernels and sources. So whatever is changed in a bundle without making it anew is found.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from forecast_autotune.errors import RecordError, StoreError
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import MALFORMED, read_text
from forecast_autotune.store.files import MANIFEST
from forecast_autotune.store.log import decode

SCHEMA = 1
MAX_FILES = 100_000
_PART = re.compile(r"[A-Za-z0-9_+=][A-Za-z0-9_.+=-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class BundleError(StoreError):
    """A bundle that is refused whole: damaged, tampered with, incomplete, or not one at all."""


@dataclass(frozen=True)
class BundledFile(Record, label="file", unknown="refuse"):
    """One file of a bundle."""

    size: int
    """In bytes."""
    sha256: str = field(metadata=json_option(read=read_text))

    @classmethod
    def of(cls, data: bytes) -> BundledFile:
        """The entry of a file with these bytes."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Coverage(Record, label="coverage", unknown="refuse"):
    """What a bundle holds of one kernel on one device class."""

    device: str
    """Name of the device, such as `NVIDIA H200`."""
    slug: str
    """Name of the device class, as stores have it."""
    kernel: str
    toolchains: tuple[str, ...]
    """Versions that its problems were met under, each as `name version, ...`."""
    problems: int
    measurements: int
    decisions: int


def _read_files(value: object) -> dict[str, BundledFile]:
    if not isinstance(value, Mapping):
        raise RecordError(" must be an object")
    if len(value) > MAX_FILES:
        raise RecordError(f" must have at most {MAX_FILES} entries, not {len(value)}")
    found = {str(path): BundledFile.from_json(entry) for path, entry in value.items()}
    for path, entry in found.items():
        if not is_plain_path(path) or path == MANIFEST:
            raise RecordError(f" must name files in the bundle by plain names, not {path!r:.80}")
        if not _DIGEST.fullmatch(entry.sha256):
            raise RecordError(f"[{path!r}] must have a SHA-256 of 64 hexadecimal digits")
    return found


def is_plain_path(path: str) -> bool:
    """Whether a relative path is made of plain names, none of which begins with a dot."""
    parts = path.split("/")
    return 0 < len(parts) <= 8 and all(_PART.fullmatch(part) for part in parts)


@dataclass(frozen=True)
class Manifest(Record, tag="bundle", schema=SCHEMA, unknown="refuse", complete=True):
    """What a bundle consists of and what it is for."""

    release: str
    """Version of forecast-autotune that made it."""
    newest: str
    """Time of its newest row: bundles of equal rows are equal, byte by byte."""
    carries: tuple[str, ...]
    """Of `sources`, `compiled` and `graphs`: code, which is never there unless it was asked for."""
    covers: tuple[Coverage, ...]
    files: Mapping[str, BundledFile] = field(
        metadata=json_option(
            read=_read_files, write=lambda files: {path: files[path].to_json() for path in sorted(files)}
        )
    )
    digest: str
    """SHA-256 of all the rest: one name for the bundle and every byte in it."""

    def sealed(self) -> Manifest:
        """The same under the digest that belongs to it."""
        return replace(self, digest=self.computed_digest())

    def computed_digest(self) -> str:
        """The digest that belongs to what it says."""
        data = {name: value for name, value in self.to_json().items() if name != "digest"}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def to_bytes(self) -> bytes:
        """The one way it is written."""
        return (json.dumps(self.to_json(), indent=1) + "\n").encode("ascii")

    @classmethod
    def of_bytes(cls, data: bytes) -> Manifest:
        """Read it. Raises `BundleError` for anything that `to_bytes` does not write."""
        try:
            found = cls.from_json(decode(data))
        except MALFORMED as error:
            raise BundleError(f"{MANIFEST} is no manifest ({error})"[:300]) from error
        if found.digest != found.computed_digest():
            raise BundleError(f"{MANIFEST} is not what its digest {found.digest[:16]!r} was made of")
        if found.to_bytes() != data:
            raise BundleError(f"{MANIFEST} was edited: it has other bytes than were written")
        return found
