"""Installed advice: this package's own, and that of libraries on their kernels, in their own wheels.

One read-only layer below the user's store. A layer is a file of JSON Lines, an `Advice` record a line, with two fields
more: `normal_sha256`, the digest of the kernel's normal form, and `place`, see `place_of`. A library names its file by
an entry point of `GROUP`, whose name is the library's import package and whose value is the file's place below it
with dots and without its suffix: nothing is imported, and the file counts for kernels of that package alone. Only
the lines of a file that hold the requested digest or place are parsed.
"""

from __future__ import annotations

import sys
import sysconfig
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forecast_autotune.file_access import read_regular
from forecast_autotune.records.json_fields import MALFORMED
from forecast_autotune.store.files import StoreWarning

if TYPE_CHECKING:
    from forecast_autotune.llm.advice.record import Advice
    from forecast_autotune.records import Kernel

GROUP = "forecast_autotune.advice"
SUFFIX = ".jsonl"
_FOLDER = Path(__file__).parents[1] / "assets" / "advice"
MAX_BYTES = 8 * 1024 * 1024
"""The most bytes of a layer: five thousand records."""
_MAX_LINES = 16
"""Lines that are parsed in search of one record: a file that repeats itself costs no more."""


def advice_for(
    store: Any,
    kernel: Kernel,
    parameters: Collection[str] = (),
    normal_form: Callable[[], str] | None = None,
) -> Advice | None:
    """The advice on a kernel: what the store has, else what is installed.

    Args:
        store: Any object with a method `advice`.
        kernel: The record; `extra["module"]` says whose it is.
        parameters: Names of the meta-parameters of its configs.
        normal_form: Gives the digest of its normal form; called only where a layer knows a kernel of that name.
    """
    if not kernel.source_sha256:
        return None
    own: Advice | None = store.advice(kernel.source_sha256)
    return own or installed_advice(kernel, parameters, normal_form)


def installed_advice(
    kernel: Kernel, parameters: Collection[str] = (), normal_form: Callable[[], str] | None = None
) -> Advice | None:
    """The installed advice on a kernel by its source, else its normal form, else its place; noted in `extra`.

    A layer that cannot be read, and a record that is none, are passed over with one warning.
    """
    package = str(kernel.extra.get("module", "")).partition(".")[0]
    place = place_of(package, kernel.name, parameters)
    key = (kernel.source_sha256, place, normal_form is None)
    if key not in _results:
        _results[key] = _search(kernel, package, place, normal_form)
    return _results[key]


_results: dict[tuple[str, str, bool], Advice | None] = {}
"""By source, place, and whether no normal form is known: a kernel has many keys."""


def place_of(package: str, kernel: str, parameters: Collection[str]) -> str:
    """The package, the function and the meta-parameters of a kernel; empty where one of them is not known."""
    return f"{package}.{kernel}({','.join(sorted(parameters))})" if package and kernel and parameters else ""


def _search(kernel: Kernel, package: str, place: str, normal_form: Callable[[], str] | None) -> Advice | None:
    name = f'"{kernel.name}"'.encode()
    layers = [(path, data) for path in layer_paths(package) if name in (data := _read(path))]
    if not layers:
        return None
    from forecast_autotune.llm.advice.record import MATCH, SAME_FORM, SAME_PLACE, SAME_SOURCE

    for match, field, source in (
        (SAME_SOURCE, "source_sha256", kernel.source_sha256),
        (SAME_FORM, "normal_sha256", normal_form or ""),  # takes some 20 ms: not where the source is known
        (SAME_PLACE, "place", place),
    ):
        value = source if isinstance(source, str) else source()
        for path, data in layers if value else ():
            for advice in _records_with(path, data, value):
                about = {**advice.extra, "source_sha256": advice.source_sha256}
                if about.get(field) == value:
                    extra = {**advice.extra, MATCH: match}
                    return replace(advice, source_sha256=kernel.source_sha256, extra=extra)
    return None


