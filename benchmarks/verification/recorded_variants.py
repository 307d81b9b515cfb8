"""Check every recorded variant without a GPU: right in the interpreter, compilable for sm_90, distinct.

    python -m benchmarks.verification.recorded_variants [--only matmul,softmax/03_split] [--jobs 2] [--also DIRECTORY]

Each variant runs in a process of its own with a time limit: two configs on every small shape of its kernel
against the reference, then one config is compiled on the null device. `--also` names a directory that
holds another Triton, with which everything is compiled once more. A variant that its author expected to be
wrong must be found wrong; all others must be right. The result is written when all variants are checked.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernels
from benchmarks.lib.environment import ROOT
from benchmarks.lib.processes.child_processes import check_each, child_environment, module_command
from benchmarks.lib.result_files import ResultFile, say
from benchmarks.lib.variants import variant_corpus
from forecast_integrations.triton.null_device import null_device

LIMIT_S = 240.0
"""Of one variant, in the interpreter or in the compiler; two of them share two cores."""
SHAPES = 4
"""The most small shapes of one kernel."""
SHARED_BYTES = 232448
"""What a program may have on sm_90."""
_FILE_CHANGED = "no answer: the file is gone, or came, while the check ran"
_PATH = re.compile(r"(?:/[\w.+-]+)+/")
_ALIGNMENT = re.compile(r"must be 16-byte aligned")
"""Tensor descriptors need it, some ragged shapes break it: such a shape says nothing about the variant."""


# --- in a child ---


def small_shapes(kernel: str) -> list[kernels.Case]:
    """Cases of a kernel whose small inputs differ, at most `SHAPES` of them."""
    found: dict[str, kernels.Case] = {}
    for case in kernels.cases([kernel]):
        data = case.make("meta", small=True)
        values = [*data["args"], *data["kwargs"].values()]
        mark = str([(v.shape, v.dtype) if isinstance(v, torch.Tensor) else v for v in values])
        found.setdefault(mark, case)
    return list(found.values())[:SHAPES]


def interpret(source: variant_corpus.VariantSource) -> dict[str, Any]:
    """Run two configs on every small shape; the rules that the text breaks count as failures."""
    if broken := variant_corpus.broken_rules(source):
        return {"verdict": "failed", "detail": "; ".join(broken)}
    loaded, right, refused = variant_corpus.load_variant(source), 0, ""
    for number, case in enumerate(small_shapes(source.kernel)):
        listed = loaded.configs_for(case)
        data = case.make("cpu", small=True)
        expected = case.reference(data)
        for index in {number % len(listed), (number + len(listed) // 2 + 1) % len(listed)}:
            kernels.reset(case, data)
            try:
                loaded.launch(case, data, listed[index])
            except Exception as error:
                text = f"{type(error).__name__}: {error} {error.__cause__ or ''}"
                if _ALIGNMENT.search(text):
                    refused = f"; {case.name} is not aligned"
                    continue
                return {"verdict": "failed", "detail": f"{case.name}, {listed[index]}: {text}"[:600]}
            if wrong := kernels.mismatch(case, data, expected):
                return {"verdict": "wrong", "detail": f"{case.name}, {listed[index]}: {wrong}"}
            right += 1
    return {"verdict": "right" if right else "failed", "detail": f"{right} launches{refused}"}


def compile_one(source: variant_corpus.VariantSource) -> dict[str, Any]:
    """Compile the config in the middle of the list for the first case, at its real shape."""
    case = kernels.cases([source.kernel])[0]
    loaded = variant_corpus.load_variant(source)
    listed = loaded.configs_for(case)
    config, data = listed[len(listed) // 2], case.make("meta")
    try:
        compiled = loaded.function.warmup(**loaded.arguments(case, data), grid=(1,), **config.all_kwargs())
    except Exception as error:
        return {"verdict": "failed", "detail": f"{config}: {type(error).__name__}: {error}"[:600]}
    shared = int(compiled.metadata.shared)
    if "cubin" not in compiled.asm or shared > SHARED_BYTES:
        return {"verdict": "failed", "detail": f"{config}: stages {sorted(compiled.asm)}, shared {shared}"}
    return {"verdict": "compiled", "detail": f"{config}", "shared": shared}


def attempt(
    task: Callable[[variant_corpus.VariantSource], Any], one: variant_corpus.VariantSource
) -> dict[str, Any]:
    """What the task says; an error, of a module that cannot be loaded for example, is a failure."""
    try:
        answer: dict[str, Any] = task(one)
    except Exception as error:
        answer = {"verdict": "failed", "detail": f"{type(error).__name__}: {error}"[:600]}
    # Where things lie on this machine is nobody's business.
    return {**answer, "detail": _PATH.sub("", answer["detail"])}


def check_all(
    found: list[variant_corpus.VariantSource], task: Callable[[variant_corpus.VariantSource], Any], jobs: int
) -> None:
    """Do a task for every variant; print a JSON line as each ends."""
    check_each([({"name": one.name}, partial(attempt, task, one)) for one in found], jobs, LIMIT_S)


# --- in the parent ---


def run_in_role(
    name: str, arguments: argparse.Namespace, also: Path | None, folder: Path
) -> Iterator[dict[str, Any]]:
    """Run this script in a role, and yield what it prints. Raises `RuntimeError` when it fails."""
    more = {
        "TRITON_INTERPRET": "1" if name == "interpret" else "0",
        "OMP_NUM_THREADS": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    environment = child_environment(folder, **more)
    if also is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(also.resolve()), environment["PYTHONPATH"]])
    command = [*module_command(__file__), "--role", name, "--only", arguments.only]
    command += ["--jobs", str(arguments.jobs)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            # The compiler prints what it aborts on, in braces too.
            if line.startswith('{"name": '):
                yield json.loads(line)
    if process.returncode != 0:
        raise RuntimeError(f"role {name} ended with {process.returncode}; its error is above")


def duplicate_sources(found: list[variant_corpus.VariantSource]) -> dict[str, str]:
    """Variants whose code is that of the base or of another variant of the kernel -> that one."""
    every: dict[tuple[str, str], str] = {}
    same = {}
    for one in variant_corpus.variant_sources(sorted({one.kernel for one in found})):
        first = every.setdefault((one.kernel, one.form), one.name)
        if one.form == variant_corpus.base_form(one.kernel):
            same[one.name] = "base"
        elif first != one.name:
            same[one.name] = first
    return {one.name: same[one.name] for one in found if one.name in same}


def problems_of(one: variant_corpus.VariantSource, said: dict[str, Any], twin: str | None) -> list[str]:
    """What is not as it should be, one sentence each."""
    faults = [] if twin is None else [f"same code as {twin}"]
    verdict, detail = said["interpreter"]["verdict"], said["interpreter"]["detail"]
    if one.expect == "wrong" and detail != _FILE_CHANGED:
        return faults + (["expected wrong, but right"] if verdict == "right" else [])
    if verdict != "right":
        faults.append(f"interpreter: {verdict}: {detail}")
    failed = {v: c["detail"] for v, c in said["compiled"].items() if c["verdict"] != "compiled"}
    return faults + [f"Triton {version}: {detail}" for version, detail in failed.items()]


def check(arguments: argparse.Namespace) -> int:
    """Check all variants asked for; returns the number of those that are not as stated."""
    found = variant_corpus.variant_sources(arguments.only.split(",") if arguments.only else None)
    said: dict[str, dict[str, Any]] = {
        one.name: {"interpreter": {"verdict": "failed", "detail": _FILE_CHANGED}, "compiled": {}}
        for one in found
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for line in run_in_role("interpret", arguments, None, folder):
            if line["name"] in said:
                said[line["name"]]["interpreter"] = {k: line[k] for k in ("verdict", "detail", "triton")}
        for also in [None, *([arguments.also] if arguments.also else [])]:
            lines = {line.pop("name"): line for line in run_in_role("compile", arguments, also, folder)}
            version = next((line["triton"] for line in lines.values()), "?")
            for name, answers in said.items():
                line = lines.get(name, {"verdict": "failed", "detail": _FILE_CHANGED})
                answers["compiled"][version] = {k: v for k, v in line.items() if k != "triton"}
    same, bad = duplicate_sources(found), 0
    report = (
        ResultFile(arguments, "recorded variants are as stated, without a GPU") if arguments.out else None
    )
    for one in found:
        faults = problems_of(one, said[one.name], same.get(one.name))
        bad += bool(faults)
        versions = [v for v, c in said[one.name]["compiled"].items() if c["verdict"] == "compiled"]
        verdict = said[one.name]["interpreter"]["verdict"]
        notes = faults or ([said[one.name]["interpreter"]["detail"]] if one.expect == "wrong" else [])
        print(
            f"{'BAD' if faults else 'ok ':4}{one.name:44} {one.expect:8} {verdict:7} "
            f"compiled {' '.join(versions)}  {'; '.join(notes)}",
            flush=True,
        )
        if report is not None:
            row = {"name": one.name, "expect": one.expect, "as_stated": not faults, "form": one.form}
            report.data["raw"].setdefault("variants", []).append({**row, **said[one.name], "faults": faults})
    summary = {
        "variants": len(found),
        "kernels": len({one.kernel for one in found}),
        "distinct": len({(one.kernel, one.form) for one in found}),
        "as_stated": len(found) - bad,
        "expect": dict(Counter(one.expect for one in found)),
    }
    if report is not None:
        report.finish(summary)
    else:
        say(json.dumps(summary))
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="comma-separated kernels or variants; nothing is written")
    parser.add_argument("--jobs", type=int, default=2, help="variants at a time")
    parser.add_argument("--also", type=Path, help="directory with another Triton to compile with")
    parser.add_argument("--out", type=Path, help="the result file, for a check of all variants")
    parser.add_argument("--role", choices=("interpret", "compile"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role is None:
        if arguments.out is None and not arguments.only:
            arguments.out = ROOT / "benchmarks" / "results" / "variants_check.json"
        return int(check(arguments) > 0)
    found = variant_corpus.variant_sources(arguments.only.split(",") if arguments.only else None)
    if arguments.role == "interpret":
        check_all(found, interpret, arguments.jobs)
    else:
        with null_device():
            check_all(found, compile_one, arguments.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
