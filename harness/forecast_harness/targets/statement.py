"""A target in words: its computation, sizes and tolerance, and the rules for a source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from forecast_autotune.features.devices import device_spec
from forecast_autotune.records import Argument, Config, Device
from forecast_autotune.variants.signature import memory_span
from forecast_harness.records import SearchTarget, TargetKind
from forecast_harness.targets.cuda.source import KernelSignature
from forecast_harness.targets.packs.schema import AxisSpec, Definition, Pack, PackFormat, TensorSpec, evaluate

_MAX_LISTED = 12
"""Workloads or calls that a statement lists."""
_LAYOUTS = {
    "padded": "rows further apart than their length",
    "offset": "one element off alignment",
    "transposed": "last two axes swapped",
}


CONFIGS_RULES = (
    "- Optional, in place of its configs: a list that gives each tl.constexpr parameter a value that neither the call "
    "nor a default gives, and no other name than those, num_warps, num_stages, num_ctas and maxnreg:",
    '  CONFIGS = [{"BLOCK": b, "num_warps": w, "num_stages": 2} for b in (512, 1024) for w in (4, 8)]',
    "- Optional, in place of the call's launch grid (base, a tuple): a plain function of the config and of the call's "
    "arguments, both by name:",
    "  def grid(meta, arguments, base):\n"
    '      return (triton.cdiv(arguments["n"], meta["BLOCK"]), base[1] if len(base) > 1 else 1)',
)
"""The one form of `CONFIGS` and of `grid` that authors of kernels are shown."""

WORKED_EXAMPLES = """Three changes that paid on an NVIDIA H200, with their gain over the original in its best config:

1. A row that fits into a block is read once and stays in registers (softmax of rows: 1.29x). Before, three passes read
   it three times:
     for start in range(0, N, BLOCK): high = tl.maximum(high, tl.load(X + row * N + start + i, mask=start + i < N, ...))
     for start in range(0, N, BLOCK): total += tl.exp(tl.load(X + row * N + start + i, ...) - high)
   After, with BLOCK >= N in CONFIGS, and the loops kept for longer rows:
     x = tl.load(X + row * N + i, mask=i < N, other=-float("inf")).to(tl.float32)
     e = tl.exp(x - tl.max(x, 0))
     tl.store(Y + row * N + i, e / tl.sum(e, 0), mask=i < N)
2. Tiles that are whole take no mask; only the last one has it (a causal mixing product: 1.31x). Before:
     for k in range(0, T, BLOCK): acc += tl.dot(w, tl.load(X + k + i, mask=k + i <= t, other=0.0))
   After:
     whole = t // BLOCK * BLOCK
     for k in range(0, whole, BLOCK): acc += tl.dot(w, tl.load(X + k + i))
     x = tl.load(X + whole + i, mask=whole + i <= t, other=0.0)
     acc += tl.dot(w, x)
3. What has no use for rows is one flat array (a gated activation of rows: 1.34x): no program ends in half a block.
     at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
     row, column = at // N, at % N
     tl.store(Y + at, act(tl.load(X + row * 2 * N + column, mask=at < M * N)), mask=at < M * N)
   with def grid(meta, arguments, base): return (triton.cdiv(arguments["M"] * arguments["N"], meta["BLOCK"]),)"""
"""From `benchmarks/data/sources_h200.jsonl.xz`: bp_softmax_rows, fn_aft_mix and rows_geglu, means over shapes."""


def pack_statement(pack: Pack, language: str, entry: str, device: str) -> str:
    """The statement of a pack for new sources in `language`, ending with the reference's text."""
    return _statement(
        pack, f"Problem {pack.definition.name}", device, _rules(pack.definition, language, entry, device)
    )


def cuda_statement(pack: Pack, signature: KernelSignature, device: str) -> str:
    """The statement of a CUDA kernel for new sources, ending with the reference's text."""
    rules = [
        f"One CUDA C++17 file that defines {signature.text}",
        "It has one comment that says how it is launched, in TOML:\n"
        '  /* launch\n  grid = ["(rows + ROWS - 1) // ROWS"]\n  block = ["THREADS"]\n'
        '  shared_bytes = "4 * THREADS"\n  [macros]\n  THREADS = [256, 128, 512]\n  ROWS = [1, 2]\n  */',
        f"Sizes there are integers or expressions of axes ({', '.join(pack.definition.axes)}) and macros with "
        "+ - * // % min max. Macros are defined by the compiler (-DTHREADS=256), never by the source; the fastest "
        "choice is found for you",
        "One launch computes everything: no other kernel, no host code, no memory that outlives a launch: neither "
        "__device__ nor __constant__ nor static variables, neither printf nor assert nor malloc",
        "Headers of CUDA and of C++ only, such as <cuda_fp16.h>",
        *_result_rules(pack.definition),
    ]
    numbers = [f"- {p.name}: {p.dtype}, {p.value}" for p in signature.parameters if p.is_number]
    return _statement(
        pack, f"CUDA kernel {signature.entry}", device, rules, layout=", contiguous", numbers=numbers
    )


