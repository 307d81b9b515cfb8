"""Tuning time and chosen kernels of torch.compile: max-autotune, ours on it, ours on EXHAUSTIVE, EXHAUSTIVE.

    python -m benchmarks.inductor.tuning_time --out FILE [--problems 20] [--repeats 3] [--null]
        [--oracles 6 | --tables FILE...]

DEFAULT runs as it comes (`stock`) and with one assembler for the parent and the workers (`default`, see
`inductor.assembler`). The problems are held out from every fit. An arm and repeat is one fresh process; in it
every problem has fresh caches and an empty store of its own. `exhaustive` establishes the oracle of the first
problems, once; or it is read from `--tables`, which were recorded exhaustively on a like
machine.
At the end one process compiles every kernel that an arm has chosen, alone, and times them in turns. Rows
go to FILE.rows.jsonl as they come: the same command goes on where it stopped, `--seconds` ends it early.

tuning_s is what lowering the graph of that one operation took: listing and generating choices, forecasts,
compilation, benchmarks. On Python 3.11.0 to 3.11.8 Inductor compiles choices one by one.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib.inductor.inductor_problems import InductorProblem, all_problems
from benchmarks.lib.processes.compile_processes import (
    Row,
    RowFile,
    compile_separately,
    device_of,
    geometric_mean,
    inductor_clock,
    inductor_seconds,
    print_row,
    restart_compile_workers,
    run_child,
    synchronize,
    timed_in_turns,
)
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser
from forecast_autotune.records import Candidate, Config
from forecast_autotune.records.table import read_tables
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_integrations.inductor.choices.records import is_library_kernel
from forecast_integrations.inductor.hooks.assembler import SharedAssembler

STOCK_ARM = "stock"
ARMS = (STOCK_ARM, "default", "ours", "wide")
"""Inductor's DEFAULT as it comes; the same with one assembler for all processes, which all else is held
against; ours on that space; ours on EXHAUSTIVE."""
ORACLE_ARM = "exhaustive"

# --- tuning ---


def inductor_options(exhaustive: bool, device: str) -> dict[str, Any]:
    """Inductor's settings: all choices, timed in this process, each op by itself and at once."""
    chosen: dict[str, Any] = {
        "max_autotune": True,
        "max_autotune_gemm_backends": "ATEN,TRITON" if device == "cuda" else "ATEN,CPP",
        "autotune_in_subproc": False,
        # With it, GEMMs are timed later, in the scheduler, and without those that lose to ATen.
        "benchmark_epilogue_fusion": False,
        "coordinate_descent_tuning": False,
        "triton.cudagraphs": False,
    }
    if device == "cuda":
        chosen |= {"max_autotune_conv_backends": "ATEN,TRITON", "triton.enable_persistent_tma_matmul": True}
    if exhaustive:
        chosen |= {
            "max_autotune_gemm_search_space": "EXHAUSTIVE",
            "max_autotune_flex_search_space": "EXHAUSTIVE",
        }
    return chosen


def candidate_in(pick: Row) -> Candidate:
    """The candidate that a row names."""
    return Candidate(Config.from_json(pick["config"]), pick["variant"])


def fastest_choice(timings: Mapping[Candidate, float], prefix: str = "") -> Row | None:
    """The fastest choice whose name begins so, as a part of a row; times in ms, failures are infinite."""
    ran = [(c, ms) for c, ms in timings.items() if c.variant.startswith(prefix) and math.isfinite(ms)]
    if not ran:
        return None
    candidate, ms = min(ran, key=lambda pair: pair[1])
    return {"variant": candidate.variant, "config": candidate.config.to_json(), "ms": ms}


class FeedbackTimings:
    """Inductor's timings by operation, from its own feedback."""

    def __init__(self) -> None:
        self.found: dict[str, dict[Candidate, float]] = {}
        self.last = ""

    def __call__(self, timings: Mapping[Any, float], name: str, nodes: Sequence[Any], *_: Any) -> None:
        from forecast_integrations.inductor.choices.records import candidate_of

        # A choice may be a graph with operations of its own: the outermost one is heard last.
        self.last = f"{name} {[list(map(str, node.get_size())) for node in nodes]}"
        self.found.setdefault(self.last, {}).update((candidate_of(c), ms) for c, ms in timings.items())

    @property
    def timings(self) -> dict[Candidate, float]:
        """Timings of the operation that was heard last."""
        return self.found.get(self.last, {})


