"""The parts of shared memory that a TTIR function will keep, before warps and stages are known.

The rules are those of Triton's pipeliner and layout passes (3.4 to 3.9), checked against their allocations
for the benchmark kernels. `cost.shared_bytes` adds up the parts that a config keeps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from forecast_autotune.features.ttir.coalescing import COUNTED_WARPS
from forecast_autotune.features.ttir.facts import SharedMemoryUse
from forecast_autotune.features.ttir.parser import Block, Op, Type
from forecast_autotune.features.ttir.tensors import (
    ATOMICS,
    DOTS,
    LOADS,
    REDUCTIONS,
    STORES,
    nested_blocks,
    reduction_axis,
    walk_ops,
)

_VIEWS = frozenset(("tt.trans", "tt.reshape"))
_CASTS = frozenset(
    (
        *("arith.extf", "arith.truncf", "arith.sitofp", "arith.uitofp", "arith.fptosi", "arith.fptoui"),
        *("arith.extsi", "arith.extui", "arith.trunci", "arith.bitcast", "tt.fp_to_fp", "tt.bitcast"),
    )
)
_SPREADS = _VIEWS | {"tt.broadcast", "tt.expand_dims"}
_STAGES = re.compile(r"tt\.num_stages = (\d+)")
_SCALES = re.compile(r" scale (%[\w$.\-]+(?:#\d+)?)")
_ORDER = re.compile(r"array<i32: ([\d, ]+)>")
_ZERO = re.compile(r"dense<-?0(?:\.0+e\+00)?>|: *0\b")
_OPAQUE = frozenset(("tt.cat", "tt.descriptor_gather"))
"""Operations whose shared memory no rule here explains."""
_MIN_ASYNC_COPY_BITS = 32
"""The narrowest access that hardware copies into shared memory by itself."""


@dataclass(frozen=True)
class AccessPattern:
    """How one load or store walks through memory."""

    run: int
    """Elements that lie next to each other."""
    axis: int | None
    """The dimension of `run`; None when it cannot be seen, or for less than two dimensions."""
    vector: int = 1
    """Neighbouring elements that a thread moves at once, as alignment and mask allow."""
    wide: int = 1
    """Neighbouring elements that a thread would move without a mask: its layout is made for these."""


def shared_memory_use(blocks: Sequence[Block], accesses: Mapping[int, AccessPattern]) -> SharedMemoryUse:
    """The parts of a function's shared memory. `accesses` are by `id` of the operation."""
    every = list(walk_ops(blocks))
    makers = {result: op for op in every for result in op.results}
    loops = [op for op in every if op.name in ("scf.for", "scf.while")]
    inside: set[int] = set()
    busy: set[int] = set()
    fullest: set[int] = set()
    best: dict[str, float] = {}
    for loop in loops:
        body = list(walk_ops(list(nested_blocks(loop)), into_loops=False))
        inside |= {id(op) for op in body}
        value = _loop_parts(loop, body, makers, accesses)
        if _three_stage_bytes(value) > _three_stage_bytes(best):
            # A product's layout keeps each row within a warp: reductions next to it exchange nothing.
            best, fullest = value, {id(op) for op in body}
            busy = fullest if "streamed_bytes" in value else set()
    names = {op.name for op in every}
    tiles = _turned_tiles(every, accesses)
    straight = [op for op in every if op.name in DOTS and id(op) not in inside]
    flat = any("tt.flatten" in loop.text for loop in loops)
    # In a flattened loop the alignment of pointers is lost, but where descriptors were rewritten to 64-bit offsets.
    addresses = [makers.get(op.operands[0]) for op in every if op.name == "tt.load" and id(op) in fullest]
    loose = flat and any(
        a is not None and a.inputs[-1].bits != 64 for a in addresses if a and len(a.inputs) > 1
    )
    leading = {
        id(dot)
        for loop in loops
        for name in loop.inits
        for dot in _dots_behind(name, makers, elementwise=True)
    }
    once = [
        best.get("once_most_bytes", 0.0),
        *(_passing_bytes(*operand, makers) for op in straight for operand in _dot_inputs(op)),
    ]
    best["once_most_bytes"] = max(once)
    return SharedMemoryUse(
        **best,
        **_reduction_parts(every, busy),
        **_epilogue_parts(every, fullest | _beside(loops, fullest), accesses),
        **_passed_bytes(every, accesses, tiles),
        straight_dot_bytes=max((_operand_bytes(op) for op in straight), default=0.0),
        leading_dot_bytes=max((_operand_bytes(op) for op in straight if id(op) in leading), default=0.0),
        turned_bytes=max((math.prod(shape) * size for shape, size, *_, out in tiles if out), default=0.0),
        opaque=float(
            loose or any("tt.warp_specialize" in loop.text for loop in loops) or bool(_OPAQUE & names)
        ),
        flattened=float(flat),
    )


