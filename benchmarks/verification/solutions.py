"""Claims: no exploit is accepted, honest code is, and what is wrong in one place is refused.

    python -m benchmarks.verification.solutions --device cuda --out benchmarks/results/verification_h200.json
    python -m benchmarks.verification.solutions --device cpu --stages mutants --count 2000 --out FILE

`exploits`: the corpus of the tests, on the CPU, in an interpreter where it is Triton's, and on the device. A trick
that can bite on a CPU alone counts there alone. `honest`: the honest corpus and all solutions of the shipped packs.
One lane times, with nothing else at work. `kernels`: each of the benchmarks' kernels as a variant of itself, verified,
and with other configs held against one of its own at the call that a search times; on a CPU a few, at small calls.
`mutants`: solutions of packs, and Triton kernels, with one place changed by a rule of `mutation`. One counts once a
witness tells it from its base: a case of a generator of this file's own, of ten times as many as are verified, at
which the base alone is right. What raises at the first case is stillborn. Half of the rules, and of the bases, are held
out: what is mended is mended by survivors of the others. `speed`: the check before a search times a source, and
verification in full, beside the packages of `--beside FOLDER`, in turns.

Kernels and mutants of a file that exists go on where it ended; kernels that were not accepted are judged again.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from benchmarks import kernels
from benchmarks.lib import result_files
from benchmarks.lib.candidate_place import CandidatePlace
from benchmarks.lib.environment import ROOT
from benchmarks.lib.mutation import FAMILIES, VALUE_KINDS, Change, changed_sources, drawn_values
from benchmarks.lib.result_files import say
from forecast_autotune.errors import RecordError
from forecast_autotune.records import Argument, Config, digest
from forecast_autotune.store import Store
from forecast_autotune.variants import Origin, Provenance, Variant
from forecast_autotune.variants.entry import KernelEntry, nested_arguments
from forecast_autotune.variants.signature import memory_span
from forecast_harness.sandbox.api import JobStatus, SandboxError, SandboxJob, SandboxLane
from forecast_harness.sandbox.lane_pools import LanePool
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.targets.kernels.user_kernel import UserKernel
from forecast_harness.targets.packs import Language, Pack, Solution, builtin_names, load_pack
from forecast_harness.targets.packs.schema import PackFormat
from forecast_harness.trials.configs.source_configs import work_of_a_warp
from forecast_harness.trials.kernel_calls import error_limits
from forecast_harness.trials.kernel_cell import relative_error
from forecast_harness.trials.packs import first_plan
from forecast_harness.trials.race import RaceRules
from forecast_harness.trials.variants import call_sampling
from forecast_harness.trials.variants import verify as kernel_checks
from forecast_harness.trials.variants.base_runner import gap_mask, tensor_view
from forecast_harness.trials.variants.kernel_survey import call_source
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problem import DrawSpec, LaunchCase, NativeProblem, load_module
from forecast_harness.verify.run import VERIFICATION_LIMITS, verify
from forecast_harness.verify.tolerance import compare_with_base, same_bits, tensors_of, widened
from forecast_harness.verify.verdict import Judgement, ReasonCode, SolutionVerdict
from tests.harness import corpus
from tests.harness.small import checked_only

CORPORA = ROOT / "tests" / "harness"
CLOCKED = {ReasonCode.CLOCK, ReasonCode.IMPOSSIBLE, ReasonCode.COMPILES_WHILE_TIMED, "neutralised"}
"""An exploit that is expected to be found in one of these ways is judged with no other lane at work."""
_SAID = 400

Row: TypeAlias = dict[str, Any]
Tensors: TypeAlias = dict[str, torch.Tensor]
Task: TypeAlias = tuple[str, Callable[[SandboxLane], Row]]


class VerificationStages:
    """The stages of one run, which share its options and its report."""

    def __init__(
        self, arguments: argparse.Namespace, place: CandidatePlace, report: result_files.ResultFile
    ) -> None:
        self.a, self.place, self.report = arguments, place, report

    def go(
        self, stage: str, tasks: Sequence[Task], place: CandidatePlace, lanes: int, ends: float
    ) -> list[Row]:
        """Rows of these tasks, each recorded and shown as it comes; one that raises has a row with `error`."""

        def done(task: Task, lane: SandboxLane) -> Row:
            if (began := time.monotonic()) > ends:
                return {"name": task[0], "left_out": True}
            try:
                row = task[1](lane)
            except Exception as error:  # one entry less is worth less than all of the others
                row = {"error": f"{type(error).__name__}: {error}"[: 4 * _SAID]}
            return {"name": task[0], **row, "seconds": round(time.monotonic() - began, 3)}

        rows: list[Row] = []
        with LanePool(place.lane, max(1, min(lanes, len(tasks)))) as pool:
            jobs = kernel_checks.LaneJobs(pool, done)
            jobs.add(tasks)
            for _, row in jobs.results():
                rows.append(row)
                if "left_out" not in row:
                    self.report.add(stage, row)
                    shown = {n: row[n] for n in _SHOWN if n in row}
                    say(f"{stage} {len(rows)}/{len(tasks)} on {place.device}: {shown}"[:_SAID])
            jobs.close()
        return rows

    def exploits(self) -> Row:
        """Raises `RuntimeError` where one has changed who judges the next."""
        listed = self._chosen(corpus.read_corpus(CORPORA / "exploits"))
        before, ends, rows = fingerprint(), time.monotonic() + self.a.seconds, []
        for place in (CandidatePlace("cpu"), *([self.place] if self.place.device == "cuda" else [])):
            for alone in (True, False):
                tasks = exploit_tasks(listed, place, alone=alone)
                rows += self.go("exploits", tasks, place, 1 if alone else self.a.lanes, ends)
        if fingerprint() != before:
            raise RuntimeError("an exploit changed the harness or the corpora on disk: no verdict counts")
        # One counts where its trick is meant to bite.
        home = [r for r in rows if "found" in r and (r["backend"] == "gpu") == (r["where"] == "cuda")]
        accepted = [f"{r['name']} on {r['where']}" for r in home if "accepted" in r["found"]]
        modes = {"modes": len({r["mode"] for r in home}), "as_expected": sum(r["as_expected"] for r in home)}
        return {"exploits": len(home), **modes, "accepted": accepted, **_failed(rows)}

    def honest(self) -> Row:
        tasks = [
            (full_name(e), partial(_entry, replace(e, pack=self.place.sized(e.pack)), self.place))
            for e in self._chosen(honest_entries())
        ]
        rows = self.go("honest", tasks, self.place, 1, time.monotonic() + self.a.seconds)
        known = [r for r in rows if "found" in r and str(ReasonCode.HARNESS) not in r["found"]]
        wrong = {r["name"]: r["reasons"] for r in known if not r["as_expected"]}
        return {"judged": len(known), "accepted": len(known) - len(wrong), "refused": wrong, **_failed(rows)}

    def kernels(self) -> Row:
        listed = kernel_bases(self.place, None if self.place.device == "cuda" else _KERNELS)
        chosen = [b for b in listed if re.search(self.a.only, b.name)][: self.a.limit]
        known = self._known("kernels")
        right = {n: r for n, r in known.items() if r.get("found") == "accepted" and not r["when_timed"]}
        rows = [right[b.name] for b in chosen if b.name in right]
        self.report.put("kernels", rows)
        tasks = [(b.name, partial(_own_source, b)) for b in chosen if b.name not in right]
        rows += self.go("kernels", tasks, self.place, self.a.lanes, time.monotonic() + self.a.seconds)
        wrong = {r["name"]: r["reasons"] for r in rows if r.get("found", "accepted") != "accepted"}
        count, timed = sum("found" in r for r in rows), {r["name"]: r.get("when_timed") for r in rows}
        held = Counter("accepted" if not t else "refused" for t in timed.values() if t is not None)
        more = {"when_timed": dict(held), "refused_when_timed": {n: t for n, t in timed.items() if t}}
        return {"judged": count, "accepted": count - len(wrong), "refused": wrong, **more, **_failed(rows)}

    def mutants(self) -> Row:
        listed = [b for b in bases(self.place) if re.search(self.a.only, b.name)]
        torch.set_num_threads(1)
        chosen = drawn_mutants(listed, self.a.families, self.a.limit or self.a.count)
        before = {n: r for n, r in self._known("mutants").items() if "witness" in r}
        self.report.put("mutants", [before[m.id] for m in chosen if m.id in before])
        tasks = [(m.id, partial(judged, m, self.place)) for m in chosen if m.id not in before]
        ends = time.monotonic() + self.a.seconds
        failed = _failed(self.go("mutants", tasks, self.place, self.a.lanes, ends))
        rows = [r for r in self.report.data["raw"]["mutants"] if "witness" in r]
        kernels_only = _counts([r for r in rows if r["base"].startswith(KERNEL)])
        counted = {"drawn": len(chosen), "judged": len(rows), "kernels": kernels_only}
        return {**counted, "families": summarize_mutants(rows), **failed}

    def speed(self) -> Row:
        """Of every pack the ratio of the least of some turns, ours over the other's."""
        trees, ratios = {"here": ROOT, "beside": self.a.beside.resolve()}, Row()
        for name in _TIMED_PACKS:
            turns = [{t: _least_seconds(root, name) for t, root in trees.items()} for _ in range(_TURNS)]
            self.report.add("verifications", {"pack": name, "turns": turns})
            here, beside = (
                {n: min(one[t][n] for one in turns) for n in ("first_s", "full_s")} for t in trees
            )
            ratios[name] = {n: round(here[n] / beside[n], 3) for n in here}
        return ratios

    def _known(self, stage: str) -> dict[str, Row]:
        """Rows of the file as it was, each with the commit that it was judged at."""
        rows = [(k["environment"]["commit"], r) for k in self.a.known for r in k["raw"].get(stage, [])]
        return {r["name"]: {"commit": commit, **r} for commit, r in rows}

    def _chosen(self, listed: Iterable[corpus.CorpusEntry]) -> list[corpus.CorpusEntry]:
        able = [e for e in listed if self.place.device == "cuda" or e.backend == "cpu"]
        return [e for e in able if re.search(self.a.only, str(e.path))][: self.a.limit]


