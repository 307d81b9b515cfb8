"""The grammar of `run`, `llm` and `demo`."""

from __future__ import annotations

from forecast_autotune.commands.registry import (
    Commands,
    RealRange,
    filters,
    store_option,
)
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
        examples=(
            "run train.py",
            "run -m package.serve",
            "run --mode frozen serve.py",
        ),
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("script", nargs="?", metavar="SCRIPT", help="a Python file, directory or zip file")
    what.add_argument("-m", dest="run_module", metavar="MODULE", help="a module, as in `python -m`")
    parser.add_argument("--mode", choices=list(map(str, Mode)), help="instead of FORECAST_AUTOTUNE_MODE")
    store_option(parser)
    parser.add_argument(
        "--capture",
        action="store_true",
        help="keep a few calls of every Triton kernel with their tensors' contents, for search, variants and verify",
    )
    parser.add_argument(
        "--recording",
        metavar="DIR",
        help="follow the plan in this folder and record the run there: for improve",
    )


def llm(commands: Commands) -> None:
    """Add `llm`."""
    group = commands.group(
        "llm", "ask a language model by files of questions and answers", "commands", "COMMAND"
    )
    ask = group.add(
        "ask",
        "forecast_integrations.commands.llm:ask",
        "write open questions to a file, or take answers to them into a file for recorded:FILE",
        examples=(
            "llm ask --export questions.jsonl --kind advice",
            "llm ask --import answers.jsonl --to answered.jsonl --model model-1 --author me --how chat",
        ),
    )
    what = ask.add_mutually_exclusive_group(required=True)
    what.add_argument("--export", metavar="FILE", help="write the questions: .jsonl or .jsonl.gz")
    what.add_argument("--import", dest="imported", metavar="FILE", help="take the answers in this file")
    ask.add_argument("tables", nargs="*", metavar="TABLE", help="table files (default: the shipped ones)")
    ask.add_argument(
        "--store", metavar="DIR", help="ask about the problems in a store that was measured exhaustively"
    )
    ask.add_argument(
        "--kind",
        default="forecast",
        metavar="NAME",
        help="which questions: forecast (default), as a decision asks; calibration, as `train calibrate-llm` does; "
        "advice, as `advise --stored` does",
    )
    ask.add_argument(
        "--surrogate",
        choices=("analytic", "default"),
        default="default",
        help="whose guesses the questions show: the formula's, as `replay` does, or what ships, as decisions do",
    )
    ask.add_argument(
        "--to", metavar="FILE", help="answers for recorded:FILE; questions that it answers are not exported"
    )
    ask.add_argument("--questions", metavar="FILE", help="with --import: refuse what does not answer these")
    ask.add_argument("--model", metavar="NAME", help="with --import: the answering model, with version")
    ask.add_argument("--author", metavar="NAME", help="with --import: a person who vouches for the answers")
    ask.add_argument("--how", metavar="TEXT", help="with --import: how they came about")
    ask.add_argument(
        "--blind", action="store_true", help="with --import: nobody who answered knew any measurement"
    )


def demo(commands: Commands) -> None:
    """Add `demo`."""
    commands.add(
        "demo",
        "forecast_integrations.commands.demo:demo",
        "tune a matmul live, against triton.autotune (needs a GPU)",
        examples=("demo",),
    )


def warm(commands: Commands) -> None:
    """Add `warm`."""
    parser = commands.add(
        "warm",
        "forecast_integrations.commands.warm:warm",
        "tune what programs met in frozen or skip mode, and compile what they needed, without the programs",
        epilog="Kernels are imported by module and name, arguments made from their records. Modules are looked for "
        "as Python does, the current folder first. With --plan, and --device a target on which nothing was met "
        "(gfx942, sm_120, a model's name): how many candidates can launch there.",
        examples=(
            "warm --plan",
            "warm --plan --device gfx942",
            "warm --shapes M=1..8192:pow2",
            "warm --certify 0.05",
        ),
    )
    parser.add_argument(
        "--plan", action="store_true", help="only list what is to be tuned and compiled, and the cost"
    )
    parser.add_argument(
        "--misses",
        metavar="DIR",
        help="the store whose recorded misses are tuned, of another machine for example (default: --store)",
    )
    parser.add_argument(
        "--shapes",
        action="append",
        default=[],
        metavar="NAME=SIZES",
        help="also tune recorded calls, tuned ones included, at these sizes of an integer argument: M=1..8192:pow2, "
        "M=16..256:16 or M=1,17,300 (repeat for combinations)",
    )
    parser.add_argument(
        "--certify",
        type=RealRange(0.0, 1.0),
        metavar="RISK",
        help="measure where the stated risk of more regret than the tolerance is above this, nothing elsewhere, and "
        "say the seconds; decisions with a larger risk are made anew",
    )
    filters(parser)
