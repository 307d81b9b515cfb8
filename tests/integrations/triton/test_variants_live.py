"""Other sources of a kernel in a user's process: which may serve a call, what loads, and what a hit looks at."""

from __future__ import annotations

import contextvars
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import _allocation
from triton.tools.tensor_descriptor import TensorDescriptor

from forecast_autotune import autotune
from forecast_autotune.errors import SettingsError, VariantError
from forecast_autotune.records import Config, Problem
from forecast_autotune.store import Store
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_autotune.variants import Check, Origin, Provenance, Variant
from forecast_harness.targets.kernels.sizes import CallSizes
from forecast_integrations.device import current_device
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.variants.calls import CallForms, are_disjoint, overlap_pairs
from forecast_integrations.triton.variants.loading import VariantConfig, load_variant
from tests.integrations.null import double, fresh, tables, twice

pytestmark = pytest.mark.usefixtures("shared_cache")

SLOW = [triton.Config({"BLOCK": 128}, num_warps=w, num_stages=1) for w in (1, 2)]
"""The clock likes 4 warps and 3 stages best, which the base does not have."""
HEAD = """import triton
import triton.language as tl

CONFIGS = [{"kwargs": {"BLOCK": 256}, "num_warps": w, "num_stages": 3} for w in (2, 4)]


"""
BODY = """@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    tl.store(out + i, value + value, mask=i < n)
"""
FAST = HEAD + BODY


def arguments(n: int = 4096, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype), n


def call(tuner: Any, *args: Any) -> Any:
    given = args or arguments()
    return tuner[lambda meta: (triton.cdiv(given[2], meta["BLOCK"]),)](*given)


def checked(
    passed: bool = True, args: tuple[Any, ...] | None = None, device: str = "", kernel: Any = double
) -> Check:
    """A check of calls like these, on the null device."""
    named = dict(zip(kernel.arg_names, args or arguments(), strict=False))
    signature = CallSizes.of([describe.call_arguments(kernel, named)]).signature(["out"])
    return Check(device or current_device().slug, signature, passed)


def record(source: str = FAST, *checks: Check, kernel: Any = double) -> Variant:
    base = describe.kernel_record(kernel)
    made = Variant.of(base.name, base.source_sha256, source, Provenance(Origin.LLM), title="fast")
    return Variant(**{**vars(made), "checks": checks})


def tuned(variants: Any = None, configs: Any = None, **options: Any) -> Any:
    given = {"store": False, "mode": "exhaustive", **options}
    return autotune(configs=configs or SLOW, key=["n"], variants=variants, **given)(fresh(double))


def imported() -> set[str]:
    return {name for name in sys.modules if name.startswith("forecast_autotune_variant_")}


# --- candidates ---


def test_a_verified_variant_with_faster_configs_is_chosen_and_launched(device: Any, tmp_path: Path) -> None:
    variant = record(FAST, checked())
    tuner = tuned([variant], store=tmp_path / "store")
    kernel = call(tuner)
    assert tuner.decision.chosen.variant == variant.name
    assert tuner.decision.candidates == 4
    assert (kernel.metadata.num_warps, kernel.metadata.num_stages) == (4, 3)
    before = device.launches
    assert call(tuner).metadata.num_warps == 4
    assert device.launches == before + 1
    (table,) = tables(tmp_path / "store")
    assert {m.candidate.variant for m in table.measurements} == {"base", variant.name}
    own = {k.partition("|")[0] for k in table.problem.ttir if "|" in k}
    assert own == {variant.name}, "it has IR of its own"
    assert "BLOCK=128" in table.problem.ttir
    later = tuned([variant], store=Store(tmp_path / "store"), mode="frozen")
    assert call(later).metadata.num_warps == 4
    device.clock = lambda metadata: metadata.num_warps  # at other sizes the base is faster
    assert call(tuner, *arguments(8192)).metadata.num_warps == 1
    assert call(tuner).metadata.num_warps == 4, "it is served where it won"


