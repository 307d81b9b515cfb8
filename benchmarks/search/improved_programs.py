"""Claim: programs of strangers run faster after `improve`, unchanged.

    python -m benchmarks.search.improved_programs --sources FOLDER --seconds 250 --out FILE PROGRAM.py ...

Every PROGRAM is improved in an empty store, by mechanical rewrites and by what an author wrote before, blind:
FOLDER/KERNEL/*.py. (`benchmarks/kernels/programs` has programs, and below `sources` what an author wrote for our own;
sources that rewrite a library's kernel are its derivatives, and stay outside this repository.) `--ran FOLDER` sums up
what `improve --out FOLDER/NAME` left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lib import result_files
from benchmarks.lib.environment import environment, host_environment
from forecast_harness.improve.session import load_improvement, state_of


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("programs", nargs="*", type=Path)
    parser.add_argument("--sources", type=Path)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--ran", type=Path)
    arguments = result_files.parse_arguments(parser, on_host="--ran" in sys.argv)
    if arguments.ran is not None:
        rows = {folder.name: _row(folder) for folder in sorted(arguments.ran.iterdir())}
        toolchains = [row.pop("toolchain") for row in rows.values()]
        known = {n: v for n, v in host_environment().items() if n in ("date", "commit")}
        report: dict[str, Any] = {"environment": known | next(filter(None, toolchains), {})}
    else:
        rows, report = {}, {"environment": environment()}
        for program in arguments.programs:
            with tempfile.TemporaryDirectory() as scratch:
                rows[program.stem] = _improved(program, arguments, Path(scratch))
    report |= {"programs": rows, "summary": _summary(list(rows.values()))}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _improved(program: Path, arguments: Any, scratch: Path) -> dict[str, Any]:
    words = ["improve", "--seconds", str(arguments.seconds), "--out", str(scratch / "out"), str(program)]
    if arguments.sources is not None:
        words[1:1] = ["--proposer", f"recorded:{arguments.sources}"]
    place = {**os.environ, "FORECAST_AUTOTUNE_CACHE_DIR": str(scratch / "store")}
    done = subprocess.run([sys.executable, "-m", "forecast_autotune", *words], env=place, check=False)
    return {"status": done.returncode, **_row(scratch / "out")}


def _row(folder: Path) -> dict[str, Any]:
    """The figures of one improvement."""
    known = load_improvement(folder)
    assert known is not None, f"{folder} has no improvement"
    states = [s for e in known.searches.values() if e.folder and (s := state_of(folder / e.folder))]
    context = states[0].context if states else None
    proof = None if known.proof is None else known.proof.to_json()
    searches = {
        n: {"speedup": e.speedup, "confirmed": e.confirmed, "measured": e.measured, "seconds": e.seconds}
        for n, e in known.searches.items()
    }
    parts = [
        {"name": p.name, "share": p.share, "median_s": p.median_s, "roofline_s": p.roofline_s}
        for p in known.parts
        if p.kind == "triton"
    ]
    toolchain = {} if context is None else {"device": context.device, **context.toolchain}
    return {
        "toolchain": toolchain,
        "step_s": known.step_s,
        "parts": parts,
        "searches": searches,
        "proof": proof,
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Kernels that held in a program, and steps that became faster."""
    proofs = [row["proof"] for row in rows if row["proof"] is not None]
    kernels = [1 / gain["ratio"] for p in proofs for gain in p["parts"].values()]
    steps = [p["step"] for p in proofs if p["step"] is not None]
    return {
        "programs": len(rows),
        "kernels": len(kernels),
        "least": min(kernels, default=0.0),
        "most": max(kernels, default=0.0),
        "faster_steps": sum(s["high"] < 1.0 for s in steps),
        "slower_steps": sum(s["low"] > 1.0 for s in steps),
    }


if __name__ == "__main__":
    raise SystemExit(main())
