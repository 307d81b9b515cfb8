"""The grammar of the command line, and of the core's own commands."""

from __future__ import annotations

import argparse

from forecast_autotune import plugins
from forecast_autotune.commands.registry import (
    COUNT,
    GROUP,
    SEED,
    WORKERS,
    Commands,
    Parser,
    RealRange,
    filters,
    store_option,
)
from forecast_autotune.version import __version__

ORDER = (
    "run",
    "replay",
    "eval",
    "train",
    "show",
    "explain",
    "export",
    "import",
    "clear",
    "verify",
    "bench",
    "variants",
    "advise",
    "search",
    "llm",
    "doctor",
    "demo",
    "store",
)
"""As `--help` lists them; commands of other packages follow by name."""
OTHER_TOOLS = ("kernel-tuner", "kernel-tuner-t4", "sglang-moe", "vllm-moe")
"""`store.exports.EXPORT_FORMATS`, which would take long to load for a line of help."""


def build() -> argparse.ArgumentParser:
    """The parser of all commands; the result names the `entry` to call."""
    parser = Parser(
        prog="forecast-autotune",
        description="Tune Triton kernels by forecast: measure only the configs a forecast is unsure about.",
    )
    parser.add_argument("--version", action="version", version=f"forecast-autotune {__version__}")
    commands = Commands(parser, "commands", "COMMAND")
    own = {
        "replay": _replay,
        "show": _show,
        "explain": _explain,
        "export": _export,
        "import": _import,
        "clear": _clear,
        "doctor": _doctor,
        "store": _store,
    }
    names = plugins.names(GROUP)
    for name in (*ORDER, *(n for n in names if n not in ORDER)):
        if name in own:
            own[name](commands)
        elif name in names:
            plugins.load(GROUP, name)(commands)
    return parser


def _replay(commands: Commands) -> None:
    replay = commands.add(
        "replay",
        "forecast_autotune.commands.replay:replay",
        "run the tuner against recorded tables instead of a GPU",
        examples=(
            "replay",
            "replay table.jsonl --workers 4 --policy exhaustive",
        ),
    )
    replay.add_argument("tables", nargs="*", metavar="TABLE", help="table files (default: the shipped ones)")
    replay.add_argument(
        "--policy",
        choices=("default", "exhaustive", "random", "first"),
        default="default",
        help="choice of measurements",
    )
    replay.add_argument(
        "--max-measurements",
        type=COUNT,
        metavar="N",
        help="most candidates per problem (random, first: exactly so many; default: 10 %%, at least 3)",
    )
    replay.add_argument(
        "--tolerance", type=RealRange(0.0, 10.0), metavar="SHARE", help="accepted regret, 0.02 is 2 %%"
    )
    replay.add_argument(
        "--risk", type=RealRange(0.0, 1.0), metavar="P", help="accepted probability of a larger regret"
    )
    replay.add_argument("--seed", type=SEED, metavar="N", help="seed of random policies")
    replay.add_argument(
        "--surrogate",
        choices=("analytic", "default"),
        default="analytic",
        help="the untrained formula with its update, or what ships (it was fitted to the shipped tables)",
    )
    replay.add_argument("--workers", type=WORKERS, default=16, metavar="N", help="simulated compile threads")
    replay.add_argument(
        "--llm", metavar="SPEC", help="a language model beside the surrogate, as in FORECAST_AUTOTUNE_LLM"
    )


def _show(commands: Commands) -> None:
    show = commands.add(
        "show",
        "forecast_autotune.commands.show:show",
        "list what the store holds, per kernel and device",
        examples=(
            "show",
            "show --kernel matmul --page store.html",
            "show --calibration",
            "show --compilations",
        ),
    )
    instead = show.add_mutually_exclusive_group()
    instead.add_argument(
        "--calibration",
        action="store_true",
        help="instead: stated risks and intervals against what later measurements found",
    )
    instead.add_argument(
        "--page", metavar="FILE", help="instead: write a page (.html) of problems, decisions and why"
    )
    instead.add_argument(
        "--compilations", action="store_true", help="instead: the Triton binaries that programs needed"
    )
    filters(show)


def _explain(commands: Commands) -> None:
    explain = commands.add(
        "explain",
        "forecast_autotune.commands.show:explain",
        "say why a kernel got its configs",
        examples=(
            "explain matmul_kernel",
            "explain matmul_kernel --key 4096 4096",
        ),
    )
    explain.add_argument("kernel", metavar="KERNEL", help="the kernel's name")
    explain.add_argument(
        "--key",
        nargs="+",
        default=[],
        metavar="VALUE",
        help="only keys that hold these values, in this order",
    )
    explain.add_argument("--top", type=COUNT, default=8, metavar="N", help="list so many of the fastest")
    store_option(explain)


def _export(commands: Commands) -> None:
    export = commands.add(
        "export",
        "forecast_autotune.commands.exchange:export",
        "write stored measurements as a table",
        examples=(
            "export table.jsonl.xz",
            "export caches --format kernel-tuner --kernel matmul",
        ),
    )
    export.add_argument(
        "file",
        nargs="?",
        default="-",
        metavar="FILE",
        help=".jsonl, .jsonl.gz or .jsonl.xz; - is stdout",
    )
    export.add_argument(
        "--format",
        choices=("jsonl", *OTHER_TOOLS),
        help="default: by the file's name; for other tools, FILE is the folder that their files go to",
    )
    filters(export)


