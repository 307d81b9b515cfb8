"""One compilation of a Triton kernel in a program, such that another process can compile the same binary.

Triton makes a binary for a *specialization*: types, constants, and the state of each argument: 1, divisible by 16, or
neither. Further specializations of a program are forecast from those that it has had.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from forecast_autotune.errors import RecordError
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import SCHEMA, read_text

ONE, DIVISIBLE, NEITHER = "1", "divisible by 16", "neither"
_STATES = (ONE, DIVISIBLE, NEITHER)
_DIVISIBILITY = ["tt.divisibility", 16]
_MOST_FORECASTS = 64
"""Specializations of one kernel that are forecast at most, the likeliest first."""
LEAST_PROBABILITY = 0.002
"""The least probability of a specialization that is forecast."""
_AGREEING = 3
"""Different sizes that show a rule."""
_HALF = 0.5
"""Addition to each count, as in Jeffreys' prior: an unseen value may come."""


def _read_texts(value: Any) -> dict[str, str]:
    return {read_text(name): read_text(text) for name, text in dict(value).items()}


def _read_sizes(value: Any) -> dict[str, int]:
    if not {type(size) for size in dict(value).values()} <= {int}:
        raise RecordError(f".sizes must be integers by argument, not {value!r:.60}")
    return dict(value)


def _read_specialization(value: Any) -> dict[str, Any]:
    data = {**value, "signature": dict(value["signature"]), "options": dict(value["options"])}
    for key in ("constants", "attributes"):
        for (first, *_), _ in data[key]:
            if not (type(first) is int and 0 <= first < len(data["signature"])):
                raise RecordError(f".{key} must name arguments by their numbers, not {first!r:.60}")
    return data


@dataclass(frozen=True)
class Compilation(Record, tag="compilation", schema=SCHEMA, lenient=True):
    """A binary that a program needed."""

    module: str = field(metadata=json_option(read=read_text))
    kernel: str = field(metadata=json_option(read=read_text))
    """Qualified name within the module."""
    source_sha256: str = field(metadata=json_option(read=read_text))
    triton: str = field(metadata=json_option(read=read_text))
    target: Mapping[str, Any] = field(metadata=json_option(read=dict))
    """Triton's `GPUTarget`: backend, arch, warp_size."""
    specialization: Mapping[str, Any] = field(metadata=json_option(read=_read_specialization))
    """`signature` (type by argument), `options`; `constants` and `attributes` (an argument's path, a value)."""
    states: Mapping[str, str] = field(default_factory=dict, metadata=json_option(read=dict))
    """Whether each integer argument that is no constant was 1, divisible by 16, or neither."""
    types: Mapping[str, str] = field(default_factory=dict, metadata=json_option(read=dict))
    """Type of each of these arguments, '' where it was 1 and has none."""
    sizes: Mapping[str, int] = field(default_factory=dict, metadata=json_option(read=_read_sizes))
    """The integer arguments of the first launch of this binary; empty where no launch was seen."""
    seconds: float = 0.0
    """Seconds that the compiler took; 0 where the binary lay in Triton's cache."""
    caller: str = ""
    """File and line of the launch."""
    trouble: str = ""
    """Why it cannot be compiled again, if so."""
    cause: str = ""
    """Why it was compiled after the program had declared itself ready, if so."""
    file: str = ""
    """The file of a module that a library wrote and that no import finds; '' for modules that can be imported."""
    helpers: Mapping[str, Any] = field(default_factory=dict, metadata=json_option(read=dict))
    """JIT functions that the library has put into that module: module and qualified name by name."""
    environment: Mapping[str, str] = field(default_factory=dict, metadata=json_option(read=_read_texts))
    """The parts of Triton's key that are the process': `backend` (with the assembler's release), and variables."""
    key: str = field(default="", metadata=json_option(read=read_text))
    """Triton's name of the binary in its cache, after a digest of the compiler that named it; '' if unknown."""

    def __post_init__(self) -> None:
        """Raises `RecordError` for unknown states, and for states of unknown arguments."""
        names, signature = self.states.keys(), self.specialization["signature"].keys()
        if not names <= signature or names != self.types.keys() or not {*self.states.values()} <= {*_STATES}:
            raise RecordError(
                f"states must be one of {', '.join(_STATES)} by argument, not {self.states!r:.80}"
            )

    @property
    def id(self) -> str:
        """A hash of the binary's identity."""
        parts: list[Any] = [self.module, self.kernel, self.source_sha256, self.triton, self.target]
        parts += [self.specialization, *([self.environment] if self.environment else [])]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def name(self) -> str:
        """Module and kernel."""
        return f"{self.module}:{self.kernel}"

    @property
    def shown_states(self) -> str:
        """The states for a person; aligned pointers, as nearly all are, are left out."""
        plain = {
            n: s for n, s in self.states.items() if not (self.types[n].startswith("*") and s == DIVISIBLE)
        }
        return ", ".join(f"{name} {state}" for name, state in plain.items())

    def differences(self, others: Iterable[Compilation]) -> str:
        """The differences from the nearest of its kernel's other compilations, in words; '' without any."""
        own = _facts(self)
        alike = [_facts(c) for c in others if c.name == self.name]
        changes = [[n for n in own if theirs.get(n) != own[n]] for theirs in alike]
        return ", ".join(f"{n} was {own[n]} for the first time" for n in min(changes, key=len, default=[]))


