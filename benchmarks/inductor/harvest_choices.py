"""Time Inductor's choices for the ops of real models, through Inductor itself, into our tables.

    python -m benchmarks.inductor.harvest_choices --out DIR [--exhaustive] [--split fit] [--only llama] [--seconds N]

Every problem of `inductor_problems` is compiled with max-autotune and fresh caches while we listen, so each
choice that Inductor compiles and times becomes a row. A child does the work of one problem: a choice that
takes the device's context down costs its problem, not the run. A problem counts when it is whole: leave it
the time. Problems that are done are left out the next time. EXHAUSTIVE has 900 choices and more a GEMM: give
it `--only` and `--seconds`, or let a lot of `--sample` of them stand for all; without it, what was measured
is the oracle. On Python 3.11.0 to 3.11.8 Inductor compiles choices one by one, which takes several times as
long. `--null` makes a dry run on a CPU with tiny sizes and Inductor's C++ templates.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.inductor.inductor_problems import FIT, HELD_OUT, InductorProblem, all_problems
from benchmarks.lib.processes.child_processes import module_command
from benchmarks.lib.result_files import say
from forecast_autotune.records.table import Table, read_lines, write_tables
from forecast_autotune.store import Store
from forecast_integrations.inductor.hooks.context import PatchSet
from forecast_integrations.triton.timer.timers import warm_up_cuda

BEGUN, DONE = "begun", "done"


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


def measurements_by_problem(store: Store) -> dict[str, int]:
    """Rows by problem id."""
    return {table.problem.id: len(table.measurements) for table in store.tables()}


def harvest_problem(
    problem: InductorProblem, store: Store, chosen: dict[str, Any], device: str
) -> dict[str, Any]:
    """Compile one problem with fresh caches; what was stored of it."""
    from torch._inductor.utils import fresh_cache

    before = measurements_by_problem(store)
    begin = time.perf_counter()
    torch._dynamo.reset()
    module, inputs = problem.make(device)
    with torch.no_grad(), fresh_cache():
        torch.compile(module, options=chosen)(*inputs)
    after = measurements_by_problem(store)
    fresh = {
        name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)
    }
    return {"name": problem.name, "seconds": time.perf_counter() - begin, "rows": fresh}


def choice_sampler(sample: int, lot: str) -> Any:
    """A function of choices that keeps the library's kernels and so many others by lot."""
    from forecast_integrations.inductor.choices.records import is_extern

    rng = random.Random(lot)

    def keep(choices: list[Any]) -> list[Any]:
        templates = [c for c in choices if not is_extern(c)]
        chosen = {id(c) for c in rng.sample(templates, min(sample, len(templates)))}
        return [c for c in choices if id(c) in chosen or is_extern(c)]

    return keep


