"""Where what a kernel loads from its tensors goes: into dots, and into addresses or the course of the program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from forecast_autotune.features.ttir.extraction import cached_module
from forecast_autotune.features.ttir.parser import Block, FeatureError, Op
from forecast_autotune.features.ttir.tensors import ATOMICS, DOTS, LOADS, REGION_FUNCTIONS, STORES
from forecast_autotune.records import Argument

_NONE: frozenset[str] = frozenset()
_ASKED = frozenset(("tt.assert", "tt.int_to_ptr", "scf.if", "scf.index_switch"))
"""Operations of which every operand steers the program."""
_INDEXED = frozenset(("tt.gather", "tt.histogram"))


@dataclass(frozen=True)
class TensorFlows:
    """Names of tensor arguments by where their contents go."""

    dots: frozenset[str]
    """Loads of them feed a dot, converted, scaled or not."""
    steering: frozenset[str]
    """Loads of them may change an address, a mask, a branch or a loop's end."""
    written: frozenset[str]
    read: frozenset[str]
    """Loaded, or updated by atomics."""


def tensor_flows(text: str, arguments: Sequence[Argument]) -> TensorFlows:
    """The flows of a kernel's TTIR; `arguments` are the call's, in the kernel's order.

    Raises `FeatureError` where that cannot be told: functions that are not inlined, jumps, text of another release.
    """
    return _flows(text, tuple(a.name for a in arguments if a.kind == "tensor"))


@lru_cache(maxsize=128)
def _flows(text: str, tensors: tuple[str, ...]) -> TensorFlows:
    block = cached_module(text).kernel.blocks[0]
    kinds = zip(block.arguments, block.types, strict=False)
    places = [name for name, type_ in kinds if type_.kind in ("pointer", "block")]
    if len(places) != len(tensors):
        raise FeatureError(f"the TTIR has {len(places)} pointers, the call {len(tensors)} tensors")
    walk = _Walk({place: frozenset((name,)) for place, name in zip(places, tensors, strict=True)})
    walk.region(cached_module(text).kernel.blocks)
    steering, grown = set(walk.steering), True
    while grown:  # what is stored where the program's course is read from steers it, too
        more = {name for target, name in walk.stored if target in steering} - steering
        steering, grown = steering | more, bool(more)
    return TensorFlows(*map(frozenset, (walk.dots, steering, walk.written, walk.read)))


@dataclass
class _Walk:
    """One pass in program order; loops are walked until nothing more is carried around them."""

    bases: dict[str, frozenset[str]]
    """By value: the tensors that it points into."""
    data: dict[str, frozenset[str]] = field(default_factory=dict)
    """By value: the tensors whose contents it depends on."""
    dots: set[str] = field(default_factory=set)
    steering: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    stored: set[tuple[str, str]] = field(default_factory=set)
    """Pairs: into the first, something of the second is stored."""

    def region(self, blocks: Sequence[Block]) -> list[str]:
        """Walk a region of one block; returns what its terminator hands on."""
        if len(blocks) != 1:
            raise FeatureError(f"{len(blocks)} blocks in a region: jumps are not followed")
        for op in blocks[0].ops:
            self._op(op)
        return blocks[0].ops[-1].operands if blocks[0].ops else []

    def _of(self, names: Iterable[str]) -> frozenset[str]:
        return _NONE.union(*(self.data.get(name, _NONE) for name in names))

    def _set(self, name: str, sources: Iterable[str]) -> bool:
        """Let a value be one of these; returns whether it may be more than before."""
        sources = list(sources)
        bases = _NONE.union(*(self.bases.get(s, _NONE) for s in sources)) | self.bases.get(name, _NONE)
        data = self._of(sources) | self.data.get(name, _NONE)
        grown = bases != self.bases.get(name, _NONE) or data != self.data.get(name, _NONE)
        self.bases[name], self.data[name] = bases, data
        return grown

    def _op(self, op: Op) -> None:
        for result in op.results:  # another region may have had a value of this name
            self.bases.pop(result, None)
            self.data.pop(result, None)
        if op.regions and op.name not in REGION_FUNCTIONS:
            self._branch_or_loop(op)
            return
        if op.name in ("tt.call", "llvm.call") or op.name.startswith("cf."):
            raise FeatureError(f"{op.name} is not followed")
        into, loaded = self.bases.get((op.operands or [""])[0], _NONE), _NONE
        if op.name in LOADS:
            # Of a load by pointers: address, mask, and the values where that is false.
            plain = op.name == "tt.load"
            self.steering |= self._of(op.operands[:2] if plain else op.operands)
            self.read |= into
            loaded = into | (self._of(op.operands[2:]) if plain else _NONE)
            self.data |= dict.fromkeys(op.results, loaded)
            return
        if op.name in STORES | ATOMICS:
            # Address, value, mask; descriptors have their value among the indices.
            steers = op.operands if "descriptor" in op.name else (op.operands[0], *op.operands[2:])
            self.steering |= self._of(steers)
            self.stored |= {(target, source) for target in into for source in self._of(op.operands[1:])}
            self.written |= into
            loaded = into if op.name in ATOMICS else _NONE
            self.read |= loaded
        elif op.name in _ASKED:
            self.steering |= self._of(op.operands)
        elif op.name in _INDEXED:
            self.steering |= self._of(op.operands[1:])
        elif op.name in DOTS:
            # The accumulator is the third operand, whether or not scales follow it.
            self.dots |= self._of((*op.operands[:2], *op.operands[3:]))
        for result in op.results:
            self._set(result, op.operands)
            self.data[result] |= loaded

    def _branch_or_loop(self, op: Op) -> None:
        self.steering |= self._of(op.operands)
        if op.name not in ("scf.for", "scf.while"):
            for region in op.regions:
                values = self.region(region) if region[0].ops else ()
                for result, value in zip(op.results, values, strict=False):
                    self._set(result, (value,))
            return
        first = op.regions[0][0]
        carried = first.arguments[1:] if op.name == "scf.for" else first.arguments
        for name in first.arguments:
            self.bases.pop(name, None)
            self.data.pop(name, None)
        if op.name == "scf.for":
            self.data[first.arguments[0]] = self._of(op.operands)
        for name, init in zip(carried, op.inits, strict=False):
            self._set(name, (init,))
        grown = True
        while grown:
            given = self.region(op.regions[0])
            if op.name == "scf.while":
                self.steering |= self._of(given[:1])
                given = self._after(op, given[1:])
            grown = any([self._set(name, (value,)) for name, value in zip(carried, given, strict=False)])
        for result, name in zip(op.results, carried if op.name == "scf.for" else (), strict=False):
            self._set(result, (name,))

    def _after(self, op: Op, given: Sequence[str]) -> list[str]:
        """The second region of an `scf.while`, which the condition hands values to; returns what it hands back."""
        for targets in (op.results, op.regions[1][0].arguments):
            for target, value in zip(targets, given, strict=False):
                self._set(target, (value,))
        return self.region(op.regions[1])
