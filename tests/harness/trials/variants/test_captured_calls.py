"""Calls that `run --capture` kept, and what is verified with them without a line of the user's."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from forecast_autotune.commands import main
from forecast_autotune.commands.output import CommandError, UsageError
from forecast_autotune.errors import SettingsError, VariantError
from forecast_autotune.records.captured_call import CapturedCall
from forecast_autotune.store import Store
from forecast_autotune.variants import Origin, Provenance, Variant
from forecast_autotune.variants.signature import INTERPRETER
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.targets.kernels.base_kernel import BaseKernel
from forecast_harness.targets.kernels.user_kernel import UserKernel
from forecast_harness.trials.variants.call_sampling import CapturedCalls, check_call_bytes
from forecast_harness.trials.variants.verify import survey, verify_variant
from forecast_harness.verify.plan import VerificationPlan

QUICK = VerificationPlan(cases=4, timed=0)
INCREMENT = """
@triton.jit
def increment(x, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + o, tl.load(x + o, mask=o < n) + 1, mask=o < n)
"""
KERNELS = f"""
import torch, triton, triton.language as tl

def prune(configs, named, **kwargs):
    return [c for c in configs if c.kwargs["BLOCK"] < named["n"]]

@triton.autotune(
    configs=[triton.Config(dict(BLOCK=n)) for n in (64, 128, 1 << 20)],
    key=["n"],
    prune_configs_by=dict(early_config_prune=prune),
)
@triton.heuristics(dict(EVEN=lambda args: args["n"] % args["BLOCK"] == 0))
@triton.jit
def scale(x, out, n, factor, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(out + o, tl.load(x + o) * factor)
    else:
        tl.store(out + o, tl.load(x + o, mask=o < n) * factor, mask=o < n)

@triton.jit
def gather(table, index, out, bias, D: tl.constexpr):
    c = tl.arange(0, D)
    row = tl.load(table + tl.load(index + tl.program_id(0)) * D + c)
    if bias is not None:
        row += tl.load(bias + c)
    tl.store(out + tl.program_id(0) * D + c, row)

{INCREMENT}
@triton.jit
def halve(x, out, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, tl.load(x + o, mask=o < n) / 2, mask=o < n)

@triton.jit
def scale_pair(xs, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(xs[1] + o, tl.load(xs[0] + o, mask=o < n) * xs[2], mask=o < n)

@triton.jit
def scale_named(p, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p.out + o, tl.load(p.x + o, mask=o < n) * p.factor, mask=o < n)

@triton.jit
def double_tile(tile, out, M: tl.constexpr, N: tl.constexpr):
    value = tile.load([tl.program_id(0) * M, 0])
    o = (tl.program_id(0) * M + tl.arange(0, M))[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + o, value * 2)

@triton.jit
def square(x):
    return x * x

@triton.jit
def apply_function(x, out, n, fn: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, fn(tl.load(x + o, mask=o < n)), mask=o < n)

@triton.jit
def sum_windows(x, out, s0, s1, W: tl.constexpr):
    w = tl.arange(0, W)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + tl.program_id(0) * s0 + w * s1)))
"""
KERNELS += """
@triton.jit
def scale_group(sources, targets, sizes, factor, BLOCK: tl.constexpr):
    g = tl.program_id(0)
    x = tl.load(sources + g).to(tl.pointer_type(tl.float16))
    y = tl.load(targets + g).to(tl.pointer_type(tl.float16))
    o = tl.arange(0, BLOCK)
    mask = o < tl.load(sizes + g)
    tl.store(y + o, (tl.load(x + o, mask=mask) * factor).to(tl.float16), mask=mask)

