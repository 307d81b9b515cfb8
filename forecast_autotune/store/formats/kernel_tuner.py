"""Kernel Tuner's cache files, streamed: a cache may have millions of configs. Its T4 results are refused.

The cache of a run that is still going on, or was killed, ends in a comma. Since release 1.4 a config that failed has
`__error__` and no `time`; before, the word stood in the objective's place, and before 0.4.3 a time of 1e20.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.file_access import MAX_RECORD_BYTES
from forecast_autotune.records import (
    LAUNCH_OPTIONS,
    Argument,
    Candidate,
    Config,
    Kernel,
    Measurement,
    Outcome,
    Problem,
)
from forecast_autotune.records.bounded_json import check_depth, lenient_decoder, without_halves
from forecast_autotune.records.json_fields import LARGEST_PARAMETER, MALFORMED, read_number
from forecast_autotune.records.named_lines import unpacked
from forecast_autotune.store.formats.protocol import IMPORTED_FROM, Format, Reading, Row, reason

KERNEL_TUNER_PROTOCOL = "kernel-tuner"
"""Timing protocol of imported measurements: Kernel Tuner's, with whatever observers it ran."""
OWN = "forecast_autotune"
"""A field of the header of caches that `export` wrote: the problem's record, and outcomes that the tool has no word
for, by the configs' keys."""
_OUTCOMES = {
    "CompilationFailedConfig": Outcome.COMPILE_ERROR,
    "RuntimeFailedConfig": Outcome.RUNTIME_ERROR,
    "ErrorConfig": Outcome.RUNTIME_ERROR,
}
_INVALID = "InvalidConfig"
_LEGACY_FAILURE = 1e20
_CACHE = re.compile(r'"tune_params_keys"\s*:')
_T4 = re.compile(
    r'\A\s*\{.*"results"\s*:\s*\[\s*(\{.*"configuration".*"times"|\].*"schema_version"\s*:\s*")', re.DOTALL
)
_SPACE = re.compile(r"[\s,]*")
_NAME = re.compile(r'[\s,]*"([^"\\\x00-\x1f]*)"\s*:\s*(?=[^\s])')
_CHUNK = 1 << 18


def _is_theirs(path: Path, head: str) -> bool:
    return bool(_CACHE.search(head) or _T4.match(head))


class _Text:
    """A file's text with a place in it that moves on; as much of it is held as one value needs."""

    def __init__(self, path: Path, read: Callable[[int], bytes]) -> None:
        self._path, self._read_chunk = path, read
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._text, self._at, self.ended = "", 0, False

    def _more(self) -> bool:
        """Read on; False at the end."""
        if self.ended or len(self._text) - self._at > MAX_RECORD_BYTES:
            return False
        # As much again as is held: a long value is not read anew for every chunk.
        raw = self._read_chunk(max(_CHUNK, len(self._text) - self._at))
        try:
            self._text = self._text[self._at :] + self._decode(raw, not raw)
        except UnicodeDecodeError as error:
            raise RecordError(f"{self._path}: unreadable or cut off: {error}") from error
        self._at, self.ended = 0, not raw
        return bool(raw)

    def mark(self) -> str:
        """The next character that is neither space nor comma; it stays. Empty at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def skip(self, sign: str) -> None:
        """Take this sign. Raises `ValueError` where something else stands."""
        if (mark := self.mark()) != sign:
            raise ValueError(f"expected {sign!r}, got {mark or 'the end'!r}")
        self._at += 1

    def plain_name(self) -> str | None:
        """The name that stands next, with its colon, if all of it is held and it has no escapes; else None."""
        if (match := _NAME.match(self._text, self._at)) is None:
            return None
        self._at = match.end()
        return match[1]

    def value(self) -> Any:
        """The JSON value that stands next. Raises `ValueError` for none, or one that the file's end cuts off."""
        self.mark()
        while True:
            # A number or word at the very end may go on.
            try:
                value, end = _scan(self._text, self._at)
            except ValueError:
                if not self._more():
                    raise
                continue
            if end < len(self._text) or not self._more():
                self._at = end
                return value


_fast_scan = json.JSONDecoder().raw_decode


def _scan(text: str, at: int) -> tuple[Any, int]:
    try:
        return _fast_scan(text, at)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError):  # integers of thousands of digits; nested without end
        try:
            return lenient_decoder.raw_decode(text, at)
        except RecursionError:
            raise RecordError("nested too deeply") from None


