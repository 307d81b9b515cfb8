"""Models that users compile, with random weights: a few layers of most, in the sizes of published models.

On a CPU all of them are small, to see that scripts work.
"""

# Modules are subclasses of Any here: torch is untyped to us.
# mypy: disable-error-code="misc"

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


@dataclass(frozen=True)
class CompiledModel:
    """A model and what it is called with."""

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    other_inputs: tuple[torch.Tensor, ...] | None = None
    """Inputs of another size, for a graph that is compiled for all sizes."""
    training: bool = False
    """Whether a call is a forward and a backward pass."""

    def call(self, compiled: Callable[..., torch.Tensor], *, other: bool = False) -> torch.Tensor:
        """Run it, or what it was compiled to; the output, or of a training step the loss and its gradients' size."""
        inputs = self.other_inputs if other and self.other_inputs is not None else self.inputs
        if not self.training:
            with torch.no_grad():
                return compiled(*inputs)
        self.module.zero_grad(set_to_none=True)
        loss = compiled(*inputs).float().square().mean()
        loss.backward()
        sizes = [p.grad.float().abs().mean() for p in self.module.parameters() if p.grad is not None]
        return torch.stack([loss.detach(), torch.stack(sizes).sum()])


# --- models of our own ---


class TransformerBlock(nn.Module):
    """One pre-norm block with a gated MLP; sizes are of an 8B language model on a GPU."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, tokens, width))
        h = self.second(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class FlexBlock(TransformerBlock):
    """The same block with a sliding window, by flex attention."""

    def __init__(self, width: int, heads: int, hidden: int, tokens: int, device: str) -> None:
        super().__init__(width, heads, hidden)
        window = tokens // 4
        self.mask = create_block_mask(
            lambda b, h, q, k: (q >= k) & (q - k < window), None, None, tokens, tokens, device=device
        )

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result = flex_attention(q, k, v, block_mask=self.mask)
        return result if isinstance(result, torch.Tensor) else result[0]


class ResidualBlock(nn.Module):
    """A bottleneck of a ResNet, without normalisation: it is folded into the weights for inference."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(wide, narrow, 1)
        self.across = nn.Conv2d(narrow, narrow, 3, padding=1)
        self.up = nn.Conv2d(narrow, wide, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.relu(self.across(functional.relu(self.down(x))))
        return functional.relu(x + self.up(h))


def _convnet(small: bool, device: str) -> CompiledModel:
    """Stages of two bottlenecks, halving the image between them, and a classifier."""
    widths = (16, 32) if small else (256, 512, 1024, 2048)
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 7, stride=2, padding=3), nn.ReLU()]
    for before, width in zip((widths[0], *widths), widths, strict=False):
        layers += [nn.Conv2d(before, width, 3, stride=2, padding=1), nn.ReLU()]
        layers += [ResidualBlock(width, width // 4), ResidualBlock(width, width // 4)]
    whole = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1000))
    return CompiledModel(whole, (_images(small),))


def _block(small: bool, device: str, *, flex: bool = False) -> CompiledModel:
    width, heads, hidden, tokens = (64, 2, 128, 128) if small else (4096, 32, 14336, 4096)
    result = (
        FlexBlock(width, heads, hidden, tokens, device) if flex else TransformerBlock(width, heads, hidden)
    )
    return CompiledModel(result, (torch.randn(1, tokens, width),))


# --- models of transformers ---


