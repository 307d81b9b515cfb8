"""The grammar of `warm`."""

from __future__ import annotations

from forecast_autotune.commands.registry import Commands, filters


def warm(commands: Commands) -> None:
    """Add `warm`."""
    parser = commands.add(
        "warm",
        "forecast_integrations.commands.warm:warm",
        "tune what programs met in frozen or skip mode, without the programs",
        epilog="Kernels are imported by module and name, arguments made from their records. Modules are looked for "
        "as Python does, the current folder first.",
    )
    parser.add_argument(
        "--plan", action="store_true", help="only say what would be tuned, and what it would cost"
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
    parser.add_argument("--keep", action="store_true", help="keep the records of what was tuned")
    filters(parser)
