"""Rewrites of syntax trees: where they apply, where they must not, and that what they give is right."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Argument
from forecast_autotune.variants import Origin, Variant
from forecast_autotune.variants.contract import read_contract
from forecast_harness.authors.triton import REWRITES, variants_of
from tests.core.captured_output import needs_triton
from tests.harness.authors.mechanical_sources import EVERY, MOMENTS, ODD, REFUSED, SIMPLE_TILES, SOFTMAX

SHA = "0" * 64
WORKER = Path(__file__).with_name("mechanical_worker.py")


def tensor(name: str, dtype: str, *shape: int, aligned: bool = True) -> Argument:
    stride = tuple(shape[i + 1] if i + 1 < len(shape) else 1 for i in range(len(shape)))
    return Argument(name, "tensor", dtype=dtype, shape=shape, stride=stride, aligned=aligned)


def scalar(name: str, value: int) -> Argument:
    return Argument(name, "scalar", dtype="i32", value=value)


def product(*, c: str = "float32", k: int = 32, aligned: bool = True) -> list[Argument]:
    """Arguments of the matmul, 64 x k times k x 48."""
    strides = {"am": k, "ak": 1, "bk": 48, "bn": 1, "cm": 48, "cn": 1}
    return [
        tensor("a_ptr", "float16", 64, k, aligned=aligned),
        tensor("b_ptr", "float16", k, 48, aligned=aligned),
        tensor("c_ptr", c, 64, 48),
        *(scalar(n, v) for n, v in {"M": 64, "N": 48, "K": k}.items()),
        *(scalar(f"stride_{n}", v) for n, v in strides.items()),
    ]


ARGUMENTS: dict[str, list[Argument]] = {"matmul": product()}


def made(name: str, *only: str, source: str = "", **options: Any) -> list[Variant]:
    """Variants of one of the kernels, or of a source in its place."""
    options = {"arguments": ARGUMENTS.get(name, []), "combine": False, "limit": 100, **options}
    return variants_of(source or EVERY[name], name, SHA, only=only, **options)


def plain_functions(source: str) -> tuple[Any, Any]:
    """`grid` and `workspace` of a source, without what needs Triton."""
    plain = [n for n in ast.parse(source).body if getattr(n, "name", "") in ("grid", "workspace")]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(plain, []), "<variant>", "exec"), names)
    return names["grid"], names["workspace"]


def used(found: list[Variant]) -> set[str]:
    return {name for v in found for name in v.extra["rewrites"]}


# --- the list ---


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", EVERY)
def test_variants_are_distinct_python_that_keeps_the_contract(name: str) -> None:
    base = read_contract(EVERY[name], name)
    found = made(name, combine=True)
    assert found
    assert len({v.name for v in found}) == len({v.source for v in found}) == len(found)
    for variant in found:
        read_contract(variant.source, name).require_same_parameters(base.parameters)
        assert ast.dump(ast.parse(variant.source)) != ast.dump(ast.parse(EVERY[name]))
        assert variant.base_sha256 == SHA
        assert variant.provenance.origin is Origin.REWRITE
        assert variant.provenance.note
        assert [part.partition("/")[0] for part in variant.provenance.author.split("+")] == list(
            variant.extra["rewrites"]
        )
        assert Variant.from_json(variant.to_json()) == variant


@pytest.mark.slow
def test_the_same_call_gives_the_same_list_and_a_limit_its_beginning() -> None:
    every = made("softmax", combine=True)
    assert made("softmax", combine=True) == every
    assert made("softmax", combine=True, limit=5) == every[:5]
    assert any(len(v.extra["rewrites"]) > 1 for v in every)
    assert all(len(v.extra["rewrites"]) == 1 for v in made("softmax"))
    assert made("softmax", limit=0) == []


def test_wrong_calls_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"no rewrite is named \['peal'\]; there are \['sigmoid'"):
        made("softmax", "peal")
    with pytest.raises(RecordError, match="must define 'other' at its top level; it defines softmax"):
        variants_of(SOFTMAX, "other", SHA)
    with pytest.raises(RecordError, match="not Python"):
        variants_of("def f(:", "f", SHA)


def test_nothing_of_triton_or_torch_is_imported() -> None:
    program = (
        "import sys, forecast_harness.authors.triton as m\n"
        "print(len(m.variants_of(sys.stdin.read(), 'softmax', '0' * 64)))\n"
        "print(sorted({'torch', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=SOFTMAX, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["12", "[]"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "changes",
    [
        [("import triton.language as tl", "from triton import language as tl")],
        [("import triton.language as tl", "import triton.language as language"), ("tl.", "language.")],
        [("tl.load(", "load("), ("as tl\n", "as tl\nfrom triton.language import load\n")],
        [("def softmax(y_ptr,", "def softmax(y_ptr, *,")],
    ],
    ids=["from", "alias", "bare", "keyword-only"],
)
def test_spelling_does_not_matter(changes: list[tuple[str, str]]) -> None:
    source = SOFTMAX
    for old, new in changes:
        source = source.replace(old, new)
    assert used(made("softmax", source=source)) == used(made("softmax"))


@pytest.mark.parametrize("combine", [False, True])
def test_odd_sources_confuse_no_rewrite(combine: bool) -> None:
    base = read_contract(ODD, "odd")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = variants_of(ODD, "odd", SHA, combine=combine, limit=100)
    assert used(found) == {"evict", "stream-stores"}
    for variant in found:
        read_contract(variant.source, "odd").require_same_parameters(base.parameters)


def test_a_source_that_confuses_one_rewrite_keeps_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from forecast_harness.authors.triton import registry
    from forecast_harness.authors.triton.protocol import TritonRewrite

    def broken(unit: Any, context: Any) -> Any:
        raise IndexError("a statement too few")

    monkeypatch.setattr(registry, "REWRITES", (TritonRewrite("broken", broken), *registry.REWRITES))
    with pytest.warns(UserWarning, match="rewrite broken failed on softmax.*a statement too few"):
        assert used(made("softmax")) >= {"peel", "pipeline"}


# --- where a rewrite must not apply ---


@pytest.mark.parametrize("why", REFUSED)
def test_no_rewrite_where_its_preconditions_do_not_show(why: str) -> None:
    name, changes = REFUSED[why]
    source = EVERY[name]
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    ast.parse(source)
    assert made(name, why.partition(":")[0], source=source) == []


BEFORE_THE_LOOP = "    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)\n"


def test_a_reduction_is_shared_for_results_of_any_type() -> None:
    found = made("matmul", "split-reduction", arguments=product(c="float16"))
    assert [v.extra["rewrites"] for v in found] == [["split-reduction"]] * 2
    assert all(v.extra["approximate"] for v in found)
    tile = {"BLOCK_M": 32, "BLOCK_N": 16}
    sizes = []
    for variant in found:
        grid, workspace = plain_functions(variant.source)
        launched = grid({}, {}, (20,))
        sizes.append((launched[:2], workspace(tile, {}, (20,), launched)))
    assert sorted(sizes) == [
        ((20, 6), (20 * 6 * 512, 20)),
        ((20, 13), (20 * 13 * 512, 20)),
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            BEFORE_THE_LOOP,
            BEFORE_THE_LOOP.replace("zeros((BLOCK_M, BLOCK_N)", "full((BLOCK_M, BLOCK_N), 1.0"),
        ),
        (BEFORE_THE_LOOP, BEFORE_THE_LOOP.replace("float32", "float16")),
        (BEFORE_THE_LOOP, BEFORE_THE_LOOP + "    tl.store(c_ptr, 0.0)\n"),
        ("acc += tl.dot(a, b)", "acc = acc * 0.5 + tl.dot(a, b)"),
        ("acc += tl.dot(a, b)", "acc += tl.dot(a, b) * tl.sum(acc)"),
        ("acc += tl.dot(a, b)", "acc -= tl.dot(a, b)"),
        ("    c = scaled(acc", "    acc += tl.sum(a)\n    c = scaled(acc"),
        ("    c = scaled(acc", "    if M == 1:\n        return\n    c = scaled(acc"),
        (
            "    c = scaled(acc",
            "    for _ in range(2):\n        tl.atomic_add(c_ptr, 1.0)\n    c = scaled(acc",
        ),
        ("        a_ptrs += BLOCK_K * stride_ak\n", "        a_ptrs += k * stride_ak\n"),
        (
            "pid = tl.program_id(axis=0)",
            "pid = tl.program_id(axis=0) + tl.num_programs(0) - tl.num_programs(0)",
        ),
    ],
)
def test_a_loop_is_shared_only_where_it_is_nothing_but_a_sum_from_zero(old: str, new: str) -> None:
    assert old in EVERY["matmul"]
    assert made("matmul", "split-reduction", source=EVERY["matmul"].replace(old, new, 1)) == []


# --- what they compute ---


@needs_triton
def test_variants_compute_what_the_base_computes(tmp_path: Path) -> None:
    """Bit for bit, unless marked as approximate; at ragged sizes, single elements and full tiles.

    The best variant of each rewrite, and of several together, of each kernel beside its base. A shared reduction has
    dozens of programs for each of the base's, so it stands for those of several rewrites with it.
    """
    given = {}
    for name in sorted(set(EVERY) - {"lock"}):
        best: dict[str, Variant] = {}
        for variant in made(name):
            best.setdefault(variant.extra["rewrites"][0], variant)
        listed = [v for v in made(name, combine=True) if v.extra["rewrites"][1:]]
        pairs = [v for v in listed if "split-reduction" not in v.extra["rewrites"]][:3]
        given[name] = (EVERY[name], name, [v.to_json() for v in [*best.values(), *pairs]])
    again = [v.to_json() for v in made("tiles", source=SIMPLE_TILES)]
    given["tiles again"] = (SIMPLE_TILES, "tiles", again)
    shared = made("moments", "split-reduction", source=MOMENTS)[:1]
    given["moments"] = (MOMENTS, "moments", [v.to_json() for v in shared])
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(WORKER)],
        input=json.dumps(given),
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ran = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row for row in ran if row["error"]] == []
    assert len(ran) == sum(len(listed) for _, _, listed in given.values()) > 40
    names = {part for row in ran for part in row["variant"].rpartition("-")[0].split("+")}
    assert {r.name for r in REWRITES} == names
