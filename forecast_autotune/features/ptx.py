"""Facts of a compiled candidate that nobody has timed yet: read from its PTX and its resource usage.

Data layouts, which TTIR does not show, are decided by now: how wide accesses came out, how many
conversions go through shared memory, what spilt. Counts are static, per thread, loops counted once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)", re.MULTILINE)
_BITS = re.compile(r"\.(?:v(\d))?\.?[busf](\d+)$")
_SPECIAL = ("ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh", "div")

PTX_FACT_NAMES = (
    "instructions",
    "global_loads",
    "global_load_bytes",
    "global_stores",
    "global_store_bytes",
    "async_copies",
    "shared_loads",
    "shared_stores",
    "barriers",
    "shuffles",
    "tensor_ops",
    "special",
    "atomics",
    "branches",
)
"""Names of the counts that `ptx_facts` returns."""


def ptx_facts(ptx: str) -> dict[str, int]:
    """Static counts of one PTX module by the names of `PTX_FACT_NAMES`; byte counts are per thread."""
    counts = dict.fromkeys(PTX_FACT_NAMES, 0)
    for match in _INSTRUCTION.finditer(ptx):
        op = match[1]
        head, _, rest = op.partition(".")
        counts["instructions"] += 1
        if head == "ld" and rest.startswith("global"):
            counts["global_loads"] += 1
            counts["global_load_bytes"] += _access_bytes(op)
        elif head == "st" and rest.startswith("global"):
            counts["global_stores"] += 1
            counts["global_store_bytes"] += _access_bytes(op)
        elif head == "cp" and rest.startswith("async") and ("shared" in rest or "bulk" in rest):
            counts["async_copies"] += 1
        elif head in ("ld", "ldmatrix") and "shared" in rest:
            counts["shared_loads"] += 1
        elif head in ("st", "stmatrix") and "shared" in rest:
            counts["shared_stores"] += 1
        elif head in ("bar", "barrier"):
            counts["barriers"] += 1
        elif head == "shfl":
            counts["shuffles"] += 1
        elif head == "mma" or op.startswith("wgmma.mma_async"):
            counts["tensor_ops"] += 1
        elif head in ("atom", "red"):
            counts["atomics"] += 1
        elif head == "bra":
            counts["branches"] += 1
        elif head in _SPECIAL:
            counts["special"] += 1
    return counts


def _access_bytes(op: str) -> int:
    match = _BITS.search(op)
    return int(match[1] or 1) * int(match[2]) // 8 if match else 0


def resource_usage(text: str) -> Mapping[str, int]:
    """Registers, stack and shared memory of `cuobjdump --dump-resource-usage` output, the largest each."""
    results: dict[str, int] = {}
    for name, key in (("registers", "REG"), ("stack", "STACK"), ("static_shared", "SHARED")):
        values = [int(v) for v in re.findall(rf"\b{key}:(\d+)", text)]
        if values:
            results[name] = max(values)
    return results