def sampled_choices(sample: int, lot: str) -> None:
    """Time so many templates by lot; where this torch allows it, without code generation for the others."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.select_algorithm import add_preprocessing_fn

    def first(original: Callable[..., Any]) -> Callable[..., Any]:
        keep = choice_sampler(sample, lot)
        return lambda *args, **kwargs: keep(original(*args, **kwargs))

    add_preprocessing_fn(choice_sampler(sample, lot))
    PatchSet().replace(InductorChoices, "_finalize_template_configs", first)


def _with_cuda_loaded(original: Callable[..., Any]) -> Callable[..., Any]:
    def benchmark(*args: Any, **kwargs: Any) -> Any:
        warm_up_cuda()
        return original(*args, **kwargs)

    return benchmark


def harvest_child(out: Path, name: str, exhaustive: bool, sample: int, null: bool) -> int:
    """Harvest one problem; a line of JSON when it begins and when it ends."""
    from torch._inductor import select_algorithm

    from forecast_integrations.inductor.api import enable_torch_compile
    from forecast_integrations.inductor.hooks.assembler import SharedAssembler

    device = "cpu" if null else "cuda"
    if sample:
        sampled_choices(sample, name)
    # To listen changes nothing. Without these a choice takes twenty times as long, and the first ones longer.
    SharedAssembler().share()
    PatchSet().replace(select_algorithm.AlgorithmSelectorCache, "benchmark", _with_cuda_loaded)
    if null:
        torch._inductor.config.freezing = True  # C++ templates want constant weights
    store = Store(out / "store")
    (wanted,) = [p for p in all_problems() if p.name == name]
    problem = wanted.tiny() if null else wanted
    with enable_torch_compile(mode="listen", store=store):
        print(json.dumps({"event": BEGUN, "name": name}), flush=True)
        try:
            result = harvest_problem(problem, store, inductor_options(exhaustive, device), device)
        except Exception as error:  # this problem's, not the run's
            result = {"rows": {}, "seconds": 0.0, "error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps({"event": DONE, **result, "name": name}), flush=True)
    return 0


class InductorHarvest:
    """The parent: starts a child for each problem, and notes what is done."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.out: Path = arguments.out
        self.log = self.out / ("done-exhaustive.jsonl" if arguments.exhaustive else "done.jsonl")
        self.until = time.monotonic() + arguments.seconds

    def known(self) -> dict[str, dict[str, Any]]:
        """Return what earlier runs noted, by the problem's name."""
        if not self.log.is_file():
            return {}
        return {line["name"]: line for _, line in read_lines(self.log)}

    def pending(self) -> list[str]:
        """Problems still to do: the fitted and the held-out ones in turns, so that a cut run has both."""
        prefixes = [part for part in self.arguments.only.split(",") if part]
        sides = [
            [p.name for p in all_problems(side) if not prefixes or p.name.startswith(tuple(prefixes))]
            for side in (FIT, HELD_OUT)
            if self.arguments.split in (None, side)
        ]
        done = self.known()
        longest = max(map(len, sides), default=0)
        return [side[i] for i in range(longest) for side in sides if i < len(side) and side[i] not in done]

    def run(self) -> int:
        """Until nothing is pending or the time is up; then write the tables."""
        while (names := self.pending()) and time.monotonic() < self.until:
            self.child(names[0])
        self.write()
        return 0

    def child(self, name: str) -> None:
        """Let a child work on a problem until it ends, dies, or takes too long."""
        how = ["--exhaustive"] * self.arguments.exhaustive + ["--null"] * self.arguments.null
        how += ["--sample", str(self.arguments.sample)]
        command = [*module_command(__file__), "--out", str(self.out), *how, "--lane", name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            current = self.follow(process)
        if current is not None:
            self.note({"name": current, "rows": {}, "error": f"the child ended with {process.returncode}"})
        elif process.returncode:
            raise SystemExit(f"the child failed before its problem began, with {process.returncode}")

    def follow(self, process: subprocess.Popen[str]) -> str | None:
        """Note what the child says; the name of the problem it left unfinished."""
        current: str | None = None
        alarm = threading.Timer(0, process.kill)
        assert process.stdout is not None
        for text in process.stdout:
            if not text.startswith('{"event"'):  # Inductor prints objects of its own
                continue
            line = json.loads(text)
            alarm.cancel()
            if line.pop("event") == BEGUN:
                current = line["name"]
                alarm = threading.Timer(self.arguments.patience, process.kill)
                alarm.start()
                continue
            current = None
            self.note(line)
        alarm.cancel()
        process.wait()
        return current

    def note(self, line: dict[str, Any]) -> None:
        with self.log.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        rows = sum(line["rows"].values())
        say(f"{line['name']}: {rows} rows" + (f" ({line['error']})" if "error" in line else ""))

    def write(self) -> None:
        """One file per split; each problem says where it comes from."""
        named = {name: line for log in sorted(self.out.glob("done*.jsonl")) for name, line in _lines(log)}
        splits = {p.name: p.split for p in all_problems()}
        origin = {id_: name for name, line in named.items() for id_ in line["rows"]}
        tables: dict[str, list[Table]] = {FIT: [], HELD_OUT: []}
        for table in Store(self.out / "store").tables():
            name = origin.get(table.problem.id)
            if name is None:
                continue
            extra = {**table.problem.extra, "label": name, "split": splits[name]}
            tables[splits[name]].append(
                Table(dataclasses.replace(table.problem, extra=extra), table.measurements)
            )
        for split, result in tables.items():
            path = self.out / f"inductor-{split}.jsonl.gz"
            say(f"{path}: {len(result)} problems, {write_tables(path, result)} rows")


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    return [(line["name"], line) for _, line in read_lines(path)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="comma-separated prefixes of problem names")
    parser.add_argument("--sample", type=int, default=0, help="of a problem's choices by lot; 0: all")
    parser.add_argument("--split", choices=(FIT, HELD_OUT), help="one side alone")
    parser.add_argument("--exhaustive", action="store_true", help="Inductor's EXHAUSTIVE space")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no problem after this many seconds")
    parser.add_argument("--patience", type=float, default=3600.0, help="seconds that one problem may take")
    parser.add_argument("--null", action="store_true", help="dry run on a CPU, with tiny sizes")
    parser.add_argument("--lane", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.lane is not None:
        return harvest_child(
            arguments.out, arguments.lane, arguments.exhaustive, arguments.sample, arguments.null
        )
    if not arguments.null and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --null makes a dry run")
    return InductorHarvest(arguments).run()


if __name__ == "__main__":
    sys.exit(main())
