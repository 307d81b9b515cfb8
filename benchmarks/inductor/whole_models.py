"""Whole models under torch.compile's max-autotune, with us and without: where the first call goes, and latency.

    python -m benchmarks.inductor.whole_models --out FILE [--models NAME ...] [--arms NAME ...] [--seconds N]

Language models in prefill and decoding shapes, encoders, a mixture of experts, vision models, flex attention,
two training steps, one graph for all sizes. A model, arm and repeat is one fresh process with fresh caches and
an empty store. The arms:

    untuned      torch.compile without max-autotune
    plain        max-autotune as it comes
    ours         with us
    ..._again    a second process with the caches (and the store) that the arm before the dash has left
    ours_stored  a second process with the store of `ours` and empty caches; ours_third: another one after it

A model's processes get ready side by side, which includes a call without torch.compile, as the device's libraries load
their kernels at first use. Then they compile one after the other, half of the models' in the opposite order. Those of
an arm that is timed stay until all have, and time their passes in turns. `--null` compiles small models on a CPU, and
the three of a CPU's size (`cpu_...`), whose times are the CPU's and real. Rows
go to FILE.rows.jsonl as they come; the same command goes on where it stopped, beginning a model's repeat anew that has
not been timed. Files that torch and Triton load are read once before: no arm waits for the disk alone.

tuning_s is compilation of choices and benchmarks by Inductor's own clock, and our forecasts; seconds is
the whole first call. With us the configs of generated kernels are tuned on at later calls: settling_s is how long
until nothing is tuned any more, settling_extra_s what the calls until then took beyond those that follow; latency
is timed after it. On Python 3.11.0 to 3.11.8 Inductor compiles choices one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.inductor.compiled_models import MODELS, model_of
from benchmarks.lib.inductor.first_call import (
    PARTS,
    FirstCall,
    counted_timings,
    settle,
    tuning_service,
)
from benchmarks.lib.processes.child_processes import child_command, child_environment
from benchmarks.lib.processes.compile_processes import (
    Row,
    RowFile,
    RowProcess,
    compile_separately,
    device_of,
    geometric_mean,
    print_row,
    read_library_files,
    restart_compile_workers,
    synchronize,
    timed_in_turns,
    wake_compile_workers,
)
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser

FIRST_ARMS = ("untuned", "plain", "ours")
FOLLOWING = {f"{arm}_again": arm for arm in FIRST_ARMS} | {
    "ours_stored": "ours",
    "ours_third": "ours",
}
"""Arms of a second process, and whose caches or store they find."""
TIMED = ("plain", "ours", "untuned", "ours_stored", "ours_third")
"""Arms whose passes are timed, the first of them twice."""
_RATIOS = (
    "beyond_plain_over_ours",
    "first_call_over_untuned",
    "latency_over_plain",
    "latency_over_untuned",
    "ours_again_over_untuned_again",
)
"""Ratios of a model's summary, of which the geometric mean over models is told."""
PASSES = 10
"""Passes of a turn."""
_FEW_CHOICES = "^((bias_)?addmm|triton_mm_0|cpp_.*)$"
"""Names of choices of a first product of a process."""


# --- children ---


def compile_options(arm: str, mode: str, device: str, *, frozen: bool = False) -> dict[str, Any]:
    """Return what the mode stands for, as all arms but the untuned get it."""
    result = {} if FOLLOWING.get(arm, arm) == "untuned" else dict(torch._inductor.list_mode_options(mode))
    if device == "cpu":  # frozen: only then has Inductor templates for layers
        result |= {"max_autotune_gemm_backends": "ATEN,CPP", "freezing": frozen}
    return result


def warm_up(mode: str, device: str, *, compiles: bool) -> None:
    """Do the work that any arm may do before its clock starts: worker processes, libraries, one compilation.

    An arm that finds all in caches `compiles` nothing, and starts no workers.
    """
    from torch._inductor.utils import fresh_cache

    if device == "cuda" and compiles:
        restart_compile_workers()
    # Two choices are timed as any are; a whole list would take ten seconds of every process.
    options = compile_options("plain", mode, device) | {
        "test_configs.autotune_choice_name_regex": _FEW_CHOICES
    }
    with torch.no_grad(), fresh_cache():
        torch.compile(torch.nn.Linear(48, 40, device=device), options=options)(
            torch.randn(32, 48, device=device)
        )


