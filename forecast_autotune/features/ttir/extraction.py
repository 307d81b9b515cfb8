"""Facts about a kernel config without compiling it: what one program does, read from its TTIR text.

TTIR is Triton's first stage: it exists after a few milliseconds, depends on the constexprs and on
how the arguments specialise but not on warps and stages, and shows loads, dots, loops and tile
shapes. It does not show data layouts, so bank conflicts and layout conversions are invisible here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from forecast_autotune.features.devices import COMPILE_OPTIONS
from forecast_autotune.features.ttir import coalescing, tensors
from forecast_autotune.features.ttir.facts import TtirFacts
from forecast_autotune.features.ttir.integers import ASSUMED_EXTENT, IntegerAnalysis
from forecast_autotune.features.ttir.parser import Block, FeatureError, Op, TtirFunction, parse_ttir
from forecast_autotune.features.ttir.scalars import Environment, Value, bind_call, bind_parameters, lift, mean
from forecast_autotune.features.ttir.shared_memory import AccessPattern, chained, shared_memory_use

if TYPE_CHECKING:
    from forecast_autotune.records import Argument, Candidate, Scalar

__all__ = [
    "ASSUMED_EXTENT",
    "DEFAULT_TRIPS",
    "FeatureError",
    "TtirFacts",
    "assignment_key",
    "assignment_of",
    "extract_facts",
]

DEFAULT_TRIPS = 16
"""Iterations assumed for a loop about whose bounds nothing is known."""
_MAX_CALL_DEPTH = 8

_EXACT_MATH = frozenset(
    f"math.{name}"
    for name in (
        *("absf", "absi", "fma", "floor", "ceil", "round", "roundeven", "trunc"),
        *("copysign", "ctpop", "ctlz", "cttz"),
    )
)
_SPECIAL = frozenset(
    ("arith.divf", "arith.remf", "tt.precise_sqrt", "tt.precise_divf", "tt.extern_elementwise")
)
_ELEMENTWISE = frozenset(
    ("tt.addptr", "tt.clampf", "tt.fp_to_fp", "tt.int_to_ptr", "tt.ptr_to_int", "tt.mulhiui")
) | {"tt.elementwise_inline_asm"}
_FREE = frozenset(("arith.constant", "arith.bitcast"))
_CONVERSIONS = frozenset(("tt.trans", "tt.reshape", "tt.join", "tt.split", "tt.cat", "tt.gather"))


def assignment_key(kwargs: Mapping[str, Scalar]) -> str:
    """The canonical name of a constexpr assignment: `A=1,B=2`, sorted; without options of the compiler."""
    return ",".join(f"{name}={kwargs[name]}" for name in sorted(kwargs) if name not in COMPILE_OPTIONS)


def assignment_of(candidate: Candidate) -> str:
    """The name of a candidate's TTIR: its `assignment_key`, for another source after its name and a `|`."""
    key = assignment_key(dict(candidate.config.kwargs))
    return key if candidate.is_base_variant else f"{candidate.variant}|{key}"


def extract_facts(text: str, arguments: Sequence[Argument], grid: tuple[int, ...] | None) -> TtirFacts:
    """Read the facts of one program from TTIR text.

    `arguments` are the call's arguments in the kernel's order (values of integers matter), `grid`
    the launch grid or None when it is unknown. Bounds that depend on the program id count with
    their mean over the grid; a branch on one counts with the share of programs that take it; a
    branch on unknown data counts half. Raises `FeatureError` for text that is not a TTIR module.
    """
    try:
        module = cached_module(text)
        kernel = module.kernel
        walk = _FactCollector(functions=module.functions, grid=grid)
        walk.bind_parameters(kernel, bind_parameters(kernel, arguments))
        walk.function(kernel, {}, 1, 0)
        return walk.facts(module)
    except FeatureError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        # Text of another release, or cut: one candidate without facts, not a surrogate that fails.
        raise FeatureError(f"an operation is not as it should be in TTIR: {error!r}") from error


@dataclass(frozen=True)
class _LoopProfile:
    """A loop of the mean program."""

    op: Op
    entries: float
    iterations: float
    """Over all entries."""
    depth: int
    innermost: bool


