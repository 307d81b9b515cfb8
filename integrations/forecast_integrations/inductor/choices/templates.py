"""Inductor's templates in closed form: a candidate's parameters and the geometry -> `TtirFacts` and a grid.

The facts are those that `features.ttir.facts` reads from the TTIR of the rendered template (torch 2.11 to
2.13), without rendering or tracing it: EXHAUSTIVE has 1,875 configs per problem and both cost more than
the forecast may. Counts of integer operations are sums over tiles whose factors were read off the traces
of templates of that kind; the tests hold every fact against TTIR, but for how accesses reach the cache:
those are taken for coalesced, as nearly all of the templates' are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forecast_autotune.features.ttir.coalescing import coalesced_access_counts
from forecast_autotune.features.ttir.extraction import TtirFacts
from forecast_autotune.records import LAUNCH_OPTIONS, Candidate, Problem, Scalar
from forecast_autotune.surrogates.protocol import Array
from forecast_integrations.inductor.choices.geometry import (
    AttentionGeometry,
    ConvolutionGeometry,
    Geometry,
    MatmulGeometry,
    OperandLayout,
    operation_geometry,
)

Grid = tuple[int, ...]

TEMPLATE = "triton::"
"""Prefix of the names of templates."""
_BACKWARD = ("backward", "bwd")
"""In names of templates of gradients, which have no closed form."""
_DESCRIPTORS = ("tma", "scaling")
"""In names of templates that load by tensor descriptors."""
_ACCUMULATOR = 4.0
"""Bytes of one element of every template's accumulator."""


@dataclass(frozen=True)
class ClosedFormFacts:
    """One program's facts, and how many programs there are."""

    facts: TtirFacts
    grid: Grid


def closed_form(
    geometry: Geometry, template: str, parameters: Mapping[str, Scalar], multiprocessors: int
) -> ClosedFormFacts | None:
    """The facts of one candidate of a template (`triton::mm`); None when its parameters are missing.

    `multiprocessors` is what persistent templates launch when their own NUM_SMS is not given.
    """
    if isinstance(geometry, AttentionGeometry):
        return _attention(geometry, parameters)
    blocks = matmul_blocks(parameters)
    if blocks is None:
        return None
    if isinstance(geometry, ConvolutionGeometry):
        return _convolution(geometry, parameters, blocks)
    return _matmul_facts(geometry, template.lower(), parameters, blocks, multiprocessors)


