"""Claim: a language model in this process forecasts 100 candidates in tens of ms, ranked as in full.

    python -m benchmarks.llm.local_latency --random smollm2-135m --random qwen2.5-0.5b --random qwen2.5-1.5b \\
        --model PATH --out benchmarks/results/llm_latency.json
    OMP_NUM_THREADS=1 python -m benchmarks.llm.local_latency --model PATH --device cpu --runs 2 --full 4 \\
        --out benchmarks/results/llm_latency_cpu.json

CPU milliseconds stand beside wall milliseconds, for machines that have other work to do.

Per model, in fresh processes: seconds of importing, loading and checking, the first forecast, and warm
forecasts of 100 and 1,000 candidates of about 40 tokens after about 1,500 shared ones. Every run has new
candidates, tokenized within the time that is reported, and a prefix that is known (`kept`), known but for
its last lines, as with the same kernel at other sizes (`kernel`), or new (`new`). The ways of reading
are `tree` (the default), `packed` under a tree mask and `batched` (both by the model's own code), and
`naive`, every prompt in full, for `--full` candidates.

`agreement` compares each way's order of the candidates (by expected log2 ratio) with reading in full in
float32. `hidden` starts loading in a thread, lets the tuner compile 8 configs of a matmul meanwhile, and
reports how long the forecast is waited for after that; without a GPU the kernels are compiled for a null
device, which is as much work for the compilers.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib import devices, random_models, result_files
from benchmarks.lib.processes import child_processes
from forecast_autotune.llm.backend import BackendResponse
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.tokenizer import ForecastTokenizer
from forecast_integrations.models.transformers.backend import TransformersBackend

LIMITS_MS = {576: 25.0, 896: 40.0, 1536: 60.0}
"""Of 100 candidates on an H200, by a model's hidden size: 135M, 0.5B and 1.5B parameters."""
READING_MODES = ("tree", "packed", "batched")
CASE, CONFIGS = "matmul/4096x4096x4096", 8
LONG_S = 3600.0


def open_backend(given: dict[str, Any], **more: Any) -> TransformersBackend:
    options = {name: given[name] for name in ("device", "dtype", "threads") if given[name]}
    return TransformersBackend(given["folder"], given["adapter"] or None, **options | more)


def tokens_of(folder: str) -> ForecastTokenizer:
    import transformers

    return ForecastTokenizer(transformers.AutoTokenizer.from_pretrained(folder))


def timed_answer(
    backend: TransformersBackend, prefix: str, texts: Sequence[str]
) -> tuple[BackendResponse, dict[str, float]]:
    """An answer, and the milliseconds it took, of the wall clock and of this process's CPU time. The
    answer's numbers are back on the host by then."""
    wall, cpu = time.perf_counter(), time.process_time()
    answer = backend.forecast(prefix, texts, BINS.labels, timeout_s=LONG_S)
    took = time.perf_counter() - wall, time.process_time() - cpu
    return answer, {"ms": took[0] * 1e3, "cpu_ms": took[1] * 1e3}


# --- the children's roles ---


