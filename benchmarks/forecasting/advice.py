"""Claim: installed advice, written blind, makes decisions on lists of public libraries better.

    python -m benchmarks.forecasting.advice --out RESULT.json [--stages lists templates ...] [--jobs 2]

`lists`: every recorded list of fla-core, liger-kernel and flag_gems whose kernel has installed advice. The surrogate is
the one that ships, which was fitted to none of these libraries. The default policy's decisions are replayed with 1, 4
and 16 compile workers, without advice (`learned`) and with it (`advice`), once more where no IR can be read (`no IR`).
Regret after 1, 3 and 5 measured is that of the best measured so far. Replays of H200 timings on a CPU; intervals are
95 %, over kernels, and paired.

`templates`: products and convolutions of seven whole models, as `torch.compile` decides them with the library's kernels
timed first (`library`), and without any (`templates`). `weights`: how far advice is followed, chosen on two libraries
and judged on the third. `layers`: 1,000 layers with one spoilt record each. `releases`: which kernels of a release
find advice, by NAME=FILE for the names pinned and previous, a file {source hash: [hash of the normal form, function,
module]}; of a place only package and function are compared. `start`: import, first and second key in fresh processes.
"""

from __future__ import annotations

import ast
import json
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import warnings
from argparse import Namespace
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.lib import result_files
from benchmarks.lib.environment import ROOT
from benchmarks.lib.recorded_advice import DATA, FollowingAdvice, decision_figures, paired_figures
from benchmarks.lib.result_files import say
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.policy import TuningState
from forecast_autotune.records.problem import FACTS
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store, installed_advice
from forecast_autotune.store.installed_advice import advice_for
from forecast_autotune.surrogates.advised import AdviceWeights
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.protocol import Query
from forecast_autotune.tuning.replays.replay import load
from forecast_integrations.inductor.choices.records import is_library_kernel
from forecast_integrations.inductor.choices.surrogate import default, template_advice
from forecast_integrations.inductor.choices.templates import compile_seconds
from forecast_integrations.inductor.policy import MIN_BATCH, default_policy
from forecast_integrations.inductor.session import MAX_ROUNDS

LISTS = DATA / "libraries_h200.jsonl.gz"
WORKERS = (1, 4, 16)


@cache
def advised_lists() -> list[tuple[Table, Advice]]:
    """The recorded lists of kernels with installed advice."""
    given = [(table, advice_for(Store(None), table.problem.kernel)) for table in load([LISTS])]
    return [(table, advice) for table, advice in given if advice is not None]


def play(number: int) -> list[dict[str, Any]]:
    """All arms on one list."""
    warnings.simplefilter("ignore")
    table, advice = advised_lists()[number]
    plain = Settings.from_environment().with_(advice="off")
    bare = replace(table, problem=replace(table.problem, extra={**table.problem.extra, FACTS: None}))
    rows = []
    for workers in WORKERS:
        arms = [
            (f"{workers}", "learned", table, default_surrogate(), plain),
            (f"{workers}", "advice", table, default_surrogate(), plain.with_(advice="stored")),
            (f"{workers}, no IR", "learned", bare, default_surrogate(), plain),
            (f"{workers}, no IR", "advice", bare, default_surrogate(), plain.with_(advice="stored")),
        ]
        for condition, arm, given, surrogate, settings in arms:
            figures = decision_figures(given, surrogate, settings, workers)
            about = {"kernel": advice.source_sha256[:8], "problem": table.problem.id[:8]}
            rounded = {name: round(value, 5) for name, value in figures.items()}
            rows.append({"condition": condition, "arm": arm, **about, **rounded})
    return rows


def list_rows(options: Namespace) -> list[dict[str, Any]]:
    """All arms on all lists."""
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for number, done in enumerate(pool.map(play, range(len(advised_lists())))):
            rows += done
            if number % 20 == 0:
                say(f"{number + 1} lists")
    return rows


# --- Inductor's templates ---

OPERATIONS = DATA / "model_choices_h200.jsonl.gz"
FEWEST = 12
"""Choices of an operation that is replayed."""