def compile_child(arguments: argparse.Namespace) -> None:
    """Get ready; compile in one arm when told to, say what it took, and time so many passes whenever asked to."""
    given, device = arguments.given, device_of(arguments)
    name, arm = given["model"], given["arm"]
    compiles = not arm.endswith("_again")
    warm_up(given["mode"], device, compiles=compiles)
    model = model_of(name, device)
    model.call(model.module)
    synchronize(device)
    print_row({"row": "ready"})
    sys.stdin.readline()
    if device == "cuda" and compiles:
        wake_compile_workers()
    options = compile_options(arm, given["mode"], device, frozen=name.startswith("cpu_"))
    call = FirstCall()
    with contextlib.ExitStack() as entered:
        entered.enter_context(counted_timings(call))
        service = None
        if arm.startswith("ours"):
            service = entered.enter_context(tuning_service(Path(given["store"]), call))
        call.begin()
        compiled = compile_separately(model.module, options, dynamic=name.endswith("_dynamic") or None)
        result = model.call(compiled).clone()  # CUDA graphs write the next result over it
        synchronize(device)
        row = call.row()

        def again() -> None:
            model.call(compiled)
            synchronize(device)

        if service is not None:
            row |= settle(service, again)
    if model.other_inputs is not None:
        begin = time.perf_counter()
        model.call(compiled, other=True)
        synchronize(device)
        row["other_size_s"] = time.perf_counter() - begin
    wanted = model.call(model.module)
    row["relative_error"] = float((result - wanted).abs().max() / wanted.abs().max())
    print_row({"row": "compile", **row, **{k: given[k] for k in ("model", "arm", "repeat")}})
    del result, wanted
    for line in sys.stdin:
        with torch.compiler.set_stance("fail_on_recompile"):  # it would be another graph
            (times,) = timed_in_turns([partial(model.call, compiled)], int(line), device)
        print_row({"row": "turn", "ms": times})


# --- the whole ---


