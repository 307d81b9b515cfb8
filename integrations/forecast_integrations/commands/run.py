"""`run`: any Python program, as `python` would run it, with every tuner in it served by us."""

from __future__ import annotations

import argparse
import atexit
import builtins
import importlib.util
import os
import sys
import threading
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.abc import InspectLoader
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

from forecast_autotune import activate
from forecast_autotune.commands.output import CommandError, Output, UsageError, is_installed
from forecast_autotune.file_access import misplaced_file
from forecast_autotune.records import Decision
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.report.summary import ModelTally
from forecast_autotune.settings import Settings, parse_user_directory

if TYPE_CHECKING:
    from forecast_integrations.triton.program_recording import ProgramRecorder


def _tally_json(tally: ModelTally | None) -> dict[str, object] | None:
    return None if tally is None else tally.to_json()


@dataclass
class RunSummary(Record):
    """Sums over the decisions of this process."""

    decisions: int = 0
    stored: int = 0
    """Decided before: nothing was forecast or timed."""
    candidates: int = 0
    """Candidates of the fresh decisions."""
    measured: int = 0
    seconds: float = 0.0
    saved_s: float = 0.0
    llm: ModelTally | None = field(default=None, metadata=json_option(write=_tally_json, omit_null=True))
    """The language model's part; None where none was named."""
    _mutex: threading.Lock = field(
        default_factory=threading.Lock, repr=False, metadata=json_option(private=True)
    )

    def add_decision(self, kernel: str, decision: Decision) -> None:
        """Count one decision; a listener of `forecast_integrations.triton.publication`."""
        with self._mutex:
            self.decisions += 1
            if decision.llm is not None:
                self.llm = self.llm or ModelTally()
                self.llm.add(decision.llm)
            # A stored decision still carries the cost that it had when it was made.
            if not decision.measured and decision.evidence != "forecast":
                self.stored += 1
                return
            self.candidates += decision.candidates
            self.measured += decision.measured
            self.seconds += decision.cost.wall_s
            self.saved_s += decision.saved_s

    def line(self) -> str:
        """One line for a person."""
        if not self.decisions:
            return "no kernel had to be tuned"
        parts = [f"{self.decisions} decision{'s' if self.decisions > 1 else ''}"]
        if self.stored:
            parts.append(f"{self.stored} from the store")
        if self.candidates:
            parts.append(f"{self.measured} of {self.candidates} candidates measured")
            parts.append(f"{self.seconds:.1f} s spent")
        if self.saved_s >= 1:
            parts.append(f"about {self.saved_s:.0f} s saved")
        return ", ".join(parts) + ("" if self.llm is None else f"; {self.llm.line()}")


def run(options: argparse.Namespace, output: Output) -> int:
    """Run the program; returns its exit status, or lets its SystemExit through."""
    if not (is_installed("triton") or is_installed("torch")):
        raise CommandError(
            "neither triton nor torch is installed in this environment, so there is nothing to serve: "
            "pip install 'forecast-autotune[triton]'"
        )
    _check_places(options)
    _set_environment(options)
    settings = Settings.from_environment()
    _check_model(settings)
    recorder = _recorder(options)
    prepare, execute = _program(options, recorder)
    stdout = _divert_stdout() if output.as_json else None
    tally = RunSummary()
    # At exit, and not behind the program's last line: its threads and exit handlers may tune, too.
    atexit.register(_print_summary, tally, stdout, os.getpid())
    if recorder is None or recorder.plan.serve:
        activate.install(lambda: _listen(tally))
        _listen_to_compilations(tally)
    else:
        os.environ["FORECAST_AUTOTUNE"] = "0"
    prepare()
    if recorder is not None:
        recorder.start()
    return _as_python_would(execute)


def _recorder(options: argparse.Namespace) -> ProgramRecorder | None:
    if options.recording is None:
        return None
    from forecast_integrations.triton.program_recording import ProgramRecorder

    return ProgramRecorder(Path(options.recording))


def _check_places(options: argparse.Namespace) -> None:
    """Raises `UsageError` for a place that takes nothing: the program would run, and its measurements be lost."""
    if options.store is not None and (mistake := misplaced_file(parse_user_directory(options.store))):
        raise UsageError(f"--store {options.store}: that is {mistake}; name a folder")


def _check_model(settings: Settings) -> None:
    """Raises `SettingsError` for a language model that is not there: the program would run without it."""
    if settings.llm and settings.llm_trust != "never":
        from forecast_autotune.llm.providers import provider

        provider().check(settings.llm)


