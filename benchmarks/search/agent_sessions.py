"""Claim: what a coding agent wrote in recorded sessions, and what of it was right and faster.

    python -m benchmarks.search.agent_sessions --out benchmarks/results/agent_sessions.json [--device cpu]

Each folder of `benchmarks/data/agent_sessions` is what an agent was asked, and answered, in a search of the pack of
that name (`forecast_harness.search.proposers.file_agent`). Here its sources are dealt again without the agent, in a
search of its own, whose verdicts, gains and confirmation are kept.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import ROOT
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_harness.search.history.log import read_log
from forecast_harness.search.history.state import replay_events

SESSIONS = ROOT / "benchmarks" / "data" / "agent_sessions"


def replay_session(session: Path, device: str, seed: int) -> dict[str, Any]:
    """Search with a session's sources."""
    sources = sorted([*session.rglob("*.py"), *session.rglob("*.cu")])
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "search"
        command = [sys.executable, "-m", "forecast_autotune", "search", session.name, "--device", device]
        command += [
            "--proposer",
            f"recorded:{session}",
            "--surrogate",
            "none",
            "--quiet",
            "--seed",
            str(seed),
        ]
        command += ["--gpu-budget", str(4 * (len(sources) + 1)), "--out", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(
                f"{session.name}: the search ended with {done.returncode}: {done.stderr[-500:]}"
            )
        state = replay_events(read_log(folder / "log.jsonl"))
    judged = [
        {
            "source": state.nodes[name].provenance.note,
            "outcome": str(found.outcome),
            "log2_ratio": found.log2_ratio,
            "feedback": found.feedback[:200],
        }
        for name, found in state.judged.items()
    ]
    best = state.confirmed.get(state.best)
    return {
        "pack": session.name,
        "requests": len([p for p in session.iterdir() if p.is_dir()]),
        "sources": len(sources),
        "judged": judged,
        "best": state.nodes[state.best].provenance.note,
        "gain": 2**-state.best_score,
        "evidence": state.evidence(state.best),
        "interval": None if best is None else best.facts.get("interval"),
    }


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    made.add_argument("--seed", type=int, default=0)
    early, _ = made.parse_known_args()
    arguments = parse_arguments(made, on_host=early.device == "cpu")
    result = ResultFile(arguments, "a coding agent's recorded sources", arguments.seed)
    rows = []
    for session in sorted(p for p in SESSIONS.iterdir() if p.is_dir()):
        rows.append(replay_session(session, arguments.device, arguments.seed))
        result.add("sessions", rows[-1])
        say(f"{session.name}: {rows[-1]['best']}: {rows[-1]['gain']:.2f}x, {rows[-1]['evidence']}")
    result.finish(
        {
            "sessions": len(rows),
            "sources": sum(row["sources"] for row in rows),
            "outcomes": dict(Counter(one["outcome"] for row in rows for one in row["judged"])),
            "gains": {row["pack"]: row["gain"] for row in rows},
            "confirmed": [row["pack"] for row in rows if row["evidence"] == "confirmed"],
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
