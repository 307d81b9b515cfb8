"""`search`: look for a faster kernel within a budget, go on with a search, or look at one."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from forecast_autotune import frameworks
from forecast_autotune.commands.output import CommandError, Output, UsageError, require_packages
from forecast_autotune.file_access import misplaced_file, open_named_output
from forecast_autotune.shared_setting import rare_collections
from forecast_harness.commands.judge import PACK_CHECK
from forecast_harness.targets.cuda.declaration import CUDA_PLACE
from forecast_harness.targets.kernels.user_kernel import KERNEL_PLACE

if TYPE_CHECKING:
    from forecast_harness.authors.author import Author
    from forecast_harness.records import Node, SearchContext, SearchSettings, SearchTarget
    from forecast_harness.search.state import SearchState
    from forecast_harness.trials.devices import EarlyProcesses
    from forecast_harness.trials.judge_pool import LocalJudgePool
    from forecast_harness.trials.machine_lanes import MachineCodeLanes
    from forecast_harness.trials.protocol import NodeJudge


_SWITCH_INTERVAL_S = 5e-4
"""Seconds for which a thread with an answer of the device waits for those that forecast; Python's own are ten times."""


def early_start(options: argparse.Namespace, device: str) -> EarlyProcesses | None:
    """Workers and runners that start while the target is read; None where no machine code will be judged."""
    if options.path == "host-code" or device != "cuda":
        return None
    from forecast_harness.clocks.devices import visible_devices
    from forecast_harness.trials.devices import EarlyProcesses, verification_plan

    numbers = visible_devices()
    return EarlyProcesses([verification_plan(device, n) for n in numbers[: options.lanes or len(numbers)]])


def open_machine_code(
    options: argparse.Namespace,
    output: Output,
    target: SearchTarget,
    seed: Node,
    *,
    device: str,
    lanes: Sequence[int],
    folder: Path,
    early: EarlyProcesses | None = None,
) -> MachineCodeLanes | None:
    """Lanes that judge through machine code on devices by the driver's numbers; None for those of host code.

    Where `--path auto` finds that machine code does not work here, one line says why. Raises `UsageError` and
    `CommandError` where `--path machine-code` asks for it all the same.
    """
    path = options.path
    if path == "host-code" or (path == "auto" and device != "cuda"):
        return None
    if device != "cuda":
        raise UsageError("--path machine-code needs a CUDA device: the driver knows none, so leave it out")
    from forecast_harness.clocks.runner.client import NoMachineCodePath
    from forecast_harness.trials.devices import verification_plan
    from forecast_harness.trials.machine_lanes import open_machine_code_lanes

    plans = [verification_plan(device, number) for number in lanes]

    def note(reason: str) -> None:
        output.remark(f"the machine-code path failed, so that a source was judged as host code: {reason}")

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        return open_machine_code_lanes(
            target,
            seed,
            plans,
            folder=folder,
            early=early,
            insist=path == "machine-code",
            on_failure=note,
            progress=output.remark if not options.quiet else lambda stage: None,
        )
    except NoMachineCodePath as error:
        if path == "machine-code":
            raise CommandError(f"--path machine-code does not work here: {error}") from error
        output.remark(f"sources are judged as host code, in a sandbox: {error}")
        return None


_INTERRUPTED = 130
_LOG = "log.jsonl"
_REPORT = "report.html"


def search(options: argparse.Namespace, output: Output) -> int:
    """Search, resume or show; 0 if it came to its end, 1 if no proposer gave a source, 130 if it was interrupted."""
    began = time.monotonic()
    _check(options)
    if options.show is not None:
        return _show_folder(options, output)
    require_packages("search", "torch")
    folder = Path(options.out) if options.out is not None else Path(_folder_name(options.target))
    _check_folder(folder, options.resume)
    with rare_collections():
        state, phases = _search(options, output, folder, began)
    seconds = {**phases, "closing": time.monotonic() - began - sum(phases.values())}
    if state.stopped is not None and state.stopped.interrupted:
        _report(output, state, folder, f"interrupted. To go on: {resume_command(options, folder)}", seconds)
        return _INTERRUPTED
    _report(output, state, folder, "", seconds)
    _check_end(state)
    return 0