STAGES = ("exploits", "honest", "kernels", "mutants", "speed")
_SHOWN = ("name", "seconds", "error", "found", "as_expected", "base", "rule", "witness", "verify", "quick")


_TIMED_PACKS, _TURNS = ("softmax", "layer_norm", "cumsum"), 3
_TIMED_TEXT = """
import json, sys
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import verify
first = full = VerificationPlan()
try:
    from forecast_harness.targets.packs import load_pack
    from forecast_harness.trials.packs import first_plan
    first = first_plan(full)
except ImportError:  # until November 2026 a source was verified in full before it was timed
    from forecast_harness.packs import load_pack
pack = load_pack(sys.argv[1])
pack = pack.with_(workloads=pack.checked_workloads)
with SandboxLane() as lane:
    plans = {"first_s": first, "full_s": full}
    taken = {n: [verify(pack, pack.solution("torch_plain"), lane, plan=p) for _ in range(4)] for n, p in plans.items()}
assert all(one.accepted for verdicts in taken.values() for one in verdicts)
print(json.dumps({n: min(one.seconds for one in verdicts) for n, verdicts in taken.items()}))
"""
"""A program that any build's packages run."""


def _least_seconds(root: Path, pack: str) -> dict[str, float]:
    """What a right solution of a pack takes with the packages of a folder."""
    packages = os.pathsep.join(str(root / folder) for folder in ("", "integrations", "harness", "train"))
    command = [sys.executable, "-c", _TIMED_TEXT, pack]
    with tempfile.TemporaryDirectory() as away:  # what lies here is not to be imported
        done = subprocess.run(
            command, capture_output=True, check=True, cwd=away, env={**os.environ, "PYTHONPATH": packages}
        )
    return dict(json.loads(done.stdout))


