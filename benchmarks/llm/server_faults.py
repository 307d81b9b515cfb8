"""Claim: whatever a language-model server does, nothing crashes or hangs, and decorated calls stay correct.

A real HTTP server stalls, drips, truncates, lies, redirects and refuses at random (its faults are listed in
`tests/integrations/models/faulty_server.py`). First the three kinds of backends are asked alone, from many
threads; then decorated calls run in Triton's interpreter, each with a surrogate that asks that server and waits for the
answer. Every call must end in time with a correct result, every row that is returned must be right or say by
its mass that something is missing, and the key may be in no message and in no file.

    python -m benchmarks.llm.server_faults --out benchmarks/results/llm_faults.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import numpy as np

from benchmarks.lib.environment import environment
from forecast_autotune import autotune
from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.calibration import BlendWeight, LLMCalibration
from forecast_autotune.llm.gate import GateDecision, GateInputs
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.ensemble import EnsembleSurrogate
from forecast_autotune.surrogates.language_model.surrogate import LLMSurrogate
from forecast_integrations.models.cache import CachingBackend
from forecast_integrations.models.http.backend import HTTPBackend
from forecast_integrations.models.http.chat import ChatBackend
from forecast_integrations.models.http.completions import CompletionsBackend
from forecast_integrations.models.http.decisions import SystemOneBackend
from forecast_integrations.models.http.limits import CircuitBreaker, SpendingLimits, UsageLedger
from tests.integrations.interpreted import kernels
from tests.integrations.interpreted.support import Clock, Vector, blocks, grid
from tests.integrations.models import faults, faulty_server
from tests.integrations.models.faulty_server import MASS, PREFIX, FaultyServer, transport_to, truth

KEY = "sk-benchmark-0123456789abcdefghij"
KINDS: dict[str, Callable[..., HTTPBackend]] = {
    "completions": CompletionsBackend,
    "chat": ChatBackend,
    "systemone": SystemOneBackend,
}
MARGIN_S = 1.0
"""Beyond its time limit a call counts as hung: the server stalls for 30 s."""
TOKENS = 20_000
"""Budget of a ledger, well below what a run would spend, so that it is met."""


@dataclass
class FaultFindings:
    """What happened; the counts that the claim says are 0 are those of `bad`."""

    seen: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=lambda: Counter(crashes=0, hangs=0, rows_wrong=0))
    late_s: list[float] = field(default_factory=list)
    """Seconds beyond the limit, per call; negative: in time."""
    notes: list[str] = field(default_factory=list)
    mutex: threading.Lock = field(default_factory=threading.Lock)

    def end(self, begun: float, limit_s: float) -> None:
        """A call has ended."""
        late = time.monotonic() - begun - limit_s
        with self.mutex:
            self.late_s.append(late)
            self.bad["hangs"] += late > MARGIN_S

    def crash(self, what: str) -> None:
        """An exception that should not have left."""
        with self.mutex:
            self.bad["crashes"] += 1
            self.notes.append(what[-2000:])

    def said(self, text: str) -> None:
        """A message to a user."""
        with self.mutex:
            self.bad["keys_shown"] += KEY in text

    def rows(self, probabilities: Any, masses: Any, asked: list[str], honest_mass: float) -> None:
        """Rows of an answer against the truth."""
        with self.mutex:
            for row, mass, suffix in zip(probabilities, masses, asked, strict=True):
                if not row.any():
                    self.seen["rows_missing"] += 1
                elif np.allclose(row, truth(suffix), atol=1e-6):
                    self.seen["rows_right"] += 1
                elif abs(mass - honest_mass) > 1e-6:
                    self.seen["rows_of_smaller_mass"] += 1
                else:
                    self.bad["rows_wrong"] += 1


def query_backend(
    kind: str, wanted: int, timeout_s: float, seed: int, folder: Path
) -> tuple[FaultFindings, Counter[str]]:
    """Ask a backend until so many faults were met."""
    found = FaultFindings()
    honest_mass = 1.0 if kind == "chat" else MASS
    with FaultyServer() as elsewhere, FaultyServer(faults.mixture(seed)) as server:
        server.elsewhere = elsewhere.url.removesuffix("/v1")
        it = CachingBackend(KINDS[kind](server.url, "m", transport=transport_to(server)), folder / kind)

        def one(number: int) -> None:
            asked = faulty_server.suffixes(6, 6 * number)
            begun = time.monotonic()
            try:
                answer = it.forecast(PREFIX, asked, BINS.labels, timeout_s=timeout_s)
                found.rows(answer.probabilities, answer.mass, asked, honest_mass)
                found.said(" ".join(answer.trouble))
            except LLMError as error:
                found.said(f"{error!r} {error} {error.__cause__!r} {error.__context__!r}")
                with found.mutex:
                    found.seen["calls_refused"] += 1
            except Exception:
                found.crash(traceback.format_exc())
            found.end(begun, timeout_s)

        number = 0
        with ThreadPoolExecutor(8) as pool:
            while server.served.total() - server.served["honest"] < wanted:
                list(pool.map(one, range(number, number + 16)))
                number += 16
        found.seen["calls"] = number
        found.bad["requests_elsewhere"] += len(elsewhere.requests)
        for path in (folder / kind).rglob("*.json"):
            found.bad["keys_on_disk"] += KEY in path.read_text(encoding="utf-8")
        return found, server.served


def always_open_gate(situation: GateInputs) -> GateDecision:
    """Always worth asking: these calls are about what happens then."""
    return GateDecision(True, 1e6, 0.0, "always")


def run_decorated_calls(calls: int, timeout_s: float, seed: int) -> tuple[FaultFindings, Counter[str]]:
    """Decorated calls in the interpreter; each asks the faulty server once."""
    found = FaultFindings()
    calibration = LLMCalibration("m", FORECAST_VERSION, weights={"pooled": BlendWeight(0.6, 0.3)}, saved=0.3)
    sizes = [16, 32, 64, 128, 256, 512]
    with FaultyServer(faults.mixture(seed)) as server:
        for number in range(calls):
            kind = list(KINDS)[number % len(KINDS)]
            backend = KINDS[kind](server.url, "m", transport=transport_to(server, concurrency=4))
            model = LLMSurrogate(backend, calibration, timeout_s=timeout_s)
            surrogate = EnsembleSurrogate(
                DefaultSurrogate(AnalyticSurrogate()), model, patient=True, gate=always_open_gate
            )
            vector = Vector(40 + number)
            tuner = autotune(blocks(*sizes), ["n"], store=False, surrogate=surrogate)(kernels.double)
            tuner.do_bench = Clock(vector.tag, {size: 1.0 + 0.1 * abs(size - 64) / 64 for size in sizes})
            begun = time.monotonic()
            try:
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    tuner[grid](*vector.args)
                found.seen["correct"] += vector.doubled()
                found.bad["wrong_results"] += not vector.doubled()
                told = " ".join(str(w.message) for w in warned)
                decision = tuner.decision
                found.said(f"{told} {decision}")
                reason = "" if decision is None else decision.reason
                heard = f"{backend.name} at weight" in reason
                silent = f"without {backend.name}: " in reason
                found.seen["heard"] += heard
                found.seen["without_the_model"] += silent
                found.bad["summaries_that_do_not_say"] += not (heard or silent)
            except Exception:
                found.crash(traceback.format_exc())
            # What is not the model: launches in the interpreter, some 10 ms each.
            found.end(begun, timeout_s + 2.0)
        found.seen["calls"] = calls
        return found, server.served


def requests_until_open_circuit(timeout_s: float) -> dict[str, int]:
    """How many requests a server gets that answers nothing but errors, over many calls."""
    calls = 50
    with FaultyServer(lambda path, body: faults.STATUSES[-1]) as server:
        it = ChatBackend(
            server.url, "m", transport=transport_to(server, shared_breaker=CircuitBreaker(server.url))
        )
        for _ in range(calls):
            with contextlib.suppress(LLMError):
                it.forecast(PREFIX, faulty_server.suffixes(2), BINS.labels, timeout_s=timeout_s)
        return {"calls": calls, "requests": len(server.requests)}


def check_token_limit(timeout_s: float, seed: int) -> dict[str, int]:
    """Whether a limit holds over faults as well: what is spent in the end, of what was allowed."""
    ledger = UsageLedger()
    with FaultyServer(faults.mixture(seed)) as server:
        it = ChatBackend(
            server.url,
            "m",
            transport=transport_to(server, ledger=ledger, limits=SpendingLimits(tokens=TOKENS)),
        )
        refused = 0
        for number in range(400):
            try:
                it.forecast(PREFIX, faulty_server.suffixes(6, 6 * number), BINS.labels, timeout_s=timeout_s)
            except LLMError as error:
                refused += "FORECAST_AUTOTUNE_LLM_MAX_TOKENS" in str(error)
            if refused == 5:
                break
    spent = ledger.spent.prompt_tokens + ledger.spent.output_tokens
    return {"allowed": TOKENS, "spent": spent, "refused": refused}


def told(found: FaultFindings, served: Counter[str]) -> dict[str, Any]:
    """Findings as JSON."""
    late = np.array(found.late_s)
    return {
        "faults": served.total() - served["honest"],
        "kinds_of_faults": len(served) - 1,
        "seen": dict(found.seen),
        "bad": {name: int(count) for name, count in found.bad.items()},
        "latest_beyond_its_limit_s": round(float(late.max()), 3),
        "late_p99_s": round(float(np.quantile(late, 0.99)), 3),
        "notes": found.notes[:3],
        "served": dict(sorted(served.items())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=300, help="per kind of backend")
    parser.add_argument("--calls", type=int, default=120, help="decorated calls")
    parser.add_argument("--timeout", type=float, default=0.5, help="time limit of a forecast, seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ["FORECAST_AUTOTUNE_LLM_KEY"] = KEY
    limit_s, seed = arguments.timeout, arguments.seed
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="llm-faults-") as name:
        for number, kind in enumerate(KINDS):
            raw[kind] = told(*query_backend(kind, arguments.faults, limit_s, seed + number, Path(name)))
            print(kind, raw[kind]["faults"], raw[kind]["bad"], flush=True)
    raw["decorated"] = told(*run_decorated_calls(arguments.calls, limit_s, seed + len(KINDS)))
    bad: Counter[str] = Counter()
    for part in raw.values():
        bad.update(part["bad"])
    raw["breaker"], raw["budget"] = requests_until_open_circuit(limit_s), check_token_limit(limit_s, seed)
    bad["budget_overrun"] = max(0, raw["budget"]["spent"] - TOKENS)
    summary = {
        "faults": sum(part.get("faults", 0) for part in raw.values()),
        "bad": dict(bad),
        "decorated_calls": raw["decorated"]["seen"],
        "latest_beyond_its_limit_s": max(raw[kind]["latest_beyond_its_limit_s"] for kind in KINDS),
        "requests_to_a_dead_server": raw["breaker"],
        "budget_of_tokens": raw["budget"],
        "holds": not any(bad.values()),
    }
    result = {
        "claim": "no fault of a server crashes, hangs or misleads a call",
        "environment": environment(seed),
        "options": {"faults": arguments.faults, "calls": arguments.calls, "timeout_s": limit_s},
        "summary": summary,
        "raw": raw,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1))
    return 0 if summary["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
