"""Rewrites of CUDA C++ texts, alone in a file or in a Python module's strings: by pattern, not by parsing.

They change numbers and hints; whether a kernel still fits together with its launch is found out by
verification.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from forecast_harness.rewrites.torch.registry import Made

_CONSTANTS = re.compile(
    r"(?P<before>(?:^[ \t]*#define[ \t]+(?P<defined>[A-Z_][A-Z0-9_]*)[ \t]+"
    r"|\b(?:static\s+)?(?:constexpr|const)\s+(?:unsigned\s+)?(?:int|unsigned|size_t|long)\s+(?P<named>\w+)\s*=\s*))"
    r"(?P<value>\d+)\b",
    re.MULTILINE,
)
_LOOP = re.compile(
    r"(?:^[ \t]*#pragma unroll(?:[ \t]+\d+|[ \t]*\(\d+\))?[ \t]*\n)?^(?P<loop>[ \t]*for\s*\()",
    re.M,
)
_KERNEL = re.compile(r"__global__\s+void\s+(?P<bounds>__launch_bounds__\s*\([^)]*\)\s*)?(?P<name>\w+)\s*\(")
_POINTERS = re.compile(
    r"(?P<type>\bconst\s+(?:float4?|double|half2?|__half2?|__nv_bfloat162?|int|unsigned)\s*\*)\s*(?!__restrict__)(?=\w)"
)
_MATHS = re.compile(r"(?<![\w.])(?P<name>expf|logf|sinf|cosf|powf|log2f|log10f|sincosf|tanf)(?=\s*\()")
_UNROLLS = ("", " 1", " 2", " 4", " 8")
_BOUNDS = ("128", "256", "256, 2", "256, 4", "512", "1024")
MOST_VALUE = 1 << 20


def rewrites_of(source: str) -> list[Made]:
    """What can be made of a source, in a fixed order, each different text once."""
    seen = {source}
    found = []
    for kind in (_constants, _unrolls, _bounds, _hints):
        for made in kind(source):
            if made.text not in seen:
                seen.add(made.text)
                found.append(made)
    return found


def constants_of(source: str) -> dict[str, int]:
    """Values of `#define NAME 1` and `constexpr int NAME = 1`, by name; names with one definition."""
    found: dict[str, int] = {}
    twice = set()
    for m in _CONSTANTS.finditer(source):
        name = m["defined"] or m["named"]
        twice |= {name} & set(found)
        found[name] = int(m["value"])
    return {name: value for name, value in found.items() if name not in twice}


def with_values(source: str, values: dict[str, int]) -> str:
    """The source with other values of its constants."""

    def put(m: re.Match[str]) -> str:
        name = m["defined"] or m["named"]
        return m["before"] + str(values.get(name, int(m["value"])))

    return _CONSTANTS.sub(put, source)


def crossed(source: str, other: str) -> list[Made]:
    """A source with the constants of another one, all that differ and each alone."""
    mine, theirs = constants_of(source), constants_of(other)
    differ = {n: theirs[n] for n in mine if n in theirs and mine[n] != theirs[n]}
    every = [differ, *({n: v} for n, v in differ.items())] if differ else []
    return [
        Made(
            ("crossed",),
            with_values(source, some),
            ", ".join(f"{n} = {v} of the other" for n, v in some.items()),
        )
        for some in (every if len(differ) > 1 else every[:1])
    ]


def _constants(source: str) -> Iterator[Made]:
    for name, value in constants_of(source).items():
        for new in (value * 2, value // 2):
            if value > 0 and 1 <= new <= MOST_VALUE and new != value:
                text = with_values(source, {name: new})
                yield Made(("constants",), text, f"{name} = {new} in place of {value}")


def _unrolls(source: str) -> Iterator[Made]:
    for m in _LOOP.finditer(source):
        indent = re.match(r"[ \t]*", m["loop"])
        assert indent is not None
        for factor in _UNROLLS:
            text = f"{source[: m.start()]}{indent[0]}#pragma unroll{factor}\n{m['loop']}{source[m.end() :]}"
            yield Made(("unroll",), text, f"a loop under #pragma unroll{factor}")


def _bounds(source: str) -> Iterator[Made]:
    for m in _KERNEL.finditer(source):
        for bounds in _BOUNDS:
            head = f"__global__ void __launch_bounds__({bounds}) {m['name']}("
            text = source[: m.start()] + head + source[m.end() :]
            yield Made(("launch-bounds",), text, f"{m['name']} is compiled for {bounds} threads")


def _hints(source: str) -> Iterator[Made]:
    text = _POINTERS.sub(lambda m: f"{m['type']} __restrict__ ", source)
    yield Made(("restrict",), text, "pointers that are only read do not overlap others")
    text = _MATHS.sub(lambda m: f"__{m['name']}", source)
    yield Made(("fast-maths",), text, "approximate functions of the hardware")
