"""One improvement of a program, in a folder: look, search, prove. `--resume` repeats no step that is done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from forecast_autotune.commands.output import CommandError
from forecast_autotune.errors import RecordError
from forecast_autotune.records.bounded_json import decode_bounded
from forecast_autotune.records.codec import Record
from forecast_autotune.records.named_lines import read_document
from forecast_autotune.records.program import (
    CHECK_FILE,
    RECORDING_FILE,
    ProgramRecording,
    RecordingPlan,
    TorchFunction,
)
from forecast_autotune.store import Store
from forecast_autotune.store.files import write_atomically
from forecast_autotune.variants import Variant
from forecast_harness.improve.child import UserProgram, record, run_command
from forecast_harness.improve.parts import Part, chosen_parts, parts_of
from forecast_harness.improve.proof import TURNS, ProgramProof, ProofRequest, prove
from forecast_harness.improve.steps import steps_of
from forecast_harness.search.log import read_log
from forecast_harness.search.state import SearchState, replay_events
from forecast_harness.targets.program_functions import faster_module
from forecast_harness.trials.configs.source_configs import apply_config

R = TypeVar("R", bound=Record)

STATE_FILE = "improve.json"
_LEAST_SEARCH_S = {"cpu": 25.0, "cuda": 50.0}
"""A search of less confirms nothing: it opens its judge and compiles the original, too."""
_LEAST_LOOK_S = 60.0
_LIMIT_OPTIONS = {"tokens": "--tokens", "money": "--money", "device_seconds": "--gpu-seconds"}
"""Limits by the names of `SearchCost`, as options of `search`."""
_ENDLESS_RUN_S = 20.0
"""Seconds for which a program that does not end by itself is run to be timed."""
_RUN_MARGIN = 3.0
"""A later run may take so many times as long as the first."""


@dataclass(frozen=True)
class ImproveSettings:
    """Settings of an improvement: authors and limits."""

    device: str
    seconds: float
    kernels: int | None = None
    step: str = ""
    check: str = ""
    proposers: tuple[str, ...] = ()
    """Specifications as `search --proposer` has them. Below a folder's, one named as the kernel is taken."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Tokens, money and device seconds (as `SearchCost` names them) of all searches together."""
    search_options: tuple[str, ...] = ()
    """Further words for every search."""


@dataclass(frozen=True)
class SearchEnd(Record, label="search end"):
    """The result of a search of one part."""

    speedup: float = 1.0
    confirmed: bool = False
    measured: int = 0
    seconds: float = 0.0
    spent: Mapping[str, float] = field(default_factory=dict)
    """Costs by the names of `SearchCost`."""
    source: str = ""
    """The confirmed source, empty where there is none."""
    problem: str = ""
    silence: str = ""
    """Why authors gave no source at all."""
    folder: str = ""
    faster_at: tuple[str, ...] | None = None
    """The calls at which it is faster, where it is slower at others."""

    def module(self, function: TorchFunction) -> str:
        """The confirmed source in place of a function, where it is faster."""
        return faster_module(function, self.source, self.faster_at)


@dataclass
class Improvement(Record, schema=1, label="improvement"):
    """All that is known of an improvement."""

    words: tuple[str, ...]
    store: str = ""
    """The store of its runs: captured calls, decisions, variants; empty for the folder's own."""
    run_s: float = 0.0
    """Seconds of one run of the program."""
    run_limit_s: float = _LEAST_LOOK_S
    """Seconds after which a run is ended."""
    step_s: float = 0.0
    steps: int = 0
    """Steps of one run, after warm-up."""
    step_how: str = ""
    parts: tuple[Part, ...] = ()
    searches: dict[str, SearchEnd] = field(default_factory=dict)
    proof: ProgramProof | None = None

    @property
    def held(self) -> list[str]:
        """The parts whose faster sources hold in the program."""
        return [] if self.proof is None else list(self.proof.parts)


