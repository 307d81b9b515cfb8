"""The geometry of an Inductor op, read from its operands: a product, a convolution or an attention."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from forecast_autotune.records import Argument, Problem, Scalar

_BITS = re.compile(r"\d+")
_OUTPUTS = ("out", "output")
"""Names under which a problem may carry its result among the operands."""


@dataclass(frozen=True)
class OperandLayout:
    """A tile's source: bits per element, and along which of its two dimensions memory runs."""

    bits: int
    rows: bool = True
    """Neighbours in memory lie along the last dimension; False: along the one before it."""
    dense: bool = True
    """The next row begins where this one ends."""


@dataclass(frozen=True)
class MatmulGeometry:
    """`terms` products of [batch, m, k] and [batch, k, n], summed, plus a bias in the epilogue."""

    batch: int
    m: int
    n: int
    k: int
    left: OperandLayout
    right: OperandLayout
    out_bits: int
    bias_bits: int = 0
    """Bits per element of what the epilogue adds, read as a tile; 0 without one."""
    terms: int = 1
    integer: bool = False
    """The accumulator and the result are whole numbers."""

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.terms * self.batch * self.m * self.n * self.k

    @property
    def unique_bytes(self) -> float:
        """Bytes that have to move at least: every operand and the result once."""
        each = self.m * self.k * self.left.bits + self.k * self.n * self.right.bits
        return self.batch * (self.terms * each + self.m * self.n * self.out_bits) / 8.0


@dataclass(frozen=True)
class ConvolutionGeometry:
    """An implicit product: output pixels x output channels over input channels x kernel taps."""

    batch: int
    channels: int
    """Input channels, of all groups."""
    filters: int
    """Output channels, of all groups."""
    image: tuple[int, ...]
    """Spatial sizes of the input."""
    kernel: tuple[int, ...]
    bits: int
    out_bits: int
    channels_last: bool
    out: tuple[int, ...] = ()
    """Spatial sizes of the result where the operands tell them; else a candidate's parameters do."""

    def result(self, parameters: Mapping[str, Scalar]) -> tuple[int, ...]:
        """Spatial sizes of the result, from STRIDE_* and PADDING_* of the template; "same" without them."""
        if self.out:
            return self.out
        sizes = []
        for axis, size, taps in zip("DHW"[-len(self.image) :], self.image, self.kernel, strict=True):
            step = _as_int(parameters.get(f"STRIDE_{axis}"), 1)
            padding = _as_int(parameters.get(f"PADDING_{axis}"), taps // 2, least=0)
            sizes.append(max(1, (size + 2 * padding - taps) // max(1, step) + 1))
        return tuple(sizes)


@dataclass(frozen=True)
class AttentionGeometry:
    """softmax(q k^T) v for [batch, heads, queries, width] and [batch, kv_heads, keys, width]."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    bits: int
    dense: bool = True
    """The next key begins where this one ends."""


Geometry: TypeAlias = MatmulGeometry | ConvolutionGeometry | AttentionGeometry


def bits(dtype: str) -> int:
    """Bits of one element of a dtype by name (`torch.float16`, `bf16`, `float8_e4m3fn`); 32 if untold."""
    if dtype.rpartition(".")[2].startswith("bool"):
        return 8
    digits = _BITS.search(dtype.rpartition(".")[2])
    return int(digits.group()) if digits else 32


def operation_geometry(problem: Problem) -> Geometry | None:
    """The geometry of an op, by its name and operands in Inductor's order; None for any other op.

    Operands are the tensors among the arguments in the order of the choice's `input_nodes` (the bias of
    addmm and baddbmm comes first). A tensor named `out` is the result.
    """
    tensors = [a for a in problem.arguments if a.kind == "tensor" and a.name not in _OUTPUTS]
    out = next((a for a in problem.arguments if a.kind == "tensor" and a.name in _OUTPUTS), None)
    name = problem.kernel.name.rpartition(":")[2].rpartition(".")[2].lower()
    if len(tensors) < 2:
        return None
    if "conv" in name:
        return _convolution(tensors, out)
    if "flex" in name or "attention" in name:
        return None if "backward" in name else _attention(tensors)
    return _matmul_geometry(name, tensors, out)


def _matmul_geometry(name: str, tensors: Sequence[Argument], out: Argument | None) -> MatmulGeometry | None:
    first = int("add" in name and len(tensors) > 2)
    left, right = tensors[first], tensors[first + 1]
    if len(left.shape) < 2 or len(right.shape) < 2:
        return None
    m, k = left.shape[-2:]
    is_transposed = right.shape[-2] != k
    n = right.shape[-2] if is_transposed else right.shape[-1]
    if k not in right.shape[-2:] or min(m, n, k) < 1:
        return None
    batch = math.prod(left.shape[:-2])
    if "grouped" in name and len(right.shape) == 3 and len(left.shape) == 2:
        batch = right.shape[0]  # rows are dealt out to the groups at run time: evenly, as far as is known
        m = max(1, m // batch)
    integer = left.dtype.rpartition(".")[2].startswith(("int", "uint", "i8", "u8"))
    return MatmulGeometry(
        batch,
        m,
        n,
        k,
        _operand(left),
        _operand(right, transposed=is_transposed),
        _result_bits(left, out, integer),
        bits(tensors[0].dtype) if first else 0,
        2 if "mm_plus_mm" in name else 1,
        integer,
    )


def _result_bits(left: Argument, out: Argument | None, integer: bool) -> int:
    if out is not None:
        return bits(out.dtype)
    # int8 products give int32; fp8 ones bfloat16 as a rule.
    return 32 if integer else max(16, bits(left.dtype))


def _operand(argument: Argument, *, transposed: bool = False) -> OperandLayout:
    *_, rows, columns = argument.shape
    if len(argument.stride) < 2:
        return OperandLayout(bits(argument.dtype), not transposed)
    over, along = argument.stride[-2:]
    last = along == 1 or (columns == 1 and over != 1)
    dense = over == columns if last else along == rows
    return OperandLayout(bits(argument.dtype), last != transposed, dense)


def _convolution(tensors: Sequence[Argument], out: Argument | None) -> ConvolutionGeometry | None:
    image, weight = tensors[:2]
    if len(weight.shape) < 3 or len(image.shape) != len(weight.shape):
        return None
    last = len(image.stride) > 1 and image.stride[1] == 1
    return ConvolutionGeometry(
        image.shape[0],
        image.shape[1],
        weight.shape[0],
        image.shape[2:],
        weight.shape[2:],
        bits(image.dtype),
        bits(out.dtype) if out is not None else bits(image.dtype),
        last,
        out.shape[2:] if out is not None and len(out.shape) == len(image.shape) else (),
    )


def _attention(tensors: Sequence[Argument]) -> AttentionGeometry | None:
    if len(tensors) < 3 or any(len(a.shape) != 4 for a in tensors[:3]):
        return None
    query, key, value = tensors[:3]
    batch, heads, queries, width = query.shape
    dense = len(key.stride) < 4 or key.stride[2] == width
    return AttentionGeometry(
        batch,
        heads,
        max(1, key.shape[1]),
        queries,
        key.shape[2],
        width,
        value.shape[3],
        bits(query.dtype),
        dense,
    )


def _as_int(value: Scalar, default: int, least: int = 1) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else default