def _statement(
    pack: Pack,
    title: str,
    device: str,
    rules: Sequence[str],
    *,
    layout: str = "",
    numbers: Sequence[str] = (),
) -> str:
    about = pack.definition
    lines = [f"{title}: {about.description or 'as its reference computes it'}"]
    if about.axes:
        lines += ["", "Sizes; results are checked at hidden ones drawn from these ranges:"]
        lines += [f"- {name}: {_axis_text(axis)}" for name, axis in about.axes.items()]
    for kind, tensors in (("Inputs", about.inputs), ("Outputs", about.outputs)):
        if tensors:
            lines += ["", f"{kind}{layout}:", *(_tensor_text(name, t) for name, t in tensors.items())]
    lines += ["", "Numbers:", *numbers] if numbers else []
    lines += ["", "Timed at (geometric mean over all of them, one launch each):"]
    lines += [
        f"- {w.name}: {', '.join(f'{n}={v}' for n, v in w.axes.items()) or 'at these sizes'}"
        for w in pack.timed_workloads(device)[:_MAX_LISTED]
    ]
    lines += ["", "Rules for a source:", *(f"- {rule}" for rule in rules)]
    lines += ["", "Reference, evaluated in higher precision:", "```python", pack.reference.strip(), "```"]
    return "\n".join(lines)


def kernel_statement(
    name: str,
    source: str,
    calls: Sequence[Sequence[Argument]],
    configs: Sequence[Config],
    device: Device | None = None,
) -> str:
    """The statement of a Triton kernel whose source is to be rewritten."""
    lines = [f"Triton kernel {name}, to be rewritten so that it runs faster and computes the same.", ""]
    lines += [f"Device: {_device_text(device)}"] if device is not None else []
    call_lines = [f"- {_call_text(c)}{_bytes_text(c, device)}" for c in calls[:_MAX_LISTED]]
    lines += ["Calls:", *call_lines] if call_lines else []
    lines += ["Some of its configs:", *(f"- {c}" for c in configs[:_MAX_LISTED])] if configs else []
    lines += [
        "",
        "Rules for a source:",
        "- One self-contained module: imports of triton and its language, @triton.jit functions, constants.",
        f"- {name} keeps its runtime parameters by name and order; tl.constexpr parameters may change.",
        *CONFIGS_RULES,
        "- Optional: RESET_TO_ZERO = [names of arguments]; a function workspace(meta, arguments, base, grid) that "
        "returns how many float32 and int32 elements (zeros) a launch needs at its parameters WORKSPACE and COUNTERS.",
        "- Parameters named BASE_GRID_0, BASE_GRID_1, BASE_GRID_2 are filled with the call's grid. Where it depends on "
        "tl.constexpr parameters, a source that uses it keeps them, with values in CONFIGS.",
        "- It is compared with the original on hidden shapes and values; precision must not get worse.",
        "",
        *([WORKED_EXAMPLES, ""] if device is not None and device.backend == "cuda" else []),
        "```python",
        source.strip(),
        "```",
    ]
    return "\n".join(lines)


def _axis_text(axis: AxisSpec) -> str:
    if axis.value is not None:
        return f"always {axis.value}"
    step = f", multiples of {axis.multiple}" if axis.multiple > 1 else ""
    return f"{axis.low} to {axis.high}{step}"


def _tensor_text(name: str, tensor: TensorSpec) -> str:
    layouts = [f"{x} ({_LAYOUTS[x]})" for x in tensor.layouts if x in _LAYOUTS]
    text = f"- {name}: {tensor.dtype} [{', '.join(tensor.shape)}]"
    if layouts:
        text += f", contiguous or {', '.join(layouts)}"
    if values := [v for v in tensor.values if v not in ("normal", "uniform", "offset")]:
        text += f"; values may be {', '.join(values)}"
    return text + ("; a weight, the same for all launches" if tensor.static else "")


