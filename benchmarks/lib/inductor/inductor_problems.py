"""Matrix products of real models, none of which the shipped surrogate of Inductor's templates is fitted to.

Shapes are those of the models' published configurations.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

HELD_OUT = "held-out"
"""The split of these problems in recorded tables."""


@dataclass(frozen=True)
class InductorProblem:
    """One product with its shape. `make` builds a module and its inputs."""

    model: str
    label: str
    op: str
    """linear (mm) or linear_bias (addmm)."""
    sizes: dict[str, int] = field(hash=False)
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Unique among all problems."""
        shape = "x".join(str(n) for n in self.sizes.values())
        return f"{self.model}/{self.label}/{self.op}/{shape}"

    def tiny(self) -> InductorProblem:
        """The same product with every size cut down, in the one dtype every CPU has: for dry runs."""
        kept = {name: min(size, {"m": 32, "n": 48, "k": 64}[name]) for name, size in self.sizes.items()}
        return dataclasses.replace(self, sizes=kept, dtype="float32")

    def make(self, device: str) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """A module in eval mode and inputs for it, on a device."""
        where: dict[str, Any] = {"device": device, "dtype": getattr(torch, self.dtype)}
        s = self.sizes
        module: Any = torch.nn.Linear(s["k"], s["n"], bias=self.op == "linear_bias", **where)
        return module.eval(), (torch.randn(s["m"], s["k"], **where),)


# model: (tokens, {layer: (out features, in features)}, has bias)
_LINEARS: dict[str, tuple[tuple[int, ...], dict[str, tuple[int, int]], bool]] = {
    "qwen2.5-7b": (
        (32, 2048),
        {"qkv": (4608, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)},
        False,
    ),
    "gemma2-2b": ((256, 4096), {"qkv": (4096, 2304), "gate_up": (18432, 2304)}, False),
    "mixtral-router": ((4096,), {"router": (8, 4096)}, False),
    "phi-2": ((16, 1024), {"up": (10240, 2560), "down": (2560, 10240)}, True),
    "vit-l": ((12608,), {"qkv": (3072, 1024), "up": (4096, 1024), "down": (1024, 4096)}, True),
    "dit-xl": ((8192,), {"qkv": (3456, 1152), "up": (4608, 1152), "down": (1152, 4608)}, True),
    "flux": ((4608,), {"single": (21504, 3072), "out": (3072, 15360)}, False),
}


def all_problems() -> list[InductorProblem]:
    """All problems in a fixed order."""
    return [
        InductorProblem(model, label, "linear_bias" if bias else "linear", {"m": m, "n": n, "k": k})
        for model, (tokens, layers, bias) in _LINEARS.items()
        for m in tokens
        for label, (n, k) in layers.items()
    ]
