"""Contents of buffers on their way to the device: bytes that repeat are drawn, sent and kept once."""

from __future__ import annotations

from dataclasses import dataclass

from forecast_harness.clocks.records import MachineCodeError


@dataclass(frozen=True)
class BufferContents:
    """`size` bytes: `data`, as often as it takes. Raises `MachineCodeError` for data that cannot fill it."""

    data: bytes
    size: int

    def __post_init__(self) -> None:
        if len(self.data) > self.size or (self.size and not self.data):
            raise MachineCodeError(f"{len(self.data)} bytes cannot be the contents of {self.size}")

    @classmethod
    def of(cls, data: bytes) -> BufferContents:
        """These bytes, once."""
        return cls(data, len(data))

    def whole(self) -> bytes:
        """All bytes."""
        if len(self.data) == self.size:
            return self.data
        return (self.data * (self.size // len(self.data) + 1))[: self.size]
