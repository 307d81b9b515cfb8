"""Device memory of a runner: buffers between canaries, each somewhere else every time; inputs and right results."""

from __future__ import annotations

import math
import random
import secrets
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from forecast_harness.clocks.runner.driver import CudaDriver, DriverError
from forecast_harness.clocks.runner.kernels import SECTOR_WORDS, WORD, RunnerKernels
from forecast_harness.clocks.runner.messages import BufferContents, ElementKind

PAGE_BYTES = 2 << 20
"""Bytes of a page of the device's memory: sizes are multiples of it."""
_ALIGNMENT = 256
GAP_BYTES = 4096
"""Least bytes of canaries between buffers."""
_MOST_SHIFT = 64
"""Alignments by which a buffer's place varies, for its addresses to tell nothing."""
_NOISE_BYTES = 64 << 10
"""Most bytes of a gap that the host sends. The rest of a page, farther from a buffer, repeats a word."""
_WORD = 4


@dataclass(frozen=True)
class Placed:
    """Where a buffer lies, for one placement."""

    address: int
    size: int


@dataclass
class _Gap:
    """Canaries between two buffers: noise, and behind it one word again and again."""

    address: int
    noise: bytes
    word: int
    words: int

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.noise) + _WORD * self.words

    @property
    def data(self) -> bytes:
        """All of it."""
        return self.noise + self.word.to_bytes(_WORD, "little") * self.words


