"""The judge's own clock on a device: memory that is shared, recorded batches, and who is faster by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forecast_harness.clocks.paired_comparison import CANDIDATE
from forecast_harness.targets.packs import load_pack
from tests.harness.lanes import lane
from tests.harness.many_kernels import MANY_KERNELS
from tests.harness.verify.test_window_audit import PLAIN, STALE, ask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TWICE = "import torch\n\n\ndef run(x):\n    torch.softmax(x, -1)\n    return torch.softmax(x, -1)\n"
WAITS = "import torch\n\n\ndef run(x):\n    y = torch.softmax(x, -1)\n    float(y[0, 0])\n    return y\n"
SPINS = (
    "import torch\n\n\ndef run(x):\n    y = torch.softmax(x, -1)\n    torch.cuda._sleep(20_000_000)\n"
    "    return y\n"
)


@pytest.fixture(scope="module")
def judge() -> Iterator[Callable[..., dict[str, Any]]]:
    pack = load_pack("softmax")
    with lane(warm=("torch", "tests.harness.audit_job"), device="0") as opened:
        yield lambda *sources, **asked: ask(opened, pack, sources, device="cuda", **asked)


def test_half_the_work_is_faster(judge: Callable[..., dict[str, Any]]) -> None:
    result = judge(TWICE, PLAIN)
    print(result)
    assert result["verdict"] == "agrees", result
    assert result["gain"] > 0.3


def test_equals_are_not_faster(judge: Callable[..., dict[str, Any]]) -> None:
    result = judge(PLAIN, PLAIN, rounds=60)
    print(result)
    assert result["verdict"] != "agrees", result
    assert abs(result["gain"]) < 0.05


def test_what_cannot_be_recorded_is_launched_in_windows(judge: Callable[..., dict[str, Any]]) -> None:
    result = judge(WAITS, WAITS)
    print(result)
    assert result["verdict"] != "agrees", result


def test_outputs_of_an_earlier_window_are_caught(judge: Callable[..., dict[str, Any]]) -> None:
    result = judge(PLAIN, STALE)
    assert result.get("caught") == CANDIDATE, result


def test_two_percent_are_seen(judge: Callable[..., dict[str, Any]]) -> None:
    slow, fast = (MANY_KERNELS.format(turns=turns) for turns in (3000, 2940))
    result = judge(slow, fast, claimed=1.02, rounds=60, seconds=6e-3)
    print(result)
    assert 0.0 < result["gain"] < 0.06, (
        result
    )  # graphs of thousands of kernels differ by 1 % between processes


def test_work_that_is_left_on_the_device_gains_nothing(judge: Callable[..., dict[str, Any]]) -> None:
    result = judge(PLAIN, SPINS)
    print(result)
    assert result.get("verdict") != "agrees", result
