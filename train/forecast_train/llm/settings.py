"""One TOML file reproduces a run: what is trained, on what, how long, from which seed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.records.named_lines import read_document

SettingsT = TypeVar("SettingsT")


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters (Hu et al., arXiv 2106.09685) on every linear layer; rank 0 trains all weights."""

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0


@dataclass(frozen=True)
class LossSettings:
    """What is minimised; see `losses`."""

    sigma: float = 0.10
    """Width of the soft targets in log2 units, where a measurement's own noise is smaller: 0.1 is 7 %."""
    rps: float = 0.5
    """Weight of the ranked probability score beside cross-entropy."""
    rank: float = 0.2
    """Weight of the pairwise ranking term."""
    reward: str = ""
    """Instead of the above, maximise one of the paper's rewards: its exact expectation, or an estimate."""
    replies: int = 0
    """Sampled replies per candidate for a policy gradient of the reward; 0: its exact expectation."""
    draws: int = 8
    """Letters drawn per sampled reply: their shares are what it states, the first is what it names."""


@dataclass(frozen=True)
class ScheduleSettings:
    """How long, how fast, how much at a time."""

    epochs: float = 2.0
    most: int = 0
    """Steps at the most; 0: by the epochs."""
    rate: float = 2e-4
    warmup: float = 0.05
    """Share of the steps during which the rate rises."""
    examples: int = 8
    """Examples (prefixes) per step and process."""
    batch: int = 1
    """Of these, so many are read at once, padded to the longest; it must divide `examples`. A small model is
    bound by launches: several at once take hardly longer than one."""
    tokens: int = 4096
    """Tokens of one example at the most; the candidates of longer ones are dealt out to several."""
    save: int = 100
    """Steps between checkpoints."""
    validate: int = 100
    """Steps between validations."""
    checked: int = 0
    """Sequences that a validation reads, spread evenly; 0: all of them."""
    seconds: float = 0.0
    """Training ends after so many seconds, all sittings together, if the epochs are not over before; the
    rate falls to zero by then. 0: no limit. A limit makes a run depend on the machine's speed."""


@dataclass(frozen=True)
class SftRun:
    """A whole run."""

    model: str
    """Folder or hub name of the model to start from."""
    data: str
    """Folder with `train.parquet` and `validation.parquet`, as `train data` writes it."""
    out: str
    """Folder for checkpoints, curves and the trained model."""
    adapter: str = ""
    """Folder of an adapter to go on from; its rank and scale count then. Empty: a fresh one."""
    seed: int = 0
    dtype: str = ""
    """bfloat16 or float32; empty: bfloat16 on an accelerator, else float32."""
    checkpointing: bool = False
    """Compute activations twice instead of keeping them: less memory, a third more time."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    steps: ScheduleSettings = field(default_factory=ScheduleSettings)

    def __post_init__(self) -> None:
        replies = self.loss.replies
        counts = (self.steps.examples, self.steps.batch, self.steps.save, self.steps.validate)
        rules = [
            (self.lora.rank >= 0, "lora.rank must be at least 0", self.lora.rank),
            (self.lora.alpha > 0, "lora.alpha must be positive", self.lora.alpha),
            (0 <= self.lora.dropout < 1, "lora.dropout must lie in [0, 1)", self.lora.dropout),
            (self.loss.sigma > 0, "loss.sigma must be positive", self.loss.sigma),
            (min(self.loss.rps, self.loss.rank) >= 0, "loss weights cannot be negative", self.loss),
            (self.loss.reward in REWARDS, f"loss.reward must be one of {REWARDS}", self.loss.reward),
            (self.steps.epochs > 0, "steps.epochs must be positive", self.steps.epochs),
            (self.steps.rate > 0, "steps.rate must be positive", self.steps.rate),
            (0 <= self.steps.warmup < 1, "steps.warmup must lie in [0, 1)", self.steps.warmup),
            (self.steps.tokens >= 256, "steps.tokens must be at least 256", self.steps.tokens),
            (min(self.steps.checked, self.steps.seconds) >= 0, "limits cannot be negative", self.steps),
            (replies == 0 or replies >= 2, "loss.replies must be 0 or at least 2", replies),
            (self.loss.draws >= 1, "loss.draws must be at least 1", self.loss.draws),
            (bool(self.loss.reward) or not replies, "loss.replies needs loss.reward", replies),
            (bool(self.lora.rank) or not self.adapter, "an adapter needs lora.rank above 0", self.lora.rank),
            (min(counts) >= 1, "steps.examples, batch, save and validate must be at least 1", counts),
            (self.steps.examples % max(1, self.steps.batch) == 0, "steps.batch must divide examples", counts),
            (self.dtype in ("", "bfloat16", "float32"), "dtype must be bfloat16 or float32", self.dtype),
        ]  # fmt: skip
        for holds, rule, seen in rules:
            if not holds:
                raise SettingsError(f"{rule}, got {seen!r}")

    @classmethod
    def load(cls, path: Path) -> SftRun:
        """Read a TOML file; relative folders count from where it lies. Raises `SettingsError`."""
        return load_toml(cls, path, {"lora": LoraSettings, "loss": LossSettings, "steps": ScheduleSettings})


MAX_TOML_BYTES = 1_000_000
"""Of the description of a run: a reader of TOML takes half a minute for a line of 32 MB."""


def load_toml(kind: type[SettingsT], path: Path, parts: Mapping[str, type[Any]]) -> SettingsT:
    """A run from a TOML file with tables `parts`; `data`, `out` and a local `model` count from its folder.

    Raises `SettingsError` naming the file, the entry, its value and the rule.
    """
    try:
        given = tomllib.loads(read_document(path, limit=MAX_TOML_BYTES))
    except (OSError, RecordError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsError(f"{path}: no TOML file that can be read ({error})") from error
    here = path.absolute().parent
    try:
        inner: dict[str, Any] = {
            k: _parse_table(part, given.pop(k), k) for k, part in parts.items() if k in given
        }
        for name in ("data", "out", "model", "adapter"):
            value = given.get(name)
            # A model may also be a name on the hub.
            if isinstance(value, str) and value and (name != "model" or (here / value).is_dir()):
                given[name] = str(here / value)
        return _parse_table(kind, {**given, **inner}, "")
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error


REWARDS = ("", "correctness", "correctness_brier", "correctness_crps")


_TYPES: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}


def _parse_table(kind: type[SettingsT], given: Any, where: str) -> SettingsT:
    if not isinstance(given, Mapping):
        raise SettingsError(f"[{where}] must be a table, got {given!r}")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    place = f"{where}." if where else ""
    if unknown := sorted(set(given) - known.keys()):
        raise SettingsError(f"{place}{unknown[0]} is not known; known are {', '.join(known)}")
    for name, value in given.items():
        wanted = str(known[name].type)
        right = isinstance(value, _TYPES.get(wanted, object)) and (wanted == "bool") == isinstance(
            value, bool
        )
        if wanted in _TYPES and not right:
            raise SettingsError(f"{place}{name} must be of type {wanted}, got {value!r}")
    needed = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [n for n in needed if n not in given]:
        raise SettingsError(f"{where or 'a run'} needs {', '.join(needed)}: add {', '.join(missing)}")
    return kind(**given)
