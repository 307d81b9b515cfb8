"""One case: damage a store or files to import, use them as a user would, and say what went wrong."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import shutil
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import forecast_autotune.store.store as store_module
from benchmarks.lib.hardening import record_damage, record_samples
from forecast_autotune.commands import main
from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.records import Decision, Measurement
from forecast_autotune.records.table import read_tables
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.factory import surrogate_for
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.testing import TableMeasurer
from forecast_autotune.tuning.loop import TuningTask, tune

_LARGEST_EXPECTED = 30_000_000
"""What unpacks to more may be a bomb, of which no rows are expected."""
ANSWERS = b"""{"type":"answers","schema":1,"model":"m","provenance":"p"}
{"type":"answer","key":"k1","log2_slowdown":[0.1,0.2],"sd":[0.5,0.5],"p_fail":[0.0,0.1]}
{"type":"answer","key":"k2","text":"an answer"}
"""


@dataclass
class CaseFaults:
    """What a case was, and what it found wrong."""

    number: int
    kind: str = ""
    damage: list[str] = field(default_factory=list)
    """What was done to which file."""
    faults: list[dict[str, str]] = field(default_factory=list)

    def add(self, fault: str, where: str, detail: str) -> None:
        """Note one fault."""
        self.faults.append({"fault": fault, "where": where, "detail": detail[-1500:]})

    @contextlib.contextmanager
    def watched(self, where: str, *allowed: type[Exception]) -> Iterator[None]:
        """A block that may raise nothing but these."""
        try:
            yield
        except allowed:
            pass
        except Exception:
            self.add("traceback", where, traceback.format_exc())


class RecordFuzzer:
    """Makes and runs cases in a folder of its own, each a function of a seed and its number."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.sound_store = folder / "sound store"
        self.sound_imports = folder / "sound imports"
        record_samples.write_store(self.sound_store)
        self.imports = record_samples.write_imports(self.sound_imports)
        self.tables = record_samples.sample_tables()
        self.rows = self._rows_by_line()
        self.homes = self._homes_by_line()
        self.problems = self._problems_by_line()

    def _rows_by_line(self) -> dict[bytes, tuple[str, Measurement]]:
        """What each line of the sound logs and tables says, with the id of its problem."""
        found = {}
        paths = [*self.sound_store.glob("v1/*/*/log-*.jsonl"), self.sound_imports / "table.jsonl"]
        for path in paths:
            for line in path.read_bytes().split(b"\n"):
                if b'"type":"measurement"' in line:
                    measurement = Measurement.from_json(json.loads(line))
                    found[line] = (measurement.problem, measurement)
        return found

    def _homes_by_line(self) -> dict[bytes, tuple[str, str]]:
        """The device's and the kernel's folder of each line of the sound logs."""
        return {
            line: (path.parent.parent.name, path.parent.name)
            for path in self.sound_store.glob("v1/*/*/log-*.jsonl")
            for line in path.read_bytes().split(b"\n")
            if line in self.rows
        }

    @staticmethod
    def _problems_by_line() -> dict[bytes, str]:
        """The id of the problem that each such line of the sound tables begins."""
        lines = [line.encode().rstrip(b"\n") for line in record_samples.table_text()]
        return {line: json.loads(line)["id"] for line in lines if b'"type":"problem"' in line}

    def run(self, number: int) -> CaseFaults:
        """Make and run one case."""
        chance = random.Random(f"{self.seed}-{number}")
        case = CaseFaults(number)
        root = self.folder / "case"
        if root.is_symlink() or root.exists():
            record_damage.remove(root)
        root.mkdir()
        store_module._DEFAULTS.clear()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                act = self._store_case if chance.random() < 0.6 else self._import_case
                act(case, root, chance)
        finally:
            record_damage.remove(root)
        return case

    # --- stores ---

    def _store_case(self, case: CaseFaults, folder: Path, chance: random.Random) -> None:
        case.kind, root = "store", folder / "store"
        shutil.copytree(self.sound_store, root)
        files = sorted(p for p in root.rglob("*") if p.is_file() and p.suffix != ".lock")
        before = {p: p.read_bytes() for p in files}
        for _ in range(1 if chance.random() < 0.7 else chance.randint(2, 3)):
            self._damage_store(case, root, files, chance)
        after = {p: _bytes_or_none(p) for p in files}
        expected = self._expected_rows(after)
        self._read_store(case, root, expected, {p for p in files if after[p] == before[p]})
        uses: list[Callable[[], None]] = [
            lambda: self._tune(case, root, chance),
            lambda: self._show(case, root, chance),
            lambda: self._export(case, root, folder, expected),
        ]
        for use in chance.sample(uses, chance.randint(1, 2)):
            use()
        if chance.random() < 0.05:
            self._command(case, root, ["clear", "--yes"])

    def _damage_store(self, case: CaseFaults, root: Path, files: list[Path], chance: random.Random) -> None:
        if root.is_symlink():
            return  # to the sound store, which other cases need as it is
        there = [p for p in files if p.is_file() and not p.is_symlink() and _is_below(p, root)]
        act = chance.random()
        if act < 0.62 and there:
            path = chance.choice(there)
            done = record_damage.damage_bytes(path, chance)
        elif act < 0.80 and there:
            path = chance.choice(there)
            done = record_damage.replace_file(path, chance)
        elif act < 0.90:
            every = [root, *root.rglob("*")]
            folders = [p for p in every if p.is_dir() and not p.is_symlink() and _is_below(p, root)]
            if not folders:
                return
            path = chance.choice(folders)
            done = record_damage.replace_file(path, chance)
        elif act < 0.95 and len(there) > 1:
            path, other = chance.sample(there, 2)
            done = record_damage.swap_files(path, other)
        else:
            homes = [p for p in [root, *root.rglob("*")] if p.is_dir() and not p.is_symlink()]
            if not homes:
                return
            names = [
                "log-x.jsonl",
                "x.json",
                "running-x-y-1.json",
                "v1",
                "decisions",
                "facts",
                "log-\udcff.jsonl",
            ]
            path = chance.choice(homes) / chance.choice(names)
            if path.is_symlink() or path.exists():
                return
            path.write_bytes(b"")
            done = record_damage.replace_file(path, chance)
        case.damage.append(f"{done}: {str(path.relative_to(root))!a}")

    def _expected_rows(self, files: dict[Path, bytes | None]) -> Counter[Measurement]:
        """The rows whose lines are still there as they were, under their own kernel and device."""
        found: Counter[Measurement] = Counter()
        for path, data in files.items():
            if data is None or not path.name.startswith("log-") or path.suffix != ".jsonl":
                continue
            for line in data.split(b"\n"):
                if self.homes.get(line) == (path.parent.parent.name, path.parent.name):
                    found[self.rows[line][1]] += 1
        return found

    def _read_store(
        self, case: CaseFaults, root: Path, expected: Counter[Measurement], untouched: set[Path]
    ) -> None:
        store = Store(root)
        found: Counter[Measurement] = Counter()
        for table in self.tables:
            p = table.problem
            with case.watched("measurements"):
                found.update(store.measurements(p))
            for name in ("relatives", "verdicts", "facts", "decision"):
                with case.watched(name):
                    getattr(store, name)(p)
        if lost := expected - found:
            case.add("rows lost", "measurements", f"{sum(lost.values())}: {next(iter(lost))}")
        for path in untouched:
            if path.parent.name == "decisions":
                with case.watched("decision"):
                    self._check_decision(case, store, path)
        with case.watched("tables and records of all"):
            list(store.tables())
            list(store.decisions())
            store.variants_of()
            store.advice_of()
        with case.watched("recover"):
            store.recover(self.tables[0].problem)
        noted = Counter(note.partition(": ")[0].partition(".jsonl:")[0] for note in store.issued_warnings)
        if noted and max(noted.values()) > 2:
            case.add("many warnings", "notes", str(noted.most_common(1)))

    def _check_decision(self, case: CaseFaults, store: Store, path: Path) -> None:
        try:
            known = Decision.from_json(json.loads(path.read_bytes()))
        except (OSError, ValueError):
            return
        (problem,) = [t.problem for t in self.tables if t.problem.id == known.problem]
        if store.decision(problem) != known:
            case.add("rows lost", "decisions", str(path.name))

    def _tune(self, case: CaseFaults, root: Path, chance: random.Random) -> None:
        table = chance.choice(self.tables)
        task = TuningTask(table.problem, [m.candidate for m in table.measurements])
        with case.watched("tune"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            decision = tune(
                task,
                lambda: TableMeasurer(table, workers=2),
                store=Store(root),
                surrogate=surrogate_for(Settings()) if chance.random() < 0.3 else AnalyticSurrogate(),
                settings=Settings().with_(mode=chance.choice(["tune", "tune", "skip", "exhaustive"])),
            )
            # It may be one that cannot run, as a damaged row may say anything, but one of those offered.
            if decision.chosen not in task.candidates:
                case.add("wrong config", "tune", str(decision.chosen))
            for warning in caught:
                if " failed (" in str(warning.message):
                    case.add("fell back", "tune", str(warning.message))

    def _show(self, case: CaseFaults, root: Path, chance: random.Random) -> None:
        as_json = ["--json"] if chance.random() < 0.5 else []
        self._command(case, root, ["show", *as_json])
        self._command(case, root, ["explain", chance.choice(["example", "softmax"]), *as_json])
        if chance.random() < 0.1:
            self._command(case, root, ["show", "--calibration", *as_json])

    def _export(self, case: CaseFaults, root: Path, folder: Path, expected: Counter[Measurement]) -> None:
        out = folder / "out.jsonl"
        status = self._command(case, root, ["export", str(out)])
        if status != 0:
            return
        with case.watched("reading an export"):
            problems = {t.problem.id for t in read_tables(out)}
            found = Counter(m for t in read_tables(out) for m in t.measurements)
            wanted = Counter({m: n for m, n in expected.items() if m.problem in problems})
            if lost := wanted - found:
                case.add("rows lost", "export", f"{sum(lost.values())}: {next(iter(lost))}")

    # --- imports ---

    def _import_case(self, case: CaseFaults, folder: Path, chance: random.Random) -> None:
        if chance.random() < 0.12:
            self._answers_case(case, folder, chance)
            return
        sample = chance.choice(self.imports)
        case.kind = f"import {sample.path.name}"
        shutil.copytree(self.sound_imports, folder / "imports")
        path = folder / "imports" / sample.path.name
        inner = chance.choice(sorted(p for p in path.rglob("*") if p.is_file())) if path.is_dir() else path
        for _ in range(1 if chance.random() < 0.7 else 2):
            if inner.is_file() and not inner.is_symlink():
                act = record_damage.damage_bytes if chance.random() < 0.8 else record_damage.replace_file
                case.damage.append(f"{act(inner, chance)}: {inner.name}")
        named = path.with_suffix("").with_suffix(".csv") if path.name.endswith(".meta.jsonl") else path
        root = folder / "store"
        status = self._command(case, root, ["import", str(named), *sample.options])
        expected = self._expected_imports(path)
        found: Counter[Measurement] = Counter()
        with case.watched("tables"):
            found = Counter(m for t in Store(root).tables() for m in t.measurements)
        if lost := expected - found:
            case.add("rows lost", "import", f"status {status}, {sum(lost.values())}: {next(iter(lost))}")
        if path.is_dir() and status == 0 and len({m.problem for m in found}) < len(list(path.iterdir())) - 1:
            case.add("rows lost", "import of a folder", f"{len(found)} left")
        if sample.path.name.startswith(("table", "packed")) and chance.random() < 0.15:
            self._command(case, root, ["replay", str(path)], stored=False)

    def _expected_imports(self, path: Path) -> Counter[Measurement]:
        """Of a table: the rows whose lines, and whose problems' lines, are still there, each once."""
        data = _bytes_or_none(path)
        if data is None or path.is_dir() or not path.name.startswith(("table", "packed")):
            return Counter()
        if data[:2] == b"\x1f\x8b":
            try:
                with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
                    data = stream.read(_LARGEST_EXPECTED)
            except (OSError, EOFError, zlib.error):
                return Counter()
        if len(data) >= _LARGEST_EXPECTED:
            return Counter()
        known, found = set(), set()
        for line in data.split(b"\n"):
            if line in self.problems:
                known.add(self.problems[line])
            elif line in self.rows and self.rows[line][0] in known:
                found.add(self.rows[line][1])
        return Counter(found)

    def _answers_case(self, case: CaseFaults, folder: Path, chance: random.Random) -> None:
        from forecast_integrations.models.recorded import RecordedAnswers

        packed = chance.random() < 0.3
        path = folder / ("answers.jsonl.gz" if packed else "answers.jsonl")
        path.write_bytes(gzip.compress(ANSWERS, mtime=0) if packed else ANSWERS)
        act = record_damage.damage_bytes if chance.random() < 0.8 else record_damage.replace_file
        case.kind = "answers"
        case.damage.append(f"{act(path, chance)}: {path.name}")
        with case.watched("answers", SettingsError, RecordError):
            RecordedAnswers.read(path)

    # --- commands ---

    def _command(
        self, case: CaseFaults, root: Path, arguments: list[str], *, stored: bool = True
    ) -> int | None:
        """Run a command in this process; notes a traceback, and a status that does not fit what was said."""
        out, error = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
        given = [*arguments, "--store", str(root)] if stored else arguments
        status: int | None = None
        store_module._DEFAULTS.clear()
        with case.watched(arguments[0]), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            status = main(given)
        if status is None:
            return None
        error.flush()
        said = error.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]
        if "Traceback (most recent call last)" in said or "internal error" in said:
            case.add("traceback", arguments[0], said)
        failed = any(line.startswith("forecast-autotune: error") for line in said.splitlines())
        refused = any("warning: refused" in line for line in said.splitlines())
        misplaced = stored and _is_misplaced(root)
        if status not in (0, 1, 2) or failed != (status != 0) or (status == 0 and (refused or misplaced)):
            case.add("wrong status", arguments[0], f"{status}: {said}")
        return status


def _is_misplaced(root: Path) -> bool:
    """Whether something else is where the store's own folders belong."""
    places = (root, root / "v1", root / "variants", root / "advice")
    return any((p.is_symlink() or p.exists()) and not p.is_dir() for p in places)


def _is_below(path: Path, root: Path) -> bool:
    """Whether a path is one of a folder's own, not of what a link in it leads to."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def _bytes_or_none(path: Path) -> bytes | None:
    """The bytes of a readable regular file of ordinary size."""
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size < 200_000_000:
            return path.read_bytes()
    return None


FAULTS = (
    *(
        "traceback",
        "hang",
        "memory",
        "rows lost",
        "wrong status",
        "wrong config",
        "fell back",
        "many warnings",
    ),
    "died",
)
