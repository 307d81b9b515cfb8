"""A config that computes something else is found by its outputs, whatever it is; honest ones never are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

from forecast_autotune import autotune
from forecast_autotune.policy import Fixed, WallTime
from forecast_autotune.records import Measurement, Outcome
from forecast_integrations.triton.null_device import NullDevice, null_device
from forecast_integrations.triton.timer import output_comparison
from tests.integrations.null import fresh, tables

pytestmark = pytest.mark.usefixtures("shared_cache")

Effect = Callable[[Any, list[torch.Tensor]], None]


class ComputingDevice(NullDevice):
    """A null device whose launches have an effect, by the kernel's metadata, on the tensors of the call."""

    computes = True

    def __init__(self, effect: Effect) -> None:
        super().__init__(
            lambda metadata: 0.02 if metadata.num_warps == 8 else 0.1 + 0.01 * metadata.num_stages
        )
        self._effect = effect

    def _launcher(self, src: object, metadata: Any) -> Callable[..., None]:
        launch = super()._launcher(src, metadata)

        def computed(*args: object) -> None:
            launch(*args)
            self._effect(metadata, [a for a in args if isinstance(a, torch.Tensor)])

        return computed


@contextmanager
def computing(effect: Effect) -> Iterator[NullDevice]:
    with null_device():
        driver.set_active(made := ComputingDevice(effect))
        yield made


