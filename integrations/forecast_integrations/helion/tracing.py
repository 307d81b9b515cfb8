"""The generated Triton kernel, grid and TTIR of a Helion config, without compiling or launching.

To generate and trace the code of one takes 0.1 s of Python, and a search waits for all of a pool: forked children share
the work. A child of a process that has used the device must not use it: it knows which device that is, and allocates
nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forecast_autotune.features.trace import trace
from forecast_autotune.features.traced_texts import CompressedText, cached_facts, decode_facts, encode_facts
from forecast_autotune.features.ttir.facts import TtirFacts
from forecast_autotune.features.ttir.parser import FeatureError
from forecast_autotune.records import Argument, Config
from forecast_autotune.store.formats.protocol import flat_parameters
from forecast_integrations.triton.compile.children import answers_of_children
from forecast_integrations.triton.compile.pool import can_fork, without_device
from forecast_integrations.triton.problem.describe import call_arguments

_LEAST = 4
"""Configs from which on children are quicker, forks included."""
_TIMEOUT_S, _TIMEOUT_PER_CONFIG_S = 5.0, 1.0


@dataclass(frozen=True)
class GeneratedLaunch:
    """The launch that Helion's generated host code would make under one config."""

    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    arguments: tuple[Argument, ...]
    """The arguments of the generated Triton kernel, whose parameters depend on the config."""
    ttir: str
    facts: TtirFacts | None
    """The facts of the text at these arguments and this grid; None for one that cannot be read."""


def generated_launch(
    kernel: Any,
    args: Sequence[Any],
    config: Any,
    around_host_code: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> GeneratedLaunch:
    """Run the host code of a bound Helion kernel under a config up to its launch, which is recorded instead.

    The host code allocates what it returns, as a real call does, unless `around_host_code` sees to it. Raises
    `FeatureError` where there is no code for the config, it launches more than one kernel, or that kernel has no TTIR.
    """
    launches: list[tuple[Any, tuple[int, ...], tuple[Any, ...], int, int, Mapping[str, Any]]] = []

    def record(
        function: Any, grid: tuple[int, ...], *values: Any, num_warps: int, num_stages: int, **options: Any
    ) -> None:
        launches.append((function, tuple(grid), values, num_warps, num_stages, options))

    try:
        host_code = kernel.compile_config(config, allow_print=False)
        with around_host_code():
            host_code(*args, _launcher=record)
    except Exception as error:  # Helion refuses configs in many ways, while it generates code and in the code
        raise FeatureError(f"no code: {type(error).__name__}: {error}; under {config}"[:300]) from error
    if len(launches) != 1:
        raise FeatureError(f"{len(launches)} launches under {config}: one can be traced")
    function, grid, values, warps, stages, options = launches[0]
    constants = {name: value for name, value in options.items() if name in function.arg_names}
    text = trace(function, values, constants, {})
    arguments_by_name = {**dict(zip(function.arg_names, values, strict=False)), **constants}
    arguments = tuple(call_arguments(function, arguments_by_name))
    return GeneratedLaunch(grid, warps, stages, arguments, text, cached_facts(text, arguments, grid))


def to_config(config: Any, warps: int = 4, stages: int = 1) -> Config:
    """Our record of a Helion config: its lists spread over numbered parameters, as imports of its logs have it.

    `warps` and `stages` stand for what the config leaves open.
    """
    fields = dict(config.config)
    launch = {"num_warps": fields.pop("num_warps", None), "num_stages": fields.pop("num_stages", None)}
    return Config.of(
        dict(flat_parameters(fields)),
        num_warps=int(launch["num_warps"] or warps),
        num_stages=int(launch["num_stages"] or stages),
    )


def generated_launches(
    kernel: Any, args: Sequence[Any], configs: Sequence[Any], workers: int = 1
) -> list[GeneratedLaunch | None]:
    """Return the `generated_launch` of each config, in their order; None where it raises.

    Up to `workers` children share the work. This process does the rest.
    """
    launches: dict[int, GeneratedLaunch | None] = {}
    count = min(workers, len(configs) // 2)
    if len(configs) >= _LEAST and count > 1 and can_fork():
        pairs = list(enumerate(configs))
        shares = [pairs[i::count] for i in range(count)]
        timeout_s = _TIMEOUT_S + _TIMEOUT_PER_CONFIG_S * len(shares[0])
        try:
            answer = without_device(_Tracer(kernel, args, _KnownDevice.current()).answer)
        except RuntimeError:  # no driver here: a child could not know the target
            shares = []
        for reply in answers_of_children(answer, shares, timeout_s) if shares else ():
            launches.update((int(number), _decode(launch)) for number, launch in reply or ())
    return [launches[i] if i in launches else _launch_or_none(kernel, args, c) for i, c in enumerate(configs)]


def _launch_or_none(kernel: Any, args: Sequence[Any], config: Any) -> GeneratedLaunch | None:
    try:
        return generated_launch(kernel, args, config)
    except FeatureError:
        return None


@dataclass(frozen=True)
class _Tracer:
    """The work of a child on its share of the configs, which are numbered."""

    kernel: Any
    args: Sequence[Any]
    device: _KnownDevice

    def answer(self, share: Sequence[tuple[int, Any]]) -> list[list[Any]]:
        """[number, launch as JSON] of each; None for a config without code. Steps that need the device are left out."""
        answers: list[list[Any]] = []
        self.device.be_known()
        for number, config in share:
            try:
                launch = generated_launch(self.kernel, self.args, config, _WithoutMemory)
                answers.append([number, _encode(launch)])
            except FeatureError as error:
                if "cuda" not in str(error).lower():
                    answers.append([number, None])
        return answers


@dataclass(frozen=True)
class _KnownDevice:
    """Answers to host code that asks for a CUDA device, in a child of a process that has used it."""

    answers: dict[str, Any]
    """By the names of functions of `torch.cuda`."""

    @classmethod
    def current(cls) -> _KnownDevice:
        """The answers of the current device; nothing where there is none."""
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
        keywords = dict(kwargs or {})
        makes = "device" in {argument.name for argument in func._schema.arguments}
        like = args[0].device if args and isinstance(args[0], torch.Tensor) else torch.device("cpu")
        if makes and (keywords.get("device") or like).type != "cpu":
            keywords["device"] = torch.device("meta")
            keywords.pop("pin_memory", None)
        return func(*args, **keywords)


def _encode(launch: GeneratedLaunch) -> dict[str, Any]:
    text = CompressedText.of(launch.ttir)
    return {
        "grid": list(launch.grid),
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "arguments": [a.to_json() for a in launch.arguments],
        "ttir": [text.data, text.characters],
        "facts": encode_facts(launch.ttir, launch.arguments, [launch.grid]),
    }


def _decode(reply: dict[str, Any] | None) -> GeneratedLaunch | None:
    if reply is None:
        return None
    (facts,) = decode_facts(reply["facts"]).values()
    return GeneratedLaunch(
        tuple(reply["grid"]),
        reply["num_warps"],
        reply["num_stages"],
        tuple(map(Argument.from_json, reply["arguments"])),
        CompressedText(*reply["ttir"]).expand(),
        facts,
    )
