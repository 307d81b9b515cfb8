"""Operations that Inductor tunes in real models: GEMMs, batched GEMMs, convolutions and flex attention.

Shapes are those of the models' published configurations. The split is by model: no shape of a held-out
model is fitted, unless another model happens to have it, which `leaking_pairs` finds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

FIT, HELD_OUT = "fit", "held-out"


@dataclass(frozen=True)
class InductorProblem:
    """One op with its shapes. `make` builds a module and its inputs."""

    model: str
    label: str
    op: str
    """linear (mm), linear_bias (addmm), bmm, conv or flex."""
    sizes: dict[str, int] = field(hash=False)
    split: str
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Unique among all problems."""
        shape = "x".join(str(n) for n in self.sizes.values())
        return f"{self.model}/{self.label}/{self.op}/{shape}"

    @property
    def is_gemm(self) -> bool:
        """A single matrix product."""
        return self.op.startswith("linear")

    def tiny(self) -> InductorProblem:
        """The same op with every size cut down, in the one dtype every CPU has: for dry runs."""
        kept = {name: _cut(name, size) for name, size in self.sizes.items()}
        if self.op == "conv":
            kept["groups"] = 1
        if self.op == "flex":
            kept["kv_heads"] = 1
        return dataclasses.replace(self, sizes=kept, dtype="float32")

    def make(self, device: str) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """A module in eval mode and inputs for it, on a device."""
        dtype = getattr(torch, self.dtype)
        s = self.sizes
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        if self.is_gemm:
            module: Any = torch.nn.Linear(s["k"], s["n"], bias=self.op == "linear_bias", **where)
            return module.eval(), (torch.randn(s["m"], s["k"], **where),)
        if self.op == "bmm":
            right = torch.randn(s["batch"], s["k"], s["n"], **where)
            return _BatchedMatmul(), (torch.randn(s["batch"], s["m"], s["k"], **where), right)
        if self.op == "conv":
            module = torch.nn.Conv2d(
                s["channels"],
                s["filters"],
                s["kernel"],
                s["stride"],
                padding=s["kernel"] // 2 if s["stride"] < s["kernel"] else 0,
                groups=s["groups"],
                **where,
            )
            image = torch.randn(s["batch"], s["channels"], s["side"], s["side"], **where)
            last = torch.channels_last
            return module.to(memory_format=last).eval(), (image.to(memory_format=last),)
        q = torch.randn(s["batch"], s["heads"], s["queries"], s["width"], **where)
        k, v = (torch.randn(s["batch"], s["kv_heads"], s["keys"], s["width"], **where) for _ in range(2))
        return _FlexAttention(s["causal"] == 1, s["queries"], s["keys"], device).eval(), (q, k, v)


def _cut(name: str, size: int) -> int:
    limits = {"m": 32, "n": 48, "k": 64, "batch": 2, "channels": 16, "filters": 16, "side": 14, "heads": 2}
    limits |= {"queries": 128, "keys": 128, "width": 32}
    return min(size, limits.get(name, size))