def _check_end(state: SearchState) -> None:
    """Raises `CommandError` for a search that measured nothing, or was given nothing to measure."""
    from forecast_harness.search.plan import proposers_problem
    from forecast_harness.search.run import CANNOT_CONFIRM

    reason = state.stopped.reason if state.stopped is not None else "it did not end"
    if reason.startswith(CANNOT_CONFIRM):
        raise CommandError(reason)
    if not state.scores:
        raise CommandError(f"nothing could be measured, not even the seed: {reason}")
    if problem := proposers_problem(state):
        raise CommandError(f"a search needs a proposer that gives sources, and none gave any: {problem}")


def resume_command(options: argparse.Namespace, folder: Path) -> str:
    """The command that continues this search: every option that is not at its default, and `--resume`."""
    from forecast_autotune.commands import grammar

    usual = vars(grammar.build().parse_args(["search", options.target or ""]))
    words = ["forecast-autotune", "search", options.target or ""]
    left_out = {"target", "out", "resume", "entry", "rest", "show"}
    for name, value in vars(options).items():
        if name in left_out or value == usual.get(name):
            continue
        option = f"--{name.replace('_', '-')}"
        for v in value if isinstance(value, list) else [value]:
            words += [option] if v is True else [option, f"{v:g}" if isinstance(v, float) else str(v)]
    return shlex.join([*words, "--out", str(folder), "--resume"])


def _check(options: argparse.Namespace) -> None:
    if (options.target is None) == (options.show is None):
        raise UsageError(
            "say what to search, as in `forecast-autotune search swiglu`, or `--show DIR`; not both"
        )
    if options.path == "machine-code" and options.device == "cpu":
        raise UsageError("--path machine-code is for CUDA devices: leave it or --device cpu out")
    _check_models(options)


def _check_models(options: argparse.Namespace) -> None:
    """Raises `SettingsError` for a language model that is not there, before anything is done."""
    from forecast_autotune.llm.providers import provider

    specs = [*(options.proposer or []), options.surrogate]
    models = [s.removeprefix("llm:") for s in specs if s.startswith("llm:")]
    for spec in dict.fromkeys([*models, *(options.llm or [])]):
        provider().check(spec)


def _folder_name(target: str) -> str:
    """`search-swiglu` for a pack's name or folder, `search-fn` for `FILE.py:fn`, `FILE.cu:fn` and
    `package.module:fn`."""
    place = _kernel_place(target)
    last = place["name"] if place else Path(target).stem
    return "search-" + (re.sub(r"[^\w.-]+", "-", last).strip("-.") or "target")


def _kernel_place(target: str) -> re.Match[str] | None:
    return KERNEL_PLACE.match(target) or CUDA_PLACE.match(target)


def _check_folder(folder: Path, resume: bool) -> None:
    if problem := misplaced_file(folder):
        raise UsageError(f"--out must be a folder, and {folder} is {problem}: name a new one")
    if (folder / _LOG).exists():
        if not resume:
            raise UsageError(
                f"{folder} holds a search already: go on with it by adding --resume, look at it with "
                f"`forecast-autotune search --show {shlex.quote(str(folder))}`, or name another with --out"
            )
    elif resume:
        raise UsageError(
            f"{folder} holds no search to go on with (no {_LOG}): leave out --resume, or name its --out"
        )
    # A kill before the log's first line leaves lanes and locks.
    elif folder.is_dir() and any(p.name != "lanes" and not p.name.startswith(_LOG) for p in folder.iterdir()):
        raise UsageError(
            f"{folder} is not empty, and what is in it is no search: name a new folder with --out"
        )


