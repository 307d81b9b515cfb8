"""Other problems of a kernel as prior knowledge: how near two are, and which logs of other device classes are read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forecast_autotune.records import Problem, Scalar
    from forecast_autotune.store.directory import KernelDirectory
    from forecast_autotune.surrogates.protocol import Relative

_MISMATCH_DISTANCE = 1.0
"""The distance of a differing dtype, flag or missing argument: as much as one size off by a factor of two."""


def _size(value: Scalar) -> float | str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return math.copysign(math.log2(1.0 + abs(value)), value)
    return str(value)


def _key_part(text: str) -> float | str:
    try:
        value = float(text)
    except ValueError:
        return text
    return _size(value) if math.isfinite(value) else text


@cache
def _log2_of_size(n: int) -> float:
    return math.log2(1.0 + max(n, 0))


def similarity_features(problem: Problem) -> dict[str, float | str]:
    """Sizes on a log2 scale and everything else as text, by name.

    Shapes per argument and axis, scalars, constexprs, and the tuning key by position: a user's part of the key
    therefore counts twice, and problems known by their key alone still compare.
    """
    features: dict[str, float | str] = {}
    for argument in problem.arguments:
        features[argument.name] = str(argument.layout)
        if argument.kind == "tensor":
            for axis, n in enumerate(argument.shape):
                features[f"{argument.name}.{axis}"] = _log2_of_size(n)
        else:
            features[f"{argument.name}="] = _size(argument.value)
    for position, text in enumerate(problem.key):
        features[f"key.{position}"] = _key_part(text)
    return features


def feature_distance(a: dict[str, float | str], b: dict[str, float | str]) -> float:
    """Sum over names of |difference| of the log2 sizes; anything else that differs counts 1."""
    total = 0.0
    for name in a.keys() | b.keys():
        x, y = a.get(name), b.get(name)
        if isinstance(x, float) and isinstance(y, float):
            total += abs(x - y)
        elif x != y:
            total += _MISMATCH_DISTANCE
    return total


def nearness_key(problem: Problem, other: Problem) -> tuple[bool, float, str]:
    """Sort key, nearest first: same source before others, then `feature_distance`, then the id."""
    source = problem.kernel.source_sha256
    differs = not source or source != other.kernel.source_sha256
    return differs, feature_distance(similarity_features(problem), similarity_features(other)), other.id


DEVICES = 8
"""At most so many other device classes are looked at."""
BYTES = 4 * 1024 * 1024
"""Their logs together are no larger than this: about a twentieth of a second per MiB, once per process."""


def affordable_directories(root: Path, kernel: str, own: str) -> list[Path]:
    """Directories of a kernel on devices other than `own`, by name, within `DEVICES` and `BYTES`.

    `kernel` and `own` are directory names; a directory whose logs are too large is passed over. Raises
    `OSError` where `root` cannot be listed.
    """
    paths: list[Path] = []
    budget = BYTES
    for path in sorted(root.glob(f"*/{kernel}")):
        if path.parent.name == own or len(paths) == DEVICES:
            continue
        size = sum(map(_log_bytes, path.glob("log-*.jsonl")))
        if 0 < size <= budget:
            paths.append(path)
            budget -= size
    return paths


def _log_bytes(log: Path) -> int:
    # Only regular files are read.
    return log.stat().st_size if log.is_file() else 0


def nearest_relatives(problem: Problem, directories: Iterable[KernelDirectory]) -> list[Relative]:
    """The most similar problem of the very same source that ran, of each device class, nearest first.

    Nothing where the source is not known: times of another kernel must not pass for this one's.
    """
    from forecast_autotune.surrogates.protocol import Relative

    relatives: list[Relative] = []
    source = problem.kernel.source_sha256
    for directory in directories:
        same = [p for p in directory.problems().values() if source and p.kernel.source_sha256 == source]
        for near in sorted(same, key=lambda p: nearness_key(problem, p)):
            rows = tuple(directory.measurements(near.id))
            if any(m.ok for m in rows):
                relatives.append(Relative(near, rows))
                break
    relatives.sort(key=lambda r: nearness_key(problem, r.problem))
    return relatives
