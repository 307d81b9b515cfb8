"""Sums for two-dimensional blocks: which lanes run along rows, which along columns, and what is wrapped."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from forecast_harness.authors.triton.analysis.polynomials import (
    NotProvable,
    Polynomial,
    PolynomialReader,
    positive_form,
)


@dataclass(frozen=True)
class WrappedOffsets:
    """Offsets that are taken modulo a size."""

    offsets: Polynomial
    size: Polynomial


@dataclass
class TileReader(PolynomialReader):
    """Reads addresses of two-dimensional blocks: lanes know their axis, and wrapped offsets are kept."""

    wraps: dict[str, WrappedOffsets] = field(default_factory=dict)
    """Offsets taken modulo a size, by the atom that stands for them."""

    def outside(self) -> TileReader:
        """A reader of what is assigned before the loop."""
        return TileReader(self.facts, self.varying, self.line, wraps=self.wraps)

    def polynomial(self, node: ast.expr) -> Polynomial:
        """As `PolynomialReader.polynomial`, with `arange<B>@0` for lanes along rows and `@1` along columns."""
        if isinstance(node, ast.Subscript):
            return spread_along(self.polynomial(node.value), spread_axis(node.slice))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            inner = self.polynomial(node.left)
            if lane_atoms(inner):
                atom = f"wrap<{ast.unparse(node)}>"
                self.wraps[atom] = WrappedOffsets(inner, self.polynomial(node.right))
                return Polynomial.of(atom)
        return super().polynomial(node)


def spread_axis(index: ast.expr) -> int:
    """The axis along which `[:, None]` (0) or `[None, :]` (1) spreads a vector. Raises `NotProvable`."""
    parts = index.elts if isinstance(index, ast.Tuple) else []
    new = [isinstance(p, ast.Constant) and p.value is None for p in parts]
    if len(parts) != 2 or sum(new) != 1 or not any(isinstance(p, ast.Slice) for p in parts):
        raise NotProvable(f"[{ast.unparse(index)}] does not spread a vector over a tile")
    return 1 if new[0] else 0


def lane_atoms(found: Polynomial) -> list[str]:
    """Atoms that differ from element to element."""
    return sorted(a for a in found.atoms() if a.startswith(("arange<", "wrap<")))


def spread_along(found: Polynomial, axis: int) -> Polynomial:
    """A vector's sum, spread along an axis. Raises `NotProvable` for what has two dimensions already."""
    if any("@" in a.rpartition(">")[2] for a in lane_atoms(found)):
        raise NotProvable("a tile is spread again")
    spread = {a: f"{a}@{axis}" for a in lane_atoms(found)}
    return Polynomial({tuple(sorted(spread.get(a, a) for a in p)): t for p, t in found.terms.items()})


def spread_positive_form(reader: TileReader, test: ast.expr) -> Polynomial:
    """`positive_form` for a comparison of a tile, or of a vector that is spread afterwards."""
    if isinstance(test, ast.Subscript):
        return spread_along(positive_form(reader, test.value), spread_axis(test.slice))
    return positive_form(reader, test)
