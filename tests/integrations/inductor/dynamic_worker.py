"""torch.compile of a frozen linear layer with a dynamic batch, for real: `python dynamic_worker.py STORE`.

A CPU has two choices for it, MKL's kernel and a C++ template, whose choice holds the sizes that it is timed at.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import forecast_autotune
from forecast_autotune.records import Decision
from forecast_autotune.store import Store
from forecast_integrations.inductor import summary

OPTIONS = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
    "autotune_num_choices_displayed": 0,
}
DECIDED: list[tuple[str, Decision]] = []


def compile_layer(store: Path, met: int, bounds: dict[str, int], **options: Any) -> dict[str, Any]:
    """Compile at one batch size, run at three; what was decided, and which sizes the store knows."""
    torch._dynamo.reset()
    counters.clear()
    DECIDED.clear()
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(128, 256).eval(), torch.randn(met, 128)
    torch._dynamo.mark_dynamic(x, 0, **bounds)
    enabled = forecast_autotune.enable_torch_compile(store=store, **options)
    with torch.no_grad(), fresh_cache(), torch._inductor.config.patch(freezing=True), enabled as handle:
        compiled = torch.compile(layer, options=OPTIONS)
        errors = [
            (compiled(given) - layer(given)).abs().max().item()
            for given in (x, torch.randn(17, 128), torch.randn(300, 128))
        ]
    tables = list(Store(store).tables()) if store.exists() else []
    return {
        "correct": max(errors) < 1e-3,
        "graphs": counters["stats"]["unique_graphs"],
        "labels": [label for label, _ in DECIDED],
        "reasons": [decision.reason for _, decision in DECIDED],
        "evidence": [str(decision.evidence) for _, decision in DECIDED],
        "choices": sorted({len({m.candidate for m in t.measurements}) for t in tables}),
        "sizes": sorted(t.problem.arguments[0].shape[0] for t in tables),
        "said": handle.session.warn_once.messages,
    }


def main() -> None:
    store = Path(sys.argv[1])
    summary.LISTENERS.append(lambda label, decision: DECIDED.append((label, decision)))
    declared = {"min": 2, "max": 512}
    print(
        json.dumps(
            {
                "ranged": compile_layer(store / "a", 32, declared),
                "again": compile_layer(store / "a", 100, declared),
                "hint": compile_layer(store / "b", 32, declared, dynamic_sizes="hint"),
                "assumed": compile_layer(store / "c", 32, {}, dynamic_sizes=(2, 512)),
            }
        )
    )


if __name__ == "__main__":
    main()
