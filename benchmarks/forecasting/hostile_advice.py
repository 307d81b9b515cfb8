"""Claim: wrong and hostile advice costs no crash, no hang and no regret beyond noise.

    python -m benchmarks.forecasting.hostile_advice --models FOLDER --out RESULT.json [--functions 200]

Recorded advice on kernels of the corpus is spoilt: turned upside down (the slowest called fastest), made of noise,
handed to another kernel's place, or mutated (numbers scaled, operators, comparisons and functions exchanged in
its syntax tree). Each spoilt function that is still within the language is followed in replays of problems of its
kernel by the default policy, and compared with no advice and with the advice as it was. The learned surrogate was
fitted without the kernel's family. Replays of recorded H200 timings on a CPU; 95 % intervals over kernels.
"""

from __future__ import annotations

import ast
import random
import sys
import time
import warnings
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib import result_files
from benchmarks.lib.recorded_advice import (
    FamilyModels,
    FollowingAdvice,
    advice_by_source,
    advised_tables,
    decision_figures,
    kernel_label,
    paired_figures,
)
from benchmarks.lib.result_files import say
from forecast_autotune.errors import RecordError
from forecast_autotune.llm.advice.language import parse_cost_function
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.advised import AdviceWeights
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_train.splits import family_of

KINDS = ("inverted", "noise", "misplaced", "mutated", "mutated")
_NOISE = """
def cost(config, args, device, launch):
    mark = config.num_warps * 7.13 + config.num_stages * 3.71 + launch.programs * 0.3717
    return 2 ** (({seed} + mark * 12.9898) % 6)
"""
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Mult,
    ast.Mult: ast.Add,
    ast.Sub: ast.Add,
    ast.Div: ast.Mult,
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
}
_NAMES = {"min": "max", "max": "min", "ceil": "floor", "log2": "exp2", "smooth_max": "min"}


class ReturnInverter(ast.NodeTransformer):
    """Has `cost` return the inverse of what it returned."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Only `cost`: its helpers stay as they are."""
        return self.generic_visit(node) if node.name == "cost" else node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        """1000 over the value."""
        assert node.value is not None
        node.value = ast.BinOp(ast.Constant(1000.0), ast.Div(), node.value)
        return node


class SyntaxMutator(ast.NodeTransformer):
    """Changes a share of the numbers, operators and functions of a module."""

    def __init__(self, generator: random.Random, share: float) -> None:
        self.generator, self.share = generator, share

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Change this node, perhaps, and go on below it."""
        super().generic_visit(node)
        if self.generator.random() > self.share:
            return node
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return ast.copy_location(ast.Constant(node.value * 10.0 ** self.generator.uniform(-2, 2)), node)
        if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _SWAPS:
            node.op = _SWAPS[type(node.op)]()  # type: ignore[assignment]
        elif isinstance(node, ast.Compare):
            node.ops = [_SWAPS.get(type(op), type(op))() for op in node.ops]  # type: ignore[misc]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            node.id = _NAMES.get(node.id, node.id)
        return node


def spoil(text: str, kind: str, generator: random.Random) -> str:
    """A spoilt cost function; `misplaced` ones are chosen by the caller."""
    if kind == "inverted":
        return ast.unparse(ast.fix_missing_locations(ReturnInverter().visit(ast.parse(text))))
    if kind == "noise":
        return _NOISE.format(seed=round(generator.uniform(0, 100), 3))
    if kind == "mutated":
        tree = SyntaxMutator(generator, generator.choice((0.02, 0.05, 0.15))).visit(ast.parse(text))
        return ast.unparse(ast.fix_missing_locations(tree))
    return text


def spoilt_replays(options: Namespace, report: result_files.ResultFile) -> dict[str, Any]:
    """Every spoilt function on a problem of its kernel; the summary."""
    advice = advice_by_source()
    tables = advised_tables(advice)
    generator = random.Random(options.seed)
    models = FamilyModels(options.models, sorted({family_of(t.problem) for t in tables}))
    settings, sources = Settings.from_environment(), sorted(advice)
    rows: list[dict[str, Any]] = []
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    for number in range(options.functions):
        table, kind = generator.choice(tables), KINDS[number % len(KINDS)]
        own = advice[table.problem.kernel.source_sha256]
        given = advice[generator.choice(sources)] if kind == "misplaced" else own
        text = spoil(given.text, kind, generator)
        try:
            parse_cost_function(text)
        except RecordError:
            outcomes[f"{kind}: refused"] += 1
            continue
        base: Any = models.without(family_of(table.problem))
        spoilt = replace(own, text=text, others=())
        label = f"{number} {table.problem.extra['label']}"
        arms: dict[str, Surrogate] = {
            "learned": base,
            "advice": _arm(base, own),
            "spoilt": _arm(base, spoilt),
        }
        for name, arm in arms.items():
            begin = time.perf_counter()
            try:
                result = decision_figures(table, arm, settings)
            except Exception as error:  # what is looked for
                report.add("crashes", {"problem": label, "kind": kind, "arm": name, "error": repr(error)})
                outcomes["crashed"] += 1
                break
            slowest = max(slowest, time.perf_counter() - begin) if name == "spoilt" else slowest
            rows.append(
                {"kernel": kernel_label(table), "problem": label, "kind": kind, "arm": name, **result}
            )
        else:
            outcomes[f"{kind}: followed"] += 1
            report.add("rows", rows[-3:])
        if number % 20 == 19:
            say(f"{number + 1} of {options.functions}")
    by_kind = {
        kind: paired_figures([r for r in rows if r["kind"] == kind])["spoilt"]
        for kind in dict.fromkeys(KINDS)
    }
    return {
        "functions": options.functions,
        "outcomes": dict(sorted(outcomes.items())),
        "crashes": outcomes["crashed"],
        "slowest_replay_s": round(slowest, 2),
        **paired_figures(rows),
        "by_kind": by_kind,
    }


def _arm(base: Any, advice: Advice) -> FollowingAdvice:
    return FollowingAdvice(base, {advice.source_sha256: advice}, AdviceWeights())


def main() -> int:
    command_line = result_files.parser(__doc__)
    command_line.add_argument(
        "--models", type=Path, required=True, help="learned surrogates without a family each"
    )
    command_line.add_argument("--functions", type=int, default=200)
    command_line.add_argument("--seed", type=int, default=0)
    command_line.set_defaults(stub_only=True)
    options = result_files.parse_arguments(command_line)
    warnings.simplefilter("ignore")
    report = result_files.ResultFile(options, "hostile_advice", seed=options.seed)
    report.finish(spoilt_replays(options, report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