def template_rows(options: Namespace) -> list[dict[str, Any]]:
    """Every operation, with advice and without."""
    rows = []
    for table in load([OPERATIONS]):
        if len(table.by_candidate()) < FEWEST:
            continue
        others = [m for m in table.measurements if not is_library_kernel(m.candidate)]
        for condition, given in (("library", table), ("templates", Table(table.problem, others))):
            for arm in ("learned", "advice"):
                about = {"kernel": str(table.problem.extra["model"]), "problem": table.problem.id[:8]}
                figures = operation_figures(given, arm == "advice")
                rows.append({"condition": condition, "arm": arm, **about, **figures})
    return rows


def operation_figures(table: Table, followed: bool) -> dict[str, float]:
    """One operation, round by round, as `torch.compile` plans it; its library's kernels are timed first."""
    settings, policy, surrogate = Settings(), default_policy(), default()
    advice = template_advice(table.problem) if followed else None
    rows = table.by_candidate()
    known = {c: m for c, m in rows.items() if is_library_kernel(c)}
    names, library, tried, stated = list(rows), len(known), 0, 0.0
    for number in range(MAX_ROUNDS):
        query = Query(table.problem, names, measured=list(known.values()), advice=advice)
        state = TuningState(
            surrogate.forecast(query),
            known,
            new=tried,
            round=number,
            workers=MIN_BATCH if tried else 1,
            tolerance=settings.tolerance,
            risk=settings.risk,
            seed=settings.seed,
            compile_s=compile_seconds(table.problem, names),
            problem=table.problem.id,
        )
        plan = policy.plan(state)
        stated = plan.risk
        wanted = [c for c in (*plan.measure, *(plan.prefetch if tried else ())) if not is_library_kernel(c)]
        if not plan.measure or not wanted:
            break
        known |= {c: rows[c] for c in wanted}
        tried = len(known) - library
    best = min(m.ms for m in rows.values() if m.ok)
    regret = min(m.ms for m in known.values() if m.ok) / best - 1.0
    return {"regret": regret, "measured": tried, "stated_risk": stated, "missed": float(regret > 0.02)}


# --- how far it is followed ---

MEANS = (0.14, 0.28, 0.56, 0.9)
"""Shares of the way to the advice, before anything was measured; the second one ships."""


def weight_rows(options: Namespace) -> list[dict[str, Any]]:
    """Every list by every weight, 4 workers."""
    settings, base = Settings.from_environment().with_(advice="off"), default_surrogate().single
    rows = []
    for number, (table, advice) in enumerate(advised_lists()):
        for mean in (0.0, *MEANS):
            weights = replace(AdviceWeights(), mean=mean, sd=0.32 * max(1.0, mean / 0.5))
            followed = FollowingAdvice(base, {advice.source_sha256: advice}, weights)
            figures = decision_figures(table, followed if mean else base, settings, 4)
            about = {"kernel": advice.source_sha256[:8], "problem": table.problem.id[:8]}
            library = str(table.problem.extra["label"]).partition("/")[0]
            rows.append({"condition": library, "arm": str(mean) if mean else "learned", **about, **figures})
        if number % 20 == 0:
            say(f"{number + 1} lists by weight")
    return rows


