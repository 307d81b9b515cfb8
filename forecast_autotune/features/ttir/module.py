"""A TTIR text, parsed once: a kernel that is called at another shape is read from the same text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from forecast_autotune.features.ttir import tensors
from forecast_autotune.features.ttir.parser import Op, TtirFunction, parse_ttir


@dataclass(frozen=True, eq=False)
class TtirModule:
    """The functions of a text, and those facts that are the same for all arguments and grids."""

    functions: Mapping[str, TtirFunction]
    _chains: dict[int, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def kernel(self) -> TtirFunction:
        """The function that is launched."""
        return next((f for f in self.functions.values() if f.public), next(iter(self.functions.values())))

    @cached_property
    def live_bytes(self) -> float:
        """See `tensors.live_bytes`."""
        return tensors.live_bytes(self.kernel.blocks)

    @cached_property
    def ops(self) -> int:
        """Operations of all functions."""
        blocks = [block for function in self.functions.values() for block in function.blocks]
        return sum(1 for _ in tensors.walk_ops(blocks))

    @cached_property
    def staged_loops(self) -> int:
        """Loops that the number of pipeline stages may change: with a dot in them, or a store through a descriptor."""
        blocks = [block for function in self.functions.values() for block in function.blocks]
        loops = [op for op in tensors.walk_ops(blocks) if op.name in ("scf.for", "scf.while")]
        bodies = (tensors.walk_ops(list(tensors.nested_blocks(loop))) for loop in loops)
        return sum(any(map(_is_staged, body)) for body in bodies)

    def longest_chains(self, loop: Op | None) -> tuple[int, int]:
        """Stages and loads on the longest path through a loop's body; of the kernel without one."""
        if id(loop) not in self._chains:
            blocks = self.kernel.blocks if loop is None else [b for region in loop.regions for b in region]
            found = tensors.serial_chain(blocks), tensors.serial_chain(blocks, tensors.LOADS)
            self._chains[id(loop)] = found
        return self._chains[id(loop)]


@lru_cache(maxsize=128)  # of some 80 kB each
def cached_module(text: str) -> TtirModule:
    """The module of a text; whoever reads it changes nothing in it. Raises `FeatureError` like `parse_ttir`."""
    return TtirModule(parse_ttir(text))


def _is_staged(op: Op) -> bool:
    return op.name in tensors.DOTS or (op.name not in tensors.LOADS and "descriptor_" in op.name)
