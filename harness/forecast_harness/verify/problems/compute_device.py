"""Where the judge computes what takes a host seconds: on the device while nobody is timed, or on the host.

The judge is a process of its own, so a candidate cannot touch its context on the device; the numbers drawn or
expected there are float64 as on the host. Whatever the device fails at is done on the host instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch

from forecast_harness.verify.cost_control import use_more_cores

_T = TypeVar("_T")
_DEVICE_ERRORS = (RuntimeError, AssertionError)
"""What torch raises for want of memory, of an operation, of a device, or of all CUDA code."""


class ComputeDevice:
    """The device of one judge, named as in torch."""

    def __init__(self, device: str, *, alone: bool = True) -> None:
        """`alone`: no other judge is at work for this device, and the host's cores are this one's as well.

        Threads of several judges wait for each other on busy cores: a comparison of 0.2 s then takes 80 s (eight
        judges on 16 cores).
        """
        self._device, self._alone = device, alone
        self._opening: threading.Thread | None = None
        self.failure = ""
        """Why the device is not used any more; empty as long as it is."""

    @property
    def device(self) -> str:
        """Where the next work is done."""
        return "cpu" if self.failure else self._device

    def open_in_background(self) -> None:
        """Open the device in the background: a context takes up to seconds."""
        if self._device != "cpu" and self._opening is None:
            self._opening = threading.Thread(target=self._open, daemon=True)
            self._opening.start()

    def wait_until_open(self) -> None:
        """Wait until nothing that was begun is under way: somebody is going to be timed."""
        if self._opening is not None:
            self._opening.join()

    def run(self, work: Callable[[str], _T], *, portable: bool = True) -> _T:
        """`work(device)`, on the host if the device fails at it or the work is not `portable`.

        Tensors that `work` makes without saying where are made there. Nothing may be left on the device in
        its result: afterwards all work there is done, and all memory given back.
        """
        self.wait_until_open()
        if portable and self.device != "cpu":
            try:
                with torch.device(self._device):
                    return work(self._device)
            except _DEVICE_ERRORS as error:
                self._refuse(error)
            finally:
                self._leave()
        # A host's cores belong to whoever is timed on them next.
        with use_more_cores() if self._alone and self._device != "cpu" else nullcontext():
            return work("cpu")

    def _open(self) -> None:
        try:
            ones = torch.ones(64, 64, dtype=torch.float64, device=self._device)
            float((ones @ ones).sum())
        except _DEVICE_ERRORS as error:
            self._refuse(error)

    def _leave(self) -> None:
        if torch.device(self._device).type == "cuda":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except _DEVICE_ERRORS as error:
                self._refuse(error)

    def _refuse(self, error: BaseException) -> None:
        self.failure = f"{type(error).__name__}: {error}"[:200]


HOST_DEVICE = ComputeDevice("cpu")
