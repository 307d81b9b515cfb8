"""Claim: kernels that no model has seen are tuned to within 1 % of the best, in a fraction of the time.

    python -m benchmarks.tuning.unseen_kernels --out benchmarks/results/tune_unseen.json --tables FILE... \
        [--kernels 24] [--recorded] [--model FILE [--fit-only]]

Takes kernels of the benchmark package one family and hand after the other, and fits the surrogate that
ships to the recorded tables (`--tables`, and those of the package) without all of them. One fresh process with empty
caches tunes the first case of each; then it measures every config for the oracle (all cores,
our own exhaustive mode), and times our winner and the list's best three in turns. With `--recorded` the
lists and their best three are those of the tables, measured exhaustively on such a device before: an
oracle takes half a minute live, so that few kernels fit into an hour. `--fit-only` fits `--model` where there
is no device, for a later run. `--sizes` tunes the 4096^3 matmul over lists of so many configs, drawn from one
grid: the time a decision takes must not grow with the list.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton

from benchmarks import kernels
from benchmarks.lib import devices, kernel_timing, result_files
from benchmarks.lib.processes import child_processes
from forecast_autotune import autotune
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.learned import LearnedModel, LearnedSurrogate
from forecast_autotune.tuning.replays.replay import load, shipped_tables

TOP = 3
MATMUL = "matmul/4096x4096x4096"


def unseen_cases(count: int, recorded: Collection[str] | None) -> list[kernels.Case]:
    """First cases of kernels (of those recorded, if given), families and hands in turn."""
    groups: dict[tuple[str, str], list[kernels.Case]] = {}
    seen: set[str] = set()
    for case in kernels.every():
        kernel = case.name.partition("/")[0]
        if kernel not in seen and (recorded is None or case.name in recorded):
            seen.add(kernel)
            groups.setdefault((case.family, case.hand), []).append(case)
    order = [groups[key] for key in sorted(groups)]
    random.Random(0).shuffle(order)
    return [c for layer in itertools.zip_longest(*order) for c in layer if c is not None][:count]


def model_for(cases: Sequence[kernels.Case], paths: Sequence[Path], path: Path) -> dict[str, Any]:
    """Return what `path` was fitted to; fits it where there is none.

    Raises `SystemExit` if it may know the kernel of a case.
    """
    names = sorted(c.name.partition("/")[0] for c in cases)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        model = fitted_without(cases, paths)
        replace(model, about={**(model.about or {}), "without": names}).save(path)
    about = dict(LearnedModel.load(path).about or {})
    if known := set(names) - set(about.get("without", ())):
        raise SystemExit(f"{path} may know {', '.join(sorted(known))}: fit it again with --fit-only")
    return about


def fitted_without(cases: Sequence[kernels.Case], paths: Sequence[Path]) -> LearnedModel:
    """Fit the learned surrogate to all tables that hold none of these kernels, by name or by source."""
    from forecast_train.splits import kernel_identities
    from forecast_train.surrogate.fit import fit_model

    tables = load([*shipped_tables(), *paths])
    names = {f"name {c.name.partition('/')[0].lower()}" for c in cases}
    out_of = [t for t in tables if kernel_identities(t.problem) & names]
    taken = {i for t in out_of for i in kernel_identities(t.problem)} | names
    return fit_model([t for t in tables if not kernel_identities(t.problem) & taken])


def recorded_oracles(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Read recorded cases by name: the list (`configs`) and its fastest (`best`), as JSON."""
    result: dict[str, dict[str, Any]] = {}
    for table in sorted(load(paths), key=lambda t: len(t.by_candidate())):  # of several, the longest list
        rows = table.by_candidate()
        ran = sorted((c for c, m in rows.items() if m.ok), key=lambda c: rows[c].ms)
        if len({c.variant for c in rows}) == 1 and len(ran) > TOP:
            result[str(table.problem.extra.get("label"))] = {
                "configs": [c.config.to_json() for c in rows],
                "best": [c.config.to_json() for c in ran[:TOP]],
            }
    return result


def unseen_case(given: dict[str, Any], null: bool) -> dict[str, Any]:
    """The child of one kernel."""
    (case,) = kernels.cases([given["case"]])
    surrogate = DefaultSurrogate(LearnedSurrogate(LearnedModel.load(Path(given["model"]))))
    oracle = given["oracle"]
    configs = (
        [kernel_timing.config_from_json(c) for c in oracle["configs"]] if oracle else kernels.configs(case)
    )
    with devices.device(null) as where:
        data = case.make(where)
        devices.warm_up_device(where)
        options: dict[str, Any] = {"reset_to_zero": list(case.reset_to_zero), "store": False}
        ours = autotune(configs, list(case.key), surrogate=surrogate, **options)(case.kernel)
        kernels.reset(case, data)
        result = kernel_timing.tuned_call(case, ours, data, lambda: None)
        result["correct"] = kernel_timing.check_output(case, data, where)
        if not oracle:
            every = autotune(configs, list(case.key), mode="exhaustive", **options)(case.kernel)
            oracle = kernel_timing.tuned_call(case, every, data, lambda: None)
            oracle["best"] = [config for config, _ in oracle["timings"][:TOP]]
        again = kernel_timing.retime(case, where, [result["winner"], *oracle["best"]], given["rounds"])
    side = kernel_timing.read_retimed(again)
    return {
        **{k: v for k, v in result.items() if k != "timings"},
        "configs": len(configs),
        "exhaustive_s": oracle.get("seconds"),
        "regret": side.regret(result["winner"]),
        "noise": side.noise,
        "retimed": again,
    }


