"""The pool that `benchmarks.corpus.record_sources` records: which sources, configs and shapes; a gzipped file.

Made ahead, without a device: rewriting costs processor time, which compiling wants on the machine with the
GPUs. One line per kernel, in the order in which they are recorded: families and hands in turns, so that a
recording that is cut short is a fair sample. The rules of the choice are in that script's docstring.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernels
from benchmarks.lib.case_problems import problem_of_case
from benchmarks.lib.result_files import say
from benchmarks.lib.search.source_pool import BASE, LLM, MECHANICAL
from benchmarks.lib.variants import variant_corpus
from benchmarks.lib.variants.rewrite_cases import first_cases, load_variant, rewrites_of_case
from forecast_autotune.errors import RecordError, VariantError
from forecast_autotune.records import Config, digest
from forecast_autotune.records.table import read_tables
from forecast_autotune.variants import Variant
from forecast_integrations.triton.null_device import null_device
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.source import innermost

MOST_BYTES = 6e9
"""Of a shape's tensors."""
LEAST_MS, MOST_MS = 0.008, 2.0
"""Of the base's best recorded config at a shape: below, launches are mostly overhead; above, timing is dear."""
FEW_SHAPES = 3
"""A kernel whose largest group of shapes that share binaries is smaller gets shapes of other groups, too."""
BEST_CONFIGS = 3
"""Of the base's, as recorded at the chosen shapes: every source that lists them gets them."""


@dataclass(frozen=True)
class PreparedSource:
    """One source of a kernel with the configs that are tried, the most important first."""

    name: str
    """`base`, `<kernel>/<NN_short_name>` of what a model wrote, `<kernel>/<name>` of a rewrite."""
    origin: str
    note: str
    configs: tuple[Config, ...]
    shapes: tuple[int, ...]
    """Places among the kernel's shapes."""
    record: Variant | None = None
    """None for the base."""

    @property
    def variant(self) -> str:
        """What its measurements are filed under."""
        return BASE if self.record is None else self.record.name


