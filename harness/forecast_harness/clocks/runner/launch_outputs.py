"""What launches left behind on its way to the host: each content once, and none that the host has already.

Configs of one source, and most sources of one search, leave the same bytes behind. Moving them costs more than to
launch the kernel: the host reads a channel in small pieces, and other threads of it run between any two.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Collection, Mapping
from typing import Any

from forecast_harness.clocks.runner.messages import ObservedLaunch
from forecast_harness.clocks.runner.session import CheckedLaunch
from forecast_harness.sandbox.jobs import TensorBytes

_MOST_KEPT_BYTES = 256 << 20
"""Of all calls together, on the host."""
_MOST_DIGESTED_BYTES = 32 << 20
"""Of one content: to digest and to keep a larger one costs more than it saves."""
_MOST_TOLD = 64
"""Digests of one call that the runner is told."""


def encode_launches(
    launches: Collection[CheckedLaunch], part: str, known: Collection[str]
) -> tuple[dict[str, Any], dict[str, TensorBytes]]:
    """Launches by the names of their outputs, which are digests, and the bytes of each that is not `known`."""
    arrays = dict[str, TensorBytes]()
    told = []
    for number, one in enumerate(launches):
        digests = [_name(data, f"{number}-{place}") for place, data in enumerate(one.outputs)]
        errors = {n: e if math.isfinite(e) else None for n, e in one.errors.items()}
        told.append({"rotation": dict(one.rotation), "outputs": digests, "errors": errors})
        for digest, data in zip(digests, one.outputs, strict=True):
            if digest not in known:
                arrays[f"{part}/{digest}"] = TensorBytes("uint8", (len(data),), data)
    return {"launches": told}, arrays


def _name(data: bytes, else_name: str) -> str:
    return hashlib.sha256(data).hexdigest() if len(data) <= _MOST_DIGESTED_BYTES else else_name


class KnownOutputs:
    """Contents that the host has seen, by call and digest; the oldest are forgotten where they take too much.

    What stays is one object for each content, so that comparing it with itself costs nothing. For many threads.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], bytes] = {}
        self._bytes, self._lock = 0, threading.Lock()

    def of_call(self, call: str) -> dict[str, bytes]:
        """A call's contents by digest, those that came last."""
        with self._lock:
            found = [(digest, data) for (key, digest), data in self._kept.items() if key == call]
        return dict(found[-_MOST_TOLD:])

    def decode(
        self,
        call: str,
        known: Mapping[str, bytes],
        told: Mapping[str, Any],
        arrays: Mapping[str, TensorBytes],
        part: str,
    ) -> tuple[ObservedLaunch, ...]:
        """Each launch; `known` is what the runner was told not to send.

        Contents of launches on rotated inputs are not kept: they do not come again. Raises `KeyError` for a content
        that nobody has sent.
        """
        found, contents = list[ObservedLaunch](), dict(known)
        for one in told["launches"]:
            for digest in one["outputs"]:
                if digest not in contents:
                    contents[digest] = bytes(arrays[f"{part}/{digest}"].data)
                    if len(contents[digest]) <= _MOST_DIGESTED_BYTES and not any(one["rotation"].values()):
                        self._keep(call, digest, contents[digest])
            outputs = tuple(contents[digest] for digest in one["outputs"])
            errors = {n: math.inf if e is None else float(e) for n, e in one["errors"].items()}
            found.append(ObservedLaunch(one["rotation"], outputs, errors))
        return tuple(found)

    def _keep(self, call: str, digest: str, data: bytes) -> None:
        with self._lock:
            if (call, digest) not in self._kept:
                self._kept[call, digest] = data
                self._bytes += len(data)
            while self._bytes > _MOST_KEPT_BYTES:
                self._bytes -= len(self._kept.pop(next(iter(self._kept))))
