"""A product of many rows, lowered and scheduled as for a GPU that is not there; only its times are invented.

Templates are listed, rendered and launched for each size by Inductor's own code, and the scheduler asks for times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 13):
    pytest.skip("rendering without a device is put together for torch 2.13", allow_module_level=True)

from torch._inductor import config, ir
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.select_algorithm import AlgorithmSelectorCache
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from forecast_autotune.records import Decision
from forecast_autotune.store import Store
from forecast_integrations.inductor.choices import records
from forecast_integrations.inductor.choices.records import candidate_of, size_hints
from forecast_integrations.inductor.hooks import selection
from forecast_integrations.inductor.hooks.context import HookContext
from forecast_integrations.triton.null_device import null_device
from tests.inductor_rendering import answer_for_h200, compile_nothing
from tests.integrations.inductor import graphs
from tests.integrations.inductor.symbolic import symbolic_size

N, K, LOW, HIGH = 2048, 1024, 2, 4096
LIBRARY_MS = 100.0


class InventedClock:
    """Times as if blocks of rows were best where they are as large as what they serve, up to 128 rows."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int]] = []
        """(rows, choices) of every round."""
        self.launched: set[tuple[int, int]] = set()
        """(rows as a kernel is told, rows of its operands)."""
        self.fused: list[int] = []
        """Rows of the blocks that were fused with what follows, and timed."""

    def __call__(
        self, cls: type, choices: Any, input_nodes: Any, layout: Any, *_: Any, **__: Any
    ) -> dict[Any, float]:
        rows = size_hints(layout.size)[0]
        self.rounds.append((rows, len(choices)))
        for choice in choices:
            told = getattr(getattr(choice, "bmreq", None), "extra_args", None)
            if told and "triton" in choice.name:
                self.launched.add((told[0], choice.bmreq.input_tensor_meta[0].sizes[0]))
        return {choice: self.ms(choice, rows) for choice in choices}

    @staticmethod
    def ms(choice: Any, rows: int) -> float:
        block = block_rows(choice)
        return LIBRARY_MS if block == 0 else 1.0 + abs(block - min(max(rows, 16), 128)) / 64


def block_rows(choice: Any) -> int:
    return int(dict(candidate_of(choice).config.kwargs).get("BLOCK_M") or 0)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[InventedClock]:
    """A GPU to lower for, whose times are invented."""
    told = InventedClock()
    answer_for_h200(monkeypatch)
    monkeypatch.setattr(records, "cuda_device", lambda *_: graphs.H200)
    taken = classmethod(lambda cls, *args, **kwargs: told(cls, *args, **kwargs))
    monkeypatch.setattr(AlgorithmSelectorCache, "benchmark_in_current_process", taken)
    compile_nothing(monkeypatch)
    swapped = ir.MultiTemplateBuffer.swap_as_triton_caller

    @contextlib.contextmanager
    def swap(self: Any, caller: Any) -> Iterator[None]:
        with swapped(self, caller):
            told.fused.append(block_rows(caller))
            yield

    monkeypatch.setattr(ir.MultiTemplateBuffer, "swap_as_triton_caller", swap)
    options = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
    with null_device(), fresh_cache(), config.patch(autotune_num_choices_displayed=0, **options):
        yield told


def output(function: Any, met: int, store: Path, **settings: Any) -> str:
    """The file that Inductor would write for a product of so many rows, of a declared range."""
    session = graphs.serving(lambda c: 0.0, store, **settings)
    context = HookContext(session)
    hooks = [selection.install(context)]
    environment, symbol = symbolic_size(met, LOW, HIGH)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment)
    half = torch.float16
    try:
        with FakeTensorMode():  # which computes nothing
            graph = make_fx(function)(torch.zeros(met, K, dtype=half), torch.zeros(K, N, dtype=half))
        rows = environment.create_symintnode(symbol, hint=met)
        with mode:
            shapes = [(rows, K), (K, N)]
            lowered = [
                FakeTensor(mode, torch.empty(s, dtype=half, device="meta"), torch.device("cuda:0"))
                for s in shapes
            ]
        lowering = GraphLowering(graph, example_inputs=lowered, shape_env=environment)
        with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            lowering.run(*lowered)
            code = str(lowering.codegen()[0].value)
    finally:
        for patches in hooks:
            patches.restore()
    assert session.warn_once.messages == []
    return code


def block_in(code: str) -> int:
    """Rows of a block of the one template in a file; 0 where it calls the library."""
    found = [line.split("=")[1] for line in code.splitlines() if line.strip().startswith("BLOCK_M :")]
    assert len(found) + code.count("extern_kernels.mm(") == 1
    return int(found[0]) if found else 0


def decision_in(store: Path) -> Decision:
    ((_, decision),) = Store(store).decisions()
    return decision


def measured(store: Path) -> Mapping[int, set[int]]:
    """Rows of the blocks that were timed, by number of rows."""
    return {
        table.problem.arguments[0].shape[0]: {
            int(dict(m.candidate.config.kwargs).get("BLOCK_M") or 0)  # type: ignore[arg-type]
            for m in table.measurements
        }
        for table in Store(store).tables()
    }


@pytest.mark.parametrize(("met", "sizes"), [(16, {2, 16, 256, 4096}), (2048, {2, 32, 256, 2048, 4096})])
def test_templates_are_timed_at_every_size_with_their_own_operands(
    clock: InventedClock, tmp_path: Path, met: int, sizes: set[int]
) -> None:
    block = block_in(output(torch.mm, met, tmp_path))
    assert set(measured(tmp_path)) == sizes
    assert {told for told, _ in clock.launched} == sizes
    assert all(told == rows for told, rows in clock.launched)
    # Nothing fits one end and is bad at the other where something between was timed.
    everywhere = set.intersection(*measured(tmp_path).values())
    assert block in everywhere

    def mean(rows_of_block: int) -> float:
        points = [2.0**e for e in range(1, 13)]
        return sum(1.0 + abs(rows_of_block - min(max(rows, 16), 128)) / 64 for rows in points)

    assert mean(block) <= min(mean(other) for other in everywhere - {0}) * 1.1
    assert decision_in(tmp_path).reason.startswith("one config for")


def test_blocks_for_many_rows_are_considered_where_few_are_met(clock: InventedClock, tmp_path: Path) -> None:
    # What one of them has timed is in Inductor's cache for the other.
    output(torch.mm, 16, tmp_path / "hint", inductor_dynamic="hint")
    output(torch.mm, 16, tmp_path / "range")
    assert decision_in(tmp_path / "range").candidates > decision_in(tmp_path / "hint").candidates
    assert set(measured(tmp_path / "hint")) == {16}
    assert measured(tmp_path / "hint")[16] == {0, 16}
    assert max(measured(tmp_path / "range")[16]) > 16


def test_what_follows_is_fused_into_the_template_of_the_range_alone(
    clock: InventedClock, tmp_path: Path
) -> None:
    """Inductor times fused kernels at the met size: among several it would take the fastest there."""
    with config.patch(max_epilogue_benchmarked_choices=4):
        block = block_in(output(lambda a, b: torch.relu(a @ b), 2048, tmp_path / "range"))
        assert set(clock.fused) == {block}
        one = len(clock.fused)
        clock.fused.clear()
        output(lambda a, b: torch.relu(a @ b), 2048, tmp_path / "hint", inductor_dynamic="hint")
    assert len(clock.fused) > one
