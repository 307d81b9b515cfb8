"""Claim: what a small model learns of sources from measurements, and from a strong model's answers beside them.

    python -m benchmarks.llm.distilled_sources --model FOLDER --out FOLDER --work FOLDER [--seconds 300]
        [--folds 4] [--workers 4] [--epochs 1.5] [--reward-epochs 0.3]

Every recorded source of `data/sources_h200.jsonl.gz` is forecast against its kernel's base by a model whose training
has seen no kernel of its family (families in `--folds` groups). Runs, in this order while the time lasts:

    untrained              the model as it comes
    distilled              LoRA on measured ratios mixed with the blind answers (`data/source_answers.jsonl.gz`)
    measured               LoRA on measured ratios alone
    correctness_crps,      three seeds each from the distilled adapter of the fold, trained on a reward of
    correctness,           arXiv 2605.31464 over the paper's eight bins, as an exact expectation
    correctness_brier
    whole                  distilled on all families: `adapter/`, for shipping; it forecasts nothing here

`--out` gets `forecasts.jsonl.gz`, a line per run with P of each bin of every source that it was held out on;
`states.npz`, hidden states of all sources (untrained: [n, width]; distilled: [folds, n, width] of `distilled_folds`);
and `adapter/`. Training ends `--reserve` seconds before `--seconds` are over: what it reaches then forecasts with what
it has learned, and its line says after how many epochs (`cut`). The same command goes on where it was ended.
`benchmarks.llm.distilled_source_scores` makes figures of them. It needs torch, transformers and peft; runs share the
GPUs as `--workers` processes on each.

The defaults are for two H200s and 300 s: eight processes of a model of 135 M parameters train 208,000 tokens/s
together, and an epoch of a fold is 2.2 million. Eight runs of 1.5 epochs (27 million), twelve of 0.3 on the first
reward (8 million) and forecasts with states (as long as about 10 million) take 220 s; starting takes 40 s, and 30 s
are in reserve.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.lib.environment import ROOT, environment
from benchmarks.lib.result_files import say
from benchmarks.lib.training.source_questions import SourceExample, family_folds, read_examples
from benchmarks.lib.variants.source_answers import ANSWERS, read_answers

if TYPE_CHECKING:
    from benchmarks.lib.training.source_training import SourceModel, SourceTrainingSettings

TABLE = ROOT / "benchmarks" / "data" / "sources_h200.jsonl.gz"
FORECASTS, STATES, ADAPTER = "forecasts.jsonl.gz", "states.npz", "adapter"
ANSWER_SHARE = 0.5
"""Of a distilled target."""
REWARDS = ("correctness_crps", "correctness", "correctness_brier")
REWARD_RATE = 0.25
"""Of the supervised rate: the start is already good."""
SEEDS = 3
ALL = -1
"""Fold of a run that holds nothing out."""


@dataclass(frozen=True)
class SourceRun:
    """One adapter, or the model without one."""

    arm: str
    fold: int
    seed: int = 0

    @property
    def name(self) -> str:
        """Its name in files."""
        return f"{self.arm}-{'all' if self.fold == ALL else self.fold}-{self.seed}"

    @property
    def start(self) -> SourceRun | None:
        """The run whose adapter it goes on from."""
        return SourceRun("distilled", self.fold) if self.arm in REWARDS else None


def planned_runs(folds: int) -> list[SourceRun]:
    """All runs, the most wanted first."""
    found = [SourceRun("untrained", ALL)]
    found += [SourceRun(arm, fold) for arm in ("distilled", "measured") for fold in range(folds)]
    for arm in REWARDS:
        found += [SourceRun(arm, fold, seed) for seed in range(SEEDS) for fold in range(folds)]
    # Before the rewards that are compared for completeness.
    found.insert(1 + 2 * folds + SEEDS * folds, SourceRun("whole", ALL))
    return found


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Ends the program, saying why, for what cannot work."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the base model, safetensors")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is kept")
    parser.add_argument("--work", type=Path, help="folder for adapters in between (default: OUT/work)")
    parser.add_argument("--seconds", type=float, default=300.0, help="for everything")
    parser.add_argument("--reserve", type=float, default=30.0, help="seconds of those for the last forecasts")
    parser.add_argument("--folds", type=int, default=4, help="groups of families, each held out once")
    parser.add_argument("--workers", type=int, default=4, help="processes on each GPU")
    parser.add_argument("--epochs", type=float, default=1.5)
    parser.add_argument("--reward-epochs", type=float, default=0.3)
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of a question")
    parser.add_argument("--arms", nargs="+", help="these runs only (default: all)")
    parser.add_argument("--kernels", type=int, default=0, help="a dry run on so many kernels; 0: all")
    parser.add_argument("--device", default="", help="a torch device; by default every GPU")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--answers", type=Path, default=ANSWERS)
    found = parser.parse_args(argv)
    found.work = found.work or found.out / "work"
    if not (found.model / "config.json").is_file():
        parser.error(
            f"--model {found.model}: no folder with a config.json; benchmarks.llm.convert_gguf makes one"
        )
    if min(found.seconds, found.epochs, found.reward_epochs, found.workers, found.tokens) <= 0:
        parser.error("--seconds, --epochs, --reward-epochs, --workers and --tokens must be positive")
    if not 0 <= found.reserve < found.seconds:
        parser.error(
            f"--reserve {found.reserve:g}: it is a part of --seconds {found.seconds:g}, so take 0 or more, and less"
        )
    return found


def chosen_examples(o: argparse.Namespace) -> list[SourceExample]:
    """The sources that are asked about; of `--kernels`, as many families as possible."""
    found = read_examples(o.table, read_answers(o.answers)[1])
    if not o.kernels:
        return found
    by_family: dict[str, list[str]] = {}
    for one in found:
        own = by_family.setdefault(one.family, [])
        if one.kernel not in own:
            own.append(one.kernel)
    rounds = range(max(map(len, by_family.values())))
    order = [own[i] for i in rounds for own in by_family.values() if i < len(own)]
    wanted = set(order[: o.kernels])
    return [one for one in found if one.kernel in wanted]


# --- in the worker processes ---


@dataclass
class _Worker:
    options: argparse.Namespace
    device: str
    examples: list[SourceExample]
    folds: list[frozenset[str]]
    model: SourceModel


_held: list[_Worker] = []


def _begin_worker(o: argparse.Namespace, devices: Any) -> None:
    import torch

    from benchmarks.lib.training.source_training import SourceModel

    device = devices.get()
    # Processes share the cores: more threads each would only wait for each other.
    torch.set_num_threads(2)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    examples = chosen_examples(o)
    model = SourceModel(o.model, device, o.rank)
    _held.append(_Worker(o, device, examples, family_folds(examples, o.folds), model))


def run_settings(run: SourceRun, o: argparse.Namespace) -> SourceTrainingSettings:
    """How a run is trained."""
    from benchmarks.lib.training.source_training import SourceTrainingSettings

    common = SourceTrainingSettings(
        o.epochs, o.rate, o.rank, o.tokens, o.longest, answer_share=ANSWER_SHARE, seed=run.seed
    )
    if run.arm == "measured":
        return replace(common, answer_share=0.0)
    if run.arm in REWARDS:
        # Rewards are about the question that the table asks: each source against its base.
        reward: Any = run.arm
        return replace(
            common,
            epochs=o.reward_epochs,
            rate=o.rate * REWARD_RATE,
            base_share=1.0,
            reward=reward,
            warmup=0.1,
        )
    return common


def _execute_run(run: SourceRun, deadline: float) -> dict[str, Any]:
    """Train, forecast, keep the adapter; the line of the result file."""
    import torch

    from benchmarks.lib.training import source_training

    worker = _held[0]
    o, model = worker.options, worker.model
    settings = run_settings(run, o)
    model.reset(run.seed)
    line: dict[str, Any] = {"run": run.name, **asdict(run), "settings": asdict(settings)}
    own = [e for e in worker.examples if run.fold == ALL or e.family in worker.folds[run.fold]]
    if run.arm != "untrained":
        if run.start is not None:
            model.load(torch.load(o.work / f"{run.start.name}.pt"))
        others = [e for e in worker.examples if run.fold == ALL or e.family not in worker.folds[run.fold]]
        line["training"] = source_training.train_sources(model, others, settings, deadline)
        line["trained_on"] = sorted({e.family for e in others})
    if run.arm == "whole":
        _save_adapter(model, o.out / ADAPTER)
        return line
    begin = time.monotonic()
    p = source_training.forecast_sources(model, own, settings)
    line["forecast_s"] = round(time.monotonic() - begin, 2)
    line["names"] = [e.name for e in own]
    line["p"] = [[round(float(v), 5) for v in row] for row in p]
    if run.arm in ("untrained", "distilled"):
        states = source_training.pooled_states(model, worker.examples, settings)
        _write_whole(o.work / f"{run.name}.npy", lambda path: np.save(path, states))
    if run.arm == "distilled":
        _write_whole(o.work / f"{run.name}.pt", lambda path: torch.save(model.state(), path))
    if worker.device.startswith("cuda"):
        line["peak_bytes"] = torch.cuda.max_memory_allocated()
    return line


def _write_whole(path: Path, write: Any) -> None:
    part = path.with_name(f"part-{path.name}")
    write(part)
    part.replace(path)


def _save_adapter(model: SourceModel, folder: Path) -> None:
    """In half precision: what serves it computes in bfloat16."""
    from safetensors.torch import load_file, save_file

    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    model.adapted.save_pretrained(part)
    weights = part / "adapter_model.safetensors"
    save_file({name: value.half() for name, value in load_file(weights).items()}, weights)
    for path in part.iterdir():
        if path.name not in ("adapter_model.safetensors", "adapter_config.json"):
            path.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    part.replace(folder)


# --- the parent ---


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a result file; none where there is no file."""
    if not path.is_file():
        return []
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def collect_states(o: argparse.Namespace) -> None:
    """Put the hidden states of the runs that are done into one file."""
    found: dict[str, Any] = {"names": np.array([e.name for e in chosen_examples(o)])}
    first = o.work / f"{SourceRun('untrained', ALL).name}.npy"
    if first.is_file():
        found["untrained"] = np.load(first)
    paths = {fold: o.work / f"{SourceRun('distilled', fold).name}.npy" for fold in range(o.folds)}
    there = [fold for fold, path in paths.items() if path.is_file()]
    if there:
        found["distilled"] = np.stack([np.load(paths[fold]) for fold in there])
        found["distilled_folds"] = np.array(there)
    if len(found) > 1:
        np.savez_compressed(o.out / STATES, **found)


