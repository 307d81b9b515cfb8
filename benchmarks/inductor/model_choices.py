"""Claim: what timing the library's kernels first, and trying sooner what compiles sooner, does to first rounds.

    python -m benchmarks.inductor.model_choices --out FILE [--tables benchmarks/data/model_choices_h200.jsonl.gz]
    python -m benchmarks.inductor.model_choices --out TABLES.jsonl.gz --harvest bert vit ... [--seconds N]

Replays recorded tables of all of Inductor's DEFAULT choices of the products and convolutions of whole models: with
the policy of torch.compile, with the library's kernels unknown until the first round and known before it, with
expected compile seconds and without. Told are the choices that were compiled, the seconds that a model's waves of
compilation take on so many cores, the regret, and the risk that was stated; and how near the expected seconds are.

`--harvest` times all choices of these models (`benchmarks.lib.inductor.compiled_models`), a process and fresh caches
for each, and writes the tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.inductor.compiled_models import MODELS, model_of
from benchmarks.lib.processes.child_processes import child_command, child_environment, run_child
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_autotune.policy import TuningState
from forecast_autotune.records import Candidate, Measurement
from forecast_autotune.records.table import Table, read_tables, write_tables
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Query
from forecast_integrations.inductor.choices.compile_seconds import compile_seconds
from forecast_integrations.inductor.choices.graph_position import GraphPosition, GraphProducts
from forecast_integrations.inductor.choices.records import is_library_kernel
from forecast_integrations.inductor.choices.surrogate import default
from forecast_integrations.inductor.session import LIBRARY_BEST_RISK, MAX_ROUNDS, MIN_BATCH, default_policy

TABLES = Path("benchmarks/data/model_choices_h200.jsonl.gz")
FEWEST = 12
"""Choices of a list that is replayed."""
CORES = 16
_UNKNOWN_S = 0.4
"""Seconds of a choice whose compilation was not recorded."""


@dataclasses.dataclass(frozen=True)
class ReplayRules:
    """What is known, and what is made of it."""

    library_first: bool = False
    """The library's kernels are known before the first round."""
    by_seconds: bool = False
    """Compile seconds are expected."""
    trusted: bool = False
    """The library is taken without a measurement of other choices where none is likely to be faster."""
    by_share: bool = False
    """Operations that are a small part of their model are not compiled for, or not in further rounds."""


ARMS = {
    "as listed": ReplayRules(),
    "by compile seconds": ReplayRules(by_seconds=True),
    "library first": ReplayRules(library_first=True),
    "both": ReplayRules(library_first=True, by_seconds=True),
    "library trusted": ReplayRules(library_first=True, by_seconds=True, trusted=True),
    "by share": ReplayRules(library_first=True, by_seconds=True, trusted=True, by_share=True),
}


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What one operation came to."""

    rounds: list[list[float]]
    """Recorded compile seconds of the choices of each round."""
    regret: float
    best_ms: float
    first_risk: float
    """Before the first round: of stopping at what is known then."""
    risk: float
    """That was stated in the end."""


def replay(table: Table, arm: ReplayRules, position: GraphPosition) -> Replayed:
    """One operation, round by round, as `OperationSearch` plans them."""
    settings, policy, surrogate = Settings(), default_policy(), default()
    rows = table.by_candidate()
    names = list(rows)
    library = {c: rows[c] for c in names if is_library_kernel(c)}
    known: dict[Candidate, Measurement] = dict(library) if arm.library_first else {}
    expected = compile_seconds(table.problem, names) if arm.by_seconds else None
    tried: dict[Candidate, Measurement] = {}
    waves: list[list[float]] = []
    risks: list[float] = []
    while len(risks) < MAX_ROUNDS:
        found = surrogate.forecast(Query(table.problem, names, measured=[*{**known, **tried}.values()]))
        state = TuningState(
            found,
            {**known, **tried},
            new=len(tried),
            round=len(risks),
            workers=MIN_BATCH if tried else 1,
            tolerance=settings.tolerance,
            risk=settings.risk,
            seed=settings.seed,
            compile_s=expected,
            problem=table.problem.id,
        )
        plan = policy.plan(state)
        risks.append(plan.risk)
        best_ms = min((m.ms for m in {**known, **tried}.values() if m.ok), default=math.inf)
        if (
            arm.trusted
            and not tried
            and policy.trusts_library(plan, LIBRARY_BEST_RISK, settings.risk, best_ms, position)
        ):
            risks[-1] = LIBRARY_BEST_RISK
            break
        if arm.by_share and (
            not policy.is_worth_waiting(plan.risk, settings.risk, best_ms, position)
            if tried
            else policy.is_small(settings.risk, best_ms, position)
        ):
            break
        wanted = [c for c in (*plan.measure, *(plan.prefetch if tried else ())) if not is_library_kernel(c)]
        if not plan.measure or not wanted:
            break
        waves.append([rows[c].compile_s or _UNKNOWN_S for c in wanted])
        tried |= {**library, **{c: rows[c] for c in wanted}}
    best = min(m.ms for m in rows.values() if m.ok)
    regret = min(m.ms for m in {**known, **tried}.values() if m.ok) / best - 1.0
    return Replayed(waves, regret, best, risks[0], risks[-1])


def positions_in(tables: Sequence[Table]) -> list[GraphPosition]:
    """Of the operations of a model, each of them once; what follows them is not recorded."""
    best = [min(m.ms for m in table.by_candidate().values() if m.ok) for table in tables]
    products = GraphProducts({(number,): (1, ms) for number, ms in enumerate(best)})
    return [GraphPosition(0.0, (number,), products) for number in range(len(tables))]


def wave_seconds(operations: Sequence[Replayed]) -> float:
    """Of a model whose operations' rounds are compiled together, on `CORES` cores."""
    total = 0.0
    for number in range(max(len(o.rounds) for o in operations)):
        jobs = [s for o in operations if number < len(o.rounds) for s in o.rounds[number]]
        total += max(sum(jobs) / CORES, max(jobs))
    return total


