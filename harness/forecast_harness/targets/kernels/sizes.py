"""Other sizes of a recorded call: which sizes hang together, and calls drawn with new ones.

A recorded call says `M = 4096` and that a tensor has 4096 rows; that both are one size is inferred from
their being equal in every recorded call of the form. A size without an explanation stays as it was recorded.
Inference may be wrong, so whoever draws has to try whether the base kernel accepts what was drawn
(`forecast_harness.trials.variants`), and freezes what it does not.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Argument, Scalar
from forecast_autotune.variants.signature import (
    Strides,
    call_form,
    canonical_text,
    in_size_class,
    memory_span,
    places,
    size_power,
    stride_structure,
    strides_from_structure,
    writes_field,
)

_EXPONENTS = (-0.5, -1.0, 0.5, 1.0)
"""Powers of a size that floating scalars are: 1/sqrt(d), 1/n, ..."""
_MAX_DRAWS = 400
_LARGEST = 1 << 20
"""Elements of a tensor, where fixed sizes allow no smaller one."""
_LARGEST_GROUP = 64
_LARGE_CONSTANT = 16
_SMALL_LIMIT = 24.0
"""The most that the others are drawn up to where one size is large."""
_MIN_CASES = 3
_LARGEST_RATIO = 8
"""Gate and up projection lie side by side, heads share keys by eights."""


@dataclass(frozen=True)
class SizeClass:
    """Places that hold one size."""

    places: tuple[str, ...]
    recorded: int
    size_class: str | int
    """Its class (`in_size_class`); a number for a size that is not varied."""

    @property
    def varies(self) -> bool:
        """Whether calls are drawn with other values of it."""
        return isinstance(self.size_class, str)


@dataclass(frozen=True)
class CallSizes:
    """The sizes of a call that may change, and how."""

    arguments: tuple[Argument, ...]
    """The recorded call."""
    sizes: tuple[SizeClass, ...]
    products: Mapping[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    """Place -> factor, and places that it is the product of."""
    of_strides: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Scalar -> tensor and dimension whose stride it is."""
    powers: Mapping[str, tuple[tuple[str, ...], float]] = field(default_factory=dict)
    """Floating scalar -> places and exponent."""
    strides: Mapping[str, Strides] = field(default_factory=dict)
    pinned: frozenset[str] = frozenset()
    """Floating scalars that keep their value."""

    @classmethod
    def of(cls, calls: Sequence[Sequence[Argument]], *, evidence: int = _MIN_CASES) -> CallSizes:
        """Infer from recorded calls; the first is the one to be varied, others of its form tell sizes apart.

        A size that is a multiple of another one, by a small number or by a scalar of the call, hangs together
        with it where that is so in at least `evidence` different cases. Raises `RecordError` for a call
        without arguments, or with strides that follow from no shape.
        """
        if not calls or not calls[0]:
            raise RecordError("there is no recorded call with arguments")
        first = tuple(calls[0])
        like = [c for c in calls if call_form(c) == call_form(first)]
        strides: dict[str, Strides] = {}
        for a in first:
            if a.kind == "tensor":
                structure = stride_structure(a)
                if structure is None:
                    raise RecordError(
                        f"{a.name} of shape {list(a.shape)} has strides {list(a.stride)}, which overlap"
                    )
                strides[a.name] = structure
        like = [
            c for c in like if all(stride_structure(a) == strides[a.name] for a in c if a.kind == "tensor")
        ]
        vectors: dict[tuple[int, ...], list[str]] = {}
        for place in places(first):
            vectors.setdefault(tuple(places(c)[place] for c in like), []).append(place)
        inference = _SizeInference(first, like, vectors, evidence)
        return cls(
            first, inference.sizes(), inference.products, inference.of_strides, inference.powers(), strides
        )

    @classmethod
    def observed(cls, calls: Sequence[Sequence[Argument]]) -> CallSizes:
        """The common sizes of calls that a user's function drew: a size that never changed counts as fixed.

        Raises `RecordError` as `of` does, and for calls of different forms.
        """
        call_sizes = cls.of(calls)
        first = call_sizes.arguments
        if any(call_form(c) != call_form(first) for c in calls):
            raise RecordError(
                "calls must agree in names, kinds, dtypes, ranks, alignment and constexpr values"
            )
        words = {}
        for size in call_sizes.sizes:
            values = {places(c)[size.places[0]] for c in calls}
            parities = {v % 16 != 0 for v in values}
            word: str | int = "any" if len(parities) == 2 else "odd" if parities == {True} else "16"
            words[size] = word if len(values) > 1 and min(values) > 1 else size.recorded
        pinned = {
            a.name
            for i, a in enumerate(first)
            if _is_free_float(a) and a.name not in call_sizes.powers and len({c[i].value for c in calls}) == 1
        }
        return replace(call_sizes.with_classes(words), pinned=frozenset(pinned))

    @property
    def varied(self) -> tuple[SizeClass, ...]:
        """The sizes that change."""
        return tuple(s for s in self.sizes if s.varies)

    @property
    def near_constants(self) -> tuple[SizeClass, ...]:
        """Varied sizes that are a small multiple or part of a large constexpr: half of a head, say."""
        constants = [a.value for a in self.arguments if a.kind == "constexpr"]
        large = [c for c in constants if isinstance(c, int) and c >= _LARGE_CONSTANT]
        factors = range(2, _LARGEST_RATIO + 1)
        near = {v for c in large for f in factors for v in (c * f, c // f if c % f == 0 else 0)}
        return tuple(s for s in self.varied if s.recorded in near)

    def with_classes(self, words: Mapping[SizeClass, str | int]) -> CallSizes:
        """A copy with other classes for these sizes; their recorded value freezes one."""
        return replace(
            self, sizes=tuple(replace(s, size_class=words.get(s, s.size_class)) for s in self.sizes)
        )

    def untied(self, place: str) -> CallSizes:
        """A copy in which a scalar keeps its recorded value, whatever it was equal to."""
        classes: list[SizeClass] = []
        for s in self.sizes:
            if place in s.places:
                rest = tuple(p for p in s.places if p != place)
                classes += [replace(s, places=rest), SizeClass((place,), s.recorded, s.recorded)]
            else:
                classes.append(s)
        return replace(self, sizes=tuple(classes))

    def frozen(self) -> CallSizes:
        """A copy in which no size varies."""
        return self.with_classes({s: s.recorded for s in self.sizes})

    def signature(self, writes: Iterable[str] | None = None) -> str:
        """The calls that a check on calls drawn here holds for; `writes` as in `signature_of`."""
        free = {a.name for a in self.arguments if _is_free_float(a)} - {*self.powers, *self.pinned}
        names = {*places(self.arguments), *free, *self.powers}
        parts = {
            "arguments": call_form(self.arguments),
            "sizes": [{"places": list(s.places), "class": s.size_class} for s in self.sizes],
            "products": {p: [factor, list(run)] for p, (factor, run) in self.products.items()},
            "of_strides": {p: list(stride) for p, stride in self.of_strides.items()},
            "powers": {n: [list(run), e] for n, (run, e) in self.powers.items()},
            "strides": {n: [list(pair) for pair in pairs] for n, pairs in self.strides.items()},
            "fixed": {a.name: a.value for a in self.arguments if a.kind == "scalar" and a.name not in names},
        }
        return canonical_text({**parts, **writes_field(writes)})

    @property
    def draw_kinds(self) -> int:
        """The number of kinds of calls to draw: each size is large once, and small at least once.

        One of several sizes is large and the others are small in half of the calls. One size alone is large in one
        call of three, small in the next: a read beyond a small tensor would else show by chance alone.
        """
        return 3 if len(self.varied) == 1 else 2 * len(self.varied)

    def draw(
        self, rng: random.Random, *, most: int, reach: int = 512, turn: int | None = None
    ) -> tuple[Argument, ...]:
        """A call with new sizes, at most `most` elements a tensor if possible; as recorded if none varies.

        Sizes go up to `reach`. In half of the calls one of them is drawn large and the others are small, so
        that every loop runs more than once in some call; which kind it is, is `turn`'s to say, of `draw_kinds`, or
        chance.
        Raises `RecordError` when all that is drawn is huge.
        """
        if not self.varied:
            return tuple(self._scalars(dict(places(self.arguments)), self.arguments, rng))
        smallest: tuple[Argument, ...] | None = None
        turn = rng.randrange(self.draw_kinds) if turn is None else turn
        tall = self.varied[turn] if turn < len(self.varied) else None
        all_small = len(self.varied) == turn == 1
        for attempt in range(_MAX_DRAWS):
            # Later attempts draw smaller: a large first draw is likelier to reach every branch.
            top = max(2.0, reach ** (1.0 - attempt / _MAX_DRAWS))
            small = _SMALL_LIMIT if tall is not None or all_small else top
            sizes = {s: _draw_size(str(s.size_class), small, rng) for s in self.varied}
            if tall is not None:
                sizes[tall] = _draw_size(str(tall.size_class), top, rng, least=top / 2)
            if len(set(sizes.values())) < len(sizes) and attempt < _MAX_DRAWS // 2:
                continue  # equal by chance: a variant that mixes two sizes up would pass
            call = self._call(sizes, rng)
            if call is None:
                continue
            if largest_tensor(call) <= most:
                return call
            if smallest is None or largest_tensor(call) < largest_tensor(smallest):
                smallest = call
        if smallest is not None and largest_tensor(smallest) <= _LARGEST:
            return smallest
        raise RecordError(f"no sizes of these classes give tensors of at most {_LARGEST} elements")

    def _call(self, sizes: Mapping[SizeClass, int], rng: random.Random) -> tuple[Argument, ...] | None:
        values = {p: s.recorded if not s.varies else sizes[s] for s in self.sizes for p in s.places}
        for place, (factor, run) in self.products.items():
            values[place] = factor * math.prod(values[q] for q in run)
        tensors: dict[str, Argument] = {}
        for a in self.arguments:
            if a.kind == "tensor":
                shape = tuple(values[f"{a.name}.{i}"] for i in range(len(a.shape)))
                tensor = replace(a, shape=shape, stride=strides_from_structure(shape, self.strides[a.name]))
                if stride_structure(tensor) != self.strides[a.name]:
                    return None
                tensors[a.name] = tensor
        for place, (name, i) in self.of_strides.items():
            values[place] = tensors[name].stride[i]
        arguments = [tensors.get(a.name, a) for a in self.arguments]
        return tuple(self._scalars(values, arguments, rng))

    def _scalars(
        self, values: Mapping[str, int], arguments: Sequence[Argument], rng: random.Random
    ) -> Iterator[Argument]:
        for a in arguments:
            if a.name in values and a.kind == "scalar":
                yield replace(a, value=values[a.name])
            elif a.name in self.powers:
                yield replace(a, value=size_power(values, *self.powers[a.name]))
            elif _is_free_float(a) and isinstance(a.value, float):
                # Half of the launches have the recorded value, which may well be special.
                factor = rng.choice((1.0, rng.uniform(0.4, 2.2)))
                yield replace(a, value=a.value * factor if a.value else factor - 1.0)
            else:
                yield a


@dataclass
class _SizeInference:
    first: tuple[Argument, ...]
    like: Sequence[Sequence[Argument]]
    vectors: Mapping[tuple[int, ...], Sequence[str]]
    evidence: int
    products: dict[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    of_strides: dict[str, tuple[str, int]] = field(default_factory=dict)

    def sizes(self) -> tuple[SizeClass, ...]:
        """The classes of places of one size; fills `products` and `of_strides` with those that follow from others."""
        runs, quotients = self._runs(), self._quotients()
        classes = []
        for scalar in {scalar for scalar, _ in quotients.values()}:
            classes.append(SizeClass((scalar,), value := places(self.first)[scalar], value))
        for vector, members in self.vectors.items():
            names = [n for n in members if n not in {scalar for scalar, _ in quotients.values()}]
            if not names:
                continue
            run = runs.get(vector)
            dimension = any("." in name for name in names)
            if dimension and vector[0] in self._constants():
                classes.append(SizeClass(tuple(names), vector[0], vector[0]))
            elif run is not None and not set(run) & set(names):
                self.products |= {name: (1, run) for name in names}
            elif vector in quotients:
                self.products |= {name: (1, quotients[vector]) for name in names}
            elif (ratio := self._multiple(vector)) is not None:
                self.products |= {name: ratio for name in names}
            elif not dimension and (stride := self._stride(vector)) is not None:
                self.of_strides |= {name: stride for name in names}
            else:
                is_fixed = not dimension or vector[0] <= 1  # on 1 Triton specialises
                classes.append(SizeClass(tuple(names), vector[0], vector[0] if is_fixed else "any"))
        return tuple(classes)

    def powers(self) -> dict[str, tuple[tuple[str, ...], float]]:
        """Floating scalars that are a power of a size."""
        results: dict[str, tuple[tuple[str, ...], float]] = {}
        candidates: list[tuple[str, ...]] = [
            (names[0],) for vector, names in self.vectors.items() if min(vector) > 1
        ]
        candidates += list(self._runs().values())
        for index, a in enumerate(self.first):
            values = [call[index].value for call in self.like]
            if not _is_free_float(a) or not all(isinstance(v, float) and v not in (0.0, 1.0) for v in values):
                continue
            for run, exponent in itertools.product(candidates, _EXPONENTS):
                powers = [size_power(places(call), run, exponent) for call in self.like]
                if all(
                    isinstance(v, float) and math.isclose(v, p, rel_tol=1e-6)
                    for v, p in zip(values, powers, strict=True)
                ):
                    results[a.name] = (run, exponent)
                    break
        return results

    def _runs(self) -> dict[tuple[int, ...], tuple[str, ...]]:
        """Products of two or more neighbouring dimensions of one tensor, none of which is 1."""
        runs: dict[tuple[int, ...], tuple[str, ...]] = {}
        for a in self.first:
            for low, high in itertools.combinations(range(len(a.shape) + 1), 2):
                run = tuple(f"{a.name}.{i}" for i in range(low, high))
                each = [[places(call)[p] for p in run] for call in self.like]
                if len(run) > 1 and all(min(values) > 1 for values in each):
                    runs.setdefault(tuple(math.prod(values) for values in each), run)
        # A product of products would be read before it is written.
        products = {name for vector, names in self.vectors.items() if vector in runs for name in names}
        return {v: run for v, run in runs.items() if products.isdisjoint(run)}

    def _quotients(self) -> dict[tuple[int, ...], tuple[str, str]]:
        """Sizes that are a scalar times another one (heads = group x key heads): scalar and other's place."""
        quotients: dict[tuple[int, ...], tuple[str, str]] = {}
        scalars = {p: v for v, names in self.vectors.items() for p in names if "." not in p}
        dimensions = {v: p for v, names in self.vectors.items() for p in names if "." in p}
        positive = {vector for vector in dimensions if min(vector) > 0}
        for whole, (scalar, ratios), part in itertools.product(dimensions, scalars.items(), positive):
            if (
                whole != part
                and 1 < max(ratios) <= _LARGEST_GROUP
                and all(w == g * o for w, g, o in zip(whole, ratios, part, strict=True))
                and len(set(zip(ratios, part, strict=True))) >= self.evidence
                and not {whole, part} & self._runs().keys()
                and part not in quotients
                and not any(dimensions[whole] == place for _, place in quotients.values())
            ):
                quotients.setdefault(whole, (scalar, dimensions[part]))
        return quotients

    def _constants(self) -> set[Scalar]:
        return {a.value for a in self.first if a.kind == "constexpr" and not isinstance(a.value, bool)}

    def _multiple(self, vector: tuple[int, ...]) -> tuple[int, tuple[str, ...]] | None:
        """A factor and the place of a tensor's dimension that it is a small multiple of, in enough cases."""
        for base, names in self.vectors.items():
            factor = vector[0] // base[0] if base[0] > 1 else 0
            dimension = next((name for name in names if "." in name), "")
            if (
                dimension
                and 2 <= factor <= _LARGEST_RATIO
                # Where a constexpr is the factor (heads that share a key), one case is enough.
                and len(set(base)) >= (1 if factor in self._constants() else self.evidence)
                and all(v == factor * o for v, o in zip(vector, base, strict=True))
                # Chains of multiples would be read before they are written.
                and self._multiple(base) is None
                and base not in self._runs()
            ):
                return factor, (dimension,)
        return None

    def _stride(self, vector: tuple[int, ...]) -> tuple[str, int] | None:
        for index, a in enumerate(self.first):
            for i in range(len(a.shape)):
                if tuple(call[index].stride[i] for call in self.like) == vector and vector[0] > 1:
                    return a.name, i
        return None


def largest_tensor(call: Sequence[Argument]) -> int:
    """Elements of the largest tensor of a call."""
    return max((memory_span(a) for a in call if a.kind == "tensor"), default=0)


def _is_free_float(argument: Argument) -> bool:
    """A floating scalar that may have any value."""
    value: Scalar = argument.value
    return argument.kind == "scalar" and isinstance(value, float) and math.isfinite(value)


def _draw_size(word: str, top: float, rng: random.Random, least: float = 1.0) -> int:
    """A size of a class, log-uniform from `least` to `top`, so that small and large ones are as likely.

    Half of those of `any` are multiples of 16, as far as they fit.
    """
    step = int(word) if word.isdigit() else 16 if word == "any" and top >= 16 and rng.random() < 0.5 else 1
    while True:
        low, high = max(1.0, least / step), max(2.0, top / step)
        value = max(1, round(2 ** rng.uniform(math.log2(min(low, high)), math.log2(high)))) * step
        if in_size_class(value, word):
            return value