def _set_environment(options: argparse.Namespace) -> None:
    """Set the variables, which child processes inherit."""
    os.environ["FORECAST_AUTOTUNE"] = "1"
    if options.mode is not None:
        os.environ["FORECAST_AUTOTUNE_MODE"] = options.mode
    if options.store is not None:
        from forecast_autotune.commands.store_access import own_root

        # The program may change its directory.
        os.environ["FORECAST_AUTOTUNE_CACHE_DIR"] = str(own_root(options))
    if options.capture and os.environ.get("FORECAST_AUTOTUNE_CAPTURE", "off") in ("", "off"):
        os.environ["FORECAST_AUTOTUNE_CAPTURE"] = "values"


def _listen(tally: RunSummary) -> None:
    from forecast_integrations.triton.publication import LISTENERS

    LISTENERS.append(tally.add_decision)


def _listen_to_compilations(tally: RunSummary) -> None:
    # Loads neither torch nor triton, so there is nothing to wait for.
    from forecast_integrations.inductor.summary import LISTENERS

    LISTENERS.append(tally.add_decision)


def _print_summary(tally: RunSummary, stdout: IO[str] | None, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child took our exit handlers along
    try:
        if stdout is None:
            print(f"forecast-autotune: {tally.line()}", file=sys.stderr, flush=True)
        else:
            import json

            print(json.dumps(tally.to_json()), file=stdout, flush=True)
    except (BrokenPipeError, ValueError):
        return  # the program closed the stream, or nobody reads it


def _divert_stdout() -> IO[str]:
    """Give the program stderr as its stdout; returns the real one."""
    sys.stdout.flush()
    real_stdout = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(real_stdout, "w", encoding="utf-8")


def _program(
    options: argparse.Namespace, recorder: ProgramRecorder | None
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A function that sets `sys` up as `python` does, and one that then runs the program."""
    if options.run_module is not None:
        name = options.run_module
        if _missing(name):
            raise CommandError(f"no module named {name}: `run -m` takes what `python -m` takes")

        def execute_module() -> None:
            import runpy

            runpy.run_module(name, run_name="__main__", alter_sys=True)

        return lambda: _set_up("-m", options.rest, Path.cwd()), execute_module
    path = Path(options.script)
    if not path.exists():
        raise UsageError(f"can't open file {str(path)!r}: no such file or directory")
    if not path.is_dir() and not zipfile.is_zipfile(path):
        first = path.resolve().parent
        return lambda: _set_up(options.script, options.rest, first), lambda: _run_file(
            path.absolute(), recorder
        )
    spec = PathFinder.find_spec("__main__", [str(path.absolute())])
    if spec is None or not isinstance(spec.loader, InspectLoader):
        raise CommandError(f"can't find '__main__' module in {str(path)!r}")
    module_spec, loader = spec, spec.loader

    def execute_archive() -> None:
        _as_main(importlib.util.module_from_spec(module_spec), loader.get_code("__main__"))

    return lambda: _set_up(options.script, options.rest, path.absolute()), execute_archive


def _set_up(name: str, rest: list[str], first: Path) -> None:
    sys.argv = [name, *rest]
    _replace_first_path(str(first))


def _missing(module: str) -> bool:
    before = list(sys.path)
    try:
        _replace_first_path(str(Path.cwd()))
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True
    finally:
        sys.path[:] = before


def _replace_first_path(directory: str) -> None:
    """Replace the entry that Python made for us by the one it would have made for the program."""
    if not sys.flags.safe_path:
        sys.path[:1] = [directory]


def _run_file(path: Path, recorder: ProgramRecorder | None) -> None:
    loader = SourceFileLoader("__main__", str(path))
    main = types.ModuleType("__main__")
    vars(main).update(__file__=str(path), __loader__=loader, __spec__=None, __cached__=None)
    data = loader.get_data(str(path))
    code = None if recorder is None else recorder.code_of_main(data, str(path))
    if recorder is not None and code is not None:
        vars(main).update(recorder.names_for_main)
    _as_main(main, code or loader.source_to_code(data, str(path)))


def _as_main(main: types.ModuleType, code: types.CodeType | None) -> None:
    """Run code as `__main__`, and leave the module there.

    `runpy.run_path` would take it away again when the last line is done; exit handlers and threads
    that live longer could then no longer pickle what the program defines.
    """
    sys.modules["__main__"] = main
    vars(main).setdefault("__builtins__", builtins)
    exec(code or "", vars(main))


def _as_python_would(execute: Callable[[], None]) -> int:
    """Run, and turn an exception into the traceback and status that `python` would give."""
    try:
        execute()
    except SystemExit:
        raise
    except BaseException as error:
        sys.stdout.flush()
        sys.excepthook(type(error), error.with_traceback(_without_own_frames(error)), error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _without_own_frames(error: BaseException) -> TracebackType | None:
    own_files = {
        __file__,
        "<frozen runpy>",
        "<frozen importlib._bootstrap>",
        "<frozen importlib._bootstrap_external>",
    }
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in own_files:
        trace = trace.tb_next
    return trace