def tune_problem(problem: InductorProblem, arm: str, repeat: int, device: str) -> Row:
    """Compile one problem with nothing known; what that took and came to."""
    from torch._inductor.select_algorithm import add_feedback_saver, get_algorithm_selector_cache
    from torch._inductor.utils import fresh_cache

    from forecast_autotune import disable_torch_compile, enable_torch_compile

    heard = FeedbackTimings()
    module, inputs = problem.make(device)
    torch._dynamo.reset()
    with torch.no_grad(), fresh_cache():
        if arm in ("ours", "wide"):
            space = "exhaustive" if arm == "wide" else "default"
            enable_torch_compile(store=Store(None), search_space=space)
        add_feedback_saver(heard)
        before, begin = inductor_clock(), time.perf_counter()
        try:
            torch.compile(module, options=inductor_options(arm == ORACLE_ARM, device))(*inputs)
            synchronize(device)
        finally:
            get_algorithm_selector_cache().feedback_saver_fns.remove(heard)
            disable_torch_compile()
    timings = heard.timings
    return {
        "row": "tune",
        "arm": arm,
        "repeat": repeat,
        "problem": problem.name,
        "seconds": time.perf_counter() - begin,
        "tuning_s": inductor_seconds("GraphLowering.run", before),
        "precompile_s": inductor_seconds("_template_precompiling", before),
        "benchmark_s": inductor_seconds("_template_autotuning", before),
        "compiled": sum(not is_library_kernel(c) for c in timings),
        "failed": sum(not math.isfinite(ms) for ms in timings.values()),
        "best": fastest_choice(timings),
        "triton": fastest_choice(timings, "triton::"),
    }


def tuning_child(arguments: argparse.Namespace) -> None:
    given, device = arguments.given, device_of(arguments)
    named = {p.name: p for p in all_problems()}
    if given["arm"] != STOCK_ARM:
        SharedAssembler().share()
    if device == "cuda":
        restart_compile_workers()
    # Worker processes, libraries and our own models are there before the first clock starts.
    tune_problem(named[given["names"][0]].tiny(), given["arm"], given["repeat"], device)
    for name in given["names"]:
        problem = named[name].tiny() if arguments.null else named[name]
        try:
            row = tune_problem(problem, given["arm"], given["repeat"], device)
        except Exception as error:  # this problem's, not the run's
            failed = f"{type(error).__name__}: {error}"[:500]
            row = {"row": "tune", "arm": given["arm"], "repeat": given["repeat"], "error": failed}
        print_row({**row, "problem": name})
        if device == "cuda":
            torch.cuda.empty_cache()


# --- the chosen kernels, side by side ---


class PinnedSurrogate:
    """A surrogate that wants one candidate."""

    name = "pinned"

    def __init__(self, wanted: Candidate) -> None:
        self.wanted = wanted
        # Inductor caches compiled graphs by what chose their kernels.
        self.version = str(wanted)

    def forecast(self, query: Query) -> Forecasts:
        mean = np.array([0.0 if c == self.wanted else 9.0 for c in query.candidates])
        return Forecasts(query.candidates, mean, np.full(len(mean), 0.01), np.zeros(len(mean)))


def compile_pinned(problem: InductorProblem, wanted: Candidate, space: str, device: str, built: Any) -> Any:
    """The operation compiled with this candidate; None when Inductor does not have it."""
    from forecast_autotune import enable_torch_compile
    from forecast_integrations.inductor.summary import LISTENERS

    chosen: list[Candidate] = []
    hear = lambda label, decision: chosen.append(decision.chosen)  # noqa: E731
    # A module of its own: what was compiled before must stay as it is.
    module, inputs = copy.deepcopy(built[0]), built[1]
    LISTENERS.append(hear)
    try:
        with enable_torch_compile(
            surrogate=PinnedSurrogate(wanted), store=Store(None), search_space=space, mode="skip"
        ):
            compiled = compile_separately(module, inductor_options(False, device))
            compiled(*inputs)
    finally:
        LISTENERS.remove(hear)
    return partial(compiled, *inputs) if chosen and chosen[-1] == wanted else None