def in_turns_of(children: Mapping[str, RowProcess], rounds: int) -> Row:
    """Median milliseconds of every child's pass, which take turns; the first takes two of them."""
    names = [arm for arm in TIMED if arm in children]
    arms = [*names, *names[:1]]
    results: list[list[float]] = [[] for _ in arms]
    for turn in range(max(1, rounds // PASSES)):
        for place in range(len(arms)):
            which = (place + turn) % len(arms)
            results[which].append(children[arms[which]].ask(PASSES)["ms"])
    times = [statistics.median(f) for f in results]
    return {"ms": dict(zip(names, times, strict=False)), "noise": abs(times[-1] / times[0] - 1.0)}


def summary(rows: RowFile) -> Row:
    """Per model: the parts of the first call, tuning, and latency, of all arms and of one over another."""
    figures: Row = {}
    for name in MODELS:
        arms = {arm: rows.pick(row="compile", model=name, arm=arm) for arm in (*FIRST_ARMS, *FOLLOWING)}
        arms = {arm: mine for arm, mine in arms.items() if mine}
        latencies = rows.pick(row="latency", model=name)
        if {"plain", "untuned"} & set(arms) and "ours" in arms:
            figures[name] = model_summary(arms, latencies)
    if len(figures) > 1:
        ratios = {key: [one[key] for one in figures.values() if one.get(key)] for key in _RATIOS}
        if together := {key: geometric_mean(values) for key, values in ratios.items() if values}:
            figures["all"] = together
    return figures


def latency_ratio(latencies: Sequence[Row], arm: str, other: str) -> float | None:
    """An arm's latency over another's, geometric mean; None where they were not timed in turns."""
    ratios = [r["ms"][arm] / r["ms"][other] for r in latencies if {arm, other} <= set(r["ms"])]
    return geometric_mean(ratios) if ratios else None


def model_summary(arms: Mapping[str, Sequence[Row]], latencies: Sequence[Row]) -> Row:
    """One model's medians over repeats."""
    medians = {
        key: {arm: statistics.median(r[key] for r in mine) for arm, mine in arms.items()}
        for key in ("tuning_s", "seconds")
    }
    tuning, whole = medians["tuning_s"], medians["seconds"]
    figures: Row = {
        **medians,
        "parts": {
            arm: {part: statistics.median(r[part] for r in mine) for part in PARTS}
            for arm, mine in arms.items()
            if all(part in r for r in mine for part in PARTS)
        },
        "timed": {arm: statistics.median(r.get("timed", 0) for r in mine) for arm, mine in arms.items()},
        "latency_noise": max((r["noise"] for r in latencies), default=None),
        "repeats": min(map(len, arms.values())),
    }
    for arm in ("plain", "untuned"):
        if (ratio := latency_ratio(latencies, "ours", arm)) is not None:
            figures[f"latency_over_{arm}"] = ratio
    for arm in ("ours_stored", "ours_third"):
        if (ratio := latency_ratio(latencies, arm, "ours")) is not None:
            figures[f"latency_{arm}_over_ours"] = ratio
    if "plain" in whole:
        figures["tuning_plain_over_ours"] = tuning["plain"] / tuning["ours"] if tuning["ours"] else None
        figures["tuning_share_of_plain"] = tuning["plain"] / whole["plain"]
        figures["seconds_plain_over_ours"] = whole["plain"] / whole["ours"]
    if "untuned" in whole:
        beyond = {arm: whole[arm] - whole["untuned"] for arm in ("plain", "ours") if arm in whole}
        figures["beyond_untuned_s"] = beyond
        if "plain" in beyond:
            figures["beyond_plain_over_ours"] = (
                beyond["plain"] / beyond["ours"] if beyond["ours"] > 0 else None
            )
        figures["first_call_over_untuned"] = whole["ours"] / whole["untuned"]
    settling = ("settling_s", "settling_calls", "settling_extra_s")
    if all(key in r for r in arms["ours"] for key in settling):
        figures |= {key: statistics.median(r[key] for r in arms["ours"]) for key in settling}
    for arm, first in (("ours_again", "untuned_again"), ("ours_stored", "untuned")):
        if arm in whole and first in whole:
            figures[f"{arm}_over_{first}"] = whole[arm] / whole[first]
    return figures


def parse() -> argparse.Namespace:
    """The command line."""
    command_line = parser(__doc__)
    every = (*FIRST_ARMS, *FOLLOWING)
    command_line.add_argument("--repeats", type=int, default=3)
    command_line.add_argument(
        "--mode", default="max-autotune-no-cudagraphs", help="of torch.compile, for all arms"
    )
    command_line.add_argument("--models", "--only", nargs="+", choices=MODELS, default=list(MODELS))
    command_line.add_argument("--arms", nargs="+", choices=every, default=list(FIRST_ARMS))
    command_line.add_argument("--rounds", type=int, default=100, help="of timing the passes in turns")
    command_line.add_argument(
        "--patience", type=float, default=1800.0, help="seconds that one child may take"
    )
    command_line.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so many")
    command_line.add_argument(
        "--work", type=Path, help="where caches are kept until they are timed; default: by FILE"
    )
    arguments = parse_arguments(command_line)
    if lonely := [arm for arm in arguments.arms if FOLLOWING.get(arm, arm) not in arguments.arms]:
        command_line.error(f"{lonely[0]} needs {FOLLOWING[lonely[0]]} among --arms, whose caches it finds")
    return arguments


def measure(arguments: argparse.Namespace) -> int:
    """All repeats of all models, as far as the time goes."""
    until = time.monotonic() + arguments.seconds
    report = ResultFile(arguments, "whole models: tuning time against plain max-autotune, at equal latency")
    rows = RowFile(arguments.out.with_suffix(".rows.jsonl"))
    work: Path = arguments.work or arguments.out.with_suffix(".work")

    def folder_of(name: str, arm: str, repeat: int) -> Path:
        return (work / f"{name}-{arm}-{repeat}").resolve()

    def child(name: str, arm: str, repeat: int) -> RowProcess:
        first = folder_of(name, FOLLOWING.get(arm, arm), repeat)
        folder = first if arm.endswith("_again") else folder_of(name, arm, repeat)
        if arm not in FOLLOWING:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        given = {"model": name, "arm": arm, "repeat": repeat, "store": str(first / "kept")}
        given["mode"] = arguments.mode
        env = child_environment(folder, TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"))
        return RowProcess(
            child_command(sys.modules["__main__"].__file__ or "", arguments, "compile", given),
            env,
            arguments.patience,
        )

    if not arguments.null:
        read_library_files()
    for repeat in range(arguments.repeats):
        for name in arguments.models:
            if rows.pick(row="latency", model=name, repeat=repeat) or time.monotonic() > until:
                continue
            rows.drop(model=name, repeat=repeat)
            firsts = [arm for arm in FIRST_ARMS if arm in arguments.arms]
            order = [
                *(firsts if (repeat + MODELS.index(name)) % 2 else firsts[::-1]),
                *(a for a in FOLLOWING if a in arguments.arms),
            ]
            with contextlib.ExitStack() as open_ones:
                # To import, start workers and draw weights takes as long as to compile; an idle process takes
                # nothing from the one that compiles.
                there = {arm: open_ones.enter_context(child(name, arm, repeat)) for arm in order}
                for arm, one in there.items():
                    if one.row() is None:
                        raise RuntimeError(f"{name}, {arm}: the child ended before it was ready; see above")
                for arm in order:
                    if time.monotonic() > until:
                        break
                    rows.add(there[arm].ask("compile"))
                    if arm not in TIMED:
                        there.pop(arm).close()
                else:
                    timed = in_turns_of(there, arguments.rounds)
                    rows.add({"row": "latency", "model": name, "repeat": repeat, **timed})
            for arm in order:  # no more than these: `--work` may hold what is not ours
                shutil.rmtree(folder_of(name, arm, repeat), ignore_errors=True)
    for row in rows.rows:
        report.add(row["row"], row)
    report.finish(summary(rows))
    return 0


def main() -> int:
    arguments = parse()
    if arguments.child:
        compile_child(arguments)
        return 0
    return measure(arguments)


if __name__ == "__main__":
    sys.exit(main())