def _search(
    options: argparse.Namespace, output: Output, folder: Path, began: float
) -> tuple[SearchState, dict[str, float]]:
    """The search's end, and the seconds of `opening` what it needs and of `searching`."""
    from forecast_harness.records import TargetKind
    from forecast_harness.search.forecasters import open_forecaster
    from forecast_harness.search.plan import paced_ahead, paced_as
    from forecast_harness.search.report.live import LiveDisplay
    from forecast_harness.search.run import search as run
    from forecast_harness.targets.search_target import open_target
    from forecast_harness.trials.devices import verification_plan

    device = options.device or ("cuda" if _devices() else "cpu")
    verification_plan(device)  # a device that is not there is told before anything else is tried
    tell = (lambda stage: None) if options.quiet else output.remark
    if _kernel_place(options.target):
        tell(f"opening {options.target} for {device}")  # importing its file takes seconds
    settings = _settings(options)
    with contextlib.ExitStack() as stack:
        if not options.quiet:
            stack.enter_context(output.at_work)
        early = early_start(options, device)
        if early is not None:
            stack.callback(early.close)
        target, seeds = open_target(options.target, device=device)
        ahead = device != "cpu" and options.path != "host-code"
        # Whatever can be wrong with the options is told before the pack is checked, which takes seconds.
        proposers = _proposers(settings, target, stack, apart=ahead)
        forecaster = open_forecaster(settings.surrogate, target)
        if forecaster is not None:
            stack.callback(forecaster.close)
        folder.mkdir(parents=True, exist_ok=True)
        stack.callback(_remove_unbegun, folder)
        checking = None
        if not options.resume and target.kind is TargetKind.PACK:
            tell(PACK_CHECK)
            checker = stack.enter_context(ThreadPoolExecutor(1, "pack-check"))
            checking = checker.submit(_require_sound_pack, target, device)
        lanes = stack.enter_context(
            contextlib.closing(_lanes(options, output, target, seeds[0], device, folder, early))
        )
        if checking is not None:
            checking.result()
        from forecast_harness.trials.machine_lanes import MachineCodeLanes

        if options.resume and (earlier := _settings_in_log(folder)) is not None:
            settings = paced_as(settings, earlier, options.parents)
        elif isinstance(lanes, MachineCodeLanes):
            settings = paced_ahead(settings, options.parents)
        start = time.monotonic()
        state = run(
            target,
            seeds,
            settings=settings,
            context=_context(target, device),
            proposers=proposers,
            forecaster=forecaster,
            lanes=lanes,
            folder=folder,
            watch=None if options.quiet else LiveDisplay(output),
            began=began,
        )
        return state, {"opening": start - began, "searching": time.monotonic() - start}


def _remove_unbegun(folder: Path) -> None:
    """A folder in which no search has begun would be in the way of the next one."""
    if not (folder / _LOG).exists():
        shutil.rmtree(folder, ignore_errors=True)


def _require_sound_pack(target: SearchTarget, device: str) -> None:
    """Raises `CommandError` for a pack that cannot tell right from wrong: results with it mean nothing."""
    from forecast_harness.trials.devices import verification_plan
    from forecast_harness.trials.packs import PackJudge
    from forecast_harness.trials.protocol import LaneFailure

    try:
        with tempfile.TemporaryDirectory() as scratch:
            judge = PackJudge(target, verification_plan(device), Path(scratch))
            with contextlib.closing(judge):
                problems = judge.pack_problems()
    except LaneFailure as error:
        raise CommandError(f"no lane works on {device}: {error}") from error
    if problems:
        raise CommandError(f"pack {target.name} cannot tell right from wrong: {'; '.join(problems)}")


def _settings(options: argparse.Namespace) -> SearchSettings:
    from forecast_harness.records import SearchBudget, SearchSettings

    specs = [*(options.proposer or []), *(f"llm:{spec}" for spec in options.llm or [])]
    return SearchSettings(
        SearchBudget(options.gpu_budget, options.gpu_seconds, options.seconds, options.tokens, options.money),
        archive=options.archive,
        proposers=tuple(dict.fromkeys(specs)) or ("mechanical",),
        surrogate=options.surrogate,
        parents=options.parents or SearchSettings.parents,
        samples=options.samples,
        k=options.k,
        trials=options.trials,
        seed=options.seed,
    )


def _settings_in_log(folder: Path) -> SearchSettings | None:
    """The settings of the search that is to be resumed; None where it had not begun."""
    from forecast_harness.search.events import Started
    from forecast_harness.search.log import read_log

    events = read_log(folder / _LOG) if (folder / _LOG).is_file() else []
    return events[0].context.settings if events and isinstance(events[0], Started) else None


