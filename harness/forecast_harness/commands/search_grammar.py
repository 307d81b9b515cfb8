"""The grammar of `search`."""

from __future__ import annotations

import argparse

from forecast_autotune.commands.registry import (
    COUNT,
    SECONDS,
    SEED,
    WORKERS,
    Commands,
    IntegerRange,
    RealRange,
)
from forecast_harness.commands.grammar import DEVICE_HELP, path_option


def search(commands: Commands) -> None:
    """Add `search`."""
    parser = commands.add(
        "search",
        "forecast_harness.commands.search:search",
        "search for a faster kernel: propose sources, forecast them all, verify and time the promising ones",
        usage="forecast-autotune search PACK_OR_KERNEL [options] | search --show DIR",
        epilog="Ctrl-C ends a search in a folder that --resume continues, and says how. Sources run in a "
        "sandbox only.",
        examples=(
            "search softmax --device cpu --seconds 60",
            "search kernels.py:softmax --seconds 300 --out faster",
            "search --show faster",
        ),
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="PACK_OR_KERNEL",
        help="a shipped pack, a pack's folder, a KernelBench file; or, on a GPU, KERNEL.py:FN or package.module:FN, a "
        "Triton kernel, or KERNEL.cu:FN, a CUDA C++ kernel",
    )
    _method_options(parser)
    _budget_options(parser)
    _output_options(parser)


def _method_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how")
    _author_options(
        group,
        "mechanical (default), llm:SPEC, files:DIR or recorded:DIR; several share the budget",
        "short for --proposer llm:SPEC; as in FORECAST_AUTOTUNE_LLM",
    )
    group.add_argument(
        "--archive",
        choices=("puct", "greedy"),
        default="puct",
        help="which sources are developed further (default: puct)",
    )
    group.add_argument(
        "--surrogate",
        default="auto",
        metavar="SPEC",
        help="what forecasts: auto (default), none (measure what comes first) or llm:SPEC",
    )
    for name, value, most, text in (
        ("samples", 16, 10_000, "proposals per parent"),
        ("k", 4, 10_000, "measurements per parent at most"),
        ("trials", 12, 100_000, "configs of one source that may be timed"),
    ):
        group.add_argument(
            f"--{name}",
            type=IntegerRange(1, most),
            default=value,
            metavar="N",
            help=f"{text} (default: {value})",
        )
    group.add_argument(
        "--parents",
        type=IntegerRange(1, 1000),
        metavar="N",
        help="sources developed by one batch (default: 2; 1 where kernels are compiled ahead of a device)",
    )
    group.add_argument("--seed", type=SEED, default=0, metavar="N", help="of all that is drawn (default: 0)")


def _budget_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("budgets: the search ends at the first that is spent")
    group.add_argument(
        "--gpu-budget", type=COUNT, default=200, metavar="N", help="sources measured (default: 200)"
    )
    group.add_argument("--gpu-seconds", type=SECONDS, metavar="S", help="of the device")
    group.add_argument("--seconds", type=SECONDS, metavar="S", help="of work, also on the CPU")
    _model_limits(group, "of language models", "US dollars, for models with a price")


def _output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    _folder_options(group, "the search's folder", "search", "the search")
    _device_option(group)
    path_option(group)
    group.add_argument(
        "--lanes",
        type=WORKERS,
        metavar="N",
        help="sources measured at once (default: one per GPU; 1 on a CPU)",
    )
    group.add_argument(
        "--show", metavar="DIR", help="only sum up a search's folder, also a running one, and write its page"
    )
    group.add_argument("--quiet", action="store_true", help="show nothing until the end")


