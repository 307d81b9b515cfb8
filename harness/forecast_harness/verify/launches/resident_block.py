"""The judge's copy of a large block that lies in the cell, and what the cell must be told to follow it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import torch

from forecast_harness.sandbox.jobs import TensorBytes
from forecast_harness.verify.launches.arena import Slot, build_arena, output_spans
from forecast_harness.verify.launches.digest import BlockHasher, complement_spans, digest_values
from forecast_harness.verify.problems.input_mutation import ElementChange, integer_view
from forecast_harness.verify.problems.problem import LaunchCase

PlaceRequest = tuple[dict[str, Any], dict[str, TensorBytes]]
"""A payload and arrays for `inside.place`."""


class ResidentBlock:
    """One large case in one cell: its block, canaries included, as far as the cell has been told of it."""

    def __init__(self, case: LaunchCase, rng: random.Random, pages: int) -> None:
        """`pages` is the seed of the factors of the block's digest, one for all blocks of a cell."""
        self.case, self.name = case, block_name(case)
        self.arena = build_arena(case.tensors, case.outputs, case.layouts, rng)
        self._version = 0 if case.mutator is None else case.mutator.version
        self._sent = False
        self._pages, self._digest = pages, BlockHasher(pages)
        kept = complement_spans(output_spans(self.arena.slots), self.arena.block.numel())
        (self.digest,) = digest_values([self._digest.of(self.arena.block, pages, kept)])
        """Of all but the outputs, as it has to be after a launch."""

    def update(self) -> PlaceRequest | None:
        """What to tell the cell, so that it holds what the case holds now; None if it does already."""
        moving = self.case.mutator
        if not self._sent:
            self._sent = True
            return {"patches": []}, {"block": byte_array(self.arena.data())}
        if moving is None or moving.version == self._version:
            return None
        changes = moving.since(self._version)
        assert changes is not None, "whoever is behind for so long builds a new one"
        self._version = moving.version
        by_name = {s.name: s for s in self.arena.slots}
        slots, arrays = [], {}
        for n, change in enumerate(changes):
            slots.append(by_name[change.name].to_json())
            arrays[f"at{n}"] = _tensor_array(change.where)
            arrays[f"to{n}"] = _tensor_array(change.values)
            self._apply(by_name[change.name], change)
        return {"patches": slots}, arrays

    @property
    def is_outdated(self) -> bool:
        """Whether the case has moved on too far to be followed."""
        return self.case.mutator is not None and self.case.mutator.since(self._version) is None

    def digests(self, arrays: Mapping[str, TensorBytes], seed: int) -> list[int]:
        """Of outputs that were read: first those in the block, then those returned, as the cell has them."""
        places, parts = output_spans(self.arena.slots), []
        if places:
            block = torch.frombuffer(arrays["block"].data, dtype=torch.uint8)
            parts = [block[start:stop] for start, stop in places]
        numbers = sorted(int(n.removeprefix("out")) for n in arrays if n.startswith("out"))
        for data in (arrays[f"out{n}"].data for n in numbers):
            empty = torch.empty(0, dtype=torch.uint8)
            parts.append(torch.frombuffer(data, dtype=torch.uint8) if data else empty)
        return digest_values([self._digest.of(p, seed) for p in parts]) if parts else []

    def _apply(self, slot: Slot, change: ElementChange) -> None:
        block = self.arena.block
        width = getattr(torch, slot.dtype).itemsize
        numbers = torch.div(slot.offset + change.where * width, 8, rounding_mode="floor").unique()
        words = block.view(torch.int64)
        before = words[numbers]
        integer_view(slot.view(block))[change.where] = change.values
        moved = (words[numbers] - before) * self._digest.factors(numbers, self._pages, block.numel())
        self.digest = int(torch.tensor(self.digest) + moved.sum())


def block_name(case: LaunchCase) -> str:
    """Cases that take up the same place have the same name: the cell needs to keep one of them."""
    shapes = [(n, str(t.dtype), list(t.shape)) for n, t in (*case.tensors.items(), *case.outputs.items())]
    return hashlib.sha256(repr((shapes, sorted(case.layouts.items()))).encode()).hexdigest()[:16]


def byte_array(data: memoryview) -> TensorBytes:
    """Bytes as an array."""
    return TensorBytes("uint8", (len(data),), data)


def _tensor_array(tensor: torch.Tensor) -> TensorBytes:
    kind = str(tensor.dtype).removeprefix("torch.")
    return TensorBytes(kind, tuple(tensor.shape), memoryview(tensor.contiguous().view(torch.uint8).numpy()))
