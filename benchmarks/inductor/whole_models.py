"""Whole models under torch.compile's max-autotune, with us and without: tuning time, and latency in turns.

    python -m benchmarks.inductor.whole_models --out FILE [--repeats 3] [--mode max-autotune-no-cudagraphs]

A transformer block, a ConvNet and a model with flex attention, on Inductor's DEFAULT space: Inductor as it
comes, the same with one assembler for all of its processes, and ours. A model, arm and repeat is one fresh
process with fresh caches and an empty store. Those of the first and the last arm stay until both are there,
and time their forward passes in turns. `--null` compiles small models on a CPU. Rows go to FILE.rows.jsonl;
the same command goes on where it stopped, beginning a model's repeat anew that has not been timed.

tuning_s is compilation of choices and benchmarks by Inductor's own clock, and our forecasts; seconds is
the whole first call. On Python 3.11.0 to 3.11.8 Inductor compiles choices one by one.
"""

# Modules are subclasses of Any here: torch is untyped to us.
# mypy: disable-error-code="misc"

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.lib.child_processes import child_command, child_environment
from benchmarks.lib.compile_processes import (
    Row,
    RowFile,
    RowProcess,
    compile_separately,
    device_of,
    geometric_mean,
    inductor_clock,
    inductor_seconds,
    print_row,
    restart_compile_workers,
    synchronize,
    timed_in_turns,
)
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser
from forecast_integrations.inductor.hooks.assembler import SharedAssembler

SHARED = "shared"
ARMS = ("plain", SHARED, "ours")
"""Inductor as it comes; the same with one assembler for all processes (`inductor.assembler`); ours."""
TIMED = ("plain", "ours")
"""Whose forward passes are timed: to share an assembler chooses no other kernels."""
PASSES = 10
"""Forward passes of a turn."""


# --- models ---