def measure_warm(given: dict[str, Any]) -> dict[str, Any]:
    """First and warm forecasts of one way of reading."""
    import torch

    tokens = tokens_of(given["folder"])
    backend = open_backend(given, way=given["way"])
    begin = time.perf_counter()
    backend.prepare()
    found: dict[str, Any] = {"prepare_s": time.perf_counter() - begin, **backend.diagnostics()}
    del found["name"]  # a path on this machine
    known = random_models.prefix_text(tokens, given["prefix"])
    texts = random_models.candidate_texts(tokens, given["counts"][0], given["suffix"])
    answer, found["first"] = timed_answer(backend, known, texts)
    found["prefix_tokens"] = len(tokens.prefix(known))
    sizes = [len(ids) for ids in tokens.suffixes(texts)]
    found["suffix_tokens"] = {"mean": float(np.mean(sizes)), "least": min(sizes), "most": max(sizes)}
    found["mass"] = float(np.median(answer.mass))
    rows = found["runs"] = []
    # A CPU's first pass is no slower than the next.
    unheard = 0 if backend.diagnostics()["device"] == "cpu" else 1
    for count in given["counts"]:
        runs = given["runs"] if count == given["counts"][0] else max(1, given["runs"] // 5)
        # What the prefix costs does not depend on the number of candidates.
        whole = given["way"] == "tree" and count == given["counts"][0]
        for prefix in ("kept", "kernel", "new") if whole else ("kept",):
            for run in range(runs + unheard):
                number, shape = (run + 1 if prefix == "new" else 0), (run + 1 if prefix == "kernel" else 4096)
                text = random_models.prefix_text(tokens, given["prefix"], number, shape=shape)
                texts = random_models.candidate_texts(tokens, count, given["suffix"], run + 1)
                answer, took = timed_answer(backend, text, texts)
                if run >= unheard:
                    cached = answer.usage.cached_tokens
                    rows.append({"count": count, "prefix": prefix, "cached_tokens": cached, **took})
    if torch.cuda.is_available():
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        if given["profile"]:
            found["device_ms"] = _device_ms(backend, known, texts[: given["counts"][0]])
    return found


def _device_ms(backend: TransformersBackend, prefix: str, texts: Sequence[str]) -> float:
    """Milliseconds that the GPU itself is busy with a warm forecast: the rest is launching and Python."""
    from torch.profiler import ProfilerActivity, profile

    timed_answer(backend, prefix, texts)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        timed_answer(backend, prefix, texts)
    return float(sum(event.self_device_time_total for event in seen.key_averages())) / 1e3


def measure_full_reading(given: dict[str, Any]) -> dict[str, Any]:
    """Reading in full: milliseconds, and the answers of every way and dtype to the same question."""
    import torch

    tokens = tokens_of(given["folder"])
    prefix = random_models.prefix_text(tokens, given["prefix"])
    texts = random_models.candidate_texts(tokens, given["full"], given["suffix"])
    answers, took = {}, {}
    for dtype in ("float32", "bfloat16"):
        for way in (*READING_MODES, "naive"):
            backend = open_backend(given | {"dtype": dtype}, way=way)
            backend.prepare()
            name = f"{way} {dtype}"
            answers[name], took[name] = timed_answer(backend, prefix, texts)
            backend.close()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    wanted = answers["naive float32"]
    agreement = {name: _agreement(answer, wanted) for name, answer in answers.items()}
    return {"count": len(texts), "took": took, "agreement": agreement}


def _agreement(answer: BackendResponse, wanted: BackendResponse) -> dict[str, Any]:
    mean, right = (BINS.moments(a.probabilities)[0] for a in (answer, wanted))
    ranks = [np.argsort(np.argsort(x, kind="stable")).astype(float) for x in (mean, right)]
    order = [np.argsort(x, kind="stable") for x in (mean, right)]
    return {
        "spearman": float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if len(mean) > 2 else None,
        "same_order": bool((order[0] == order[1]).all()),
        "same_best": bool(order[0][0] == order[1][0]),
        "most_log2_difference": float(np.abs(mean - right).max()),
        "spread_log2": float(right.std()),
        "most_probability_difference": float(np.abs(answer.probabilities - wanted.probabilities).max()),
    }


def measure_compilation(null: bool) -> float:
    """Seconds of a decorated call that compiles and tries all of some configs."""
    from benchmarks import kernels
    from forecast_autotune import autotune

    with devices.device(null) as where:
        devices.warm_up_device(where)
        (case,) = kernels.cases([CASE])
        data = case.make(where)
        configs = kernels.configs(case)[:CONFIGS]
        tuner = autotune(configs, list(case.key), store=False, mode="exhaustive")(case.kernel)
        begin = time.perf_counter()
        tuner[data["grid"]](*data["args"], **data["kwargs"])
        devices.synchronize()
        return time.perf_counter() - begin


def measure_fresh_process(given: dict[str, Any]) -> dict[str, Any]:
    """A fresh process that compiles, that loads and forecasts, or that does both at a time."""
    import torch  # noqa: F401 - as in every program with a Triton kernel
    import triton  # noqa: F401

    found: dict[str, Any] = {}
    backend = open_backend(given)
    begin = time.perf_counter()
    loader = threading.Thread(target=backend.prepare)
    if given["what"] != "compile":
        loader.start()
    if given["what"] != "load":
        found["compile_s"] = measure_compilation(given["null"])
    if given["what"] != "compile":
        after = time.perf_counter()
        loader.join()
        found["wait_s"] = time.perf_counter() - after
        texts = [random_models.candidate_text(i, 1, 8) for i in range(given["counts"][0])]
        prefix = Path(given["text"]).read_text(encoding="utf-8")
        _, took = timed_answer(backend, prefix, texts)
        found |= {"first_forecast_s": took["ms"] / 1e3, "seconds": backend.diagnostics()["seconds"]}
    return {**found, "total_s": time.perf_counter() - begin}


# --- the parent ---


def _middle(values: Sequence[float]) -> float:
    return round(float(statistics.median(values)), 2)


def _warm_summary(found: dict[str, Any]) -> dict[str, Any]:
    kinds = dict.fromkeys((row["count"], row["prefix"]) for row in found["runs"])
    table: dict[str, dict[str, float]] = {}
    for count, prefix in kinds:
        rows = [row for row in found["runs"] if (row["count"], row["prefix"]) == (count, prefix)]
        ms = [row["ms"] for row in rows]
        least, most = (round(pick(ms), 2) for pick in (min, max))
        cpu = _middle([row["cpu_ms"] for row in rows])
        table[f"{count} {prefix}"] = {
            "median_ms": _middle(ms),
            "least_ms": least,
            "most_ms": most,
            "cpu_ms": cpu,
        }
    kept = {key: found.get(key) for key in ("way", "dtype", "device", "device_ms", "peak_bytes", "seconds")}
    first = round(found["first"]["ms"], 1)
    return {**kept, "prepare_s": round(found["prepare_s"], 2), "first_ms": first, "warm": table}


def _child(a: Namespace, role: str, given: dict[str, Any], folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    command = child_processes.child_command(__file__, a, role, given)
    return child_processes.run_child(command, child_processes.child_environment(folder), timeout_s=LONG_S)


def measure(
    a: Namespace, name: str, model: str, report: result_files.ResultFile, folder: Path
) -> dict[str, Any]:
    """All of one model; what has been measured is in the report after each step."""
    base = {"folder": model, "adapter": a.adapter, "device": a.device, "dtype": a.dtype, "threads": a.threads}
    base |= {"prefix": a.prefix, "suffix": a.suffix, "counts": a.counts, "runs": a.runs}
    base |= {"profile": a.profile, "full": a.full, "null": a.device == "cpu"}
    tokens = tokens_of(model)
    base["text"] = str(folder / "prefix.txt")
    folder.mkdir(parents=True)
    Path(base["text"]).write_text(random_models.prefix_text(tokens, a.prefix), encoding="utf-8")
    summary: dict[str, Any] = {"ways": {}}
    for way in a.ways:
        # Thousands of candidates by the slower ways would say nothing new.
        counts = a.counts if way == "tree" else a.counts[:1]
        found = _child(a, "warm", base | {"way": way, "counts": counts}, folder / way)
        report.add("warm", {"model": name, **found})
        summary["ways"][way] = _warm_summary(found)
        result_files.say(f"{name} {way}: {summary['ways'][way]['warm']}")
    if a.full:
        found = _child(a, "full", base, folder / "full")
        report.add("full", {"model": name, **found})
        summary["full"] = found
        result_files.say(f"{name} in full: {found['took']}")
    rows: dict[str, list[dict[str, Any]]] = {}
    for number in range(a.processes):
        for what in ("compile", "load", "both"):
            found = _child(a, "fresh", base | {"what": what}, folder / f"{what}{number}")
            report.add("fresh", {"model": name, "what": what, **found})
            rows.setdefault(what, []).append(found)
            result_files.say(f"{name} {what}: {found}")
    summary["fresh"] = {
        what: {key: _middle([r[key] for r in found]) for key in found[0] if key != "seconds"}
        for what, found in rows.items()
    }
    return summary | claim_results(summary, model, a)


def claim_results(summary: dict[str, Any], model: str, a: Namespace) -> dict[str, Any]:
    """What the claim says of a model, and whether it holds."""
    found: dict[str, Any] = {}
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    if a.device != "cpu" and config["hidden_size"] in LIMITS_MS:
        found["limit_ms"] = LIMITS_MS[config["hidden_size"]]
    if "tree" in summary["ways"]:
        table = summary["ways"]["tree"]["warm"]
        few = table[f"{a.counts[0]} kept"]["median_ms"]
        if "limit_ms" in found:
            found["within_limit"] = few <= found["limit_ms"]
        if len(a.counts) > 1:
            found["growth"] = round(table[f"{a.counts[-1]} kept"]["median_ms"] / few, 2)
            found["growth_within_limit"] = found["growth"] <= a.counts[-1] / a.counts[0]
    if "full" in summary:
        agreement = summary["full"]["agreement"]
        found["same_order_float32"] = all(agreement[f"{way} float32"]["same_order"] for way in READING_MODES)
        found["spearman_bfloat16"] = agreement["tree bfloat16"]["spearman"]
    return found


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--model", type=Path, action="append", default=[], help="a folder with a real model")
    parser.add_argument("--random", choices=list(random_models.ARCHITECTURES), action="append", default=[])
    parser.add_argument("--adapter", default="", help="a LoRA adapter for the models")
    parser.add_argument("--device", default="", help="a torch device; by default CUDA if there is one")
    parser.add_argument("--dtype", default="", help="by default what the backend chooses")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads while reading; 0: torch's choice")
    parser.add_argument("--ways", nargs="+", choices=READING_MODES, default=list(READING_MODES))
    parser.add_argument("--counts", type=int, nargs="+", default=[100, 1000], help="candidates")
    parser.add_argument("--prefix", type=int, default=1500, help="tokens shared by all")
    parser.add_argument("--suffix", type=int, default=40, help="tokens of a candidate")
    parser.add_argument("--runs", type=int, default=25, help="warm forecasts of each kind; a fifth of 1,000")
    parser.add_argument("--full", type=int, default=100, help="candidates read in full, too; 0: none")
    parser.add_argument("--processes", type=int, default=3, help="fresh processes of each kind")
    parser.add_argument("--profile", action="store_true", help="also the time that the GPU is busy")
    a = parser.parse_args()
    if a.child:
        roles = {"warm": measure_warm, "full": measure_full_reading, "fresh": measure_fresh_process}
        print(json.dumps(roles[a.child](a.given)), flush=True)
        return 0
    if a.out is None or not (a.model or a.random):
        parser.error("--out FILE and a --model or --random are required")
    import torch

    a.device = a.device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = [path.name if path.name != "hf" else path.parent.name for path in a.model]
    shown = Namespace(**{**vars(a), "model": names})
    report = result_files.ResultFile(shown, "llm_latency")
    import transformers

    report.data["environment"]["transformers"] = transformers.__version__
    report.data["environment"]["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "")
    report.data["load_average"] = os.getloadavg()
    summary = {}
    with tempfile.TemporaryDirectory(prefix="llm-latency-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        for name, path in zip(names, a.model, strict=True):
            summary[name] = measure(a, name, str(path.resolve()), report, folder / name)
        for name in a.random:
            model = random_models.random_model(name, folder / f"{name}-weights")
            summary[f"{name} (random weights)"] = measure(a, name, model, report, folder / name)
    report.data["load_average_after"] = os.getloadavg()
    report.finish(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