def layer_paths(package: str = "") -> list[Path]:
    """The files of advice on a package's kernels, its own first; by default this package's file alone."""
    own = [_contributed_path(package)] if package else []
    return [*filter(None, own), *sorted(_FOLDER.glob(f"*{SUFFIX}"))]


@cache
def _contributed_path(package: str) -> Path | None:
    """The file that a package's entry point names; None, with a warning, where it names none."""
    roots = [Path(p) for p in getattr(sys.modules.get(package), "__path__", ())]
    if (value := _entry_value(package, roots)) is None:
        return None
    parts = value.split(".")
    relative = Path(*parts[1:]).with_suffix(SUFFIX) if len(parts) > 1 else Path()
    if parts[0] == package and len(parts) > 1 and all(part.isidentifier() for part in parts):
        roots += [Path(p) / package for p in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))]
        for root in roots:
            if (root / relative).is_file():
                return root / relative
    _warn(
        f"entry point {package} = {value!r} of {GROUP} names no file of the package: {package}.FOLDER.STEM "
        f"stands for {package}/FOLDER/STEM{SUFFIX}"
    )
    return None


def _entry_value(package: str, roots: Sequence[Path]) -> str | None:
    """The value of a package's entry point, from the metadata beside the package and in the environment's own folder.

    `importlib.metadata.entry_points` parses those of every distribution: some 50 ms of a program's first decision.
    """
    places = dict.fromkeys([*(root.parent for root in roots), Path(sysconfig.get_path("purelib"))])
    for place in places if package.isidentifier() and package != "__main__" else ():
        for path in place.glob("*.dist-info/entry_points.txt"):
            try:
                text = read_regular(path, MAX_BYTES)
                if GROUP.encode() not in text or package.encode() not in text:
                    continue
                from importlib.metadata import PathDistribution

                for entry in PathDistribution(path.parent).entry_points.select(group=GROUP, name=package):
                    return entry.value
            except Exception as error:  # whatever a file of others makes Python's own reader raise
                _warn(f"{path} cannot be read: {type(error).__name__}: {error}"[:300])
    return None


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_BYTES)
    except OSError as error:
        _warn(f"{path}: advice cannot be read: {error}")
        return b""


def _records_with(path: Path, data: bytes, text: str) -> Iterator[Advice]:
    """The records among the first lines that hold a text, the last of them first: later lines replace earlier ones."""
    needle, lines, at = text.encode(), list[bytes](), -1
    while len(lines) < _MAX_LINES and (at := data.find(needle, at + 1)) >= 0:
        begin, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
        lines.append(data[begin : end if end >= 0 else len(data)])
        at = end if end >= 0 else len(data)
    yield from _decoded(path, reversed(lines))


def _decoded(path: Path, lines: Iterable[bytes]) -> Iterator[Advice]:
    from forecast_autotune.llm.advice.record import Advice
    from forecast_autotune.store.files import decode

    for line in lines:
        try:
            advice = Advice.from_json(decode(line))
            if path.parent != _FOLDER:  # the tests parse this package's own four hundred: seconds
                advice.functions  # noqa: B018 - what is no cost function is passed over
        except MALFORMED as error:
            _warn(f"{path}: advice is passed over: {type(error).__name__}: {error}"[:300])
            continue
        yield advice


def every_installed() -> list[tuple[Path, list[Advice]]]:
    """All records by layer: this package's own, and those of every installed package that names one."""
    from forecast_autotune import plugins

    paths = (_contributed_path(package) for package in plugins.names(GROUP))
    return [
        (path, list(_decoded(path, filter(bytes.strip, _read(path).split(b"\n")))))
        for path in [*layer_paths(), *filter(None, paths)]
    ]


@cache
def _warn(text: str) -> None:
    warnings.warn(text, StoreWarning, stacklevel=2)
