"""What a compiler makes of one config of a benchmark kernel, for whatever target is active; no GPU is needed."""

from __future__ import annotations

import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import triton

from benchmarks import kernels
from forecast_autotune.features.ptx import resource_usage
from forecast_integrations.triton.problem.call import outcome_of

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compile_config(
    case: kernels.Case, config: triton.Config, data: kernels.Data
) -> tuple[Any, dict[str, Any]]:
    """The compiled kernel, with its outcome, seconds of compiling and bytes of shared memory.

    Where a config does not compile: None, with the outcome and the message. Raises what is no fault of the config.
    """
    begin = time.perf_counter()
    try:
        made = case.kernel.warmup(*data["args"], grid=(1,), **data["kwargs"], **config.all_kwargs())
    except Exception as error:
        if (outcome := outcome_of(error)) is None:
            raise
        return None, {"outcome": str(outcome), "message": f"{type(error).__name__}: {error}"[:200]}
    seconds = round(time.perf_counter() - begin, 3)
    return made, {"outcome": "ok", "compile_s": seconds, "shared": int(made.metadata.shared)}


def cubin_resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack of a binary for NVIDIA's GPUs, as its own tool reads them.

    Raises `subprocess.CalledProcessError` for bytes that are none.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
    return resource_usage(shown.stdout)


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