class TransformerBlock(nn.Module):
    """One pre-norm block with a gated MLP; sizes are of an 8B language model on a GPU."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, tokens, width))
        h = self.second(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class FlexBlock(TransformerBlock):
    """The same block with a sliding window, by flex attention."""

    def __init__(self, width: int, heads: int, hidden: int, tokens: int, device: str) -> None:
        super().__init__(width, heads, hidden)
        window = tokens // 4
        self.mask = create_block_mask(
            lambda b, h, q, k: (q >= k) & (q - k < window), None, None, tokens, tokens, device=device
        )

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found = flex_attention(q, k, v, block_mask=self.mask)
        return found if isinstance(found, torch.Tensor) else found[0]


class ResidualBlock(nn.Module):
    """A bottleneck of a ResNet, without normalisation: it is folded into the weights for inference."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(wide, narrow, 1)
        self.across = nn.Conv2d(narrow, narrow, 3, padding=1)
        self.up = nn.Conv2d(narrow, wide, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.relu(self.across(functional.relu(self.down(x))))
        return functional.relu(x + self.up(h))


def convnet(widths: tuple[int, ...]) -> nn.Module:
    """Stages of two bottlenecks, halving the image between them, and a classifier."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 7, stride=2, padding=3), nn.ReLU()]
    for before, width in zip((widths[0], *widths), widths, strict=False):
        layers += [nn.Conv2d(before, width, 3, stride=2, padding=1), nn.ReLU()]
        layers += [ResidualBlock(width, width // 4), ResidualBlock(width, width // 4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1000))


def model_of(name: str, device: str) -> tuple[nn.Module, torch.Tensor]:
    """A model in eval mode with random weights, and its input; small ones on a CPU."""
    torch.manual_seed(0)
    small = device == "cpu"
    dtype = torch.float32 if small else torch.float16 if name == "convnet" else torch.bfloat16
    if name == "convnet":
        module = convnet((16, 32) if small else (256, 512, 1024, 2048))
        image = torch.randn(*((2, 3, 32, 32) if small else (32, 3, 224, 224)))
        module, x = (part.to(memory_format=torch.channels_last) for part in (module, image))
    else:
        width, heads, hidden, tokens = (64, 2, 128, 128) if small else (4096, 32, 14336, 4096)
        flex = name == "flex"
        module = (
            FlexBlock(width, heads, hidden, tokens, device)
            if flex
            else TransformerBlock(width, heads, hidden)
        )
        x = torch.randn(1, tokens, width)
    return module.to(device, dtype).eval(), x.to(device, dtype)


MODELS = ("transformer", "convnet", "flex")


# --- children ---


def compile_options(mode: str, device: str) -> dict[str, Any]:
    """What the mode stands for, as both arms get it."""
    found = dict(torch._inductor.list_mode_options(mode))
    return found | ({"max_autotune_gemm_backends": "ATEN,CPP"} if device == "cpu" else {})


@contextlib.contextmanager
def tuning_service(arm: str, folder: Path) -> Iterator[list[Any]]:
    """Our service with the arm's own store, or nothing of ours; the decisions that are made."""
    decisions: list[Any] = []
    if arm == SHARED:
        SharedAssembler().share()
    if arm != "ours":
        yield decisions
        return
    from forecast_autotune import enable_torch_compile
    from forecast_integrations.inductor.summary import LISTENERS

    hear = lambda label, decision: decisions.append(decision)  # noqa: E731
    LISTENERS.append(hear)
    try:
        with enable_torch_compile(store=folder / "store"):
            yield decisions
    finally:
        LISTENERS.remove(hear)


def first_call(name: str, arm: str, mode: str, folder: Path, device: str) -> tuple[Callable[[], Any], Row]:
    """Compile and run once with the caches below `folder`; the call, and what it took."""
    module, x = model_of(name, device)
    with torch.no_grad(), tuning_service(arm, folder) as decisions:
        before, begin = inductor_clock(), time.perf_counter()
        compiled = compile_separately(module, compile_options(mode, device))
        compiled(x)
        synchronize(device)
        seconds = time.perf_counter() - begin
    inductor = inductor_seconds("_template_precompiling", before) + inductor_seconds(
        "_template_autotuning", before
    )
    forecast = sum(d.cost.forecast_s for d in decisions)
    row: Row = {"row": "compile", "seconds": seconds}
    row |= {"tuning_s": inductor + forecast, "forecast_s": forecast}
    row |= {"operations": len(decisions), "measured": sum(d.measured for d in decisions)}
    return partial(compiled, x), row | {"considered": sum(d.candidates for d in decisions)}


def warm_up(mode: str, device: str) -> None:
    """What any arm may have done before its clock starts: worker processes, libraries, one compilation."""
    from torch._inductor.utils import fresh_cache

    if device == "cuda":
        restart_compile_workers()
    with torch.no_grad(), fresh_cache():
        torch.compile(torch.nn.Linear(48, 40, device=device), options=compile_options(mode, device))(
            torch.randn(32, 48, device=device)
        )


def compile_child(arguments: argparse.Namespace) -> None:
    """Compile in one arm, say what it took, and time so many forward passes whenever asked to."""
    given, device = arguments.given, device_of(arguments)
    warm_up(given["mode"], device)
    call, row = first_call(given["model"], given["arm"], given["mode"], Path(given["folder"]), device)
    module, x = model_of(given["model"], device)
    with torch.no_grad():
        wanted = module(x)
        error = float((call() - wanted).abs().max() / wanted.abs().max())
        print_row({**row, **{k: given[k] for k in ("model", "arm", "repeat")}, "relative_error": error})
        del module, wanted
        for line in sys.stdin:
            with torch.compiler.set_stance("fail_on_recompile"):  # it would be another graph
                (times,) = timed_in_turns([call], int(line), device)
            print_row({"row": "turn", "ms": times})


# --- the whole ---


def in_turns_of(children: Mapping[str, RowProcess], rounds: int) -> Row:
    """Median milliseconds of every child's forward pass, which take turns; the first takes two of them."""
    arms = [*TIMED, TIMED[0]]
    found: list[list[float]] = [[] for _ in arms]
    for turn in range(max(1, rounds // PASSES)):
        for place in range(len(arms)):
            which = (place + turn) % len(arms)
            found[which].append(children[arms[which]].ask(PASSES)["ms"])
    times = [statistics.median(f) for f in found]
    return {"ms": dict(zip(TIMED, times, strict=False)), "noise": abs(times[-1] / times[0] - 1.0)}


def summary(rows: RowFile) -> Row:
    """Per model and altogether: tuning, the whole first call, and latency, ours over plain."""
    found: Row = {}
    for name in MODELS:
        arms = {arm: rows.pick(row="compile", model=name, arm=arm) for arm in ARMS}
        if not all(arms.values()):
            continue
        medians = {
            key: {arm: statistics.median(r[key] for r in mine) for arm, mine in arms.items()}
            for key in ("tuning_s", "seconds")
        }
        tuning, whole = medians["tuning_s"], medians["seconds"]
        latency = [r["ms"]["ours"] / r["ms"]["plain"] for r in rows.pick(row="latency", model=name)]
        found[name] = {
            **medians,
            "tuning_plain_over_ours": tuning["plain"] / tuning["ours"] if tuning["ours"] else None,
            "tuning_shared_over_ours": tuning[SHARED] / tuning["ours"] if tuning["ours"] else None,
            "tuning_share_of_plain": tuning["plain"] / whole["plain"],
            "seconds_plain_over_ours": whole["plain"] / whole["ours"],
            "latency_over_plain": geometric_mean(latency),
            "latency_noise": max((r["noise"] for r in rows.pick(row="latency", model=name)), default=None),
            "repeats": min(map(len, arms.values())),
        }
    return found


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--mode", default="max-autotune-no-cudagraphs", help="of torch.compile, for both arms")
    made.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    made.add_argument("--rounds", type=int, default=100, help="of timing the forward passes in turns")
    made.add_argument("--patience", type=float, default=1800.0, help="seconds that one child may take")
    made.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so many")
    made.add_argument(
        "--work", type=Path, help="where caches are kept until they are timed; default: by FILE"
    )
    arguments = parse_arguments(made)
    if arguments.child:
        compile_child(arguments)
        return 0
    until = time.monotonic() + arguments.seconds
    report = ResultFile(arguments, "whole models: tuning time against plain max-autotune, at equal latency")
    rows = RowFile(arguments.out.with_suffix(".rows.jsonl"))
    work: Path = arguments.work or arguments.out.with_suffix(".work")

    def folder_of(name: str, arm: str, repeat: int) -> Path:
        return (work / f"{name}-{arm}-{repeat}").resolve()

    def child(name: str, arm: str, repeat: int) -> RowProcess:
        folder = folder_of(name, arm, repeat)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        given = {"model": name, "arm": arm, "repeat": repeat, "folder": str(folder), "mode": arguments.mode}
        env = child_environment(folder, TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"))
        return RowProcess(
            child_command(sys.modules["__main__"].__file__ or "", arguments, "compile", given),
            env,
            arguments.patience,
        )

    for repeat in range(arguments.repeats):
        for name in arguments.models:
            if rows.pick(row="latency", model=name, repeat=repeat) or time.monotonic() > until:
                continue
            rows.drop(model=name, repeat=repeat)
            with contextlib.ExitStack() as open_ones:
                there: dict[str, RowProcess] = {}
                for arm in ARMS if repeat % 2 else ARMS[::-1]:
                    there[arm] = open_ones.enter_context(child(name, arm, repeat))
                    row = there[arm].row()
                    if row is None:
                        raise RuntimeError(f"{name}, {arm}: the child ended without a row; see above")
                    rows.add(row)
                    if arm not in TIMED:
                        there.pop(arm).close()
                timed = in_turns_of(there, arguments.rounds)
                rows.add({"row": "latency", "model": name, "repeat": repeat, **timed})
            for arm in ARMS:  # no more than these: `--work` may hold what is not ours
                shutil.rmtree(folder_of(name, arm, repeat), ignore_errors=True)
    for row in rows.rows:
        report.add(row["row"], row)
    report.finish(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
