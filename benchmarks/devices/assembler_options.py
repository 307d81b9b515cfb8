"""Claim: which options of NVIDIA's assembler change a tuned kernel's machine code, and what they gain.

    python -m benchmarks.devices.assembler_options --out FILE.json [--kernels 10] [--timed]

The config that recorded timings of an H200 found best for a kernel is compiled with every option of
`with_assembler_options`, for that device, without one. With `--timed`, on a GPU, what they make is also compared with
the reference and timed in turns. The fastest is then timed against the plain one in turns that had no part in choosing
it, the plain one twice: the noise.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import kernels
from benchmarks.lib.kernel_timing import check_output, config_from_json, time_in_turns
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_autotune.features.devices import datasheet_device, with_assembler_options
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_integrations.triton.null_device import null_device

if TYPE_CHECKING:
    import triton

    from forecast_autotune.records.table import Table


import re
import struct
import subprocess
import time
from pathlib import Path

import triton

from forecast_integrations.triton.problem.call import outcome_of

_USAGE = (("registers", "REG"), ("stack", "STACK"), ("static_shared", "SHARED"))
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compile_config(
    case: kernels.Case, config: triton.Config, data: kernels.Data
) -> tuple[Any, dict[str, Any]]:
    """The compiled kernel, with its outcome, seconds of compiling and bytes of shared memory.

    Where a config does not compile: None, with the outcome and the message. Raises what is no fault of the config.
    """
    begin = time.perf_counter()
    try:
        result = case.kernel.warmup(*data["args"], grid=(1,), **data["kwargs"], **config.all_kwargs())
    except Exception as error:
        if (outcome := outcome_of(error)) is None:
            raise
        return None, {"outcome": str(outcome), "message": f"{type(error).__name__}: {error}"[:200]}
    seconds = round(time.perf_counter() - begin, 3)
    return result, {"outcome": "ok", "compile_s": seconds, "shared": int(result.metadata.shared)}


def cubin_resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack of a binary for NVIDIA's GPUs, as its own tool reads them.

    Raises `subprocess.CalledProcessError` for bytes that are none.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
    known = {name: re.findall(rf"\b{key}:(\d+)", shown.stdout) for name, key in _USAGE}
    return {name: max(map(int, values)) for name, values in known.items() if values}


def machine_code(cubin: bytes) -> bytes:
    """The instructions of a binary for NVIDIA's GPUs, without what says how they were made: its `.text` sections.

    Raises `struct.error` for bytes that are no ELF file of 64 bits.
    """
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    # Of each section: the place of its name among all names, then its offset and size in the file.
    sections = [struct.unpack_from("<I20xQQ", cubin, table + n * size) for n in range(count)]
    _, where, length = sections[names]
    listed = cubin[where : where + length]
    code = [
        cubin[offset : offset + extent]
        for name, offset, extent in sections
        if listed[name:].split(b"\0", 1)[0].startswith(b".text")
    ]
    return b"".join(code)


ROUNDS = 100
"""Launches of each when they are timed in turns."""


def best_configs(count: int) -> Iterator[tuple[kernels.Case, triton.Config]]:
    """A case of each of so many recorded kernels, and the config that was fastest."""
    first: dict[str, Table] = {}
    for table in load(shipped_tables()):
        first.setdefault(table.problem.kernel.name, table)
    known = {case.name: case for case in kernels.every()}
    for table in list(first.values())[:count]:
        best = min((m for m in table.measurements if m.ok), key=lambda m: m.ms or float("inf"))
        yield known[str(table.problem.extra["label"])], config_from_json(best.candidate.config.to_json())


def option_of(config: triton.Config) -> str:
    """Return what a config has the assembler told; "" for nothing."""
    return str(config.kwargs.get("ptx_options", ""))


def compiled_rows(case: kernels.Case, configs: list[triton.Config]) -> list[dict[str, Any]]:
    """Return what the assembler makes of a kernel under each of these configs, the plain one first."""
    rows: list[dict[str, Any]] = []
    for config in configs:
        result, facts = compile_config(case, config, case.make("meta"))
        row = {"kernel": case.name, "option": option_of(config), **facts}
        if result is not None:
            code = result.asm["cubin"]
            row |= {**cubin_resources(code), "sha256": hashlib.sha256(machine_code(code)).hexdigest()}
            row["changed"] = bool(rows) and row["sha256"] != rows[0].get("sha256")
        rows.append(row)
    return rows


def timed_rows(case: kernels.Case, configs: list[triton.Config]) -> list[dict[str, Any]]:
    """Median milliseconds under each of these configs, in turns; the plain one is the first.

    The first row also tells what turns of the plain one, the fastest and the plain one again gave: `plain_ms`,
    `best_ms` and `again_ms`. No rows where the plain one is wrong.
    """
    data = case.make("cuda")
    able: list[triton.Config] = []
    for config in configs:
        try:
            check_output(case, data, "cuda", config)
        except Exception as error:  # one option less
            say(f"{case.name} {option_of(config)}: {type(error).__name__}: {error}"[:200])
            if not option_of(config):
                return []
            continue
        able.append(config)
    calls = [partial(kernels.launch, case, data, config) for config in able]
    ms = [statistics.median(t) for t in time_in_turns(calls, ROUNDS)]
    rows = [{"kernel": case.name, "option": option_of(c), "ms": one} for c, one in zip(able, ms, strict=True)]
    best = calls[ms.index(min(ms))]
    turns = zip(
        ("plain_ms", "best_ms", "again_ms"), time_in_turns([calls[0], best, calls[0]], ROUNDS), strict=True
    )
    rows[0] |= {name: statistics.median(times) for name, times in turns}
    return rows


def summary_of(compiled: list[dict[str, Any]], timed: list[dict[str, Any]]) -> dict[str, Any]:
    """Kernels whose machine code each option changes; the gain of each kernel's best option, and the noise."""
    kernels_of = {row["kernel"] for row in compiled}
    figures: dict[str, Any] = {"kernels": len(kernels_of), "changed": {}}
    for option in dict.fromkeys(row["option"] for row in compiled if row["option"]):
        changed = [row.get("changed", False) for row in compiled if row["option"] == option]
        figures["changed"][option] = sum(changed)
    gains = {}
    for kernel in dict.fromkeys(row["kernel"] for row in timed):
        own = [row for row in timed if row["kernel"] == kernel]
        best = min(own, key=lambda row: float(row["ms"]))
        gains[kernel] = {
            "option": best["option"],
            "gain": own[0]["plain_ms"] / own[0]["best_ms"],
            "noise": own[0]["again_ms"] / own[0]["plain_ms"],
        }
    if gains:
        figures["best"] = gains
        figures["median_gain"] = statistics.median(one["gain"] for one in gains.values())
    return figures


def main() -> int:
    command_line = parser(__doc__)
    command_line.add_argument("--kernels", type=int, default=10)
    command_line.add_argument("--timed", action="store_true", help="on this machine's GPU, too")
    arguments = parse_arguments(command_line, on_host="--timed" not in sys.argv)
    result = ResultFile(arguments, "assembler_options")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    compiled: list[dict[str, Any]] = []
    timed: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for case, config in best_configs(arguments.kernels):
            configs = with_assembler_options([config])
            device = null_device(device=datasheet_device("h200"))
            with contextlib.nullcontext() if arguments.timed else device:
                rows = compiled_rows(case, configs)
            for row in rows:
                result.add("compiled", row)
            compiled += rows
            changed = [row["option"] for row in rows if row.get("changed")]
            say(f"{case.name}: changed by {', '.join(changed) or 'none'}")
            for row in timed_rows(case, configs) if arguments.timed else ():
                result.add("timed", row)
                timed.append(row)
    result.finish(summary_of(compiled, timed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
