"""What a recorded launch in the cell reads and writes: the block, and what the candidate returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forecast_harness.clocks.devices import ReplayBuffers
from forecast_harness.verify.launches.arena import Slot, output_spans
from forecast_harness.verify.launches.block_store import BlockStore, address_range, bytes_at

# Captured on import, before the candidate's code loads.
_fill, _clone, _narrow = torch.Tensor.fill_, torch.Tensor.clone, torch.Tensor.narrow
_plain = (torch.Tensor, torch.nn.Parameter)
_strided = torch.strided


class BlockReplayBuffers(ReplayBuffers):
    """The block as `BlockStore` restores it under a name, and its slots."""

    def __init__(self, held: BlockStore, name: str, slots: Sequence[Slot]) -> None:
        self._blocks, self._name, self._slots = held, name, slots

    def clear(self) -> None:
        """Zeros: a valid index, and nothing to compute from."""
        _fill(self._blocks.bytes(), 0)

    def restore(self, result: Any) -> None:
        """The block as the judge wants it; NaN in all outputs, which may lie in the block."""
        for found in _returned_bytes(result):
            _fill(found, 255)
        self._blocks.restore(self._name)

    def output_copies(self, result: Any) -> list[Any]:
        """The outputs in the block, and those returned."""
        block = self._blocks.bytes()
        inside = [_narrow(block, 0, start, stop - start) for start, stop in output_spans(self._slots)]
        return [_clone(one) for one in (*inside, *_returned_bytes(result))]


def _returned_bytes(result: Any) -> list[torch.Tensor]:
    """The bytes of all plain tensors on a device that were returned."""
    items = list(result) if type(result) in (tuple, list) else [result]
    plain = [i for i in items if type(i) in _plain and i.layout == _strided and i.is_cuda]
    return [bytes_at(item, *address_range(item)) for item in plain]