def _beside(loops: Sequence[Op], fullest: Set[int]) -> set[int]:
    """Operations around the fullest loop that run while it keeps its buffers.

    They are those of a loop that is flattened into it, and stores through descriptors, which end asynchronously.
    """
    result: set[int] = set()
    for loop in loops if len(loops) > 1 else ():
        inside = list(walk_ops(list(nested_blocks(loop))))
        if any(id(op) in fullest for op in inside):
            flat = "tt.flatten" in loop.text
            result |= {id(op) for op in inside if flat or (op.name in STORES and op.name != "tt.store")}
    return result


def _epilogue_parts(
    every: Sequence[Op], fullest: Set[int], accesses: Mapping[int, AccessPattern]
) -> dict[str, float]:
    """The parts for the largest tile that is computed in a dot's layout and stored in that of memory."""
    shapes = {op.outputs[0].shape for op in every if op.name in DOTS}
    best: dict[str, float] = {}
    most = atomic = 0.0
    for op in every if shapes else ():
        if op.name in ATOMICS and op.inputs and op.inputs[0].shape in shapes:
            atomic = max(atomic, op.inputs[0].elements * max(32, op.inputs[0].loaded_type().bits) / 8)
        if op.name not in STORES or not op.inputs:
            continue
        tile = op.inputs[-1] if len(op.inputs) > 1 else op.inputs[0].loaded_type()
        is_descriptor = op.name != "tt.store"
        if is_descriptor:
            tile = op.inputs[0].loaded_type()
        if tile.shape not in shapes or len(tile.shape) != 2 or tile.nbytes <= most:
            continue
        most, access = tile.nbytes, accesses.get(id(op))
        best = {
            "epilogue_rows": float(tile.shape[0]),
            "epilogue_columns": float(tile.shape[1]),
            "epilogue_bits": float(tile.bits),
            "epilogue_vector": float(access.wide if access is not None else 1),
            "epilogue_inside": float(id(op) in fullest),
            "copied_out": float(is_descriptor),
        }
    return {**best, "added_bytes": atomic}


_TurnedTile = tuple[tuple[int, ...], float, tuple[int, int], tuple[int, int], bool]


def _passed_bytes(
    every: Sequence[Op], accesses: Mapping[int, AccessPattern], tiles: Sequence[_TurnedTile]
) -> dict[str, float]:
    """Bytes of the largest exchange outside of dots, by threads of a warp and number of warps.

    A blocked layout gives neighbours to a thread as far as it accesses them at once, then to lanes, then to warps
    (Coalesce). Reductions and scans exchange elements that several warps share; a tile that changes its layout, all
    elements that are not in registers before and after. Where there are dots, their layouts decide: nothing is counted.
    """
    if any(op.name in DOTS for op in every):
        return {}
    patterns: dict[tuple[int, ...], AccessPattern] = {}
    for op in every:
        access = accesses.get(id(op))
        if access is not None and op.name in LOADS and op.outputs:
            shape = op.outputs[0].shape
            if shape not in patterns or access.wide > patterns[shape].wide:
                patterns[shape] = access
    stored_shapes = {op.inputs[0].shape for op in every if op.name in STORES and op.inputs}
    results: dict[str, float] = {}
    for lanes, name in ((32, "passed"), (64, "passed_wide")):
        for warps in COUNTED_WARPS:
            most = max((_turned_exchange(tile, lanes, warps) for tile in tiles), default=0.0)
            for op in every:
                if op.name in _EXCHANGES and op.inputs and len(shape := op.inputs[0].shape) in (1, 2):
                    most = max(most, _exchange(op, patterns.get(shape), stored_shapes, lanes, warps))
            results[f"{name}_{warps}"] = most
    return results


