"""Launches of many configs from children: the same as from this process, and what becomes of those that fail."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 5):
    pytest.skip("Helion supports Triton from 3.5 on", allow_module_level=True)
pytest.importorskip("helion", reason="needs the package helion")
import helion
from torch._subclasses import FakeTensorMode

from forecast_integrations.helion import tracing
from forecast_integrations.helion.tracing import generated_launches
from forecast_integrations.triton.compile.children import answers_of_children
from forecast_integrations.triton.compile.pool import without_device
from tests.integrations.helion.test_search import ARGS, population, row_sums

HERE = os.getpid()


@pytest.fixture(scope="module")
def bound() -> Any:
    return row_sums.bind(ARGS)


@pytest.fixture
def traced_here(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Configs that this process traces itself."""
    seen: list[Any] = []
    trace = tracing.generated_launch

    def noted(kernel: Any, args: Any, config: Any, *host: Any) -> Any:
        if os.getpid() == HERE:
            seen.append(config)
        return trace(kernel, args, config, *host)

    monkeypatch.setattr(tracing, "generated_launch", noted)
    return seen


def test_children_say_what_this_process_would(bound: Any, traced_here: list[Any], device: Any) -> None:
    configs = [*population(bound, 12), helion.Config(block_sizes=["many"])]
    here = generated_launches(bound, ARGS, configs)
    assert len(traced_here) == len(configs)
    assert here[-1] is None
    assert any(launch is not None and launch.facts is not None for launch in here)
    assert generated_launches(bound, ARGS, configs, workers=3) == here
    assert len(traced_here) == len(configs), "children did all of it"


@pytest.mark.parametrize("trouble", ["dies", "needs the device"])
def test_what_children_cannot_do_is_done_here(
    trouble: str, bound: Any, traced_here: list[Any], device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = population(bound, 8)
    here = generated_launches(bound, ARGS, configs)
    trace = tracing.generated_launch

    def elsewhere(kernel: Any, args: Any, config: Any, *host: Any) -> Any:
        if os.getpid() != HERE and config is configs[3]:
            if trouble == "dies":
                os._exit(9)
            raise tracing.FeatureError("no code: RuntimeError: Cannot re-initialize CUDA")
        return trace(kernel, args, config, *host)

    monkeypatch.setattr(tracing, "generated_launch", elsewhere)
    traced_here.clear()
    assert generated_launches(bound, ARGS, configs, workers=2) == here
    assert traced_here == (configs[1::2] if trouble == "dies" else [configs[3]])


def test_a_child_generates_code_for_a_device_that_it_must_not_use(device: Any) -> None:
    """Told of a CUDA device that is not there; its arguments have no memory."""
    properties = SimpleNamespace(
        **{"name": "NVIDIA H200", "major": 9, "minor": 0, "warp_size": 32, "multi_processor_count": 132},
        **{"shared_memory_per_block_optin": 232448, "L2_cache_size": 60 << 20, "total_memory": 1 << 37},
        **{"max_threads_per_multi_processor": 2048, "regs_per_multiprocessor": 65536, "gcnArchName": ""},
    )
    told = {name: properties for name in ("get_device_properties", "_get_device_properties")}
    told |= {"is_available": True, "current_device": 0, "device_count": 1, "_lazy_init": None}
    known = tracing._KnownDevice({**told, "get_device_name": "NVIDIA H200"})

    def answer(share: Any) -> list[Any]:
        known.be_known()
        with FakeTensorMode():
            args = (torch.empty(1024, 512, device="cuda"),)
        bound = row_sums.bind(args)
        tracer = tracing._Tracer(bound, args, known)
        return tracer.answer(list(enumerate(population(bound, share[0]))))

    (found,) = answers_of_children(without_device(answer), [[6]], 120.0)
    launches = [tracing._decoded(launch) for _, launch in found]
    assert len(launches) == 6, "nothing needs the device"
    assert any(launch is not None and "tt.func" in launch.ttir for launch in launches)


def test_a_child_knows_the_device_and_takes_no_memory_of_it() -> None:
    known = tracing._KnownDevice(
        {"is_available": True, "current_device": 3, "get_device_properties": "H200", "_lazy_init": None}
    )

    def answer(shapes: Any) -> list[Any]:
        known.be_known()
        (shape,) = shapes
        with tracing._WithoutMemory():
            made = [torch.empty(shape, device="cuda"), torch.zeros(shape, device="cuda:3", dtype=torch.int8)]
            made += [torch.empty_like(made[0]), made[0].new_full(shape, 1.0), torch.ones(shape)]
        told = torch.cuda.get_device_properties(torch.cuda.current_device())
        return [torch.cuda.is_available(), told, [[str(t.device), list(t.shape)] for t in made]]

    ((available, told, made),) = answers_of_children(answer, [[(2, 5)]], 30.0)
    assert (available, told) == (True, "H200")
    assert made == [["meta", [2, 5]]] * 4 + [["cpu", [2, 5]]]
    assert not torch.cuda.is_available() or torch.cuda.current_device() == 0, "only the child is told"


def test_children_that_hang_are_not_waited_for() -> None:
    def answer(share: Any) -> list[Any]:
        time.sleep(60 * share[0])
        return list(share)

    assert answers_of_children(answer, [[0], [1]], 6.0) == [[0], None]
