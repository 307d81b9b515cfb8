"""`doctor`: what this installation can do, what it cannot, and the remedy."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import Field, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forecast_autotune import frameworks, plugins
from forecast_autotune.commands.output import Output, missing_package_text
from forecast_autotune.errors import SettingsError, StoreError
from forecast_autotune.printable import count_text
from forecast_autotune.settings import Settings, default_directory, parse_directories, parse_user_directory
from forecast_autotune.store import Store, StoreWarning
from forecast_autotune.store.files import is_bundle
from forecast_autotune.store.installed_advice import every_installed
from forecast_autotune.version import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType

GROUP = "forecast_autotune.checks"
"""Entries are functions (settings, network) -> rows; without `network`, they contact nobody."""
MODEL_VARIABLE = "FORECAST_AUTOTUNE_LLM"


@dataclass(frozen=True)
class DoctorCheck:
    """One line: `status` is `ok`, `warn` (something is missing) or `fail` (tuning cannot work)."""

    name: str
    status: str
    detail: str
    remedy: str = ""


def shown_settings(settings: Settings) -> list[tuple[str, str, str]]:
    """`Settings.describe` in the words of the variables, without the text of a model that is refused.

    That text may hold a key. A secret is shown as set or not.
    """
    from forecast_autotune.llm.spec import parsed

    rows = [
        (name, _shown_flag(value, of) if isinstance(of.default, bool) else value, doc)
        for (name, value, doc), of in zip(settings.describe(), fields(settings), strict=True)
    ]
    try:
        if settings.llm:
            parsed(settings.llm)
    except SettingsError:
        return [(name, "(refused)" if name == MODEL_VARIABLE else value, doc) for name, value, doc in rows]
    return rows


def _shown_flag(value: str, of: Field[Any]) -> str:
    if of.metadata["parse"] is bool:
        return "set" if value == "True" else "not set"
    return "1" if value == "True" else "0"


def check_named_places(settings: Settings) -> Iterator[DoctorCheck]:
    """A warning for every bundle and model that a variable names and that is not there."""
    remedy = "name bundles of `forecast-autotune store bundle` in FORECAST_AUTOTUNE_STORES"
    try:
        folders = parse_directories(settings.stores)
    except SettingsError as error:
        yield DoctorCheck("bundles", "warn", str(error), remedy)
        folders = ()
    for folder in folders:
        if not is_bundle(folder):
            detail = f"{folder} {'is no bundle' if folder.exists() else 'is not there'}"
            yield DoctorCheck("bundles", "warn", detail, remedy)
    if settings.model is not None and not settings.model.is_file():
        remedy = "name a file of `forecast-autotune train surrogate` in FORECAST_AUTOTUNE_MODEL"
        yield DoctorCheck("model", "warn", f"{settings.model} is no file", remedy)


MIN_TRITON = (3, 4)


def doctor(options: argparse.Namespace, output: Output) -> int:
    """Run all checks; exit status 1 when a check fails."""
    settings, checks = _settings()
    root = _root(options)
    checks = [
        DoctorCheck("forecast-autotune", "ok", f"{__version__}, Python {platform.python_version()}"),
        *_packages(),
        _cores(settings),
        checks[0],
        *check_named_places(settings),
        *([] if root is None else _store(root)),
        *_remote(settings),
        _run_check("surrogate", _surrogate),
        *_added(settings, options.network),
        _run_check("replay tables", _tables),
    ]
    has_failures = any(check.status == "fail" for check in checks)
    rows = shown_settings(settings)
    data = {
        "ok": not has_failures,
        "checks": [asdict(check) for check in checks],
        "settings": [dict(zip(("variable", "value", "meaning"), row, strict=True)) for row in rows],
    }
    output.emit(data, *([] if output.as_json else _render_checks(checks, rows)))
    return int(has_failures)


def _run_check(name: str, check: Callable[[], DoctorCheck]) -> DoctorCheck:
    """A check that breaks is a finding, not the end of the examination."""
    try:
        return check()
    except Exception as error:
        return DoctorCheck(
            name,
            "fail",
            f"{type(error).__name__}: {error}",
            "reinstall: pip install --force-reinstall forecast-autotune",
        )


def _settings() -> tuple[Settings, list[DoctorCheck]]:
    try:
        settings = Settings.from_environment()
    except SettingsError as error:
        return Settings(), [
            DoctorCheck("settings", "fail", str(error), "unset the variable, or give it a value of its rule")
        ]
    variables = {row[0] for row in settings.describe()}
    names = sorted(name for name in os.environ if name in variables)
    strange = sorted(
        name for name in os.environ if name.startswith("FORECAST_AUTOTUNE") and name not in variables
    )
    if strange:
        return settings, [
            DoctorCheck(
                "settings", "warn", f"unknown: {', '.join(strange)}", "see the list below for the names"
            )
        ]
    return settings, [DoctorCheck("settings", "ok", f"set: {', '.join(names)}" if names else "all defaults")]


def _root(options: argparse.Namespace) -> Path | None:
    """The directory that `show` and tuning use; None for a variable that the settings' check refuses."""
    if options.store is not None:
        return parse_user_directory(options.store).absolute()
    try:
        return default_directory().absolute()
    except SettingsError:
        return None


