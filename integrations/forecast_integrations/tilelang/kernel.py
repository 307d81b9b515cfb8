"""A TileLang kernel as the tuner takes it: an example of how another language joins.

    kernel = TileLangKernel(matmul, {"a": a, "b": b, "c": c}, {"c": a @ b})
    tuned = tune_language(kernel, Space({"BLOCK_M": [16, 64], "BLOCK_N": [64, 128]}))
    tuned.compiled(a, b, c)

On the target `c`, TileLang's kernels run on the host's cores, so that all of this works without a GPU; with
`target="cuda"` they are launched on the current one.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from typing import Any

from forecast_autotune.languages import HOST_CLOCK, timed_launches
from forecast_autotune.records import Argument, Config, Device, Kernel, Problem, digest
from forecast_integrations.device import current_device, host_device

Timer = Callable[[Callable[[], object]], Sequence[float]]
DEVICE_EVENTS = "events-l2read-3"
"""The protocol of `device_launches`."""


class TileLangKernel:
    """See `forecast_autotune.languages.LanguageKernel`."""

    def __init__(
        self,
        build: Callable[..., Any],
        arguments: Mapping[str, Any],
        expected: Mapping[str, Any],
        *,
        helpers: Sequence[Callable[..., Any]] = (),
        target: str = "c",
        flags: Sequence[str] | None = None,
        timer: Timer | None = None,
        protocol: str = "",
        device: Device | None = None,
        tolerance: float = 1e-3,
    ) -> None:
        """`build(**parameters of a config)` gives a `T.prim_func`; `helpers` are functions of yours that it calls.

        `arguments` are the tensors of a launch, in order; those in `expected` are written, and compared with it.
        The device, the compiler's flags and the timer are the target's, unless given; a `timer` of your own needs a
        `protocol` of its name. Raises ValueError for a timer without.
        """
        if timer is not None and not protocol:
            raise ValueError(
                "a timer needs the name of its protocol, which is kept with each time: protocol='...'"
            )
        on_host = target == "c"
        self.protocol = protocol or (HOST_CLOCK if on_host else DEVICE_EVENTS)
        self._build, self._helpers = build, helpers
        self._arguments, self._expected = arguments, expected
        self._target = target
        self._flags = list(flags if flags is not None else ("-O3",) if on_host else ())
        self._timer = timer or (timed_launches if on_host else device_launches)
        self._device, self._tolerance = device, tolerance

    @property
    def quiet(self) -> bool:
        """The target `c` runs on the cores that compile."""
        return self._target != "c"

    @cached_property
    def problem(self) -> Problem:
        """The kernel by its source, tensors by dtype, shape and strides, the compiler by its version and flags."""
        source = inspect.getsource(self._build)
        name = digest(source, *map(inspect.getsource, self._helpers))
        return Problem.of(
            Kernel(self._build.__name__, "tilelang", source, name),
            [self._describe(n, tensor) for n, tensor in self._arguments.items()],
            self._device
            or (
                current_device()
                if self.quiet
                else replace(host_device(), multiprocessors=os.cpu_count() or 1)
            ),
            key=[self._target, *self._flags],
            toolchain={"tilelang": version("tilelang")},
        )

    def _describe(self, name: str, tensor: Any) -> Argument:
        dtype = str(tensor.dtype).removeprefix("torch.")
        aligned = tensor.data_ptr() % 16 == 0
        return Argument(name, "tensor", dtype, tuple(tensor.shape), tuple(tensor.stride()), aligned)

    def compile(self, config: Config) -> Any:
        """TileLang's own compiled kernel, which is called with the tensors."""
        import tilelang

        compiled = self._build(**dict(config.kwargs))
        return tilelang.compile(compiled, target=self._target, compile_flags=self._flags)

    def check(self, compiled: Any) -> str:
        """Compare what is written; nothing of an earlier launch can pass for it."""
        for name in self._expected:
            self._arguments[name].fill_(float("nan"))
        compiled(*self._arguments.values())
        for name, wanted in self._expected.items():
            worst = float((self._arguments[name] - wanted).abs().max())
            if not worst <= self._tolerance * max(1.0, float(wanted.abs().max())):
                return f"{name} is {worst:g} off"
        return ""

    def time(self, compiled: Any) -> Sequence[float]:
        """Launches by the timer."""
        return self._timer(lambda: compiled(*self._arguments.values()))


def device_launches(launch: Callable[[], object]) -> list[float]:
    """Milliseconds of launches between the device's own events, each behind a flush of its L2 cache."""
    from forecast_integrations.triton.timer.timers import times_in_turns

    return times_in_turns([launch])[0]
