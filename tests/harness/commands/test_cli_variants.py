"""`forecast-autotune variants`: from a kernel's file to verified variants that a decorated kernel uses."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from forecast_autotune.commands import main
from forecast_autotune.records import Candidate, Config, Device, Measurement, Outcome, Problem
from forecast_autotune.store import Store
from forecast_autotune.variants import Variant
from forecast_harness.targets.kernels.user_kernel import import_file
from tests.core.captured_output import Capture, shown
from tests.harness.authors.chat_model import StubModel
from tests.harness.variant_kernels import number, tensor
from tests.integrations.models.faulty_server import FaultyServer

KERNEL = """import triton
import triton.language as tl

FACTOR = tl.constexpr(2)


@triton.jit
def scaled(value):
    return value * FACTOR


@triton.autotune([triton.Config({"BLOCK": b}) for b in (64, 128)], key=["n"])
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, scaled(tl.load(x + i, mask=i < n)), mask=i < n)
"""
INPUTS = """

def inputs(random):
    import torch

    n = random.randrange(2, 600)
    grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)
    return {"x": torch.randn(n), "out": torch.empty(n), "n": n, "grid": grid}
"""
GOOD = """import triton
import triton.language as tl

CONFIGS = [{"kwargs": {"BLOCK": 256}, "num_warps": 8}]


