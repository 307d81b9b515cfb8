"""The grammar of `verify`, `bench`, `variants` and `advise`."""

from __future__ import annotations

import argparse

from forecast_autotune.commands.registry import SECONDS, Commands, IntegerRange, device_number, store_option

CODE_PATHS = ("auto", "machine-code", "host-code")
"""The ways of Triton sources to the clock."""
KERNEL_HELP = "a kernel: KERNEL.py:FN, or package.module:FN of an installed package"
DEVICE_HELP = "run there: cuda (default, if there is one), cpu"
CASES = IntegerRange(1, 100_000)


def verify(commands: Commands) -> None:
    """Add `verify`."""
    parser = commands.add(
        "verify",
        "forecast_harness.commands.judge:verify",
        "judge whether a kernel computes what its problem pack asks",
        examples=(
            "verify softmax",
            "verify softmax mine.py --device cpu",
        ),
    )
    parser.add_argument(
        "pack",
        metavar="PACK",
        help=f"a shipped pack, a pack's folder, a KernelBench file, KERNEL.cu:FN or {KERNEL_HELP}",
    )
    parser.add_argument(
        "solution",
        nargs="?",
        metavar="SOLUTION",
        help="a file or a solution of the pack; none: the pack, or the kernel",
    )
    _sandbox_options(parser, 18)


def bench(commands: Commands) -> None:
    """Add `bench`."""
    parser = commands.add(
        "bench",
        "forecast_harness.commands.judge:bench",
        "time verified kernels against each other, in pairs",
        examples=("bench softmax mine.py other.py --seconds 20",),
    )
    parser.add_argument(
        "pack", metavar="PACK", help="a shipped pack, a pack's folder, a KernelBench file or KERNEL.cu:FN"
    )
    parser.add_argument("solutions", nargs="+", metavar="SOLUTION", help="files, or solutions of the pack")
    parser.add_argument(
        "--against", metavar="REF", help="what has to be beaten (default: the first SOLUTION)"
    )
    parser.add_argument(
        "--seconds", type=SECONDS, default=60.0, metavar="S", help="most seconds of one contest"
    )
    path_option(parser)
    _sandbox_options(parser, 18)


def variants(commands: Commands) -> None:
    """Add `variants`."""
    parser = commands.add(
        "variants",
        "forecast_harness.commands.variants:variants",
        "make other sources of a kernel, and verify them in a sandbox against it",
        usage="forecast-autotune variants [options] (KERNEL | list | show NAME)",
        epilog="A verified variant is a candidate where variants= or FORECAST_AUTOTUNE_VARIANTS=store asks "
        "for it. Without --mechanical, --from and --llm, what the store holds of the kernel is verified.",
        examples=(
            "variants kernels.py:softmax --mechanical",
            "variants list",
        ),
    )
    parser.add_argument("what", metavar="KERNEL", help=f"{KERNEL_HELP}; or `list`, or `show`")
    parser.add_argument("name", nargs="?", metavar="NAME", help="with show: a variant's name, or its start")
    parser.add_argument("--mechanical", action="store_true", help="by rewrites that need no model")
    _from_option(parser, "sources, tables or folders of them")
    parser.add_argument("--llm", metavar="SPEC", help="by a language model; as in FORECAST_AUTOTUNE_LLM")
    parser.add_argument(
        "--n", type=IntegerRange(1, 10_000), default=16, metavar="N", help="how many to ask for (default: 16)"
    )
    parser.add_argument(
        "--verify", action=argparse.BooleanOptionalAction, default=True, help="in a sandbox (default: yes)"
    )
    parser.add_argument("--kernel", metavar="TEXT", help="with list: only kernels whose name contains this")
    store_option(parser)
    _sandbox_options(parser, 12)


def advise(commands: Commands) -> None:
    """Add `advise`."""
    parser = commands.add(
        "advise",
        "forecast_harness.commands.advise:advise",
        "have a language model write down, once per kernel source, what its time depends on",
        usage="forecast-autotune advise [options] (KERNEL | --stored | --library PKG | --list)",
        epilog="Advice is kept in the store by source, and followed as far as measurements bear it out.",
        examples=(
            "advise kernels.py:softmax --llm 'http://localhost:8000/v1?model=NAME'",
            "advise --stored --from answered.jsonl",
            "advise --library mylib --to src/mylib/data/advice.jsonl",
            "advise --list",
        ),
    )
    parser.add_argument("what", nargs="?", metavar="KERNEL", help=KERNEL_HELP)
    parser.add_argument("--stored", action="store_true", help="every kernel that the store holds")
    parser.add_argument(
        "--library",
        metavar="PKG",
        help="every kernel of a package that has a list of configs or that the store holds",
    )
    parser.add_argument(
        "--llm",
        metavar="SPEC",
        help="who is asked: a chat server or recorded:FILE, as in FORECAST_AUTOTUNE_LLM",
    )
    _from_option(parser, "take advice from files of records, tables or stores instead")
    parser.add_argument("--again", action="store_true", help="also where there is advice, which is replaced")
    parser.add_argument(
        "--to",
        metavar="FILE",
        help="with --library: write the advice on its kernels as it ships in a wheel (.jsonl)",
    )
    parser.add_argument("--list", action="store_true", help="show what advice there is")
    parser.add_argument("--kernel", metavar="TEXT", help="only kernels whose name contains this")
    store_option(parser)


def _from_option(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--from", dest="sources", nargs="+", default=[], metavar="FILE", help=text)


def _sandbox_options(parser: argparse.ArgumentParser, cases: int) -> None:
    parser.add_argument("--device", type=device_number, metavar="DEVICE", help=f"{DEVICE_HELP}, or a number")
    parser.add_argument("--level", metavar="NAME", help="insist on a containment (default: the strongest)")
    parser.add_argument("--cases", type=CASES, default=cases, metavar="N", help="launches with varied inputs")


def path_option(parser: argparse._ActionsContainer) -> None:
    """Add `--path`."""
    parser.add_argument(
        "--path",
        choices=CODE_PATHS,
        default="auto",
        help="launch Triton sources on a GPU without their Python (machine-code), or in a sandbox (host-code); auto: "
        "the first, where it works",
    )
