"""Record: many sources of many kernels, each with a few configs at several shapes, on one or two GPUs.

    python -m benchmarks.corpus.record_sources --prepare POOL.jsonl.gz [--only softmax,matmul]
    python -m benchmarks.corpus.record_sources --record POOL.jsonl.gz --out LINES.jsonl [--gpus 2] [--null]
    python -m benchmarks.corpus.record_sources --pack LINES.jsonl --pool POOL.jsonl.gz --out TABLE.jsonl.gz

`--prepare` needs no device, and decides everything. The sources of a kernel are the base, what language models
wrote (`variant_corpus`, all tables) and our own rewrites, most promising first. Shapes: at most `--shapes`, those
whose tensors are below 6 GB and whose best recorded time of the base is between 8 us and 2 ms, of the largest
group that shares binaries (the first shape's, where it has three), spread over the sizes, the first shape among
them. Configs of a source: of the base's best recorded ones at these shapes (the best of each, then the second of
each, three at most) those that the source lists, then those with the lowest digests (as `sample_candidates`
takes them), `--each` in all, `--base` of the base. A source with configs of its own is treated alike: it seldom
lists one of the base's best. One that has the launch grid compiled in shares no binaries: two shapes, half as
many configs. Kernels stand in an order in which families and hands take turns.

`--record` compiles and times kernel after kernel in this order, until `--seconds` are over: whatever is missing
then is missing, and the same command goes on there. Every source is checked at every shape before it is timed, and
its fastest config at each after that; one that is wrong, or fails, is recorded as that. `--pack` makes a measurement
table of the lines, a problem per kernel and shape, with the facts that surrogates read of IR.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from pathlib import Path

import torch

from benchmarks.lib import result_files
from benchmarks.lib.result_files import say
from benchmarks.lib.variants.corpus_compiling import compile_pool
from benchmarks.lib.variants.corpus_packing import write_packed
from benchmarks.lib.variants.corpus_preparing import PoolLimits, prepare_pool, write_pool
from benchmarks.lib.variants.corpus_recording import record_pool
from benchmarks.lib.variants.corpus_timing import time_pool

DATA = Path(__file__).parents[1] / "data"
RECORDED = (
    *(DATA / f"corpus_h200{part}.jsonl.gz" for part in ("", "_2", "_near")),
    Path(__file__).parents[2] / "forecast_autotune" / "assets" / "tables" / "h200.jsonl.gz",
)
"""Tables that tell the base's times."""


def options() -> ArgumentParser:
    """Of all modes."""
    made = result_files.parser(__doc__)
    cores, usual = len(os.sched_getaffinity(0)), PoolLimits()
    what = made.add_mutually_exclusive_group()
    what.add_argument("--prepare", type=Path, metavar="POOL", help="write what is to be recorded")
    what.add_argument(
        "--record", type=Path, metavar="POOL", help="on GPUs: add to --out what is missing of it"
    )
    what.add_argument("--pack", type=Path, metavar="LINES", help="write their tables to --out")
    made.add_argument("--pool", type=Path, help="what LINES were recorded of")
    made.add_argument("--only", default="", help="comma-separated kernels")
    made.add_argument("--each", type=int, default=usual.each, help="configs of a source at most")
    made.add_argument("--base", type=int, default=usual.base, help="configs of the base at most")
    made.add_argument("--mechanical", type=int, default=usual.mechanical, help="rewrites of a kernel at most")
    made.add_argument(
        "--fill", type=int, default=usual.fill, help="or so many that there are this many sources"
    )
    made.add_argument("--shapes", type=int, default=usual.shapes, help="of a kernel at most")
    made.add_argument("--gpus", type=int, default=1, help="processes that time, a GPU each")
    made.add_argument("--workers", type=int, default=max(1, cores - 3), help="compilations at a time")
    made.add_argument("--seconds", type=float, default=560.0, help="when a recording ends itself")
    made.add_argument("--limit", type=float, default=45.0, help="seconds without a line: a source hangs")
    made.add_argument("--ttir", action="store_true", help="pack the IR itself, too")
    made.set_defaults(stub_only="--record" not in sys.argv)
    return made


def main() -> int:
    made = options()
    if "--prepare" in sys.argv:
        made.set_defaults(out=Path())  # the pool is the result
    a = result_files.parse_arguments(made)
    torch.set_num_threads(1)
    if a.child == "compile":
        compile_pool(a.given)
    elif a.child == "time":
        time_pool(a.given, a.null)
    elif a.record is not None:
        return record_pool(__file__, a)
    elif a.pack is not None and a.pool is not None:
        count = write_packed(a.pack, a.pool, a.out, a.ttir, a.workers)
        say(f"{count} measurements in {a.out.name}")
    elif a.prepare is not None:
        limits = PoolLimits(a.each, a.base, a.mechanical, a.fill, a.shapes)
        pool = prepare_pool([n for n in a.only.split(",") if n], RECORDED, limits)
        write_pool(a.prepare, pool)
        say(f"{len(pool)} kernels, {sum(len(one.sources) for one in pool)} sources in {a.prepare.name}")
    else:
        made.error("say --prepare POOL, --record POOL, or --pack LINES with --pool POOL")
    return 0


if __name__ == "__main__":
    sys.exit(main())
