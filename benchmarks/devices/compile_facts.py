"""Claim: what the compiler allocates is what was forecast, on every target, and what fits is never refused.

    python -m benchmarks.devices.compile_facts --out FILE.json [--targets cuda:90] [--kernels matmul] [--each 16]

Kernels of `benchmarks.kernels.compile_facts` are compiled here, on the CPU, by the installed Triton and up to the pass
that allocates shared and tensor memory. Beside that stand the bytes of the cost formula and P(cannot launch) of the
surrogate, which see the TTIR alone. Run it with each release of Triton that the project supports.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.isotonic import IsotonicRegression

from benchmarks.kernels.compile_facts import CASES, Case
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_autotune.features.devices import target_device
from forecast_autotune.features.trace import KernelTracer
from forecast_autotune.features.ttir.extraction import assignment_key
from forecast_autotune.policy import REFUSED
from forecast_autotune.records import Candidate, Config, Device, Kernel, Problem
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.prior import formula_prior
from forecast_autotune.surrogates.protocol import Array, Query
from forecast_integrations.triton.null_device import target_of
from forecast_integrations.triton.problem.describe import call_arguments

TARGETS = (
    *("cuda:80", "cuda:90", "cuda:100", "cuda:103", "cuda:120"),
    *("hip:gfx90a", "hip:gfx942", "hip:gfx950", "hip:gfx1100", "hip:gfx1200", "hip:gfx1250"),
)
TENSOR_COLUMNS = 512
NEAR, NEAR_BYTES = 0.03, 128


def device_of(target: str) -> Device:
    """A device of a target, with the limits of its architecture."""
    return target_device(target.partition(":")[2])


def lowered(text: str, device: Device, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """(TTGIR, options as the backend reads them) of TTIR under such options, by Triton's own stages."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import Language
    from triton.compiler.compiler import make_backend

    target = target_of(device)
    backend = make_backend(target)
    given = backend.parse_options(dict(options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
        file.write(text)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    stages: dict[str, Any] = {}
    backend.add_stages(stages, given, Language.TRITON)
    return stages["ttgir"](module, dict(vars(given))), given


def allocated(text: str, device: Device, options: Mapping[str, Any]) -> tuple[int, int]:
    """(bytes of shared memory, columns of tensor memory) of TTIR compiled up to the pass that allocates them."""
    from triton._C.libtriton import ir, passes

    module, given = lowered(text, device, options)
    manager = ir.pass_manager(module.context)
    general, inliner = passes.ttgpuir, getattr(passes, "gluon", None)  # 3.4 has no pass of its own for these
    if device.backend == "cuda":
        from triton._C.libtriton import nvidia
        from triton.backends.nvidia.compiler import get_ptx_version_from_options

        version = get_ptx_version_from_options(given, int(device.arch))
        passes.ttgpuir.add_combine_tensor_select_and_if(manager)
        _add(passes.ttgpuir.add_allocate_warp_groups, manager, False)
        passes.convert.add_scf_to_cf(manager)
        if inliner:
            inliner.add_inliner(manager)
            nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, int(device.arch), version)
        else:
            general.add_allocate_shared_memory(manager)
        nvidia.passes.ttnvgpuir.add_allocate_tensor_memory(manager)
    else:
        from triton._C.libtriton import amd

        if inliner:
            _add(amd.passes.ttgpuir.add_update_async_wait_count, manager, given.arch)
        passes.convert.add_scf_to_cf(manager)
        if inliner:
            inliner.add_inliner(manager)
        passes.convert.add_index_to_llvmir(manager)
        own = getattr(amd.passes.ttgpuir, "add_allocate_shared_memory", general.add_allocate_shared_memory)
        _add(own, manager, given.arch)
    _add(manager.run, module, "allocate")
    return module.get_int_attr("ttg.shared"), module.get_int_attr("ttg.tensor_memory_size") or 0


def _add(pass_: Any, manager: Any, argument: object) -> None:
    """Add or run a pass, where it takes an argument in some releases alone."""
    try:
        pass_(manager, argument)
    except TypeError:
        pass_(manager)


def compared(
    name: str, case: Case, device: Device, configs: Sequence[tuple[dict[str, int], int, int]]
) -> list[dict[str, Any]]:
    """A row for each config that compiles: what it takes and what was forecast."""
    import triton

    tracer = KernelTracer.of(case.fn, target_of(device))
    texts: dict[str, str] = {}
    taken: dict[Candidate, tuple[int, int]] = {}
    for meta, warps, stages in configs:
        key = assignment_key(meta)
        texts.setdefault(key, tracer.text(case.arguments, {**meta, **case.fixed}))
        candidate = Candidate(Config.of(meta, num_warps=warps, num_stages=stages))
        with contextlib.suppress(RuntimeError):  # of a pass that fails: no matter of bytes
            taken[candidate] = allocated(texts[key], device, {"num_warps": warps, "num_stages": stages})
    arguments = call_arguments(case.fn, dict(zip(case.fn.arg_names, case.arguments, strict=False)))
    toolchain = {"triton": triton.__version__}
    kernel = Kernel(name, "triton", name, name)
    problem = Problem.of(kernel, arguments, device, key=[], grid=(1024, 1, 1), toolchain=toolchain)
    said = formula_prior(problem, list(taken), {}, texts)
    stated = default_surrogate().forecast(Query(problem, list(taken), {}, ttir=texts)).p_fail
    return [
        {
            "kernel": name,
            "kind": case.kind,
            "config": str(candidate.config),
            "shared": shared,
            "forecast": round(float(said.shared[row])),
            "p_fail": round(float(stated[row]), 4),
            "fails": shared > device.shared_memory_bytes or columns > TENSOR_COLUMNS,
        }
        for row, (candidate, (shared, columns)) in enumerate(taken.items())
    ]


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The forecast against the compiler, over rows of `compared`."""
    shared, forecast, stated = (
        np.array([r[n] for r in rows], float) for n in ("shared", "forecast", "p_fail")
    )
    fails = np.array([r["fails"] for r in rows], bool)
    off = np.abs(forecast - shared)
    edges = (0.0, 0.05, 0.2, 0.5, 0.8, REFUSED, 1.01)
    bins = [(stated >= low) & (stated < high) for low, high in itertools.pairwise(edges)]
    return {
        "configs": len(rows),
        "exact": round(float((off < 1).mean()), 4),
        "near": round(float((off <= np.maximum(NEAR_BYTES, NEAR * shared)).mean()), 4),
        "fit_yet_refused": int(((stated >= REFUSED) & ~fails).sum()),
        "too_large": int(fails.sum()),
        "too_large_refused": int(((stated >= REFUSED) & fails).sum()),
        "stated_and_observed": [
            [round(float(stated[b].mean()), 3), round(float(fails[b].mean()), 3), int(b.sum())]
            for b in bins
            if b.any()
        ],
    }


def left_out_scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Brier scores of P(cannot launch) as stated, and as an isotonic map fitted to all other kernels makes it."""
    names = np.array([r["kernel"] for r in rows])
    stated, fails = np.array([r["p_fail"] for r in rows]), np.array([r["fails"] for r in rows], float)
    mapped = np.empty(len(rows))
    for name in set(names):
        others = names != name
        mapped[~others] = isotonic(stated[others], fails[others], stated[~others])
    return {
        "stated": round(float(((stated - fails) ** 2).mean()), 5),
        "mapped": round(float(((mapped - fails) ** 2).mean()), 5),
    }


def isotonic(points: Array, labels: Array, at: Array) -> Array:
    """The non-decreasing step function that fits labels [n] at points [n] best, at other points [m]."""
    ordered = np.sort(points)
    fitted = IsotonicRegression().fit(points, labels).predict(ordered)
    return np.asarray(fitted[np.searchsorted(ordered, at, side="right").clip(1) - 1])


def main() -> int:
    command_line = parser(__doc__)
    command_line.add_argument("--targets", nargs="+", default=list(TARGETS))
    command_line.add_argument("--kernels", nargs="+", default=[""], help="parts of their names")
    command_line.add_argument("--each", type=int, default=16, help="configs of a kernel, drawn at random")
    arguments = parse_arguments(command_line, on_host=True)
    result = ResultFile(arguments, "compile_facts")
    rows: dict[str, list[dict[str, Any]]] = {}
    for target in arguments.targets:
        for name, case in CASES.items():
            if (case.lacks and target.startswith(case.lacks)) or not any(
                n in name for n in arguments.kernels
            ):
                continue
            drawn = case.configs()
            random.Random(name).shuffle(drawn)
            for row in compared(name, case, device_of(target), drawn[: arguments.each]):
                rows.setdefault(target, []).append(row)
                result.add(target, row)
        say(f"{target} {summary_of(rows[target])}")
    vendors = {
        vendor: [r for t, some in rows.items() if t.startswith(vendor) for r in some]
        for vendor in ("cuda", "hip")
    }
    kinds = {r["kind"] for some in rows.values() for r in some}
    by_kind = {
        kind: [r for some in rows.values() for r in some if r["kind"] == kind] for kind in sorted(kinds)
    }
    shown = {**rows, **vendors, **by_kind}
    scores = {vendor: left_out_scores(some) for vendor, some in vendors.items() if some}
    result.finish({**{name: summary_of(some) for name, some in shown.items() if some}, "left_out": scores})
    return 0


if __name__ == "__main__":
    sys.exit(main())
