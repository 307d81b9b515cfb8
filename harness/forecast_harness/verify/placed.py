"""What a recorded launch in the cell reads and writes: the block, and what the candidate returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forecast_harness.timing.replay import Inputs
from forecast_harness.verify.arena import Slot, written
from forecast_harness.verify.held import Held, extent, piece

# Captured on import, before the candidate's code loads.
_fill, _clone, _narrow = torch.Tensor.fill_, torch.Tensor.clone, torch.Tensor.narrow
_plain = (torch.Tensor, torch.nn.Parameter)
_strided = torch.strided


class Placed(Inputs):
    """The block as `Held` restores it under a name, and its slots."""

    def __init__(self, held: Held, name: str, slots: Sequence[Slot]) -> None:
        self._held, self._name, self._slots = held, name, slots

    def blank(self) -> None:
        """Zeros: a valid index, and nothing to compute from."""
        _fill(self._held.bytes(), 0)

    def restore(self, result: Any) -> None:
        """The block as the judge wants it; NaN in all outputs, which may lie in the block."""
        for found in _returned(result):
            _fill(found, 255)
        self._held.restore(self._name)

    def seen(self, result: Any) -> list[Any]:
        """The outputs in the block, and those returned."""
        block = self._held.bytes()
        inside = [_narrow(block, 0, start, stop - start) for start, stop in written(self._slots)]
        return [_clone(one) for one in (*inside, *_returned(result))]


def _returned(result: Any) -> list[torch.Tensor]:
    """The bytes of all plain tensors on a device that were returned."""
    items = list(result) if type(result) in (tuple, list) else [result]
    plain = [i for i in items if type(i) in _plain and i.layout == _strided and i.is_cuda]
    return [piece(item, *extent(item)) for item in plain]