def retime(problem: InductorProblem, picks: Sequence[Row], rounds: int, device: str) -> Row:
    """Every kernel that some arm chose for a problem, timed in turns; the first one takes part twice.

    Raises `RuntimeError` if one of them were to be compiled once more: it would be another kernel.
    """
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    result, calls, missing = problem.make(device), {}, []
    with torch.no_grad(), fresh_cache():
        for pick in picks:
            candidate = candidate_in(pick)
            if str(candidate) in calls:
                continue
            call = compile_pinned(problem, candidate, pick["space"], device, result)
            if call is None:
                missing.append(str(candidate))
            else:
                calls[str(candidate)] = call
        names = list(calls)
        with torch.compiler.set_stance("fail_on_recompile"):
            again = list(calls.values())[:1]
            times = timed_in_turns([*calls.values(), *again], rounds, device) if calls else []
    noise = abs(times[-1] / times[0] - 1.0) if times else None
    named = dict(zip(names, times, strict=False))
    return {"row": "retime", "rounds": rounds, "ms": named, "noise": noise, "missing": missing}


def retiming_child(arguments: argparse.Namespace) -> None:
    device = device_of(arguments)
    torch._dynamo.config.recompile_limit = 64
    named = {p.name: p for p in all_problems()}
    for name, picks in arguments.given["picks"].items():
        problem = named[name].tiny() if arguments.null else named[name]
        print_row({**retime(problem, picks, arguments.given["rounds"], device), "problem": name})


# --- the whole ---


def oracle_rows(paths: Sequence[Path], names: Sequence[str]) -> Iterator[Row]:
    """The oracle's rows of these problems, from tables of all their choices."""
    for table in (table for path in paths for table in read_tables(path)):
        name = table.problem.extra.get("label")
        if name not in names:
            continue
        timings = {c: m.ms if m.ok else math.inf for c, m in table.by_candidate().items()}
        yield {
            "row": "tune",
            "arm": ORACLE_ARM,
            "repeat": 0,
            "problem": name,
            "compiled": len(timings),
            "failed": sum(not math.isfinite(ms) for ms in timings.values()),
            "best": fastest_choice(timings),
            "triton": fastest_choice(timings, "triton::"),
        }


def picks(rows: RowFile, name: str) -> list[Row]:
    """Return what was chosen for a problem, with the space that has it."""
    results = []
    for row in rows.pick(row="tune", problem=name):
        space = "exhaustive" if row["arm"] in ("wide", ORACLE_ARM) else "default"
        results += [{**row[kind], "space": space} for kind in ("best", "triton") if row.get(kind)]
    return results


def summary(rows: RowFile) -> Row:
    """Tuning time against DEFAULT, and chosen kernels against the oracle's and DEFAULT's best template."""
    figures: Row = {"problems": len({r["problem"] for r in rows.pick(row="tune", arm="default")})}
    times = {r["problem"]: r["ms"] for r in rows.pick(row="retime")}

    def ms(row: Row, kind: str) -> float | None:
        pick = row.get(kind)
        return times.get(row["problem"], {}).get(str(candidate_in(pick))) if pick else None

    def against(arm: str, other: str, kind: str) -> float | None:
        """Geometric mean of time(arm's) / time(other's)."""
        ratios = []
        for name in times:
            mine = [t for r in rows.pick(row="tune", arm=arm, problem=name) if (t := ms(r, kind))]
            base = [t for r in rows.pick(row="tune", arm=other, problem=name) if (t := ms(r, kind))]
            if mine and base:
                ratios.append(geometric_mean(mine) / geometric_mean(base))  # type: ignore[operator]
        return geometric_mean(ratios)

    def slower(arm: str, other: str) -> float | None:
        """Geometric mean over problems of tuning_s(arm) / tuning_s(other), medians over repeats."""
        ratios = []
        for name in {r["problem"] for r in rows.pick(row="tune", arm=arm)}:
            pair = [
                [r["tuning_s"] for r in rows.pick(row="tune", arm=a, problem=name) if "tuning_s" in r]
                for a in (arm, other)
            ]
            if all(pair):
                ratios.append(statistics.median(pair[0]) / statistics.median(pair[1]))
        return geometric_mean(ratios)

    for arm in (*ARMS, ORACLE_ARM):
        mine = [r for r in rows.pick(row="tune", arm=arm) if "error" not in r]
        if not mine:
            continue
        figures[arm] = {
            "tuning_s": sum(r.get("tuning_s", 0.0) for r in mine) / len({r["repeat"] for r in mine}),
            "tuning_over_default": slower(arm, "default"),
            "tuning_over_stock": slower(arm, STOCK_ARM),
            "compiled": statistics.fmean(r["compiled"] for r in mine),
            "time_over_default": against(arm, "default", "best"),
            "template_time_over_default": against(arm, "default", "triton"),
            "time_over_oracle": against(arm, ORACLE_ARM, "best"),
            "problems": len({r["problem"] for r in mine}),
        }
    noises = [r["noise"] for r in rows.pick(row="retime") if r["noise"] is not None]
    figures["oracles"] = len({r["problem"] for r in rows.pick(row="tune", arm=ORACLE_ARM) if r.get("best")})
    figures["retiming_noise"] = statistics.median(noises) if noises else None
    figures["not_retimed"] = sum(len(r["missing"]) for r in rows.pick(row="retime"))
    figures["errors"] = sum("error" in r for r in rows.rows)
    return figures


