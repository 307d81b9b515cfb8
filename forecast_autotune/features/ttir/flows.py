"""Where what a kernel loads from its tensors goes: into dots, and into addresses or the course of the program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from forecast_autotune.features.ttir.extraction import cached_module
from forecast_autotune.features.ttir.parser import Block, FeatureError, Op
from forecast_autotune.features.ttir.tensors import ATOMICS, DOTS, LOADS, REGION_FUNCTIONS, STORES
from forecast_autotune.records import Argument

_NONE: frozenset[tuple[str, str]] = frozenset()
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


@lru_cache(maxsize=128)
def _flows(text: str, tensors: tuple[str, ...]) -> TensorFlows:
    kernel = cached_module(text).kernel
    kinds = zip(kernel.blocks[0].arguments, kernel.blocks[0].types, strict=False)
    places = [name for name, type_ in kinds if type_.kind in ("pointer", "block")]
    if len(places) != len(tensors):
        raise FeatureError(f"the TTIR has {len(places)} pointers, the call {len(tensors)} tensors")
    walk = _Walk({place: frozenset((("at", name),)) for place, name in zip(places, tensors, strict=True)})
    walk.region(kernel.blocks)
    steering, grown = walk.steering, True
    while grown:  # what is stored where the program's course is read from steers it, too
        more = {name for target, name in walk.stored if target in steering} - steering
        steering, grown = steering | more, bool(more)
    return TensorFlows(*map(frozenset, (walk.dots, steering, walk.written, walk.read)))


def tensor_flows(text: str, arguments: Sequence[Argument]) -> TensorFlows:
    """The flows of a kernel's TTIR; `arguments` are the call's, in the kernel's order.

    Raises `FeatureError` where that cannot be told: functions that are not inlined, jumps, text of another release.
    """
    return _flows(text, tuple(a.name for a in arguments if a.kind == "tensor"))


@dataclass
class _Walk:
    """One pass in program order; loops are walked until nothing more is carried around them."""

    values: dict[str, frozenset[tuple[str, str]]]
    """By value: what it depends on, ("at", name) for a tensor's address and ("of", name) for its contents."""
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

    def _named(self, kind: str, values: Iterable[str]) -> set[str]:
        """The tensors whose addresses or contents these values depend on."""
        return {name for value in values for how, name in self.values.get(value, _NONE) if how == kind}

    def _join(self, targets: Iterable[str], sources: Iterable[str]) -> bool:
        """Let each target be its source, too; returns whether one may be more than before."""
        grown = False
        for target, source in zip(targets, sources, strict=False):
            before = self.values.get(target, _NONE)
            self.values[target] = before | self.values.get(source, _NONE)
            grown = grown or self.values[target] != before
        return grown

    def _op(self, op: Op) -> None:
        for result in op.results:  # another region may have had a value of this name
            self.values.pop(result, None)
        if op.regions and op.name not in REGION_FUNCTIONS:
            self.steering |= self._named("of", op.operands)
            self._loop(op) if op.name in ("scf.for", "scf.while") else self._branch(op)
            return
        if op.name in ("tt.call", "llvm.call") or op.name.startswith("cf."):
            raise FeatureError(f"{op.name} is not followed")
        flow = _NONE.union(*(self.values.get(name, _NONE) for name in op.operands))
        if op.name in LOADS | STORES | ATOMICS:
            into = self._named("at", op.operands[:1])
            # By pointers: address, mask and what there is without it; or address, value and mask.
            value = op.operands[2:] if op.name == "tt.load" else op.operands[1:2]
            value = [] if "descriptor" in op.name else value
            self.steering |= self._named("of", (name for name in op.operands if name not in value))
            if op.name in LOADS | ATOMICS:
                self.read |= into
                flow = frozenset(("of", name) for name in into | self._named("of", value))
            if op.name not in LOADS:
                self.written |= into
                self.stored |= {(target, n) for target in into for n in self._named("of", op.operands[1:])}
        elif op.name in _ASKED or op.name in _INDEXED:
            self.steering |= self._named("of", op.operands[op.name in _INDEXED :])
        elif op.name in DOTS:
            self.dots |= self._named("of", op.operands[:2] if op.name == "tt.dot" else op.operands[:-1])
        self.values |= dict.fromkeys(op.results, flow)

    def _branch(self, op: Op) -> None:
        for region in op.regions:
            self._join(op.results, self.region(region) if region[0].ops else ())

    def _loop(self, op: Op) -> None:
        is_for = op.name == "scf.for"
        arguments = op.regions[0][0].arguments
        for name in arguments:
            self.values.pop(name, None)
        iter_args = arguments[1:] if is_for else arguments
        self._join(arguments[:1] * 3 if is_for else (), op.operands)
        self._join(iter_args, op.inits)
        grown = True
        while grown:
            yields = self.region(op.regions[0])
            if not is_for:  # a condition, and the arguments of the second region
                self.steering |= self._named("of", yields[:1])
                self._join(op.results, yields[1:])
                self._join(op.regions[1][0].arguments, yields[1:])
                yields = self.region(op.regions[1])
            grown = self._join(iter_args, yields)
        self._join(op.results if is_for else (), iter_args)