def chosen_weights(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By library: the weight that the other two choose (least regret beside what 0.1 % a measurement costs), there."""
    figures: dict[str, Any] = {}
    for library in dict.fromkeys(r["condition"] for r in rows):
        loss = {
            str(mean): sum(
                math.log1p(r["regret"]) + 0.001 * r["measured"]
                for r in rows
                if r["condition"] != library and r["arm"] == str(mean)
            )
            for mean in MEANS
        }
        chosen = min(loss, key=lambda mean: loss[mean])
        held = [r for r in rows if r["condition"] == library]
        figures[library] = {"chosen": float(chosen), **paired_figures(held)[chosen]}
    return figures


# --- damaged and hostile layers ---

_NOISE = """
def cost(config, args, device, launch):
    mark = config.num_warps * 7.13 + config.num_stages * 3.71 + launch.programs * 0.3717
    return 2 ** (({seed} + mark * 12.9898) % 6)
"""
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Mult,
    ast.Mult: ast.Add,
    ast.Sub: ast.Add,
    ast.Div: ast.Mult,
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
}
_NAMES = {"min": "max", "max": "min", "ceil": "floor", "log2": "exp2", "smooth_max": "min"}


class ReturnInverter(ast.NodeTransformer):
    """Has `cost` return the inverse of what it returned."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Only `cost`: its helpers stay as they are."""
        return self.generic_visit(node) if node.name == "cost" else node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        """1000 over the value."""
        assert node.value is not None
        node.value = ast.BinOp(ast.Constant(1000.0), ast.Div(), node.value)
        return node


class SyntaxMutator(ast.NodeTransformer):
    """Changes a share of the numbers, operators and functions of a module."""

    def __init__(self, generator: random.Random, share: float) -> None:
        self.generator, self.share = generator, share

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Change this node, perhaps, and go on below it."""
        super().generic_visit(node)
        if self.generator.random() > self.share:
            return node
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return ast.copy_location(ast.Constant(node.value * 10.0 ** self.generator.uniform(-2, 2)), node)
        if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _SWAPS:
            node.op = _SWAPS[type(node.op)]()  # type: ignore[assignment]
        elif isinstance(node, ast.Compare):
            node.ops = [_SWAPS.get(type(op), type(op))() for op in node.ops]  # type: ignore[misc]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            node.id = _NAMES.get(node.id, node.id)
        return node


def spoil(text: str, kind: str, generator: random.Random) -> str:
    """A spoilt cost function; `misplaced` ones are chosen by the caller."""
    if kind == "inverted":
        return ast.unparse(ast.fix_missing_locations(ReturnInverter().visit(ast.parse(text))))
    if kind == "noise":
        return _NOISE.format(seed=round(generator.uniform(0, 100), 3))
    if kind == "mutated":
        tree = SyntaxMutator(generator, generator.choice((0.02, 0.05, 0.15))).visit(ast.parse(text))
        return ast.unparse(ast.fix_missing_locations(tree))
    return text


SPOILT = ("inverted", "noise", "mutated", "misplaced", "damaged")


def layer_rows(options: Namespace) -> list[dict[str, Any]]:
    """Layers with one spoilt record each, in force as the installed one is; 4 workers."""
    generator, rows = random.Random(options.seed), list[dict[str, Any]]()
    given, settings, plain = advised_lists(), Settings.from_environment(), dict[int, dict[str, Any]]()
    for number in range(options.layers):
        which, kind = generator.randrange(len(given)), SPOILT[number % len(SPOILT)]
        table, advice = given[which]
        other = generator.choice(given)[1]
        text = other.text if kind == "misplaced" else spoil(advice.text, kind, generator)
        line = bytearray(json.dumps(replace(advice, text=text, others=()).to_json()).encode())
        for _ in range(generator.randrange(1, 40) if kind == "damaged" else 0):
            line[generator.randrange(len(line))] = generator.randrange(256)
        about = {"kernel": advice.source_sha256[:8], "problem": table.problem.id[:8]}
        if which not in plain:
            plain[which] = decision_figures(table, default_surrogate(), settings.with_(advice="off"), 4)
            rows.append({"condition": "all", "arm": "learned", **about, **plain[which]})
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "spoilt.jsonl").write_bytes(bytes(line))
            installed_advice._FOLDER = Path(folder)
            installed_advice._results.clear()
            figures = decision_figures(table, default_surrogate(), settings, 4)
        rows.append({"condition": "all", "arm": kind, **about, **figures})
        if number % 100 == 99:
            say(f"{number + 1} layers")
    return rows


# --- releases ---


def release_rows(options: Namespace) -> list[dict[str, Any]]:
    """By recorded context: how its kernel finds advice at the pinned and at the previous release.

    `next`: at the pinned one by the advice whose kernels the previous release has.
    """
    sources = {n: json.loads(Path(p).read_text()) for n, _, p in (r.partition("=") for r in options.releases)}
    layer = [r for _, records in installed_advice.every_installed() for r in records]
    earlier = [r for r in layer if r.source_sha256 in sources["previous"]]
    recorded = json.loads((ROOT / "benchmarks/results/libraries.json").read_text())["raw"]["contexts"]
    contexts = [c for c in recorded if "forecast" in c.get("arms", {})]
    rows = []
    for context in contexts:
        package = {"gems": "flag_gems", "liger": "liger_kernel"}.get(
            library := context["workload"].partition("/")[0], library
        )
        row = {"context": context["workload"], "kernel": context["kernel"]}
        cases = (("pinned", "pinned", layer), ("previous", "previous", layer), ("next", "pinned", earlier))
        for name, release, records in cases:
            known = [
                _match(source, form, f"{package}.{function}(", records)
                for source, (form, function, module) in sources[release].items()
                if function == context["kernel"]
            ]
            row[name] = min(known, key=MATCHES.index, default="no such kernel")
        rows.append(row)
    return rows


PACKAGES = {"fla": "fla", "gems": "flag_gems", "liger": "liger_kernel"}
MATCHES = ("source", "normal form", "place", "none")


def _match(source: str, form: str, place: str, records: list[Advice]) -> str:
    if any(r.source_sha256 == source for r in records):
        return "source"
    if any(r.extra.get("normal_sha256") == form for r in records):
        return "normal form"
    return "place" if any(str(r.extra.get("place", "")).startswith(place) for r in records) else "none"


# --- the start ---

PROGRAM = """
import json, sys, time
begin = time.perf_counter()
import forecast_autotune
imported = time.perf_counter()
from pathlib import Path
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.tuning.replays.replay import load, replay_one
table = load([Path(sys.argv[1])])[0]
default_surrogate().single
processor = time.process_time()
for _ in range(2):
    settings = Settings.from_environment()
    row, _ = replay_one(table, surrogate=default_surrogate(), policy=None, settings=settings, workers=4)
    used = time.process_time()
    print(json.dumps({"import_s": imported - begin, "key_s": used - processor, "followed": bool(row.advice)}))
    processor = used
"""


def start_rows(options: Namespace) -> list[dict[str, Any]]:
    """Fresh processes in turns: seconds of importing, processor seconds of a first and of a second key, by replay.

    A first turn, which does not count, compiles the modules, as an installation does.
    """
    rows = []
    with tempfile.TemporaryDirectory() as bytecode:
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        kept |= {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONWARNINGS": "ignore"}
        for turn in range(options.starts + 1):
            for setting in ("off", "stored"):
                command = [sys.executable, "-c", PROGRAM, str(LISTS)]
                environment = {**kept, "FORECAST_AUTOTUNE_ADVICE": setting}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                first, second = map(json.loads, done.stdout.splitlines())
                if turn:
                    rows.append({"arm": setting, **first, "second_key_s": second["key_s"]})
    return rows


STAGES = {
    "lists": list_rows,
    "templates": template_rows,
    "weights": weight_rows,
    "layers": layer_rows,
    "releases": release_rows,
    "start": start_rows,
}


def summarised(stage: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a stage."""
    if stage == "releases":
        names = ("pinned", "previous", "next")
        return {"contexts": len(rows), **{n: dict(Counter(r[n] for r in rows)) for n in names}}
    if stage == "start":
        names = ("import_s", "key_s", "second_key_s")
        arms = {a: [r for r in rows if r["arm"] == a] for a in ("off", "stored")}
        return {a: {n: statistics.median(r[n] for r in mine) for n in names} for a, mine in arms.items()}
    conditions = dict.fromkeys(r["condition"] for r in rows)
    figures = {c: paired_figures([r for r in rows if r["condition"] == c]) for c in conditions}
    return {**figures, "left_out": chosen_weights(rows)} if stage == "weights" else figures


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=["lists"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--starts", type=int, default=7)
    parser.add_argument("--releases", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(stub_only=True)
    options: Namespace = result_files.parse_arguments(parser)
    report = result_files.ResultFile(options, "advice", seed=options.seed)
    warnings.simplefilter("ignore")
    summary: dict[str, Any] = {}
    for stage in options.stages:
        rows = STAGES[stage](options)
        report.put("rows" if stage == "lists" else stage, rows)
        figures = summarised(stage, rows)
        summary |= figures if stage == "lists" else {stage: figures}
    report.finish(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