@dataclass(frozen=True)
class PreparedKernel:
    """One kernel: its shapes and sources."""

    kernel: str
    shapes: tuple[str, ...]
    """Names of cases."""
    kinds: tuple[str, ...]
    """Of each shape: equal ones share binaries."""
    sources: tuple[PreparedSource, ...]

    def cases(self) -> list[kernels.Case]:
        """The shapes' cases."""
        known = {case.name: case for case in kernels.cases([self.kernel])}
        return [known[name] for name in self.shapes]

    def to_json(self) -> dict[str, Any]:
        """A line of the pool; each config is written once."""
        configs = list(dict.fromkeys(c for one in self.sources for c in one.configs))
        told = [
            {
                "name": one.name,
                "origin": one.origin,
                "note": one.note,
                "configs": [configs.index(c) for c in one.configs],
                "shapes": list(one.shapes),
                "record": None if one.record is None else one.record.to_json(),
            }
            for one in self.sources
        ]
        return {
            "kernel": self.kernel,
            "shapes": list(self.shapes),
            "kinds": list(self.kinds),
            "configs": [c.to_json() for c in configs],
            "sources": told,
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> PreparedKernel:
        """What `to_json` wrote."""
        configs = [Config.from_json(c) for c in line["configs"]]
        sources = [
            PreparedSource(
                one["name"],
                one["origin"],
                one["note"],
                tuple(configs[i] for i in one["configs"]),
                tuple(one["shapes"]),
                None if one["record"] is None else Variant.from_json(one["record"]),
            )
            for one in line["sources"]
        ]
        return cls(line["kernel"], tuple(line["shapes"]), tuple(line["kinds"]), tuple(sources))


def read_pool(path: Path) -> list[PreparedKernel]:
    """The kernels of a pool, in order."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return [PreparedKernel.from_json(json.loads(line)) for line in stream]


def write_pool(path: Path, pool: Iterable[PreparedKernel]) -> None:
    """Write a pool; the same one gives the same bytes."""
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
        packed.writelines(json.dumps(one.to_json(), separators=(",", ":")).encode() + b"\n" for one in pool)


# --- configs ---


def choose_configs(
    kernel: str, listed: Sequence[Config], best: Sequence[Config], each: int
) -> tuple[Config, ...]:
    """At most `each` of a source's configs: the base's best that it lists, then the lowest digests.

    A best config counts without the meta-parameters that the source has dropped.
    """
    takes = {name for config in listed for name, _ in config.kwargs}
    narrow = [replace(c, kwargs=tuple(p for p in c.kwargs if p[0] in takes)) for c in best]
    known = set(listed)
    rest = sorted(listed, key=lambda c: digest("pool", kernel, str(c)))
    return tuple(dict.fromkeys([*(c for c in narrow if c in known), *rest]))[:each]


def best_configs(ranked: Sequence[Sequence[Config]], most: int = BEST_CONFIGS) -> list[Config]:
    """Of the configs of several shapes, each best first: the best of each, then the second of each, ..."""
    longest = max((len(one) for one in ranked), default=0)
    turns = (one[place] for place in range(longest) for one in ranked if place < len(one))
    return list(dict.fromkeys(turns))[:most]


def recorded_times(paths: Sequence[Path]) -> dict[str, dict[Config, float]]:
    """Milliseconds of the base's configs by case, as recorded; the last time of a config counts."""
    found: dict[str, dict[Config, float]] = {}
    for path in paths:
        for table in read_tables(path):
            rows = found.setdefault(table.problem.extra.get("label", ""), {})
            rows.update(
                (m.candidate.config, m.ms) for m in table.measurements if m.ok and m.candidate.is_base_variant
            )
    return found


# --- shapes ---


@dataclass(frozen=True)
class ShapeFacts:
    """What the choice of shapes depends on."""

    name: str
    kind: str
    """Shapes of one kind share binaries, and have the same list of configs."""
    size: float
    """Bytes of the tensors."""
    ms: float
    """Of the base's best recorded config; NaN where none is recorded."""


def shape_facts(case: kernels.Case, best_ms: float) -> ShapeFacts:
    """Facts of a case, on the null device."""
    problem, named = problem_of_case(case)
    computed = describe.heuristic_values(case.kernel)
    added = [
        {k: repr(v) for k, v in computed({**named, **c.all_kwargs()}).items() if k not in named}
        for c in kernels.configs(case)
    ]
    kind = digest(
        describe.call_kind(problem, innermost(case.kernel)),
        [str(c) for c in kernels.configs(case)],
        added,
        case.reset_to_zero,
    )
    size = sum(
        math.prod(a.shape) * getattr(torch, a.dtype).itemsize for a in problem.arguments if a.kind == "tensor"
    )
    return ShapeFacts(case.name, kind, size, best_ms)


def choose_shapes(given: Sequence[ShapeFacts], most: int) -> list[ShapeFacts]:
    """At most `most` shapes of a kernel, in the order of `given`: small enough, and mostly of one kind.

    The first one, which authors of sources had in mind, is among them where it can be: a recorded time that
    is missing does not keep it out. The others are spread over the sizes.
    """
    timed = [s for s in given if s.size < MOST_BYTES and LEAST_MS <= s.ms <= MOST_MS]
    if not timed:
        timed = sorted((s for s in given if s.size < MOST_BYTES), key=lambda s: -s.size)[:FEW_SHAPES]
    first = given[0]
    fits = math.isnan(first.ms) and first.size <= max((s.size for s in timed), default=0.0)
    fine = [s for s in given if s in timed or (s is first and fits)]
    groups: dict[str, list[ShapeFacts]] = {}
    for shape in fine:
        groups.setdefault(shape.kind, []).append(shape)
    lead = groups.get(first.kind, [])
    ranked = sorted(groups.values(), key=lambda g: (-(g is lead and len(g) >= FEW_SHAPES), -len(g)))
    found: list[ShapeFacts] = []
    for group in ranked:
        if len(found) < FEW_SHAPES:
            room = most if not found else FEW_SHAPES - len(found)
            found += _spread(group, room, first)
    return [s for s in given if s in found]


def _spread(group: Sequence[ShapeFacts], most: int, first: ShapeFacts) -> list[ShapeFacts]:
    """At most `most` of a group by size, smallest and largest among them; the first shape in any case."""
    ordered = sorted(group, key=lambda s: s.size)
    if len(ordered) <= most:
        return ordered
    if most == 1:
        return [first if first in ordered else ordered[-1]]
    chosen = [ordered[round(i * (len(ordered) - 1) / (most - 1))] for i in range(most)]
    if first in ordered and first not in chosen:
        near = min(range(most), key=lambda i: abs(chosen[i].size - first.size))
        chosen[near] = first
    return chosen


# --- kernels ---


@dataclass(frozen=True)
class PoolLimits:
    """How much of each kernel is in a pool."""

    each: int = 8
    """Configs of a source at most."""
    base: int = 12
    """Configs of the base at most."""
    mechanical: int = 6
    """Rewrites of a kernel at most, unless it has few other sources."""
    fill: int = 11
    """More rewrites of those, to so many sources beside the base in all."""
    shapes: int = 7


def prepare_kernel(
    case: kernels.Case, times: Mapping[str, Mapping[Config, float]], limits: PoolLimits
) -> PreparedKernel:
    """All that is recorded of a kernel; on the null device."""
    kernel = case.name.partition("/")[0]
    cases = kernels.cases([kernel])
    given = [shape_facts(c, min(times.get(c.name, {}).values(), default=math.nan)) for c in cases]
    shapes = choose_shapes(given, limits.shapes)
    chosen = [c for c in cases if c.name in {s.name for s in shapes}]
    base = _common_configs(chosen)
    ranked = [sorted(times.get(c.name, {}), key=lambda x: times[c.name][x]) for c in chosen]
    best = best_configs([[c for c in one if c in set(base)] for one in ranked])
    everywhere = tuple(range(len(shapes)))
    sources = [PreparedSource(BASE, BASE, "", choose_configs(kernel, base, best, limits.base), everywhere)]
    listed = kernels.configs(chosen[0])
    for name, origin, note, record in _other_sources(case, limits):
        try:
            loaded = load_variant(case, record)
            own = [describe.to_config(c) for c in loaded.configs(listed)]
        except VariantError as error:
            say(f"left out: {name}: {error}"[:200])
            continue
        if not record.configs:  # the base's list, without what it has dropped
            names = {n for c in own for n, _ in c.kwargs}
            common = {replace(c, kwargs=tuple(p for p in c.kwargs if p[0] in names)) for c in base}
            own = [c for c in own if c in common]
        # What has the launch grid compiled in shares no binaries: two shapes, and half of the configs.
        alone = loaded.depends_on_call
        where = tuple(sorted({0, len(shapes) - 1})) if alone else everywhere
        tried = choose_configs(kernel, own, best, limits.each // 2 if alone else limits.each)
        source = PreparedSource(name, origin, note, tried, where, record)
        if source.variant not in {one.variant for one in sources}:
            sources.append(source)
    return PreparedKernel(
        kernel, tuple(s.name for s in shapes), tuple(s.kind for s in shapes), tuple(sources)
    )


def _common_configs(cases: Sequence[kernels.Case]) -> list[Config]:
    """Configs that all these cases list, in the order of the first."""
    lists = [[describe.to_config(c) for c in kernels.configs(case)] for case in cases]
    return [c for c in lists[0] if all(c in other for other in lists[1:])] or lists[0]


@cache
def _written_sources() -> list[variant_corpus.VariantSource]:
    """Of all tables that are there."""
    return variant_corpus.variant_sources(None, [t for t in variant_corpus.TABLES if t.is_file()])


def _other_sources(case: kernels.Case, limits: PoolLimits) -> Iterable[tuple[str, str, str, Variant]]:
    """Name, origin, note and record of what a model wrote, and of rewrites."""
    kernel = case.name.partition("/")[0]
    written = [one for one in _written_sources() if one.kernel == kernel]
    for one in written:
        try:
            yield one.name, LLM, one.summary, one.record()
        except (RecordError, AttributeError, NameError, TypeError, ValueError) as error:
            say(f"left out: {one.name}: {error!r}"[:200])
    limit = max(limits.mechanical, limits.fill - len(written))
    for record in rewrites_of_case(case, limit=limit):
        yield f"{kernel}/{record.name}", MECHANICAL, "+".join(record.extra["rewrites"]), record


def prepare_pool(only: Sequence[str], tables: Sequence[Path], limits: PoolLimits) -> list[PreparedKernel]:
    """The pool of these kernels, all by default; families and hands in turns."""
    times = recorded_times(tables)
    found = []
    with null_device():
        for case in first_cases(1_000_000):
            kernel = case.name.partition("/")[0]
            if not only or kernel in only:
                found.append(prepare_kernel(case, times, limits))
    return found
