"""The recorded variants: enough of them, all different, all within the contract, labelled before measuring.

Two are checked to the end here; `benchmarks/results/variants_check.json` records what checking all gave.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lib.variants import variant_corpus
from benchmarks.lib.variants.variant_corpus import VariantSource
from benchmarks.verification import recorded_variants
from forecast_autotune.variants.records import Origin, Variant
from forecast_integrations.triton.problem.describe import kernel_record

ROOT = Path(__file__).parents[2]
ALL = variant_corpus.variant_sources()


def by_name(source: VariantSource) -> str:
    return source.name


def test_there_are_enough_variants_of_enough_kernels() -> None:
    count = Counter(one.kernel for one in ALL)
    assert len({(one.kernel, one.form) for one in ALL}) == len(ALL) >= 200
    assert len(count) >= 20
    assert min(count.values()) >= 8


def test_authors_expected_all_kinds_of_outcomes() -> None:
    share = {expect: n / len(ALL) for expect, n in Counter(one.expect for one in ALL).items()}
    assert set(share) == set(variant_corpus.EXPECTATIONS)
    assert share["wrong"] < 0.2
    assert all(share[expect] > 0.05 for expect in variant_corpus.EXPECTATIONS)
    # Somebody who forecasts every kernel's variants alike must not be right by construction.
    for kernel in {one.kernel for one in ALL}:
        assert len({one.expect for one in ALL if one.kernel == kernel}) >= 3, kernel


@pytest.mark.parametrize("source", ALL, ids=by_name)
def test_every_variant_keeps_the_contract(source: VariantSource) -> None:
    assert variant_corpus.broken_rules(source) == []
    assert source.form != variant_corpus.base_form(source.kernel)
    record = source.record()
    assert record.base_sha256 == kernel_record(variant_corpus.base_of(source.kernel)).source_sha256
    assert record.provenance.origin is Origin.LLM
    assert record.provenance.author
    assert record.provenance.note == source.summary
    assert Variant.from_json(json.loads(json.dumps(record.to_json()))) == record


@pytest.mark.parametrize("source", ALL, ids=by_name)
def test_a_forecast_does_not_see_what_the_author_expected(source: VariantSource) -> None:
    assert "EXPECT" not in source.text
    assert source.summary not in source.text
    assert not [word for word in ("faster", "slower", "incorrect") if word in source.text.lower()]


def test_renaming_makes_no_new_variant() -> None:
    base = kernel_record(variant_corpus.base_of("softmax")).source
    renamed = (
        base.replace("row_max", "highest").replace("read", "r").replace("    rows =", "    # Hm.\n    rows =")
    )
    assert variant_corpus.form_of(renamed) == variant_corpus.base_form("softmax")
    assert variant_corpus.form_of(renamed.replace("axis=1", "axis=0")) != variant_corpus.base_form("softmax")


def test_names_choose_kernels_and_single_variants() -> None:
    (one,) = variant_corpus.variant_sources(["softmax/01_division_as_multiply"])
    assert (one.kernel, one.expect) == ("softmax", "similar")
    assert one in variant_corpus.variant_sources(["softmax"])
    with pytest.raises(ValueError, match=r"no variant or kernel with variants is named \['softmaxx'\]"):
        variant_corpus.variant_sources(["softmaxx"])


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("1_short", '"""Why."""\n\nEXPECT = "faster"\n', "is named NN_short_name.py"),
        ("01_x", '"""Why."""\n\nEXPECT = "quicker"\n', "not 'quicker'"),
        ("01_x", 'EXPECT = "faster"\n', "begins with a docstring"),
        ("01_x", '"""Why."""\n', "says EXPECT"),
        ("01_x", "def (", "not Python"),
    ],
)
def test_a_file_that_is_no_variant_is_refused(
    name: str, text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variant_corpus, "folder", lambda table: tmp_path)
    (tmp_path / "softmax").mkdir()
    (tmp_path / "softmax" / f"{name}.py").write_text(text)
    with pytest.raises(ValueError, match=says):
        variant_corpus.variant_sources()


def test_broken_rules_are_named() -> None:
    (good,) = variant_corpus.variant_sources(["softmax/01_division_as_multiply"])
    bad = replace(good, text="import os\nimport triton\nLIMIT = 3\n\ndef help(x):\n    return x\n")
    found = " ".join(variant_corpus.broken_rules(bad))
    assert "imports os" in found
    assert "line 3 is neither" in found
    assert "help is neither a @triton.jit function nor grid" in found


def test_a_verdict_that_differs_from_the_statement_is_a_fault() -> None:
    (good,) = variant_corpus.variant_sources(["softmax/01_division_as_multiply"])
    right = {"interpreter": {"verdict": "right", "detail": ""}, "compiled": {"3.9": {"verdict": "compiled"}}}
    wrong = {**right, "interpreter": {"verdict": "wrong", "detail": "at (0, 0)"}}
    stuck = {**right, "compiled": {"3.6": {"verdict": "failed", "detail": "no such layout"}}}
    assert recorded_variants.problems_of(good, right, None) == []
    assert recorded_variants.problems_of(good, right, "softmax/02") == ["same code as softmax/02"]
    assert recorded_variants.problems_of(good, wrong, None) == ["interpreter: wrong: at (0, 0)"]
    assert recorded_variants.problems_of(good, stuck, None) == ["Triton 3.6: no such layout"]
    assert recorded_variants.problems_of(replace(good, expect="wrong"), wrong, None) == []
    assert recorded_variants.problems_of(replace(good, expect="wrong"), right, None) == [
        "expected wrong, but right"
    ]


@pytest.mark.slow
def test_two_variants_are_as_stated(tmp_path: Path) -> None:
    names = ["softmax/01_division_as_multiply", "transpose/12_reshaped_tile"]
    out = tmp_path / "check.json"
    done = subprocess.run(
        [
            *[sys.executable, "-m", "benchmarks.verification.recorded_variants"],
            *["--only", ",".join(names), "--out", str(out)],
        ],
        cwd=ROOT,
        env={**os.environ, "BENCHMARK_COMMIT": "test"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["summary"] == {
        "variants": 2,
        "kernels": 2,
        "distinct": 2,
        "as_stated": 2,
        "expect": {"similar": 1, "wrong": 1},
    }
    rows = {row["name"]: row for row in report["raw"]["variants"]}
    assert [rows[name]["interpreter"]["verdict"] for name in names] == ["right", "wrong"]
    assert [c["verdict"] for row in rows.values() for c in row["compiled"].values()] == ["compiled"] * 2
    assert rows[names[1]]["interpreter"]["detail"].startswith("transpose/16384x8192, YBLOCK: 8")
    assert report["environment"]["commit"] == "test"