def _names(text: _Text) -> Iterator[str]:
    """The names in the object that stands next; the caller takes the value of each before the next."""
    text.skip("{")
    while True:
        if (name := text.plain_name()) is not None:
            yield name
            continue
        if (mark := text.mark()) == "}":
            break
        if mark == "" and text.ended:
            return  # of a run that is under way or was killed between two configs
        name = text.value()
        if not isinstance(name, str):
            raise ValueError(f"expected a name, got {name!r:.40}")
        text.skip(":")
        yield name
    text.skip("}")


def read_kernel_tuner(reading: Reading) -> Iterator[Row]:
    """Read one cache as the rows of one problem: kernel, device, problem size and parameters.

    Tuned parameters become the config's meta-parameters (numbers and words, as they are); the median of `times`,
    in milliseconds, or `time` where the single runs are not kept, becomes the time. Configs that restrictions exclude
    are no candidates. Raises `RecordError`, naming the file, for anything that is not such a cache.
    """
    header: dict[str, Any] = {}
    path = reading.path
    cache: _Cache | None = None
    key = ""
    try:
        with unpacked(path, streamed=True) as read_chunk:
            text = _Text(path, read_chunk)
            for name in _names(text):
                if name != "cache":
                    header[name] = text.value()
                    check_depth(header[name])
                    continue
                if "tune_params_keys" not in header or "kernel_name" not in header:
                    # Sorted by another program: the configs come before that which explains them.
                    header = dict(reading.document())
                    yield from _whole(_Cache(reading, header), header["cache"])
                    return
                if text.mark() != "{":
                    raise RecordError("it needs cache, an object")
                cache = _Cache(reading, header)
                for key in _names(text):
                    yield from cache.row(key, text.value())
    except OSError as error:
        raise RecordError(f"{path}: unreadable: {error.strerror or error}") from error
    except MALFORMED as error:
        if cache is not None:
            reading.refuse_row(f"it is cut off or damaged behind config {key!r:.60}: {reason(error)}")
            return
        if str(error).startswith(str(path)):
            raise
        raise RecordError(f"{path}: no Kernel Tuner cache ({reason(error)})") from error
    if cache is None:
        raise RecordError(
            f"{path}: Kernel Tuner's T4 results name neither kernel nor device: import the cache file that the same "
            "run wrote (tune_kernel(cache=...))"
            if "results" in header
            else f"{path}: no Kernel Tuner cache: it needs tune_params_keys, a list of names, and cache, an object"
        )


def _whole(cache: _Cache, rows: Any) -> Iterator[Row]:
    if not isinstance(rows, Mapping):
        raise RecordError("it needs cache, an object")
    for key, row in rows.items():
        yield from cache.row(key, row)


