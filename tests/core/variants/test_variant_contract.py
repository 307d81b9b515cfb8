"""What a variant's source may hold, and how its entry is launched."""

from __future__ import annotations

import ast
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Argument, Config
from forecast_autotune.variants.contract import evaluate_literal, read_contract
from forecast_autotune.variants.entry import KernelEntry
from tests.core.variants.varied import BASE

# --- the contract ---

SIZED = "def workspace(meta, arguments, base, grid):\n"

RICH = '''"""A variant with everything."""
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

WIDTH = tl.constexpr(4)
CONFIGS = [
    {"kwargs": {"BLOCK": b, "PARTS": p}, "num_warps": w}
    for b, w in [(64, 2), (128, 4)]
    for p in (1, 2)
    if b * p <= 128
]
RESET_TO_ZERO = ["out"]


def workspace(meta, arguments, base, grid):
    return meta["BLOCK"] * grid[0], base[0]


def grid(meta, arguments, base):
    tiles = triton.cdiv(arguments["n"], meta["BLOCK"])
    return (min(tiles, base[0]) * meta["PARTS"],)


@triton.jit
def helper(v):
    return v + v


@triton.jit
def double(x, out, n, BASE_GRID_0, WORKSPACE, COUNTERS, BLOCK: tl.constexpr, PARTS: tl.constexpr = 1):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, helper(tl.load(x + i, mask=i < n)), mask=i < n)
'''


def test_memory_is_no_constant() -> None:
    source = BASE.replace("out, n,", "out, n, COUNTERS: tl.constexpr,", 1)
    with pytest.raises(RecordError, match="COUNTERS is memory"):
        read_contract(f"{source}\n\n{SIZED}    return 1, 1\n", "double")


def test_memory_is_filled_in_only_where_a_plain_function_sizes_it() -> None:
    source = BASE.replace("out, n,", "out, n, WORKSPACE,", 1)
    own = ("x", "out", "n", "WORKSPACE")
    assert read_contract(source, "double").parameters == own
    helper = source + "\n\n@triton.jit\ndef workspace(v):\n    return v\n"
    assert read_contract(helper, "double").parameters == own
    sized = f"{source}\n\n{SIZED}    return 1, 1\n"
    assert read_contract(sized, "double").parameters == ("x", "out", "n")


