"""Arguments to time on, arguments that may be gone, and arguments to compile for."""

from __future__ import annotations

import gc

import pytest
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from forecast_integrations.triton.background.arguments import (
    StandInTensor,
    WeakArguments,
    copied_arguments,
    stand_in_call,
)
from forecast_integrations.triton.problem.copied_tensors import UncopyableArgumentsError
from tests.integrations.null import double, kernel_call


def test_copies_hold_the_same_and_are_others() -> None:
    x = torch.arange(12.0).reshape(3, 4)[:, 1:]
    (copy, number, nothing), named = copied_arguments((x, 7, None), {"y": x.t(), "grid": (1,)})
    assert torch.equal(copy, x)
    assert copy.stride() == x.stride()
    assert copy.data_ptr() != x.data_ptr()
    copy += 100
    assert x.max() < 100
    assert torch.equal(named["y"], copy.t()), "what overlaps still does"
    assert (number, nothing, named["grid"]) == (7, None, (1,))


def test_a_kernel_may_read_beside_a_view() -> None:
    whole = torch.arange(10)
    ((copy,), _) = copied_arguments((whole[4:6],), {})
    assert torch.equal(copy.as_strided((10,), (1,), 0 + copy.storage_offset() - 4), whole)


def test_a_descriptor_is_copied_with_its_tensor() -> None:
    given = TensorDescriptor.from_tensor(torch.ones(16, 16), [8, 8])
    ((copy,), _) = copied_arguments((given,), {})
    copy.block_shape[0] = 4
    copy.base.zero_()
    assert given.block_shape == [8, 8]
    assert given.base.sum() == 256


class Strange(torch.Tensor):
    """Something that only looks like a tensor's memory."""


@pytest.mark.parametrize("value", [Strange(), torch.eye(3).to_sparse(), [torch.ones(1)], object()])
def test_what_nobody_knows_how_to_copy_is_refused(value: object) -> None:
    with pytest.raises(UncopyableArgumentsError, match="how to copy"):
        copied_arguments((value,), {})


def test_weak_arguments_keep_no_tensor_alive() -> None:
    x, y = torch.ones(3), torch.ones(4)
    held = WeakArguments.of((x, 5), {"y": y, "grid": lambda meta, held=y: held, "warmup": False})
    alive = held.alive()
    assert alive is not None
    assert alive[0][0] is x
    assert alive[1]["y"] is y
    assert alive[0][1] == 5
    del alive, y
    gc.collect()
    assert held.alive() is None


def test_a_stand_in_says_what_its_tensor_does() -> None:
    x = torch.ones(4, 6, dtype=torch.bfloat16)[:, ::2]
    stand_in = StandInTensor(x)
    assert (stand_in.shape, stand_in.stride(), stand_in.dtype) == (x.shape, x.stride(), x.dtype)
    assert (stand_in.device, stand_in.numel(), stand_in.element_size()) == (x.device, 12, 2)
    assert stand_in.is_contiguous() == x.is_contiguous()
    with pytest.raises(RuntimeError, match="meta"):
        stand_in.sum().item()


def test_heuristics_that_read_values_cannot_be_stood_in_for() -> None:
    x, n = torch.ones(4096), 4096
    reads = triton.heuristics({"BLOCK": lambda args: 128 if args["x"].sum().item() > 0 else 256})(double)
    tuner = triton.autotune(configs=[triton.Config({}, num_warps=w) for w in (1, 2)], key=["n"])(reads)
    with pytest.raises(UncopyableArgumentsError, match="heuristics"):
        stand_in_call(kernel_call(tuner, x, x, n, grid=(1,))[0], tuner.configs[0])
    shapes = triton.heuristics({"BLOCK": lambda args: 128 if args["x"].shape[0] > 0 else 256})(double)
    tuner = triton.autotune(configs=[triton.Config({}, num_warps=w) for w in (1, 2)], key=["n"])(shapes)
    assert stand_in_call(kernel_call(tuner, x, x, n, grid=(1,))[0], tuner.configs[0]).args[2] == n