def improve(commands: Commands) -> None:
    """Add `improve`."""
    parser = commands.add(
        "improve",
        "forecast_harness.commands.improve:improve",
        "make a program faster: record it, search the kernels that take its time, prove them in the program",
        usage="forecast-autotune improve [options] (SCRIPT | -m MODULE) [arguments of the program ...]",
        epilog="Nothing of yours is changed: faster kernels go to the store, and --patch writes a diff. All behind "
        "SCRIPT or MODULE belongs to the program. Ctrl-C keeps what is done; --resume goes on.",
        examples=(
            "improve train.py",
            "improve --seconds 600 --llm 'http://localhost:8000/v1?model=NAME' --patch faster.diff train.py --steps 20",
            "improve --step __main__:step --check __main__:evaluate -m package.train",
        ),
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a Python file, and its arguments"
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module, as in `python -m`"
    )
    group = parser.add_argument_group("how")
    _author_options(
        group,
        "another author beside mechanical rewrites: recorded:DIR or files:DIR with a folder a kernel",
        "a language model as author; as in FORECAST_AUTOTUNE_LLM",
    )
    group.add_argument(
        "--surrogate", metavar="SPEC", help="what forecasts sources, as of search (default: auto)"
    )
    group.add_argument(
        "--samples", type=IntegerRange(1, 10_000), metavar="N", help="proposals per parent, as of search"
    )
    group.add_argument(
        "--step", metavar="PLACE", help="module:function that is one step (default: the launches' period)"
    )
    group.add_argument(
        "--check", metavar="PLACE", help="module:function whose results must stay the same, rounding apart"
    )
    group.add_argument(
        "--kernels", type=COUNT, metavar="N", help="parts improved at most (default: until 80 %% of the time)"
    )
    _shared_budget(parser)
    group = parser.add_argument_group("where")
    _folder_options(group, "its folder", "improve", "the improvement")
    group.add_argument(
        "--from-run",
        metavar="DIR",
        help="the folder of an earlier improve, whose recording of the program is used",
    )
    group.add_argument("--patch", metavar="FILE", help="write changes of your files as a unified diff")
    _device_option(group)
    group.add_argument("--quiet", action="store_true", help="show nothing until the end")


def mcp(commands: Commands) -> None:
    """Add `mcp`."""
    parser = commands.add(
        "mcp",
        "forecast_harness.commands.mcp:mcp",
        "give coding agents tools over MCP on standard input and output: kernels of a recorded program, verdicts",
        epilog="A source is judged in a sandbox, beside the original; the agent runs nothing on the device.",
        examples=("mcp improve-train",),
    )
    parser.add_argument("folder", metavar="DIR", help="the folder of an `improve` of the program")
    _device_option(parser)
    parser.add_argument(
        "--seconds",
        type=SECONDS,
        default=3600.0,
        metavar="S",
        help="most of one kernel's search (default: 3600)",
    )


def _shared_budget(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("budgets")
    group.add_argument(
        "--seconds",
        type=SECONDS,
        default=300.0,
        metavar="S",
        help="for all of it, proof included (default: 300)",
    )
    # Nine searches on an H200 found at most 0.2 % more after their first 64 sources; other kernels need the seconds.
    group.add_argument(
        "--gpu-budget",
        type=COUNT,
        default=64,
        metavar="N",
        help="sources measured, of each kernel (default: 64)",
    )
    group.add_argument("--gpu-seconds", type=SECONDS, metavar="S", help="of the device, in all")
    _model_limits(group, "of language models, in all", "US dollars, in all")


def _author_options(group: argparse._ActionsContainer, proposer: str, llm: str) -> None:
    for name, text in (("--proposer", proposer), ("--llm", llm)):
        group.add_argument(name, action="append", metavar="SPEC", help=text)


def _folder_options(group: argparse._ActionsContainer, folder: str, command: str, work: str) -> None:
    group.add_argument(
        "--out", metavar="DIR", help=f"{folder} (default: {command}-NAME in the current directory)"
    )
    group.add_argument("--resume", action="store_true", help=f"go on with {work} in that folder")


def _device_option(group: argparse._ActionsContainer) -> None:
    group.add_argument("--device", choices=("cpu", "cuda"), help=DEVICE_HELP)


def _model_limits(group: argparse._ActionsContainer, tokens: str, money: str) -> None:
    group.add_argument("--tokens", type=IntegerRange(1, 10**15), metavar="N", help=tokens)
    group.add_argument("--money", type=RealRange(0.0, 1e9, above=True), metavar="X", help=money)