def test_a_contract_is_read_without_importing() -> None:
    result = read_contract(RICH, "double")
    assert result.parameters == ("x", "out", "n")
    assert result.meta == ("BLOCK", "PARTS")
    assert [(dict(c.kwargs), c.num_warps) for c in result.configs] == [
        ({"BLOCK": 64, "PARTS": 1}, 2),
        ({"BLOCK": 64, "PARTS": 2}, 2),
        ({"BLOCK": 128, "PARTS": 1}, 4),
    ]
    assert (result.reset_to_zero, result.grid) == (("out",), True)
    result.require_same_parameters(["x", "out", "n"])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("import triton\n", "import triton\nimport os\n", "imports triton and triton.language alone, not os"),
        ("import triton\n", "import triton\nfrom triton import runtime\n", "of triton, not"),
        ("import triton\n", "import triton\nfrom .triton import x\n", r"not \.triton"),
        ("import triton\n", "import triton\nprint(1)\n", "runs nothing else"),
        ("import triton\n", "import triton\ntriton.set_allocator(print)\n", "launches have an allocator"),
        (
            "import triton\n",
            "import triton\nfrom triton.tools.tensor_descriptor import TensorDescriptor\n",
            "its kernel makes descriptors, by tl.make_tensor_descriptor",
        ),
        (
            "import triton\n",
            "import triton\nCONFIGS = [open('x', 'w')]\n",
            "line 2: CONFIGS must be a list like",
        ),
        ("import triton\n", "import triton\nfor i in (1,): pass\n", "runs nothing else"),
        ("@triton.jit\n", "@triton.jit\n@open('x')\n", "decorated with @triton.jit"),
        ("@triton.jit\n", "", "must be a @triton.jit function"),
        ("BLOCK: tl.constexpr", "BLOCK: tl.constexpr = open('x')", "must be constants"),
        ("2 *", "x.__class__ *", "no business with __class__"),
        (
            "@triton.jit\n",
            "def grid(meta, arguments):\n    return open('x')\n\n\n@triton.jit\n",
            "grid may call",
        ),
        ("@triton.jit\n", "def grid(meta, arguments):\n    import os\n\n\n@triton.jit\n", "only calculates"),
        ("@triton.jit\n", "def grid(meta):\n    return (1,)\n\n\n@triton.jit\n", "grid takes"),
        ("@triton.jit\n", "grid = (1,)\n\n\n@triton.jit\n", "grid must be a function"),
        (
            "@triton.jit\n",
            "CONFIGS = [\n    {'BLOCK': 1},\n    {'kwargs': {'WIDE': 1}},\n]\n\n\n@triton.jit\n",
            r"line 7 of the variant: CONFIGS give WIDE, which is neither .*\(BLOCK\) nor one of num_warps",
        ),
        ("@triton.jit\n", "CONFIGS = []\n\n\n@triton.jit\n", "must be a list like"),
        ("@triton.jit\n", "CONFIGS = [{'BLOCK': 1, 'warps': 4}]\n\n\n@triton.jit\n", "give warps"),
        (
            "@triton.jit\n",
            "CONFIGS = [{'BLOCK': 1, 'ir_override': 'f'}]\n\n\n@triton.jit\n",
            "give ir_override",
        ),
        (
            "@triton.jit\n",
            "CONFIGS = [{'BLOCK': 1, 'num_warps': '4'}]\n\n\n@triton.jit\n",
            "num_warps must be",
        ),
        ("@triton.jit\n", "CONFIGS = [{'BLOCK': [1]}]\n\n\n@triton.jit\n", "gives BLOCK a list"),
        (
            "@triton.jit\n",
            "CONFIGS = [{'kwargs': {'BLOCK': 1}, 'BLOCK': 2}]\n\n\n@triton.jit\n",
            "BLOCK twice",
        ),
        ("@triton.jit\n", "@triton.autotune(configs=[], key=[])\n@triton.jit\n", "belong into CONFIGS"),
        ("@triton.jit\n", "RESET_TO_ZERO = ['acc']\n\n\n@triton.jit\n", "must list runtime parameters"),
        (
            "@triton.jit\n",
            f"{SIZED}    return 1, 1\n\n\n@triton.jit\n",
            "double takes neither",
        ),
        ("@triton.jit\n", f"{SIZED}    return open('x')\n\n\n@triton.jit\n", "workspace may call"),
        ("@triton.jit\n", "def workspace(meta):\n    return 1, 1\n\n\n@triton.jit\n", "workspace takes"),
        ("@triton.jit\n", "workspace = (1, 1)\nX = 1\n\n\n@triton.jit\n", "must be a function"),
        ("def double", "def triple", "must define 'double'"),
        ("tl.arange", "tl.arange((", "is not Python"),
    ],
)
def test_what_breaks_the_contract_is_named(old: str, new: str, said: str) -> None:
    with pytest.raises(RecordError, match=said):
        read_contract(BASE.replace(old, new, 1), "double")


@pytest.mark.parametrize("parameters", ["x, n, out", "x, out", "x, out, n, m", "a, out, n"])
def test_other_runtime_parameters_do_not_fit(parameters: str) -> None:
    other = BASE.replace("x, out, n", parameters, 1).replace("mask=i < n", "mask=i < 1")
    with pytest.raises(RecordError, match=r"by these names and in this order; it has \("):
        read_contract(other, "double").require_same_parameters(["x", "out", "n"])


def test_flat_and_nested_configs_are_one_dialect() -> None:
    head = "CONFIGS = [{}]\n\n\n@triton.jit\n"
    flat, nested = (
        read_contract(BASE.replace("@triton.jit\n", head.format(text), 1), "double").configs
        for text in (
            '{"BLOCK": 1024, "num_warps": 2, "maxnreg": 64}',
            '{"kwargs": {"BLOCK": 1024}, "num_warps": 2, "maxnreg": 64}',
        )
    )
    assert flat == nested == (Config.of({"BLOCK": 1024}, num_warps=2, maxnreg=64),)