@dataclass(kw_only=True)
class _FactCollector(IntegerAnalysis):
    """One pass over a kernel in program order, adding up what each operation costs."""

    functions: Mapping[str, TtirFunction]
    total: dict[str, float] = field(default_factory=dict)
    dots: dict[tuple[int, int, int, int], float] = field(default_factory=dict)
    flops: dict[int, float] = field(default_factory=dict)
    """FLOPs of each dot, by `id` of the operation."""
    loops: list[_LoopProfile] = field(default_factory=list)
    contiguous_bytes: float = 0.0
    masked_bytes: float = 0.0
    accesses: dict[int, AccessPattern] = field(default_factory=dict)
    touches: dict[coalescing.TileAccess, float] = field(default_factory=dict)
    """Count of each access in the mean program."""
    reductions: dict[tuple[tuple[int, ...], int], float] = field(default_factory=dict)
    """Count of each kind of reduction in the mean program, see `coalescing.warp_exchange_counts`."""
    largest: int = 1
    unknown: int = 0
    calls: int = 0

    def add(self, name: str, amount: float) -> None:
        self.total[name] = self.total.get(name, 0.0) + amount

    def function(self, function: TtirFunction, values: Environment, weight: Value, depth: int) -> list[str]:
        """Walk a function's blocks; returns the names of its results."""
        self.values.update(values)
        return self.region(function.blocks, weight, depth)

    def region(self, blocks: Sequence[Block], weight: Value, depth: int) -> list[str]:
        """Walk blocks, following early exits; returns the operands of the last terminator."""
        share: dict[str, Value] = {blocks[0].label: weight} if blocks else {}
        last: list[str] = []
        for block in blocks:
            here = share.get(block.label, 0)
            scale = mean(here)
            for op in block.ops:
                self.op(op, here, scale, depth)
            last = block.ops[-1].operands if block.ops else []
            if block.ops and block.ops[-1].name in ("cf.br", "cf.cond_br"):
                self._branch(block.ops[-1], here, share, blocks)
        return last

    def _branch(self, op: Op, here: Value, share: dict[str, Value], blocks: Sequence[Block]) -> None:
        targets = [word.split("(")[0].rstrip(",") for word in op.text.split() if word.startswith("^")]
        weights: list[Value] = [here]
        if op.name == "cf.cond_br" and len(targets) == 2:
            condition = self.values.get(op.operands[0])
            if condition is not None:
                weights = list(_split_weight(here, condition))
            else:
                # `if done: return` on unknown data: the branch with work to do is the usual one.
                by_label = {block.label: block for block in blocks}
                empty = [t in by_label and len(by_label[t].ops) <= 1 for t in targets]
                parts = (0.5, 0.5) if empty[0] == empty[1] else (float(empty[1]), float(empty[0]))
                weights = [lift(lambda w, part=part: w * part, here) for part in parts]
        for target, weight in zip(targets, weights, strict=False):
            share[target] = lift(lambda a, b: a + b, share.get(target, 0), weight)

    def op(self, op: Op, weight: Value, scale: float, depth: int) -> None:
        """Count one operation that runs `scale` times in the mean program."""
        name = op.name
        for type_ in op.outputs:
            if type_.elements > self.largest:
                self.largest = type_.elements
        for result in op.results:
            self.forget(result)
        if op.regions and name not in tensors.REGION_FUNCTIONS:
            self._nested(op, weight, depth)
            return
        if len(op.outputs) == 1 and op.outputs[0].kind in ("int", "pointer"):
            self.propagate(op)
        if name in tensors.LOADS:
            self._access(op, "load", op.outputs[0].nbytes, scale)
        elif name in tensors.STORES:
            value = op.inputs[-1] if len(op.inputs) > 1 else op.inputs[0].loaded_type()
            self._access(op, "store", value.nbytes, scale)
        elif name in tensors.DOTS:
            self._dot(op, scale)
        elif name == "tt.call":
            self._call(op, weight, depth)
        elif name == "tt.histogram":
            self.add("reduce_elements", op.inputs[0].elements * scale)
        elif name in tensors.REDUCTIONS:
            self.add(f"{name[3:]}_elements", op.inputs[0].elements * scale)
            key = tensors.reduction_axis(op)
            self.reductions[key] = self.reductions.get(key, 0.0) + len(op.inputs) * scale
        elif name in tensors.ATOMICS:
            self._atomic(op, scale)
        elif name in _CONVERSIONS:
            self.add("conversions", max(t.elements for t in op.inputs + op.outputs) * scale)
        elif op.outputs and op.outputs[0].tensor:
            self._arithmetic(op, scale)

    def _access(self, op: Op, what: str, nbytes: float, scale: float) -> None:
        self.add(f"{what}_bytes", nbytes * scale)
        self.add(f"{what}_ops", scale)
        pointer = op.inputs[0] if op.inputs else op.outputs[0]
        axis: int | None
        if pointer.kind == "block":
            tile = pointer.loaded_type().shape or (1,)
            run, axis, is_masked = tile[-1], len(tile) - 1, "boundaryCheck" in op.text
        else:
            run, axis = tensors.contiguous_run(pointer.shape, self.strides.get(op.operands[0]))
            is_masked = len(op.operands) > (1 if what == "load" else 2)
        mask = op.operands[-1 if what == "store" else 1] if is_masked and pointer.kind == "pointer" else ""
        self.add("inactive_bytes", (1.0 - mean(self.active.get(mask, 1.0))) * nbytes * scale)
        vector = wide = run
        if pointer.kind == "pointer" and pointer.tensor:
            even = self.strides.get(mask) or (coalescing.UNKNOWN_MASK_STRIDE,) * len(pointer.shape)
            touch = coalescing.tile_access(
                pointer,
                self.strides.get(op.operands[0]),
                (run, axis),
                self.divisors.get(op.operands[0], 1),
                even if is_masked else None,
                what == "store",
            )
            self.touches[touch] = self.touches.get(touch, 0.0) + scale
            vector, wide = touch.vector, touch.wide
        several = len(pointer.loaded_type().shape) > 1
        self.accesses[id(op)] = AccessPattern(run, axis if several else None, vector, wide)
        self.contiguous_bytes += run * nbytes * scale
        self.masked_bytes += nbytes * scale if is_masked else 0.0

    def _atomic(self, op: Op, scale: float) -> None:
        elements = op.inputs[-1 if "descriptor" in op.name else 0].elements
        self.add("atomic_elements", elements * scale)
        size = self.sizes.get(self.sources.get(op.operands[0], ""), 0)
        self.add("atomic_repeats", scale * min(1.0, elements / size) if size else 0.0)

    def _dot(self, op: Op, scale: float) -> None:
        left, out = op.inputs[0], op.outputs[0]
        *batch, m, n = out.shape
        k = left.shape[-1] * (2 if "lhs = e2m1" in op.text else 1)
        flops = 2.0 * math.prod(batch) * m * n * k * scale
        bits = 4 if "lhs = e2m1" in op.text else left.bits
        self.add("dot_flops", flops)
        self.add("dot_ops", scale)
        self.dots[m, n, k, bits] = self.dots.get((m, n, k, bits), 0.0) + flops
        self.flops[id(op)] = self.flops.get(id(op), 0.0) + flops

    def _arithmetic(self, op: Op, scale: float) -> None:
        name, elements = op.name, op.outputs[0].elements * scale
        if name == "tt.map_elementwise":
            body = [inner.name for inner in tensors.walk_ops([b for region in op.regions for b in region])]
            special = sum(map(_is_special, body))
            self.add("special", elements * special)
            self.add(
                "elementwise", elements * (sum(n.startswith(("arith.", "math.")) for n in body) - special)
            )
        elif _is_special(name):
            self.add("special", elements)
        elif name in _ELEMENTWISE or (name.startswith(("arith.", "math.")) and name not in _FREE):
            floating = any(type_.kind == "float" for type_ in op.inputs + op.outputs)
            self.add("elementwise" if floating and name != "tt.addptr" else "integer_ops", elements)

    def _call(self, op: Op, weight: Value, depth: int) -> None:
        callee = self.functions.get(op.text.partition("@")[2].partition("(")[0].strip('"'))
        if callee is None or self.calls >= _MAX_CALL_DEPTH:
            return
        renames = dict(zip(callee.blocks[0].arguments, op.operands, strict=False))
        inner = _FactCollector(
            functions=self.functions,
            grid=self.grid,
            total=self.total,
            strides=bind_call(self.strides, renames),
            dots=self.dots,
            flops=self.flops,
            loops=self.loops,
            guesses=bind_call(self.guesses, renames),
            undecided=bind_call(self.undecided, renames),
            accesses=self.accesses,
            touches=self.touches,
            reductions=self.reductions,
            starts=bind_call(self.starts, renames),
            active=bind_call(self.active, renames),
            rows=self.rows,
            sizes=self.sizes,
            sources=bind_call(self.sources, renames),
            divisors=bind_call(self.divisors, renames),
            calls=self.calls + 1,
        )
        outputs = inner.function(callee, bind_call(self.values, renames), weight, depth)
        for result, name in zip(op.results, outputs, strict=False):
            if name in inner.values:
                self.values[result] = inner.values[name]
            elif name in inner.guesses:
                self.guesses[result] = inner.guesses[name]
                if name in inner.undecided:
                    self.undecided[result] = inner.undecided[name]
        self.contiguous_bytes += inner.contiguous_bytes
        self.masked_bytes += inner.masked_bytes
        self.largest, self.unknown = max(self.largest, inner.largest), self.unknown + inner.unknown

    def _nested(self, op: Op, weight: Value, depth: int) -> None:
        if op.name in ("scf.for", "scf.while"):
            self._loop(op, weight, depth)
        elif op.name == "scf.if":
            self._if(op, weight, depth)
        else:
            for region in op.regions:
                self.region(region, weight, depth)

    def _if(self, op: Op, weight: Value, depth: int) -> None:
        test = self.values.get(op.operands[0])
        weights = (lift(lambda w: w / 2, weight),) * 2 if test is None else _split_weight(weight, test)
        results: list[list[Value | None]] = []
        for region, share in zip(op.regions, weights, strict=False):
            names = self.region(region, share, depth)
            results.append([self.values.get(name) for name in names])
        if test is None or len(results) < 2:
            return
        for result, a, b in zip(op.results, *results, strict=False):
            if a is not None and b is not None:
                self.values[result] = lift(lambda c, x, y: x if c else y, test, a, b)

    def _loop(self, op: Op, weight: Value, depth: int) -> None:
        body = op.regions[0][0] if op.name == "scf.for" else op.regions[-1][0]
        first = op.regions[0][0]
        iter_args = first.arguments[len(first.arguments) - len(op.inits) :]
        for name, init in zip(iter_args, op.inits, strict=False):
            self.forget(name)
            self.assume_initial(name, init)
            if op.name == "scf.while":
                self.divisors.pop(name, None)  # its increment is not searched for
        if op.name == "scf.for":
            self.forget(body.arguments[0])
            self.align(op, body, iter_args)
        trips = self.for_trips(op, body) if op.name == "scf.for" else self.while_trips(op)
        if trips is None or (not trips[1] and mean(trips[0]) <= 0):
            trips = DEFAULT_TRIPS, False
        count, certain = trips
        self.unknown += not certain and mean(weight) > 0
        inside = lift(lambda w, n: w * n, weight, count)
        loop_count = len(self.loops)
        for region in op.regions:
            self.region(region, inside, depth + 1)
        if mean(inside) > 0:
            self.loops.append(
                _LoopProfile(op, mean(weight), mean(inside), depth + 1, len(self.loops) == loop_count)
            )
        for result, init, name in zip(op.results, op.inits, iter_args, strict=False):
            if init in self.strides:
                self.strides[result] = self.strides[init]
            if name in self.divisors:
                self.divisors[result] = self.divisors[name]

    def facts(self, module: TtirModule) -> TtirFacts:
        """Sum up after the walk."""
        kernel = module.kernel
        total = dict(self.total)
        traffic = total.get("load_bytes", 0.0) + total.get("store_bytes", 0.0)
        flops = total.get("dot_flops", 0.0)
        shapes: dict[tuple[int, int, int], float] = {}
        for (m, n, k, _), part in self.dots.items():
            if flops:
                shapes[m, n, k] = shapes.get((m, n, k), 0.0) + part / flops
        busiest = max(
            self.loops, key=lambda loop: loop.iterations * len(loop.op.regions[-1][0].ops), default=None
        )
        chain, loads = module.longest_chains(busiest.op if busiest else None)
        innermost = [loop for loop in self.loops if loop.innermost]
        buffers = [result for loop in self.loops if (result := tensors.pipelined_bytes(loop.op)) is not None]
        dots = chained(kernel.blocks) if len(self.flops) > 1 else []
        heads = sorted(dots, key=lambda dot: self.flops.get(id(dot), 0.0))
        rows, columns = heads[-1].outputs[0].shape[-2:] if heads else (0, 0)
        return TtirFacts(
            **total,
            chained_flops=math.fsum(self.flops.get(id(dot), 0.0) for dot in heads),
            chained_rows=float(rows),
            chained_columns=float(columns),
            dot_input_bits=float(max(self.dots, key=lambda d: self.dots[d])[3]) if self.dots else 0.0,
            dot_shapes=tuple(
                (*shape, share) for shape, share in sorted(shapes.items(), key=lambda s: (-s[1], s[0]))
            ),
            pipelined_bytes=max((every for _, every in buffers), default=0.0),
            pipelined_dot_bytes=max((feeding for feeding, _ in buffers), default=0.0),
            largest_tile=float(self.largest),
            live_bytes=module.live_bytes,
            accumulator_bytes=max((_accumulator_bytes(loop.op) for loop in self.loops), default=0.0),
            loop_trips=max((loop.iterations for loop in self.loops), default=1.0),
            iterations=sum(loop.iterations for loop in innermost) if self.loops else 1.0,
            loop_entries=sum(loop.entries for loop in innermost) if self.loops else 1.0,
            loop_depth=max((loop.depth for loop in self.loops), default=0),
            serial_chain=float(chain),
            load_chain=float(loads),
            mean_contiguous=self.contiguous_bytes / traffic if traffic else 1.0,
            masked_share=self.masked_bytes / traffic if traffic else 0.0,
            staged_loops=module.staged_loops,
            unknown_trips=self.unknown,
            **vars(shared_memory_use(kernel.blocks, self.accesses)),
            **coalescing.access_counts(self.touches),
            **coalescing.warp_exchange_counts(self.reductions, self.touches),
            partial_bytes=coalescing.partial_bytes(self.touches),
            ops=module.ops,
        )