@triton.jit
def scale(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def accumulate(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + i, tl.load(x + i, mask=i < n), mask=i < n)


N = 4096
WARPS, STAGES = (1, 2, 4), (1, 2, 3)


def decided(
    effect: Effect, store: Path, *, kernel: Any = scale, dtype: torch.dtype = torch.float32, **given: Any
) -> tuple[Any, dict[str, Measurement], torch.Tensor]:
    """The tuner after a call on a device with this effect, its measurements, and the call's output.

    The config of 8 warps is five times as fast as all others.
    """
    options = [triton.Config({"BLOCK": 128}, num_warps=w, num_stages=s) for w in WARPS for s in STAGES]
    if (at := given.pop("at", 4)) is not None:
        options.insert(at, triton.Config({"BLOCK": 128}, num_warps=8))
    given = {"mode": "exhaustive", **given}
    tuner = autotune(options, key=["n"], store=store, **given)(fresh(kernel))
    torch.manual_seed(0)
    x, out = (100 * torch.randn(N)).to(dtype), torch.zeros(N, dtype=dtype)
    with computing(effect):
        tuner[(N // 128,)](x, out, N)
    (table,) = tables(store)
    return tuner, {f"{c.config}": m for c, m in table.by_candidate().items()}, out


def right(_: Any, tensors: list[torch.Tensor]) -> None:
    x, out = tensors
    out.copy_(2 * x)


def unlike(change: Callable[[torch.Tensor], object], warps: int = 8) -> Effect:
    """Right, but for what a config of so many warps changes in its output."""

    def effect(metadata: Any, tensors: list[torch.Tensor]) -> None:
        before = tensors[1].clone()
        right(metadata, tensors)
        if metadata.num_warps == warps:
            kept = tensors[1][N // 2 :]
            kept.copy_(before[N // 2 :]) if change is None else change(tensors[1])

    return effect


OTHER, TILE = (lambda out: out.mul_(3)), (lambda out: out[: N // 64].zero_())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        (torch.float32, OTHER),
        (torch.float16, TILE),
        (torch.bfloat16, None),
        (torch.int32, OTHER),
        (torch.int32, None),
    ],
)
def test_a_fast_config_that_computes_something_else_is_refused_by_name(
    tmp_path: Path, dtype: torch.dtype, change: Any
) -> None:
    tuner, rows, out = decided(unlike(change), tmp_path, dtype=dtype)
    (strange,) = [m for m in rows.values() if not m.ok]
    assert strange.candidate.config.num_warps == 8
    assert strange.outcome is Outcome.INCORRECT
    assert "something else than" in strange.extra["message"]
    assert tuner.decision.chosen.config.num_warps != 8
    assert out.isfinite().all(), "the program's own output was never filled"


@pytest.mark.parametrize(
    "change",
    [
        lambda out: out.mul_(1 + 1e-3),
        lambda out: out.add_(0.5),
        lambda out: out.add_(torch.randn(N) / 100),
    ],
)
def test_other_roundings_are_honest(tmp_path: Path, change: Any) -> None:
    tuner, rows, _ = decided(unlike(change), tmp_path)
    assert all(m.ok for m in rows.values())
    assert tuner.decision.chosen.config.num_warps == 8


def test_outputs_that_every_config_has_of_its_own_say_nothing(tmp_path: Path) -> None:
    """Partial sums, one per block, of which each config has others."""

    def effect(metadata: Any, tensors: list[torch.Tensor]) -> None:
        x, out = tensors
        count = 64 * metadata.num_warps + metadata.num_stages
        out[:count] = x[:count].cumsum(0)

    assert all(m.ok for m in decided(effect, tmp_path)[1].values())


def test_a_kernel_that_does_not_agree_with_itself_says_nothing(tmp_path: Path) -> None:
    def effect(metadata: Any, tensors: list[torch.Tensor]) -> None:
        tensors[1].copy_(torch.randn(N) if metadata.num_warps == 8 else torch.rand(N))

    assert all(m.ok for m in decided(effect, tmp_path)[1].values())


@pytest.mark.parametrize("given", [{}, {"reset_to_zero": ["out"]}])
def test_a_kernel_that_updates_its_output_starts_from_the_same(tmp_path: Path, given: dict[str, Any]) -> None:
    def effect(metadata: Any, tensors: list[torch.Tensor]) -> None:
        x, out = tensors
        out.add_(x * (3 if metadata.num_warps == 8 else 1))

    _, rows, _ = decided(effect, tmp_path, kernel=accumulate, **given)
    assert [m.candidate.config.num_warps for m in rows.values() if not m.ok] == [8]


@pytest.mark.parametrize("wrong", [2, 8])
def test_of_two_that_differ_a_third_one_decides(tmp_path: Path, wrong: int) -> None:
    """Two measurements would do, and say nothing of which is right."""
    given = {"mode": "tune", "policy": Fixed(2)}
    tuner, rows, _ = decided(unlike(lambda out: out.mul_(3), wrong), tmp_path / "wrong", **given)
    tried = {m.candidate.config.num_warps: m.ok for m in rows.values()}
    if wrong in tried:
        assert len(rows) > 2
        assert not tried[wrong]
        assert tuner.decision.chosen.config.num_warps != wrong
    _, rows, _ = decided(right, tmp_path / "right", **given)
    assert len(rows) == 2


@pytest.mark.parametrize("at", [0, 4, 9])
@pytest.mark.parametrize("policy", [WallTime(), Fixed(3)])
def test_it_is_refused_whenever_it_shows(tmp_path: Path, at: int, policy: Any) -> None:
    """Also by the last measurement, after which a plan asks for nothing more."""
    given = {"mode": "tune", "policy": policy, "at": at}
    tuner, rows, _ = decided(unlike(lambda out: out.mul_(3)), tmp_path, **given)
    assert tuner.decision.chosen.config.num_warps != 8
    assert [m.outcome for m in rows.values() if m.candidate.config.num_warps == 8] in (
        [],
        [Outcome.INCORRECT],
    )


def test_a_block_of_its_own_that_leaves_something_out_is_refused_and_other_partial_sums_are_not(
    tmp_path: Path,
) -> None:
    """Whether an output depends on a parameter that only one config has another value of cannot be seen else."""

    def of_its_own(effect: Effect, store: Path) -> list[Measurement]:
        options = [triton.Config({"BLOCK": 128}, num_warps=w, num_stages=s) for w in WARPS for s in STAGES]
        options.insert(4, triton.Config({"BLOCK": 32}, num_warps=8))
        tuner = autotune(options, key=["n"], store=store, mode="exhaustive")(fresh(scale))
        with computing(effect):
            tuner[(N // 128,)](torch.rand(N), torch.zeros(N), N)
        return [m for m in tables(store)[0].by_candidate().values() if not m.ok]

    def sums(metadata: Any, tensors: list[torch.Tensor]) -> None:
        blocks = N // (512 if metadata.num_warps == 8 else 128)
        tensors[1][:blocks] = tensors[0].view(blocks, -1).sum(1)

    (strange,) = of_its_own(unlike(None), tmp_path / "out")
    assert strange.candidate.config.num_warps == 8
    assert of_its_own(sums, tmp_path / "sums") == []


def test_large_outputs_and_hooks_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    wrong = unlike(lambda out: out.mul_(3))
    _, rows, _ = decided(wrong, tmp_path / "a", pre_hook=lambda *a, **k: heard.append(a))
    assert all(m.ok for m in rows.values())
    monkeypatch.setattr(output_comparison, "MOST_BYTES", 4 * N - 1)
    _, rows, _ = decided(wrong, tmp_path / "b")
    assert all(m.ok for m in rows.values())


def rounded(metadata: Any, tensors: list[torch.Tensor]) -> None:
    """The last bit of an output depends on the number of warps beyond four."""
    right(metadata, tensors)
    if metadata.num_warps == 8:
        tensors[1].view(torch.int32)[7] += 1


def varying(metadata: Any, tensors: list[torch.Tensor]) -> None:
    """As an order of atomic additions has it."""
    right(metadata, tensors)
    tensors[1][3] += 1e-4 * torch.rand(())


@pytest.mark.parametrize(
    ("effect", "prefer", "warps", "said"),
    [
        (rounded, "speed", 8, ""),
        (rounded, "bits", 1, "are kept, 450.00% behind BLOCK=128 warps=8"),
        (right, "bits", 8, "are kept, 0.00% behind"),
        (varying, "bits", 8, "no bits are kept: BLOCK=128 warps=1 stages=1 differs from itself"),
    ],
)
def test_a_faster_config_of_a_longer_list_changes_no_bit_where_that_is_asked(
    tmp_path: Path, effect: Effect, prefer: str, warps: int, said: str
) -> None:
    before, *_ = decided(effect, tmp_path, at=None, prefer=prefer)
    assert before.decision.chosen.config.num_warps == 1
    assert ("no choice before" in before.decision.reason) == (prefer == "bits")
    after, *_ = decided(effect, tmp_path, prefer=prefer)
    assert after.decision.chosen.config.num_warps == warps
    assert said in after.decision.reason
    assert (after.decision.stated_risk == 1.0) == (warps == 1), "it is slower by more than the tolerance"
