"""Claim: no cheat of the clock is called faster than the plain solution that it contains, nor is a copy of it.

    python -m benchmarks.verification.timing_attacks --out benchmarks/results/timing_attacks_cpu.json \
        [--device cpu] [--packs softmax matmul layer_norm] [--only TEXT ...]
    python -m benchmarks.verification.timing_attacks --copies 500 --searches 50 --packs softmax layer_norm swiglu \
        rms_norm cumsum row_argmax --out FILE

Every variant of every family of `tests.harness.timing_attacks` is verified and then compared with the plain solution
that it contains. All in one lane; other work on the machine makes it slower and more often undecided. On a GPU, with
`--device cuda`, what is timed is host code that launches kernels, by the rules that hold there.

With `--copies` or `--searches` nothing is attacked: so many copies of plain solutions, with other names of their
variables, are entered in a bench beside these, and so many searches of `--search-seconds` each are given nothing but
copies. With `--mixes`, so many searches time one call of a mix, and the best source there loses at another one.
A run whose file exists goes on where it ended.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lib.candidate_place import CandidatePlace
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_harness.authors import open_author
from forecast_harness.clocks.paired_comparison import DEFAULT_RULES, ComparisonOutcome, StoppingRules
from forecast_harness.records import SearchBudget, SearchContext, SearchSettings, SearchTarget
from forecast_harness.sandbox.api import JobStatus, SandboxJob, SandboxLane
from forecast_harness.search import output
from forecast_harness.search.run import search
from forecast_harness.targets.packs import Pack, Solution, load_pack, make_solution
from forecast_harness.targets.search_target import open_target
from forecast_harness.trials.bench import BENCH_LIMITS, SolutionBench
from forecast_harness.trials.host_judges import open_judge
from forecast_harness.trials.judge_pool import LocalJudgePool
from forecast_harness.trials.packs import first_plan
from forecast_harness.trials.protocol import NodeJudge
from forecast_harness.verify.plan import VerificationPlan, cell_limits_for
from forecast_harness.verify.run import harness_hash, verify
from tests.harness.small import checked_only, small_folder
from tests.harness.timing_attacks.families import sources

PACKS = ("softmax", "matmul", "layer_norm")
_REFUSED = "refused"


@dataclass(frozen=True)
class ContestPlace:
    """A place of contests, and its rules."""

    lane: SandboxLane
    plan: VerificationPlan


def contest(
    pack: Pack, incumbent: Solution, candidate: Solution, place: ContestPlace, rules: StoppingRules
) -> Mapping[str, Any]:
    """One contest's value: its `duel`, or who was `caught` and why."""
    files = {"incumbent/solution.py": incumbent.source, "candidate/solution.py": candidate.source}
    contestants = [
        {"file": f"{folder}/solution.py", "entry": one.entry, "language": str(one.language)}
        for folder, one in (("incumbent", incumbent), ("candidate", candidate))
    ]
    payload: dict[str, Any] = {"pack": pack.to_json(), "contestants": contestants}
    payload |= {"plan": place.plan.to_json(), "rules": rules.to_json()}
    limits = cell_limits_for(pack, BENCH_LIMITS, place.plan.device)
    result = place.lane.run(SandboxJob("forecast_harness.verify.timing_job:main", payload, files), limits)
    if result.status is JobStatus.OK:
        value: Mapping[str, Any] = result.value
        return value
    return {"caught": 1, "reasons": [{"code": str(result.fault), "detail": result.detail[-300:]}]}


def try_attack(
    pack: Pack, name: str, source: str, place: ContestPlace, rules: StoppingRules
) -> dict[str, Any]:
    """Return what becomes of one attack: refused with its reasons, or how its contests with the plain solution end."""
    begin = time.perf_counter()
    attack = make_solution(name, source)
    verdict = verify(pack, attack, place.lane, plan=place.plan)
    row: dict[str, Any] = {"found": _REFUSED, "reasons": [], "gains": [], "own_gains": []}
    if not verdict.accepted:
        row["reasons"] = [f"{r.code}: {r.detail[:160]}" for r in verdict.reasons]
    while verdict.accepted and len(row["gains"]) < 2:
        value = contest(pack, pack.solution("torch_plain"), attack, place, rules)
        if "caught" in value:
            row["found"] = _REFUSED if value["caught"] == 1 else "incumbent refused"
            row["reasons"] = [f"{r['code']}: {r['detail'][:160]}" for r in value["reasons"]]
            break
        row["found"] = value["duel"]["outcome"]
        row["gains"].append(value["duel"]["gain"])
        row["own_gains"].append(value["duel"].get("own_gain"))
        if row["found"] != ComparisonOutcome.FASTER:
            row["reasons"] = [value["duel"]["reason"]]
            break
    return {**row, "verify_s": round(verdict.seconds, 3), "seconds": round(time.perf_counter() - begin, 1)}