@pytest.mark.parametrize(
    ("parameters", "configs", "line"),
    [
        ("BLOCK: tl.constexpr, MORE: tl.constexpr", "", 6),
        ("BLOCK: tl.constexpr, MORE: tl.constexpr", '[{"BLOCK": 64, "MORE": 1}, {"BLOCK": 64}]', 10),
        ("BLOCK: tl.constexpr, MORE: tl.constexpr", '[{"BLOCK": 64}]', 10),
        ("BLOCK: tl.constexpr", '[{"num_warps": 2}]', 10),
        ("BLOCK: tl.constexpr, MORE: tl.constexpr = 2", "", None),
        ("BLOCK: tl.constexpr, num_warps: tl.constexpr", '[{"BLOCK": 64}]', None),
        ("BLOCK: tl.constexpr, MODE: tl.constexpr", '[{"BLOCK": 64}]', None),
        ("MODE: tl.constexpr", "", None),
    ],
)
def test_a_parameter_without_a_value_is_refused_where_the_source_is_read(
    parameters: str, configs: str, line: int | None
) -> None:
    source = BASE.replace("BLOCK: tl.constexpr", parameters) + (
        f"\n\nCONFIGS = {configs}\n" if configs else ""
    )
    base = read_contract(
        BASE.replace("BLOCK: tl.constexpr", "BLOCK: tl.constexpr, MODE: tl.constexpr"), "double"
    )
    tuned = [Config.of({"BLOCK": 128}), Config.of({"BLOCK": 256})]
    given = (Argument("MODE", "constexpr", value=1),)
    promised = read_contract(source, "double")
    if line is None:
        promised.require_fit(base, tuned, [given])
        return
    missing = "BLOCK" if "num_warps" in configs else "MORE"
    with pytest.raises(RecordError, match=rf"{missing} of double has no value.*give it one in CONFIGS"):
        promised.require_fit(base, tuned, [given])


def test_calculated_lists_are_bounded() -> None:
    def read(text: str) -> Any:
        return evaluate_literal(ast.parse(text, mode="eval").body)

    assert read("[2 * a if a % 2 else -a for a in range(4)]") == [0, 2, -2, 6]
    assert read("[max(1, len((1, 2))), (4, 8)[1], not 0, 3 in (1, 3) and 1 < 2 <= 2]") == [2, 8, True, True]
    for text in (
        "2 ** 99",
        "1 << 99",
        "[0 for a in range(99) for b in range(99)]",
        "x",
        "().count",
        "f'{1}'",
    ):
        with pytest.raises(ValueError):  # noqa: PT011 - one kind of error, many texts
            read(text)


# --- launching ---


class Tensor:
    """As much of a tensor as a launch asks of one that lies beside its memory."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int, str]] = []

    def new_empty(self, shape: tuple[int], dtype: str) -> str:
        self.made.append(("empty", *shape, dtype))
        return f"{shape[0]} of any value"

    def new_zeros(self, shape: tuple[int], dtype: str) -> str:
        self.made.append(("zeros", *shape, dtype))
        return f"{shape[0]} zeros"


class Recorder:
    """Stands in the place of a compiled kernel, which knows no more of its launch than this."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.arg_names = ["x", "out", "n", "BLOCK"]

    def run(self, *args: Any, **given: Any) -> str:
        self.launches.append({**dict(zip(self.arg_names, args, strict=False)), **given})
        return "launched"


def entry(**options: Any) -> tuple[KernelEntry, Recorder]:
    recorder = Recorder()
    return KernelEntry(recorder, ("x", "out", "n"), ("BLOCK",), **options), recorder


