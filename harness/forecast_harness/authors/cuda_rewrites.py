"""Rewrites of CUDA C++ texts, alone in a file or in a Python module's strings: by pattern, not by parsing.

They change numbers and hints; whether a kernel still fits together with its launch is found out by
verification.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from forecast_harness.authors.torch.registry import RewrittenSource
from forecast_harness.authors.triton.analysis.source_unit import MAX_EDITS

_CONSTANT_PATTERN = re.compile(
    r"(?P<before>(?:^[ \t]*#define[ \t]+(?P<defined>[A-Z_][A-Z0-9_]*)[ \t]+"
    r"|\b(?:static\s+)?(?:constexpr|const)\s+(?:unsigned\s+)?(?:int|unsigned|size_t|long)\s+(?P<named>\w+)\s*=\s*))"
    r"(?P<value>\d+)\b",
    re.MULTILINE,
)
_LOOP_PATTERN = re.compile(
    r"(?:^[ \t]*#pragma unroll(?:[ \t]+\d+|[ \t]*\(\d+\))?[ \t]*\n)?^(?P<loop>[ \t]*for\s*\()",
    re.M,
)
_KERNEL_PATTERN = re.compile(
    r"__global__\s+void\s+(?P<bounds>__launch_bounds__\s*\([^)]*\)\s*)?(?P<name>\w+)\s*\("
)
_POINTER_PATTERN = re.compile(
    r"(?P<type>\bconst\s+(?:float4?|double|half2?|__half2?|__nv_bfloat162?|int|unsigned)\s*\*)\s*(?!__restrict__)(?=\w)"
)
_MATH_CALLS = re.compile(r"(?<![\w.])(?P<name>expf|logf|sinf|cosf|powf|log2f|log10f|sincosf|tanf)(?=\s*\()")
_UNROLL_FACTORS = ("", " 1", " 2", " 4", " 8")
_LAUNCH_BOUNDS = ("128", "256", "256, 2", "256, 4", "512", "1024")
MAX_VALUE = 1 << 20


def rewrites_of(source: str) -> list[RewrittenSource]:
    """All rewrites of a source, in a fixed order, each different text once."""
    texts = {source}
    rewrites = []
    for kind in (_vary_constants, _vary_unrolling, _vary_launch_bounds, _add_hints):
        for rewrite in itertools.islice(kind(source), MAX_EDITS):
            if rewrite.text not in texts:
                texts.add(rewrite.text)
                rewrites.append(rewrite)
    return rewrites


def constants_of(source: str) -> dict[str, int]:
    """Values of `#define NAME 1` and `constexpr int NAME = 1`, by name; names with one definition."""
    constants: dict[str, int] = {}
    repeats = set()
    for m in _CONSTANT_PATTERN.finditer(source):
        name = m["defined"] or m["named"]
        repeats |= {name} & set(constants)
        constants[name] = int(m["value"])
    return {name: value for name, value in constants.items() if name not in repeats}


def with_values(source: str, values: dict[str, int]) -> str:
    """The source with other values of its constants."""

    def put(m: re.Match[str]) -> str:
        name = m["defined"] or m["named"]
        return m["before"] + str(values.get(name, int(m["value"])))

    return _CONSTANT_PATTERN.sub(put, source)


def _vary_constants(source: str) -> Iterator[RewrittenSource]:
    for name, value in constants_of(source).items():
        for new in (value * 2, value // 2):
            if value > 0 and 1 <= new <= MAX_VALUE and new != value:
                text = with_values(source, {name: new})
                yield RewrittenSource(("constants",), text, f"{name} = {new} in place of {value}")


def _vary_unrolling(source: str) -> Iterator[RewrittenSource]:
    for m in _LOOP_PATTERN.finditer(source):
        indent = re.match(r"[ \t]*", m["loop"])
        assert indent is not None
        for factor in _UNROLL_FACTORS:
            text = f"{source[: m.start()]}{indent[0]}#pragma unroll{factor}\n{m['loop']}{source[m.end() :]}"
            yield RewrittenSource(("unroll",), text, f"a loop under #pragma unroll{factor}")


def _vary_launch_bounds(source: str) -> Iterator[RewrittenSource]:
    for m in _KERNEL_PATTERN.finditer(source):
        for bounds in _LAUNCH_BOUNDS:
            head = f"__global__ void __launch_bounds__({bounds}) {m['name']}("
            text = source[: m.start()] + head + source[m.end() :]
            yield RewrittenSource(("launch-bounds",), text, f"{m['name']} is compiled for {bounds} threads")


def _add_hints(source: str) -> Iterator[RewrittenSource]:
    text = _POINTER_PATTERN.sub(lambda m: f"{m['type']} __restrict__ ", source)
    yield RewrittenSource(("restrict",), text, "pointers that are only read do not overlap others")
    text = _MATH_CALLS.sub(lambda m: f"__{m['name']}", source)
    yield RewrittenSource(("fast-maths",), text, "approximate functions of the hardware")