@pytest.mark.parametrize(
    "checks",
    [
        lambda: (),
        lambda: (checked(passed=False),),
        lambda: (checked(device="another"),),
        lambda: (checked(device="interpreter"),),
        lambda: (checked(args=arguments(dtype=torch.float16)),),
    ],
    ids=["unchecked", "wrong", "elsewhere", "interpreted", "other dtype"],
)
def test_what_was_not_verified_here_is_neither_candidate_nor_imported(device: Any, checks: Any) -> None:
    before = imported()
    tuner = tuned([record(FAST, *checks())])
    assert call(tuner).metadata.num_warps == 2
    assert tuner.decision.candidates == 2
    assert imported() == before


def test_a_variant_of_another_source_is_none_of_this_kernels(device: Any) -> None:
    other = record(FAST.replace("def double", "def twice"), checked(), kernel=twice)
    assert call(tuned([other])).metadata.num_warps == 2


WRITES = """import pathlib

pathlib.Path({path!r}).write_text("imported")

"""


def test_importing_never_precedes_verification(device: Any, tmp_path: Path) -> None:
    """Not even a forged check gets a module imported that does more than define kernels."""
    trace = tmp_path / "imported"
    source = WRITES.format(path=str(trace)) + FAST
    store = Store(tmp_path / "store")
    store.put_variant(record(source))
    assert call(tuned(store)).metadata.num_warps == 2
    store.put_variant(record(source), [checked()])
    with pytest.warns(UserWarning, match="cannot be used: line 1 of the variant"):
        assert call(tuned(store)).metadata.num_warps == 2
    assert not trace.exists()


# --- where they come from ---


@pytest.mark.parametrize("form", ["one", "list", "store", "path", "text", "generator"])
def test_every_form_of_the_argument(device: Any, tmp_path: Path, form: str) -> None:
    variant, folder = record(FAST, checked()), tmp_path / "elsewhere"
    store = Store(folder)
    store.put_variant(variant)

    def generator(problem: Problem) -> list[Variant]:
        assert problem.kernel.name == "double"
        return [variant]

    forms = {"one": variant, "list": [variant], "store": store, "path": folder, "text": str(folder)}
    assert call(tuned({**forms, "generator": generator}[form])).metadata.num_warps == 4