def fingerprint() -> bytes:
    """The harness and the corpora on disk: an exploit that escapes could change who judges the next."""
    return b"".join(f.read_bytes() for d in (ROOT / "harness", CORPORA) for f in sorted(d.rglob("*.py")))


def exploit_tasks(entries: Iterable[corpus.CorpusEntry], place: CandidatePlace, *, alone: bool) -> list[Task]:
    """Exploits that are judged alone, as a clock has a say in them, or the others; those that need a device first.

    On a CPU those are left out. What attacks no clock has small sizes on a device, too.
    """
    able = [e for e in entries if place.device == "cuda" or e.backend == "cpu"]
    chosen = [e for e in able if (e.backend == "gpu" or bool(e.expected & CLOCKED)) == alone]
    sized = [e if alone and place.device == "cuda" else replace(e, pack=checked_only(e.pack)) for e in chosen]
    return [(e.name, partial(_entry, e, place)) for e in sorted(sized, key=lambda e: e.backend != "gpu")]


def honest_entries() -> Iterator[corpus.CorpusEntry]:
    """The honest corpus, then every solution of every shipped pack; by name, with its pack."""
    for e in corpus.read_corpus(CORPORA / "honest"):
        yield replace(e, path=Path("honest") / e.path.name)
    for pack in map(load_pack, builtin_names()):
        written = pack.definition.outputs.values()
        for s in pack.solutions:
            # Triton's interpreter cuts to bfloat16 where compiled code rounds: no CPU can find such a one right.
            cut = s.language is Language.TRITON and any(t.dtype == "bfloat16" for t in written)
            path, backend = Path(pack.definition.name) / s.name, "gpu" if cut else "cpu"
            yield corpus.CorpusEntry(path, "", s.name, backend, pack, s, frozenset({"accepted"}), None)


def full_name(entry: corpus.CorpusEntry) -> str:
    """`honest/name`, or `pack/name`."""
    return str(entry.path.with_suffix(""))


def _own_source(base: KernelBase, lane: SandboxLane) -> Row:
    """The verdict on a kernel's own source, as a variant of it; an error where nothing can be drawn for it.

    `when_timed`: whether a search refuses it before it times it.
    """
    base.prepare(lane, 0)
    again = f"{base.source}\n_AGAIN = 1\n"
    (_, verdict), *_ = base.verdicts(again, lane, 4 * _HUNG_S)  # real sizes, beside other lanes
    reasons = [f"{r.code}: {r.detail} ({r.trial})"[:_SAID] for r in verdict.reasons]
    row = {"found": str(verdict.judgement), "reasons": reasons, "trials": verdict.trials}
    try:
        return row | base.timed_beside_itself(again, lane)
    except Exception as error:
        return {**row, "when_timed": f"{type(error).__name__}: {error}"[-_SAID:]}


def _entry(entry: corpus.CorpusEntry, place: CandidatePlace, lane: SandboxLane) -> Row:
    tried = corpus.verify_entry(entry, lane, place.plan(entry.solution.language), VERIFICATION_LIMITS)
    row: Row = {"mode": entry.mode, "backend": entry.backend, "where": place.device}
    if (verdict := tried.verdict) is not None:
        row["reasons"] = [f"{r.code}: {r.detail} ({r.trial})"[:_SAID] for r in verdict.reasons]
        row |= {"trials": verdict.trials, "verdict_s": round(verdict.seconds, 3)}
    answers = {"expected": sorted(entry.expected), "found": sorted(tried.found)}
    return {**row, **answers, "as_expected": tried.as_expected}


def _failed(rows: Sequence[Row]) -> Row:
    """Rows that show nothing: the harness failed, or the honest twin of an exploit did."""
    failed = [r["name"] for r in rows if any(f == ReasonCode.HARNESS or " " in f for f in r.get("found", ()))]
    errors = {r["name"]: r["error"] for r in rows if "error" in r}
    return {"infrastructure": failed, "errors": errors, "left_out": sum("left_out" in r for r in rows)}


# --- mutants: what is changed, and how it is launched ---

WITNESS_FACTOR = 10
_WITNESS_S, _HUNG_S = 15.0, 60.0
"""Seconds after which no more cases are tried, and after which a launch counts as one that never ends."""
_SEED = 1
_KERNELS = ("transpose", "swiglu", "splitk_gemv", "cross_entropy", "cumsum", "softmax", "chunk_l2norm",
            "fn_weight_norm")  # fmt: skip