def _rules(about: Definition, language: str, entry: str, device: str) -> list[str]:
    inputs, results = list(about.inputs), " and ".join(about.outputs)
    own = (
        ", triton and triton.language; its own kernels must do the arithmetic" if language == "triton" else ""
    )
    rules = [f"One Python module in {language} for {device}; it may import torch{own}"]
    if about.format is PackFormat.OWN:
        if about.destination:
            names = ", ".join([*inputs, *about.outputs])
            call = f"{entry}({names}) writes its results into {results}"
        else:
            call = f"{entry}({', '.join(inputs)}) returns {results}, new tensors"
        rules.append(f"It defines {call}; arguments come by name")
    else:
        rules.append(f"It defines a class {entry} with the constructor, parameters and forward of Model")
    rules += _result_rules(about)
    rules.append(
        "Optional: constants in upper case at the top level, and a list of values for them and no other name, of "
        "which the fastest is chosen; what a launch takes is such a constant, too (num_warps=NUM_WARPS):\n"
        '  CHUNK = 64\n  CONFIGS = [{"CHUNK": c} for c in (32, 64, 128)]'
    )
    return rules


def _result_rules(about: Definition) -> list[str]:
    """The rules for results in any language."""
    rule = about.tolerance
    rules = [
        f"Results may differ from the exact ones by {rule.safety:g} times the rounding that {rule.compute} "
        f"arithmetic over sums of {rule.reduction} terms explains, plus that of the output's own dtype",
        "Inputs stay as they are, nothing outside of the outputs is written, no threads are left running, no "
        "global setting is changed, nothing is kept from earlier launches but facts of shapes",
    ]
    if about.deterministic:
        rules.append("Equal inputs give equal bits")
    return rules


def _call_text(arguments: Sequence[Argument]) -> str:
    parts = []
    for a in arguments:
        if a.kind == "tensor":
            parts.append(f"{a.name}: {a.dtype}{list(a.shape)} strides {list(a.stride)}")
        else:
            parts.append(f"{a.name}={a.value!r}")
    return ", ".join(parts)


def tensor_bytes(arguments: Sequence[Argument]) -> int:
    """Bytes of a call's tensors, from the first element of each to its last."""
    return sum(memory_span(a) * _element_bytes(a.dtype) for a in arguments if a.kind == "tensor")


def _bytes_text(arguments: Sequence[Argument], device: Device | None) -> str:
    """The bytes of a call's tensors, and the time in which memory moves them once."""
    size = tensor_bytes(arguments)
    if not size or device is None or not (rate := device_spec(device).memory_gb_s):
        return ""
    return f"; {size:,} bytes of tensors, {size / rate / 1e3:.3g} us to move them once"


def _device_text(device: Device) -> str:
    facts = {
        "multiprocessors": device.multiprocessors,
        "bytes of shared memory per program": device.shared_memory_bytes,
        "bytes of L2": device.l2_bytes,
    }
    texts = [f"{n} {name}" for name, n in facts.items() if n]
    return ", ".join([f"{device.name} ({device.backend} {device.arch})", *texts])


# --- the work of one launch ---

_BYTES_OF_BITS = {"64": 8, "32": 4, "16": 2, "8": 1}


def timed_work(target: SearchTarget) -> dict[str, dict[str, Any]]:
    """The work of one launch of each workload of a pack of our own format: `axes`, `bytes` and `flops`."""
    if (pack := own_pack(target)) is None:
        return {}
    work_by_name = {}
    for work in pack.workloads:
        traffic, flops = _traffic_and_operations(pack.definition, work.axes)
        work_by_name[work.name] = {"axes": dict(work.axes), "bytes": traffic, "flops": flops}
    return work_by_name


def own_pack(target: SearchTarget) -> Pack | None:
    """A target's pack of our own format; None for kernels and foreign tasks."""
    data: Mapping[str, Any] | None = target.payload.get("pack")
    if target.kind is not TargetKind.PACK or data is None:
        return None
    pack = Pack.from_json(data)
    return pack if pack.definition.format is PackFormat.OWN else None


def _traffic_and_operations(about: Definition, axes: Mapping[str, int]) -> tuple[int, int]:
    """Bytes that must be moved and useful operations at one size."""
    sizes = {**{n: a.value for n, a in about.axes.items() if a.value is not None}, **axes}
    if about.bytes:
        traffic = evaluate(about.bytes, sizes)
    else:
        every = (*about.inputs.values(), *about.outputs.values())
        traffic = sum(math.prod(t.sizes(sizes)) * _element_bytes(t.dtype) for t in every)
    return traffic, evaluate(about.flops, sizes)


def _element_bytes(dtype: str) -> int:
    digits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    return _BYTES_OF_BITS.get(digits, 1)
