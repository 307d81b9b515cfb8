"""One TOML file reproduces a supervised run: what is trained, on what, how long, from which seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from forecast_autotune.errors import SettingsError
from forecast_train.llm.runs import LoraSettings, load_toml


@dataclass(frozen=True)
class LossSettings:
    """The loss that is minimised; see `sft`."""

    sigma: float = 0.10
    """Width of the soft targets in log2 units, where a measurement's own noise is smaller: 0.1 is 7 %."""
    rps: float = 0.5
    """Weight of the ranked probability score beside cross-entropy."""
    rank: float = 0.2
    """Weight of the pairwise ranking term."""


@dataclass(frozen=True)
class ScheduleSettings:
    """Length, rate and batches of the training."""

    epochs: float = 2.0
    most: int = 0
    """Steps at the most; 0: by the epochs."""
    rate: float = 2e-4
    warmup: float = 0.05
    """Share of the steps during which the rate rises."""
    examples: int = 8
    """Examples (prefixes) per step and process."""
    batch: int = 1
    """Examples that are read at once, padded to the longest; it must divide `examples`. A small model is
    bound by launches: several at once take hardly longer than one."""
    tokens: int = 4096
    """Tokens of one example at the most; the candidates of longer ones are dealt out to several."""
    save: int = 100
    """Steps between checkpoints."""
    validate: int = 100
    """Steps between validations."""
    checked: int = 0
    """Sequences that a validation reads, spread evenly; 0: all of them."""


@dataclass(frozen=True)
class SftRun:
    """A whole run."""

    model: str
    """Folder or hub name of the model to start from."""
    data: str
    """Folder with `train.parquet` and `validation.parquet`, as `train data` writes it."""
    out: str
    """Folder for checkpoints and the trained model."""
    seed: int = 0
    dtype: str = ""
    """bfloat16 or float32; empty: bfloat16 on an accelerator, or a CPU that computes in it, else float32."""
    checkpointing: bool = False
    """Compute activations twice instead of keeping them: less memory, a third more time."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    steps: ScheduleSettings = field(default_factory=ScheduleSettings)

    def __post_init__(self) -> None:
        counts = (self.steps.examples, self.steps.batch, self.steps.save, self.steps.validate)
        rules = [
            (self.lora.rank >= 0, "lora.rank must be at least 0", self.lora.rank),
            (self.lora.alpha > 0, "lora.alpha must be positive", self.lora.alpha),
            (0 <= self.lora.dropout < 1, "lora.dropout must lie in [0, 1)", self.lora.dropout),
            (self.loss.sigma > 0, "loss.sigma must be positive", self.loss.sigma),
            (min(self.loss.rps, self.loss.rank) >= 0, "loss weights cannot be negative", self.loss),
            (self.steps.epochs > 0, "steps.epochs must be positive", self.steps.epochs),
            (self.steps.rate > 0, "steps.rate must be positive", self.steps.rate),
            (0 <= self.steps.warmup < 1, "steps.warmup must lie in [0, 1)", self.steps.warmup),
            (self.steps.tokens >= 256, "steps.tokens must be at least 256", self.steps.tokens),
            (self.steps.checked >= 0, "limits cannot be negative", self.steps),
            (min(counts) >= 1, "steps.examples, batch, save and validate must be at least 1", counts),
            (self.steps.examples % max(1, self.steps.batch) == 0, "steps.batch must divide examples", counts),
            (self.dtype in ("", "bfloat16", "float32"), "dtype must be bfloat16 or float32", self.dtype),
        ]  # fmt: skip
        for holds, rule, value in rules:
            if not holds:
                raise SettingsError(f"{rule}, got {value!r}")

    @classmethod
    def load(cls, path: Path) -> SftRun:
        """Read a TOML file; relative folders count from where it lies. Raises `SettingsError`."""
        return load_toml(cls, path, {"lora": LoraSettings, "loss": LossSettings, "steps": ScheduleSettings})