class ImproveSession:
    """Improves one program; `tell` gets a line at every step."""

    def __init__(
        self, words: Sequence[str], settings: ImproveSettings, folder: Path, tell: Callable[[str], None]
    ) -> None:
        self.program, self.settings = UserProgram(tuple(words)), settings
        self.folder, self._tell = folder.absolute(), tell
        self.store = self.folder / "store"
        self.began = time.monotonic()
        self.run_s, self.run_limit_s = 0.0, _LEAST_LOOK_S
        """Seconds of one run of the program."""

    def look(self, recorded: Path | None = None) -> Improvement:
        """Record the program, or read the recording in a folder, and list its parts.

        Raises `CommandError` for a program that fails, or that never calls the functions of `step` and `check`.
        """
        if recorded is not None:
            self.store = recorded.absolute() / "store"  # with the calls that were captured
        folder = (recorded or self.folder) / "look"
        path = folder / RECORDING_FILE
        began = time.monotonic()
        if path.exists():
            recording = _read_own(ProgramRecording, path)
            self.run_s = recording.seconds + 5.0
        else:
            self._tell(f"recording {' '.join(self.program.words)}")
            plan = RecordingPlan(
                discover=self.settings.device == "cpu",
                root=str(self.program.root),
                step=self.settings.step,
                check=self.settings.check,
            )
            most = max(_LEAST_LOOK_S, self.settings.seconds / 3)
            recording = record(self.program, plan, folder, self.store, seconds=most, capture=True)
            has_tuned = any(True for _ in Store(self.store).decisions()) or steps_of(recording).count == 1
            if self.settings.device == "cuda" and has_tuned:
                # This recording has launches of candidates, too; the next one has the store's decisions.
                began = time.monotonic()
                self._tell("recording it once more, now that everything is tuned")
                recording = record(self.program, plan, folder, self.store, seconds=most)
            self.run_s = time.monotonic() - began
        if self.settings.step and not recording.steps:
            raise CommandError(f"--step {self.settings.step}: the program calls no such function")
        if self.settings.check and not (folder / CHECK_FILE).exists():
            raise CommandError(f"--check {self.settings.check}: the program calls no such function")
        self.run_limit_s = max(_LEAST_LOOK_S, _RUN_MARGIN * self.run_s)
        if recording.interrupted:
            self.run_s = self.run_limit_s = min(self.run_s, _ENDLESS_RUN_S)
        steps = steps_of(recording)
        files = Store(self.store).captures
        captures = [] if files is None else [call for call, _ in files.every()]
        parts = tuple(parts_of(recording, steps, captures, self.folder, self.program))
        return Improvement(
            self.program.words,
            str(self.store),
            self.run_s,
            self.run_limit_s,
            steps.seconds,
            steps.count,
            f"{steps.count} steps, {steps.how}" if steps.count > 1 else steps.how,
            parts,
        )

    def adopt(self, improvement: Improvement) -> None:
        """Go on with an earlier improvement, in the store that it began with."""
        self.store = Path(improvement.store) if improvement.store else self.store
        self.run_s, self.run_limit_s = improvement.run_s, improvement.run_limit_s

    def search(self, improvement: Improvement) -> None:
        """Search the parts that promise most, each within its share of what is left of the time."""
        parts = chosen_parts(improvement.parts, self.settings.kernels)
        proof_s = (TURNS + 2) * self.run_s  # later runs take less: nothing is compiled
        least = _LEAST_SEARCH_S[self.settings.device]
        for number, part in enumerate(parts):
            if (end := improvement.searches.get(part.name)) is not None and not end.problem:
                continue
            rest = self.settings.seconds - (time.monotonic() - self.began) - proof_s
            share = part.expected / sum(p.expected for p in parts[number:])
            if rest < least and number:
                improvement.searches[part.name] = SearchEnd(
                    problem="no time was left for it: give more --seconds"
                )
                continue
            limits = self._remaining_limits(improvement)
            if limit_names := [name for name, amount in limits.items() if amount <= 0.0]:
                improvement.searches[part.name] = SearchEnd(problem=f"no {limit_names[0]} are left for it")
                continue
            # The next two need theirs, too: most of what a search gains, it gains early.
            later = least * min(2, len(parts) - number - 1)
            seconds = max(min(rest * share, rest - later), least)
            improvement.searches[part.name] = SearchEnd(problem="interrupted")  # until it has ended
            self._tell(f"searching {part.name}, {part.share:.0%} of a step, {seconds:.0f} s")
            improvement.searches[part.name] = self._search(part, seconds, limits)
            self.save(improvement)

    def prove(self, improvement: Improvement) -> None:
        """Prove in the program what searches have confirmed."""
        parts = {p.name: p for p in improvement.parts}
        faster = {n: s.source for n, s in improvement.searches.items() if s.source}
        proof = improvement.proof
        if not faster or (proof is not None and faster.keys() <= {*proof.parts, *proof.refused}):
            return
        replaced: dict[str, str] = {}
        for name in faster:
            if (function := parts[name].function) is not None:
                replaced[name] = improvement.searches[name].module(function)
        functions = tuple(p.name for p in improvement.parts if p.function is not None and p.name in replaced)
        plan = RecordingPlan(functions=functions, step=self.settings.step, check=self.settings.check)
        request = ProofRequest(
            self.program,
            plan,
            replaced,
            [n for n in faster if n not in replaced],
            self.folder / "proof",
            self.store,
            improvement.step_s,
            improvement.steps,
            {n: parts[n].calls for n in faster},
            self.run_limit_s,
            # A GPU's steps are short beside what a host's load changes from run to run.
            self.began + self.settings.seconds if self.settings.device == "cuda" else 0.0,
        )
        improvement.proof = prove(request, self._tell)
        self.save(improvement)

    def leave(self, improvement: Improvement, store: Store) -> list[Variant]:
        """Put the variants that hold into a store."""
        names = set(improvement.held)
        variants = [v for v in Store(self.store).variants() if v.kernel in names and v.checks]
        for variant in variants:
            store.put_variant(variant)
        return variants

    def save(self, improvement: Improvement) -> None:
        """Write the improvement to its folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        data = json.dumps(improvement.to_json(), indent=1, allow_nan=False)
        write_atomically(self.folder / STATE_FILE, data.encode())

    def search_words(self, part: Part, folder: Path, seconds: float) -> tuple[list[str], dict[str, str]]:
        """The command line of a part's search, without authors, and its environment."""
        words = ["search", part.target, "--device", self.settings.device, "--seconds", f"{seconds:.0f}"]
        words += ["--out", str(folder), "--quiet", "--json", *self.settings.search_options]
        words += ["--resume"] if (folder / "log.jsonl").exists() else []
        return words, {"FORECAST_AUTOTUNE_CACHE_DIR": str(self.store)}

    def _remaining_limits(self, improvement: Improvement) -> dict[str, float]:
        ends = improvement.searches.values()
        return {n: most - sum(e.spent.get(n, 0.0) for e in ends) for n, most in self.settings.limits.items()}

    def _search(self, part: Part, seconds: float, limits: Mapping[str, float]) -> SearchEnd:
        began = time.monotonic()
        folder = self.folder / f"search-{part.stem}"
        words, environment = self.search_words(part, folder, seconds)
        for spec in self.settings.proposers:
            kind, _, where = spec.partition(":")
            own = Path(where) / part.stem
            if kind == "recorded" and Path(where).is_dir() and not own.is_dir():
                continue  # nobody has written for this kernel
            if kind == "files" or (kind == "recorded" and own.is_dir()):
                spec = f"{kind}:{own}"
            words += ["--proposer", spec]
        for limit, amount in limits.items():
            words += [_LIMIT_OPTIONS[limit], f"{amount:.0f}" if limit == "tokens" else f"{amount:g}"]
        end = run_command(words, environment=environment)
        took = time.monotonic() - began
        state = state_of(folder)
        if state is None:
            return SearchEnd(problem=end.last_line or "the search ended before it began", seconds=took)
        return replace(_search_end(state), seconds=took, silence=_silence(state)[:200], folder=folder.name)