def test_an_own_grid_sees_options_arguments_and_the_calls_grid() -> None:
    def own(meta: dict[str, Any], named: dict[str, Any], base: tuple[int, ...]) -> tuple[int, ...]:
        return meta["num_warps"], meta["BLOCK"], named["n"] + base[0]

    result, recorder = entry(grid=own, base=("BASE_GRID_0", "BASE_GRID_2"))
    result.run((7, 3), {"x": 1, "out": 2, "n": 300}, {"BLOCK": 64}, {"num_warps": 4})
    (launch,) = recorder.launches
    assert launch["grid"] == (4, 64, 307)
    assert (launch["BASE_GRID_0"], launch["BASE_GRID_2"]) == (7, 1)
    two, other = entry(grid=lambda meta, named: (named["n"],))
    two.run(None, {"x": 1, "out": 2, "n": 300}, {"BLOCK": 64}, {})
    assert other.launches[0]["grid"] == (300,)


def sized(numbers: Any, *memory: str) -> tuple[KernelEntry, Recorder]:
    return entry(memory=memory, workspace=lambda meta, named, base, grid: numbers(meta, named, base, grid))


@pytest.fixture
def _dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(count: int, dtype: str, device: str) -> str:
        return f"{count} of {dtype} on {device}"

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(float32="float32", int32="int32", empty=empty))


@pytest.mark.usefixtures("_dtypes")
def test_a_launch_has_memory_of_its_own_and_what_is_compiled_has_its_types_alone() -> None:
    result, recorder = sized(
        lambda meta, named, base, grid: (meta["BLOCK"] * named["n"], base[0] + grid[0] + meta["num_warps"]),
        "WORKSPACE",
        "COUNTERS",
    )
    beside = Tensor()
    for _ in range(2):
        result.run((7,), {"x": beside, "out": 2, "n": 3}, {"BLOCK": 64}, {"num_warps": 4})
    assert beside.made == [("empty", 192, "float32"), ("zeros", 18, "int32")] * 2
    assert [(r["WORKSPACE"], r["COUNTERS"]) for r in recorder.launches] == [
        ("192 of any value", "18 zeros")
    ] * 2
    beside.made.clear()
    given = result.arguments((7,), {"x": beside, "out": 2, "n": 3}, {"BLOCK": 64}, {})
    assert (given["WORKSPACE"], given["COUNTERS"]) == ("0 of float32 on meta", "0 of int32 on meta")
    assert beside.made == []  # nothing of the device's, which a forked process cannot reach


@pytest.mark.usefixtures("_dtypes")
@pytest.mark.parametrize("numbers", [(1,), (1, -1), (1, 2, 3)])
def test_numbers_of_elements_that_cannot_be_are_errors(numbers: tuple[int, ...]) -> None:
    result, _ = sized(lambda *given: numbers, "WORKSPACE")
    with pytest.raises(RecordError, match="workspace must return two numbers of elements"):
        result.run((7,), {"x": Tensor(), "out": 2, "n": 3}, {"BLOCK": 64}, {})
    with pytest.raises(RecordError, match="needs a tensor among the call's arguments"):
        result.run((7,), {"x": 1, "out": 2, "n": 3}, {"BLOCK": 64}, {})


@pytest.mark.usefixtures("_dtypes")
def test_what_its_functions_do_to_arguments_is_none_of_the_launchs() -> None:
    def greedy(
        meta: dict[str, Any], arguments: dict[str, Any], base: Any, grid: Any = (1,)
    ) -> tuple[int, int]:
        assert arguments.pop("n", 3) == 3
        meta.clear()
        return 5, 6

    result, recorder = entry(
        memory=("COUNTERS",),
        workspace=greedy,
        grid=lambda meta, arguments, base: greedy(meta, arguments, base),
    )
    named, meta = {"x": Tensor(), "out": 2, "n": 3}, {"BLOCK": 64}
    result.run((7,), named, meta, {"num_warps": 4})
    assert (len(named), meta) == (3, {"BLOCK": 64})
    (launch,) = recorder.launches
    assert {n: launch[n] for n in ("n", "BLOCK", "num_warps", "grid")} == {
        "n": 3,
        "BLOCK": 64,
        "num_warps": 4,
        "grid": (5, 6),
    }