def test_the_tuners_own_store_by_word_and_by_variable(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.default(tmp_path / "measurements").put_variant(record(FAST, checked()))
    assert call(tuned(None, store=None)).metadata.num_warps == 2, "off by default"
    assert call(tuned("store", store=None)).metadata.num_warps == 4
    monkeypatch.setenv("FORECAST_AUTOTUNE_VARIANTS", "store")
    assert call(tuned(None, store=None)).metadata.num_warps == 4
    single = tuned(None, configs=SLOW[:1], store=None)
    assert call(single).metadata.num_warps == 4, "one config and a variant are two candidates"
    assert call(tuned(None, store=None, mode="deterministic")).metadata.num_warps in (1, 2), (
        "no store may decide"
    )


def test_kernels_in_a_list_are_named(device: Any) -> None:
    tuner = tuned([fresh(twice), fresh(twice)])
    assert call(tuner).metadata.name == "twice"
    names = {c.function.name for c in tuner.configs_timings if isinstance(c, VariantConfig)}
    assert names == {"twice", "twice 2"}
    assert tuner.decision.candidates == 6


@pytest.mark.parametrize(
    ("variants", "said"),
    [
        ({"base": twice}, "other than base"),
        ({"base hook 2": twice}, "other than base"),
        ({"a|b": twice}, "without |"),
        ({"a": 7}, "must hold kernels"),
        ([7], "must hold kernels"),
        (7, "takes kernels by name"),
    ],
)
def test_what_is_no_variant_fails_at_the_decorator(device: Any, variants: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said.replace("|", r"\|")):
        tuned(variants)


def test_a_generator_that_fails_leaves_the_base(device: Any) -> None:
    def generator(problem: Problem) -> list[Variant]:
        raise OSError("no model there")

    tuner = tuned(generator)
    with pytest.warns(UserWarning, match="no model there"):
        assert call(tuner).metadata.num_warps == 2


# --- failing variants ---

FULL = FAST.replace("BLOCK", "WIDE").replace("out, n, ", "out, n, BASE_GRID_0, ")


@pytest.mark.parametrize(
    "source",
    [
        FAST.replace("    i = tl.program_id", '    tl.static_assert(False, "no")\n    i = tl.program_id'),
        FAST.replace("n, BLOCK: tl.constexpr", "n, BLOCK: tl.constexpr, WIDE: tl.constexpr"),
        FAST.replace("value + value", "value + unknown"),
        FAST.replace(BODY, "def grid(meta, arguments):\n    return (arguments['gone'],)\n\n\n" + BODY),
        FULL,
    ],
    ids=["refuses", "lacks a value", "does not compile", "grid raises", "the call's grid cannot be told"],
)
def test_a_variant_that_cannot_run_is_a_failed_candidate(device: Any, tmp_path: Path, source: str) -> None:
    tuner = tuned([record(source, checked())], store=tmp_path / "store")
    assert call(tuner).metadata.num_warps == 2
    assert tuner.decision.candidates == 4
    (table,) = tables(tmp_path / "store")
    outcomes = {str(m.outcome) for m in table.measurements if m.candidate.variant != "base"}
    assert outcomes
    assert outcomes <= {"compile_error", "runtime_error"}


def test_other_parameters_are_refused_with_the_rule(device: Any) -> None:
    tuner = tuned([record(FAST.replace("x, out, n", "out, x, n"), checked())])
    with pytest.warns(
        UserWarning, match=r"must have its runtime parameters \(x, out, n\).*it has \(out, x, n\)"
    ):
        assert call(tuner).metadata.num_warps == 2


# --- calls that a key does not tell apart ---


def test_another_call_under_the_same_key_falls_back_to_the_base(device: Any) -> None:
    tuner = tuned([record(FAST, checked())])
    assert call(tuner).metadata.num_warps == 4
    x, out, n = arguments()
    longer = torch.empty(n + 4)
    for odd in (
        (longer[1:-3], out, n),
        (x, torch.empty(2 * n)[::2], n),
        (x, x, n),
        (x[: n // 2], x[: n // 2], n),
    ):
        kernel = call(tuner, *odd)
        assert kernel.metadata.num_warps == 2, "the base, with its own best config"
        assert not isinstance(tuner.best_config, VariantConfig)
    assert call(tuner, x, out, n).metadata.num_warps == 4
    assert isinstance(tuner.best_config, VariantConfig)
    assert len(tuner.cache) == 1


def test_a_dtype_that_was_not_verified_is_the_bases(device: Any) -> None:
    tuner = tuned([record(FAST, checked())])
    assert call(tuner, *arguments(dtype=torch.float16)).metadata.num_warps == 2
    assert tuner.decision.candidates == 2
    assert call(tuner).metadata.num_warps == 4


def may_overlap(named: dict[str, Any], written: frozenset[str] | None) -> bool:
    layout, _, tensors, begins, _ = CallForms((), ())((), named)
    return not are_disjoint(begins, overlap_pairs(layout.names, tensors, written))


def test_overlap_matters_where_something_is_written() -> None:
    x = torch.empty(100)
    apart = {"x": x[:50], "out": x[50:], "n": 5}
    shared = {"x": x[:60], "y": x[40:], "out": torch.empty(9)}
    assert not may_overlap(apart, None)
    assert may_overlap(shared, None)
    assert not may_overlap(shared, frozenset({"out"})), "two inputs may share memory"
    assert may_overlap(shared, frozenset({"y"}))
    assert not may_overlap({"x": x[:0], "y": x}, None)
    x = torch.empty(64, 64)
    over = TensorDescriptor.from_tensor(x, [16, 16])
    assert may_overlap({"x": over, "out": x}, frozenset({"out"})), "by the tensor that is described"
    assert may_overlap({"x": x, "out": over}, frozenset({"out"}))
    assert not may_overlap({"x": over, "out": torch.empty(64, 64)}, frozenset({"out"}))


# --- grids ---

HALF = FAST.replace(
    "@triton.jit",
    "def grid(meta, arguments, base):\n"
    '    return (triton.cdiv(arguments["n"], 2 * meta["BLOCK"]), base[0] // base[0])\n\n\n@triton.jit',
)
PERSISTENT = (
    HEAD
    + """def grid(meta, arguments, base):
    return (min(8, base[0]),)


@triton.jit
def double(x, out, n, BASE_GRID_0: tl.constexpr, BLOCK: tl.constexpr):
    for tile in range(tl.program_id(0), BASE_GRID_0, tl.num_programs(0)):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)
"""
)


@pytest.mark.parametrize(("source", "grid"), [(HALF, (8, 1)), (PERSISTENT, (8,))])
def test_own_grids_are_forecast_measured_and_kept(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, grid: Any
) -> None:
    variant = record(source, checked())
    tuner = tuned([variant], store=tmp_path / "store")
    kernel = call(tuner)
    assert kernel.metadata.num_warps == 4
    run, grids, blocks = triton.JITFunction.run, [], []

    def noted(self: Any, *args: Any, grid: Any, **kwargs: Any) -> Any:
        grids.append(grid)
        blocks.append(kwargs.get("BLOCK"))
        return run(self, *args, grid=grid, **kwargs)

    monkeypatch.setattr(triton.JITFunction, "run", noted)
    # Whoever keeps what a launch returned launches it by the base's arguments, with constants or without, and the grid
    # of the variant's values, with which the base is launched where the variant was not verified.
    for given in (arguments(), (*arguments(), 128), arguments(dtype=torch.float16)):
        kernel[(16 if given[0].dtype is torch.float16 else 32,)](*given)
    assert (grids, blocks[-1]) == ([grid, grid, (16,)], 256)
    (table,) = tables(tmp_path / "store")
    found = {m.candidate.variant: m.grid for m in table.measurements}
    assert found == {"base": (32,), variant.name: grid}


def test_what_depends_on_the_grid_is_traced_for_every_grid(device: Any, tmp_path: Path) -> None:
    tuner = tuned([record(PERSISTENT, checked())], store=tmp_path / "store")
    for n in (4096, 8192):
        call(tuner, *arguments(n))
    texts = [{t for k, t in table.problem.ttir.items() if "|" in k} for table in tables(tmp_path / "store")]
    assert len(texts) == 2
    assert not texts[0] & texts[1]


# --- files and hooks ---


def test_sources_lie_where_tracebacks_find_them(device: Any, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.put_variant(record(FAST, checked()))
    call(tuned("store", store=store))
    (module,) = (tmp_path / "store").glob("variants/modules/*.py")
    assert module.read_text() == FAST
    module.write_text("import os\nos._exit(9)\n")
    assert call(tuned("store", store=store)).metadata.num_warps == 4, "the record's text runs, not the file's"


def test_a_hook_that_all_configs_share_prepares_the_variants_too(device: Any) -> None:
    seen: list[tuple[int, int]] = []

    def hook(kwargs: dict[str, Any]) -> None:
        seen.append((kwargs["BLOCK"], kwargs["n"]))

    shared = [triton.Config({"BLOCK": 128}, num_warps=1, pre_hook=hook)]
    call(tuned([record(FAST, checked())], configs=shared))
    assert {block for block, _ in seen} == {128, 256}
    assert {n for _, n in seen} == {4096}


def test_configs_of_the_base_without_what_the_variant_dropped(device: Any) -> None:
    body = BODY.replace(", BLOCK: tl.constexpr", "").replace("BLOCK", "64")
    grid = "def grid(meta, arguments):\n    return (triton.cdiv(arguments['n'], 64),)\n\n\n"
    source = HEAD[: HEAD.index("CONFIGS")] + grid + body
    configs = [triton.Config({"BLOCK": b}, num_warps=w) for b in (128, 256) for w in (1, 4)]
    tuner = tuned([record(source, checked())], configs=configs)
    call(tuner)
    own = [c for c in tuner.configs_timings if isinstance(c, VariantConfig)]
    assert sorted((c.kwargs, c.num_warps) for c in own) == [({}, 1), ({}, 4)]


def test_loading_says_what_is_wrong_and_a_records_configs_beat_those_of_the_source(device: Any) -> None:
    with pytest.raises(VariantError, match="cannot be used"):
        load_variant(record(FAST.replace("n, BLOCK", "BLOCK")), double, None)
    given = Variant(**{**vars(record(FAST)), "configs": (Config.of({"BLOCK": 512}, num_warps=8),)})
    for made, warps in ((record(FAST), [2, 4]), (given, [8])):
        loaded = load_variant(made, double, None)
        assert [c.num_warps for c in loaded.configs(SLOW)] == warps


def test_tuners_of_libraries_are_served_as_well(
    triton_patch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.default(tmp_path / "measurements").put_variant(record(FAST, checked()))
    monkeypatch.setenv("FORECAST_AUTOTUNE_VARIANTS", "store")
    monkeypatch.setenv("FORECAST_AUTOTUNE_MODE", "exhaustive")
    theirs = triton.autotune(SLOW, key=["n"])(fresh(double))
    assert call(theirs).metadata.num_warps == 4
    x, _, n = arguments()
    assert call(theirs, x, x, n).metadata.num_warps == 2


PLAIN = [triton.Config({"BLOCK": b}, num_warps=1, num_stages=1) for b in (64, 128)]


@triton.jit
def scaled(x, GROUP: tl.constexpr, out, n, by, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, by * tl.load(x + i, mask=i < n), mask=i < n)


def text(parameters: str, before: str = "", factor: str = "by") -> str:
    return f"""import triton
import triton.language as tl

CONFIGS = [{{"kwargs": {{"BLOCK": 256}}, "num_warps": 4, "num_stages": 3}}]
{before}

@triton.jit
def scaled({parameters}):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, {factor} * tl.load(x + i, mask=i < n), mask=i < n)
"""


ALL = "x, GROUP: tl.constexpr, out, n, by, BLOCK: tl.constexpr"
OWN = """

def grid(meta, arguments, base):
    return (base[0], meta["num_warps"])

"""
SIZED = """

def workspace(meta, arguments, base, grid):
    return base[0] * meta["BLOCK"], grid[0] + meta["num_warps"]

"""
SOURCES = {
    "the same": text(ALL),
    "another order": text("x, out, n, by, BLOCK: tl.constexpr, GROUP: tl.constexpr"),
    "dropped": text("x, out, n, by, BLOCK: tl.constexpr"),
    "own grid": text(ALL, OWN),
    "the calls grid": text(ALL + ", BASE_GRID_0"),
    "own memory": text(ALL + ", WORKSPACE, COUNTERS", SIZED),
    "zeroes": text(ALL, 'RESET_TO_ZERO = ["out"]\n'),
}


def scaled_arguments(n: int = 4096, by: Any = 3) -> dict[str, Any]:
    return {"x": torch.ones(n), "GROUP": 8, "out": torch.ones(n), "n": n, "by": by}


def tuned_to(source: str, by: Any = 3) -> Any:
    own = record(source, checked(args=tuple(scaled_arguments(by=by).values()), kernel=scaled), kernel=scaled)
    return autotune(PLAIN, key=["n"], variants=[own], store=False, mode="exhaustive")(fresh(scaled))


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def decided(device: Any, source: str, by: Any = 3) -> tuple[Any, list[dict[str, Any]]]:
    """A tuner whose variant has won, and what reaches a compiled kernel from now on, its launch grid as `grid`."""
    tuner = tuned_to(source, by)
    tuner[grid](*scaled_arguments(by=by).values())
    assert isinstance(tuner.best_config, VariantConfig)
    seen, launcher = list[dict[str, Any]](), device.launcher_cls

    def noting(source: Any, metadata: Any) -> Any:
        def launch(*given: Any) -> None:
            seen.append({"grid": given[:3], **dict(zip(source.fn.arg_names, given[9:], strict=True))})
            launcher(source, metadata)(*given)

        return launch

    device.launcher_cls = noting
    return tuner, seen


@pytest.mark.sampled(3)
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("positions", [5, 2, 1, 0])
def test_however_a_call_is_written_the_kernel_gets_its_arguments(
    device: Any, source: str, positions: int
) -> None:
    tuner, seen = decided(device, source)
    given = scaled_arguments()
    values, names = list(given.values()), list(given)
    rest = dict(zip(names[positions:], values[positions:], strict=True))
    for _ in range(3):
        compiled = tuner[grid](*values[:positions], **rest)
        assert isinstance(tuner.best_config, VariantConfig)
        assert (compiled.metadata.num_warps, compiled.metadata.num_stages) == (4, 3)
        found = seen.pop()
        assert found.pop("BASE_GRID_0", 16) == 16
        memory = [found.pop(n) for n in ("WORKSPACE", "COUNTERS") if n in found]
        assert [(m.dtype, len(m)) for m in memory] in ([], [(torch.float32, 4096), (torch.int32, 20)])
        assert bool(memory) == ("workspace" in source)
        assert found.pop("grid") == ((16, 4, 1) if "def grid" in source else (16, 1, 1))
        expected = {**given, "BLOCK": 256}
        assert found == {n: expected[n] for n in found}
        assert {"x", "out", "n", "by", "BLOCK"} <= set(found)
    assert (given["out"].sum() == 0) == ("RESET_TO_ZERO" in source)


@pytest.mark.parametrize("where", [(16,), [16], grid])
def test_the_launch_grid_is_the_calls(device: Any, where: Any) -> None:
    tuner, seen = decided(device, SOURCES["the calls grid"])
    tuner[where](**scaled_arguments())
    assert seen.pop()["BASE_GRID_0"] == 16


@pytest.mark.parametrize(("named", "by"), [(False, 3), (True, 0.5)])
def test_a_hit_is_described_once_and_looked_at_always(
    device: Any, monkeypatch: pytest.MonkeyPatch, named: bool, by: Any
) -> None:
    tuner, _ = decided(device, SOURCES["the same"], by)
    asked = []
    describing = describe.describe
    monkeypatch.setattr(describe, "describe", lambda *given: asked.append(1) or describing(*given))

    def variant(**changed: Any) -> bool:
        given = {**scaled_arguments(by=by), **changed}
        _ = tuner[grid](**given) if named else tuner[grid](*given.values())
        return isinstance(tuner.best_config, VariantConfig)

    assert variant()
    count = len(asked)
    assert variant()
    assert variant(x=torch.empty(4096), out=torch.empty(4096))
    assert by == 3 or variant(by=0.25)
    assert len(asked) == count, "nothing that a check looks at has changed"
    whole = torch.empty(8192)
    assert not variant(x=whole[:4096], out=whole[2048:6144])
    assert not variant(out=torch.empty(8192)[::2])
    assert not variant(x=whole[1:4097])
    assert not variant(by=3.0 if by == 3 else 3)
    assert not variant(GROUP=16)
    assert not variant(by=True)
    assert variant()


@pytest.mark.parametrize("any_count", [True, False])
def test_a_count_that_changes_with_every_call_goes_by_its_class(
    device: Any, monkeypatch: pytest.MonkeyPatch, any_count: bool
) -> None:
    inferred = CallSizes.of
    if any_count:
        monkeypatch.setattr(
            CallSizes, "of", lambda calls: (s := inferred(calls)).with_classes(dict.fromkeys(s.sizes, "any"))
        )
    tuner, seen = decided(device, SOURCES["the same"])
    describing, asked, given = describe.describe, list[Any](), scaled_arguments()
    monkeypatch.setattr(describe, "describe", lambda *named: asked.append(1) or describing(*named))
    counts = [n for n in range(20, 60) if n % 16]
    for count in counts:
        tuner[grid](**given | {"by": count})
    assert [launched["by"] for launched in seen] == counts
    assert len(asked) <= 3, "twice by value, once by class"
    right = {3, 16, 21, 32, 128, 4096, 8192} if any_count else {3}
    for count in (21, 16, 4096, 3, 2**31 + 1, 1, 32, -5, 128, 8192, 0, 21):
        launched = tuner[grid](**given | {"by": count})
        config = tuner.best_config
        assert isinstance(config, VariantConfig) is (count in right), count
        kernel = config.function.kernel if count in right else tuner.fn
        own = kernel.warmup(**given | {"by": count}, grid=(1,), **config.all_kwargs())
        assert launched.hash == own.hash, "compiled as Triton does it for this value"


def test_a_tensor_that_was_changed_in_place_is_looked_at_again(device: Any) -> None:
    tuner, _ = decided(device, SOURCES["the same"])
    given = scaled_arguments()
    tuner[grid](**given)
    assert isinstance(tuner.best_config, VariantConfig)
    given["out"].resize_(2048)
    tuner[grid](**given)
    assert not isinstance(tuner.best_config, VariantConfig)


DESCRIBED = HEAD + BODY.replace(
    "    value = tl.load(x + i, mask=i < n)\n",
    "    value = tl.make_tensor_descriptor(x, [n], [1], [BLOCK]).load([tl.program_id(0) * BLOCK])\n",
)


def test_descriptors_of_a_variant_have_an_allocator_unless_the_program_has_set_one(device: Any) -> None:
    loaded = load_variant(record(DESCRIBED), double, None)
    seen = []
    for own in (None, lambda size, alignment, stream: None):
        context = contextvars.copy_context()
        if own is not None:
            context.run(triton.set_allocator, own)
        launch = {"grid": (16, 1, 1), "BLOCK": 256, "num_warps": 4, "num_stages": 3}
        context.run(loaded.run, *arguments(), **launch)
        seen.append(context[_allocation._allocator])
    assert seen[1] is own
    assert not isinstance(seen[0], _allocation.NullAllocator)


class Curious:
    """Keeps the queries that it answers."""

    name, version = "curious", "1"

    def __init__(self) -> None:
        self.queries: list[Query] = []

    def forecast(self, query: Query) -> Forecasts:
        self.queries.append(query)
        return DefaultSurrogate().forecast(query)


def test_a_live_query_has_the_source_of_every_variant(device: Any) -> None:
    variant, base = record(FAST, checked()), describe.kernel_record(double).source
    assert base.startswith("def double(")
    own = {"mine": describe.kernel_record(twice).source}
    for given, more in ((None, {}), ([variant], {variant.name: FAST}), ({"mine": fresh(twice)}, own)):
        surrogate = Curious()
        call(tuned(given, mode="skip", surrogate=surrogate))  # a clock may have timed all before it is asked
        assert dict(surrogate.queries[0].sources) == {"base": base, **more}


@triton.jit
def added(x, out, n, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    for part in range(PARTS):
        i = (tl.program_id(0) * PARTS + part) * (BLOCK // PARTS) + tl.arange(0, BLOCK // PARTS)
        value = tl.load(x + i, mask=i < n)
        tl.store(out + i, value + value, mask=i < n)


def test_a_kernel_that_is_tuned_brings_its_own_configs(device: Any) -> None:
    """One that lists none for its own meta-parameters fails alone, and the call is decided without it."""
    own = [triton.Config({"BLOCK": 256, "PARTS": parts}, num_warps=4) for parts in (1, 2)]
    tuner = tuned({"tuned": triton.autotune(own, key=[])(added), "bare": added})
    assert call(tuner).metadata.num_warps == 4
    assert tuner.decision.chosen.variant == "tuned"
    assert tuner.decision.candidates == 6


def test_a_word_that_names_no_folder_is_refused(device: Any) -> None:
    with pytest.raises(SettingsError, match="'sotre' is no folder"):
        tuned("sotre")