def state_of(folder: Path) -> SearchState | None:
    """The search in a folder as its log tells it; None where none has begun."""
    path = folder / "log.jsonl"
    events = read_log(path) if path.exists() else []
    return replay_events(events) if events else None


def _silence(state: SearchState) -> str:
    """Why authors gave no source at all; empty where each gave some, or had none to give."""
    answers = [(a.arm.partition("/")[0], a) for a in state.answers.values()]
    writers = {author for author, a in answers if a.nodes or not a.problem}
    problems = {author: a.problem for author, a in answers}
    authors = dict.fromkeys(arm.partition("/")[0] for arm in state.context.arms)
    return "; ".join(
        problems.get(author, f"{author}: no answer") for author in authors if author not in writers
    )


def _search_end(state: SearchState) -> SearchEnd:
    best, count = state.best, len(state.judged)
    costs = {name: float(getattr(state.spent, name)) for name in _LIMIT_OPTIONS}
    if best == state.seeds[0] or state.evidence(best) != "confirmed":
        reason = "" if state.stopped is None or state.scores else state.stopped.reason
        return SearchEnd(measured=count, spent=costs, problem=reason)
    result = state.confirmed.get(best) or state.judged[best]
    if result.faster_at == ():
        return SearchEnd(measured=count, spent=costs, problem="slower at every call by itself")
    source = state.nodes[best].source
    config: Any = result.config
    if isinstance(config, Mapping) and state.target.kind == "pack":
        source = apply_config(source, dict(config))
    return SearchEnd(
        2**-state.best_score, True, count, spent=costs, source=source, faster_at=result.faster_at
    )


def load_improvement(folder: Path) -> Improvement | None:
    """The improvement in a folder; None where there is none. Raises `RecordError`."""
    path = folder / STATE_FILE
    return _read_own(Improvement, path) if path.exists() else None


def _read_own(kind: type[R], path: Path) -> R:
    try:
        return kind.from_json(decode_bounded(read_document(path)))
    except ValueError as error:
        raise RecordError(f"{path}: {error}: run `forecast-autotune improve` with another --out") from error