def _is_special(name: str) -> bool:
    return name in _SPECIAL or (name.startswith("math.") and name not in _EXACT_MATH)


def _split_weight(weight: Value, condition: Value) -> tuple[Value, Value]:
    """Divide a weight between the two targets of a branch whose condition is known per program."""
    share = lift(lambda w, c: w if c else 0, weight, condition)
    return share, lift(lambda w, t: w - t, weight, share)


def _accumulator_bytes(loop: Op) -> float:
    types = [t for t in loop.regions[-1][0].types if t.tensor]
    result = sum(t.nbytes for t in types if t.kind == "float")
    if any(t.kind == "int" for t in types):  # indices, or sums of integer dots
        dots = {
            op.outputs[0]
            for op in tensors.walk_ops(list(tensors.nested_blocks(loop)))
            if op.name in tensors.DOTS
        }
        result += sum(t.nbytes for t in types if t.kind == "int" and t in dots)
    return float(result)


@dataclass(frozen=True, eq=False)
class TtirModule:
    """The functions of a text, and its facts that do not depend on arguments and grids."""

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
            result = tensors.serial_chain(blocks), tensors.serial_chain(blocks, tensors.LOADS)
            self._chains[id(loop)] = result
        return self._chains[id(loop)]


@lru_cache(maxsize=128)  # of some 80 kB each
def cached_module(text: str) -> TtirModule:
    """The module of a text; readers change nothing in it. Raises `FeatureError` like `parse_ttir`."""
    return TtirModule(parse_ttir(text))


def _is_staged(op: Op) -> bool:
    return op.name in tensors.DOTS or (op.name not in tensors.LOADS and "descriptor_" in op.name)
