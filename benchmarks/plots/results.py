"""Draw the pictures of docs/results.md from the recorded results that its claims show.

    python -m benchmarks.plots.results [--out docs/assets]

`first_calls.svg`: seconds until a tuned result, with and without forecasts. `searches.svg`: what searches of two
minutes found, by kernel. `cold_start.svg`: seconds of a program's first requests. Needs matplotlib, and no GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.claims.manifest import RESULTS, ROOT, load_claims
from benchmarks.plots.replay_curve import BLUE, GREEN, INK, SOFT, empty_picture, save_picture

FIRST_CALLS = {
    "fp16 matmul, 72 configs": ("matmul72-later", "triton", "first"),
    "28 lists of libraries": ("libraries-triton", "triton", "ours"),
    "20 GEMMs, torch.compile": ("held-out-gemms", "stock", "ours"),
    "vision transformer, torch.compile": ("vit", "first_plain", "first"),
}
"""The claim of each row, its figure without forecasts and its figure with them."""
LIBRARY_KERNELS = {
    "fla_modules_norm_l2norm_l2norm_fwd_kernel": "fla l2norm",
    "fla_ops_utils_softmax_softmax_fwd_kernel": "fla softmax",
    "liger_kernel_ops_dyt__dyt_fwd_kernel": "liger dynamic tanh",
}
"""Names of kernels of libraries, by their targets."""
COLD_START, PROGRAM = "cold_start.json", "fla"
SEARCHES = "machine_code_winners_in_turns.json"


def first_call_seconds() -> dict[str, tuple[float, float]]:
    """Seconds without and with forecasts, by row."""
    figures = {claim.id: claim.figures for claim in load_claims()[0]}
    return {
        row: (_seconds(figures[claim][without]), _seconds(figures[claim][ours]))
        for row, (claim, without, ours) in FIRST_CALLS.items()
    }


def _seconds(figure: str) -> float:
    number, unit = figure.split()
    if unit != "s":
        raise ValueError(f"a figure of {unit}, where seconds are drawn: {figure}")
    return float(number)


def draw_first_calls(seconds: Mapping[str, tuple[float, float]], path: Path) -> None:
    """A line a row, from what it takes with forecasts to what it takes without."""
    figure, axes = empty_picture("first calls", 2.8)
    for place, (without, ours) in enumerate(reversed(seconds.values())):
        axes.plot([ours, without], [place, place], color=SOFT, lw=2, zorder=1)
        axes.scatter([without], [place], color=SOFT, s=60)
        axes.scatter([ours], [place], color=BLUE, s=60)
        axes.annotate(
            f"{ours:g} s",
            (ours, place),
            (-8, 0),
            ha="right",
            va="center",
            color=BLUE,
            textcoords="offset points",
        )
        axes.annotate(
            f"{without:g} s", (without, place), (8, 0), va="center", color=INK, textcoords="offset points"
        )
    axes.set_yticks(range(len(seconds)), list(reversed(seconds)))
    axes.set_xscale("log")
    axes.set(xlim=(0.4, 1200), ylim=(-0.6, len(seconds) - 0.4))
    axes.set_xticks([1, 10, 100, 1000], ["1 s", "10 s", "100 s", "1000 s"])
    axes.minorticks_off()
    axes.set_title(
        "Until a tuned result: by forecasts (blue), without (grey)", loc="left", fontsize=11, color=INK
    )
    save_picture(figure, path)


def search_gains(root: Path = ROOT) -> dict[str, float]:
    """How many times as fast as the kernel's best config the source found is, by kernel."""
    result = json.loads((root / RESULTS / SEARCHES).read_text(encoding="utf-8"))
    gains = {_kernel_name(row["target"]): row["gain"] for row in result["raw"]["winners"]}
    return dict(sorted(gains.items(), key=lambda item: item[1]))


def _kernel_name(target: str) -> str:
    """`benchmarks_kernels_softmax_py_online_softmax` as `online softmax`."""
    name = LIBRARY_KERNELS.get(target) or target.rpartition("_py_")[2].strip("_")
    for end in ("_fused", "_kernel", "_fwd"):
        name = name.removesuffix(end)
    return name.replace("_", " ")


def draw_searches(gains: Mapping[str, float], path: Path) -> None:
    """A bar a kernel."""
    figure, axes = empty_picture("searches", 4.2)
    shown = [100 * (gain - 1) for gain in gains.values()]
    colours = [GREEN if percent >= 3 else SOFT for percent in shown]
    axes.barh(range(len(shown)), shown, color=colours, height=0.6)
    for place, percent in enumerate(shown):
        axes.annotate(
            f"{percent:.1f} %", (percent, place), (5, 0), va="center", color=INK, textcoords="offset points"
        )
    axes.set_yticks(range(len(gains)), list(gains))
    axes.set(xlim=(0, 11), ylim=(-0.6, len(shown) - 0.4))
    axes.set_xticks([])
    axes.set_title(
        "Faster than the kernel in its best config, after 120 s of search", loc="left", fontsize=11, color=INK
    )
    save_picture(figure, path)


def first_requests(result: Mapping[str, Any]) -> dict[str, list[float]]:
    """Seconds of the first 50 requests without and after `warm`."""
    steps = result["raw"][PROGRAM][0]
    return {step: steps[step]["seconds"][:50] for step in ("without", "forecast")}


def draw_first_requests(seconds: Mapping[str, list[float]], path: Path) -> None:
    """A point a request."""
    figure, axes = empty_picture("cold start", 2.8)
    for (step, values), colour in zip(seconds.items(), (SOFT, BLUE), strict=True):
        axes.scatter(range(1, len(values) + 1), values, color=colour, s=22, label=step)
    axes.set_yscale("log")
    axes.set_yticks([0.1, 1, 10, 100], ["0.1 s", "1 s", "10 s", "100 s"])
    axes.minorticks_off()
    axes.set_xlabel("request of a fresh process", color=INK)
    axes.set_title(
        "Seconds of a request: after `warm` (blue), without (grey)", loc="left", fontsize=11, color=INK
    )
    axes.grid(axis="y", color=SOFT, lw=0.5, alpha=0.4)
    save_picture(figure, path)


def main() -> None:
    """Draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/assets"))
    folder = parser.parse_args().out
    draw_first_calls(first_call_seconds(), folder / "first_calls.svg")
    draw_searches(search_gains(), folder / "searches.svg")
    if (measured := ROOT / RESULTS / COLD_START).is_file():
        result = json.loads(measured.read_text(encoding="utf-8"))
        draw_first_requests(first_requests(result), folder / "cold_start.svg")


if __name__ == "__main__":
    main()