def _packages() -> Iterator[DoctorCheck]:
    import importlib

    remedies = {
        "numpy": ("fail", "pip install numpy"),
        "torch": ("warn", "install torch for your GPU: https://pytorch.org/get-started"),
        "triton": ("warn", "pip install 'forecast-autotune[triton]'"),
    }
    from importlib.metadata import PackageNotFoundError, version

    for name, (status, remedy) in remedies.items():
        try:
            found_version = version(name)
        except PackageNotFoundError:
            yield DoctorCheck(name, status, "not installed", remedy)
            continue
        release = tuple(int(part) for part in found_version.split(".")[:2] if part.isdigit())
        if name == "triton" and release < MIN_TRITON:
            yield DoctorCheck(name, "fail", f"{found_version} is older than 3.4", "pip install -U triton")
            continue
        try:
            importlib.import_module(name)
        except Exception as error:
            yield DoctorCheck(
                name, "fail", f"{found_version} does not load: {error!r}"[:300], f"reinstall {name}"
            )
        else:
            yield DoctorCheck(name, "ok", found_version)
    yield _accelerator()


def _accelerator() -> DoctorCheck:
    remedy = "kernels cannot be timed here: use `forecast-autotune replay`, or FORECAST_AUTOTUNE_MODE=skip"
    if "torch" not in sys.modules or "triton" not in sys.modules:
        return DoctorCheck("accelerator", "warn", "unknown without torch and triton", remedy)
    try:
        result = frameworks.triton().accelerators()
    except Exception as error:
        return DoctorCheck(
            "accelerator", "fail", f"{error!r}"[:300], "check the driver: nvidia-smi or rocm-smi"
        )
    return (
        DoctorCheck("accelerator", "ok", result)
        if result
        else DoctorCheck("accelerator", "warn", "none", remedy)
    )


def _cores(settings: Settings) -> DoctorCheck:
    count = settings.worker_count()
    if count == 1:
        return DoctorCheck(
            "compile threads", "warn", "1", "candidates compile one after another: allow more cores"
        )
    return DoctorCheck("compile threads", "ok", str(count))


