"""What the kernels that compare elements have to say, on any driver."""

from __future__ import annotations

import math

import torch

from forecast_harness.clocks.runner.driver import CudaDriver
from forecast_harness.clocks.runner.kernel_texts import COMPARED_TYPES
from forecast_harness.clocks.runner.kernels import RunnerKernels
from forecast_harness.sandbox.jobs import tensor_to_bytes
from forecast_harness.trials.kernel_cell import relative_error

COUNT = 10_001
"""No multiple of a block."""


def told_error(driver: CudaDriver, kernels: RunnerKernels, got: torch.Tensor, right: torch.Tensor) -> float:
    """What the device says of two tensors, each behind one element that is nobody's."""
    late, places = got.element_size(), list[int]()
    for tensor in (got, right):
        data = bytes(tensor_to_bytes(tensor).data)
        places.append(driver.allocate(late + len(data)) + late)
        driver.upload(places[-1], data)
    dtype = str(got.dtype).removeprefix("torch.")
    result = kernels.relative_error(places[0], places[1], got.numel() * late, dtype)
    for place in places:
        driver.free(place - late)
    return result


def check_errors(driver: CudaDriver, kernels: RunnerKernels, dtype: str) -> None:
    """Equal, a little off, far off: as the host has it."""
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(3)
    right = (torch.rand(COUNT, generator=generator) * 100).to(kind)
    assert told_error(driver, kernels, right.clone(), right) == 0.0
    for place in (0, COUNT // 2, COUNT - 1):
        got = right.clone()
        got[place] = 0 if bool(right[place]) else 1
        if dtype not in COMPARED_TYPES:
            assert told_error(driver, kernels, got, right) == math.inf
            continue
        assert math.isclose(told_error(driver, kernels, got, right), relative_error(got, right), rel_tol=1e-5)


def check_unlike(driver: CudaDriver, kernels: RunnerKernels) -> None:
    """Values that are not finite."""
    right = torch.tensor([1.0, math.inf, math.nan, -2.0])
    assert told_error(driver, kernels, torch.tensor([1.0, -math.inf, math.inf, -2.5]), right) == 0.25
    for got in ([1.0, 7.0, math.nan, -2.0], [math.nan, math.inf, math.nan, -2.0]):
        assert told_error(driver, kernels, torch.tensor(got), right) == math.inf