class _Cache:
    """The header of a cache, by which its rows are read."""

    def __init__(self, reading: Reading, header: Mapping[str, Any]) -> None:
        keys = header.get("tune_params_keys")
        if not isinstance(keys, list) or not all(isinstance(k, str) for k in keys):
            raise RecordError("it needs tune_params_keys, a list of names")
        self._reading, self._keys, self._header = reading, keys, header
        self._names = frozenset(keys)
        own = header.get(OWN)
        self._own = own if isinstance(own, Mapping) else None
        self._problem: Problem | None = self._made_problem("")
        if header.get("problem_size") == "callable" and not self._own:
            self._problem = None

    def row(self, key: str, row: Any) -> Iterator[Row]:
        """The measurement of one config, if it is one; one that breaks a rule is refused."""
        try:
            if type(row) is not dict:
                raise RecordError(f"expected an object, got {row!r:.40}")
            if self._problem is None:
                # The first config never changes while a cache grows, and tells two sizes apart.
                self._problem = self._made_problem(f"{key} {row.get('timestamp')}")
            if (measurement := self._measurement(self._problem.id, key, row)) is not None:
                yield self._problem, measurement
        except MALFORMED as error:
            self._reading.refuse_row(f"config {key:.60}: {reason(error)}")

    def _made_problem(self, first: str) -> Problem:
        header = self._header
        if self._own:
            return Problem.from_json(self._own.get("problem"))
        name, device_name = header.get("kernel_name"), header.get("device_name")
        if not isinstance(name, str) or not name:
            raise RecordError("it names no kernel (kernel_name)")
        device = self._reading.device_named(device_name)
        size = header.get("problem_size")
        sizes = size if isinstance(size, list) else [] if size is None else [size]
        arguments = [
            Argument(f"problem_size_{i}", "scalar", value=n if isinstance(n, int | float | str) else str(n))
            for i, n in enumerate(sizes)
        ]
        language = {"cuda": "cuda", "hip": "hip", "cpu": "c"}.get(device.backend, "")
        if not device_name and language == "cuda":
            language = "c"  # CUDA's backends name their device, those for C and Fortran do not
        return Problem.of(
            Kernel(name, language),
            arguments,
            device,
            key=[str(n) for n in sizes],
            # Without the source, another list of parameters is the only sign of another kernel.
            identity=[*map(str, sizes), sorted(self._keys), *([first] if first else [])],
            extra={IMPORTED_FROM: KERNEL_TUNER_PROTOCOL},
        )

    def _measurement(self, problem: str, key: str, row: dict[str, Any]) -> Measurement | None:
        if not self._names <= row.keys():
            raise RecordError(f"it has no value for {next(k for k in self._keys if k not in row)}")
        values: dict[str, Any] = {
            k: v if type(v := row[k]) is int and -(2**63) < v < 2**63 else _value(k, v)
            for k in self._keys
            if not self._own or row[k] is not None
        }
        at, time = str(row.get("timestamp") or ""), row.get("time")
        if self._own:
            launch = {k: values.pop(k) for k in LAUNCH_OPTIONS if k in values}
            candidate = Candidate(Config.from_json({"kwargs": values, **launch}))
            at = "" if at.startswith("1970-01-01T00:00:00") else at
        else:
            candidate = Candidate(Config(tuple(sorted(values.items()))))
        compile_ms = read_number(row.get("compile_time"), "compile_time")
        seconds = None if compile_ms is None else compile_ms / 1000.0
        if (word := _failure(row, time)) is not None:
            if word == _INVALID:
                self._reading.left_out["configs that restrictions exclude"] += 1
                return None
            if word not in _OUTCOMES:
                raise RecordError(f"time is {word!r:.40}: not a number, {_INVALID}, {', '.join(_OUTCOMES)}")
            outcome, about = _OUTCOMES[word], {"message": word}
            if self._own and isinstance(better := self._own.get("outcomes"), Mapping) and key in better:
                outcome, about = Outcome(better[key]), {}
            return Measurement(
                problem,
                candidate,
                outcome,
                compile_s=seconds,
                protocol=KERNEL_TUNER_PROTOCOL,
                at=at,
                extra=about,
            )
        runs = row.get("times") or ()
        if set(map(type, runs)) != {float} or not math.isfinite(sum(runs)):
            runs = [t for t in (read_number(t, "times") for t in runs) if t is not None]
        return Measurement(
            problem,
            candidate,
            Outcome.OK,
            _median(runs) if runs else read_number(time, "time"),
            repeats=len(runs),
            compile_s=seconds,
            protocol=KERNEL_TUNER_PROTOCOL,
            at=at,
        )


def _median(runs: Sequence[float]) -> float:
    """`statistics.median` in half its time, of which millions are asked."""
    values, half = sorted(runs), len(runs) // 2
    return values[half] if len(runs) % 2 else (values[half - 1] + values[half]) / 2


def _failure(row: Mapping[str, Any], time: object) -> str | None:
    """The word for a config that failed; None for one that ran."""
    if (word := row.get("__error__")) is not None:
        return str(word)
    if isinstance(time, str):
        return time
    if time == _LEGACY_FAILURE:
        return "RuntimeFailedConfig"
    if time is None:  # the word stands where the objective's value would
        words = (v for v in row.values() if isinstance(v, str) and (v in _OUTCOMES or v == _INVALID))
        return next(words, None)
    return None


def _value(key: str, value: object) -> int | float | str | bool:
    if isinstance(value, str):
        return without_halves(value)
    if not isinstance(value, int | float):
        raise RecordError(f"{key} must be a number or a word, not {value!r:.40}")
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{key} must be a finite number, and an integer of 128 bits at most")
    if isinstance(value, int) and abs(value) > LARGEST_PARAMETER:
        raise RecordError(f"{key} must be an integer of 128 bits at most")
    return value


FORMAT = Format(
    KERNEL_TUNER_PROTOCOL, "Kernel Tuner", "caches of `tune_kernel(cache=...)`, also of a run that was killed",
    _is_theirs, read_kernel_tuner,
    "1.5.0, layouts since 0.4", ("median of the runs", "compile, run", "named, but for C", "problem size", "each row"),
    "source, metrics and observers' values",
)  # fmt: skip
