"""Launches of many Helion configs at once: their code is generated, traced and read in forked children.

To generate and trace the code of one takes 0.1 s of Python, and a search waits for all of a pool. A child of a process
that has used the device must not use it: it is told what the device is, and allocates nothing there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forecast_autotune.features.traced_texts import CompressedText, decode_facts, encode_facts
from forecast_autotune.features.ttir.parser import FeatureError
from forecast_autotune.records import Argument
from forecast_integrations.helion.tracing import GeneratedLaunch, generated_launch
from forecast_integrations.triton.compile.forked_children import answers_of_children
from forecast_integrations.triton.compile.pool import can_fork, without_device

_LEAST = 4
"""Configs from which on children are quicker, forks included."""
_TIMEOUT_S, _TIMEOUT_PER_CONFIG_S = 5.0, 1.0


def generated_launches(
    kernel: Any, args: Sequence[Any], configs: Sequence[Any], workers: int = 1
) -> list[GeneratedLaunch | None]:
    """What `generated_launch` gives for each config, in their order; None where it raises.

    Up to `workers` children share the work. What they could not do, this process does.
    """
    found: dict[int, GeneratedLaunch | None] = {}
    count = min(workers, len(configs) // 2)
    if len(configs) >= _LEAST and count > 1 and can_fork():
        numbered = list(enumerate(configs))
        shares = [numbered[i::count] for i in range(count)]
        timeout_s = _TIMEOUT_S + _TIMEOUT_PER_CONFIG_S * len(shares[0])
        try:
            answer = without_device(_Tracer(kernel, args, _KnownDevice.current()).answer)
        except RuntimeError:  # no driver here: a child could not know the target
            shares = []
        for told in answers_of_children(answer, shares, timeout_s) if shares else ():
            found.update((int(number), _decoded(launch)) for number, launch in told or ())
    return [found[i] if i in found else _launch_or_none(kernel, args, c) for i, c in enumerate(configs)]


def _launch_or_none(kernel: Any, args: Sequence[Any], config: Any) -> GeneratedLaunch | None:
    try:
        return generated_launch(kernel, args, config)
    except FeatureError:
        return None


@dataclass(frozen=True)
class _Tracer:
    """What a child does with its share of the configs, which are numbered."""

    kernel: Any
    args: Sequence[Any]
    device: _KnownDevice

    def answer(self, share: Sequence[tuple[int, Any]]) -> list[list[Any]]:
        """[number, launch as JSON] of each; None for a config without code. What needs the device is left out."""
        found: list[list[Any]] = []
        self.device.be_known()
        for number, config in share:
            try:
                launch = generated_launch(self.kernel, self.args, config, _WithoutMemory)
                found.append([number, _encoded(launch)])
            except FeatureError as error:
                if "cuda" not in str(error).lower():
                    found.append([number, None])
        return found


@dataclass(frozen=True)
class _KnownDevice:
    """What host code asks of a CUDA device, as a child of a process that has used it may know it."""

    answers: dict[str, Any]
    """By the names of functions of `torch.cuda`."""

    @classmethod
    def current(cls) -> _KnownDevice:
        """Of the current device; nothing where there is none."""
        if not torch.cuda.is_available():
            return cls({})
        index = torch.cuda.current_device()
        return cls(
            {
                "is_available": True,
                "current_device": index,
                "device_count": torch.cuda.device_count(),
                "get_device_properties": torch.cuda.get_device_properties(index),
                "_lazy_init": None,
            }
        )

    def be_known(self) -> None:
        """In a child: have `torch.cuda` answer from what is known."""
        for name, known in self.answers.items():
            setattr(torch.cuda, name, lambda *_, _known=known, **__: _known)


class _WithoutMemory(TorchDispatchMode):
    """Has tensors of devices other than the CPU made without memory: nothing is computed with them.

    For host code alone: while code is generated, Helion's own stand-ins for tensors have to keep their device.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        makes = "device" in {one.name for one in func._schema.arguments}
        like = args[0].device if args and isinstance(args[0], torch.Tensor) else torch.device("cpu")
        if makes and (named.get("device") or like).type != "cpu":
            named["device"] = torch.device("meta")
            named.pop("pin_memory", None)
        return func(*args, **named)


def _encoded(launch: GeneratedLaunch) -> dict[str, Any]:
    text = CompressedText.of(launch.ttir)
    return {
        "grid": list(launch.grid),
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "arguments": [one.to_json() for one in launch.arguments],
        "ttir": [text.data, text.characters],
        "facts": encode_facts(launch.ttir, launch.arguments, [launch.grid]),
    }


def _decoded(told: dict[str, Any] | None) -> GeneratedLaunch | None:
    if told is None:
        return None
    (facts,) = decode_facts(told["facts"]).values()
    return GeneratedLaunch(
        tuple(told["grid"]),
        told["num_warps"],
        told["num_stages"],
        tuple(map(Argument.from_json, told["arguments"])),
        CompressedText(*told["ttir"]).expand(),
        facts,
    )