def main() -> int:
    command_line = parser(__doc__)
    command_line.add_argument("--problems", type=int, default=20)
    command_line.add_argument("--oracles", type=int, default=6)
    command_line.add_argument("--tables", type=Path, nargs="*", default=[], help="of all choices: the oracle")
    command_line.add_argument("--repeats", type=int, default=3)
    command_line.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    command_line.add_argument("--stock", type=int, default=20, help="problems that DEFAULT as it comes tunes")
    command_line.add_argument(
        "--rounds", type=int, default=50, help="of timing the chosen kernels in turns; 0: later"
    )
    command_line.add_argument(
        "--patience", type=float, default=1200.0, help="seconds that one problem may take"
    )
    command_line.add_argument("--seconds", type=float, default=1e9, help="end after about so many")
    arguments = parse_arguments(command_line)
    if arguments.child:
        {"tune": tuning_child, "retime": retiming_child}[arguments.child](arguments)
        return 0
    until = time.monotonic() + arguments.seconds
    report = ResultFile(arguments, "EXHAUSTIVE's quality at DEFAULT's price: held-out GEMMs")
    rows = RowFile(arguments.out.with_suffix(".rows.jsonl"))
    names = [p.name for p in all_problems()][: arguments.problems]
    arms = arguments.arms
    plan = [(arm, i, names) for i in range(arguments.repeats) for arm in (arms if i % 2 else arms[::-1])]
    oracles = list(oracle_rows(arguments.tables, names))
    for row in oracles:
        if not rows.pick(row="tune", arm=ORACLE_ARM, problem=row["problem"]):
            rows.add(row)
    plan += [(ORACLE_ARM, 0, [name]) for name in names[: 0 if oracles else arguments.oracles]]
    for arm, repeat, listed in plan:
        some = listed[: arguments.stock] if arm == STOCK_ARM else listed
        this = {"row": "tune", "arm": arm, "repeat": repeat}
        while (left := [n for n in some if not rows.pick(**this, problem=n)]) and time.monotonic() < until:
            run_child(rows, arguments, "tune", {**this, "names": left}, until)
            unfinished = [n for n in left if not rows.pick(**this, problem=n)]
            if unfinished and time.monotonic() < until:  # it took the child down, or its patience
                rows.add({**this, "problem": unfinished[0], "error": "the child ended"})
    done = {r["problem"]: {*r["ms"], *r["missing"]} for r in rows.pick(row="retime")}
    wanted = {name: picks(rows, name) for name in names}
    wanted = {
        n: some for n, some in wanted.items() if {str(candidate_in(p)) for p in some} - done.get(n, set())
    }
    if wanted and arguments.rounds and time.monotonic() < until:
        run_child(rows, arguments, "retime", {"picks": wanted, "rounds": arguments.rounds}, until)
    for row in rows.rows:
        report.add(row["row"], row)
    report.finish(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
