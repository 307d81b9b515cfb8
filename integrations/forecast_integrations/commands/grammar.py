"""The grammar of `run` and `demo`."""

from __future__ import annotations

from forecast_autotune.commands.registry import Commands, store_option
from forecast_autotune.settings import Mode


def run(commands: Commands) -> None:
    """Add `run`."""
    parser = commands.add(
        "run",
        "forecast_integrations.commands.run:run",
        "run a Python program, every triton.autotune in it served by forecasts",
        usage="forecast-autotune run [options] (SCRIPT | -m MODULE) [arguments of the program ...]",
        epilog="All arguments behind SCRIPT or MODULE belong to the program. With --json, the program's "
        "standard output goes to stderr and the summary to stdout.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("script", nargs="?", metavar="SCRIPT", help="a Python file, directory or zip file")
    what.add_argument("-m", dest="run_module", metavar="MODULE", help="a module, as in `python -m`")
    parser.add_argument("--mode", help=" | ".join(Mode))
    store_option(parser)
    parser.add_argument("--summary", action="store_true", help="print one line per decision to stderr")
    parser.add_argument("--tolerance", metavar="SHARE", help="accepted regret, 0.02 is 2 %%")
    parser.add_argument("--risk", metavar="P", help="accepted probability of a larger regret")
    parser.add_argument("--max-measurements", metavar="N", help="most candidates measured per decision")


def demo(commands: Commands) -> None:
    """Add `demo`."""
    parser = commands.add(
        "demo",
        "forecast_integrations.commands.demo:demo",
        "tune a matmul live, against triton.autotune (needs a GPU)",
    )
    parser.add_argument(
        "--size", type=int, default=4096, metavar="N", help="rows and columns of the matrices"
    )