def devices_of(o: argparse.Namespace) -> list[str]:
    """A device for every worker."""
    if o.device:
        return [o.device] * o.workers
    import torch

    gpus = torch.cuda.device_count()
    return [f"cuda:{n}" for _ in range(o.workers) for n in range(gpus)] or ["cpu"]


def execute_runs(o: argparse.Namespace) -> None:
    """All runs that are not done yet, until the time is over."""
    path = o.out / FORECASTS
    done = {line["run"] for line in read_lines(path)}
    left = [r for r in planned_runs(o.folds) if r.name not in done and (not o.arms or r.arm in o.arms)]
    # Forecasts are made after it, and a run that is begun just before it would learn nothing.
    deadline = time.monotonic() + o.seconds - o.reserve
    last_start = deadline - o.reserve / 2
    devices = devices_of(o)
    context = get_context("spawn")
    queue = context.SimpleQueue()
    for device in devices:
        queue.put(device)
    say(f"{len(left)} runs to do, {len(done)} are done, {len(devices)} processes")
    about = environment(0)
    with ProcessPoolExecutor(len(devices), context, _begin_worker, (o, queue)) as pool:
        busy: dict[Future[dict[str, Any]], SourceRun] = {}
        while left or busy:
            ready = [r for r in left if r.start is None or r.start.name in done]
            while ready and len(busy) < len(devices) and time.monotonic() < last_start:
                run = ready.pop(0)
                left.remove(run)
                busy[pool.submit(_execute_run, run, deadline)] = run
            if not busy:
                break
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                run = busy.pop(future)
                error = future.exception()
                if error is not None:
                    say(f"{run.name}: {type(error).__name__}: {error}")
                    continue
                line = {**future.result(), "environment": about}
                with gzip.open(path, "at", encoding="utf-8") as stream:
                    stream.write(json.dumps(line, separators=(",", ":")) + "\n")
                done.add(run.name)
                peak = line.get("peak_bytes", math.nan) / 2**30
                say(
                    f"{run.name}: {line.get('training')}, forecast {line.get('forecast_s')} s, {peak:.1f} GiB"
                )
    say(f"{len(done)} runs are done" + (f", {len(left)} were not begun" if left else ""))


def main(argv: Sequence[str] | None = None) -> int:
    o = options(argv)
    o.out.mkdir(parents=True, exist_ok=True)
    o.work.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    execute_runs(o)
    collect_states(o)
    say(f"done in {time.monotonic() - begin:.0f} s: {o.out / FORECASTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