class FirstOutput(nn.Module):
    """A model of transformers that takes tensors by position and returns the first of its outputs."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module, self.names = module, names

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(**dict(zip(self.names, tensors, strict=True)))[0]
        return result


def _from_transformers(kind: str, **sizes: Any) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **sizes)
    result: nn.Module = transformers.AutoModel.from_config(config)
    return result


_LANGUAGE_MODELS: Mapping[str, tuple[int, int, int, int]] = {
    "qwen2": (3584, 18944, 28, 4),
    "llama": (4096, 14336, 32, 8),
    "mistral": (4096, 14336, 32, 8),
    "mixtral": (2048, 4096, 32, 8),
}
"""Width, width of the MLP, heads, and heads of keys, as in the models of 7 and 8 billion weights; the mixture
of experts is smaller."""


def _language_model(
    kind: str,
    small: bool,
    batch: int,
    tokens: int,
    *,
    other: tuple[int, int] | None = None,
    training: bool = False,
) -> CompiledModel:
    """Two layers over `batch` sequences of so many tokens each; one token each is a decoding step without what
    is kept of earlier tokens."""
    width, hidden, heads, key_heads = (64, 128, 4, 2) if small else _LANGUAGE_MODELS[kind]
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": 128,
        "use_cache": False,
    }
    if kind == "mixtral":
        sizes |= {"num_local_experts": 4 if small else 8}
    module = FirstOutput(_from_transformers(kind, **sizes), ("inputs_embeds",))
    if small:
        batch, tokens = min(batch, 4), min(tokens, 16)
        other = other and (min(other[0], 3), min(other[1], 24))
    result = CompiledModel(module, (torch.randn(batch, tokens, width),), training=training)
    return result if other is None else replace(result, other_inputs=(torch.randn(*other, width),))


def _bert(small: bool, *, training: bool = False) -> CompiledModel:
    width = 64 if small else 1024
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": 4 if small else 16}
    more = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    module = _from_transformers("bert", **sizes, **more, num_hidden_layers=2, vocab_size=128)
    batch, tokens = (2, 16) if small else (16, 512)
    x = torch.randn(batch, tokens, width)
    return CompiledModel(FirstOutput(module, ("inputs_embeds",)), (x,), training=training)


def _t5(small: bool) -> CompiledModel:
    width, hidden = (64, 128) if small else (1024, 2816)
    sizes = {"d_model": width, "d_ff": hidden, "d_kv": 16 if small else 64, "num_heads": 4 if small else 16}
    module = _from_transformers(
        "t5", **sizes, num_layers=2, vocab_size=128, use_cache=False, feed_forward_proj="gated-gelu"
    )
    batch, tokens = (2, 16) if small else (8, 512)
    x, y = torch.randn(batch, tokens, width), torch.randn(batch, tokens // 4, width)
    return CompiledModel(FirstOutput(module, ("inputs_embeds", "decoder_inputs_embeds")), (x, y))


def _whisper(small: bool) -> CompiledModel:
    """The encoder alone."""
    width, heads, bands, frames = (64, 4, 16, 64) if small else (1280, 20, 128, 3000)
    each = {"layers": 2, "attention_heads": heads, "ffn_dim": 4 * width}
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in each.items()}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    more = {"num_mel_bins": bands, "max_source_positions": frames // 2, "vocab_size": 128}
    module = _from_transformers("whisper", d_model=width, **sides, **more, **ids)
    x = torch.randn(2 if small else 8, bands, frames)
    return CompiledModel(FirstOutput(module.encoder, ("input_features",)), (x,))


def _vision(kind: str, small: bool) -> CompiledModel:
    narrow = [16, 32, 32, 64]
    if kind == "vit":
        width = 64 if small else 768
        sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": width // 16 if small else 12, "image_size": 32 if small else 224}
        sizes |= {"patch_size": 8 if small else 16}
    elif kind == "convnext":
        sizes = {"hidden_sizes": narrow if small else [96, 192, 384, 768], "depths": [1, 1, 2, 1]}
    else:
        sizes = {"hidden_sizes": narrow if small else [256, 512, 1024, 2048], "depths": [1, 1, 1, 1]}
        sizes |= {"embedding_size": 16 if small else 64}
    return CompiledModel(FirstOutput(_from_transformers(kind, **sizes), ("pixel_values",)), (_images(small),))


class FourActivations(nn.Module):
    """An MLP of four equal layers, each followed by another function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        functions = (functional.relu, functional.gelu, functional.silu, torch.tanh)
        for layer, function in zip(self.layers, functions, strict=True):
            x = function(layer(x))
        return x


