"""Convert a checkout of AutoTuningAssociation/benchmark_hub (MIT) into one table file.

    python -m benchmarks.corpus.convert_benchmark_hub CHECKOUT --out benchmarks/data/benchmark_hub.jsonl.gz

CHECKOUT is the directory of a clone; nothing is downloaded. Kept per config: the outcome and the median
of the recorded runs, to five significant digits (the run-to-run noise is a hundred times coarser); single
runs, compile times and timestamps are left out for size. Convolution and dedispersion keep every config.
The GEMM spaces (17,956 configs) are thinned: the same 3,000 random configs on every GPU, plus each GPU's
own 40 fastest, so the oracle stays and its neighbourhood is denser than it was. Left out altogether: the
GEMM and hotspot spaces of `cachefiles`, where a snapshot may lack them, and pnpoly, whose times on two
GPUs are below what reading its input once would take.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from forecast_autotune.records import Device
from forecast_autotune.records.table import Table, write_tables
from forecast_autotune.store.exchange.kernel_tuner import import_kernel_tuner

OLD_FOLDER = "currently_unused/cachefiles/KernelTuner data"
MILO_DEVICES = ("A100", "A4000", "A6000", "MI250X", "W6600", "W7800")
RTX_DEVICES = ("RTX_2080_Ti", "RTX_3060_laptop", "RTX_3090", "RTX_Titan")
SPACES = {
    "convolution_milo": ("cachefiles/convolution_milo", MILO_DEVICES),
    "dedispersion_milo": ("cachefiles/dedispersion_milo", MILO_DEVICES),
    "convolution": (f"{OLD_FOLDER}/convolution", RTX_DEVICES),
    "gemm": (f"{OLD_FOLDER}/gemm", RTX_DEVICES),
}
UNNAMED = {"MI250X": Device("AMD Instinct MI250X", "hip", warp_size=64)}
"""Devices of files that name none."""
FAMILIES = {
    "convolution_milo": "conv",
    "dedispersion_milo": "dedispersion",
    "convolution": "conv",
    "gemm": "gemm",
}
"""What the kernels compute: two convolutions must not stand on both sides of a split."""
SAMPLE, BEST = 3000, 40
THINNED_SPACES = ("gemm",)


def round_to_five_digits(ms: float) -> float:
    """A time rounded to five significant digits."""
    return round(ms, 4 - math.floor(math.log10(ms)))


def slim_table(table: Table) -> Table:
    """The table without what the evaluation does not read."""
    rows = [
        replace(
            m,
            median_ms=round_to_five_digits(m.ms) if m.ok else None,
            compile_s=None,
            at="",
            extra={},
        )
        for m in table.measurements
    ]
    family = {"family": FAMILIES[table.problem.kernel.name]}
    return Table(replace(table.problem, extra={**table.problem.extra, **family}), rows)


def thin_tables(tables: list[Table]) -> list[Table]:
    """The same random configs of every table, and each table's own fastest."""
    common = set.intersection(*(set(t.by_candidate()) for t in tables))
    names = sorted(common, key=lambda c: c.id)
    drawn = np.random.default_rng(0).choice(len(names), SAMPLE, replace=False)
    kept = {names[int(i)] for i in drawn}
    for table in tables:
        fast = sorted((m for m in table.measurements if m.ok), key=lambda m: m.ms)
        kept |= {m.candidate for m in fast[:BEST]}
    return [Table(t.problem, [m for m in t.measurements if m.candidate in kept]) for t in tables]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    tables: list[Table] = []
    for kernel, (folder, devices) in SPACES.items():
        files = {d: arguments.checkout / folder / f"{d}.json.gz" for d in devices}
        missing = [str(path) for path in files.values() if not path.is_file()]
        if missing:
            parser.error(f"{missing[0]} is missing: pass the directory of a benchmark_hub checkout")
        space = [
            slim_table(import_kernel_tuner(path, UNNAMED.get(d), kernel=kernel)) for d, path in files.items()
        ]
        tables += thin_tables(space) if kernel in THINNED_SPACES else space
    count = write_tables(arguments.out, tables)
    print(f"{count} measurements of {len(tables)} problems, {arguments.out.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