def _import(commands: Commands) -> None:
    imports = commands.add(
        "import",
        "forecast_autotune.commands.exchange:import_",
        "add tables of others to the store",
        examples=(
            "import table.jsonl cache.json",
            "import ~/.triton/cache",
        ),
    )
    imports.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="tables, caches of Kernel Tuner, Inductor, FlagGems, Triton (its directory), logs of Helion, folders of "
        "such files; - is stdin",
    )
    imports.add_argument(
        "--device-name",
        metavar="NAME",
        help="where a cache was measured (default: the one it names, else this device)",
    )
    store_option(imports)


def _clear(commands: Commands) -> None:
    clear = commands.add(
        "clear",
        "forecast_autotune.commands.exchange:clear",
        "remove measurements and decisions",
        examples=(
            "clear --kernel matmul",
            "clear --device H100 --yes",
        ),
    )
    filters(clear)
    clear.add_argument("--variants", action="store_true", help="instead: other sources of kernels")
    clear.add_argument("--advice", action="store_true", help="instead: advice of language models")
    clear.add_argument(
        "--captures", action="store_true", help="instead: captured calls, with their tensors' contents"
    )
    clear.add_argument("--yes", action="store_true", help="do not ask")


def _doctor(commands: Commands) -> None:
    doctor = commands.add(
        "doctor",
        "forecast_autotune.commands.doctor:doctor",
        "check this installation, and say what to do",
        examples=(
            "doctor",
            "doctor --network",
        ),
    )
    store_option(doctor)
    doctor.add_argument("--network", action="store_true", help="also contact the language model's server")


_PLACES = "a store's folder, a bundle or the address of a remote store"


def _store(commands: Commands) -> None:
    """Add `store` and its subcommands."""
    group = commands.group("store", "merge, compare, check and ship stores", "commands", "COMMAND")
    _merge(group)
    _diff(group)
    _check(group)
    _gc(group)
    _bundle(group)
    _install(group)


def _merge(group: Commands) -> None:
    merge = group.add(
        "merge",
        "forecast_autotune.commands.stores:merge_stores",
        "add all rows of other stores: the union, whatever the order and however often",
        examples=("store merge /mnt/one /mnt/two --into all",),
    )
    merge.add_argument("sources", nargs="+", metavar="SOURCE", help=_PLACES)
    merge.add_argument(
        "--into", metavar="PLACE", help="a store's folder or a remote store's address (default: --store)"
    )
    store_option(merge)


def _diff(group: Commands) -> None:
    diff = group.add(
        "diff",
        "forecast_autotune.commands.stores:diff_stores",
        "say what one store holds and another does not",
        examples=("store diff /mnt/one /mnt/two",),
    )
    diff.add_argument("first", metavar="FIRST", help=_PLACES)
    diff.add_argument("second", nargs="?", metavar="SECOND", help="the other (default: --store)")
    store_option(diff)


def _check(group: Commands) -> None:
    check = group.add(
        "check",
        "forecast_autotune.commands.stores:check_stores",
        "check every file of stores and bundles; exit status 1 if anything is wrong",
        examples=(
            "store check",
            "store check bundle",
        ),
    )
    check.add_argument(
        "places", nargs="*", metavar="PLACE", help="stores, bundles and addresses (default: --store)"
    )
    store_option(check)


def _gc(group: Commands) -> None:
    gc = group.add(
        "gc",
        "forecast_autotune.commands.stores:compact_store",
        "remove repeated and damaged lines, damaged decisions, and what killed writers left; no measurement is lost",
        examples=("store gc",),
    )
    store_option(gc)


def _bundle(group: Commands) -> None:
    bundle = group.add(
        "bundle",
        "forecast_autotune.commands.stores:write_bundle_of_store",
        "write decisions and measurements as a folder that others read with FORECAST_AUTOTUNE_STORES",
        examples=(
            "store bundle shipped --kernel matmul",
            "store bundle shipped --compiled ~/.triton/cache",
        ),
    )
    bundle.add_argument("folder", metavar="FOLDER", help="a new or empty folder")
    filters(bundle)
    bundle.add_argument("--sources", action="store_true", help="let kernels' sources and IR go along")
    bundle.add_argument(
        "--compiled",
        metavar="DIR",
        help="let the compiled kernels in this cache of Triton (TRITON_CACHE_DIR) go along; they are code",
    )
    bundle.add_argument(
        "--graphs",
        metavar="FILE",
        help="let the compiled graphs of torch.compile in this file go along, the bytes of "
        "torch.compiler.save_cache_artifacts(); they are code",
    )


def _install(group: Commands) -> None:
    install: argparse.ArgumentParser = group.add(
        "install",
        "forecast_autotune.commands.stores:install_bundle",
        "put a bundle's compiled kernels into Triton's cache: for bundles of people whose code you run",
        examples=("store install shipped",),
    )
    install.add_argument("bundle", metavar="BUNDLE", help="a bundle made with --compiled or --graphs")
    install.add_argument(
        "--digest", metavar="SHA256", help="refuse any other bundle (`store bundle` prints it)"
    )
    install.add_argument(
        "--graphs",
        metavar="FILE",
        help="write its compiled graphs to this new file, for torch.compiler.load_cache_artifacts()",
    )