def graph_regret(operations: Sequence[Replayed]) -> float:
    """How much longer a model's operations take than with the best of their choices, each of them once."""
    return sum(o.regret * o.best_ms for o in operations) / sum(o.best_ms for o in operations)


def expected_over_recorded(tables: Sequence[Table]) -> list[float]:
    """Expected over recorded compile seconds of the templates of products."""
    found = []
    for table in tables:
        if table.problem.kernel.name == "convolution":
            continue
        rows = table.by_candidate()
        timed = [c for c, m in rows.items() if m.compile_s and not is_library_kernel(c)]
        expected = compile_seconds(table.problem, timed)
        found += [float(e) / float(rows[c].compile_s or 1) for c, e in zip(timed, expected, strict=True)]
    return found


def replays(arguments: argparse.Namespace) -> int:
    """All arms over all tables."""
    models: dict[str, list[Table]] = defaultdict(list)
    tables = []
    for table in read_tables(arguments.tables):
        rows = table.by_candidate()
        if len(rows) >= FEWEST and any(map(is_library_kernel, rows)):
            models[str(table.problem.extra.get("model", ""))].append(table)
            tables.append(table)
    result = ResultFile(arguments, "first rounds of torch.compile with the library's kernels timed first", 0)
    summary: dict[str, Any] = {"operations": len(tables), "models": len(models)}
    for arm, how in ARMS.items():
        done = {
            name: [replay(t, how, position) for t, position in zip(mine, positions_in(mine), strict=True)]
            for name, mine in models.items()
        }
        flat = [one for mine in done.values() for one in mine]
        result.add(
            arm, {name: [dataclasses.asdict(one) for one in mine] for name, mine in sorted(done.items())}
        )
        summary[arm] = {
            "compiled": sum(len(wave) for one in flat for wave in one.rounds),
            "wave_s": round(sum(map(wave_seconds, done.values())), 2),
            "regret": float(np.expm1(np.mean([math.log1p(one.regret) for one in flat]))),
            "graph_regret": float(np.expm1(np.mean([math.log1p(graph_regret(m)) for m in done.values()]))),
            "beyond_2": float(np.mean([one.regret > 0.02 for one in flat])),
            "stated": float(np.mean([one.risk for one in flat])),
        }
        say(f"{arm}: {summary[arm]}")
    ratios = expected_over_recorded(tables)
    factor = math.exp(statistics.median(abs(math.log(r)) for r in ratios))
    summary["expected_seconds"] = {"templates": len(ratios), "median_factor": factor}
    result.finish(summary)
    return 0


# --- harvesting ---


def harvest_child(arguments: argparse.Namespace) -> int:
    """Time all choices of one model."""
    import torch
    from torch._inductor.utils import fresh_cache

    from forecast_autotune import enable_torch_compile

    given = arguments.given
    store = Store(Path(given["store"]))
    options = {"max_autotune": True, "triton.cudagraphs": False}
    with torch.no_grad(), fresh_cache():
        torch.compile(torch.nn.Linear(48, 40, device="cuda"))(torch.randn(32, 48, device="cuda"))
        model = model_of(given["model"], "cuda")
        begin = time.perf_counter()
        with enable_torch_compile(mode="exhaustive", store=store):
            model.call(torch.compile(model.module, options=options))
            torch.cuda.synchronize()
    print(json.dumps({"seconds": time.perf_counter() - begin}), flush=True)
    return 0


def harvested(arguments: argparse.Namespace) -> Iterator[Table]:
    """Tables of the models, each problem with the name of its model."""
    until = time.monotonic() + arguments.seconds
    for name in arguments.harvest:
        if time.monotonic() > until:
            say(f"no time for {name}")
            return
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder, "kept")
            command = child_command(__file__, arguments, "harvest", {"model": name, "store": str(store)})
            row = run_child(command, child_environment(Path(folder)), max(60.0, until - time.monotonic()))
            found = list(Store(store).tables())
        say(f"{name}: {len(found)} operations in {row['seconds']:.1f} s")
        for table in found:
            yield named(table, name)


def named(table: Table, model: str) -> Table:
    """The table, whose problem says which model it is of."""
    problem = dataclasses.replace(table.problem, extra={**table.problem.extra, "model": model})
    return dataclasses.replace(table, problem=problem)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--tables", type=Path, default=TABLES)
    made.add_argument("--harvest", nargs="+", choices=MODELS, default=[], help="time all choices of these")
    made.add_argument("--seconds", type=float, default=480.0, help="begin no model after so many")
    arguments = parse_arguments(made, on_host="--harvest" not in sys.argv)
    if arguments.child:
        return harvest_child(arguments)
    if arguments.harvest:
        write_tables(arguments.out, list(harvested(arguments)))
        return 0
    return replays(arguments)


if __name__ == "__main__":
    sys.exit(main())