@dataclass
class PlannedCompilation:
    """A compilation to make ahead, recorded or forecast, and its result."""

    compilation: Compilation
    probability: float = 1.0
    """Below 1 where no program has needed it yet."""
    expected_s: float = 0.0
    seconds: float = 0.0
    cached: bool = False
    """Whether the binary was there already."""
    trouble: str = ""
    outdated: bool = False
    """Whether it has another source or release of Triton, so that no program here will need it."""

    @property
    def forecast(self) -> bool:
        """Whether no program has needed it yet."""
        return self.probability < 1.0

    @property
    def fails(self) -> bool:
        """Whether it was to be compiled and was not."""
        return bool(self.trouble) and not self.forecast and not self.compilation.trouble

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        c = self.compilation
        data = {"kernel": c.name, "states": dict(c.states), "probability": round(self.probability, 4)}
        data |= {"expected_s": round(self.expected_s, 3), "seconds": round(self.seconds, 3)}
        data |= {"cached": self.cached, "caller": c.caller, "cause": c.cause}
        return data | ({"trouble": self.trouble} if self.trouble else {})


def probable_compilations(known: Sequence[Compilation]) -> list[PlannedCompilation]:
    """Forecast the specializations that will follow the recorded ones, the likeliest first.

    An argument that had several states will have all three, each as often as it was seen (Jeffreys' prior); an argument
    that never changed stays as it is. A constant that was several powers of two takes those between them, and the next
    ones, with the rest as at the nearest of them. Where it was always the next power of two of an argument, it follows
    the argument down to 1, and up to its recorded limit, with the states that such arguments have.
    """
    groups: dict[str, list[Compilation]] = defaultdict(list)
    for c in known:
        if not c.trouble:
            groups[_group_of(c)].append(c)
    ids = {c.id for c in known}
    results: list[PlannedCompilation] = []
    for group in groups.values():
        seconds = max(c.seconds for c in group)
        axes = _size_axes(group)
        types = {n: next((c.types[n] for c in group if c.types[n]), "") for n in group[0].states}
        forecasts: dict[str, PlannedCompilation] = {}
        for model, share in _constant_chances(group, axes):
            for states, chance in _state_chances(group, axes, _free_constants(model)):
                if share * chance >= LEAST_PROBABILITY:
                    forecast = _with_states(model, states, types)
                    forecasts.setdefault(forecast.id, PlannedCompilation(forecast, share * chance, seconds))
        fresh = [c for id_, c in forecasts.items() if id_ not in ids]
        results += sorted(fresh, key=lambda c: -c.probability)[:_MOST_FORECASTS]
    return sorted(results, key=lambda c: -c.probability)


