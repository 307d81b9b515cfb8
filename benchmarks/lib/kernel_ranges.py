"""Kernels of this repository over a range of one of their sizes, as programs meet them: tokens, rows, batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks import kernels

LEAST_STEP = 16
"""Sizes are multiples of it, so that all of a range are compiled alike."""


@dataclass(frozen=True)
class KernelRange:
    """One kernel over a range of one argument."""

    kernel: str
    """Its name among `benchmarks.kernels`."""
    argument: str
    """The integer argument that varies; it is in the kernel's key."""
    low: int
    high: int
    shape: Callable[[int], tuple[int, ...]]
    """The shape that a case of this kernel is made for, at a size."""

    def sizes(self, count: int) -> list[int]:
        """At most `count` sizes, both ends among them, evenly on a log scale."""
        ratio = self.high / self.low
        exact = [self.low * ratio ** (i / (count - 1)) for i in range(count)]
        return sorted({LEAST_STEP * max(1, round(e / LEAST_STEP)) for e in exact})

    def case(self, size: int) -> kernels.Case:
        """The kernel at one size."""
        first = kernels.cases([self.kernel])[0]
        made = first.make
        assert isinstance(made, partial), f"{self.kernel} makes its arguments in a way of its own"
        name = f"{self.kernel}/{self.argument}={size}"
        return replace(first, name=name, make=partial(made.func, self.shape(size), *made.args[1:]))


RANGES: Sequence[KernelRange] = (
    KernelRange("matmul", "M", 16, 16384, lambda m: (m, 4096, 4096)),
    KernelRange("softmax", "n_rows", 16, 65536, lambda m: (m, 4096)),
    KernelRange("rms_norm", "xnumel", 16, 65536, lambda m: (m, 5120)),
    KernelRange("swiglu", "tokens", 16, 32768, lambda m: (m, 11008)),
    KernelRange("w8a16_matmul", "M", 16, 16384, lambda m: (m, 14336, 4096)),
    KernelRange("attention", "N_CTX", 128, 16384, lambda m: (1, 32, 8, m, 128)),
    KernelRange("bp_linear_gelu", "M", 16, 16384, lambda m: (m, 3072, 768)),
    KernelRange("fn_addmm_act", "M", 16, 16384, lambda m: (m, 4096, 1024)),
    KernelRange("fn_var_mean", "M", 16, 32768, lambda m: (m, 8192)),
    KernelRange("rows_geglu", "n_rows", 16, 16384, lambda m: (m, 14336)),
    KernelRange("rows_softmax_bwd", "n_rows", 16, 65536, lambda m: (m, 2048)),
    KernelRange("chunk_l2norm", "M", 16, 65536, lambda m: (m, 128)),
    KernelRange("srv_skinny_int8", "M", 16, 8192, lambda m: (m, 4096, 7168)),
    KernelRange("srv_token_quant_int8", "num_tokens", 16, 32768, lambda m: (m, 4096)),
    KernelRange("tem_fused_addmm_relu", "ks0", 16, 16384, lambda m: (m, 4096, 2048)),
)
"""What varies is the number of tokens, rows or time steps; all else is a layer's."""