class _BatchedMatmul(torch.nn.Module):  # type: ignore[misc]
    """A batched product of two activations."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.bmm(left, right)


class _FlexAttention(torch.nn.Module):  # type: ignore[misc]
    """Flex attention, causal or full."""

    def __init__(self, causal: bool, queries: int, keys: int, device: str) -> None:
        super().__init__()
        result = create_block_mask(_below, None, None, queries, keys, device=device) if causal else None
        self.mask = result

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flex_attention(q, k, v, block_mask=self.mask, enable_gqa=q.shape[1] != k.shape[1])
        return out if isinstance(out, torch.Tensor) else out[0]


def _below(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


# model: (split, tokens, {layer: (out features, in features)}, has bias)
_LINEARS: dict[str, tuple[str, tuple[int, ...], dict[str, tuple[int, int]], bool]] = {
    "llama-3.1-8b": (
        FIT,
        (16, 512, 8192),
        {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
        False,
    ),
    "llama-3.2-1b": (FIT, (64, 2048), {"qkv": (3072, 2048), "down": (2048, 8192)}, False),
    "llama-70b-tp8": (FIT, (128, 4096), {"qkv": (1280, 8192), "gate_up": (7168, 8192)}, False),
    "bert-large": (FIT, (4096,), {"qkv": (3072, 1024), "up": (4096, 1024), "down": (1024, 4096)}, True),
    "vit-b": (FIT, (6304,), {"qkv": (2304, 768), "up": (3072, 768)}, True),
    "sdxl-unet": (FIT, (2048, 8192), {"to_q": (1280, 1280), "to_kv": (640, 2048)}, False),
    "qwen2.5-7b": (
        HELD_OUT,
        (32, 2048),
        {"qkv": (4608, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)},
        False,
    ),
    "gemma2-2b": (HELD_OUT, (256, 4096), {"qkv": (4096, 2304), "gate_up": (18432, 2304)}, False),
    "mixtral-router": (HELD_OUT, (4096,), {"router": (8, 4096)}, False),
    "phi-2": (HELD_OUT, (16, 1024), {"up": (10240, 2560), "down": (2560, 10240)}, True),
    "vit-l": (HELD_OUT, (12608,), {"qkv": (3072, 1024), "up": (4096, 1024), "down": (1024, 4096)}, True),
    "dit-xl": (HELD_OUT, (8192,), {"qkv": (3456, 1152), "up": (4608, 1152), "down": (1152, 4608)}, True),
    "flux": (HELD_OUT, (4608,), {"single": (21504, 3072), "out": (3072, 15360)}, False),
}

# model, label, split, batch, m, n, k
_BATCHED = [
    ("bert-large", "scores", FIT, 128, 512, 512, 64),
    ("bert-large", "values", FIT, 128, 512, 64, 512),
    ("mixtral", "experts", FIT, 8, 1024, 14336, 4096),
    ("deepseek-v2", "absorb", FIT, 128, 128, 512, 128),
    ("sdxl-unet", "cross_scores", FIT, 40, 1024, 77, 64),
    ("gpt2-medium", "scores", HELD_OUT, 64, 1024, 1024, 64),
    ("t5-large", "values", HELD_OUT, 256, 512, 64, 512),
    ("qwen-moe", "experts", HELD_OUT, 60, 256, 1408, 2048),
]

# model, label, split, batch, channels, side, filters, kernel, stride
_CONVOLUTIONS = [
    ("resnet50", "stem", FIT, 32, 3, 224, 64, 7, 2),
    ("resnet50", "layer1", FIT, 32, 64, 56, 64, 3, 1),
    ("resnet50", "layer2_down", FIT, 32, 128, 56, 128, 3, 2),
    ("resnet50", "layer3", FIT, 32, 256, 14, 256, 3, 1),
    ("resnet50", "layer4", FIT, 32, 512, 7, 512, 3, 1),
    ("sdxl-unet", "down0", FIT, 2, 320, 128, 320, 3, 1),
    ("sdxl-unet", "down2", FIT, 2, 1280, 32, 1280, 3, 1),
    ("convnext-b", "patchify", HELD_OUT, 32, 3, 224, 128, 4, 4),
    ("convnext-b", "downsample", HELD_OUT, 32, 256, 28, 512, 2, 2),
    ("sd-vae", "decoder", HELD_OUT, 1, 256, 256, 128, 3, 1),
    ("yolo", "backbone", HELD_OUT, 16, 128, 80, 128, 3, 1),
]

# model, label, split, batch, heads, kv heads, queries, keys, width, causal
_ATTENTIONS = [
    ("llama-3.1-8b", "prefill", FIT, 1, 32, 8, 4096, 4096, 128, 1),
    ("llama-3.2-1b", "prefill", FIT, 4, 32, 8, 2048, 2048, 64, 1),
    ("llama-3.1-8b", "decode", FIT, 16, 32, 8, 1, 4096, 128, 0),
    ("sdxl-unet", "self", FIT, 2, 20, 20, 1024, 1024, 64, 0),
    ("qwen2.5-7b", "prefill", HELD_OUT, 1, 28, 4, 8192, 8192, 128, 1),
    ("dit-xl", "self", HELD_OUT, 32, 16, 16, 256, 256, 64, 0),
]


def all_problems(split: str | None = None) -> list[InductorProblem]:
    """All problems in a fixed order, or those of one split."""
    results = [*_linears(), *_others()]
    return [p for p in results if split is None or p.split == split]


def _linears() -> Iterator[InductorProblem]:
    for model, (split, tokens, layers, bias) in _LINEARS.items():
        for m in tokens:
            for label, (n, k) in layers.items():
                sizes = {"m": m, "n": n, "k": k}
                yield InductorProblem(model, label, "linear_bias" if bias else "linear", sizes, split)


def _others() -> Iterator[InductorProblem]:
    for model, label, split, *numbers in _BATCHED:
        yield InductorProblem(model, label, "bmm", _named("batch m n k", numbers), split)
    for model, label, split, *numbers in _CONVOLUTIONS:
        sizes = _named("batch channels side filters kernel stride groups", [*numbers, 1])
        yield InductorProblem(model, label, "conv", sizes, split, "float16")
    for model, label, split, *numbers in _ATTENTIONS:
        sizes = _named("batch heads kv_heads queries keys width causal", numbers)
        yield InductorProblem(model, label, "flex", sizes, split)


def _named(names: str, numbers: list[Any]) -> dict[str, int]:
    return dict(zip(names.split(), numbers, strict=True))


def leaking_pairs() -> list[tuple[InductorProblem, InductorProblem]]:
    """Pairs of a fitted and a held-out problem with the same op and sizes."""
    return [
        (a, b)
        for a in all_problems(FIT)
        for b in all_problems(HELD_OUT)
        if (a.op, a.sizes) == (b.op, b.sizes)
    ]
