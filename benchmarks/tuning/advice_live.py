"""Claim: on kernels that no model has seen, advice of a language model costs a decision fewer measurements.

    python -m benchmarks.tuning.advice_live --out benchmarks/results/advice_live.json --models FOLDER \
        --tables FILE... [--kernels 20] [--repeats 2] [--seconds 480] [--fit-only]

Draws kernels of the corpus, stratified over families, each at its first shape that is neither too short to time
nor too large. FOLDER holds one model per family, `FAMILY.npz`, that was fitted without it (`--fit-only` fits those
that are missing, and needs no device). Of each kernel, the list that was recorded (`--tables`) is decided with the
advice of `benchmarks/data/advice.jsonl.gz` in the store and without, in turns, each time in a fresh process with
an empty Triton cache and a store of its own. Processes start together and wait for their turn: only one at a time
decides. Then one more times all configs that were chosen and the recorded best three in turns: regret is what a
choice is slower than the fastest of these.
"""

from __future__ import annotations

import itertools
import random
import shutil
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from benchmarks import kernels
from benchmarks.lib import devices, kernel_timing, result_files
from benchmarks.lib.advice.table import recorded_advice
from benchmarks.lib.environment import ROOT
from benchmarks.lib.processes import child_processes, waiting_processes
from forecast_autotune import autotune
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.store import Store
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.learned import LearnedModel, LearnedSurrogate
from forecast_autotune.tuning.replays.replay import load

ARMS = ("off", "on")
TOP = 3
FEWEST_CONFIGS = 16
"""A shorter list leaves a first look nothing to choose."""
SHORTEST_MS, LONGEST_MS = 0.015, 1.5
MOST_BYTES = 6e9
SETTINGS = {"off": "off", "on": "stored"}
"""FORECAST_AUTOTUNE_ADVICE of each arm."""


# --- which kernels ---


@dataclass(frozen=True)
class RecordedList:
    """What tables say of one case: its configs as JSON, the fastest of them first in `best`."""

    configs: tuple[Mapping[str, Any], ...]
    best: tuple[Mapping[str, Any], ...]
    best_ms: float


def recorded_lists(paths: Sequence[Path]) -> dict[str, RecordedList]:
    """Of recorded cases, by name."""
    found: dict[str, RecordedList] = {}
    for table in load(paths):
        rows = table.by_candidate()
        ran = sorted((c for c, m in rows.items() if m.ok), key=lambda c: rows[c].ms)
        if len({c.variant for c in rows}) == 1 and len(ran) > TOP:
            found[str(table.problem.extra.get("label"))] = RecordedList(
                tuple(c.config.to_json() for c in rows),
                tuple(c.config.to_json() for c in ran[:TOP]),
                rows[ran[0]].ms,
            )
    return found


def usable_cases(
    lists: Mapping[str, RecordedList], advised: Iterable[str]
) -> dict[str, dict[str, kernels.Case]]:
    """By family and kernel: the kernel's first case whose best time and size are within the limits."""
    found: dict[str, dict[str, kernels.Case]] = {}
    named = set(advised)
    for case in kernels.every():
        kernel, known = case.name.partition("/")[0], lists.get(case.name)
        if known is None or kernel not in named or kernel in found.get(case.family, {}):
            continue
        if not SHORTEST_MS <= known.best_ms <= LONGEST_MS or len(known.configs) < FEWEST_CONFIGS:
            continue
        if _bytes_of(case) < MOST_BYTES:
            found.setdefault(case.family, {})[kernel] = case
    return found


