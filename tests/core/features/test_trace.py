"""Tracing live calls to TTIR on the CPU: what the text depends on, and what it must leave alone."""

from __future__ import annotations

from typing import Any

import pytest

from forecast_autotune.features.trace import trace, trace_many
from forecast_autotune.features.ttir.extraction import FeatureError, extract_facts
from forecast_autotune.features.ttir.parser import parse_ttir
from forecast_autotune.features.ttir.tensors import walk_ops
from forecast_autotune.records import Argument

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl
from triton.backends.compiler import GPUTarget

SCALE = tl.constexpr(3)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


@triton.jit
def copy(x, y, n, stride, bias, B: tl.constexpr, ACT: tl.constexpr = None, GAIN=2):
    o = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + o * stride, mask=o < n)
    if bias is not None:
        v += tl.load(bias + o, mask=o < n)
    if ACT is not None:
        v = ACT(v)
    tl.static_assert(B <= 4096, "block too large")
    tl.store(y + o, v * GAIN * SCALE, mask=o < n)


@triton.heuristics({"EVEN": lambda a: a["n"] % a["B"] == 0})
@triton.heuristics({"WIDE": lambda a: a["EVEN"] and a["num_warps"] > 4})
@triton.jit
def guarded(x, n, B: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    if EVEN:
        tl.store(x + o, tl.load(x + o))
    else:
        tl.store(x + o, tl.load(x + o, mask=o < n), mask=o < n)
    if WIDE:
        tl.store(x + o, tl.exp(tl.load(x + o)))


@triton.jit
def loop(x, n, B: tl.constexpr):
    o = tl.arange(0, B)
    for i in range(0, n, B):
        tl.store(x + i + o, 0.0)


def vector(n: int = 4096, **options: Any) -> Any:
    return torch.empty(n, **options)


def header(text: str) -> str:
    return next(line for line in text.splitlines() if "tt.func public" in line)


def shapes(text: str) -> list[tuple[str, list[tuple[int, ...]]]]:
    """Every operation's name and result shapes, in order."""
    (function,) = parse_ttir(text).values()
    return [(op.name, [t.shape for t in op.outputs]) for op in walk_ops(function.blocks)]


def test_text_is_what_a_real_compilation_reads() -> None:
    x, y = vector(), vector()
    text = trace(copy, (x, y, 1000, 1, None), {}, {"B": 512})
    names = copy.arg_names
    kinds = {"x": "*fp32", "y": "*fp32", "n": "i32", "GAIN": "i32"}
    source = triton.compiler.ASTSource(
        copy,
        {name: kinds.get(name, "constexpr") for name in names},
        {(names.index("stride"),): 1, (names.index("bias"),): None, (5,): 512, (6,): None},
        {(names.index(name),): [["tt.divisibility", 16]] for name in ("x", "y")},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert shapes(compiled.asm["ttir"]) == shapes(text)
    assert "loc(" not in text
    assert header(text).count("%arg") == 4


def test_arguments_specialise_as_in_a_launch() -> None:
    x, y = vector(), vector()
    aligned = header(trace(copy, (x, y, 1024, 32, x), {}, {"B": 512}))
    odd = header(trace(copy, (x[1:], y, 1001, 32, x), {}, {"B": 512}))
    assert aligned.count("tt.divisibility = 16") == 5  # x, y, n, stride, bias
    assert odd.count("tt.divisibility = 16") == 3
    assert header(trace(copy, (x.half(), y, 1024, 32, x), {}, {"B": 512})).count("!tt.ptr<f16>") == 1
    assert "i64" in header(trace(copy, (x, y, 2**40, 32, x), {}, {"B": 512}))


def test_heuristics_see_the_call_and_the_config() -> None:
    x = vector(4096, device="meta")
    arguments = [Argument("x", "tensor"), Argument("n", "scalar", value=1024)]

    def found(n: int, block: int, warps: int) -> tuple[float, float]:
        text = trace(guarded, (x, n), {}, {"B": block, "num_warps": warps})
        got = extract_facts(text, arguments, (4,))
        return got.masked_share, got.special

    assert found(1024, 512, 4) == (0, 0)
    assert found(1000, 512, 8) == (1, 0)
    assert found(1024, 512, 8) == (0, 512)


def test_a_host_descriptor_brings_its_shape_to_the_loop_bound() -> None:
    descriptor = pytest.importorskip("triton.tools.tensor_descriptor")
    tensor = vector(64 * 256, dtype=torch.float16).view(64, 256)
    live = descriptor.TensorDescriptor(tensor, [64, 256], [256, 1], [16, 32])
    text = trace(rows, (live, vector()), {}, {"BM": 16, "BN": 32})
    arguments = [Argument("d", "tensor", "float16", (64, 256), (256, 1)), Argument("y", "tensor")]
    got = extract_facts(text, arguments, (4,))
    assert got.loop_trips == 8
    assert got.load_bytes == 8 * 16 * 32 * 2
    assert got.mean_contiguous > 16


@triton.jit
def rows(d, y, BM: tl.constexpr, BN: tl.constexpr):
    total = tl.zeros((BM,), tl.float32)
    for start in range(0, d.shape[1], BN):
        total += tl.sum(d.load([tl.program_id(0) * BM, start]).to(tl.float32), 1)
    tl.store(y + tl.program_id(0) * BM + tl.arange(0, BM), total)


def test_trace_many_yields_in_order_and_names_what_fails() -> None:
    x, y = vector(), vector()
    blocks = [512, 8192, 1000, 1024]
    results = list(trace_many(copy, (x, y, 1000, 1, None), {}, [{"B": b, "ACT": None} for b in blocks]))
    assert [key for key, _ in results] == [f"ACT=None,B={b}" for b in blocks]
    first, large, odd, last = (text for _, text in results)
    assert isinstance(first, str)
    assert isinstance(last, str)
    assert "1024x" in last
    assert "1024x" not in first
    assert isinstance(large, FeatureError)
    assert "CompileTimeAssertionFailure" in str(large)
    assert isinstance(odd, FeatureError)
    assert "power of 2" in str(odd)


def test_trace_many_is_lazy() -> None:
    asked: list[int] = []

    def record(a: dict[str, Any]) -> bool:
        asked.append(a["B"])
        return True

    watched = triton.heuristics({"EVEN": record, "WIDE": lambda a: False})(guarded.fn.fn)
    lazy = trace_many(watched, (vector(), 4096), {}, [{"B": 64}, {"B": 128}])
    assert asked == []
    next(lazy)
    assert asked == [64]


def test_nothing_of_the_kernel_changes() -> None:
    @triton.jit
    def fresh(x, B: tl.constexpr, ACT: tl.constexpr):
        tl.store(x + tl.arange(0, B), ACT(tl.load(x + tl.arange(0, B))))

    @triton.jit
    def double(x):
        return x * 2

    before = [dict(vars(f)) for f in (fresh, double)]
    trace(fresh, (vector(),), {}, {"B": 64, "ACT": double})
    with pytest.raises(FeatureError):
        trace(fresh, (vector(),), {}, {"B": 63, "ACT": double})
    assert [dict(vars(f)) for f in (fresh, double)] == before
    assert dict(fresh.device_caches) == {}
    assert fresh.hash is None
    assert double.hash is None


def test_a_target_can_be_given() -> None:
    tensor = vector(64 * 256, dtype=torch.float16).view(64, 256)
    descriptor = pytest.importorskip("triton.tools.tensor_descriptor")
    live = descriptor.TensorDescriptor(tensor, [64, 256], [256, 1], [16, 32])
    hopper = trace(rows, (live, vector()), {}, {"BM": 16, "BN": 32}, target=GPUTarget("cuda", 90, 32))
    ampere = trace(rows, (live, vector()), {}, {"BM": 16, "BN": 32}, target=GPUTarget("cuda", 80, 32))
    assert "tt.descriptor_load" in hopper
    assert "tt.descriptor_load" not in ampere  # no hardware for it: rewritten to pointers


def test_what_cannot_be_traced_is_refused() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    interpreted = InterpretedFunction(copy.fn)
    for wrong in (interpreted, triton.heuristics({"B": lambda a: 64})(interpreted), copy.fn, None):
        with pytest.raises(FeatureError, match="cannot trace"):
            trace(wrong, (vector(),), {}, {})
    ((key, error),) = trace_many(interpreted, (vector(),), {}, [{"B": 64}])
    assert key == "B=64"
    assert isinstance(error, FeatureError)


@pytest.mark.parametrize(
    ("fn", "args", "target", "says"),
    [
        (loop, (), None, "missing"),
        (loop, (1, 2, 3, 4), None, "TypeError"),
        (loop, (object(), 64), None, "object"),
        (loop, (vector(), 64), GPUTarget("nowhere", 1, 32), "nowhere"),
        (guarded, (vector(), 4096), None, "KeyError"),  # WIDE asks for num_warps
    ],
)
def test_calls_that_do_not_bind_heuristics_that_fail_and_unknown_targets_are_refused(
    fn: Any, args: tuple[Any, ...], target: GPUTarget | None, says: str
) -> None:
    with pytest.raises(FeatureError, match=says):
        trace(fn, args, {}, {"B": 64}, target=target)
