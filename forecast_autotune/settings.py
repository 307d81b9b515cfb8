"""Every FORECAST_AUTOTUNE_* variable: its name, type, rule, default and meaning, in one place.

`python -m forecast_autotune doctor` prints this table with the values in force. An argument of the
decorator beats the variable, the variable beats the default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from forecast_autotune.errors import SettingsError
from forecast_autotune.printable import printable
from forecast_autotune.processors import usable_processors

Number = TypeVar("Number", int, float)


class Mode(StrEnum):
    """The treatment of a key that is not in memory."""

    TUNE = "tune"
    """Stored decision, else forecast, measure until the risk is met, decide."""
    SKIP = "skip"
    """Never measure: stored decision, else the best forecast."""
    FROZEN = "frozen"
    """Store only: a miss raises `FrozenMissError` (or, with on_miss=forecast, takes the best forecast)."""
    EXHAUSTIVE = "exhaustive"
    """Measure every candidate: for oracles and for harvesting."""
    DETERMINISTIC = "deterministic"
    """Neither clock nor store: the choice depends on the problem alone, so runs and ranks agree."""
    BACKGROUND = "background"
    """Launch at once with the stored, forecast or first config; time beside the program, and switch once."""
    LISTEN = "listen"
    """Change nothing, keep every timing: the host measures all that it would measure without us."""


@dataclass(frozen=True)
class Budget:
    """The most one decision may spend. None means: no limit of this kind."""

    measurements: int | None = None
    """Candidates compiled and timed."""
    seconds: float | None = None
    """Wall seconds; checked between candidates, so it may be overrun by one candidate."""
    gpu_seconds: float | None = None
    """Seconds of timing on the device."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and (isinstance(value, bool) or not value > 0):
                raise SettingsError(f"budget.{f.name} must be a positive number or None, got {value!r}")


def _within(rule: str, convert: Callable[[str], Number], low: float, high: float) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        try:
            value = convert(text)
        except ValueError:
            raise ValueError(rule) from None
        if not low <= value <= high:
            raise ValueError(rule)
        return value

    return parse


def number_within(low: float, high: float) -> Callable[[str], float]:
    """A parser of numbers in a range. It raises `ValueError` with the rule."""
    return _within(f"must be a number from {low:g} to {high:g}", float, low, high)


def count_within(low: int, high: int) -> Callable[[str], int]:
    """A parser of integers in a range. It raises `ValueError` with the rule."""
    return _within(f"must be an integer from {low} to {high}", int, low, high)


def _flag(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "on": True, "": False}
    values |= {"0": False, "false": False, "no": False, "off": False}
    if text.lower() not in values:
        raise ValueError("must be 0 or 1")
    return values[text.lower()]