def _bytes_of(case: kernels.Case) -> int:
    data = case.make("meta")
    tensors = [t for t in [*data["args"], *data["kwargs"].values()] if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def drawn_cases(
    usable: Mapping[str, Mapping[str, kernels.Case]], count: int, families: int, seed: int
) -> list[kernels.Case]:
    """So many cases of so many families, in turns: by lot, where each kernel has a ticket for its family."""
    tickets = sorted((family, kernel) for family, known in usable.items() for kernel in known)
    random.Random(seed).shuffle(tickets)
    drawn: dict[str, list[kernels.Case]] = {}
    for family, kernel in tickets:
        if family in drawn or len(drawn) < families:
            drawn.setdefault(family, []).append(usable[family][kernel])
    layers = itertools.zip_longest(*drawn.values())
    return [case for layer in layers for case in layer if case is not None][:count]


def model_without(family: str, folder: Path) -> Path:
    """The model that was fitted without a family. Raises `SystemExit` if it may know it, or is missing."""
    path = folder / f"{family}.npz"
    if not path.is_file():
        raise SystemExit(f"{path.name} is missing in {folder.name}: fit a model without the family {family}")
    without = (LearnedModel.load(path).about or {}).get("without")
    if without != family:
        raise SystemExit(f"{path.name} was fitted without {without!r}: it may know the family {family}")
    return path.absolute()


def fit_missing(families: Iterable[str], folder: Path) -> None:
    """Fit the models that are not there yet, each without its family."""
    from benchmarks.lib.surrogates_without import surrogate_without, table_paths
    from forecast_train.splits import make_folds

    folder.mkdir(parents=True, exist_ok=True)
    if missing := [f for f in families if not (folder / f"{f}.npz").exists()]:
        folds = {fold.name: fold for fold in make_folds(load(table_paths()), "family")}
        for family in missing:
            surrogate_without(family, folds).model.save(folder / f"{family}.npz")


# --- children: they get ready, wait for their turn, do it, and say what became of it ---


def decide_case(given: dict[str, Any], null: bool) -> None:
    """The child of one decision."""
    (case,) = kernels.cases([given["case"]])
    surrogate = DefaultSurrogate(LearnedSurrogate(LearnedModel.load(Path(given["model"]))))
    with devices.device(null) as where:
        data = case.make(where)
        kernels.reset(case, data)
        _make_ready(where)
        configs = [kernel_timing.config_from_json(c) for c in waiting_processes.wait_for_turn()["configs"]]
        devices.warm_up_device(where)
        options: dict[str, Any] = {"reset_to_zero": list(case.reset_to_zero), "surrogate": surrogate}
        tuner = autotune(configs, list(case.key), **options)(case.kernel)
        result = kernel_timing.tuned_call(case, tuner, data, lambda: None)
    waiting_processes.give_answer({k: v for k, v in result.items() if k != "timings"})


def retime_case(given: dict[str, Any], null: bool) -> None:
    """The child that times all configs chosen, and checks what they compute."""
    (case,) = kernels.cases([given["case"]])
    with devices.device(null) as where:
        _make_ready(where)
        turn = waiting_processes.wait_for_turn()
        again = kernel_timing.retime(case, where, turn["configs"], given["rounds"])
        wrong = {} if null else wrong_outputs(case, where, turn["check"])
    waiting_processes.give_answer({"retimed": again, "wrong": wrong})


def wrong_outputs(case: kernels.Case, where: str, configs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What differs from the reference, by config."""
    data, found = case.make(where), {}
    expected = case.reference(data)
    for config in configs:
        kernels.reset(case, data)
        kernels.launch(case, data, kernel_timing.config_from_json(config))
        if wrong := kernels.mismatch(case, data, expected):
            found[kernel_timing.config_text(config)] = wrong
    return found


def _make_ready(where: str) -> None:
    devices.warm_up_device(where)
    # Kernels that make tensor descriptors themselves ask for memory at every launch.
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=where))
    waiting_processes.say_ready()


# --- the parent ---


def arm_order(number: int, repeat: int) -> tuple[str, ...]:
    """The arms of one kernel and repeat in the order of their turns."""
    return ARMS if (number + repeat) % 2 == 0 else ARMS[::-1]


def run_kernel(
    a: Namespace,
    case: kernels.Case,
    number: int,
    known: RecordedList,
    advice: Advice,
    add: Callable[..., None],
) -> dict[str, Any]:
    """All decisions on one kernel, and its choices timed again. `add` gets each run as it comes."""
    model = str(model_without(case.family, a.models))
    todo = [(repeat, arm) for repeat in range(a.repeats) for arm in arm_order(number, repeat)]
    limit, runs = 120.0, []
    with tempfile.TemporaryDirectory(prefix="advice-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        children = dict[tuple[int, str] | None, waiting_processes.WaitingChild]()
        try:
            for repeat, arm in todo:
                home = folder / f"{repeat}-{arm}"
                (home / "store").mkdir(parents=True)
                if arm == "on":
                    Store(home / "store").put_advice(advice)
                more = {
                    "FORECAST_AUTOTUNE_ADVICE": SETTINGS[arm],
                    "FORECAST_AUTOTUNE_SEED": str(a.seed + repeat),
                }
                given = {"case": case.name, "model": model}
                children[repeat, arm] = _child(a, "decide", given, home, **more)
            last = {"case": case.name, "rounds": 5 if a.null else a.rounds}
            children[None] = _child(a, "retime", last, folder / "retime")
            for child in children.values():
                child.wait_until_ready(limit)
            for repeat, arm in todo:
                about = {"case": case.name, "family": case.family, "arm": arm, "repeat": repeat}
                try:
                    found = children[repeat, arm].take_turn({"configs": known.configs}, limit)
                except RuntimeError as error:
                    add("failed", {**about, "error": str(error)})
                    result_files.say(f"FAILED {about}: {error}")
                    children[repeat, arm].close()
                    continue
                runs.append({**about, **found})
                add("run", runs[-1])
            for repeat, arm in todo:  # what was compiled once need not be again
                cache = folder / f"{repeat}-{arm}" / "triton"
                if cache.is_dir():
                    to, copy = folder / "retime" / "triton", waiting_processes.copy_missing
                    shutil.copytree(cache, to, copy_function=copy, dirs_exist_ok=True)
            chosen = list({kernel_timing.config_text(r["winner"]): r["winner"] for r in runs}.values())
            turn = {"configs": [*chosen, *known.best], "check": chosen}
            again = children[None].take_turn(turn, limit)
        finally:
            for child in children.values():
                child.close()
    return kernel_row(case, known, runs, again)


def _child(
    a: Namespace, role: str, given: dict[str, Any], home: Path, **more: str
) -> waiting_processes.WaitingChild:
    command = child_processes.child_command(__file__, a, role, given)
    return waiting_processes.WaitingChild(command, child_processes.child_environment(home, **more))


def kernel_row(
    case: kernels.Case, known: RecordedList, runs: Sequence[Mapping[str, Any]], again: Mapping[str, Any]
) -> dict[str, Any]:
    """What the repeats of one kernel come to, by arm; of repeats that both arms ended."""
    side = kernel_timing.read_retimed(again["retimed"])
    whole = [
        r for r in runs if {(r["repeat"], arm) for arm in ARMS} <= {(x["repeat"], x["arm"]) for x in runs}
    ]
    arms = {}
    for arm in ARMS:
        mine = [r for r in whole if r["arm"] == arm]
        arms[arm] = {
            "seconds": [r["seconds"] for r in mine],
            "forecast_s": [r["decision"]["cost"]["forecast_s"] for r in mine],
            "measured": [r["decision"]["measured"] for r in mine],
            "regret": [side.regret(r["winner"]) for r in mine],
            "stated_risk": [r["decision"]["stated_risk"] for r in mine],
            "advice": [r["decision"].get("advice", "") for r in mine],
        }
    return {
        "case": case.name,
        "family": case.family,
        "configs": len(known.configs),
        "recorded_ms": known.best_ms,
        "arms": arms,
        "noise": side.noise,
        "wrong": again["wrong"],
        "retimed": again["retimed"],
    }


def summary(rows: Sequence[Mapping[str, Any]], failed: int) -> dict[str, Any]:
    """Figures over kernels: each arm's, and what advice changes, with 95 % intervals over resampled kernels."""
    rows = [r for r in rows if all(r["arms"][arm]["seconds"] for arm in ARMS)]
    found: dict[str, Any] = {
        "kernels": len(rows),
        "families": len({r["family"] for r in rows}),
        "failed": failed,
        "wrong": sum(len(r["wrong"]) for r in rows),
    }
    if not rows:
        return found
    notes = [note for r in rows for note in r["arms"]["on"]["advice"]]
    found["followed"] = sum(note.startswith("advice at weight") for note in notes)
    found["runs_with_advice"] = len(notes)
    found["median_noise"] = round(statistics.median(r["noise"] for r in rows), 5)
    for arm in ARMS:
        regrets = [x for r in rows for x in r["arms"][arm]["regret"]]
        risks = [x for r in rows for x in r["arms"][arm]["stated_risk"]]
        found[arm] = {
            "worst_regret": round(max(regrets), 5),
            "beyond_2_percent": round(statistics.mean(x > 0.02 for x in regrets), 4),
            "stated_risk": round(statistics.mean(risks), 4),
        }
    for name in ("seconds", "forecast_s", "measured", "regret"):
        by_arm = {arm: [statistics.mean(r["arms"][arm][name]) for r in rows] for arm in ARMS}
        for arm in ARMS:
            found[arm][f"mean_{name}"] = round(statistics.mean(by_arm[arm]), 5)
            found[arm][f"median_{name}"] = round(statistics.median(by_arm[arm]), 5)
        found[f"{name}_on_less_off"] = paired(by_arm["on"], by_arm["off"], [r["case"] for r in rows])
    return found


def paired(one: Sequence[float], other: Sequence[float], names: Sequence[str]) -> dict[str, Any]:
    """`one` - `other` kernel by kernel: mean and median, each with its interval, and how often which is less."""
    from forecast_train.metrics import paired_bootstrap

    difference = np.array(one, float) - np.array(other, float)
    found: dict[str, Any] = {}
    for name, statistic in (("mean", statistics.fmean), ("median", statistics.median)):
        interval = paired_bootstrap(statistic, difference, np.zeros_like(difference), names)
        low, high = (None if np.isnan(x) else round(x, 5) for x in (interval.low, interval.high))
        found[name] = [round(interval.value, 5), low, high]
    return {**found, "less": int((difference < 0).sum()), "more": int((difference > 0).sum())}


def run(a: Namespace, report: result_files.ResultFile) -> None:
    begin = time.monotonic()
    lists, advice = recorded_lists(a.tables), recorded_advice(a.advice)
    usable = usable_cases(lists, advice)
    chosen = drawn_cases(usable, a.kernels, a.families, a.seed)
    families = sorted({c.family for c in chosen})
    if a.fit_only:
        fit_missing(families, a.models)
    for family in families:
        report.add("model", dict(LearnedModel.load(model_without(family, a.models)).about or {}))
    report.add("chosen", [[c.name, c.family] for c in chosen])
    result_files.say(f"{len(chosen)} kernels of {len(families)} families: {', '.join(families)}")
    if a.fit_only:
        report.finish({"families": families})
        return
    rows, failed = [], 0

    def add(name: str, value: Any) -> None:
        nonlocal failed
        failed += name == "failed"
        report.add(name, value)

    def discard(name: str, value: Any) -> None:
        report.add(f"warm_up_{name}", value)

    first = chosen[0]
    kernel_of = {c.name: c.name.partition("/")[0] for c in chosen}
    # A fresh machine compiles Python files and reads libraries from disk once: not at the cost of one arm.
    run_kernel(_once(a), first, 0, lists[first.name], advice[kernel_of[first.name]], discard)
    for number, case in enumerate(chosen):
        if time.monotonic() - begin > a.seconds:
            result_files.say(f"time is up: {len(chosen) - number} kernels are not begun")
            break
        try:
            row = run_kernel(a, case, number, lists[case.name], advice[kernel_of[case.name]], add)
        except Exception as error:  # one kernel less is worth less than all of the others
            add("failed", {"case": case.name, "error": str(error)[-1500:]})
            result_files.say(f"FAILED {case.name}: {str(error)[-300:]}")
            continue
        rows.append(row)
        report.add("kernel", row)
        shown = [f"{arm} {_means(row['arms'][arm])}" for arm in ARMS if row["arms"][arm]["seconds"]]
        result_files.say(f"{case.name} ({row['configs']}): {'; '.join(shown)}; noise {row['noise']:.2%}")
    report.finish(summary(rows, failed))


def _means(arm: Mapping[str, Any]) -> str:
    seconds, measured, regret = (statistics.mean(arm[n]) for n in ("seconds", "measured", "regret"))
    return f"{seconds:.2f} s, {measured:g} measured, regret {regret:.2%}, {' / '.join(set(arm['advice']))}"


def _once(a: Namespace) -> Namespace:
    return Namespace(**{**vars(a), "repeats": 1})


def main() -> int:
    parser = result_files.parser(__doc__)
    data = ROOT / "benchmarks" / "data"
    parser.add_argument("--models", type=Path, help="a folder of FAMILY.npz, each fitted without its family")
    parser.add_argument("--tables", type=Path, nargs="*", default=[], help="recorded lists and their best")
    parser.add_argument("--advice", type=Path, default=data / "advice.jsonl.gz", help="recorded advice")
    parser.add_argument("--kernels", type=int, default=20, help="how many kernels are drawn")
    parser.add_argument("--families", type=int, default=8, help="from how many families")
    parser.add_argument("--repeats", type=int, default=2, help="decisions per kernel and arm")
    parser.add_argument("--rounds", type=int, default=100, help="launches per config in the final timing")
    parser.add_argument("--seconds", type=float, default=480.0, help="begin no kernel after so many")
    parser.add_argument(
        "--fit-only", action="store_true", help="fit the models that are missing, and no more"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw, and of the first repeat")
    a = result_files.parse_arguments(parser)
    if a.child:
        (decide_case if a.child == "decide" else retime_case)(a.given, a.null)
        return 0
    if a.models is None or not a.tables:
        parser.error("--models FOLDER and --tables FILE... are required")
    run(a, result_files.ResultFile(a, "advice_live", a.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