def tune_list(given: dict[str, Any], null: bool) -> dict[str, Any]:
    """The child that tunes the matmul over a list of `size` configs."""
    (case,) = kernels.cases([MATMUL])
    sides = [16, 32, 48, 64, 96, 128, 160, 192, 224, 256]
    points = list(
        itertools.product(
            [s for s in sides if s & (s - 1) == 0], [16, 32, 64, 128, 256], [16, 32, 64, 128], range(1, 17)
        )
    )
    every = [
        triton.Config(dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M"), p, strict=True)), w, s)
        for p in points
        for w in (2, 4, 8)
        for s in (2, 3, 4, 5)
    ]
    configs = random.Random(given["seed"]).sample(every, given["size"])
    with devices.device(null) as where:
        data = case.make(where)
        devices.warm_up_device(where)
        tuner = autotune(configs, list(case.key), store=False)(case.kernel)
        result = kernel_timing.tuned_call(case, tuner, data, lambda: None)
        result["correct"] = kernel_timing.check_output(case, data, where)
    del result["timings"][20:]
    return {**result, "configs": len(configs)}


def run(a: Namespace, report: result_files.ResultFile) -> None:
    def once(role: str, given: dict[str, Any]) -> dict[str, Any] | None:
        with tempfile.TemporaryDirectory(prefix="tune-", ignore_cleanup_errors=True) as folder:
            try:
                result = child_processes.run_child(
                    child_processes.child_command(__file__, a, role, given),
                    child_processes.child_environment(Path(folder)),
                    240,
                )
            except Exception as error:  # one kernel less is worth less than all of the others
                report.add("failed", {"given": given, "error": str(error)[-1500:]})
                result_files.say(f"FAILED {given}: {str(error)[-300:]}")
                return None
        report.add(role, result)
        return result

    rows = []
    known = recorded_oracles(a.tables) if a.recorded else None
    chosen = unseen_cases(a.kernels, known)
    model: Path = a.model or a.out.with_suffix(".npz")
    about = model_for(chosen, a.tables, model)
    report.add("fitted", about)
    result_files.say(f"fitted to {about}")
    if a.fit_only:
        report.finish({"fitted": about})
        return
    for case in chosen:
        given = {"case": case.name, "rounds": 5 if a.null else a.rounds, "model": str(model.absolute())}
        row = once("unseen", {**given, "oracle": (known or {}).get(case.name)})
        if row is None:
            continue
        rows.append(row)
        everything = "recorded" if known else f"{row['exhaustive_s']:.1f} s"
        result_files.say(
            f"{case.name}: {row['seconds']:.2f} s, {row['decision']['measured']} of {row['configs']}, regret "
            f"{row['regret']:.2%} (noise {row['noise']:.2%}); everything: {everything}"
        )
    sizes: dict[str, float] = {}
    for size, seed in itertools.product(a.sizes, range(a.repeats)):
        answer = once("sized", {"size": size, "seed": seed})
        if answer is not None:
            sizes[f"{size} #{seed}"] = round(answer["seconds"], 3)
            result_files.say(
                f"{size} configs: {answer['seconds']:.2f} s, {answer['decision']['measured']} measured"
            )
    if a.model is None:
        model.unlink()
    report.finish({**summary(rows), "seconds_by_list_size": sizes})


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures over all kernels."""
    if not rows:
        return {"kernels": 0}
    regrets = [r["regret"] for r in rows]
    exhaustive = [r["exhaustive_s"] for r in rows if r["exhaustive_s"] is not None]  # none where recorded
    return {
        "kernels": len(rows),
        "geomean_regret": round(math.exp(statistics.mean(math.log1p(x) for x in regrets)) - 1, 5),
        "worst_regret": round(max(regrets), 5),
        "beyond_tolerance": round(statistics.mean(r["regret"] > r["decision"]["tolerance"] for r in rows), 4),
        "mean_stated_risk": round(statistics.mean(r["decision"]["stated_risk"] for r in rows), 4),
        "median_share": round(statistics.median(r["decision"]["measured"] / r["configs"] for r in rows), 4),
        "seconds": round(sum(r["seconds"] for r in rows), 2),
        "exhaustive_seconds": round(sum(exhaustive), 2) if exhaustive else None,
        "median_noise": round(statistics.median(r["noise"] for r in rows), 5),
    }


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--kernels", type=int, default=24, help="how many kernels to tune")
    parser.add_argument("--tables", type=Path, nargs="*", default=[], help="recorded tables to fit to, too")
    parser.add_argument("--sizes", type=int, nargs="*", default=[100, 10000], help="lengths of lists")
    parser.add_argument("--repeats", type=int, default=3, help="lists of each length")
    parser.add_argument("--rounds", type=int, default=100, help="launches per config in the final timing")
    parser.add_argument("--recorded", action="store_true", help="lists and oracles are those of the tables")
    parser.add_argument("--model", type=Path, help="where the fit is kept, or was by a run for these kernels")
    parser.add_argument("--fit-only", action="store_true", help="fit --model, and no more: needs no device")
    a = result_files.parse_arguments(parser)
    if a.fit_only and a.model is None:
        parser.error("--fit-only needs --model FILE: what is fitted would be thrown away")
    if a.child:
        result = unseen_case(a.given, a.null) if a.child == "unseen" else tune_list(a.given, a.null)
        print(json.dumps(result), flush=True)
        return 0
    run(a, result_files.ResultFile(a, "tune_unseen", 0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
