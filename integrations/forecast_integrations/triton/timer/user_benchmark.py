"""A clock of the user's: the tuner's own benchmark function, and whose its errors are."""

from __future__ import annotations

import math
from functools import partial

from forecast_autotune.errors import code_of, codes_in_traceback, mark_of_caller
from forecast_autotune.records import Candidate, Outcome
from forecast_integrations.triton.problem.call import KernelCall, outcome_of
from forecast_integrations.triton.protocols import Times

_LAUNCHING = ("kernel_call", KernelCall.launch_once.__name__)
"""Functions that a benchmark function is given to call: Triton's and ours."""
_DEVICE_ERRORS = ("CUDA error", "CUDA driver error", "HIP error")
"""In texts of errors that a device tells of later, to whoever waits for it."""


class UserBenchmarkTimer:
    """Times through the tuner's own `_bench`: a user's `do_bench=`, or a subclass with its own."""

    protocol = "user-do-bench"

    def __init__(self, call: KernelCall) -> None:
        self._call = call
        self.raw: dict[Candidate, Times] = {}

    def first(self, candidate: Candidate, timeout_s: float) -> None:
        """One call of the benchmark function is all there is; see `time_adaptively`.

        What it raises by itself, or a hook, is for the caller to see.
        """
        try:
            self._benchmark(candidate)
        except Exception as error:
            if not self._is_of_launch(candidate, error):
                mark_of_caller(error)
            raise

    def _is_of_launch(self, candidate: Candidate, error: Exception) -> bool:
        """Whether the candidate failed, and not the function that times it: Triton forgives what does not fit."""
        if outcome_of(error) in (Outcome.COMPILE_ERROR, Outcome.OUT_OF_RESOURCES):
            return True
        if any(text in str(error) for text in _DEVICE_ERRORS):
            return True
        codes = codes_in_traceback(error)
        launched = any(code.co_name in _LAUNCHING for code in codes)
        return launched and codes.isdisjoint(map(code_of, self._call.hooks(candidate)))

    def _benchmark(self, candidate: Candidate) -> None:
        call = self._call
        if candidate.variant in call.functions:
            # `_bench` knows the tuner's own kernel alone.
            once = partial(call.launch_once, candidate)
            self.raw[candidate] = call.tuner.do_bench(once, quantiles=(0.5, 0.2, 0.8))
            return
        config = call.configs[candidate]
        self.raw[candidate] = call.tuner._bench(*call.args, config=config, **call.kwargs)

    def time_adaptively(self, candidate: Candidate, best_ms: float) -> list[float] | None:
        """What `first` returned, as [20 %, 50 %, 80 %]; None for a failure."""
        result = self.raw[candidate]
        values = [float(v) for v in result] if isinstance(result, list | tuple) else [float(result)]
        if not math.isfinite(values[0]):
            return None
        if len(values) >= 3:
            middle, low, high = values[:3]
            return [low, low, middle, high, high] if low <= middle <= high else [middle]
        return values[:1]

    def stay_awake(self) -> None:
        """Nothing: the function warms the device up itself, or means not to."""

    def protocol_of(self, candidate: Candidate) -> str:
        """The same for all: what the function does is not known."""
        return self.protocol

    def is_host_bound(self, candidate: Candidate) -> bool:
        """Not known of a benchmark function."""
        return False

    def is_alive(self) -> bool:
        """The benchmark function has its own view of the device."""
        return True

    def close(self) -> None:
        """Nothing is held."""