_SizeAxis: TypeAlias = tuple[tuple[str, ...], tuple[int, ...], set[tuple[tuple[str, ...], tuple[int, ...]]]]
"""Arguments, places of constants, and the states and values that these can have together."""


def _size_axes(group: Sequence[Compilation]) -> list[_SizeAxis]:
    """Arguments that are multiples of one another, with the constants that are the next power of two of one of them.

    A rule needs launches of three different sizes that agree on it, also on the limits of a constant.
    """
    launches = [c for c in group if c.sizes]
    columns = {n: [c.sizes.get(n, 0) for c in launches] for n in group[0].states}
    axes: list[dict[str, int]] = []
    for name, column in sorted(columns.items(), key=lambda item: item[1][:1]):
        is_specialized = [c.states[name] for c in launches] == [_state_of(size) for size in column]
        if is_specialized and len({*column}) >= _AGREEING and min(column) > 0:
            for factors in axes:
                first = columns[next(iter(factors))]
                if [size * (column[0] // first[0]) for size in first] == column:
                    factors[name] = column[0] // first[0]
                    break
            else:
                axes.append({name: 1})
    results: list[_SizeAxis] = []
    for factors in axes:
        followers: dict[int, tuple[int, int, int]] = {}
        for place in range(len(_free_constants(group[0]))):
            values = [_free_constants(c)[place][1] for c in launches]
            if {type(value) for value in values} == {int} and len({*values}) >= _AGREEING:
                low, high = min(values), max(values)
                for name, factor in factors.items():
                    powers = [_next_power(size) for size in columns[name]]
                    if [min(max(power, low), high) for power in powers] == values:
                        floor = low if min(powers) < low else 1
                        followers[place] = factor, floor, high if max(powers) > high else 2 * high
        largest = max(columns[next(iter(factors))])
        sizes = {2**n + more for n in range((2 * largest).bit_length()) for more in range(16)}
        possible = {
            (
                tuple(_state_of(size * factor) for factor in factors.values()),
                tuple(min(max(_next_power(size * f), low), high) for f, low, high in followers.values()),
            )
            for size in sizes
        }
        results.append(((*factors,), (*followers,), possible))
    return results


def _state_of(size: int) -> str:
    return ONE if size == 1 else NEITHER if size % 16 else DIVISIBLE


def _next_power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _state_chances(
    group: Sequence[Compilation], axes: Sequence[_SizeAxis], constants: Sequence[Any]
) -> list[tuple[dict[str, str], float]]:
    """States that arguments can have with these constants: the mean of their independent and their joint shares."""
    choices = []
    for names, places, every in axes:
        current = tuple(constants[place][1] for place in places)
        choices.append((names, {states for states, values in every if values == current}))
    axis_names = {name for names, _ in choices for name in names}
    for name in group[0].states:
        if name not in axis_names and len({c.states[name] for c in group}) > 1:
            pointer = any(c.types[name].startswith("*") for c in group)
            choices.append(((name,), {(state,) for state in _STATES[pointer:]}))
    # Drop improbable ones early: all combinations would be 3 to the power of the number of arguments.
    chances: list[tuple[dict[str, str], float]] = [({}, 1.0)]
    for names, possible in choices:
        counts = Counter(tuple(c.states[n] for n in names) for c in group)
        total = sum(counts[each] + _HALF for each in possible)
        shares = [(dict(zip(names, s, strict=True)), (counts[s] + _HALF) / total) for s in sorted(possible)]
        chances = [
            ({**states, **more}, chance * share)
            for states, chance in chances
            for more, share in shares
            if chance * share >= LEAST_PROBABILITY
        ]
    together = [sum(states.items() <= c.states.items() for c in group) for states, _ in chances]
    total = sum(together)
    return [
        (states, (chance + count / total) / 2 if total else chance)
        for (states, chance), count in zip(chances, together, strict=True)
    ]


def _constant_chances(
    group: Sequence[Compilation], axes: Sequence[_SizeAxis]
) -> list[tuple[Compilation, float]]:
    """A compilation for each set of constants and options, seen or between seen ones, and its probability."""
    counts = Counter(map(_constants_of, group))
    models = {_constants_of(c): c for c in group}
    follower_values = {p: {v[n] for _, v in every} for _, places, every in axes for n, p in enumerate(places)}
    for place in range(len(_free_constants(group[0]))):
        steps: dict[int, list[Compilation]] = defaultdict(list)
        for c in group:
            value = _free_constants(c)[place][1]
            if type(value) is int and value > 0 and value.bit_count() == 1:
                steps[value].append(c)
        if len(steps) < 2:
            continue
        between = range(min(steps).bit_length() - 2, max(steps).bit_length() + 1)
        for value in sorted(follower_values.get(place, {2**n for n in between if n >= 0})):
            distance = min(abs(math.log2(value / step)) for step in steps)
            for step in steps:
                if abs(math.log2(value / step)) == distance:
                    for near in steps[step]:
                        model = _with_constant(near, _free_constants(near)[place][0], value)
                        models.setdefault(_constants_of(model), model)
    total = len(group) + _HALF * len(models)
    return [(c, (counts[key] + _HALF) / total) for key, c in models.items()]


def _free_constants(c: Compilation) -> list[Any]:
    places = _places(c).values()
    return [pair for pair in c.specialization["constants"] if pair[0] not in places]


def _constants_of(c: Compilation) -> str:
    return json.dumps([_free_constants(c), c.specialization["options"]], sort_keys=True)


def _with_constant(c: Compilation, path: Sequence[int], value: int) -> Compilation:
    constants = [[p, value if p == path else v] for p, v in c.specialization["constants"]]
    return replace(c, specialization={**c.specialization, "constants": constants}, key="")


def _facts(c: Compilation) -> dict[str, str]:
    data, names = c.specialization, list(c.specialization["signature"])
    pairs = [("constant", pair) for pair in data["constants"]]
    pairs += [("alignment of", pair) for pair in data["attributes"]]
    entries = [(f"{kind} {names[p[0]]}", v) for kind, (p, v) in pairs if names[p[0]] not in c.states]
    facts = {n: str(v) for n, v in [*entries, *data["options"].items(), *data["signature"].items()]}
    return facts | dict(c.environment) | dict(c.states)


def _group_of(c: Compilation) -> str:
    """The common part of compilations that differ in states of arguments, in constants and in options alone."""
    data, places = c.specialization, _places(c).values()
    signature = {n: t for n, t in data["signature"].items() if n not in c.states}
    constants = [path for path, _ in data["constants"] if path not in places]
    attributes = [pair for pair in data["attributes"] if pair[0] not in places]
    identity = [c.name, c.source_sha256, c.triton, c.target, signature, constants, attributes]
    return json.dumps([*identity, list(c.states), c.environment], sort_keys=True)


def _places(c: Compilation) -> dict[str, list[int]]:
    names = list(c.specialization["signature"])
    return {name: [names.index(name)] for name in c.states}


def _with_states(c: Compilation, states: Mapping[str, str], types: Mapping[str, str]) -> Compilation:
    data, places = c.specialization, _places(c)
    targets = [places[name] for name in states]
    constants = [p for p in data["constants"] if p[0] not in targets]
    attributes = [p for p in data["attributes"] if p[0] not in targets]
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
    result = replace(c, specialization=specialization, states={**c.states, **states})
    return replace(result, seconds=0.0, caller="", key="")
