"""A model of transformers from a folder or the hub, with an adapter merged into its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forecast_autotune.llm.backend import LLMError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")

DTYPES = ("bfloat16", "float16", "float32")
TOLERANCE = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.1}
"""Most RMS difference of logits, relative to their own: some times what rounding makes (1e-6 and 0.02 with
SmolLM2-135M). Reading wrongly makes tenths of it and more."""
PROBE_PREFIX = "def kernel(x, y, n, BLOCK):\n    i = program_id(0) * BLOCK + arange(0, BLOCK)\n"
"""A text on which two ways to read are compared."""
_CHECKPOINT_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors")
"""Files that are fetched of a repository, from its top folder: no code, and no weights that are pickles."""


@dataclass(frozen=True)
class ModelSource:
    """A model to load, and the device to load it to."""

    model: str
    """A folder, or a name on the Hugging Face hub."""
    adapter: str | None = None
    """A LoRA adapter for it, by folder or name."""
    device: str | None = None
    """A torch device; by default the current CUDA device, or the CPU without one."""
    dtype: str | None = None
    """One of `DTYPES`; by default bfloat16 where the device computes in it, else what is quickest."""


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, ready to read."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_model(source: ModelSource) -> LoadedModel:
    """Load; raises `LLMError` saying what is missing or broken.

    Weights are read from safetensors only, and nothing of a checkpoint is executed. A folder, or a model
    that the hub's cache holds, is loaded without a word to the network.
    """
    try:
        import torch  # noqa: F401 - so that its absence is reported here
        import transformers

        if source.adapter is not None:
            import peft  # noqa: F401
    except ImportError as error:
        raise LLMError(
            f"a model in this process needs torch, transformers and peft ({error}): "
            "pip install 'forecast-autotune[transformers]'"
        ) from error
    device = _device(source.device)
    dtype = _dtype(source.dtype, device)
    with silenced():
        tokenizer = _load_part(source.model, "tokenizer", transformers.AutoTokenizer.from_pretrained)
        model = _load_part(source.model, "model", lambda folder: _model(folder, device, dtype))
        if source.adapter is not None:
            model = _load_part(
                source.adapter, "adapter", lambda folder: _merge_adapter(model, folder, device, tokenizer)
            )
    model.eval().requires_grad_(False)
    return LoadedModel(model, tokenizer)


def _device(name: str | None) -> torch.device:
    import torch

    if name is None:
        name = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as error:  # whatever a driver says of a device that is not there
        raise LLMError(
            f"the device {name!r} cannot be used ({error}): give a torch device that this machine has"
        ) from error
    return device


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    import torch

    if name is not None:
        if name not in DTYPES:
            raise LLMError(f"the model's dtype must be one of {', '.join(DTYPES)}, got {name!r}")
        return getattr(torch, name)
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    # A CPU without instructions for it converts back and forth: slower than float32.
    probes = (getattr(torch.cpu, f"_is_{feature}_supported", None) for feature in ("avx512_bf16", "amx_tile"))
    return torch.bfloat16 if any(ask is not None and ask() for ask in probes) else torch.float32


def _load_part(name: str, part: str, load_one: Callable[[str], T]) -> T:
    """Load a part from its folder: the one given, else that in the hub's cache, else one that is fetched."""
    folder = Path(name).expanduser()
    local = folder.exists()
    if not local and (folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise LLMError(f"no {part} at {name}: give an existing folder, or a name on the Hugging Face hub")
    try:
        if local:
            return load_one(str(folder))
        with contextlib.suppress(OSError):  # not there, or not whole
            return load_one(snapshot(name, fetch=False))
        return load_one(snapshot(name, fetch=True))
    except LLMError:
        raise
    except Exception as error:
        # A checkpoint can be broken in as many ways as it has parts; a forecast is not worth a crash.
        if out_of_memory(error):
            remedy = "choose a smaller model, or another device"
        elif local:
            remedy = "check that the folder holds config, tokenizer and safetensors, whole and matching"
        else:
            remedy = "check the name, the network and HF_HUB_OFFLINE, or give a folder"
        raise LLMError(
            f"the {part} {name} cannot be loaded ({type(error).__name__}: {str(error)[:500]}): {remedy}"
        ) from error


def snapshot(name: str, fetch: bool) -> str:
    """The folder of a repository in the hub's cache. Raises `OSError` if there is none."""
    import huggingface_hub

    # The libraries' own `local_files_only` still asks the hub for some files, and waits for it.
    return str(
        huggingface_hub.snapshot_download(
            name, local_files_only=not fetch, allow_patterns=list(_CHECKPOINT_FILES), ignore_patterns=["*/*"]
        )
    )


def _model(folder: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    import transformers

    # Straight to the device: a copy in host memory would slow down every fork of a compiling child.
    placement = {} if device.type == "cpu" else {"device_map": {"": device}}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **placement
    )
    if missing_keys := sorted(info["missing_keys"]):
        raise LLMError(
            f"the model {folder} lacks {len(missing_keys)} weights ({', '.join(missing_keys[:3])} ...), which would be "
            "random: give a checkpoint of a whole causal language model"
        )
    return model


def _merge_adapter(
    model: PreTrainedModel, folder: str, device: torch.device, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    import peft
    import torch

    config = peft.PeftConfig.from_pretrained(folder)
    if config.peft_type != peft.PeftType.LORA:
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise LLMError(f"only LoRA adapters can be merged, and {folder} is one of kind {kind}: train a LoRA")
    config.inference_mode = True
    peft_model = peft.PeftModel(model, config)
    result = peft_model.load_adapter(folder, "default", torch_device=str(device))
    if odd := [*result.missing_keys, *result.unexpected_keys]:
        raise LLMError(
            f"the adapter {folder} does not fit the model: {len(odd)} weights have no counterpart "
            f"({', '.join(odd[:3])} ...): give the model it was made for ({config.base_model_name_or_path})"
        )
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    is_tied = embeddings[1] is not None and _base_weight(embeddings[0]) is _base_weight(embeddings[1])
    if is_tied and any(hasattr(layer, "lora_alpha") for layer in embeddings):
        return (
            peft_model.base_model.model
        )  # one weight, two uses: merged into it, an adapter of one changes the other
    # A usual text: on tokens that training hardly met, rounding alone makes half of the logits.
    ids = tokenizer(PROBE_PREFIX, return_tensors="pt")["input_ids"].to(device) % len(embeddings[0].weight)
    with torch.inference_mode():
        before = model(input_ids=ids, use_cache=False).logits.float()
        # Merged: no more operations than the base model has.
        merged_model = peft_model.merge_and_unload()
        after = merged_model(input_ids=ids, use_cache=False).logits.float()
    difference = float((before - after).std() / before.std())
    if not difference <= TOLERANCE[str(model.dtype).removeprefix("torch.")]:
        raise LLMError(
            f"the adapter {folder} must answer alike merged and not, and its logits differ by {difference:.2g} of "
            "their spread: merge it yourself and give the whole model, or train one with lora.rank = 0"
        )
    return merged_model


def _base_weight(module: Any) -> Any:
    return getattr(module, "base_layer", module).weight


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """No progress bars and no chatter of the libraries inside of the block; as before after it.

    The switches are the process's: reports of other threads meanwhile are lost.
    """
    import huggingface_hub.utils
    from transformers.utils import logging

    hub: Any = huggingface_hub.utils

    level = logging.get_verbosity()
    bars, hub_bars = logging.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
        if hub_bars:
            hub.enable_progress_bars()
        else:
            hub.disable_progress_bars()


def out_of_memory(error: BaseException) -> bool:
    """Whether memory was what was missing, on whichever device."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def unless_out_of_memory(function: Callable[[], T]) -> T | None:
    """The function's result, or None if memory was missing: by then, nothing holds what it had used."""
    try:
        return function()
    except Exception as error:
        if not out_of_memory(error):
            raise
        return None
