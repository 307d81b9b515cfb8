"""One compilation of a Triton kernel in a program, such that another process can compile the same binary.

A *specialization* is what Triton makes a binary for: types, constants, and of each argument whether it is 1, divisible
by 16, or neither. Which of them a program will still meet is forecast from those that it has met.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import SCHEMA, read_text

ONE, DIVISIBLE, NEITHER = "1", "divisible by 16", "neither"
_STATES = (ONE, DIVISIBLE, NEITHER)
_DIVISIBILITY = ["tt.divisibility", 16]
_MOST_FORECASTS = 64
"""Specializations of one kernel that are forecast at most, the likeliest first."""
LEAST_PROBABILITY = 0.01
"""The least probability of a specialization that is forecast."""
_HALF = 0.5
"""Added to each count, as of Jeffreys' prior: what was not seen yet may come."""


def _read_object(value: Any) -> dict[str, Any]:
    return dict(value)


@dataclass(frozen=True)
class Compilation(Record, tag="compilation", schema=SCHEMA, lenient=True):
    """A binary that a program needed."""

    module: str = field(metadata=json_option(read=read_text))
    kernel: str = field(metadata=json_option(read=read_text))
    """Qualified name within the module."""
    source_sha256: str = field(metadata=json_option(read=read_text))
    triton: str = field(metadata=json_option(read=read_text))
    target: Mapping[str, Any] = field(metadata=json_option(read=_read_object))
    """Triton's `GPUTarget`: backend, arch, warp_size."""
    specialization: Mapping[str, Any] = field(metadata=json_option(read=_read_object))
    """`signature` (type by argument), `options`; `constants` and `attributes` (an argument's path, a value)."""
    states: Mapping[str, str] = field(default_factory=dict, metadata=json_option(read=_read_object))
    """Whether each integer argument that is no constant was 1, divisible by 16, or neither."""
    types: Mapping[str, str] = field(default_factory=dict, metadata=json_option(read=_read_object))
    """Type of each of these, '' where it was 1 and has none."""
    seconds: float = 0.0
    """Seconds that the compiler took; 0 where the binary lay in Triton's cache."""
    caller: str = ""
    """File and line of the launch."""
    trouble: str = ""
    """Why it cannot be compiled again, if so."""
    cause: str = ""
    """Why it was compiled after the program had said that it was ready, if so."""

    @property
    def id(self) -> str:
        """A hash of the binary's identity."""
        parts = [self.module, self.kernel, self.source_sha256, self.triton, self.target, self.specialization]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def name(self) -> str:
        """Module and kernel."""
        return f"{self.module}:{self.kernel}"

    def differences(self, others: Iterable[Compilation]) -> str:
        """How it differs from the nearest of others of its kernel, in words; '' where there are none."""
        mine = _facts(self)
        listed: list[list[str]] = [
            [f"{n} was {mine[n]} for the first time" for n in mine if theirs.get(n) != mine[n]]
            for other in others
            if other.name == self.name
            for theirs in [_facts(other)]
        ]
        nearest = min(listed, key=len, default=[])
        return ", ".join(nearest)


@dataclass(frozen=True)
class ProbableCompilation:
    """A compilation that a program has not needed yet."""

    compilation: Compilation
    probability: float
    seconds: float
    """Those of the longest of its kernel."""


def probable_compilations(known: Sequence[Compilation]) -> list[ProbableCompilation]:
    """Forecast which specializations the recorded ones leave to come, the likeliest first.

    Arguments that came in several states come in all of the three, each as often as it was seen (Jeffreys' prior), and
    independently of the others. An argument that never changed stays as it is.
    """
    groups: dict[str, list[Compilation]] = defaultdict(list)
    for one in known:
        if not one.trouble:
            groups[_group_of(one)].append(one)
    seen = {one.id for one in known}
    results: list[ProbableCompilation] = []
    for group in groups.values():
        varied = [n for n in group[0].states if len({one.states[n] for one in group}) > 1]
        types = {n: next((one.types[n] for one in group if one.types[n]), "") for n in varied}
        # Improbable ones go at once: all combinations would be 3 to the number of arguments.
        chances: list[tuple[dict[str, str], float]] = [({}, 1.0)] if varied else []
        for name in varied:
            counts = Counter(one.states[name] for one in group)
            shares = {s: (counts[s] + _HALF) / (len(group) + 3 * _HALF) for s in _STATES}
            chances = [
                ({**states, name: state}, chance * share)
                for states, chance in chances
                for state, share in shares.items()
                if chance * share >= LEAST_PROBABILITY
            ]
        seconds = max(one.seconds for one in group)
        others = [(_with_states(group[0], states, types), chance) for states, chance in chances]
        forecasts = [ProbableCompilation(o, chance, seconds) for o, chance in others if o.id not in seen]
        results += sorted(forecasts, key=lambda one: -one.probability)[:_MOST_FORECASTS]
    return sorted(results, key=lambda one: -one.probability)


def _facts(one: Compilation) -> dict[str, str]:
    signature = one.specialization["signature"]
    names = list(signature)
    constants = ((names[path[0]], value) for path, value in one.specialization["constants"])
    facts = {f"constant {n}": str(v) for n, v in constants if n not in one.states}
    return facts | {n: str(t) for n, t in signature.items()} | dict(one.states)


def _group_of(one: Compilation) -> str:
    """What compilations share that differ in the states of their arguments alone."""
    others = {n: t for n, t in one.specialization["signature"].items() if n not in one.states}
    places = _places(one)
    rest = [
        [pair for pair in one.specialization[key] if pair[0] not in places.values()]
        for key in ("constants", "attributes")
    ]
    identity = [
        one.name,
        one.source_sha256,
        one.triton,
        one.target,
        one.specialization["options"],
        others,
        rest,
    ]
    return json.dumps(identity, sort_keys=True)


def _places(one: Compilation) -> dict[str, list[int]]:
    names = list(one.specialization["signature"])
    return {name: [names.index(name)] for name in one.states}


def _with_states(one: Compilation, states: Mapping[str, str], types: Mapping[str, str]) -> Compilation:
    data, places = one.specialization, _places(one)
    changed = [places[name] for name in states]
    constants = [p for p in data["constants"] if p[0] not in changed]
    attributes = [p for p in data["attributes"] if p[0] not in changed]
    signature = dict(data["signature"])
    # Some releases list constants among the attributes, with none.
    paths = [path for path, _ in data["attributes"]]
    lists_constants = any(
        [number] in paths for number, t in enumerate(signature.values()) if t == "constexpr"
    )
    for name, state in states.items():
        signature[name] = "constexpr" if state == ONE else types[name]
        if state == ONE:
            constants.append([places[name], 1])
        if state != ONE or lists_constants:
            attributes.append([places[name], [_DIVISIBILITY] if state == DIVISIBLE else []])
    specialization = {
        **data,
        "signature": signature,
        "constants": sorted(constants, key=lambda p: list(p[0])),
        "attributes": sorted(attributes, key=lambda p: list(p[0])),
    }
    return replace(
        one, specialization=specialization, states={**one.states, **states}, seconds=0.0, caller=""
    )
