"""`verify` and `bench`: verdicts on kernels, and times one can trust."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forecast_autotune.commands.count_line import CountLine
from forecast_autotune.commands.output import CommandError, Output, UsageError, require_packages
from forecast_autotune.errors import RecordError
from forecast_autotune.records.named_lines import read_document
from forecast_harness.targets.cuda.declaration import CUDA_PLACE, CudaDeclaration, read_cuda_declaration
from forecast_harness.targets.kernels.user_kernel import KERNEL_PLACE

if TYPE_CHECKING:
    from forecast_harness.clocks.paired_comparison import StoppingRules
    from forecast_harness.sandbox.api import SandboxLane
    from forecast_harness.targets.packs import Pack, Solution
    from forecast_harness.trials.bench import BenchResult, SolutionContest
    from forecast_harness.trials.cuda import CudaRequests
    from forecast_harness.verify.plan import VerificationPlan
    from forecast_harness.verify.verdict import SolutionVerdict


_BASE = "base"
_STATED_SETTINGS = ("float32 matmul precision", "cuda tf32", "cudnn tf32", "autocast")


@dataclass
class JudgedProblem:
    """A pack, and how sources become its solutions."""

    pack: Pack
    declared: CudaDeclaration | None = None
    request_of: CudaRequests | None = None
    """Requests to compile CUDA sources for contests through machine code."""

    def cuda_solutions(self, names: Sequence[str], plan: VerificationPlan) -> list[Solution]:
        """CUDA sources, each in its first config: files, or `base` for the kernel's own.

        Raises `UsageError` without a CUDA device and for what is no file, and `CommandError` for a source that does
        not compile.
        """
        assert self.declared is not None
        if not names:
            return []
        if plan.device == "cpu":
            raise UsageError(
                "CUDA sources are launched on a CUDA device: leave out the SOLUTION to check the declaration alone, or "
                "give --device a number"
            )
        from forecast_harness.clocks.compilation.cubin_solution import host_solution
        from forecast_harness.clocks.compilation.nvcc import COMPILE_LIMITS, CudaCompileError, compile_source
        from forecast_harness.sandbox.api import SandboxLane
        from forecast_harness.targets.search_target import cuda_device
        from forecast_harness.trials.cuda import CudaRequests

        signature, arch = self.declared.signature, cuda_device().arch
        if not arch.isdigit():
            raise CommandError("the driver does not tell the device's compute capability")
        requests = self.request_of = CudaRequests(signature)
        solutions = []
        with SandboxLane() as lane:
            for name in names:
                source = self._source(name)
                try:
                    binary = compile_source(
                        source, signature, {}, int(arch), lambda job: lane.run(job, COMPILE_LIMITS)
                    )
                except CudaCompileError as error:
                    raise CommandError(f"{name} does not compile: {error}") from error
                solution = host_solution(Path(name).stem, binary, signature, {})
                solutions.append(requests.note(solution, source, {}))
        return solutions

    def _source(self, name: str) -> str:
        assert self.declared is not None
        if name == _BASE:
            return self.declared.source
        path = Path(name)
        if path.suffix != ".cu" or not path.is_file():
            raise UsageError(f"{name} is no CUDA source: give FILE.cu, or {_BASE} for the kernel's own")
        try:
            return read_document(path).replace("\r\n", "\n")
        except RecordError as error:
            raise UsageError(f"{name}: {error}") from error


def open_problem(text: str) -> JudgedProblem:
    """The problem that a text of the command line names. Raises `RecordError`, `SettingsError`."""
    if CUDA_PLACE.match(text):
        declaration = read_cuda_declaration(text)
        return JudgedProblem(declaration.pack, declaration)
    from forecast_harness.targets.packs import load_pack

    return JudgedProblem(load_pack(text))


COLOURS = {"accepted": "green", "rejected": "red", "suspicious": "yellow", "infrastructure": "magenta"}
"""Colours of verdicts."""
PACK_CHECK = "checking that the pack tells right from wrong"


def verify(options: argparse.Namespace, output: Output) -> int:
    """Judge one solution, or without one the pack itself, or a source of a Triton kernel; 0 if accepted."""
    if KERNEL_PLACE.match(options.pack) and not CUDA_PLACE.match(options.pack):
        return _verify_kernel(options, output)
    from forecast_harness.verify.run import check_pack
    from forecast_harness.verify.run import verify as judge

    require_packages("verify", "torch")
    problem = open_problem(options.pack)
    pack, plan = problem.pack, build_plan(options)
    names = [] if options.solution is None else [options.solution]
    solution = next(iter(_solutions(problem, names, plan)), None)
    work = [PACK_CHECK]
    with CountLine(output.errors, lambda: work[-1]), open_lane(options, plan) as lane:
        problems, level = check_pack(pack, lane), lane.level.name
        work += [] if solution is None else [f"judging {solution.name} in a sandbox"]
        verdict = None if problems or solution is None else judge(pack, solution, lane, plan=plan)
    if verdict is None:
        output.emit({"pack": pack.definition.name, "refused": problems}, *_pack_lines(pack, problems))
        return 1 if problems else 0
    data = {**verdict.to_json(), "level": level}
    output.emit(data, *_verdict_lines(verdict, level))
    return 0 if verdict.accepted else 1


def _verify_kernel(options: argparse.Namespace, output: Output) -> int:
    """Judge a source in place of a Triton kernel, or without one the kernel itself, at the calls that are known."""
    from dataclasses import replace

    from forecast_autotune.store import Store
    from forecast_autotune.variants import Origin, Provenance, Variant
    from forecast_harness.clocks.devices import ONE_QUEUE
    from forecast_harness.targets.kernels.user_kernel import UserKernel, is_covered
    from forecast_harness.trials.variants.verify import VARIANT_PLAN, survey, verify_variant

    require_packages("verify", "torch", "triton")
    store = Store.default()
    kernel, plan = UserKernel.of(options.pack, store), replace(build_plan(options), timed=VARIANT_PLAN.timed)
    text = kernel.text if options.solution is None else read_document(Path(options.solution))
    sha, title = kernel.kernel.source_sha256, Path(options.solution or _BASE).stem
    variant = Variant.of(kernel.kernel.name, sha, text, Provenance(Origin.HAND), title=title)
    verdicts: list[SolutionVerdict] = []
    signatures: list[str] = []
    work = f"judging {variant.name} in a sandbox"
    with CountLine(output.errors, lambda: work), open_lane(options, plan, ONE_QUEUE) as lane:
        level = lane.level.name
        for subject in kernel.subjects(store):
            if is_covered(subject, signatures) or not all(v.accepted for v in verdicts):
                continue
            facts = survey(subject, lane, plan=plan)
            signatures.append(facts.signature)
            verdicts.append(
                verify_variant(variant, subject, facts, lane, device=plan.device, plan=plan).verdict
            )
    data = [{**v.to_json(), "level": level} for v in verdicts]
    lines = [line for v in verdicts for line in _verdict_lines(v, level)]
    output.emit({"kernel": kernel.kernel.name, "verdicts": data}, *lines)
    return 0 if all(v.accepted for v in verdicts) else 1


def bench(options: argparse.Namespace, output: Output) -> int:
    """Time solutions against each other; 0 if at least one could be timed."""
    from dataclasses import replace

    from forecast_harness.clocks.paired_comparison import DEFAULT_RULES
    from forecast_harness.trials.bench import compare_solutions as contest
    from forecast_harness.verify.run import check_pack

    require_packages("bench", "torch")
    problem = open_problem(options.pack)
    pack, plan = problem.pack, build_plan(options)
    references = [] if options.against is None else [options.against]
    solutions = _solutions(problem, [*references, *options.solutions], plan)
    against = solutions.pop(0) if references else None
    if len(solutions) + (against is not None) < 2:
        raise UsageError("bench needs something to compare: give another SOLUTION, or --against REF")
    work, remarks = [PACK_CHECK], list[str]()
    with CountLine(output.errors, lambda: work[-1]), open_lane(options, plan) as lane:
        if problems := check_pack(pack, lane):
            raise CommandError(
                f"pack {pack.definition.name} cannot tell right from wrong: {'; '.join(problems)}"
            )
        rules = replace(DEFAULT_RULES, seconds=options.seconds, wall=options.seconds)
        first = _first_contest(options, remarks, problem, plan, rules)
        entries = contest(
            pack,
            solutions,
            lane,
            against=against,
            plan=plan,
            rules=rules,
            first_contest=first,
            watch=work.append,
        )
        level = lane.level.name
    for text in remarks:
        output.remark(text)
    data = [{**e.to_json(), "type": "contest", "schema": 1, "level": level} for e in entries]
    output.emit({"pack": pack.definition.name, "entries": data}, _table(entries), *_notes(entries))
    return 0 if any(e.outcome for e in entries) else 1


def _first_contest(
    options: argparse.Namespace,
    remarks: list[str],
    problem: JudgedProblem,
    plan: VerificationPlan,
    rules: StoppingRules,
) -> SolutionContest | None:
    """The first of two contests through machine code, where that is wanted and a pair of solutions allows it.

    `remarks` gets a line for every pair that does not.
    """
    from forecast_harness.targets.packs import PackFormat

    if options.path == "host-code":
        return None
    pack = problem.pack
    possible = plan.device != "cpu" and pack.definition.format is PackFormat.OWN
    if options.path == "auto" and not possible:
        return None
    if not possible:
        raise UsageError(
            "--path machine-code needs a CUDA device and a pack of the own format: leave it out, or see --device"
        )
    from forecast_harness.trials.bench import ContestUnavailable
    from forecast_harness.trials.machine_code.pack_contest import PackContests

    contests = PackContests(pack, plan, rules, request_of=problem.request_of)

    def contest(incumbent: Solution, candidate: Solution) -> Mapping[str, Any]:
        try:
            return contests(incumbent, candidate)
        except ContestUnavailable as error:
            if options.path == "machine-code":
                raise CommandError(f"--path machine-code does not work here: {error}") from error
            remarks.append(f"both contests of {candidate.name} are held in the sandbox: {error}")
            raise

    return contest


def build_plan(options: argparse.Namespace) -> VerificationPlan:
    """The device that candidates run on, and their launches. Raises `UsageError` for a device that is not there."""
    from forecast_harness.clocks import devices as device
    from forecast_harness.verify.plan import VerificationPlan

    number = options.device
    if number in (None, "cuda"):
        number = next(map(str, device.visible_devices()), number or "cpu")
    if number == "cpu":
        return VerificationPlan(cases=options.cases)
    if not number.isdigit() or int(number) >= device.device_count():
        raise UsageError(f"--device {number}: the driver knows {device.device_count()} devices; or say cpu")
    name, uuid = device.identity(int(number))
    return VerificationPlan(
        cases=options.cases, device="cuda", peaks=device.device_peaks(name), index=int(number), uuid=uuid
    )


def open_lane(
    options: argparse.Namespace, plan: VerificationPlan, environment: Mapping[str, str] | None = None
) -> SandboxLane:
    """A lane for this device, at the level asked for; with a device its processes have this `environment`, too.

    Raises `UsageError` for a level there is not.
    """
    from forecast_harness.sandbox.api import ContainmentLevel, SandboxLane
    from forecast_harness.trials.devices import LANE_MODULES

    level = None
    if options.level is not None:
        names = [n.name for n in ContainmentLevel]
        if options.level.upper() not in names:
            raise UsageError(f"--level must be one of {', '.join(names).lower()}, got {options.level}")
        level = ContainmentLevel[options.level.upper()]
    if plan.device == "cpu":
        # Without a device Triton kernels can only be interpreted: right or wrong, but no times to learn from.
        return SandboxLane(level, environment={"TRITON_INTERPRET": "1"}, warm=LANE_MODULES)
    device = plan.uuid or str(plan.index)
    return SandboxLane(level, device=device, environment=environment, warm=LANE_MODULES)


def _solutions(problem: JudgedProblem, names: list[str], plan: VerificationPlan) -> list[Solution]:
    if problem.declared is not None:
        return problem.cuda_solutions(names, plan)
    return [_solution(problem.pack, name) for name in names]


def _solution(pack: Pack, name: str) -> Solution:
    from forecast_harness.targets.packs import Language, load_solution

    solution = load_solution(name, pack)
    if solution.language is Language.TRITON:
        require_packages(f"{solution.name}, which is written in Triton,", "triton")
    return solution


def _pack_lines(pack: Pack, problems: list[str]) -> list[Any]:
    from forecast_autotune.report.table import shown_text

    if not problems:
        names = ", ".join(s.name for s in pack.solutions) or "none"
        return [shown_text(f"pack {pack.definition.name} is sound; its solutions: {names}")]
    lines = [shown_text(f"pack {pack.definition.name} is refused:", style="red")]
    return [*lines, *(shown_text(f"  {reason}") for reason in problems)]


def _verdict_lines(verdict: SolutionVerdict, level: str = "") -> list[Any]:
    from forecast_autotune.report.table import shown_text
    from forecast_harness.verify.verdict import fault_power

    word = str(verdict.judgement)
    line = shown_text(f"{verdict.solution} on {verdict.pack}: ")
    line.append(word, style=COLOURS[word])
    at = f", sandbox level {level.lower()}" if level else ""
    line.append(f" ({verdict.trials} launches, {verdict.seconds:.1f} s{at})")
    lines = [
        shown_text(f"  {r.code}: {r.detail}" + (f" [launch {r.trial}]" if r.trial else ""))
        for r in verdict.reasons
    ]
    if verdict.accepted:
        lines.append(shown_text(f"  {verdict.checked}"))
        lines.append(shown_text(f"  wrong sources that it is known to refuse, by fault: {fault_power()}"))
        if peaks := verdict.facts.get("peak_bytes"):
            most = ", ".join(f"{name} {size:,} bytes" for name, size in peaks.items())
            lines.append(shown_text(f"  memory at a time, beside inputs: {most}"))
        values = [f"{n} {verdict.facts.get('arithmetic', {}).get(n)}" for n in _STATED_SETTINGS]
        lines.append(shown_text(f"  arithmetic, of whatever it is held against as well: {', '.join(values)}"))
    lines += [shown_text(f"  not varied: {text}") for text in verdict.facts.get("not_varied", ())]
    return [line, *lines, *(shown_text(f"  worth a look: {hint}", style="dim") for hint in verdict.hints)]


def _table(entries: list[BenchResult]) -> Any:
    from rich.table import Table

    works = list(dict.fromkeys(name for e in entries for name in e.labels))
    table = Table("solution", "outcome", "speed-up", "rounds")
    for name in works:
        table.add_column(f"{name}, us", justify="right")
    for entry in entries:
        blocks = str(sum(d["blocks"] for d in entry.duels))
        gain = "" if entry.gain is None else f"{1 + entry.gain:.3f}x"
        peaks = _peaks(entry)
        times = [f"{1e3 * entry.labels[w].median_ms:.1f}" if w in entry.labels else "" for w in works]
        times = [f"{t}\n{peaks[w]:,} B" if w in peaks else t for t, w in zip(times, works, strict=True)]
        table.add_row(entry.solution, entry.outcome or str(entry.verdict.judgement), gain, blocks, *times)
    return table


def _notes(entries: list[BenchResult]) -> list[Any]:
    """The checks of solutions that may be used, their rises in memory, and why others may not be used."""
    from forecast_autotune.report.table import shown_text
    from forecast_harness.verify.verdict import memory_rise

    lines = [shown_text(f"{e.solution}: {e.checked}") for e in entries if e.verdict.accepted]
    base: dict[str, int] = next((_peaks(e) for e in entries if e.outcome == "incumbent"), {})
    rises = [(e.solution, memory_rise(_peaks(e), base)) for e in entries if e.verdict.accepted]
    return [
        *lines,
        *(shown_text(f"{name} {rise}", style="yellow") for name, rise in rises if rise),
        *(line for e in entries if not e.verdict.accepted for line in _verdict_lines(e.verdict)),
    ]


def _peaks(entry: BenchResult) -> dict[str, int]:
    return dict(entry.verdict.facts.get("peak_bytes", {}))
