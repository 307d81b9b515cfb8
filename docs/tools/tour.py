"""Run the tour, and write what it printed to docs/tour/: a decision and a search, step by step.

    python docs/tools/tour.py [FOLDER]

A minute on two cores without a GPU. Pages of the store and of the search lie beside the tour's, which links to them.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from forecast_autotune.report.page_parts import STYLE

ROOT = Path(__file__).parents[2]
STEPS: tuple[tuple[str, str, str], ...] = (
    (
        "A decision",
        "A kernel with 60 configs. A null device stands for the GPU: compilations are real, times are invented.",
        "cat row_maximum.py",
    ),
    (
        "The first call decides",
        "All configs are forecast; those that may win are compiled and timed.",
        "FORECAST_AUTOTUNE_SUMMARY=1 python row_maximum.py 2>&1",
    ),
    (
        "Its reason",
        "Rounds of the plan, the stated risk, and each time beside the forecast made just before it. The first "
        "forecast is left out: no forecast knows the level of invented times.",
        "forecast-autotune explain row_maximum",
    ),
    (
        "The next process",
        "It starts from the store: the winner alone is compiled, and nothing is timed.",
        "FORECAST_AUTOTUNE_SUMMARY=1 python row_maximum.py 2>&1",
    ),
    (
        "The store as a page",
        "All kernels in a browser: <a href='store.html'>store.html</a>.",
        "forecast-autotune show --page store.html",
    ),
    (
        "A search",
        "A problem pack: inputs and tolerances, a reference in PyTorch, and a source to start from.",
        "python -m json.tool pack/definition.json && cat pack/reference.py pack/solutions/by_row.py",
    ),
    (
        "Two sources",
        "A model would write them; here they lie in a folder. One computes something else.",
        "tail -n +1 proposals/*.py",
    ),
    (
        "Its verdicts",
        "Sources run in a sandbox. Each is verified, then timed in turns with the start. The best is confirmed in a "
        "fresh process.",
        "forecast-autotune search pack --device cpu --proposer recorded:proposals --surrogate none "
        "--gpu-budget 3 --out search 2>&1",
    ),
    (
        "The search as a page",
        "Every source with its verdict, its times and its difference: <a href='search.html'>search.html</a>.",
        "forecast-autotune search --show search",
    ),
)
"""Heading, a sentence of HTML, and a command of the shell."""
WRONG = "import torch\n\ndef run(x):\n    return x.abs().sum(-1)\n"


def main(target: Path) -> None:
    """Run every step in an empty folder, and write the pages to `target`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "tour")
        shutil.copytree(ROOT / "docs" / "examples", folder, ignore=shutil.ignore_patterns("[!rs]*"))
        sys.path.insert(0, str(folder))
        from search_tiny import PROPOSAL, write_pack

        write_pack(folder / "pack")
        (folder / "proposals").mkdir()
        (folder / "proposals" / "vector_norm.py").write_text(PROPOSAL.lstrip())
        (folder / "proposals" / "wrong_norm.py").write_text(WRONG)
        parts = [_step(*step, folder) for step in STEPS]
        for page, name in (("store.html", "store.html"), ("search/report.html", "search.html")):
            (target / name).write_text(_neutral((folder / page).read_text(), folder))
    target.joinpath("index.html").write_text(
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">\n'
        f"<title>A tour of forecast_autotune</title>\n<style>{STYLE}{_STYLE}</style>\n<h1>A tour</h1>\n"
        "<p>Commands and what they printed on two cores without a GPU, written by docs/tools/tour.py.</p>\n"
        + "\n".join(parts)
        + "\n</html>\n"
    )


_STYLE = """
body { max-width: 60rem; } h2 { margin: 2rem 0 0; } p { margin: .2rem 0 .6rem; }
pre { overflow-x: auto; padding: .6rem 1rem; margin: .3rem 0; border: 1px solid var(--line); border-radius: 8px; }
pre.command { background: #f6f8fa; } pre { font-size: .8rem; line-height: 1.35; }
"""


def _step(heading: str, text: str, command: str, folder: Path) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FORECAST_AUTOTUNE", "TRITON"))}
    kept |= {
        "COLUMNS": "108",
        "FORECAST_AUTOTUNE_CACHE_DIR": str(folder / "store"),
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=kept, stdout=-1, text=True, check=True)
    shown = _neutral("\n".join(line.rstrip() for line in done.stdout.splitlines()), folder)
    return (
        f"<section>\n<h2>{heading}</h2>\n<p>{text}</p>\n<pre class='command'>$ {html.escape(command)}</pre>\n"
        f"<pre class='output'>{html.escape(shown)}</pre>\n</section>"
    )


def _neutral(text: str, folder: Path) -> str:
    """The text without the folder's name, which is another one each time."""
    return re.sub(r"\n{3,}", "\n\n", text.replace(str(folder), "/home/you/tour"))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs" / "tour")
