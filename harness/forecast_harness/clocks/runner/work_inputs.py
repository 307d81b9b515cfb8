"""What launches read: copies of a call's inputs that no launch finds as an earlier one did."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from forecast_harness.clocks.runner.gpu.arena import Placed
from forecast_harness.clocks.runner.gpu.driver import CudaDriver
from forecast_harness.clocks.runner.gpu.trusted_kernels import TrustedKernels
from forecast_harness.clocks.runner.gpu.trusted_texts import SECTOR_WORDS, WORD
from forecast_harness.clocks.runner.system_chance import SystemChance

_LEAST_RENEWED_BYTES = 64 << 10
"""Of an input of which only a part is renewed: a smaller one is copied as soon, and has few sectors to choose from."""


class WorkInputs:
    """The inputs of one placement. Everything is queued."""

    def __init__(self, driver: CudaDriver, kernels: TrustedKernels) -> None:
        self._driver, self._kernels = driver, kernels
        self._chance = SystemChance()
        self._work: Mapping[str, Placed] = {}
        self._copies: Mapping[str, int] = {}
        self._units: Mapping[str, int] = {}
        self._updated: Collection[str] = ()
        self._keys: dict[str, int] = {}
        self.rotation: dict[str, int] = {}
        """Bytes by which each was rotated when it was copied last; none of what was not copied yet."""

    def place(
        self,
        work: Mapping[str, Placed],
        copies: Mapping[str, int],
        units: Mapping[str, int],
        updated: Collection[str],
    ) -> None:
        """Take these places, of which nothing is known. `units`: those that may be rotated, by multiples of so many
        bytes; `updated`: those that launches write."""
        self._work, self._copies, self._units, self._updated = work, copies, units, updated
        self._keys, self.rotation = {}, {}

    def random_rotation(self) -> dict[str, int]:
        """Bytes by which to rotate each that may be."""
        return {name: self._random_turn(name, unit) for name, unit in self._units.items()}

    def copy(self, rotation: Mapping[str, int]) -> None:
        """Copy all, rotated so."""
        for name in self._work:
            self._copy(name, rotation.get(name, 0))

    def renew(self, *, clean: bool) -> None:
        """Make inputs other ones at a fraction of what copying takes; or those of the call, where `clean`.

        Of large ones a part is replaced by what lies elsewhere in them, at places that nobody can foretell: what was
        worked out from them before is wrong now, and only who reads all of an input can tell whether it is. Small ones
        are rotated. Launches have to leave what is not updated as it was: it is not copied again.
        """
        for name, work in self._work.items():
            unit = self._units.get(name, 0)
            if name not in self._updated and (not unit or self._in_part(name)):
                if name not in self.rotation:
                    self._copy(name, 0)
                if unit:
                    turn = self._random_turn(name, math.lcm(unit, SECTOR_WORDS * WORD))
                    key = 0 if clean else self._chance.randrange(1, 1 << 64)
                    self._replace(name, work, turn, key)
            else:
                self._copy(name, self._random_turn(name, unit) if unit and not clean else 0)

    def restore(self) -> None:
        """Undo what is renewed in part: all are copies, rotated by `rotation`, unless a launch has written them."""
        for name in list(self._keys):
            self._replace(name, self._work[name], 0, 0)

    def _in_part(self, name: str) -> bool:
        size = self._work[name].size
        return size >= _LEAST_RENEWED_BYTES and size % WORD == 0

    def _replace(self, name: str, work: Placed, turn: int, key: int) -> None:
        before = self._keys.pop(name, 0)
        if before or key:
            self._kernels.renew(work.address, self._copies[name], work.size, turn, before, key)
        if key:
            self._keys[name] = key

    def _copy(self, name: str, turn: int) -> None:
        work, copied = self._work[name], self._copies[name]
        self._driver.copy(work.address, copied + turn, work.size - turn)
        self._driver.copy(work.address + work.size - turn, copied, turn)
        self._keys.pop(name, None)
        self.rotation[name] = turn

    def _random_turn(self, name: str, unit: int) -> int:
        turns = self._work[name].size // max(1, unit)
        return unit * self._chance.randrange(turns) if turns > 1 else 0
