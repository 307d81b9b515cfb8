"""The grammar of the command line. Loads neither rich nor numpy: `--help` must be instant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from forecast_autotune import __version__
from forecast_autotune.cli.output import Usage
from forecast_autotune.cli.parser_search import search
from forecast_autotune.cli.parser_training import training
from forecast_autotune.settings import Mode


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        # Abbreviations would change their meaning with every option that is added later.
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Leave printing to `main`, so that all errors look alike."""
        raise Usage(f"{message} (`{self.prog} --help` explains)")


_RUN_FLAGS = ("--summary", "--json", "-h", "--help")
_RUN_VALUES = ("--mode", "--store", "--tolerance", "--risk", "--max-measurements")


def split_run(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a `run` command line before the program's own arguments: (ours, theirs).

    The first word that is neither an option of ours nor an option's value is SCRIPT; `-m MODULE` ends
    our part likewise. argparse alone would take `run script.py --json` for our `--json`.
    """
    position = 1
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            ours, rest = list(arguments[:position]), list(arguments[position + 1 :])
            return [*ours, *rest[:1]], rest[1:]
        if word == "-m":
            end = position + 2
        elif word in _RUN_VALUES:
            position += 2
            continue
        elif word.startswith("-") and word != "-" and not word.startswith("-m"):
            position += 1
            continue
        else:
            end = position + 1
        return list(arguments[:end]), list(arguments[end:])
    return list(arguments), []


def build() -> argparse.ArgumentParser:
    """The parser of all commands; the result names the `module` and `function` to call."""
    parser = _Parser(
        prog="forecast-autotune",
        description="Tune Triton kernels by forecast: measure only the configs a forecast is unsure about.",
    )
    parser.add_argument("--version", action="version", version=f"forecast-autotune {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _run(commands)
    _replay(commands)
    _eval(commands)
    _train(commands)
    _stored(commands)
    _exchange(commands)
    _harness(commands)
    _variants(commands)
    search(commands, _command)
    doctor = _command(commands, "doctor", "doctor", "doctor", "check this installation, and say what to do")
    _store_option(doctor)
    doctor.add_argument("--network", action="store_true", help="also contact the language model's server")
    demo = _command(
        commands, "demo", "demo", "demo", "tune a matmul live, against triton.autotune (needs a GPU)"
    )
    demo.add_argument("--size", type=int, default=4096, metavar="N", help="rows and columns of the matrices")
    return parser


def _command(commands: Any, name: str, module: str, function: str, text: str, **options: Any) -> _Parser:
    parser: _Parser = commands.add_parser(name, help=text, description=text, **options)
    parser.set_defaults(module=module, function=function)
    parser.add_argument("--json", action="store_true", help="print one JSON object to stdout")
    return parser


def _store_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        metavar="DIR",
        help="where measurements are kept (default: FORECAST_AUTOTUNE_CACHE_DIR, else the user's cache)",
    )


def _filters(parser: argparse.ArgumentParser) -> None:
    _store_option(parser)
    parser.add_argument("--kernel", metavar="TEXT", help="only kernels whose name contains this")
    parser.add_argument("--device", metavar="TEXT", help="only devices whose name contains this")


def _run(commands: Any) -> None:
    run = _command(
        commands,
        "run",
        "run",
        "run",
        "run a Python program, every triton.autotune in it served by forecasts",
        usage="forecast-autotune run [options] (SCRIPT | -m MODULE) [arguments of the program ...]",
        epilog="All arguments behind SCRIPT or MODULE belong to the program. With --json, the program's "
        "standard output goes to stderr and the summary to stdout.",
    )
    what = run.add_mutually_exclusive_group(required=True)
    what.add_argument("script", nargs="?", metavar="SCRIPT", help="a Python file, directory or zip file")
    what.add_argument("-m", dest="run_module", metavar="MODULE", help="a module, as in `python -m`")
    run.add_argument("--mode", help=" | ".join(Mode))
    _store_option(run)
    run.add_argument("--summary", action="store_true", help="print one line per decision to stderr")
    run.add_argument("--tolerance", metavar="SHARE", help="accepted regret, 0.02 is 2 %%")
    run.add_argument("--risk", metavar="P", help="accepted probability of a larger regret")
    run.add_argument("--max-measurements", metavar="N", help="most candidates measured per decision")


def _replay(commands: Any) -> None:
    replay = _command(
        commands, "replay", "replay", "replay", "run the tuner against recorded tables instead of a GPU"
    )
    replay.add_argument("tables", nargs="*", metavar="TABLE", help="table files (default: the shipped ones)")
    replay.add_argument(
        "--policy",
        choices=("default", "exhaustive", "random", "first"),
        default="default",
        help="what to measure",
    )
    replay.add_argument(
        "--max-measurements",
        type=int,
        metavar="N",
        help="most candidates per problem (random, first: exactly so many; default: 10 %%, at least 3)",
    )
    replay.add_argument("--tolerance", type=float, metavar="SHARE", help="accepted regret, 0.02 is 2 %%")
    replay.add_argument("--risk", type=float, metavar="P", help="accepted probability of a larger regret")
    replay.add_argument("--seed", type=int, help="seed of random policies")
    replay.add_argument(
        "--prior",
        choices=("none", "tuned", "shapes", "devices"),
        default="none",
        help="known beforehand: nothing, or the kernel's other problems in the same tables",
    )
    replay.add_argument(
        "--surrogate",
        choices=("analytic", "default"),
        default="analytic",
        help="the untrained formula with its update, or what ships (it was fitted to the shipped tables)",
    )
    replay.add_argument("--workers", type=int, default=16, metavar="N", help="simulated compile threads")
    replay.add_argument(
        "--llm", metavar="SPEC", help="a language model beside the surrogate, as in FORECAST_AUTOTUNE_LLM"
    )
    replay.add_argument(
        "--leave-out",
        choices=("family", "hand", "kernel", "shape", "device"),
        help="fit the surrogate without one of these at a time, and score it beside the baselines",
    )
    replay.add_argument("--baselines", metavar="A,B", help="with --leave-out: which (default: all)")
    replay.add_argument("--seeds", type=int, metavar="N", help="with --leave-out: repetitions (default: 5)")
    replay.add_argument("--jobs", type=int, metavar="N", help="with --leave-out: processes (default: 1)")
    replay.add_argument("--plot", metavar="FILE", help="also draw a picture (.png) or a page (.html)")


def _train(commands: Any) -> None:
    train = commands.add_parser("train", help="turn measurements into better surrogates")
    kinds = train.add_subparsers(title="what to train", metavar="WHAT", required=True)
    forest = _command(
        kinds, "surrogate", "train", "surrogate", "fit the learned surrogate to recorded tables, in seconds"
    )
    forest.add_argument("tables", nargs="*", metavar="TABLE", help="table files (default: the shipped ones)")
    forest.add_argument("--out", required=True, metavar="FILE", help="the model, one .npz file")
    forest.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the forests")
    forest.add_argument("--trees", type=int, default=64, metavar="N", help="trees of a forest (default: 64)")
    forest.add_argument("--leaf", type=int, default=8, metavar="N", help="fewest rows of a leaf (default: 8)")
    forest.add_argument(
        "--hyper", action="store_true", help="fit the Gaussian process's hyperparameters too (minutes)"
    )
    honest = _command(
        kinds,
        "calibrate-llm",
        "language_model",
        "calibrate",
        "find out what a language model's forecasts are worth: until then it is not asked",
    )
    honest.add_argument("tables", nargs="*", metavar="TABLE", help="table files (default: the shipped ones)")
    honest.add_argument("--llm", required=True, metavar="SPEC", help="as in FORECAST_AUTOTUNE_LLM")
    honest.add_argument(
        "--out", metavar="FILE", help="default: beside the adapter, else in the cache directory"
    )
    honest.add_argument(
        "--sample", type=int, metavar="N", help="ask about so many candidates of a problem (default: all)"
    )
    honest.add_argument(
        "--answers", metavar="FILE", help="keep its answers in this .jsonl file; a second run takes them up"
    )
    honest.add_argument("--seeds", type=int, default=2, metavar="N", help="replays (default: 2)")
    honest.add_argument(
        "--noted",
        action="store_true",
        help="ask nothing: correct a calibration by what was noted with measurements (`export` them first)",
    )
    training(kinds, _command, _store_option)


def _eval(commands: Any) -> None:
    evaluation = _command(
        commands, "eval", "eval", "evaluate", "score surrogates on kernels they have not seen, from tables"
    )
    evaluation.add_argument(
        "tables", nargs="*", metavar="TABLE", help="table files (default: the shipped ones)"
    )
    evaluation.add_argument(
        "--leave-out",
        choices=("family", "hand", "kernel", "shape", "device"),
        default="kernel",
        help="what a surrogate may not have learnt from when it is tested (default: kernel)",
    )
    evaluation.add_argument("--methods", metavar="A,B", help="surrogates and baselines (default: all)")
    evaluation.add_argument(
        "--subject", metavar="NAME", help="the method under test (default: learned, else analytic)"
    )
    evaluation.add_argument(
        "--llm",
        metavar="SPEC",
        help="also a language model, alone and beside the learned surrogate; as in FORECAST_AUTOTUNE_LLM",
    )
    evaluation.add_argument("--seeds", type=int, default=3, metavar="N", help="repetitions (default: 3)")
    evaluation.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default: 1)")
    evaluation.add_argument(
        "--limit", type=int, metavar="N", help="only so many problems, in turn from each kernel"
    )
    evaluation.add_argument(
        "--out",
        metavar="DIR",
        help="write summary.json and pictures there; a second run takes up the rows found there",
    )


def _stored(commands: Any) -> None:
    show = _command(commands, "show", "show", "show", "list what the store holds, per kernel and device")
    show.add_argument(
        "--calibration",
        action="store_true",
        help="instead: stated risks and intervals against what later measurements found",
    )
    _filters(show)
    explain = _command(commands, "explain", "show", "explain", "say why a kernel got its configs")
    explain.add_argument("kernel", metavar="KERNEL", help="the kernel's name")
    explain.add_argument(
        "--key",
        nargs="+",
        default=[],
        metavar="VALUE",
        help="only keys that hold these values, in this order",
    )
    explain.add_argument("--top", type=int, default=8, metavar="N", help="list so many of the fastest")
    _store_option(explain)


def _exchange(commands: Any) -> None:
    export = _command(commands, "export", "exchange", "export", "write stored measurements as a table")
    export.add_argument(
        "file", nargs="?", default="-", metavar="FILE", help=".jsonl, .jsonl.gz or .parquet; - is stdout"
    )
    export.add_argument("--format", choices=("jsonl", "parquet"), help="default: by the file's name")
    _filters(export)

    imports = _command(commands, "import", "exchange", "import_", "add tables of others to the store")
    imports.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="tables, caches of Kernel Tuner, Inductor, Triton (its directory), Helion's .csv; - is stdin",
    )
    imports.add_argument(
        "--triton-cache",
        nargs="?",
        const="",
        metavar="DIR",
        help="import Triton's *.autotune.json (default: TRITON_CACHE_DIR, else ~/.triton/cache)",
    )
    imports.add_argument(
        "--device-name",
        metavar="NAME",
        help="where a cache was measured (default: the one it names, else this device)",
    )
    _store_option(imports)

    clear = _command(commands, "clear", "exchange", "clear", "remove measurements and decisions")
    _filters(clear)
    clear.add_argument("--variants", action="store_true", help="instead: other sources of kernels")
    clear.add_argument("--yes", action="store_true", help="do not ask")


def _harness(commands: Any) -> None:
    verify = _command(
        commands, "verify", "harness", "verify", "judge whether a kernel computes what its problem pack asks"
    )
    verify.add_argument("pack", metavar="PACK", help="a shipped pack, a pack's folder or a KernelBench file")
    verify.add_argument(
        "solution", nargs="?", metavar="SOLUTION", help="a file or a solution of the pack; none: the pack"
    )
    _judged(verify)
    bench = _command(
        commands, "bench", "harness", "bench", "time verified kernels against each other, in pairs"
    )
    bench.add_argument("pack", metavar="PACK", help="a shipped pack, a pack's folder or a KernelBench file")
    bench.add_argument("solutions", nargs="+", metavar="SOLUTION", help="files, or solutions of the pack")
    bench.add_argument("--against", metavar="REF", help="what has to be beaten (default: the first SOLUTION)")
    bench.add_argument("--seconds", type=float, default=60.0, help="most launch seconds of one contest")
    _judged(bench)


def _variants(commands: Any) -> None:
    variants = _command(
        commands,
        "variants",
        "variants",
        "variants",
        "make other sources of a kernel, and verify them in a sandbox against it",
        usage="forecast-autotune variants [options] (KERNEL.py:FN | list | show NAME)",
        epilog="A verified variant is a candidate where variants= or FORECAST_AUTOTUNE_VARIANTS=store asks "
        "for it. Without --mechanical, --from and --llm, what the store holds of the kernel is verified.",
    )
    variants.add_argument("what", metavar="KERNEL.py:FN", help="a kernel in a file, or `list`, or `show`")
    variants.add_argument("name", nargs="?", metavar="NAME", help="with show: a variant's name, or its start")
    variants.add_argument("--mechanical", action="store_true", help="by rewrites that need no model")
    variants.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        default=[],
        metavar="FILE",
        help="sources, tables or folders of them",
    )
    variants.add_argument("--llm", metavar="SPEC", help="by a language model; as in FORECAST_AUTOTUNE_LLM")
    variants.add_argument("--n", type=int, default=16, metavar="N", help="how many to ask for (default: 16)")
    variants.add_argument(
        "--verify", action=argparse.BooleanOptionalAction, default=True, help="in a sandbox (default: yes)"
    )
    variants.add_argument("--kernel", metavar="TEXT", help="with list: only kernels whose name contains this")
    _store_option(variants)
    variants.add_argument("--device", metavar="N", help="a device's number, or cpu (default: 0, if any)")
    variants.add_argument("--level", metavar="NAME", help="insist on a containment (default: the strongest)")
    variants.add_argument("--cases", type=int, default=12, metavar="N", help="launches with varied inputs")


def _judged(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="N", help="a device's number, or cpu (default: 0, if any)")
    parser.add_argument("--level", metavar="NAME", help="insist on a containment (default: the strongest)")
    parser.add_argument("--cases", type=int, default=18, metavar="N", help="launches with varied inputs")
    parser.add_argument("--language", choices=("torch", "triton", "cuda"), help="default: by the file's text")
    parser.add_argument("--trace", metavar="FILE", help="append verdicts and times to this .jsonl file")
