"""What a variant was compiled to while its base kernel was still being surveyed, which leaves most processors idle.

Calls are drawn for it as if the survey had found what most find, see `expected_survey`. A verification with the same
seed draws the same calls where that came true, and others where it did not: nothing is judged by what was compiled
early. Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.records.codec import Record
from forecast_harness.sandbox.jobs import TensorArrays
from forecast_harness.trials.variants.compilation.base_binaries import BaseBinaries, binaries_as_arrays


@dataclass(frozen=True)
class EarlyCompilation(Record, label="early compilation"):
    """What came of it; plain data for the judge."""

    seed: str
    """Of the verification that may use it."""
    calls: str
    """Digest of the calls that it was compiled for."""
    late: tuple[int, ...] = ()
    """Numbers of those that took too long, as in `CompiledCalls`."""
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    """For Triton's cache, as `BaseBinaries.to_payload` has them."""

    @classmethod
    def of(
        cls, seed: str, calls: Sequence[Mapping[str, Any]], files: TensorArrays, late: Sequence[int]
    ) -> EarlyCompilation:
        """For these calls, in their order."""
        kept = BaseBinaries()
        kept.take(files)
        return cls(seed, _digest(calls), tuple(late), kept.to_payload())

    def is_for(self, calls: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these are all of its calls, and something came of them."""
        return bool(self.files) and self.calls == _digest(calls)

    def arrays(self) -> TensorArrays:
        """The files, as `write_cache` takes them."""
        return binaries_as_arrays(self.files)


def _digest(calls: Sequence[Mapping[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(list(calls), sort_keys=True, default=repr).encode()).hexdigest()
