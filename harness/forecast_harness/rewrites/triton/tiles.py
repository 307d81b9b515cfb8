"""Sums for two-dimensional blocks: which lanes run along rows, which along columns, and what is wrapped."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from forecast_harness.rewrites.triton.affine import NotProvable, Reader, Sum, room_of


@dataclass(frozen=True)
class Wrapped:
    """Offsets that are taken modulo a size."""

    offsets: Sum
    size: Sum


@dataclass
class Tiles(Reader):
    """Reads addresses of two-dimensional blocks: lanes know their axis, and wrapped offsets are kept."""

    wraps: dict[str, Wrapped] = field(default_factory=dict)
    """Offsets taken modulo a size, by the atom that stands for them."""

    def outside(self) -> Tiles:
        """A reader of what is assigned before the loop."""
        return Tiles(self.facts, self.varying, self.line, wraps=self.wraps)

    def sum(self, node: ast.expr) -> Sum:
        """As `Reader.sum`, with `arange<B>@0` for lanes along rows and `@1` along columns."""
        if isinstance(node, ast.Subscript):
            return along(self.sum(node.value), axis_of(node.slice))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            inner = self.sum(node.left)
            if lanes(inner):
                atom = f"wrap<{ast.unparse(node)}>"
                self.wraps[atom] = Wrapped(inner, self.sum(node.right))
                return Sum.of(atom)
        return super().sum(node)


def axis_of(index: ast.expr) -> int:
    """The axis along which `[:, None]` (0) or `[None, :]` (1) spreads a vector. Raises `NotProvable`."""
    parts = index.elts if isinstance(index, ast.Tuple) else []
    new = [isinstance(p, ast.Constant) and p.value is None for p in parts]
    if len(parts) != 2 or sum(new) != 1 or not any(isinstance(p, ast.Slice) for p in parts):
        raise NotProvable(f"[{ast.unparse(index)}] does not spread a vector over a tile")
    return 1 if new[0] else 0


def lanes(found: Sum) -> list[str]:
    """Atoms that differ from element to element."""
    return sorted(a for a in found.atoms() if a.startswith(("arange<", "wrap<")))


def along(found: Sum, axis: int) -> Sum:
    """A vector's sum, spread along an axis. Raises `NotProvable` for what has two dimensions already."""
    if any("@" in a.rpartition(">")[2] for a in lanes(found)):
        raise NotProvable("a tile is spread again")
    spread = {a: f"{a}@{axis}" for a in lanes(found)}
    return Sum({tuple(sorted(spread.get(a, a) for a in p)): t for p, t in found.terms.items()})


def spread_room(reader: Tiles, test: ast.expr) -> Sum:
    """`room_of` for a comparison of a tile, or of a vector that is spread afterwards."""
    if isinstance(test, ast.Subscript):
        return along(room_of(reader, test.value), axis_of(test.slice))
    return room_of(reader, test)