def _proposers(
    settings: SearchSettings, target: SearchTarget, stack: contextlib.ExitStack, *, apart: bool
) -> dict[str, Author]:
    """All proposers by names that are unique and can stand before the slash of an arm; see `open_author`."""
    from forecast_harness.authors import open_author
    from forecast_harness.records import TargetKind

    rewriter = None
    if apart and target.kind is TargetKind.KERNEL and "mechanical" in settings.proposers:
        from forecast_harness.search.rewriting_lanes import RewritingLanes

        rewriter = (lanes := RewritingLanes(target)).rewrites
        stack.callback(lanes.close)
    proposers: dict[str, Author] = {}
    for spec in settings.proposers:
        proposer = open_author(spec, target, rewriter=rewriter)
        stack.callback(proposer.close)
        name = proposer.name.replace("/", "_")
        names = (f"{name}-{n}" for n in range(2, len(settings.proposers) + 2))
        proposers[name if name not in proposers else next(n for n in names if n not in proposers)] = proposer
    return proposers


def _lanes(
    options: argparse.Namespace,
    output: Output,
    target: SearchTarget,
    seed: Node,
    device: str,
    folder: Path,
    early: EarlyProcesses | None,
) -> LocalJudgePool:
    from forecast_harness.trials.host_judges import open_judge
    from forecast_harness.trials.judge_pool import LocalJudgePool

    numbers = _devices() if device == "cuda" else []
    count = options.lanes or max(1, len(numbers))
    if device == "cuda" and count > len(numbers):
        raise UsageError(
            f"--lanes {count}: there are {len(numbers)} CUDA devices, and two lanes on one would disturb each other"
        )
    machine_code = open_machine_code(
        options,
        output,
        target,
        seed,
        device=device,
        lanes=numbers[:count],
        folder=folder.absolute(),
        early=early,
    )
    if machine_code is not None:
        return machine_code

    def open_lane(number: int) -> NodeJudge:
        index, place = numbers[number] if numbers else number, folder.absolute() / "lanes" / str(number)
        return open_judge(target, device=device, index=index, folder=place)

    return LocalJudgePool(open_lane, count)


def _devices() -> list[int]:
    """The driver's numbers of those that may be used."""
    from forecast_harness.clocks.devices import visible_devices

    return visible_devices()


def _context(target: SearchTarget, device: str) -> SearchContext:
    from forecast_harness.records import SearchContext
    from forecast_harness.trials.devices import device_slug
    from forecast_harness.verify.run import harness_hash

    toolchain = _toolchain(device) | ({"nvcc": target.payload["nvcc"]} if "nvcc" in target.payload else {})
    return SearchContext(target.id, (), device_slug(device), toolchain, "", harness_hash())


def _toolchain(device: str) -> dict[str, str]:
    """Versions of the compiler and of the libraries that a source calls: they change how fast it is."""
    if device == "cuda":
        return frameworks.triton().toolchain()
    from importlib import metadata

    versions = {}
    for name in ("torch", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _show_folder(options: argparse.Namespace, output: Output) -> int:
    """Sum up a folder, and bring its report up to date."""
    from forecast_harness.search.log import read_log
    from forecast_harness.search.state import replay_events

    folder = Path(options.show)
    if not (folder / _LOG).is_file():
        raise UsageError(f"{folder} holds no search: there is no {_LOG} in it")
    state = replay_events(read_log(folder / _LOG))
    if state.started is None:
        raise UsageError(f"{folder / _LOG} is empty: its search has not begun")
    _report(output, state, folder, "")
    return 0


def _report(
    output: Output, state: SearchState, folder: Path, remark: str, took: Mapping[str, float] | None = None
) -> None:
    """Write the page, and say what was found; `took`: seconds of the command, by what it was at."""
    from forecast_autotune.report.table import shown_text
    from forecast_harness.search.output import best_file, summary
    from forecast_harness.search.report import page
    from forecast_harness.search.report.figures import summary_lines

    try:
        with open_named_output(folder / _REPORT) as stream:
            stream.write(page(state).encode("utf-8", "replace"))
    except OSError as error:
        output.remark(f"the report cannot be written: {error}")
    data = {**summary(state), "folder": str(folder)}
    seconds = {name: round(s, 1) for name, s in (took or {}).items()}
    parts = ", ".join(f"{name} {s:g} s" for name, s in seconds.items())
    if took is not None:
        data["command_seconds"] = seconds
    lines = [*summary_lines(state), *([("seconds", parts)] if parts else [])]
    lines += [("folder", f"{folder}: {best_file(state)}, {_REPORT}, {_LOG}")]
    width = max(len(name) for name, _ in lines)
    output.emit(data, *(shown_text(f"{name:{width}}  {text}") for name, text in lines))
    if remark:
        output.remark(remark)