_EXCHANGES = frozenset(("tt.reduce", "tt.scan", "tt.gather", "tt.join", "tt.histogram"))


def _blocked_bits(
    shape: Sequence[int], first: int, vector: int, lanes: int, warps: int
) -> list[tuple[int, int, int]]:
    """(neighbours of a thread, lanes, warps) of each dimension as log2; `first` is the one of the neighbours."""
    elements = math.prod(shape)
    per_thread = min(vector, max(1, elements // (lanes * warps))).bit_length() - 1
    free = [lanes.bit_length() - 1, warps.bit_length() - 1]
    result = [(0, 0, 0)] * len(shape)
    for place in (first, *(n for n in reversed(range(len(shape))) if n != first)):
        size = shape[place].bit_length() - 1
        own = min(per_thread, size) if place == first else 0
        along = min(free[0], size - own)
        beside = min(free[1], size - own - along)
        free = [free[0] - along, free[1] - beside]
        result[place] = own, along, beside
    return result


def _exchange(
    op: Op, pattern: AccessPattern | None, stores: Set[tuple[int, ...]], lanes: int, warps: int
) -> float:
    source = op.inputs[0]
    shape, elements = source.shape, source.elements
    first = pattern.axis if pattern is not None and pattern.axis is not None else len(shape) - 1
    bits = _blocked_bits(shape, first, pattern.wide if pattern is not None else 1, lanes, warps)
    if op.name == "tt.histogram":
        return op.outputs[0].nbytes
    if op.name == "tt.join":
        many = elements >= 8 * lanes * warps
        return min(2.0 * source.nbytes, 32.0 * lanes * warps) if many and warps > 1 else 0.0
    axis = reduction_axis(op)[1]
    own, along, beside = bits[axis]
    if op.name == "tt.gather":
        # A warp that has whole rows looks them up by shuffles; other tiles are given to such warps, or written whole.
        nbytes = 32.0 * lanes * warps if len(shape) > 1 and axis == first else source.nbytes
        return (
            0.0
            if beside == 0 and (warps == 1 or 1 << along == lanes) and axis == first
            else min(source.nbytes, nbytes)
        )
    words = math.fsum(max(t.bits, 32) / 8 for t in op.inputs) * elements
    if op.name == "tt.scan":
        return words / (1 << (own + along)) if beside else 0.0
    # Where there are many results, those that are stored are spread over all threads again.
    results = words / shape[axis]
    if beside:
        return results * (1 << beside)
    return min(results, 4.0 * lanes * warps) if op.outputs[0].shape in stores and axis == first else 0.0


def _turned_tiles(every: Sequence[Op], accesses: Mapping[int, AccessPattern]) -> list[_TurnedTile]:
    """(shape, bytes of an element, (dimension, neighbours) before, and after, whether it is stored turned) of each
    tile that changes its layout: it is stored in another layout than it was loaded in, or meets a tile of another
    layout. All of a shape have the layout of the widest load, and are stored in no wider one than they are accessed in.
    """
    layout_of: dict[str, tuple[int, int]] = {}
    widest: dict[tuple[tuple[int, ...], int], int] = {}
    result: list[_TurnedTile] = []
    for op in every:
        access = accesses.get(id(op))
        here: tuple[int, int] | None = None
        if access is not None:
            shape = op.outputs[0].shape if op.outputs else op.inputs[0].loaded_type().shape
            axis = 0 if access.axis is None and len(shape) == 1 else access.axis
            here = None if axis is None else (axis, access.wide)
        if op.name in LOADS:
            if here is not None:
                widest[shape, here[0]] = max(here[1], widest.get((shape, here[0]), 0))
            if op.results and here is not None:
                layout_of[op.results[0]] = here
        elif op.name in STORES:
            before = layout_of.get(op.operands[1] if op.name == "tt.store" else op.operands[-1])
            if here is None:
                continue
            size = op.inputs[0].loaded_type().bits / 8
            if before is not None and before[0] != here[0]:
                result.append((shape, size, before, here, True))
            elif (width := widest.get((shape, here[0]), 0)) > here[1]:
                result.append((shape, size, (here[0], width), here, False))
        elif op.results and (layouts := [layout_of[name] for name in op.operands if name in layout_of]):
            first, last = layouts[0], layouts[-1]
            if op.name == "tt.trans" and (match := _ORDER.search(op.text)):
                order = [int(n) for n in match.group(1).split(",")]
                layout_of[op.results[0]] = order.index(first[0]), first[1]
            elif op.name.startswith(("arith.", "math.")) or op.name in _CASTS:
                layout_of[op.results[0]] = first
                if first[0] != last[0]:
                    result.append((op.outputs[0].shape, op.outputs[0].bits / 8, last, first, False))
    return result


def _turned_exchange(tile: _TurnedTile, lanes: int, warps: int) -> float:
    """Bytes of the exchange of a tile that changes its layout.

    Elements that lie in registers before and after are exchanged one after another, in the same memory, but for the
    neighbours that one access moves. AMD's compiler writes a tile that changes its dimension as a whole.
    """
    shape, size, before, after, _ = tile
    turns = before[0] != after[0]
    layouts = [_blocked_bits(shape, *layout, lanes, warps) for layout in (before, after)]
    if layouts[0] == layouts[1] or (warps == 1 and not turns):  # lanes exchange without memory
        return 0.0
    common = 0
    for place, extent in enumerate(shape) if lanes == 32 or not turns else ():
        both = list(range(0 if turns else min(bits[place][0] for bits in layouts), extent.bit_length() - 1))
        for own, along, beside in (bits[place] for bits in layouts):
            both = [n for n in both if n < own or n >= own + along + beside]
        common += len(both)
    return math.prod(shape) * size / (1 << common)


def chained(blocks: Sequence[Block]) -> list[Op]:
    """The dots whose result reaches another dot, by the rules of Triton's layout pass.

    It follows results through operations and into their regions, but not out of a region or an iteration.
    """
    before: dict[str, frozenset[int]] = {}
    results: set[int] = set()
    dots = []
    for op in walk_ops(blocks):  # in program order: the names of one region come again in another beside it
        sources = frozenset[int]()
        for name in (*op.operands, *op.inits):
            if name in before:
                sources |= before[name]
        if op.name in DOTS:
            results |= sources
            dots.append(op)
            sources |= {id(op)}
        inside = [name for block in nested_blocks(op) for name in block.arguments] if op.regions else []
        for name in (*op.results, *inside):
            if sources:
                before[name] = sources
            else:
                before.pop(name, None)
    return [dot for dot in dots if id(dot) in results]


def _three_stage_bytes(parts: Mapping[str, float]) -> float:
    """Bytes that a loop keeps with three stages, to find the one that keeps most."""
    ahead = 2.0 / max(1.0, parts.get("load_levels", 1.0))
    nbytes = sum(parts.get(f"{name}_bytes", 0.0) for name in ("direct", "indirect", "streamed"))
    return ahead * nbytes + sum(parts.get(f"{name}_bytes", 0.0) for name in ("resident", "chained"))


def _dot_inputs(dot: Op, *, scales: bool = False) -> list[tuple[str, Type]]:
    """The operands of a dot, left and right; with `scales`, their scales instead."""
    scaling = _SCALES.findall(dot.text) if dot.name == "tt.dot_scaled" else ()
    pairs = zip(dot.operands[:-1], dot.inputs, strict=False)
    return [(name, type_) for name, type_ in pairs if (name in scaling) == scales]


def _operand_bytes(dot: Op) -> float:
    return math.fsum(type_.nbytes for _, type_ in _dot_inputs(dot))


def _passing_bytes(name: str, type_: Type, makers: Mapping[str, Op]) -> float:
    """Bytes of an operand on its way to a dot: those of its load, if these are more."""
    maker = makers.get(_operand_source(name, makers, makers)[0])
    source_bytes = maker.outputs[0].nbytes if maker is not None and maker.name in LOADS else 0.0
    return max(type_.nbytes, source_bytes)


def _loop_parts(
    loop: Op, body: Sequence[Op], makers: Mapping[str, Op], accesses: Mapping[int, AccessPattern]
) -> dict[str, float]:
    """The parts that one loop keeps; empty when it has neither dots nor stages of its own."""
    match = _STAGES.search(loop.text)
    stages = float(match.group(1)) if match else 0.0
    local = {result: op for op in body for result in op.results}
    loads = [op for op in body if op.name in LOADS and op.outputs and op.outputs[0].tensor]
    copies = [op for op in loads if _is_async_copy(op, accesses)]
    dots = [op for op in body if op.name in DOTS]
    if not dots:
        if not match:
            return {}
        return {
            "streamed_bytes": math.fsum(op.outputs[0].nbytes for op in copies),
            "streamed_load_bytes": max((op.outputs[0].nbytes for op in copies), default=0.0),
            "loop_stages": stages,
        }
    levels = _load_levels(dots, local)
    direct: dict[int, float] = {}
    resident: dict[str, float] = {}
    chains: dict[str, float] = {}
    cast = wider = crosswise = across = computed_bytes = 0.0
    hoisted: set[int] = set()
    turns: dict[int, float] = {}
    right_turns: dict[int, float] = {}
    last: dict[int, int] = {}
    uses: dict[int, set[tuple[int, bool]]] = {}
    scaling = [(local.get(name), type_) for dot in dots for name, type_ in _dot_inputs(dot, scales=True)]
    scales = [type_.nbytes for maker, type_ in scaling if maker is not None and maker.name in LOADS]
    for order, dot in enumerate(dots):
        for place, (name, type_) in enumerate(_dot_inputs(dot)):
            root, is_cast = _operand_source(name, local, makers)
            maker, loads_behind = local.get(root), _elementwise_loads(root, local, makers, spread=True)
            hoisted |= loads_behind or set()
            stays = place == 0 and _stays_in_registers(root, is_cast, local, makers)
            is_computed = not stays and loads_behind is None and (maker is not None or root not in makers)
            if is_computed:
                computed_bytes = max(computed_bytes, type_.nbytes)
            if maker is not None and maker.name in LOADS:
                last[id(maker)] = order
                lies_across = _is_crosswise(name, place, local, accesses)
                uses.setdefault(id(maker), set()).add((place, lies_across))
                across += type_.nbytes if lies_across and not is_cast else 0.0
                if lies_across and type_.bits != 16:
                    crosswise += type_.nbytes
                if place and dot.name == "tt.dot_scaled":  # where no unit scales, it becomes bfloat16
                    wider = max(wider, 2.0 * type_.elements)
                if place and is_cast:
                    cast = max(cast, type_.nbytes)
                elif not is_cast:
                    direct[id(maker)] = maker.outputs[0].nbytes
                    if _turns(name, local) % 2:
                        turns[id(maker)] = direct[id(maker)]
                        if place == 1 and not lies_across:
                            right_turns[id(maker)] = direct[id(maker)]
            elif _elementwise_loads(root, local, makers) is not None or (
                # All warps lie along the columns of a dot that has more of them than rows.
                is_computed and place and type_.shape[-2] < type_.shape[-1]
            ):
                if place:
                    cast = max(cast, type_.nbytes)
            elif stays or (is_computed and place == 0):
                chains[root] = type_.nbytes
            elif is_computed:  # each lives no longer than its product
                resident[""] = computed_bytes
            else:
                resident[root] = type_.nbytes
    indirect = [op for op in copies if id(op) in levels and id(op) not in direct]
    sources = [op for op in loads if id(op) in direct]
    narrow = [*scales, *(direct[id(op)] for op in sources if not _is_wide(op, accesses))]
    wide = [op for op in sources if _is_wide(op, accesses)]
    return {
        "narrow_bytes": math.fsum(narrow),
        "narrow_most_bytes": max(narrow, default=0.0),
        "least_direct_bytes": min((direct[id(op)] for op in wide), default=0.0),
        "across_bytes": across,
        "transposed_bytes": math.fsum(turns.values()),
        "transposed_right_bytes": math.fsum(right_turns.values()),
        "reused_bytes": math.fsum(direct[id(op)] for op in wide if len(uses[id(op)]) > 1),
        "two_sided_bytes": math.fsum(direct[id(op)] for op in wide if len({p for p, _ in uses[id(op)]}) > 1),
        "filled_bytes": math.fsum(direct[id(op)] for op in wide if _is_filled(op, makers)),
        "once_most_bytes": max((*direct.values(), *resident.values(), cast), default=0.0),
        "chained_most_bytes": max(chains.values(), default=0.0),
        "loop_dots": float(len(dots)),
        "scaled": float(any(dot.name == "tt.dot_scaled" for dot in dots)),
        "described": float(any(op.name != "tt.load" for op in loads)),
        "precise": float(any(_is_precise(dot) for dot in dots)),
        "direct_bytes": math.fsum((*direct.values(), *scales)),
        "indirect_bytes": math.fsum(op.outputs[0].nbytes for op in indirect),
        "hoisted_bytes": math.fsum(op.outputs[0].nbytes for op in indirect if id(op) in hoisted),
        "direct_once_bytes": _peak_operand_bytes(body, last),
        "resident_bytes": math.fsum(resident.values()),
        "chained_bytes": math.fsum(chains.values()),
        "cast_bytes": max(cast, wider),
        "computed_bytes": computed_bytes,
        "crosswise_bytes": crosswise,
        "load_levels": float(max(levels.values(), default=0)),
        "loop_stages": stages,
    }


def _is_async_copy(load: Op, accesses: Mapping[int, AccessPattern]) -> bool:
    access = accesses.get(id(load))
    return access is None or access.run * load.outputs[0].bits >= _MIN_ASYNC_COPY_BITS


def _is_wide(load: Op, accesses: Mapping[int, AccessPattern]) -> bool:
    """Whether a thread loads 4 bytes at once, as far as alignment and mask decide it; descriptors always do."""
    access = accesses.get(id(load))
    if load.name != "tt.load" or access is None:
        return True
    return access.vector * load.outputs[0].bits >= _MIN_ASYNC_COPY_BITS


def _is_filled(load: Op, makers: Mapping[str, Op]) -> bool:
    """Whether masked elements become another value than 0, which no hardware copy supports."""
    default = makers.get(load.operands[2]) if load.name == "tt.load" and len(load.operands) > 2 else None
    return default is not None and (default.name != "arith.constant" or _ZERO.search(default.text) is None)


def _is_precise(dot: Op) -> bool:
    left = dot.inputs[0]
    return left.kind == "float" and (
        left.bits == 64 or (left.bits == 32 and "inputPrecision" not in dot.text)
    )


def _operand_source(name: str, local: Mapping[str, Op], makers: Mapping[str, Op]) -> tuple[str, bool]:
    """The value behind a dot operand's views and casts; and whether there was a cast."""
    cast = False
    while (op := local.get(name) or makers.get(name)) is not None and op.name in _VIEWS | _CASTS:
        cast = cast or op.name in _CASTS
        name = op.operands[0]
    return name, cast


def _is_crosswise(
    name: str, place: int, local: Mapping[str, Op], accesses: Mapping[int, AccessPattern]
) -> bool:
    """Whether the dot operand at `place` was loaded along another dimension than the dot sums over."""
    root, _ = _operand_source(name, local, {})
    op = local.get(root)
    access = accesses.get(id(op)) if op is not None else None
    if op is None or access is None or access.axis is None or len(op.outputs[0].shape) != 2:
        return False
    sum_axis = 1 - place  # of the left operand [M, K] the second dimension, of the right one [K, N] the first
    return (access.axis + _turns(name, local)) % 2 != sum_axis


def _turns(name: str, local: Mapping[str, Op]) -> int:
    """How often an operand is transposed between its source and a dot."""
    turns = 0
    while (op := local.get(name)) is not None and op.name in _VIEWS | _CASTS:
        turns += op.name == "tt.trans"
        name = op.operands[0]
    return turns


def _stays_in_registers(root: str, cast: bool, local: Mapping[str, Op], makers: Mapping[str, Op]) -> bool:
    """Whether a left operand can stay in registers: carried, from a dot, or computed before the loop."""
    if root not in local:
        before = makers.get(root)
        return before is None or cast or before.name not in LOADS
    return bool(_dots_behind(root, local))


def _dots_behind(root: str, makers: Mapping[str, Op], *, elementwise: bool = False) -> list[Op]:
    """The dots that a value is computed from, but through no load; `elementwise`: element by element."""
    dots: list[Op] = []
    visited, stack = {root}, [root]
    while stack:
        op = makers.get(stack.pop())
        if op is None or op.name in LOADS:
            continue
        if op.name in DOTS:
            dots.append(op)
        elif not elementwise or op.name.startswith(("arith.", "math.")) or op.name in _CASTS:
            fresh = [name for name in op.operands if name not in visited]
            visited.update(fresh)
            stack += fresh
    return dots


def _elementwise_loads(
    root: str, local: Mapping[str, Op], makers: Mapping[str, Op], *, spread: bool = False
) -> set[int] | None:
    """Loads, by `id`, that an operand is computed from element by element, which then take its layout; else None.

    `spread`: also through broadcasts and views, and from values from before the loop, but not from indices.
    """
    through = _SPREADS | _CASTS if spread else _CASTS
    loads: set[int] = set()
    visited, stack = {root}, [root]
    while stack:
        name = stack.pop()
        op = local.get(name)
        if op is None and (op := makers.get(name)) is not None:
            op = op if spread or op.name in ("arith.constant", "tt.splat") else None
        if op is None:
            return None
        if op.name in LOADS:
            loads.add(id(op))
        if op.name in LOADS or op.name in ("arith.constant", "tt.splat"):
            continue
        if not op.name.startswith(("arith.", "math.")) and op.name not in through:
            return None
        fresh = [name for name in op.operands if name not in visited]
        visited.update(fresh)
        stack += fresh
    return loads


def _load_levels(dots: Sequence[Op], local: Mapping[str, Op]) -> dict[int, int]:
    """Loads that dot operands depend on, by `id`, with the number of loads on the way, themselves included."""
    levels: dict[int, int] = {}
    stack = [(name, 0) for dot in dots for name, _ in _dot_inputs(dot)]
    level_of: dict[str, int] = {}
    while stack:
        name, level = stack.pop()
        op = local.get(name)
        if op is None or level_of.get(name, -1) >= level or op.name in DOTS:
            continue
        level_of[name] = level
        if op.name in LOADS and op.outputs[0].tensor:
            level += 1
            levels[id(op)] = max(levels.get(id(op), 0), level)
        stack += [(operand, level) for operand in op.operands]
    return levels


def _peak_operand_bytes(body: Sequence[Op], last: Mapping[int, int]) -> float:
    """Most bytes of loaded dot operands between their loads and their last dots; `last` counts dots."""
    alive: dict[int, tuple[int, float]] = {}
    most, order = 0.0, -1
    for op in body:
        if op.name in DOTS:
            order += 1
            most = max(most, math.fsum(size for until, size in alive.values() if until >= order))
        elif id(op) in last:
            alive[id(op)] = last[id(op)], op.outputs[0].nbytes
    return most


def _reduction_parts(every: Sequence[Op], busy: Set[int]) -> dict[str, float]:
    """The parts for the reduction that exchanges most; `busy` are the operations of the fullest loop."""
    best: dict[str, float] = {}
    most = 0.0
    for op in every:
        if op.name not in REDUCTIONS or not op.inputs[0].shape:
            continue
        shape, axis = reduction_axis(op)
        words = math.fsum(max(t.bits, 32) / 8 for t in op.inputs) * (op.inputs[0].elements // shape[axis])
        if words * min(shape[axis], 4) > most:
            most = words * min(shape[axis], 4)
            best = {"reduced_bytes": words, "reduced_inside": float(id(op) in busy)}
    return best