def _whole(kind: str, small: bool) -> CompiledModel:
    """All layers of ViT-B/16, ResNet-18, or Qwen2 0.5B without its embedding."""
    if kind == "qwen2":
        sizes: dict[str, Any] = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
        sizes |= {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 128, "use_cache": False}
        name, inputs = "inputs_embeds", torch.randn(1, 1024, 896)
    elif kind == "resnet":
        sizes = {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
        name, inputs = "pixel_values", _images(small=False)
    else:
        sizes, name, inputs = {}, "pixel_values", _images(small=False)
    if small:
        sizes |= {"num_hidden_layers": 2} if kind != "resnet" else {}
        inputs = inputs[:1] if kind != "qwen2" else inputs[:, :16]
    return CompiledModel(FirstOutput(_from_transformers(kind, **sizes), (name,)), (inputs,))


def _images(small: bool) -> torch.Tensor:
    return torch.randn(*((2, 3, 32, 32) if small else (32, 3, 224, 224)))


# --- all of them ---

_CONVOLUTIONS = ("convnet", "convnext", "resnet", "resnet18")
_MODELS: Mapping[str, Callable[[bool, str], CompiledModel]] = {
    "transformer": _block,
    "convnet": _convnet,
    "flex": lambda small, device: _block(small, device, flex=True),
    "qwen2_prefill": lambda small, device: _language_model("qwen2", small, 1, 2048),
    "qwen2_decode": lambda small, device: _language_model("qwen2", small, 64, 1),
    "llama_prefill": lambda small, device: _language_model("llama", small, 1, 2048),
    "llama_decode": lambda small, device: _language_model("llama", small, 64, 1),
    "mistral_prefill": lambda small, device: _language_model("mistral", small, 4, 512),
    "mixtral_prefill": lambda small, device: _language_model("mixtral", small, 1, 1024),
    "bert": lambda small, device: _bert(small),
    "t5": lambda small, device: _t5(small),
    "whisper_encoder": lambda small, device: _whisper(small),
    "vit": lambda small, device: _vision("vit", small),
    "convnext": lambda small, device: _vision("convnext", small),
    "resnet": lambda small, device: _vision("resnet", small),
    "llama_dynamic": lambda small, device: _language_model("llama", small, 2, 1024, other=(3, 1536)),
    "llama_training": lambda small, device: _language_model("llama", small, 1, 2048, training=True),
    "bert_training": lambda small, device: _bert(small, training=True),
    "vit_base": lambda small, device: _whole("vit", small),
    "resnet18": lambda small, device: _whole("resnet", small),
    "qwen2_whole": lambda small, device: _whole("qwen2", small),
    "cpu_mlp": lambda small, device: CompiledModel(FourActivations(512), (torch.randn(512, 512),)),
    "cpu_convnet": lambda small, device: CompiledModel(
        _convnet(True, device).module, (torch.randn(8, 3, 96, 96),)
    ),
    "cpu_transformer": lambda small, device: CompiledModel(
        TransformerBlock(256, 4, 1024), (torch.randn(4, 128, 256),)
    ),
}
MODELS = tuple(_MODELS)
"""Names of the models; `_dynamic` is compiled for all sizes, `_training` has a backward pass, `cpu_` has a
CPU's size."""


def model_of(name: str, device: str) -> CompiledModel:
    """A model with random weights on a device, and its inputs; small ones on a CPU.

    In bfloat16 on a GPU, with convolutions in float16 and channels last.
    """
    torch.manual_seed(0)
    small = device == "cpu"
    dtype = torch.float16 if name in _CONVOLUTIONS else torch.bfloat16
    if small and name != "cpu_mlp":
        dtype = torch.float32
    with torch.device(device):  # weights are drawn where they stay
        result = _MODELS[name](small, device)
    layout = torch.channels_last if name in _CONVOLUTIONS else torch.preserve_format

    def placed(tensors: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, ...] | None:
        return None if tensors is None else tuple(t.to(device, dtype, memory_format=layout) for t in tensors)

    inputs = placed(result.inputs)
    assert inputs is not None
    module = result.module.to(device, dtype).eval()
    if name in _CONVOLUTIONS:
        module = module.to(memory_format=torch.channels_last)
    return replace(result, module=module, inputs=inputs, other_inputs=placed(result.other_inputs))