def matmul_blocks(parameters: Mapping[str, Scalar]) -> tuple[int, int, int] | None:
    """The block along m, n and k of a template of products or convolutions; None where one is missing."""
    m, n, k = (_block(parameters, name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    return None if m is None or n is None or k is None else (m, n, k)


def has_closed_form(geometry: Geometry, candidate: Candidate) -> bool:
    """Whether a candidate is a template whose parameters are all there, so that `closed_form` has an answer."""
    if not candidate.variant.startswith(TEMPLATE) or any(word in candidate.variant for word in _BACKWARD):
        return False
    parameters = dict(candidate.config.kwargs)
    if isinstance(geometry, AttentionGeometry):
        return _block(parameters, "BLOCK_N") is not None and (
            "SPLIT_KV" in parameters or _block(parameters, "BLOCK_M") is not None
        )
    return matmul_blocks(parameters) is not None


def advised_sizes(geometry: Geometry, candidate: Candidate) -> dict[str, int]:
    """The arguments that advice on templates sees: sizes, and bits of an element."""
    sizes = {name: value for name, value in vars(geometry).items() if isinstance(value, int)}
    if isinstance(geometry, MatmulGeometry):
        for side, operand in (("left", geometry.left), ("right", geometry.right)):
            sizes |= {f"{side}_bits": operand.bits, f"{side}_rows": int(operand.rows)}
    elif isinstance(geometry, ConvolutionGeometry):
        pixels = geometry.batch * math.prod(geometry.result(candidate.config.parameters()))
        sizes |= {"pixels": pixels, "taps": math.prod(geometry.kernel)}
    return {name: int(value) for name, value in sizes.items()}


def template_tiles(geometry: Geometry, candidate: Candidate) -> dict[str, float]:
    """The attributes of `config` that advice on templates sees."""
    parameters, config = candidate.config.parameters(), candidate.config
    blocks = {n: _block(parameters, n) or 0 for n in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLIT_KV")}
    if isinstance(geometry, AttentionGeometry):
        blocks["BLOCK_M"] = blocks["BLOCK_M"] or _decoded_rows(geometry)
    options = {n: getattr(config, n) or 0 for n in LAUNCH_OPTIONS}
    kind = {"persistent": "persistent" in candidate.variant, "descriptors": "tma" in candidate.variant}
    return {name: float(value) for name, value in {**blocks, **options, **kind}.items()}


def _decoded_rows(g: AttentionGeometry) -> int:
    """Rows of a decoding tile, 16 at least: the query heads that share keys are in one."""
    return max(16, 1 << max(0, g.queries * max(1, g.heads // g.kv_heads) - 1).bit_length())


def _block(parameters: Mapping[str, Scalar], name: str) -> int | None:
    value = parameters.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _contiguous_run(operand: OperandLayout, inner: int, outer: int, limit: int, whole: int) -> float:
    """Neighbours per access of a tile of `inner` x `outer`, whose memory runs along `inner`.

    `whole` is the operand's own length along `inner`: a tile as long as it goes on into the next row.
    `limit` is how far an index goes before it wraps around.
    """
    along = min(inner, max(1, limit))
    return float(along * outer if operand.dense and along == inner == whole else along)


def _matmul_facts(
    p: MatmulGeometry, template: str, parameters: Mapping[str, Scalar], blocks: tuple[int, int, int], sms: int
) -> ClosedFormFacts:
    m, n, k = blocks
    tiles = -(-p.m // m) * -(-p.n // n)
    steps = -(-p.k // k)
    persistent = "persistent" in template or "scaling" in template or "grouped" in template
    descriptors = any(word in template for word in _DESCRIPTORS)
    grid: Grid = (tiles, p.batch, 1) if p.batch > 1 else (tiles, 1, 1)
    rounds = 1.0
    if persistent:
        programs = _block(parameters, "NUM_SMS") or sms
        grouped = "grouped" in template
        grid = (programs if grouped else min(programs, tiles * p.batch), 1, 1)
        rounds = tiles * p.batch / grid[0]
    trips = rounds * steps * p.terms
    a, b, c = float(m * k), float(k * n), float(m * n)
    left, right = a * p.left.bits / 8.0, b * p.right.bits / 8.0
    is_mixed = p.left.bits != p.right.bits
    in_loop = "main_loop_scaling" in template
    cast = b if is_mixed and p.right.bits < p.left.bits else a if is_mixed else 0.0
    bias = c * p.bias_bits / 8.0
    stores = c * p.out_bits / 8.0
    loads = trips * (left + right) + rounds * bias
    traffic = loads + rounds * stores

    run_left = (
        _contiguous_run(p.left, k, m, k, p.k) if p.left.rows else _contiguous_run(p.left, m, k, p.m, p.m)
    )
    run_right = (
        _contiguous_run(p.right, n, k, p.n, p.n) if p.right.rows else _contiguous_run(p.right, k, n, k, p.k)
    )
    run_out = float(c) if n == p.n else float(n)
    contiguous = trips * (left * run_left + right * run_right) + rounds * (bias * n + stores * run_out)
    masked_bytes = rounds * (bias + stores) + (0.0 if descriptors or p.k % k == 0 else trips * (left + right))

    elementwise = rounds * (c if p.out_bits != 32 else 0.0) + trips * cast
    elementwise += rounds * (c * (p.bias_bits != 32) + c if bias else 0.0)
    elementwise += trips * 2.0 * (a + b) if in_loop else 0.0
    transposes = a * (not p.left.rows) + b * (not p.right.rows) if descriptors else 0.0
    # Batched and summed products advance tiles of pointers, the others compute them anew in each step.
    is_batched = not persistent and (p.batch > 1 or "bmm" in template)
    has_pointers = is_batched or p.terms > 1
    live = _ACCUMULATOR * c + left + right + (4.0 * (a + b) if has_pointers else 0.0)
    # The narrower operand grows to the other's width, in place.
    live += cast * abs(p.left.bits - p.right.bits) / 8.0
    inputs = left + right
    direct = 0.0 if in_loop else inputs - (right if cast == b and is_mixed else left if is_mixed else 0.0)
    dot_bits = max(p.left.bits, p.right.bits)
    across = (a * (not p.left.rows) + b * p.right.rows) * dot_bits / 8.0
    return ClosedFormFacts(
        TtirFacts(
            load_bytes=loads,
            store_bytes=rounds * stores,
            load_ops=2.0 * trips + (rounds if bias else 0.0),
            store_ops=rounds,
            dot_flops=2.0 * m * n * k * trips,
            dot_ops=trips,
            dot_input_bits=float(p.left.bits),
            dot_shapes=((m, n, k, 1.0),),
            elementwise=elementwise,
            integer_ops=_integer_operations(p, blocks, trips, rounds, is_batched, descriptors),
            conversions=trips * transposes,
            pipelined_bytes=inputs,
            pipelined_dot_bytes=0.0 if in_loop else inputs,
            largest_tile=max(a, b, c),
            live_bytes=max(live, 2.0 * _ACCUMULATOR * c if bias else 0.0),
            accumulator_bytes=_ACCUMULATOR * c,
            loop_trips=trips / p.terms,
            iterations=trips,
            loop_entries=rounds * p.terms,
            loop_depth=2 if persistent else 1,
            serial_chain=2.0,
            load_chain=1.0,
            mean_contiguous=contiguous / traffic,
            masked_share=masked_bytes / traffic,
            direct_bytes=direct,
            indirect_bytes=inputs - direct,
            hoisted_bytes=inputs - direct,
            direct_once_bytes=inputs,
            least_direct_bytes=min(left, right) if direct == inputs else direct,
            across_bytes=left * (not p.left.rows) * (direct != right)
            + right * p.right.rows * (direct != left)
            if direct
            else 0.0,
            once_most_bytes=max(left, right, b * p.left.bits / 8.0 if cast == b and is_mixed else 0.0),
            loop_dots=1.0,
            cast_bytes=b * p.left.bits / 8.0 if cast == b and is_mixed else 0.0,
            crosswise_bytes=0.0 if in_loop or dot_bits == 16 else across,
            load_levels=1.0,
            staged_loops=p.terms + persistent,
            **({} if descriptors else coalesced_access_counts(loads + rounds * stores)),
        ),
        grid,
    )


def _integer_operations(
    p: MatmulGeometry,
    blocks: tuple[int, int, int],
    trips: float,
    rounds: float,
    is_batched: bool,
    descriptors: bool,
) -> float:
    """Elements through integer, boolean and pointer arithmetic of one program."""
    m, n, k = blocks
    a, b, c = float(m * k), float(k * n), float(m * n)
    if descriptors:
        return rounds * (3.0 * c + 3.0 * m + 2.0 * n)
    masks = 0.0 if p.k % k == 0 else 2.0 * k
    if is_batched or p.terms > 1:
        edge = (5.0 if is_batched else 3.0) * c + 4.0 * m  # the store also checks the batch's bound
        edge += m + k if p.left.rows else 2.0 * k
        edge += 3.0 * n if p.right.rows else 4.0 * n - k
        return edge + 3.0 * (a + b) + trips * (a + b + masks)
    scale_terms = (m if p.left.rows else k) + (k if p.right.rows else n)
    edge = 3.0 * c + 4.0 * m + 3.0 * n + (n if p.bias_bits else 0.0)
    return rounds * edge + trips * (2.0 * (a + b) + 2.0 * k + masks + scale_terms)


def _convolution(
    g: ConvolutionGeometry, parameters: Mapping[str, Scalar], blocks: tuple[int, int, int]
) -> ClosedFormFacts:
    m, n, k = blocks
    groups = _block(parameters, "GROUPS") or 1
    channels, filters = max(1, g.channels // groups), max(1, g.filters // groups)
    pixels = g.batch * math.prod(g.result(parameters))
    grid = (-(-pixels // m), -(-filters // n), groups)
    steps = float(math.prod(g.kernel) * -(-channels // k))
    a, b, c = float(m * k), float(k * n), float(m * n)
    left, right, stores = a * g.bits / 8.0, b * g.bits / 8.0, c * g.out_bits / 8.0
    traffic = steps * (left + right) + stores
    # Channels first: the pixels of a row are neighbours, but only until the row ends.
    run_left = float(min(k, channels) if g.channels_last else min(m, g.image[-1]))
    run_right = float(min(k, channels) if g.channels_last else 1)
    run_out = float(n if g.channels_last else min(m, g.image[-1]))
    contiguous = steps * (left * run_left + right * run_right) + stores * run_out
    has_strides = any(_block(parameters, f"STRIDE_{axis}") not in (None, 1) for axis in "DHW")
    if g.channels_last:
        integers, each = 5.0 * c + 3.0 * n, 5.0 * k + 14.0 * m
    else:
        integers, each = 4.0 * c + 4.0 * n, 7.0 * k + 13.0 * m
    each += 3.0 * a + 2.0 * b + n + (2.0 * m if has_strides else 0.0)
    integers += 7.0 * m + steps * each
    return ClosedFormFacts(
        TtirFacts(
            load_bytes=steps * (left + right),
            store_bytes=stores,
            load_ops=2.0 * steps,
            store_ops=1.0,
            dot_flops=2.0 * m * n * k * steps,
            dot_ops=steps,
            dot_input_bits=float(g.bits),
            dot_shapes=((m, n, k, 1.0),),
            elementwise=c if g.out_bits != 32 else 0.0,
            integer_ops=integers,
            pipelined_bytes=left + right,
            pipelined_dot_bytes=left + right,
            largest_tile=max(a, b, c),
            live_bytes=_ACCUMULATOR * c + left + right,
            accumulator_bytes=_ACCUMULATOR * c,
            loop_trips=steps,
            iterations=steps,
            loop_depth=1,
            serial_chain=2.0,
            load_chain=1.0,
            mean_contiguous=contiguous / traffic,
            masked_share=1.0,
            direct_bytes=left + right,
            direct_once_bytes=left + right,
            least_direct_bytes=min(left, right),
            across_bytes=right,
            once_most_bytes=max(left, right),
            loop_dots=1.0,
            load_levels=1.0,
            staged_loops=1,
            **coalesced_access_counts(steps * (left + right) + stores),
        ),
        grid,
    )


def attention_steps(g: AttentionGeometry, parameters: Mapping[str, Scalar]) -> float:
    """Blocks of keys that one program goes through.

    The blocks that a block mask leaves out are data; a mask with full blocks is taken for a causal one, which leaves
    half. The assumption is the same for all candidates, so it moves their level, not their order.
    """
    n = _block(parameters, "BLOCK_N") or 1
    steps = max(1.0, math.ceil(g.keys / n) / (_block(parameters, "SPLIT_KV") or 1))
    return max(1.0, steps / 2.0) if parameters.get("HAS_FULL_BLOCKS") is True else steps


def _attention(g: AttentionGeometry, parameters: Mapping[str, Scalar]) -> ClosedFormFacts | None:
    n = _block(parameters, "BLOCK_N")
    decoding = "SPLIT_KV" in parameters
    m = _block(parameters, "BLOCK_M") or (_decoded_rows(g) if decoding else None)
    if m is None or n is None:
        return None
    split = _block(parameters, "SPLIT_KV") or 1
    grid: Grid = (g.batch, g.kv_heads, split) if decoding else (-(-g.queries // m), g.batch, g.heads)
    return ClosedFormFacts(attention_facts(g, m, n, attention_steps(g, parameters)), grid)


def attention_facts(g: AttentionGeometry, m: int, n: int, steps: float) -> TtirFacts:
    """Facts of a program of `m` queries that goes through `steps` blocks of `n` keys."""
    size = g.bits / 8.0
    width, value = 1 << (g.width - 1).bit_length(), 1 << (g.value_width - 1).bit_length()
    scores, output = float(m * n), float(m * value)
    query, key, values = m * width * size, n * width * size, n * value * size
    stores = output * size
    # Two loads of block numbers per step, and one each of the first block and their count.
    loads = query + steps * (key + values + 8.0) + 8.0
    runs = [float(rows * wide if g.dense else wide) for rows, wide in ((m, width), (n, width), (n, value))]
    contiguous = query * runs[0] + steps * (key * runs[1] + values * runs[2]) + stores * m * value
    first = 2.0 * m * n * width
    second = 2.0 * m * n * value
    if (n, width) == (value, n):
        shapes: tuple[tuple[int, int, int, float], ...] = ((m, n, width, 1.0),)
    else:
        both = ((m, n, width, first / (first + second)), (m, value, n, second / (first + second)))
        shapes = tuple(sorted(both, key=lambda shape: (-shape[3], shape[:3])))
    accumulators = _ACCUMULATOR * (output + 2.0 * m)
    return TtirFacts(
        load_bytes=loads,
        store_bytes=stores,
        load_ops=4.0 * steps + 3.0,
        store_ops=1.0,
        dot_flops=steps * (first + second),
        dot_ops=2.0 * steps,
        dot_input_bits=float(g.bits),
        dot_shapes=shapes,
        chained_flops=steps * first,
        chained_rows=float(m),
        chained_columns=float(n),
        elementwise=output * (size != 4.0) + steps * (5.0 * scores + 6.0 * m + output),
        integer_ops=5.0 * output + steps * (scores + 5.0 * n + n * (width + value)),
        special=output + steps * (scores + m),
        reduce_elements=2.0 * steps * scores,
        conversions=steps * n * width,
        pipelined_bytes=key + values,
        pipelined_dot_bytes=key + values,
        largest_tile=max(scores, output, float(m * width), float(n * width), float(n * value)),
        live_bytes=accumulators + query + 4.0 * scores + values + 4.0 * n,
        accumulator_bytes=accumulators,
        loop_trips=steps,
        iterations=steps,
        loop_depth=1,
        serial_chain=4.0,
        load_chain=1.0,
        mean_contiguous=contiguous / (loads + stores),
        masked_share=(stores + 4.0 * steps) / (loads + stores),
        direct_bytes=key + values,
        direct_once_bytes=max(key, values),
        least_direct_bytes=min(key, values),
        across_bytes=values,
        transposed_bytes=key,
        transposed_right_bytes=key,
        once_most_bytes=max(key, values, query),
        chained_most_bytes=scores * size,
        loop_dots=2.0,
        resident_bytes=query,
        chained_bytes=scores * size,
        load_levels=1.0,
        reduced_bytes=4.0 * m,
        staged_loops=1,
        **coalesced_access_counts(loads + stores),
    )


_ANY_S = 0.25
"""Seconds that any template takes."""
_MOST_UNROLLED = 40
"""Steps along k up to which LLVM unrolls the loop over them, as their number is a constant of the template's."""
_UNROLLED_S, _ROLLED_S, _SCALAR_S = 4.6, 0.3, 3.5
"""Seconds for 128 accumulators of a thread: with 32 unrolled steps; with a loop, and once more for 64 elements of a
convolution's step; and, without tensor cores, for 64 elements of a step."""
_FULL_TILE, _FULL_STEPS, _FULL_DEPTH = 128, 32, 64
_UNROLLED_POWER = 1.5
"""Registers spill the sooner the more accumulators there are."""
_SCALAR_DTYPES = ("float32", "float64")


def compile_seconds(problem: Problem, candidates: Sequence[Candidate]) -> Array:
    """Expected seconds in a worker for each candidate, [n].

    Fitted to 690 templates of seven whole models (H200, 16 busy cores, torch 2.11, Triton 3.6), of which half are
    within a factor of 1.21; and to 163 of ResNet-18's convolutions (two cores, torch 2.13, Triton 3.9, for sm_90), half
    within 1.2. A choice that is no such template counts as the shortest one.
    """
    shape = operation_geometry(problem)
    if shape is None or isinstance(shape, AttentionGeometry):
        return np.full(len(candidates), _ANY_S)
    operand = next(a.dtype for a in problem.arguments if a.kind == "tensor")
    scalar = operand.rpartition(".")[2] in _SCALAR_DTYPES and "precision=highest" in problem.key
    return np.array([_seconds(candidate, shape, scalar) for candidate in candidates])


def _seconds(candidate: Candidate, shape: MatmulGeometry | ConvolutionGeometry, scalar: bool) -> float:
    blocks = matmul_blocks(dict(candidate.config.kwargs)) if has_closed_form(shape, candidate) else None
    if blocks is None:
        return _ANY_S
    height, width, depth = blocks
    accumulators = height * width / (32 * candidate.config.num_warps) / _FULL_TILE
    if isinstance(shape, ConvolutionGeometry):  # the taps are a loop
        return _ANY_S + _ROLLED_S * accumulators * (1.0 + depth / _FULL_DEPTH)
    if scalar:
        return _ANY_S + _SCALAR_S * accumulators * depth / _FULL_DEPTH
    steps = math.ceil(shape.k / depth)
    if steps > _MOST_UNROLLED:
        return _ANY_S + _ROLLED_S * accumulators
    return _ANY_S + _UNROLLED_S * accumulators**_UNROLLED_POWER * steps / _FULL_STEPS
