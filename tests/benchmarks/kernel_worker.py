"""Runs or compiles the benchmark kernels in a process of its own; prints one JSON object per try.

Triton decides at import whether kernels are interpreted, so a test process cannot do both.
    TRITON_INTERPRET=1 python kernel_worker.py interpret [name ...]
    TRITON_INTERPRET=0 python kernel_worker.py compile   [name ...]     for sm_90, without a GPU
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.kernels import Case, cases, configs, launch, mismatch, reset

TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def picks(found: list[triton.Config], count: int, shift: int) -> list[triton.Config]:
    """Configs spread over the list, other ones for another shift."""
    # An odd step: spaces have even sides, and an even step would never vary warps and stages.
    step = (len(found) // count) | 1
    return [found[(shift * 7 + i * step) % len(found)] for i in range(count)]


def interpret(case: Case, shift: int) -> list[dict[str, Any]]:
    chosen = picks(configs(case), 3, shift)
    if case.wide is not None:
        chosen += picks(configs(case, wide=True), 2, shift)
    results = []
    data = case.make("cpu", small=True)
    expected = case.reference(data)
    for config in chosen:
        reset(case, data)
        launch(case, data, config)
        results.append({"config": str(config), "error": mismatch(case, data, expected)})
    return results


def _tile_volume(config: triton.Config) -> int:
    return math.prod(value for value in config.kwargs.values() if isinstance(value, int))


def compile_one(case: Case, shift: int) -> list[dict[str, Any]]:
    # What is compiled takes as long as its tiles are large; a large one shows no more than a small one.
    config = min(configs(case), key=_tile_volume)
    data = case.make("meta")
    kernel, names = case.kernel, case.kernel.arg_names
    values = {**dict(zip(names, data["args"], strict=False)), **data["kwargs"], **config.kwargs}
    if isinstance(kernel, triton.runtime.Heuristics):
        values |= {name: rule(values) for name, rule in kernel.values.items()}
        kernel = kernel.fn
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return [{"config": str(config), "shared": compiled.metadata.shared, "stages": sorted(compiled.asm)}]


if __name__ == "__main__":
    run = {"interpret": interpret, "compile": compile_one}[sys.argv[1]]
    for number, one in enumerate(cases(sys.argv[2:] or None)):
        for result in run(one, number):
            print(json.dumps({"case": one.name, **result}), flush=True)
