"""A signature says what a verification holds for: conditions on the arguments of a call, as one line of JSON.

A variant that was right on some calls may be wrong on others: it may have dropped a mask because sizes
were multiples of 128, baked in a scalar, or mixed up two sizes that were equal. So a check names all that
it took for granted, and a call is covered only where all of that holds:

- always: names, kinds, dtypes, ranks, 16-byte alignment and constexpr values, exactly;
- a check at recorded sizes (`signature_of`): every shape, stride and scalar value, exactly;
- a check at drawn sizes (`sizes.Sizes.signature`): which sizes are equal, or multiples or products of
  others; of every size that was varied its class (any, or a multiple of 16 or of 128 where the base kernel
  needs that), of every other its value; the order of strides, and padding; that offsets fit 32 bits. Calls
  of any other size are covered then, because sizes were drawn anew for every launch, half of them ragged.

A description of arguments does not tell whether two tensors overlap, and every verification uses separate
ones. So a signature also names the tensors that the base kernel writes, and the launch has to check whether
one of them overlaps another argument (`forecast_integrations.triton.variants.loading`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from forecast_autotune.records import Argument, Problem
from forecast_autotune.records.problem import ADDRESS
from forecast_autotune.variants.records import Check, Variant

INTERPRETER = "interpreter"
"""`Check.device` of what Triton's interpreter has run; such a check admits to interpreted calls alone."""
_INT32_LIMIT = 2**31

Strides = list[tuple[int, int | None]]
"""Dimensions from the outermost to the innermost, with what a stride exceeds the size of all within by (the
stride itself, for the innermost); None for one of stride 0, which is broadcast."""


def signature_of(problem: Problem, writes: Iterable[str] | None = None) -> str:
    """The signature of a check that ran on exactly these arguments, with random values in the tensors.

    `writes` are the tensors that the base kernel writes; None: not known, so any of them may be written.
    """
    return canonical_text(
        {
            "arguments": call_form(problem.arguments),
            "exact": _exact(problem.arguments),
            **writes_field(writes),
        }
    )


def writes_field(writes: Iterable[str] | None) -> dict[str, Any]:
    """The field of a signature that lists the tensors that are written."""
    return {} if writes is None else {"writes": sorted(writes)}


def written(signature: str) -> frozenset[str] | None:
    """The tensors that the base kernel writes, if the signature tells."""
    try:
        result = json.loads(signature).get("writes")
        return None if result is None else frozenset(map(str, result))
    except (ValueError, TypeError, AttributeError):
        return None


def free_scalars(signatures: Iterable[str]) -> tuple[frozenset[str], frozenset[int]]:
    """The numbers whose value is free in all of these signatures, and all values that any requires of an integer.

    A free float may have any value. A free integer still counts by its class (`integer_class`), and by whether it is
    one of these values, or a size, stride or number of elements of a tensor.
    """
    free: list[set[str]] = []
    values: set[int] = set()
    for signature in signatures:
        try:
            condition = json.loads(signature)
            heads = [a[:3] for a in condition["arguments"]]
            floats = {name for name, kind, dtype in heads if kind == "scalar" and dtype == "fp32"}
            integers = {name for name, kind, dtype in heads if kind == "scalar" and dtype in ("i32", "i64")}
            if "exact" in condition:
                pairs = zip(heads, condition["exact"], strict=True)
                values |= {value for (name, *_), value in pairs if name in integers}
                free.append(integers)
                continue
            groups = [(integers.intersection(s["places"]), s["class"]) for s in condition["sizes"]]
            values |= {word for _, word in groups if isinstance(word, int)}
            runs = [run for _, run in [*condition["products"].values(), *condition["powers"].values()]]
            tied = {*condition["fixed"], *condition["powers"], *condition["products"], *chain(*runs)}
            free.append((floats | integers) - tied.union(*(names for names, _ in groups if len(names) > 1)))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return frozenset(), frozenset()
    return frozenset(set.intersection(*free) if free else ()), frozenset(values)


def integer_class(value: int) -> tuple[int, bool, bool, int]:
    """The properties of an integer in size classes and compilers: 1, smaller or larger; multiples; its width."""
    bits = max(value, ~value).bit_length()
    return (value > 0) + (value > 1), value % 128 == 0, value % 16 == 0, (bits > 31) + (bits > 63)


def covers(signature: str, problem: Problem) -> bool:
    """Whether a check with this signature says anything about a call of `problem`'s arguments."""
    try:
        condition = json.loads(signature)
        if condition["arguments"] != json.loads(canonical_text(call_form(problem.arguments))):
            return False
        if "exact" in condition:
            return bool(condition["exact"] == json.loads(canonical_text(_exact(problem.arguments))))
        return _condition_holds(condition, problem.arguments)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return False  # a signature of another release: nothing that could be relied on


def admitted(variant: Variant, problem: Problem) -> bool:
    """Whether a variant may be a candidate for this problem: whether `admission` finds a check."""
    return admission(variant, problem) is not None


def admission(variant: Variant, problem: Problem) -> Check | None:
    """The check by which a variant may be a candidate for this problem, if there is one.

    It must be a variant of this very source, have passed a check that covers the call on this class of
    device, and not have failed a later one there, or any one of the interpreter. Interpreted calls need a
    check of the interpreter.
    """
    if variant.base_sha256 != problem.kernel.source_sha256:
        return None
    device = INTERPRETER if problem.device.backend == "cpu" else problem.device.slug
    checks = [c for c in variant.checks if covers(c.signature, problem)]
    here = [c for c in checks if c.device == device]
    if not here or not _latest(here).passed or _rejected_by_interpreter(checks):
        return None
    return _latest(here)


def _latest(checks: Sequence[Check]) -> Check:
    """The last one in time; of several at one second a failed one."""
    return max(checks, key=lambda c: (c.at, not c.passed))


