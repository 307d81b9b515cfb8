"""Where bundles are looked for: named by the user, beside the program, shipped by packages.

| place | who puts it there |
|---|---|
| `FORECAST_AUTOTUNE_STORES` | whoever starts the program: folders, divided as in `PATH` |
| `forecast_autotune_bundles/NAME` beside the program's main file | whoever builds the image |
| the same beside the `__init__.py` of what `kernels` has loaded | kernel repositories of the Hugging Face Hub |
| entry points `forecast_autotune.bundles` | packages: `NAME = "package.folder"`, a folder of the package |

They are asked in this order. A package's folder is found without importing the package. A repository of the Hub is
no installed package, and has no entry points: its bundle is found once `kernels` has loaded it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from forecast_autotune.errors import SettingsError, StoreError
from forecast_autotune.settings import parse_directories

GROUP = "forecast_autotune.bundles"
BESIDE = "forecast_autotune_bundles"
VARIABLE = "FORECAST_AUTOTUNE_STORES"


def bundle_folders() -> list[Path | StoreError]:
    """Every folder that should be a bundle, in the order in which they are asked; errors for those not found."""
    results: dict[Path, Path | StoreError] = {}
    for place in [*_named(), *_beside_program(), *_beside_loaded_kernels(), *_of_packages()]:
        results.setdefault(place if isinstance(place, Path) else Path(str(place)), place)
    return list(results.values())


def _named() -> Iterator[Path | StoreError]:
    try:
        yield from parse_directories(os.environ.get(VARIABLE, ""))
    except SettingsError as error:
        yield StoreError(f"{VARIABLE}: {error}")


def _beside_program() -> Iterator[Path]:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main:
        yield from _beside(main)


def _beside_loaded_kernels() -> Iterator[Path]:
    for file in loaded_kernel_files():
        yield from _beside(file)


def loaded_kernel_files() -> list[str]:
    """The modules' files of all that the package `kernels` has loaded from the Hub; never imports it."""
    ask = getattr(sys.modules.get("kernels"), "get_loaded_kernels", None)
    if ask is None:
        return []
    try:
        return [str(loaded.module.__file__) for loaded in ask() if loaded.module.__file__]
    except Exception:  # another package of this name, or a release that keeps them otherwise
        return []


def _beside(file: str) -> Iterator[Path]:
    folder = Path(file).absolute().parent / BESIDE
    if folder.is_dir():
        yield from sorted(path for path in folder.iterdir() if path.is_dir())


def _of_packages() -> Iterator[Path | StoreError]:
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        yield _folder_of(entry)


def _folder_of(entry: EntryPoint) -> Path | StoreError:
    package, *inner = entry.value.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        folder = Path(place, *inner)
        if folder.is_dir():
            return folder
    return StoreError(
        f"the bundle {entry.name} = {entry.value!r:.100} of an installed package is not there: its value must be "
        "the dotted path of a folder in the package"
    )