def _store(root: Path) -> Iterator[DoctorCheck]:
    from forecast_autotune.settings import NO_HOME, NOWHERE
    from forecast_autotune.store.files import acquire_lock, bundle_text, is_bundle, release_lock

    remedy = "point FORECAST_AUTOTUNE_CACHE_DIR at a writable directory; without one nothing is kept"
    if root == NOWHERE:
        yield DoctorCheck("store", "warn", NO_HOME, remedy)
        return
    if is_bundle(root):
        yield DoctorCheck("store", "fail", bundle_text(root), remedy)
        return
    try:
        # A check creates no store: an absent one is probed at its future place.
        place = next(folder for folder in (root, *root.parents) if folder.exists())
        probe = place / f".doctor-{os.getpid()}"
        lock_path = place / f".doctor-{os.getpid()}.lock"
        probe.write_bytes(b"ok")
        probe.unlink()
    except OSError as error:
        yield DoctorCheck("store", "fail", f"{root} is not writable: {error.strerror}", remedy)
        return
    files = [path for path in (root / "v1").rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    yield DoctorCheck("store", "ok", f"{root}, {count_text(len(files), 'file')}, {size:.1f} MB")
    yield _kept("variants", root, _variants)
    yield _kept("advice", root, _advice)
    yield _installed_advice()
    lock = acquire_lock(lock_path, 1.0, 0.01)
    release_lock(lock)
    lock_path.unlink(missing_ok=True)
    if lock is None:
        yield DoctorCheck(
            "store locks",
            "warn",
            "not supported by this file system",
            "two processes may tune the same problem",
        )
    else:
        yield DoctorCheck("store locks", "ok", "work")


def _kept(name: str, root: Path, describe: Callable[[Store], str]) -> DoctorCheck:
    """The files that a store keeps beside its measurements, and how many of them cannot be read."""
    store = Store(root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)  # shown as part of this line
        detail = describe(store) or "none"
    if not store.issued_warnings:
        return DoctorCheck(name, "ok", detail)
    remedy = "remove the files: " + "; ".join(store.issued_warnings[:3])
    return DoctorCheck(name, "warn", f"{detail}; {len(store.issued_warnings)} unreadable", remedy)


def _variants(store: Store) -> str:
    """How many variants there are, and for how many a check has passed."""
    variants = store.variants()
    count = sum(any(c.passed for c in v.checks) for v in variants)
    sources = len({v.base_sha256 for v in variants})
    return f"{len(variants)} of {sources} kernel sources, {count} verified" if variants else ""


def _advice(store: Store) -> str:
    """On how many kernel sources there is advice, and from whom."""
    advice = store.advice_of()
    models = ", ".join(sorted({a.model or "unknown" for a in advice}))
    return f"on {len(advice)} kernel sources, by {models}" if advice else ""


def _installed_advice() -> DoctorCheck:
    """The advice installed with this package and with others, and its unreadable records."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StoreWarning)
        layers = every_installed()
    counts = [f"on {len(layer)} kernel sources in {path.name}" for path, layer in layers]
    off = os.environ.get("FORECAST_AUTOTUNE_ADVICE") == "off"  # others may be wrong: they have a check
    detail = ("not followed, FORECAST_AUTOTUNE_ADVICE=off: " if off else "") + (", ".join(counts) or "none")
    if not caught:
        return DoctorCheck("installed advice", "ok", detail)
    return DoctorCheck("installed advice", "warn", detail, "; ".join(str(w.message) for w in caught[:3]))


def _remote(settings: Settings) -> Iterator[DoctorCheck]:
    """Whether the remote store has a client here, if one is named; it is not contacted."""
    from forecast_autotune.store.remote.backends import open_backend, plain_reason

    if not settings.remote:
        return
    try:
        open_backend(settings.remote)
    except Exception as error:  # whatever a client raises
        text = missing_package_text(error) if isinstance(error, ImportError) else None
        message = text or (str(error) if isinstance(error, StoreError) else plain_reason(error))
        remedy = "until then nothing is shared: see above, or unset FORECAST_AUTOTUNE_REMOTE"
        yield DoctorCheck("remote store", "fail", message, remedy)
    else:
        yield DoctorCheck("remote store", "ok", f"{settings.remote}, not contacted")


def _surrogate() -> DoctorCheck:
    from forecast_autotune.surrogates.default import default_surrogate
    from forecast_autotune.testing import example_table, query_of

    surrogate, query = default_surrogate(), query_of(example_table())
    begin = time.perf_counter()
    count = len(surrogate.forecast(query))
    ms = 1000 * (time.perf_counter() - begin)
    return DoctorCheck(
        "surrogate", "ok", f"{surrogate.name}/{surrogate.version}: {count} candidates in {ms:.0f} ms"
    )


def _added(settings: Settings, network: bool) -> Iterator[DoctorCheck]:
    """Checks of other packages; one that raises is a finding, too."""
    for name in plugins.names(GROUP):
        try:
            yield from plugins.load(GROUP, name)(settings, network)
        except Exception as error:
            yield DoctorCheck(
                name, "warn", f"{type(error).__name__}: {error}"[:300], "see above, or reinstall"
            )


def _tables() -> DoctorCheck:
    from forecast_autotune.tuning.replays.replay import shipped_tables

    result = shipped_tables()
    if not result:
        return DoctorCheck(
            "replay tables",
            "warn",
            "none in this installation",
            "`replay` needs TABLE files, as `export` writes them",
        )
    size = sum(path.stat().st_size for path in result) / 1e6
    return DoctorCheck("replay tables", "ok", f"{count_text(len(result), 'file')}, {size:.1f} MB")


def _render_checks(checks: list[DoctorCheck], settings: list[tuple[str, str, str]]) -> list[RenderableType]:
    from forecast_autotune.report.table import checklist, settings_table, shown_text

    count = sum(check.status == "fail" for check in checks)
    verdict = shown_text(f"{count} failed", "bold red") if count else shown_text("ready", "bold green")
    lines = checklist((check.status, check.name, check.detail, check.remedy) for check in checks)
    return [lines, "", settings_table(settings), "", verdict]