class CanaryArena:
    """Places buffers. Every byte of it is a buffer's or a canary."""

    def __init__(self, driver: CudaDriver, kernels: RunnerKernels) -> None:
        self._driver, self._kernels = driver, kernels
        self.address, self.size = 0, 0
        """Address and bytes of the whole arena; any contents."""
        self._gaps: list[_Gap] = []
        self._chance = random.SystemRandom()
        self._key, self._digest = self._chance.getrandbits(64), 0
        self._noise = secrets.token_bytes(4 * _NOISE_BYTES)
        self.places: dict[str, Placed] = {}

    def place(self, sizes: Mapping[str, int]) -> dict[str, Placed]:
        """Lay out these buffers, in a new order and at new addresses, and write canaries around them.

        Nothing of an earlier placement is left. Raises `DriverError` where the device has too little memory.
        """
        names = list(sizes)
        self._chance.shuffle(names)
        offset = GAP_BYTES + _ALIGNMENT * self._chance.randrange(_MOST_SHIFT)
        offsets: dict[str, int] = {}
        for name in names:
            offsets[name] = offset
            shift = GAP_BYTES + _ALIGNMENT * self._chance.randrange(_MOST_SHIFT)
            offset = _aligned(offset + sizes[name] + shift)
        # The bytes beyond the buffers are canaries, all of which are read: the memory is no larger than it needs to be.
        self._reserve(offset + GAP_BYTES)
        begins, size = self.address, self.size
        self._driver.fill(begins, 0, 1, size)
        self.places = {n: Placed(begins + offsets[n], sizes[n]) for n in names}
        self._gaps, at = [], begins
        for name in [*names, ""]:
            begin = self.places[name].address if name else begins + size
            if begin > at:
                self._gaps.append(self._gap(at, begin))
            if name:
                at = begin + sizes[name]
        self._driver.synchronize()
        for gap in self._gaps:
            self._driver.upload(gap.address, gap.noise)
            if gap.words:
                self._driver.fill(gap.address + len(gap.noise), gap.word, _WORD, gap.words)
        self.queue_watch()
        self._digest = self._kernels.gaps_digest()
        return self.places

    def _reserve(self, size: int) -> None:
        """Have memory of as many pages as `size` needs, or of one more, for shifts need now this, now that.

        Nothing else can be addressed: other memory is given back, which waits for the device.
        """
        rounded = -(-size // PAGE_BYTES) * PAGE_BYTES
        if rounded <= self.size <= rounded + PAGE_BYTES:
            return
        if self.address:
            before, self.address, self.size = self.address, 0, 0
            self._driver.free(before)
        self.address, self.size = self._driver.allocate(rounded), rounded

    def queue_watch(self) -> None:
        """Queue looking at all canaries, behind the launch that they are to tell of; `are_broken` says what was seen.

        One digest of all is made on the device: bytes of a whole page, after every launch, take long to move.
        """
        self._kernels.queue_gaps([(gap.address, gap.size) for gap in self._gaps], self._key)

    def are_broken(self) -> bool:
        """Whether canaries were changed when they were looked at last. Waits for the device."""
        return self._kernels.gaps_digest() != self._digest

    def broken_canaries(self) -> int:
        """Bytes beside buffers that are not as they were written."""
        self.queue_watch()
        if not self.are_broken():
            return 0
        broken = 0
        for gap in self._gaps:
            result = self._driver.download(gap.address, gap.size)
            broken += sum(a != b for a, b in zip(result, gap.data, strict=True))
        return broken or 1

    def _gap(self, begin: int, end: int) -> _Gap:
        """Canaries that nobody can foretell: a piece of noise from some place on, and a random word.

        `end` is a buffer's beginning or a page's, a multiple of a word.
        """
        repeated = min(end, _aligned(begin + _NOISE_BYTES))
        size = repeated - begin
        first = self._chance.randrange(len(self._noise) - size)
        noise = self._noise[first : first + size]
        return _Gap(begin, noise, self._chance.getrandbits(8 * _WORD), (end - repeated) // _WORD)

    def wipe(self, names: Collection[str], value: int) -> None:
        """Queue setting every byte of these buffers."""
        for name in names:
            placed = self.places[name]
            self._driver.fill(placed.address, value, 1, placed.size)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


# --- memory of calls ---


_MOST_KEPT_BYTES = 16 << 30
"""Bytes of all reserves together; the one in use may be larger."""


@dataclass(frozen=True)
class InputReserve:
    """The inputs of one call in device memory. Candidates have no address of it, and could still write there."""

    address: int
    size: int
    places: Mapping[str, int]
    """Addresses by buffer."""
    digests: Mapping[str, int]
    """Digests of what the host has sent, by the key of `InputReserves`."""


class InputReserves:
    """The reserves of the calls that were used last."""

    def __init__(self, driver: CudaDriver, kernels: RunnerKernels) -> None:
        self._driver, self._kernels = driver, kernels
        self._kept: OrderedDict[str, InputReserve] = OrderedDict()
        self._key = random.SystemRandom().getrandbits(64)

    def get(self, key: str, inputs: Mapping[str, BufferContents]) -> InputReserve:
        """The reserve of these inputs, which `key` names; sent anew where anything was written into it."""
        result = self._kept.get(key)
        if result is None or self.changed(result, inputs):
            self.forget(key)
            result = self._kept[key] = self._make(inputs)
        self._kept.move_to_end(key)
        return result

    def changed(self, reserve: InputReserve, inputs: Mapping[str, BufferContents]) -> list[str]:
        """The buffers that are not what the host has sent."""
        return [
            name
            for name, digest in self._digests(reserve.places, inputs).items()
            if digest != reserve.digests[name]
        ]

    def forget(self, key: str) -> None:
        """Free a reserve, if there is one."""
        if (result := self._kept.pop(key, None)) is not None:
            self._driver.free(result.address)

    def forget_all(self) -> bool:
        """Free all, for want of memory; whether there were any."""
        kept = list(self._kept)
        for key in kept:
            self.forget(key)
        return bool(kept)

    def _make(self, inputs: Mapping[str, BufferContents]) -> InputReserve:
        offsets, size = dict[str, int](), 0
        for name, contents in inputs.items():
            offsets[name] = size
            size += -(-max(1, contents.size) // _ALIGNMENT) * _ALIGNMENT
        while self._kept and size + sum(one.size for one in self._kept.values()) > _MOST_KEPT_BYTES:
            self.forget(next(iter(self._kept)))
        size = max(size, _ALIGNMENT)
        try:
            address = self._driver.allocate(size)
        except DriverError:
            if not self.forget_all():
                raise
            address = self._driver.allocate(size)
        places = {name: address + offset for name, offset in offsets.items()}
        for name, contents in inputs.items():
            self._fill(places[name], contents)
        return InputReserve(address, size, places, self._digests(places, inputs))

    def _fill(self, address: int, contents: BufferContents) -> None:
        """Send what repeats once, and double it on the device."""
        done = len(contents.data)
        self._driver.upload(address, contents.data)
        while done < contents.size:
            more = min(done, contents.size - done)
            self._driver.copy(address + done, address, more)
            done += more

    def _digests(self, places: Mapping[str, int], inputs: Mapping[str, BufferContents]) -> dict[str, int]:
        buffers = [(places[name], contents.size) for name, contents in inputs.items()]
        return dict(zip(inputs, self._kernels.digests(buffers, self._key), strict=True))


_LEAST_RENEWED_BYTES = 64 << 10
"""Bytes of an input that is renewed in part: a smaller one is copied as soon, and has few sectors to choose from."""


class WorkInputs:
    """The inputs of one placement. Everything is queued."""

    def __init__(self, driver: CudaDriver, kernels: RunnerKernels) -> None:
        self._driver, self._kernels = driver, kernels
        self._chance = random.SystemRandom()
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

        A part of large ones is replaced by what lies elsewhere in them, at places that nobody can foretell: what was
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


@dataclass(frozen=True)
class _Results:
    """The results of one call; digests are those of masked bytes."""

    address: int
    size: int
    places: Mapping[str, Placed]
    digests: Mapping[str, int]
    kinds: Mapping[str, ElementKind]


class KnownResults:
    """The results of a right program, by call, kept on the device, where those of others are compared with them.

    Programs have no address of them, and could still read and write there. They are masked whenever a program runs:
    what it reads there is of no use, and what it writes there is seen.
    """

    def __init__(self, driver: CudaDriver, kernels: RunnerKernels) -> None:
        self._driver, self._kernels = driver, kernels
        self._kept: dict[str, _Results] = {}
        chance = random.SystemRandom()
        self._key, self._mask_keys = chance.getrandbits(64), (chance.getrandbits(64), chance.getrandbits(64))

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    def keep(self, key: str, buffers: Mapping[str, Placed], kinds: Mapping[str, ElementKind]) -> None:
        """Copy what is in these buffers now. Raises `DriverError` for want of memory."""
        self.forget(key)
        offsets, size = dict[str, int](), 0
        for name, placed in buffers.items():
            offsets[name] = size
            size += -(-max(1, placed.size) // _ALIGNMENT) * _ALIGNMENT
        size = max(size, _ALIGNMENT)
        address = self._driver.allocate(size)
        places = {n: Placed(address + offsets[n], placed.size) for n, placed in buffers.items()}
        for name, placed in buffers.items():
            self._driver.copy(places[name].address, placed.address, placed.size)
        self._kernels.mask(address, size, self._mask_keys)
        digests = self._digests(places)
        self._kept[key] = _Results(address, size, places, digests, {n: kinds[n] for n in buffers})

    def forget(self, key: str) -> None:
        """Free the results of a call, if there are any."""
        if (result := self._kept.pop(key, None)) is not None:
            self._driver.free(result.address)

    def changed(self, key: str) -> bool:
        """Whether anything was written into the results of a call since they were kept; they are forgotten then."""
        if (result := self._kept.get(key)) is None or self._digests(result.places) == result.digests:
            return False
        self.forget(key)
        return True

    def errors(self, key: str, places: Mapping[str, Placed]) -> dict[str, float]:
        """The largest error in each buffer, relative to the largest finite value in what is right."""
        result, kept = {}, self._kept[key]
        self._kernels.mask(kept.address, kept.size, self._mask_keys)
        for name, right in kept.places.items():
            kind, got = kept.kinds[name], places[name]
            result[name] = self._kernels.relative_error(
                got.address + kind.late, right.address + kind.late, right.size - kind.late, kind.dtype
            )
        self._kernels.mask(kept.address, kept.size, self._mask_keys)
        return result

    def _digests(self, places: Mapping[str, Placed]) -> dict[str, int]:
        buffers = [(placed.address, placed.size) for placed in places.values()]
        return dict(zip(places, self._kernels.digests(buffers, self._key), strict=True))