"""Modules by several hands; an interpreter takes minutes to survey most others."""
_KERNEL_CONFIGS, _RACED_CONFIGS, _TILE, _MOST_PROGRAMS = 2, 3, 1024, 12
"""Configs of a kernel, others that are held against one, about how many elements tiles have, programs of a launch: an
interpreter runs one after the other."""
_RIVALS = 8
"""Configs of which the first that runs is held to be right."""
KERNEL = "kernel/"
_TIMED_DRAWS = 60
_MARGIN = 256
"""Elements around a tensor of a kernel, in which nothing may change."""


class Comparison(NamedTuple):
    """A mutant beside its base at one case."""

    label: str
    problem: str
    """Empty for none."""
    same: bool
    """Whether all bits are."""
    allclose: bool
    """Whether usual tolerances find a problem."""


@dataclass
class PackBase:
    """A solution of a pack."""

    name: str
    source: str
    pack: Pack
    solution: Solution
    place: CandidatePlace

    def compared(self, mutant: str, folder: Path, first: int, count: int) -> Iterator[Comparison]:
        problem, device = NativeProblem(self.pack, folder), self.place.device
        right, wrong = (
            getattr(load_module(source, folder, name), self.solution.entry)
            for name, source in (("base", self.source), ("mutant", mutant))
        )
        for label, case in itertools.islice(self._cases(problem, count), first, None):
            expected, written = _solution_results(right, case, device)
            if written or case.judge(case.tensors, expected)[0]:
                continue  # what the base does not do, nobody has to
            got, written = _solution_results(wrong, case, device)
            finding = case.judge(case.tensors, got)[0]
            said = "writes inputs" if written else finding[1] if finding else ""
            same = all(map(same_bits, got, expected))
            usual = _usual_finding(case.right() if case.right is not None else [], got)
            yield Comparison(label, said, same, usual)

    def _cases(self, problem: NativeProblem, count: int) -> Iterator[tuple[str, LaunchCase]]:
        """Edges of sizes, other values, rows further apart. The first case is plain."""
        rng, definition = random.Random(f"{self.name} {_SEED}"), self.pack.definition
        works = self.pack.checked_workloads
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        how = DrawSpec("normal", "contiguous", generator)
        yield "plain", problem.case(works[0].axes, how)
        free = {n: a for n, a in definition.axes.items() if a.value is None}
        for n in range(1, count):
            sizes = {name: _size(max(1, a.low), a.high, a.multiple, rng) for name, a in free.items()}
            case = problem.case(sizes if n % 5 else works[rng.randrange(len(works))].axes, how)
            kind, tensors = VALUE_KINDS[n % len(VALUE_KINDS)], dict(case.tensors)
            for name in (name for name in definition.inputs if name in tensors):
                spec, value = definition.inputs[name], tensors[name]
                # Numbers of [0, 1) alone mean a mask, a gate or a decay: no other ones make sense.
                if value.is_floating_point() and "normal" in spec.values and not spec.static:
                    value = drawn_values(kind if rng.random() < 0.8 else "x1", value, generator)
                if "padded" in spec.layouts and rng.random() < 0.3 and value.dim() > 1:
                    rest = torch.full((*value.shape[:-1], rng.randrange(1, 9)), 77).to(value.dtype)
                    value = torch.cat([value, rest], -1)[..., : value.shape[-1]]
                tensors[name] = value
            yield f"{kind} {dict(case.sizes or {})}", replace(case, tensors=tensors)

    def verdicts(self, mutant: str, lane: SandboxLane) -> Iterator[tuple[str, SolutionVerdict]]:
        plan = replace(self.place.plan(Language.TORCH), cases=VerificationPlan().cases)
        solution, limits = replace(self.solution, source=mutant), replace(VERIFICATION_LIMITS, wall_s=_HUNG_S)
        for name, one in (("verify", plan), ("quick", first_plan(plan))):
            yield name, verify(self.place.sized(self.pack), solution, lane, plan=one, limits=limits)


def _solution_results(
    entry: Callable[..., Any], case: LaunchCase, device: str
) -> tuple[list[torch.Tensor], bool]:
    """The outputs of one call, and whether an input was written."""
    given = {n: t.new_empty_strided(t.shape, t.stride()).copy_(t).to(device) for n, t in case.tensors.items()}
    outputs = {n: t.clone().to(device) for n, t in case.outputs.items()}
    scalars = {n: one["v"] for n, one in case.call["kwargs"].items() if "v" in one}
    result = entry(**given, **outputs, **scalars)
    result = list(outputs.values()) or tensors_of(result)
    written = any(not same_bits(given[n].cpu(), t) for n, t in case.tensors.items())
    return [t.cpu().clone() for t in result], written