@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    tl.store(out + i, value + value, mask=i < n)
"""
WRONG = GOOD.replace("value + value", "value + 1")

pytestmark = pytest.mark.usefixtures("alone")


def write(tmp_path: Path, name: str, source: str) -> str:
    (tmp_path / name).write_text(source)
    return str(tmp_path / name)


def variants(*arguments: str) -> int:
    return main(["variants", *arguments, "--device", "cpu", "--cases", "2"])


def stored(tmp_path: Path) -> list[Variant]:
    return Store(tmp_path / "store").variants()


def test_from_files_to_verified_variants(kernel: str, tmp_path: Path, capsys: Capture) -> None:
    files = [write(tmp_path, "good.py", GOOD), write(tmp_path, "wrong.py", WRONG)]
    broken = write(tmp_path, "broken.py", "import os\n" + GOOD)
    assert variants(kernel, "--from", *files, broken, "--json") == 0
    said = shown(capsys)
    assert said["kernel"] == "double"
    assert [name.rpartition("-")[0] for name in said["new"]] == ["good", "wrong"]
    assert [v["judgement"] for v in said["verified"]] == ["accepted", "rejected"]
    steps = {"reading", "lane", "survey", "verify", "closing", "all_lanes_open"}
    assert steps <= set(said["seconds"]), "where the time went"
    assert {"configs", "trials"} <= set(said["verified"][0]["facts"]["examine"])
    assert said["refused"] == [
        f"{broken}: line 1 of the variant: a variant imports triton and triton.language alone, not os"
    ]
    assert [[c.passed for c in v.checks] for v in stored(tmp_path)] == [[True], [False]]
    # What has a check is not verified again.
    assert variants(kernel, "--json") == 0
    assert shown(capsys)["verified"] == []


@pytest.mark.slow
def test_listing_and_showing(kernel: str, tmp_path: Path, capsys: Capture) -> None:
    variants(kernel, "--from", write(tmp_path, "good.py", GOOD))
    capsys.readouterr()
    assert variants("list") == 0
    out = capsys.readouterr().out
    assert "good-" in out
    assert "interpreter" in out
    assert variants("list", "--json", "--kernel", "other") == 0
    assert shown(capsys)["variants"] == []
    assert variants("show", "goo") == 0
    out = capsys.readouterr().out
    assert "passed on interpreter" in out
    assert "value + value" in out
    assert variants("show", "goo", "--json") == 0
    assert Variant.from_json(shown(capsys)).source == GOOD
    assert variants("show", "bad") == 1
    assert "no variants are called 'bad'; there are: good-" in capsys.readouterr().err
    assert main(["doctor", "--json"]) in (0, 1)
    (line,) = [c for c in shown(capsys)["checks"] if c["name"] == "variants"]
    assert line["detail"] == "1 of 1 kernel sources, 1 verified"


def test_mechanical_variants(kernel: str, tmp_path: Path, capsys: Capture) -> None:
    assert variants(kernel, "--mechanical", "--n", "2", "--json") == 0
    said = shown(capsys)
    assert len(said["new"]) == 2
    assert {v["judgement"] for v in said["verified"]} == {"accepted"}
    assert {str(v.provenance.origin) for v in stored(tmp_path)} == {"mechanical"}


@pytest.mark.slow
def test_a_language_model_writes_and_is_not_believed(kernel: str, tmp_path: Path, capsys: Capture) -> None:
    model = StubModel("No.", f"Adds.\n```python\n{GOOD}```", f"Faster!\n```python\n{WRONG}```", "Never.")
    with FaultyServer(model) as server:
        spec = f"{server.url}?model=parrot&kind=chat"
        assert variants(kernel, "--llm", spec, "--n", "3", "--json") == 0
    said = shown(capsys)
    assert len(said["new"]) == 2
    assert said["refused"] == ["it holds no code block that defines double"]
    assert len(model.prompts) == 4
    assert "It was refused before anything was run" in model.prompts[3], "once more"
    assert sorted(v["judgement"] for v in said["verified"]) == ["accepted", "rejected"]
    assert {v.name.rpartition("-")[0] for v in stored(tmp_path)} == {"llm-adds", "llm-faster"}
    by_note = {v.provenance.note: v for v in stored(tmp_path)}
    assert set(by_note) == {"Adds.", "Faster!"}
    good = by_note["Adds."]
    assert (str(good.provenance.origin), good.provenance.author) == ("llm", "parrot")
    assert len(good.provenance.prompt_sha256) == 64
    assert [c.passed for c in good.checks] == [True]
    assert [c.passed for c in by_note["Faster!"].checks] == [False]


def test_a_model_may_write_where_no_call_is_known(tmp_path: Path, capsys: Capture) -> None:
    path = Path(write(tmp_path, "recorded_kernel.py", KERNEL))
    model = StubModel(f"Adds.\n```python\n{GOOD}```")
    with FaultyServer(model) as server:
        spec = f"{server.url}?model=parrot&kind=chat"
        for _ in range(2):
            assert variants(f"{path}:double", "--llm", spec, "--n", "1", "--no-verify", "--json") == 0
            assert len(shown(capsys)["new"]) == 1
    assert len(model.prompts) == 2, "whoever asks again wants another text"
    assert "Calls:" not in model.prompts[0]
    record_calls(tmp_path, path, "float32")
    with FaultyServer(model) as server:
        assert variants(f"{path}:double", "--llm", f"{server.url}?model=p&kind=chat", "--no-verify") == 0
    for part in ("Device: some GPU (cuda 90)", "x: float32[1000] strides [1]", "BLOCK=", "BASE_GRID_0"):
        assert part in model.prompts[2]


def test_without_verification_nothing_is_run(kernel: str, tmp_path: Path, capsys: Capture) -> None:
    assert variants(kernel, "--from", write(tmp_path, "good.py", GOOD), "--no-verify", "--json") == 0
    assert shown(capsys)["verified"] == []
    assert [v.checks for v in stored(tmp_path)] == [()]


def record_calls(tmp_path: Path, path: Path, *dtypes: str, n: int = 1000) -> None:
    """Have the store hold what a kernel of this file took when it was called with tensors of each dtype."""
    from forecast_integrations.triton.problem.describe import kernel_record

    record = kernel_record(import_file(path).double.fn)
    store = Store(tmp_path / "store")
    for dtype in dtypes:
        arguments = [tensor("x", n, dtype=dtype), tensor("out", n, dtype=dtype), number("n", n)]
        problem = Problem.of(record, arguments, Device("some GPU", "cuda", "90"), key=[dtype, str(n)])
        for block in (64, 128):
            candidate = Candidate(Config.of({"BLOCK": block}))
            store.add(problem, Measurement(problem.id, candidate, Outcome.OK, 1.0, grid=(-(-n // block),)))


@pytest.mark.slow
def test_every_kind_of_call_is_verified_for_once(tmp_path: Path, capsys: Capture) -> None:
    path = Path(write(tmp_path, "recorded_kernel.py", KERNEL))
    record_calls(tmp_path, path, "float32", "float16")
    record_calls(tmp_path, path, "float32", n=2000)
    files = [write(tmp_path, "good.py", GOOD), write(tmp_path, "wrong.py", WRONG)]
    assert variants(f"{path}:double", "--from", *files, "--json") == 0
    verdicts = [(v["name"].partition("-")[0], v["judgement"]) for v in shown(capsys)["verified"]]
    assert verdicts == [("good", "accepted"), ("wrong", "rejected")] * 2, "sizes are no other kind"
    for variant in stored(tmp_path):
        assert len({c.signature for c in variant.checks}) == len(variant.checks) == 2


@pytest.mark.slow
def test_what_is_found_for_one_kind_is_kept_where_another_cannot_be_looked_at(
    tmp_path: Path, capsys: Capture
) -> None:
    only = "    tl.static_assert(x.dtype.element_ty == tl.float32)\n    i = "
    path = Path(write(tmp_path, "recorded_kernel.py", KERNEL.replace("    i = ", only)))
    record_calls(tmp_path, path, "float32", "float16")
    assert variants(f"{path}:double", "--from", write(tmp_path, "good.py", GOOD)) == 1
    assert "error:" in capsys.readouterr().err
    (variant,) = stored(tmp_path)
    assert [c.passed for c in variant.checks] == [True]


def test_calls_that_were_recorded_when_the_kernel_was_tuned(tmp_path: Path, capsys: Capture) -> None:
    path = Path(write(tmp_path, "recorded_kernel.py", KERNEL))
    good = write(tmp_path, "good.py", GOOD)
    assert variants(f"{path}:double", "--from", good) == 1
    assert "how is double called?" in capsys.readouterr().err
    record_calls(tmp_path, path, "float32")
    assert variants(f"{path}:double", "--json") == 0
    (verified,) = shown(capsys)["verified"]
    assert verified["judgement"] == "accepted"
    (variant,) = stored(tmp_path)
    assert '"class":"any"' in variant.checks[0].signature, (
        "sizes were drawn, with a grid told from the records"
    )


CASED = (
    KERNEL
    + """