def _choice(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return text

    return parse


def _mode(text: str) -> Mode:
    return Mode(_choice(*Mode)(text))


def parse_user_directory(text: str | Path) -> Path:
    """A directory as users write it.

    A shell expands `~`, but a container's or a service's environment file does not. Raises `SettingsError` for the
    home of somebody unknown here, for an address, and for an empty name, which would be the current directory.
    """
    if not str(text):
        raise SettingsError("an empty name is no directory: name one, or leave the option out")
    scheme, divider, _ = str(text).partition("://")
    if divider:  # the rest may hold a password
        raise SettingsError(
            f"{printable(scheme, 20)}://... is an address, not a directory: name it in FORECAST_AUTOTUNE_REMOTE, or "
            "copy what it holds into a directory with `store merge`"
        )
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise SettingsError(f"{text}: nobody's home directory is known here, spell it out") from error


def parse_directories(text: str) -> tuple[Path, ...]:
    """Directories divided as in PATH; empty names count for nothing. Raises `SettingsError` as above."""
    return tuple(parse_user_directory(name) for name in text.split(os.pathsep) if name.strip())


def _remote_address(text: str) -> str:
    """An address without anything secret in it. Raises `ValueError`, which does not quote it."""
    scheme, divider, location = text.partition("://")
    if not divider or not scheme.replace("+", "").isalnum() or not text.isprintable():
        raise ValueError(
            "must be an address such as redis://host:6379/0, s3://bucket/folder or file:///folder"
        )
    if "@" in location.partition("/")[0] or "?" in location or "#" in location:
        raise ValueError(
            "must not hold a user, a password or options: they come from the environment of the service's client "
            "(REDIS_USERNAME, REDISCLI_AUTH, AWS_..., FSSPEC_...)"
        )
    return text.rstrip("/") if location.strip("/") else text


NOWHERE = Path(os.devnull, "forecast-autotune")
"""Stands for the cache directory of a user without a home: nothing can be there, nor be put there."""
NO_HOME = "no home directory is known, so that nothing is kept: set HOME, or FORECAST_AUTOTUNE_CACHE_DIR"


def cache_directory(chosen: Path | None) -> Path:
    """`chosen`, else the user's cache directory for `forecast-autotune`; `NOWHERE` for a user without a home."""
    if chosen is not None:
        return chosen
    import platformdirs

    try:
        path = platformdirs.user_cache_path("forecast-autotune", appauthor=False)
    except RuntimeError:
        return NOWHERE
    return path if path.is_absolute() else NOWHERE


def default_directory() -> Path:
    """FORECAST_AUTOTUNE_CACHE_DIR, if it is set and not empty, else the user's cache directory.

    Raises `SettingsError` as `parse_user_directory` does.
    """
    path = os.environ.get("FORECAST_AUTOTUNE_CACHE_DIR")
    return cache_directory(parse_user_directory(path) if path else None)


def _variable(name: str, parse: Callable[[str], Any], default: Any, doc: str) -> Any:
    return field(
        default=default, metadata={"variable": f"FORECAST_AUTOTUNE{name}", "parse": parse, "doc": doc}
    )


@dataclass(frozen=True)
class Settings:
    """All settings of one decision. Build with `Settings.from_environment()` and `with_`."""

    enabled: bool = _variable(
        "", _flag, False, "1: serve every triton.autotune and torch.compile in this process"
    )
    cache_dir: Path | None = _variable(
        "_CACHE_DIR",
        parse_user_directory,
        None,
        "where measurements are kept (default: the user's cache directory)",
    )
    stores: str = _variable(
        "_STORES",
        str,
        "",
        "bundles to read after the user's own store, divided as in PATH; never written to",
    )
    remote: str = _variable(
        "_REMOTE",
        _remote_address,
        "",
        "a store that machines share: redis://, rediss:// or any address of fsspec (s3://, gs://, hf://, file://)",
    )
    remote_wait_s: float = _variable(
        "_REMOTE_WAIT",
        number_within(0.0, 60.0),
        1.0,
        "most seconds that a decision on a new key waits for the remote store; launches of known keys never do",
    )
    mode: Mode = _variable("_MODE", _mode, Mode.TUNE, "treatment of a key that has no decision yet")
    on_miss: str = _variable(
        "_ON_MISS", _choice("error", "forecast"), "error", "frozen mode: raise, or take the best forecast"
    )
    l2: str = _variable(
        "_L2",
        _choice("cold", "warm", "both"),
        "cold",
        "the L2 before a timed launch: cold | warm (the launch's own data) | both (cold, and say where warm differs)",
    )
    prefer: str = _variable(
        "_PREFER",
        _choice("speed", "bits"),
        "speed",
        "where a choice was made before: speed | bits (the fastest config whose outputs equal those of that choice bit "
        "for bit, on the call's own data)",
    )
    tolerance: float = _variable("_TOLERANCE", number_within(0.0, 10.0), 0.02, "accepted regret, 0.02 is 2 %")
    risk: float = _variable("_RISK", number_within(0.0, 1.0), 0.10, "accepted probability of a larger regret")
    max_measurements: int | None = _variable(
        "_MAX_MEASUREMENTS",
        count_within(1, 10**6),
        None,
        "most candidates measured per decision (default: by the policy)",
    )
    max_seconds: float | None = _variable(
        "_MAX_SECONDS", number_within(0.001, 1e9), None, "most wall seconds"
    )
    max_gpu_seconds: float | None = _variable(
        "_MAX_GPU_SECONDS", number_within(0.001, 1e9), None, "most seconds of timing on the device"
    )
    recheck_s: float = _variable(
        "_RECHECK",
        number_within(0.0, 1e6),
        0.0,
        "wall seconds that a process spends on timing stored decisions that nobody has timed, drawn at random",
    )
    audit: float = _variable(
        "_AUDIT",
        number_within(0.0, 1.0),
        0.0,
        "share of trusted candidates measured anyway, to check forecasts",
    )
    bucket: str = _variable(
        "_BUCKET", _choice("exact", "pow2"), "exact", "how integer key values are grouped: exact | pow2"
    )
    workers: int = _variable(
        "_WORKERS", count_within(0, 1024), 0, "compilations at a time; 0: one per core this process may use"
    )
    compiler: str = _variable(
        "_COMPILER", _choice("auto", "fork", "threads"), "auto", "how to compile: auto | fork | threads"
    )
    stall_ms: float = _variable(
        "_STALL_MS",
        number_within(0.0, 1000.0),
        20.0,
        "background mode: delay that timing adds to launches, ms per second, at most; 0: only settle() times",
    )
    timeout_s: float = _variable(
        "_TIMEOUT", number_within(0.1, 1e6), 120.0, "seconds after which a compilation counts as hung"
    )
    lock_timeout_s: float = _variable(
        "_LOCK_TIMEOUT",
        number_within(0.0, 1e6),
        600.0,
        "seconds to wait for another process tuning the same problem",
    )
    ranks: str = _variable(
        "_RANKS",
        _choice("share", "alone"),
        "share",
        "ranks of a job: share (one decides, the others take its decision) | alone (each for itself)",
    )
    ranks_wait_s: float = _variable(
        "_RANKS_WAIT",
        number_within(0.0, 1e6),
        60.0,
        "seconds without a new measurement after which a rank waits for no other one",
    )
    inductor_space: str = _variable(
        "_INDUCTOR_SPACE",
        _choice("default", "exhaustive"),
        "default",
        "torch.compile: which of Inductor's GEMM configs are considered: default | exhaustive",
    )
    inductor_kernels: str = _variable(
        "_INDUCTOR_KERNELS",
        _choice("later", "first"),
        "later",
        "torch.compile: at which launches configs of generated kernels are timed: later (some at a kernel's first one, "
        "further ones while the program runs) | first (all at the first one, which waits for them)",
    )
    model: Path | None = _variable(
        "_MODEL",
        parse_user_directory,
        None,
        "a model of `forecast-autotune train surrogate` instead of the shipped one",
    )
    assets: Path | None = _variable(
        "_ASSETS",
        parse_user_directory,
        None,
        "a directory with adapters/NAME, for ?adapter=NAME of a language model",
    )
    llm: str = _variable(
        "_LLM",
        str,
        "",
        "a language model to ask, too: transformers:PATH_OR_ID, vllm:PATH_OR_ID, the URL of a server or recorded:FILE",
    )
    llm_trust: str = _variable(
        "_LLM_TRUST",
        _choice("auto", "always", "never"),
        "auto",
        "when the model is asked: auto (its calibration says that it pays) | always (every decision) | never",
    )
    llm_timeout_s: float = _variable(
        "_LLM_TIMEOUT",
        number_within(0.01, 1e6),
        30.0,
        "seconds after which a decision goes on without the model",
    )
    llm_key: bool = _variable(
        "_LLM_KEY",
        bool,  # whether there is one: the key itself goes to the server and nowhere else
        False,
        "the server's key (else OPENAI_API_KEY); never shown or stored",
    )
    llm_max_tokens: int | None = _variable(
        "_LLM_MAX_TOKENS",
        count_within(1, 10**15),
        None,
        "most tokens this process sends to and gets from servers",
    )
    llm_max_money: float | None = _variable(
        "_LLM_MAX_MONEY",
        number_within(0.0, 1e9),
        None,
        "most it spends on them, at the prices that the model's URL states",
    )
    llm_max_seconds: float | None = _variable(
        "_LLM_MAX_SECONDS", number_within(0.0, 1e9), None, "most wall seconds it waits for them"
    )
    advice: str = _variable(
        "_ADVICE",
        _choice("off", "stored"),
        "stored",
        "advice of language models: off | stored (follow what is stored or installed)",
    )
    variants: str = _variable(
        "_VARIANTS",
        _choice("off", "store"),
        "off",
        "store: verified variants in the store are candidates, too; read when a kernel is decorated",
    )
    capture: str = _variable(
        "_CAPTURE",
        _choice("off", "values", "moments"),
        "off",
        "keep a few calls of every Triton kernel, for search and verify: off | values (tensors' contents, too) | "
        "moments (large tensors of numbers that are no integers by their distribution alone)",
    )
    on_compile: str = _variable(
        "_ON_COMPILE",
        _choice("warn", "error", "ignore"),
        "warn",
        "after ready(), a Triton compilation of the program: warn (once a kernel) | error (the launch raises) | ignore",
    )
    summary: bool = _variable("_SUMMARY", _flag, False, "1: print one line per decision to stderr")
    telemetry: str = _variable(
        "_TELEMETRY",
        _choice("off", "otel"),
        "off",
        "otel: tell OpenTelemetry of decisions, through the application's own providers",
    )
    seed: int = _variable("_SEED", count_within(0, 2**32 - 1), 0, "seed of audits and of random policies")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the variables. Raises `SettingsError` naming the variable, its value and its rule."""
        source = os.environ if environment is None else environment
        names, values = {*source}, dict[str, Any]()
        for f in fields(cls):
            variable = f.metadata["variable"]  # each look into an environment takes a microsecond
            text = source.get(variable) if variable in names else None
            if text is None or (text == "" and f.name != "enabled"):
                continue
            try:
                values[f.name] = f.metadata["parse"](text)
            except ValueError as error:
                # The faulty part of an address may be its password.
                value = "(not shown)" if f.name == "remote" else repr(printable(text, 80))
                raise SettingsError(f"{variable}={value}: {error} ({f.metadata['doc']})") from None
        return cls(**values)

    def with_(self, **changes: Any) -> Settings:
        """A copy with every change that is not None applied; values obey the variables' rules."""
        values = {name: value for name, value in changes.items() if value is not None}
        for f in fields(self):
            flag = isinstance(f.default, bool) and isinstance(values.get(f.name), bool)
            if f.name in values and not flag:
                try:
                    values[f.name] = f.metadata["parse"](str(values[f.name]))
                except ValueError as error:
                    value = "(not shown)" if f.name == "remote" else repr(values[f.name])
                    raise SettingsError(f"{f.name}={value}: {error} ({f.metadata['doc']})") from None
        return replace(self, **values)

    @property
    def budget(self) -> Budget:
        """The budget made of the three `max_` settings."""
        return Budget(self.max_measurements, self.max_seconds, self.max_gpu_seconds)

    def worker_count(self) -> int:
        """Compile threads to use: the setting, or the cores that this process may keep busy."""
        return self.workers or usable_processors()

    def describe(self) -> list[tuple[str, str, str]]:
        """(variable, value in force, meaning) per setting, for `doctor` and the documentation."""
        rows = []
        for f in fields(self):
            value = getattr(self, f.name)
            rows.append((f.metadata["variable"], "" if value is None else str(value), f.metadata["doc"]))
        return rows