@triton.autotune(configs=[triton.Config(dict(BLOCK=n)) for n in (32, 64)], key=[])
@triton.jit
def copy_head(x, out, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(out + o, tl.load(x + o))
"""
PROGRAM = """
from typing import NamedTuple

import torch, triton, triton.language as tl, called_kernels
from triton.tools.tensor_descriptor import TensorDescriptor

class Pair(NamedTuple):
    x: object
    factor: float
    out: object

torch.manual_seed(1)
for n in (1000, 333, 512):
    x, out = torch.randn(n), torch.empty(n)
    called_kernels.scale[lambda m: (triton.cdiv(n, m["BLOCK"]),)](x, out, n, 2.5)
table, index, out = torch.randn(50, 16), torch.randint(0, 50, (7,)), torch.empty(7, 16)
called_kernels.gather[(7,)](table, index, out, None, D=16)
called_kernels.gather[(7,)](table, index, out, torch.randn(16), D=16)
x = torch.arange(300, dtype=torch.float32)
called_kernels.increment[(3,)](x, 300, BLOCK=128)
called_kernels.halve[(3,)](x, x / 2, 300, BLOCK=128)  # its output holds the result already
called_kernels.scale_pair[(3,)]((x, torch.empty(300), 3.0), 300, BLOCK=128)
called_kernels.scale_named[(3,)](Pair(x, 3.0, torch.empty(300)), 300, BLOCK=128)
called_kernels.apply_function[(3,)](x, torch.empty(300), 300, called_kernels.square, BLOCK=128)
tile = TensorDescriptor.from_tensor(torch.randn(32, 16), [16, 16])
called_kernels.double_tile[(2,)](tile, torch.empty(32, 16), M=16, N=16)
long = torch.randn(100)
reinterpreted = triton.reinterpret(long.view(torch.int32), tl.float32)
called_kernels.copy_head[(1,)](reinterpreted, torch.empty(100))  # each config writes another part
sources = [torch.randn(20, 3).half(), torch.randn(7).half(), long.half()]
targets = torch.zeros(3, 128, dtype=torch.float16)
places = torch.tensor([t.data_ptr() for t in targets])
called_kernels.scale_group[(3,)](
    torch.tensor([t.data_ptr() for t in sources]), places, torch.tensor([60, 7, 100]), 3.0, BLOCK=128
)
windows = torch.randn(40).as_strided((9, 16), (3, 1))
try:
    called_kernels.sum_windows[(9,)](windows, None, 3, 1, W=16)  # a launch that fails is no call to keep
except Exception:
    pass
called_kernels.sum_windows[(9,)](windows, torch.empty(9), 3, 1, W=16)
columns = torch.randn(16, 40)[:, 3:12].t()
called_kernels.sum_windows[(9,)](columns, torch.empty(9), 1, 40, W=16)
"""


WRONG = [
    ("scale", ("* factor", "* (factor + 0.01)")),
    ("gather", ("tl.program_id(0)) * D", "0) * D")),
    ("increment", ("+ 1, mask", "+ 2, mask")),
    ("halve", ("/ 2, mask", "/ 3, mask")),
    ("apply_function", ("mask=o < n)), mask", "mask=o < n)) * 1.5, mask")),
    ("double_tile", ("* 2)", "* 2.1)")),
    ("scale_named", ("* p.factor", "* (p.factor + 0.01)")),
    ("scale_pair", ("* xs[2]", "* (xs[2] + 0.01)")),
    ("sum_windows", ("* s0 +", "* s0 + 1 +")),
    ("scale_group", ("* factor", "* (factor + 0.1)")),
    ("copy_head", ("tl.load(x + o))", "tl.load(x + o) + 1)")),
]
"""Kernels, and what makes each of them wrong."""


@dataclass(frozen=True)
class Captured:
    """A program's captured calls."""

    folder: Path
    printed: str

    @property
    def store(self) -> Store:
        return Store(self.folder / "store")

    def calls(self, kernel: str) -> list[CapturedCall]:
        files = self.store.captures
        assert files is not None
        return [call for call, _ in files.every(lambda name: name == kernel)]

    def subjects(self, kernel: str) -> list[BaseKernel]:
        return UserKernel.of(f"{self.folder / 'called_kernels.py'}:{kernel}").subjects(self.store)


def run_captured(
    folder: Path, program: str = PROGRAM, how: str = "", *, interpreted: bool = True
) -> Captured:
    (folder / "called_kernels.py").write_text(KERNELS)
    (folder / "program.py").write_text(program)
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpreted)), "FORECAST_AUTOTUNE_CAPTURE": how}
    command = f"{sys.executable} -m forecast_autotune run --store store --capture program.py".split()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return Captured(folder, done.stderr)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captured]:
    yield run_captured(tmp_path_factory.mktemp("captured"))
    for name in [n for n in sys.modules if n == "called_kernels"]:
        del sys.modules[name]


def verdicts(
    lane: SandboxLane, subject: BaseKernel, wrong: tuple[str, str]
) -> tuple[bool, bool, tuple[str, ...]]:
    """Whether the base itself is accepted, whether a wrong source is, and what was not varied."""
    known = survey(subject, lane, plan=QUICK)
    results = []
    for source in (f"# The same.\n{subject.source}", subject.source.replace(*wrong)):
        assert source != subject.source
        one = Variant.of(subject.kernel, "5" * 64, source, Provenance(Origin.HAND))
        results.append(verify_variant(one, subject, known, lane, device=INTERPRETER, plan=QUICK))
    if results[0].checks[0].passed:
        assert all(phrase in results[0].checks[0].detail for phrase in known.unvaried[:1])
    return results[0].verdict.accepted, results[1].verdict.accepted, known.unvaried