def summarize_attacks(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of what was found, over all and by family."""
    families = {r["family"]: [s for s in rows if s["family"] == r["family"]] for r in rows}
    return {
        "attacks": len(rows),
        "families": len(families),
        "packs": len({r["pack"] for r in rows}),
        "called_faster": [
            f"{r['pack']}: {r['family']}: {r['variant']}" for r in rows if r["found"] == "faster"
        ],
        "by_family": {name: dict(Counter(r["found"] for r in result)) for name, result in families.items()},
        "median_verify_s": sorted(r["verify_s"] for r in rows)[len(rows) // 2] if rows else None,
    }


# --- copies ---

_COPIES_OF_A_SEARCH, _COPIES_OF_A_BENCH = 40, 8


def copied_source(source: str, number: int) -> str:
    """The source with other names for what its functions assign, so that it is another text and the same code."""
    tree = ast.parse(source)
    stored = {n.id for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)
              if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}  # fmt: skip
    stored -= {arg.arg for arg in ast.walk(tree) if isinstance(arg, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in stored:
            node.id = f"{node.id}_{number}"
    return f"{ast.unparse(tree)}\n_COPY = {number}\n"


def try_copies(a: argparse.Namespace, report: ResultFile, place: ContestPlace) -> None:
    """Enter copies of plain solutions in benches, until there are so many verdicts in the report."""
    rows, rules = report.data["raw"].setdefault("copies", []), replace(DEFAULT_RULES, seconds=2.0)
    begun, ends = len(rows) // _COPIES_OF_A_BENCH, time.monotonic() + a.seconds
    while len(rows) < a.copies:
        pack = checked_only(load_pack(a.packs[begun % len(a.packs)]))
        begun, plain = begun + 1, pack.solution("torch_plain")
        bench = SolutionBench(pack, place.lane, first_plan(place.plan), rules)
        bench.enter(plain)
        for number in range(len(rows), min(a.copies, len(rows) + _COPIES_OF_A_BENCH)):
            if time.monotonic() > ends:
                return
            one = bench.enter(
                replace(plain, name=f"copy{number}", source=copied_source(plain.source, number))
            )
            found = one.outcome or str(one.verdict.judgement)
            reasons = [f"{r.code}: {r.detail[:300]} ({r.trial})" for r in one.verdict.reasons]
            duels = [d["reason"] for d in one.duels]
            row = {"pack": pack.definition.name, "found": found, "gain": one.gain, "duels": duels}
            report.add("copies", {**row, "reasons": reasons, "load": os.getloadavg()[0]})
            say(f"copies {len(rows)}: {row} {reasons}"[:300])


def search_texts(a: argparse.Namespace, target: str, texts: Mapping[str, str], *more: str) -> dict[str, Any]:
    """The result of a search of these sources alone, by the command that users call; an `error` where it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts").mkdir()
        for text, source in texts.items():
            (folder / "texts" / f"{text}.py").write_text(source)
        options = [*f"--device {a.device} --surrogate none --quiet --json".split(), *more]
        options += ["--proposer", f"recorded:{folder / 'texts'}", "--out", f"{folder / 'out'}"]
        command = [sys.executable, "-m", "forecast_autotune", "search", target, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"error": done.stderr[-300:]}
        said = json.loads(done.stdout)
        named = ("speedup", "confirmed", "evidence", "measured", "failed", "refused", "slower_at")
        best = (folder / "out" / "best.py").read_text()
        return {**{n: said[n] for n in named}, "wall_s": said["spent"]["wall_seconds"], "best": best}


def search_copies(a: argparse.Namespace, report: ResultFile) -> None:
    """Search among copies alone, until so many searches of the report have timed one.

    The searches of one pack have a judge in common, which knows the seed after the first of them: on a busy machine a
    search of its own spends its time on opening, and times nothing else.
    """
    rows, ends = report.data["raw"].setdefault("searches", []), time.monotonic() + a.seconds
    settings = SearchSettings(SearchBudget(wall_seconds=a.search_seconds), proposers=("recorded",))
    for number, name in enumerate(a.packs):
        wanted = -(-a.searches * (number + 1) // len(a.packs))
        target, (seed, *_) = open_target(name, device=a.device)
        context = SearchContext(target.id, (), a.device, {}, "none", harness_hash())
        with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
            opened = partial(_judge, target, a.device, Path(scratch) / "lanes")
            lanes = stack.enter_context(contextlib.closing(LocalJudgePool(opened, 1)))
            while sum(r["copies"] > 0 for r in rows) < wanted and time.monotonic() < ends:
                folder = Path(scratch) / str(len(rows))
                (folder / "texts").mkdir(parents=True)
                for n in range(_COPIES_OF_A_SEARCH):
                    text = copied_source(seed.source, len(rows) * _COPIES_OF_A_SEARCH + n)
                    (folder / "texts" / f"{n}.py").write_text(text)
                with contextlib.closing(open_author(f"recorded:{folder / 'texts'}", target)) as author:
                    state = search(
                        target,
                        [seed],
                        settings=settings,
                        context=context,
                        proposers={"recorded": author},
                        forecaster=None,
                        lanes=lanes,
                        folder=folder / "out",
                    )
                said = output.summary(state)
                row = {n: said[n] for n in ("speedup", "confirmed", "evidence", "failed", "stopped")}
                row |= {"pack": name, "copies": max(0, len(state.judged) - 1)}
                row["wall_s"] = round(said["spent"]["wall_seconds"], 1)
                report.add("searches", {**row, "load": os.getloadavg()[0]})
                say(f"searches {len(rows)}: {rows[-1]}"[:300])


def _judge(target: SearchTarget, device: str, folder: Path, number: int) -> NodeJudge:
    return open_judge(target, device=device, folder=folder / str(number))


# --- a mix of calls, of which a search times one ---

_REPEATS, _TURNING = 400, 1600
"""How often the seed computes its result, and a source that is faster elsewhere at the calls that are not timed."""


def repeating(source: str, often: str) -> str:
    """A PyTorch source that computes its result as often as an expression of `rows` says."""
    tree = ast.parse(source)
    (run,) = (f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == "run")
    names, run.name = [one.arg for one in run.args.args], "once"
    listed = ", ".join(names)
    lines = f"def run({listed}):\n    rows = {names[0]}.shape[0]\n    for _ in range({often}):\n"
    # Named, so that nobody has torch.compile unroll it.
    body = f"        result = once({listed})  # without torch.compile\n    return result\n"
    return f"{ast.unparse(tree)}\n\n\n{lines}{body}"


def search_mixes(a: argparse.Namespace, report: ResultFile) -> None:
    """Search where one call of a mix is timed, and the best source there loses at another one."""
    rows, ends = report.data["raw"].setdefault("mixes", []), time.monotonic() + a.seconds
    while len(rows) < a.mixes and time.monotonic() < ends:
        name = a.packs[len(rows) % len(a.packs)]
        other, timed, *_ = load_pack(name).checked_workloads
        on_host = a.device == "cpu"  # what is for a host is timed there alone, and nowhere else
        other, timed = replace(other, host=not on_host), replace(timed, host=on_host)
        axis = next(iter(load_pack(name).definition.inputs.values())).shape[0]
        plain = load_pack(name).solution("torch_plain").source
        turning = repeating(plain, f"{_TURNING} if rows == {other.axes[axis]} else 1")
        texts = {"turning": turning} if len(rows) % 2 else {"turning": turning, "holding": plain}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(small_folder(name, Path(folder)))
            (path / "workloads.json").write_text(json.dumps([other.to_json(), timed.to_json()]))
            (path / "solutions" / "torch_plain.py").write_text(repeating(plain, f"{_REPEATS}"))
            for more in (path / "solutions").glob("triton*"):
                more.unlink()
            row = {"pack": name, **search_texts(a, str(path), texts, "--gpu-budget", f"{1 + len(texts)}")}
        loses = [other.name] if f"{_TURNING}" in row.pop("best", "") else []
        row |= {"sources": len(texts), "timed": timed.name, "loses_at": loses}
        row["served_where_it_loses"] = bool(row.get("confirmed") and set(loses) - set(row["slower_at"]))
        report.add("mixes", row)
        say(f"mixes {len(rows)}: {row}"[:400])


def summarize_copies(raw: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Counts of what was said of copies, and of searches among copies."""
    copies, searches = raw.get("copies", ()), [r for r in raw.get("searches", ()) if r["copies"]]
    mixes = [r for r in raw.get("mixes", ()) if "error" not in r]
    return {
        "copies": len(copies),
        "found": dict(Counter(r["found"] for r in copies)),
        "searches": len(searches),
        "searches_without_one": len(raw.get("searches", ())) - len(searches),
        "confirmed": sum(r["confirmed"] for r in searches),
        "copies_searched": sum(r["copies"] for r in searches),
        "load": {
            n: round(statistics.median(r["load"] for r in raw[n]), 1)
            for n in ("copies", "searches")
            if raw.get(n)
        },
        "mixes": len(mixes),
        "mixes_confirmed": sum(r["confirmed"] for r in mixes),
        "losing": sum(r["confirmed"] and bool(r["loses_at"]) for r in mixes),
        "named": sum(
            r["confirmed"] and bool(r["loses_at"]) and r["slower_at"] == r["loses_at"] for r in mixes
        ),
        "served_where_it_loses": sum(r["served_where_it_loses"] for r in mixes),
    }


def main() -> int:
    """Run the benchmark."""
    command_line = parser(__doc__)
    command_line.add_argument("--packs", nargs="+", default=list(PACKS))
    command_line.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="attacks whose family or variant contains one"
    )
    command_line.add_argument(
        "--variants", type=int, default=1000, help="most attacks of a family, the first ones"
    )
    command_line.add_argument("--blocks", type=int, default=60, help="most blocks of an attack's contest")
    command_line.add_argument(
        "--seconds", type=float, default=1e9, help="no further attack is begun after so many"
    )
    command_line.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where candidates run")
    command_line.add_argument("--copies", type=int, default=0, help="verdicts on copies, instead of attacks")
    command_line.add_argument(
        "--searches", type=int, default=0, help="searches among copies, instead of attacks"
    )
    command_line.add_argument(
        "--mixes", type=int, default=0, help="searches of a mix of calls, instead of attacks"
    )
    command_line.add_argument("--search-seconds", type=float, default=20.0, help="of one search among copies")
    early, _ = command_line.parse_known_args()
    command_line.set_defaults(stub_only=early.device == "cpu")
    a = parse_arguments(command_line)
    among_copies = bool(a.copies or a.searches or a.mixes)
    before = json.loads(a.out.read_text())["raw"] if among_copies and a.out.exists() else {}
    report = ResultFile(a, "no cheat of the clock is called faster")
    report.data["raw"] |= before
    summary: dict[str, Any] = {}
    begin, left_out = time.perf_counter(), 0
    packs = [load_pack(name) for name in a.packs]
    where = CandidatePlace.of(a.device)
    plan = VerificationPlan(device=a.device, peaks=where.peaks, index=where.index, uuid=where.uuid)
    with SandboxLane(device=None if a.device == "cpu" else str(where.index)) as lane:
        place = ContestPlace(lane, plan)
        summary |= {"device": where.name, "level": lane.level.name.lower()}
        if among_copies:
            try_copies(a, report, place)
            search_copies(a, report)
            search_mixes(a, report)
            summary |= summarize_copies(report.data["raw"])
            report.finish(summary)
            return int(bool(summary["confirmed"] or summary["found"].get("faster")))
        rows = []
        for pack in packs:
            taken = Counter[str]()
            for (family, variant), source in sources(pack).items():
                if not any(text in family or text in variant for text in a.only):
                    continue
                taken[family] += 1
                if taken[family] > a.variants:
                    continue
                if time.perf_counter() - begin > a.seconds:
                    left_out += 1
                    continue
                result = try_attack(pack, variant, source, place, StoppingRules(most=a.blocks))
                row = {"pack": pack.definition.name, "family": family, "variant": variant, **result}
                rows.append(row)
                report.add("attacks", row)
                say(
                    f"{row['pack']}: {family}: {variant}: {row['found']} {row['gains']} {row['reasons']}"[
                        :200
                    ]
                )
        summary["attacks"] = {**summarize_attacks(rows), "left_out": left_out}
    report.finish(summary)
    return int(bool(summary.get("attacks", {}).get("called_faster")))


if __name__ == "__main__":
    sys.exit(main())