def _size(low: int, high: int, multiple: int, rng: random.Random) -> int:
    """Mostly the least, the most, a power of two, or one beside these."""
    near = [low, low + multiple, high, high - multiple, *((1 << n) + d for n in range(9) for d in (-1, 0, 1))]
    able = [n for n in near if low <= n <= high and n % multiple == 0]
    any_size = rng.randrange(low // multiple or 1, high // multiple + 1) * multiple
    return rng.choice(able) if rng.random() < 0.7 else any_size


def _usual_finding(want: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> bool:
    if [t.shape for t in want] != [t.shape for t in got]:
        return True
    limits = [1e-4 if t.dtype.itemsize >= 4 else 1e-2 for t in want]
    pairs = zip(got, want, limits, strict=True)
    return not all(torch.allclose(a.double(), b.double(), rtol=limit, atol=limit) for a, b, limit in pairs)


class KernelCall(NamedTuple):
    """One launch of a kernel in the interpreter, and what its base leaves behind, in a wider dtype where it can."""

    label: str
    arguments: Sequence[Argument]
    memory: Tensors
    config: Config
    grid: Sequence[int]
    plain: Tensors
    wide: Tensors | None


@dataclass
class KernelBase:
    """A kernel of `benchmarks.kernels`, with the configs that are quickest in an interpreter.

    Its calls are made once, with what it leaves behind, but for a device: this process holds no context of it, and each
    mutant's child makes the same ones again.
    """

    name: str
    source: str
    subject: BaseKernel
    place: CandidatePlace
    known: KernelSurvey | RecordError | None = None
    calls: list[KernelCall | None] = field(default_factory=list)
    listed: Sequence[Config] = ()
    """Configs that it has for a device."""
    timed: Sequence[KernelCall] = ()
    """Calls as those that are recorded, one a config: sizes that tiles divide, several tiles, normal values."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: a mutant's own draws the same calls."""
        return {n: v for n, v in vars(self).items() if n not in ("lock", "_draws")}

    def prepare(self, lane: SandboxLane, count: int) -> None:
        """Raises `RecordError` for a kernel of which a survey finds nothing that it accepts."""
        with self.lock:
            if isinstance(self.known, RecordError):
                raise self.known
            try:
                self.known = self.known or kernel_checks.survey(self.subject, lane, plan=self._plan)
            except RecordError as error:
                self.known = error
                raise
            if self.place.device != "cpu":
                return
            self.timed = self.timed or self._timed_calls(self.known)
            ends = time.monotonic() + _WITNESS_S
            while len(self.calls) < count and time.monotonic() < ends:
                self.calls.append(next(self._draws))

    @property
    def _plan(self) -> VerificationPlan:
        where = self.place
        here = {"device": where.device, "peaks": where.peaks, "index": where.index, "uuid": where.uuid}
        return replace(kernel_checks.VARIANT_PLAN, **here)

    def _opened(self, known: KernelSurvey) -> tuple[call_sampling.RecordedCalls, KernelEntry]:
        source = call_source(self.subject, known, "cpu")
        assert isinstance(source, call_sampling.RecordedCalls)
        with tempfile.TemporaryDirectory() as folder:
            module = load_module(self.source, Path(folder), "base")
        return source, KernelEntry.of(vars(module), self.subject.kernel)

    def _timed_calls(self, known: KernelSurvey) -> list[KernelCall]:
        rng, results = random.Random(f"{self.name} {_SEED} timed"), list[KernelCall]()
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        source, entry = self._opened(known)
        sizes = source.sizes.with_classes(dict.fromkeys(source.sizes.varied, "16"))
        for config in self.subject.configs:
            reach = 3 * max([64, *(v for _, v in config.kwargs if type(v) is int)])
            drawn = [sizes.draw(rng, most=1 << 15, reach=reach) for _ in range(_TIMED_DRAWS)]
            grids = ((one, source.grid_of(one, config.parameters())) for one in drawn)
            able = [(one, grid) for one, grid in grids if grid and math.prod(grid) <= 2 * _MOST_PROGRAMS]
            largest = [sum(memory_span(a) for a in one if a.kind == "tensor") for one, _ in able]
            arguments, grid = able[largest.index(max(largest))]
            memory = self._memory(arguments, "x1", generator)
            call = KernelCall(f"recorded {config}", arguments, memory, config, grid, {}, None)
            plain, problem = _kernel_results(entry, call, known.writes, self.place.device)
            if not problem:
                results.append(call._replace(plain=plain))
        return results

    @cached_property
    def _draws(self) -> Iterator[KernelCall | None]:
        """The base's results at other calls, None where they are nothing to go by; the first has plain values."""
        rng, known = random.Random(f"{self.name} {_SEED}"), self.known
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        assert isinstance(known, KernelSurvey)
        source, entry = self._opened(known)
        for n in itertools.count():
            config = self.subject.configs[n % len(self.subject.configs)]
            tiles = [v for _, v in config.kwargs if type(v) is int]
            reach = _size(4, 2 * max([*tiles, 16]) + 1, 1, rng)
            drawn = (source.sizes.draw(rng, most=1 << 13, reach=max(4, reach >> m)) for m in range(8))
            grids = ((one, source.grid_of(one, config.parameters())) for one in drawn)
            able = ((one, grid) for one, grid in grids if grid and math.prod(grid) <= _MOST_PROGRAMS)
            arguments, grid = next(able, ((), ()))
            if not arguments:
                yield None
                continue
            kind = VALUE_KINDS[n % len(VALUE_KINDS)]
            memory = self._memory(arguments, kind, generator)
            shown = " ".join(f"{a.name}{list(a.shape)}" for a in arguments if a.kind == "tensor")
            call = KernelCall(f"{kind} {shown} {config}", arguments, memory, config, grid, {}, None)
            try:
                plain, problem = _kernel_results(entry, call, known.writes, self.place.device)
            except Exception:  # not every base can be launched with what was drawn
                plain, problem = {}, "fails"
            wide = None
            with contextlib.suppress(Exception):  # a kernel may say which dtypes it takes
                wider = {k: widened(t, self.place.device) for k, t in memory.items()}
                wide, _ = _kernel_results(entry, call._replace(memory=wider), known.writes, self.place.device)
            yield None if problem else call._replace(plain=plain, wide=wide)

    def _memory(self, arguments: Sequence[Argument], kind: str, generator: torch.Generator) -> Tensors:
        tensors = [a for a in arguments if a.kind == "tensor"]
        least = min((n for a in tensors for n in a.shape if n > 1), default=2)
        result = {}
        for a in tensors:
            flat = torch.zeros(memory_span(a), dtype=getattr(torch, a.dtype))
            if flat.is_floating_point():
                flat = drawn_values(kind, flat, generator)
            else:
                high = (
                    2
                    if flat.dtype == torch.bool
                    else least
                    if call_sampling.is_index_dtype(flat.dtype)
                    else 127
                )
                flat = torch.randint(0, high, flat.shape, generator=generator).to(flat.dtype)
            result[a.name] = torch.where(gap_mask(a), call_sampling.unset_like(flat), flat)
            if a.name in self.subject.zeroed:
                result[a.name].zero_()
        return result

    def compared(self, mutant: str, folder: Path, first: int, count: int) -> Iterator[Comparison]:
        assert isinstance(self.known, KernelSurvey)
        writes = self.known.writes
        entry = KernelEntry.of(vars(load_module(mutant, folder, "mutant")), self.subject.kernel)
        calls = self.calls[first:count] or itertools.islice(self._draws, first, count)
        for call in (c for c in calls if c is not None):
            got, problem = _kernel_results(entry, call, writes, self.place.device)
            for name, want in call.plain.items():
                wide = None if call.wide is None else call.wide[name]
                problem = problem or compare_with_base(got[name], want, wide)[0]
            same = all(same_bits(got[n], t) for n, t in call.plain.items())
            usual = _usual_finding(list(call.plain.values()), list(got.values()))
            yield Comparison(call.label, problem, same, usual)

    def checked_on_call(self, mutant: str) -> Row:
        """Whether a search times it: after one launch at the recorded call of each config."""
        assert isinstance(self.known, KernelSurvey)
        with tempfile.TemporaryDirectory() as folder:
            entry = KernelEntry.of(vars(load_module(mutant, Path(folder), "mutant")), self.subject.kernel)
        for call in self.timed or self._timed_calls(self.known):
            dtypes = {a.name: a.dtype for a in call.arguments if a.kind == "tensor"}
            limits = error_limits(dtypes, self.source)
            got, problem = _kernel_results(entry, call, self.known.writes, self.place.device)
            if problem or any(relative_error(got[n], t) > limits[n] for n, t in call.plain.items()):
                return {"accepted": False}
        return {"accepted": True}

    def verdicts(
        self, mutant: str, lane: SandboxLane, hung_s: float = _HUNG_S
    ) -> Iterator[tuple[str, SolutionVerdict]]:
        variant = Variant.of(self.subject.kernel, "", mutant, Provenance(Origin.LLM))
        assert isinstance(self.known, KernelSurvey)
        limits = replace(kernel_checks.VARIANT_LIMITS, wall_s=hung_s, cpu_s=hung_s)
        slug = "interpreter" if self.place.device == "cpu" else "-".join(self.place.name.lower().split())
        one = kernel_checks.verify_variant(
            variant, self.subject, self.known, lane, device=slug, plan=self._plan, limits=limits
        )
        yield "verify", one.verdict

    def timed_beside_itself(self, again: str, lane: SandboxLane) -> Row:
        """How a search's race takes the same source with other configs, at the recorded call."""
        assert isinstance(self.known, KernelSurvey)
        subject, on_host = self.subject, self.place.device == "cpu"
        listed = sorted(subject.configs if on_host else self.listed, key=work_of_a_warp)
        drawn = random.Random(f"{self.name} {_SEED}").sample(listed, min(_RACED_CONFIGS, len(listed)))
        payload = {
            "subjects": [replace(subject, calls=subject.calls[on_host:]).to_json()],
            "writes": [list(self.known.writes)],
            "updates": [list(self.known.updates)],
            "against": {"source": self.source, "configs": [c.to_json() for c in listed[:_RIVALS]]},
            "variant": {"source": again, "configs": [c.to_json() for c in drawn]},
            "device": self.place.device,
            "rules": RaceRules(rung=1, first=1, least=1, seconds=0.0).to_json(),
        }
        files = {"against.py": self.source, "variant.py": again}
        job = SandboxJob("forecast_harness.trials.race_job:race_kernel", payload, files)
        result = lane.run(
            job, replace(kernel_checks.VARIANT_LIMITS, wall_s=_HUNG_S, cpu_s=_HUNG_S * len(drawn))
        )
        if result.status is not JobStatus.OK:
            raise SandboxError(f"{result.fault}: {result.detail}")
        caught = result.value["caught"] | ({"0": i} if (i := result.value.get("incumbent")) else {})
        refusals = [
            f"{drawn[int(n)]}: {r['code']}: {r['detail']}"[:_SAID] for n, all_ in caught.items() for r in all_
        ]
        return {"when_timed": refusals, "raced": len(drawn), "unable": len(result.value["unable"])}


def _kernel_results(
    entry: KernelEntry, call: KernelCall, writes: Sequence[str], device: str
) -> tuple[Tensors, str]:
    """The written tensors after a launch, as the kernel sees them; a phrase for others that changed ('' for none)."""
    whole = {n: call_sampling.unset_like(t.new_empty(len(t) + 2 * _MARGIN)) for n, t in call.memory.items()}
    whole = {n: t.to(device) for n, t in whole.items()}
    memory = {n: t[_MARGIN : len(t) - _MARGIN] for n, t in whole.items()}
    for name, flat in call.memory.items():
        memory[name].copy_(flat)
    before = {n: t.clone() for n, t in whole.items()}
    tensors = {a.name: tensor_view(memory[a.name], a) for a in call.arguments if a.kind == "tensor"}
    scalars = {a.name: call_sampling.scalar_value(a) for a in call.arguments if a.kind != "tensor"}
    meta = dict(call.config.kwargs)
    options = {n: v for n, v in call.config.parameters().items() if n not in meta}
    entry.run(list(call.grid), nested_arguments({**tensors, **scalars}), meta, options)
    problem = ""
    for name, t in whole.items():
        edges = slice(0, _MARGIN), slice(len(t) - _MARGIN, len(t))
        checked = edges if name in writes else (slice(0, len(t)),)
        if not all(same_bits(t[part], before[name][part]) for part in checked):
            problem = f"outside of what it may write, or into an input: {name}"
    return {n: tensors[n].cpu().clone() for n in writes}, problem


Base: TypeAlias = PackBase | KernelBase


def bases(place: CandidatePlace) -> list[Base]:
    """Solutions of the shipped packs and of the honest corpus that need no compiler, and kernels."""
    packs: list[Base] = [
        PackBase(full_name(e), e.solution.source, e.pack, e.solution, place)
        for e in honest_entries()
        if e.backend == "cpu" and e.pack.definition.format is PackFormat.OWN and "compiled" not in e.name
    ]
    return [*packs, *kernel_bases(place, _KERNELS)]


def kernel_bases(place: CandidatePlace, names: Sequence[str] | None) -> list[KernelBase]:
    """Kernels of these modules of `benchmarks.kernels`, of all by default."""
    store, results = Store(Path(tempfile.mkdtemp())), dict[str, KernelBase]()
    for case in kernels.cases(names):
        name = KERNEL + case.name.partition("/")[0]
        module = inspect.getmodule(getattr(case.make, "func", case.make))
        if name in results or module is None:
            continue
        attribute = next(n for n, value in vars(module).items() if value is case.kernel)
        path = Path(inspect.getfile(module))
        subject, *_ = UserKernel.of_function(path, module, attribute, case.kernel).subjects(store)
        tiles = {c.kwargs: math.prod(v for _, v in c.kwargs if type(v) is int) for c in subject.configs}
        quick = sorted(tiles, key=lambda kwargs: abs(math.log2(tiles[kwargs] / _TILE)))
        configs = tuple(Config(kwargs, 4, 1) for kwargs in quick[:_KERNEL_CONFIGS])
        few = replace(subject, configs=configs)
        results[name] = KernelBase(name, subject.source, few, place, listed=subject.configs)
    return list(results.values())


class Mutant(NamedTuple):
    """A base with one place changed."""

    base: Base
    change: Change

    @property
    def id(self) -> str:
        """A name that another run gives it, too."""
        return digest("mutant", self.base.name, self.change.source)[:12]

    @property
    def held_out(self) -> bool:
        """Whether its rule or its base is left alone until the end."""
        named = ("rule", self.change.rule), ("base", self.base.name)
        return any(int(digest("held out", *one)[:8], 16) % 2 for one in named)


def drawn_mutants(listed: Sequence[Base], families: Sequence[str], count: int) -> list[Mutant]:
    """Mutants of packs and kernels in turns, each of the families in turns, and of all rules in turns within these."""
    rng, rows = random.Random(_SEED), []
    for kind in (PackBase, KernelBase):
        some = [b for b in listed if isinstance(b, kind)]
        heaps: dict[str, dict[str, list[Mutant]]] = {f: {} for f in families}
        for mutant in (Mutant(base, change) for base in some for change in changed_sources(base.source)):
            if mutant.change.family in heaps:
                heaps[mutant.change.family].setdefault(mutant.change.rule, []).append(mutant)
        for heap in (heap for rules in heaps.values() for heap in rules.values()):
            rng.shuffle(heap)
        rows.append(_in_turns([_in_turns([rules[r] for r in sorted(rules)]) for rules in heaps.values()]))
    return _in_turns(rows)[:count]


def _in_turns(lists: Sequence[Sequence[Mutant]]) -> list[Mutant]:
    return [m for turn in itertools.zip_longest(*lists) for m in turn if m is not None]


# --- mutants: judging ---


def witness(mutant: Mutant, first: int, count: int) -> Row:
    """`wrong`, with the case that tells; `within` the limits, but of other bits; `equal`; or `stillborn`.

    Beside it, what simple comparisons of the first case find. Runs in a process of its own.
    """
    ends, seen, one = time.monotonic() + _WITNESS_S, Counter[str](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for case in mutant.base.compared(mutant.change.source, Path(folder), first, count):
                one = one or {"allclose": case.allclose}
                if case.problem:
                    return {"witness": "wrong", "at": case.label, "why": case.problem[:160], **one}
                seen["within"] += not case.same
                seen["cases"] += 1
                if time.monotonic() > ends:
                    break
        except Exception as error:
            kind = "wrong" if seen["cases"] or first else "stillborn"
            return {"witness": kind, "at": "", "why": repr(error)[:160], **one}
        return {"witness": "within" if seen["within"] else "equal", "cases": seen["cases"], **one}


_FORKING = multiprocessing.get_context("forkserver")
"""Mutants are launched in forks of a process that has imported all of this, and nothing else: it has asked for no
device, and no other thread of it holds a lock."""


def apart(function: Callable[[], Row], seconds: float) -> Row:
    """The result of a function in a process of its own; a crash, an error or too many seconds there is `wrong`."""
    read, write = _FORKING.Pipe(duplex=False)
    child = _FORKING.Process(target=_answer, args=(write, pickle.dumps(function)), daemon=True)
    child.start()
    write.close()
    try:
        return dict(read.recv()) if read.poll(seconds) else _NO_ANSWER
    except EOFError:
        return _NO_ANSWER
    finally:
        child.kill()
        child.join()
        read.close()


_NO_ANSWER: Row = {"witness": "wrong", "at": "", "why": "crash or time-out"}


def _answer(write: Any, function: bytes) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    write.send(pickle.loads(function)())  # made by this file's own parent


def judged(mutant: Mutant, place: CandidatePlace, lane: SandboxLane) -> Row:
    """All that is said of one mutant."""
    base, change = mutant.base, mutant.change
    row: Row = {**change._asdict(), "source": mutant.id, "base": base.name, "held_out": mutant.held_out}
    of_kernel = isinstance(base, KernelBase)
    count = WITNESS_FACTOR * (kernel_checks.VARIANT_PLAN if of_kernel else VerificationPlan()).cases
    # Most are told from their base by a few cases, and what an interpreted base does at all of them takes long.
    first, found = 0, Row()
    for upto in (count // WITNESS_FACTOR, count) if of_kernel else (count,):
        if isinstance(base, KernelBase):
            base.prepare(lane, upto)
        again = apart(partial(witness, mutant, first, upto), _HUNG_S)
        found, first = again | {n: found[n] for n in ("allclose",) if n in found}, upto
        if found["witness"] in ("wrong", "stillborn"):
            break
    row |= found
    if row["witness"] == "stillborn" or (row["witness"] != "wrong" and (of_kernel or place.device != "cpu")):
        return row  # it would take longest to accept what nothing tells from its base
    for name, verdict in base.verdicts(change.source, lane):
        if verdict.judgement is Judgement.INFRASTRUCTURE:
            raise SandboxError(f"{name}: {verdict.reasons[0].detail}"[:200])
        row |= {name: str(verdict.judgement), f"{name}_s": round(verdict.seconds, 3)}
    if isinstance(base, KernelBase):
        refused = apart(partial(base.checked_on_call, change.source), _HUNG_S)
        row["quick"] = "accepted" if refused.get("accepted") else "rejected"
    return row


def summarize_mutants(rows: Sequence[Row]) -> Row:
    """Counts and kill rates by family, of all mutants and of those held out."""
    of = {f: [r for r in rows if f in (r["family"], "all")] for f in (*FAMILIES, "all")}
    return {
        f: _counts(m) | {"held_out": _counts([r for r in m if r["held_out"]])} for f, m in of.items() if m
    }


def _counts(rows: Sequence[Row]) -> Row:
    kinds = Counter(r["witness"] for r in rows)
    wrong = [r for r in rows if r["witness"] == "wrong"]
    killed = {n: sum(r[n] != "accepted" for r in wrong) for n in ("verify", "quick")}
    killed["allclose"] = sum(bool(r.get("allclose", True)) for r in wrong)
    rate = {n: round(k / len(wrong), 4) for n, k in killed.items() if wrong}
    unknown = [r.get("verify", "accepted") for r in rows if r["witness"] in ("equal", "within")]
    known = {"stillborn": kinds["stillborn"], "no_witness": kinds["equal"], "within_limits": kinds["within"]}
    return {"mutants": len(rows), **known, "witnessed": len(wrong), "killed": killed, "rate": rate,
            "refused_without_witness": sum(v != "accepted" for v in unknown)}  # fmt: skip


def main() -> int:
    command_line = result_files.parser(__doc__)
    add = command_line.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda", help="where candidates run")
    add("--stages", nargs="+", choices=STAGES, default=list(STAGES[:2]), metavar="STAGE")
    cores = len(os.sched_getaffinity(0))
    add("--lanes", type=int, default=max(1, min(12, cores - 2)), help="at once")
    add("--only", default="", help="a pattern of entries' names; of mutants, of their bases")
    add("--limit", type=int, help="so many entries of every stage")
    add("--seconds", type=float, default=1e9, help="a stage begins no entry after so many")
    add("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="of mutants")
    add("--count", type=int, default=600, help="mutants")
    add("--beside", type=Path, help="another build's packages, for `speed`")
    a = result_files.parse_arguments(command_line, on_host=command_line.parse_known_args()[0].device == "cpu")
    if a.null:
        a.device, a.limit = "cpu", a.limit or 2
    if (interpreted := a.device == "cpu") != ("TRITON_INTERPRET" in os.environ):
        # Kernels and Triton's own functions are made for an interpreter, or not, when they are imported.
        others = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
        again = [sys.executable, "-m", "benchmarks.verification.solutions", *sys.argv[1:]]
        os.execve(sys.executable, again, others | ({"TRITON_INTERPRET": "1"} if interpreted else {}))
    _FORKING.set_forkserver_preload(["benchmarks.verification.solutions"])
    place = CandidatePlace.of(a.device)
    known = [json.loads(a.out.read_text())] if a.out.exists() else []
    report = result_files.ResultFile(a, "verification")
    report.data["before"] = [e for k in known for e in (*k.get("before", []), k["environment"])]
    a.known = known
    bench, sums, took, failed = VerificationStages(a, place, report), {}, {}, {}
    for stage in a.stages:
        begin = time.perf_counter()
        try:
            sums[stage] = getattr(bench, stage)()
        except Exception as error:  # the other stages are worth having
            failed[stage] = f"{type(error).__name__}: {error}"[:2000]
            say(f"FAILED {stage}: {failed[stage]}")
        took[stage] = round(time.perf_counter() - begin, 1)
    report.finish({"device": place.name, "stage_seconds": took, "failed_stages": failed, **sums})
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