def test_a_run_says_what_it_kept_and_clear_removes_it(captured: Captured, tmp_path: Path) -> None:
    assert "captured 15 calls of 11 kernels" in captured.printed
    assert "clear --captures" in captured.printed
    one = replace(captured, folder=Path(shutil.copytree(captured.folder, tmp_path, dirs_exist_ok=True)))
    assert one.store.clear_captures("GATHER") == 2
    assert not one.calls("gather")
    assert one.store.clear_captures() == 13
    assert not list((tmp_path / "store" / "captures").iterdir())


def test_contents_are_those_before_the_launch(captured: Captured) -> None:
    (call,) = captured.calls("increment")
    (path,) = (captured.folder / "store" / "captures").glob(
        f"increment-*/contents/{call.contents['x'].digest}"
    )
    assert torch.equal(
        torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32), torch.arange(300).float()
    )


def test_values_that_the_user_forbids_are_not_kept_and_long_calls_come_last(tmp_path: Path) -> None:
    """A call that takes long comes after those that may cover it."""
    program = "import torch, called_kernels\nx = torch.randn(9000) + 5\nfor n in (300, 9000, 48 << 20):\n"
    program += "    called_kernels.increment[(3,)](x if n == 9000 else torch.zeros(n), n, BLOCK=128)\n"
    program += "called_kernels.gather[(7,)](x, torch.arange(7), torch.empty(7, 16), None, D=16)\n"
    one = run_captured(tmp_path, program, "moments")
    subjects = one.subjects("increment")
    assert [s.calls[0][0].shape for s in subjects] == [(9000,), (300,), (48 << 20,)]
    about = next(c for c in one.calls("increment") if c.arguments[0].shape == (9000,)).contents["x"]
    assert not about.digest
    assert abs(about.mean - 5) < 0.1
    assert abs(about.deviation - 1) < 0.1
    assert one.calls("gather")[0].contents["index"].digest


def test_the_record_tells_how_other_configs_are_launched(captured: Captured) -> None:
    call = next(c for c in captured.calls("scale") if c.arguments[2].value == 512)
    assert [(dict(x.meta), x.grid, dict(x.computed)) for x in call.launches] == [
        ({"BLOCK": 64}, (8,), {"EVEN": True}),
        ({"BLOCK": 128}, (4,), {"EVEN": True}),
    ]
    assert [dict(c.kwargs) for c in call.configs] == [{"BLOCK": 64}, {"BLOCK": 128}]
    assert "EVEN" not in [a.name for a in call.arguments]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kernel", "wrong"), WRONG)
def test_a_kernel_is_a_target_as_it_was_called(
    captured: Captured, judging: SandboxLane, kernel: str, wrong: tuple[str, str]
) -> None:
    subject = captured.subjects(kernel)[0]
    right, refused, unvaried = verdicts(judging, subject, wrong)
    assert right
    assert not refused
    assert any(text.startswith("sizes") for text in unvaried) == (kernel != "scale")
    if kernel == "gather":
        assert "integers in index at the recorded sizes" in unvaried


def test_sizes_vary_where_several_calls_tell_what_hangs_together(
    captured: Captured, judging: SandboxLane
) -> None:
    subject = captured.subjects("scale")[0]
    known = survey(subject, judging, plan=QUICK)
    assert known.values[-1] == "other sizes"
    assert set(known.words.values()) == {"any"}
    source = CapturedCalls(subject, "cpu").with_values(known.values)
    drawn = [source.draw("normal", torch.Generator().manual_seed(n)).arguments for n in range(10)]
    assert drawn[0] == subject.calls[0]
    assert len({call[2].value for call in drawn}) > 1
    assert all(call[0].shape == call[1].shape == (call[2].value,) for call in drawn)


def test_a_call_beyond_the_share_of_memory_is_refused_by_its_bytes(captured: Captured) -> None:
    subject = captured.subjects("increment")[0]
    x, *rest = subject.calls[0]
    within = replace(x, shape=(24 << 20,), stride=(1,))  # 96 MiB
    assert check_call_bytes((within, *rest), "cpu") == 96 << 20
    with pytest.raises(Exception, match="at the recorded sizes, and at most"):
        check_call_bytes((replace(x, shape=(1 << 40,)), *rest), "cpu")


def test_contents_that_are_gone_are_a_refusal(
    captured: Captured, judging: SandboxLane, tmp_path: Path
) -> None:
    subject = captured.subjects("increment")[0]
    moved = tmp_path / "call.json"
    moved.write_text(json.dumps(captured.calls("increment")[0].to_json()))
    with pytest.raises(VariantError, match="capture the call again"):
        survey(replace(subject, captured=str(moved)), judging, plan=QUICK)


