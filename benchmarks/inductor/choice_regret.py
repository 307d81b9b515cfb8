"""Regret against the number of compiled choices, on recorded tables of Inductor's GEMMs.

    python -m benchmarks.inductor.choice_regret TABLE... [--choices 1 3 5 8] [--json FILE] [--nvmmh DIR]

Who chooses: `inductor_order` (Inductor's own order), `random` (its expectation), `autoheuristic` (the ranking that
torch ships for this device class, as TORCHINDUCTOR_AUTOHEURISTIC_USE=mm applies it), `nvmmh`
(nvMatmulHeuristics' ranking for Triton; only where the package nvidia-matmul-heuristics is installed, or
unpacked in DIR), `forecast` (our forecasts, one round) and `sequential_forecast` (ours, learning from each time). A
compiled choice that fails counts as compiled. Vendor kernels are not compiled: `with vendor` has them in
everybody's hands, `templates` in nobody's.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.environment import environment
from forecast_autotune.policy import RiskBounded, TuningState
from forecast_autotune.records import Candidate, Measurement, Problem
from forecast_autotune.records.table import Table, read_tables
from forecast_autotune.surrogates.protocol import Query, Surrogate
from forecast_integrations.inductor.choices.geometry import MatmulGeometry, OperandLayout, operation_geometry
from forecast_integrations.inductor.choices.records import is_library_kernel
from forecast_integrations.inductor.choices.surrogate import default
from forecast_integrations.inductor.choices.templates import TEMPLATE

CHOICES = (1, 3, 5, 8)
Order = Callable[[Table, Sequence[Candidate], int], list[Candidate]]
"""(table, its templates in Inductor's order, how many) -> what to compile, best first."""
_ALL_FAILED_REGRET = 10.0
"""Regret of somebody all of whose choices failed, and who has no vendor kernel to fall back on."""


@dataclass(frozen=True)
class ChoicesOfTable:
    """A table's rows, by what they cost."""

    templates: dict[Candidate, Measurement]
    """Choices that are compiled, in Inductor's order."""
    vendor: float
    """Milliseconds of the fastest library kernel; infinite without one."""

    @classmethod
    def of(cls, table: Table) -> ChoicesOfTable:
        rows = table.by_candidate()
        templates = {c: m for c, m in rows.items() if c.variant.startswith(TEMPLATE)}
        library = [m.ms for c, m in rows.items() if is_library_kernel(c) and m.ok]
        return cls(templates, min(library, default=math.inf))

    def regret(self, compiled: Iterable[Candidate], *, with_vendor: bool) -> float:
        """time(best of the compiled) / time(best of all) - 1."""
        floor = self.vendor if with_vendor else math.inf
        got = min([floor, *(self.templates[c].ms for c in compiled if self.templates[c].ok)])
        best = min([floor, *(m.ms for m in self.templates.values() if m.ok)])
        return got / best - 1.0 if math.isfinite(got) else _ALL_FAILED_REGRET


def inductor_order(table: Table, templates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Inductor's own order."""
    return list(templates[:count])


def random_regret(split: ChoicesOfTable, count: int, *, with_vendor: bool, draws: int = 200) -> float:
    """Expected regret of `count` templates at random."""
    names = list(split.templates)
    generator = np.random.default_rng(0)
    found = []
    for _ in range(draws):
        chosen = generator.permutation(len(names))[:count]
        found.append(split.regret([names[int(i)] for i in chosen], with_vendor=with_vendor))
    return float(np.mean(found))


def forecast(surrogate: Surrogate) -> Order:
    """Our forecasts before anything was measured."""

    def order(table: Table, templates: Sequence[Candidate], count: int) -> list[Candidate]:
        names = list(table.by_candidate())
        found = surrogate.forecast(Query(table.problem, names))
        wanted = set(templates)
        ranked = [names[int(i)] for i in found.order() if names[int(i)] in wanted]
        return ranked[:count]

    return order


def sequential_forecast(surrogate: Surrogate) -> Order:
    """One choice at a time, each by what the earlier ones have taught; the library's kernels come first."""

    def order(table: Table, templates: Sequence[Candidate], count: int) -> list[Candidate]:
        rows = table.by_candidate()
        names, wanted = list(rows), set(templates)
        measured = {c: m for c, m in rows.items() if c not in wanted}
        chosen: list[Candidate] = []
        while len(chosen) < min(count, len(templates)):
            found = surrogate.forecast(Query(table.problem, names, measured=list(measured.values())))
            state = TuningState(
                found, measured, new=len(chosen), tolerance=0.0, risk=0.0, problem=table.problem.id
            )
            plan = RiskBounded(least=1, first=1e-9, share=1.0, floor=count + len(names)).plan(state)
            ranked = (found.candidates[int(i)] for i in found.order())
            following = next(
                (c for c in itertools.chain(plan.measure, ranked) if c in wanted and c not in measured), None
            )
            if following is None:
                break
            chosen.append(following)
            measured[following] = rows[following]
        return chosen

    return order


def autoheuristic(table: Table, templates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The ranking that torch ships for `mm` on H100-class devices, then Inductor's order."""
    from torch._inductor.autoheuristic.artifacts._MMRankingH100 import MMRankingH100
    from torch._inductor.autoheuristic.autoheuristic_utils import mm_operations

    shape = gemm_geometry(table.problem)
    listed = MMRankingH100().get_decisions_ranked(_context(shape, table.problem, mm_operations())) or []
    named: dict[str, Candidate] = {}
    for candidate in templates:
        k = candidate.config.parameters()
        blocks = f"BLOCK-M={k['BLOCK_M']}_BLOCK-K={k['BLOCK_K']}_BLOCK-N={k['BLOCK_N']}"
        name = f"type=triton_{blocks}_numstages={k['num_stages']}_numwarps={k['num_warps']}"
        if candidate.variant == "triton::mm":
            named.setdefault(name, candidate)
    ranked = [named[name] for name in listed if name in named]
    return [*ranked, *(c for c in templates if c not in set(ranked))][:count]


def _context(shape: MatmulGeometry, problem: Problem, operations: Sequence[Any]) -> Any:
    """What `mm_autoheuristic` in torch/_inductor/kernel/mm.py puts together."""
    import torch
    from torch._inductor.autoheuristic.autoheuristic_utils import AHContext

    dtype = getattr(torch, operand_tensors(problem)[0].dtype)
    context = AHContext()
    for name, size in (("m", shape.m), ("k", shape.k), ("n", shape.n)):
        context.add_feature(name, size)
    pair = (("mat1", shape.left, shape.m, shape.k), ("mat2", shape.right, shape.k, shape.n))
    for name, operand, height, width in pair:
        context.add_feature(f"{name}_dtype", dtype, is_categorical=True)
        strides = (width, 1) if operand.rows else (1, height)
        for i, stride in enumerate(strides):
            context.add_feature(f"{name}_stride_{i}", stride)
        context.add_feature(f"{name}_iscontig", operand.rows, is_categorical=True)
    context.add_feature("using_tf32", "not_float_32", is_categorical=True)
    context.apply_operations(operations)
    return context


class MatmulHeuristics:
    """nvMatmulHeuristics' ranking for Triton, for tables of one device class."""

    def __init__(self, folder: Path | None = None, gpu: str = "H200_SXM") -> None:
        if folder is not None:
            sys.path.insert(0, str(folder))
        self._library = importlib.import_module("nvMatmulHeuristics")
        target = self._library.NvMatmulHeuristicsTarget.TRITON
        card = self._library.NvMatmulHeuristicsNvidiaGpu[gpu]
        self._interface = self._library.NvMatmulHeuristicsInterfaceEx(target, gpu=card)

    def __call__(self, table: Table, templates: Sequence[Candidate], count: int) -> list[Candidate]:
        """The nearest template to each kernel it recommends, in its order; then Inductor's order."""
        shape = gemm_geometry(table.problem)
        layout = self._library.boolsToNvMatmulHeuristicsLayout(not shape.left.rows, not shape.right.rows)
        made = self._interface.makeNvMatmulHeuristicsProblem(shape.m, shape.n, shape.k, layout, shape.batch)
        precision = _precision(operand_tensors(table.problem)[0].dtype)
        chosen: list[Candidate] = []
        for answer in self._interface.get(made, 4 * count, precision=precision):
            left = [c for c in templates if c not in chosen]
            if left:
                chosen.append(min(left, key=lambda c: _distance(answer["kernel"], c)))
        return [*chosen, *(c for c in templates if c not in set(chosen))][:count]


def _precision(dtype: str) -> str:
    """The library's name of A = B, arithmetic and C = D."""
    known = {"float16": "HSH", "bfloat16": "TST", "float32": "SFS", "int8": "BII", "float8_e4m3fn": "QQTST"}
    return known.get(dtype, "HSH")


def _distance(kernel: Any, candidate: Candidate) -> tuple[float, int]:
    """Doublings between a recommended kernel and a template, then stages."""
    k = candidate.config.parameters()
    warps = max(1, kernel.cta_tile_m // kernel.warp_tile_m) * max(1, kernel.cta_tile_n // kernel.warp_tile_n)
    pairs = [
        (kernel.cta_tile_m, k["BLOCK_M"]),
        (kernel.cta_tile_n, k["BLOCK_N"]),
        (kernel.cta_tile_k, k["BLOCK_K"]),
        (warps, k["num_warps"]),
    ]
    doublings = sum(abs(math.log2(a / float(b or 1))) for a, b in pairs)
    return doublings, abs(kernel.stages - int(k["num_stages"] or 1))


def gemm_geometry(problem: Problem) -> MatmulGeometry:
    """The geometry of a table that `is_gemm_table` let through."""
    shape = operation_geometry(problem)
    assert isinstance(shape, MatmulGeometry)
    return shape


def operand_tensors(problem: Problem) -> list[Any]:
    """The tensors of a problem."""
    return [a for a in problem.arguments if a.kind == "tensor"]


def is_gemm_table(table: Table) -> bool:
    """Whether a table is of a GEMM and has templates to choose from."""
    split = ChoicesOfTable.of(table)
    ran = sum(m.ok for m in split.templates.values())
    shape = operation_geometry(table.problem)
    return isinstance(shape, MatmulGeometry) and isinstance(shape.left, OperandLayout) and ran > 1


def compare(
    tables: Sequence[Table], orders: dict[str, Order], choices: Sequence[int] = CHOICES
) -> dict[str, dict[str, dict[str, float]]]:
    """Geometric-mean regret by side (`with vendor`, `templates`), name and number of choices."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for side in ("with vendor", "templates"):
        named: dict[str, dict[str, float]] = {}
        for name, count in itertools.product([*orders, "random"], choices):
            each = [
                _regret_of_order(table, orders.get(name), count, side == "with vendor") for table in tables
            ]
            named.setdefault(name, {})[str(count)] = float(np.expm1(np.mean(np.log1p(each))))
        found[side] = named
    return found


def _regret_of_order(table: Table, order: Order | None, count: int, with_vendor: bool) -> float:
    split = ChoicesOfTable.of(table)
    if order is None:
        return random_regret(split, count, with_vendor=with_vendor)
    return split.regret(order(table, list(split.templates), count), with_vendor=with_vendor)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--choices", type=int, nargs="+", default=list(CHOICES))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--nvmmh", type=Path, help="where nvidia-matmul-heuristics was unpacked")
    arguments = parser.parse_args()
    tables = [t for path in arguments.tables for t in read_tables(path) if is_gemm_table(t)]
    if not tables:
        parser.error("none of these tables is of a GEMM with templates")
    surrogate = default()
    orders: dict[str, Order] = {
        "first": inductor_order,
        "autoheuristic": autoheuristic,
        "forecast": forecast(surrogate),
        "rounds": sequential_forecast(surrogate),
    }
    try:
        orders["nvmmh"] = MatmulHeuristics(arguments.nvmmh)
    except ImportError as error:
        print(f"without nvmmh: {error}", file=sys.stderr)
    found = compare(tables, orders, arguments.choices)
    for side, named in found.items():
        print(f"{side}: geometric-mean regret of {len(tables)} problems by number of compiled choices")
        for name, figures in named.items():
            print(f"  {name:14}", *(f"{k:>3}: {regret:7.1%}" for k, regret in figures.items()))
    if arguments.json is not None:
        head = {"environment": environment(), "problems": len(tables)}
        head["surrogate"] = f"{surrogate.name}/{surrogate.version}"
        arguments.json.write_text(json.dumps({**head, "regret": found}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