def _rejected_by_interpreter(checks: Sequence[Check]) -> bool:
    """Whether the interpreter, which knows no compiler's faults, found the source itself wrong."""
    results = [c for c in checks if c.device == INTERPRETER]
    return bool(results) and not _latest(results).passed


ADDRESSES = "addresses"
"""In `Argument.extra` of a captured tensor that holds addresses: of each of its elements None, or the number of the
tensor that it points into, an argument of its own named `x.0` and so on, with the offset in bytes."""


def pointees(arguments: Iterable[Argument]) -> dict[str, str]:
    """The tensors that addresses in others point to, and that no call lists: their names -> those of the others."""
    arguments = list(arguments)
    pointers = {a.name for a in arguments if ADDRESSES in a.extra}
    outer = {a.name: a.name.rpartition(".")[0] for a in arguments}
    return {name: of for name, of in outer.items() if of in pointers}


def call_form(arguments: Sequence[Argument]) -> list[list[Any]]:
    """Names, kinds, dtypes, ranks, alignment and constexpr values: what every check holds for only.

    Where in a line of the cache a tensor begins is a matter of time alone.
    """
    results: list[list[Any]] = []
    for a in _listed(arguments):
        rank = len(a.shape) if a.kind == "tensor" else None
        alignment = a.aligned if a.kind == "tensor" else None
        constant = a.kind == "constexpr" or isinstance(a.value, bool | str)
        extra = sorted(a.extra.keys() - {ADDRESSES, ADDRESS}) if a.kind == "tensor" else []
        results.append([a.name, a.kind, a.dtype, rank, alignment, a.value if constant else None, extra])
    return results


def _exact(arguments: Sequence[Argument]) -> list[Any]:
    return [[list(a.shape), list(a.stride)] if a.kind == "tensor" else a.value for a in _listed(arguments)]


def _listed(arguments: Sequence[Argument]) -> list[Argument]:
    """Those that a call lists, by name."""
    hidden = pointees(arguments)
    return [a for a in by_name(arguments) if a.name not in hidden]


def by_name(arguments: Sequence[Argument]) -> list[Argument]:
    """The arguments in an order that does not depend on how they were handed over."""
    return sorted(arguments, key=lambda a: a.name)


def places(arguments: Sequence[Argument]) -> dict[str, int]:
    """Every size by name: `x.0` for a tensor's dimension, `n` for an integer scalar."""
    sizes: dict[str, int] = {}
    for a in arguments:
        if a.kind == "tensor":
            sizes |= {f"{a.name}.{i}": size for i, size in enumerate(a.shape)}
        elif a.kind == "scalar" and isinstance(a.value, int) and not isinstance(a.value, bool):
            sizes[a.name] = a.value
    return sizes


def stride_structure(argument: Argument) -> Strides | None:
    """How a tensor's strides follow from its shape; None where they overlap in no simple way."""
    order = sorted(range(len(argument.shape)), key=lambda i: (-argument.stride[i], i))
    structure: Strides = []
    within = 0
    for i in reversed(order):
        stride = argument.stride[i]
        if stride == 0:
            structure.append((i, None))
            continue
        if stride < 0 or stride < within:
            return None
        structure.append((i, stride - within))
        within = stride * argument.shape[i]
    return structure[::-1]


def strides_from_structure(shape: Sequence[int], how: Strides) -> tuple[int, ...]:
    """The strides of a shape with this structure; the inverse of `stride_structure`."""
    strides = [0] * len(shape)
    within = 0
    for i, more in reversed(how):
        if more is not None:
            strides[i] = within + more
            within = strides[i] * shape[i]
    return tuple(strides)


def in_size_class(value: int, word: str | int) -> bool:
    """Whether a size is of a class: a number (itself), `16` or `128` (a multiple), `odd` (no multiple of 16)
    or `any`; 1, on which Triton specialises, is of none but its own."""
    if isinstance(word, int):
        return value == word
    if word in ("odd", "any"):
        return value > 1 and (word == "any" or value % 16 != 0)
    return value > 0 and value % int(word) == 0


def size_power(arguments: Mapping[str, int], run: Sequence[str], exponent: float) -> float:
    """The product of these sizes to a power."""
    return math.pow(math.prod(arguments[p] for p in run), exponent)


def _condition_holds(condition: Mapping[str, Any], arguments: Sequence[Argument]) -> bool:
    sizes = places(arguments)
    by_name = {a.name: a for a in arguments}
    for group in condition["sizes"]:
        values = {sizes[p] for p in group["places"]}
        if len(values) != 1 or not in_size_class(values.pop(), group["class"]):
            return False
    for place, (factor, run) in condition["products"].items():
        if sizes[place] != factor * math.prod(sizes[q] for q in run):
            return False
    if any(sizes[p] != by_name[of].stride[i] for p, (of, i) in condition["of_strides"].items()):
        return False
    if any(by_name[n].value != value for n, value in condition["fixed"].items()):
        return False
    for name, (run, exponent) in condition["powers"].items():
        value = by_name[name].value
        if not isinstance(value, float) or not math.isclose(
            value, size_power(sizes, run, exponent), rel_tol=1e-6
        ):
            return False
    for name, how in condition["strides"].items():
        result = stride_structure(by_name[name])
        if result is None or [list(pair) for pair in result] != how:
            return False
    return all(memory_span(a) < _INT32_LIMIT for a in arguments if a.kind == "tensor")


def memory_span(argument: Argument) -> int:
    """Elements from a tensor's first to its last."""
    return span_of(argument.shape, argument.stride)


def span_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor of these sizes and strides, both of one length."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def canonical_text(data: Any) -> str:
    """The canonical text of a signature."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), default=str)