def test_kernels_made_inside_a_function_are_targets_by_their_records(
    judging: SandboxLane, tmp_path: Path
) -> None:
    """Those of one name are told apart by their sources."""
    source = "import triton, triton.language as tl\n\ndef make(one):\n"
    texts = INCREMENT, INCREMENT.replace("+ 1, mask", "+ 5, mask"), INCREMENT.replace("increment", "alone")
    for number, text in enumerate(texts):
        source += f"    if one == {number}:\n" + textwrap.indent(text, " " * 8)
        source += f"        return {'alone' if 'alone' in text else 'increment'}\n"
    program = "import torch, made\nfor one in (0, 1, 2):\n"
    program += "    made.make(one)[(3,)](torch.zeros(300), 300, BLOCK=128)\n"
    (tmp_path / "made.py").write_text(source)
    one = run_captured(tmp_path, program)
    for place in ("made:alone", f"{tmp_path / 'made.py'}:alone"):
        (subject,) = UserKernel.of(place, one.store).subjects(one.store)
        assert subject.kernel == "alone"
    with pytest.raises(UsageError, match="2 captured kernels are called made:increment; name one") as refusal:
        UserKernel.of("made:increment", one.store)
    named = re.findall(r"made:increment@[0-9a-f]+", str(refusal.value))
    named[1] = named[1].replace("made:", "/nowhere/kernel.py:")  # a digest is enough, and nothing is imported
    kernels = [UserKernel.of(name, one.store) for name in named]
    assert sorted("+ 5" in k.text for k in kernels) == [False, True]
    for kernel in kernels:
        (subject,) = kernel.subjects(one.store)
        right, refused, _ = verdicts(judging, subject, (", mask=o < n)\n", " * 2, mask=o < n)\n"))
        assert right
        assert not refused


def test_another_source_by_now_is_said(captured: Captured) -> None:
    with pytest.raises(SettingsError, match="has another gather by now"):
        UserKernel.of(f"{captured.folder / 'called_kernels.py'}:gather@123456abcdef", captured.store)


def test_verify_takes_a_kernel_and_says_what_it_did_not_vary(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"{captured.folder / 'called_kernels.py'}:gather"
    wrong = tmp_path / "wrong.py"
    wrong.write_text(UserKernel.of(place).text.replace("tl.program_id(0)) * D", "0) * D"))
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(captured.folder / "store"))
    for given, status, word in (([], 0, "accepted"), ([str(wrong)], 1, "rejected")):
        assert main(["verify", "--device", "cpu", "--cases", "4", place, *given]) == status
        output = " ".join(capsys.readouterr().out.split())
        assert word in output
        assert "not varied: integers in index" in output


@pytest.mark.gpu
def test_kernels_are_judged_on_a_device(tmp_path: Path) -> None:
    program = f"import torch\ntorch.set_default_device('cuda')\n{PROGRAM}"
    one = run_captured(tmp_path, program, interpreted=False)
    environment = {**os.environ, "FORECAST_AUTOTUNE_CACHE_DIR": str(tmp_path / "store")}
    for kernel, wrong in WRONG:
        place = f"{tmp_path / 'called_kernels.py'}:{kernel}"
        (tmp_path / "wrong.py").write_text(one.subjects(kernel)[0].source.replace(*wrong))
        for given, status in ((), 0), ((str(tmp_path / "wrong.py"),), 1):
            command = f"{sys.executable} -m forecast_autotune verify --device 0 {place}".split()
            done = subprocess.run(
                [*command, *given], env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == status, done


def test_a_kernel_that_nobody_captured_names_the_command(captured: Captured, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="run --capture"):
        UserKernel.of(f"{captured.folder / 'called_kernels.py'}:scale").subjects(Store(tmp_path))


def test_a_call_that_can_write_nothing_is_none_to_verify(tmp_path: Path) -> None:
    program = """
import torch, called_kernels

for n, programs in ((0, 0), (0, 1), (300, 3), (300, 0)):
    called_kernels.halve[(programs,)](torch.randn(n), torch.empty(n), n, BLOCK=128)
"""
    one = run_captured(tmp_path, program)
    assert sorted(call.grid for call in one.calls("halve")) == [(1,), (3,)]
    sizes = [a.shape for subject in one.subjects("halve") for a in subject.calls[0] if a.kind == "tensor"]
    assert sizes == [(300,), (300,)]


def test_values_of_64_bits_are_rescaled_as_such(tmp_path: Path) -> None:
    program = """
import torch, called_kernels

x = torch.full((300,), 1e300, dtype=torch.float64)
called_kernels.halve[(3,)](x, torch.empty_like(x), 300, BLOCK=128)
"""
    (subject,) = run_captured(tmp_path, program).subjects("halve")
    source = CapturedCalls(subject, "cpu").with_values(["rescaled"])
    drawn = source.draw("normal", torch.Generator().manual_seed(0)).memory["x"]
    assert 1e299 < float(drawn.min()) == float(drawn.max()) < 1e301
