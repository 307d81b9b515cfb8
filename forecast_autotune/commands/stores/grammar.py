"""The grammar of `store`."""

from __future__ import annotations

import argparse

from forecast_autotune.commands.registry import Commands, filters, store_option

_PLACES = "a store's folder, a bundle or the address of a remote store"


def store(commands: Commands) -> None:
    """Add `store` and its subcommands."""
    group = commands.group("store", "merge, compare, check and ship stores", "commands", "COMMAND")
    _merge(group)
    _diff(group)
    _verify(group)
    _gc(group)
    _bundle(group)
    _install(group)


def _merge(group: Commands) -> None:
    merge = group.add(
        "merge",
        "forecast_autotune.commands.stores.merging:merge_stores",
        "add all rows of other stores: the union, whatever the order and however often",
    )
    merge.add_argument("sources", nargs="+", metavar="SOURCE", help=_PLACES)
    merge.add_argument(
        "--into", metavar="PLACE", help="a store's folder or a remote store's address (default: --store)"
    )
    store_option(merge)


def _diff(group: Commands) -> None:
    diff = group.add(
        "diff",
        "forecast_autotune.commands.stores.merging:diff_stores",
        "say what one store holds and another does not",
    )
    diff.add_argument("first", metavar="FIRST", help=_PLACES)
    diff.add_argument("second", nargs="?", metavar="SECOND", help="the other (default: --store)")
    store_option(diff)


def _verify(group: Commands) -> None:
    verify = group.add(
        "verify",
        "forecast_autotune.commands.stores.merging:verify_stores",
        "check every file of stores and bundles; exit status 1 if anything is wrong",
    )
    verify.add_argument(
        "places", nargs="*", metavar="PLACE", help="stores, bundles and addresses (default: --store)"
    )
    store_option(verify)


def _gc(group: Commands) -> None:
    gc = group.add(
        "gc",
        "forecast_autotune.commands.stores.merging:compact_store",
        "remove repeated and damaged lines, damaged decisions, and what killed writers left; no measurement is lost",
    )
    store_option(gc)


def _bundle(group: Commands) -> None:
    bundle = group.add(
        "bundle",
        "forecast_autotune.commands.stores.bundles:write_bundle_of_store",
        "write decisions and measurements as a folder that others read with FORECAST_AUTOTUNE_STORES",
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
        "forecast_autotune.commands.stores.bundles:install_bundle",
        "put a bundle's compiled kernels into Triton's cache: for bundles of people whose code you run",
    )
    install.add_argument("bundle", metavar="BUNDLE", help="a bundle made with --compiled or --graphs")
    install.add_argument(
        "--digest", metavar="SHA256", help="refuse any other bundle (`store bundle` prints it)"
    )
    install.add_argument(
        "--cache", metavar="DIR", help="Triton's cache (default: TRITON_CACHE_DIR, else ~/.triton/cache)"
    )
    install.add_argument(
        "--graphs",
        metavar="FILE",
        help="write its compiled graphs to this new file, for torch.compiler.load_cache_artifacts()",
    )