class Case:
    name, kernel, key, reset_to_zero = "double/300", double.fn, ("n",), ()

    @staticmethod
    def make(device, small=False):
        import torch

        n = 300 if small else 1 << 20
        x, out = torch.empty(n, device=device), torch.empty(n, device=device)
        grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)
        return {"args": (x, out, n), "kwargs": {}, "grid": grid, "outputs": (out,)}


CASE = Case()
"""
)


@pytest.mark.slow
def test_calls_of_a_case_in_the_file(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path, "cased_kernel.py", CASED)
    assert variants(f"{path}:double", "--from", write(tmp_path, "good.py", GOOD), "--json") == 0
    assert [v["judgement"] for v in shown(capsys)["verified"]] == ["accepted"]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (["nothing"], "is no KERNEL.py:FN"),
        (["gone.py:double"], "is no Python file"),
        (["torn.py:double"], "a kernel's file must be Python, and torn.py is none: invalid syntax"),
        (["KERNEL:triple"], "has no kernel 'triple'; it has scaled, double"),
        (["KERNEL", "extra"], "one word too many"),
        (["show"], "show needs NAME"),
        (["KERNEL:double", "--from", "gone.py"], "no such file or folder"),
        (["KERNEL:double", "--llm", "nonsense:"], "error:"),
    ],
)
def test_wrong_usage_is_named(
    kernel: str, tmp_path: Path, capsys: Capture, what: list[str], said: str
) -> None:
    write(tmp_path, "torn.py", "def double(:\n")
    arguments = [w.replace("KERNEL", kernel.rpartition(":")[0]) for w in what]
    assert variants(*arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_exchange_takes_variants_along_without_their_checks(
    kernel: str, tmp_path: Path, capsys: Capture
) -> None:
    variants(kernel, "--from", write(tmp_path, "good.py", GOOD))
    capsys.readouterr()
    table = str(tmp_path / "table.jsonl.gz")
    assert main(["export", table, "--json"]) == 0
    assert shown(capsys)["variants"] == 1
    other = str(tmp_path / "other")
    assert main(["import", table, "--store", other, "--json"]) == 0
    assert shown(capsys)["variants"] == 1
    (imported,) = Store(Path(other)).variants()
    assert (imported.source, imported.checks) == (GOOD, ())
    assert imported.provenance == stored(tmp_path)[0].provenance
    assert variants(kernel, "--from", table, "--no-verify", "--json", "--store", str(tmp_path / "third")) == 0
    assert len(shown(capsys)["new"]) == 1
    assert main(["clear", "--variants", "--store", other]) == 2
    assert "this would remove 1 variant from" in capsys.readouterr().err
    assert main(["clear", "--variants", "--yes", "--json", "--store", other]) == 0
    assert shown(capsys)["variants"] == 1
    assert main(["clear", "--variants", "--device", "gpu"]) == 2
    assert Store(Path(other)).variants() == []
    assert len(stored(tmp_path)) == 1
