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
"""Alignments by which a buffer's place varies, so that its addresses tell nothing."""
_NOISE_BYTES = 64 << 10
"""Most bytes of a gap that the host sends. The rest of a page, farther from a buffer, repeats a word."""
_WORD = 4


@dataclass(frozen=True)
class Placed:
    """The place of a buffer in one placement."""

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
        """Bytes of the gap."""
        return len(self.noise) + _WORD * self.words

    @property
    def data(self) -> bytes:
        """All bytes of the canaries."""
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
            offset = _align(offset + sizes[name] + shift)
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
        """Have memory of as many pages as `size` needs, or of one more, as random shifts vary the need.

        All other memory is given back, so that nothing else can be addressed; that waits for the device.
        """
        pages_size = -(-size // PAGE_BYTES) * PAGE_BYTES
        if pages_size <= self.size <= pages_size + PAGE_BYTES:
            return
        if self.address:
            before, self.address, self.size = self.address, 0, 0
            self._driver.free(before)
        self.address, self.size = self._driver.allocate(pages_size), pages_size

    def queue_watch(self) -> None:
        """Queue a digest of all canaries behind a launch; `are_broken` compares it.

        The digest is made on the device: to move a whole page after every launch would take long.
        """
        self._kernels.queue_gaps([(gap.address, gap.size) for gap in self._gaps], self._key)

    def are_broken(self) -> bool:
        """Whether canaries had changed at the last `queue_watch`. Waits for the device."""
        return self._kernels.gaps_digest() != self._digest

    def broken_canaries(self) -> int:
        """The number of canary bytes that have changed."""
        self.queue_watch()
        if not self.are_broken():
            return 0
        count = 0
        for gap in self._gaps:
            result = self._driver.download(gap.address, gap.size)
            count += sum(a != b for a, b in zip(result, gap.data, strict=True))
        return count or 1

    def _gap(self, begin: int, end: int) -> _Gap:
        """Canaries that nobody can predict: a piece of noise from a random place on, and a random word.

        `end` is a buffer's beginning or a page's, a multiple of a word.
        """
        boundary = min(end, _align(begin + _NOISE_BYTES))
        size = boundary - begin
        first = self._chance.randrange(len(self._noise) - size)
        noise = self._noise[first : first + size]
        return _Gap(begin, noise, self._chance.getrandbits(8 * _WORD), (end - boundary) // _WORD)

    def wipe(self, names: Collection[str], value: int) -> None:
        """Queue setting every byte of these buffers."""
        for name in names:
            place = self.places[name]
            self._driver.fill(place.address, value, 1, place.size)


def _align(offset: int) -> int:
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
    """Digests of the contents that the host has sent, by the key of `InputReserves`."""


class InputReserves:
    """The reserves of the calls that were used last."""

    def __init__(self, driver: CudaDriver, kernels: RunnerKernels) -> None:
        self._driver, self._kernels = driver, kernels
        self._reserves: OrderedDict[str, InputReserve] = OrderedDict()
        self._key = random.SystemRandom().getrandbits(64)

    def get(self, key: str, inputs: Mapping[str, BufferContents]) -> InputReserve:
        """The reserve of these inputs, which `key` names; sent anew where anything was written into it."""
        result = self._reserves.get(key)
        if result is None or self.changed(result, inputs):
            self.forget(key)
            result = self._reserves[key] = self._make(inputs)
        self._reserves.move_to_end(key)
        return result

    def changed(self, reserve: InputReserve, inputs: Mapping[str, BufferContents]) -> list[str]:
        """The buffers whose contents are not those that the host has sent."""
        return [
            name
            for name, digest in self._digests(reserve.places, inputs).items()
            if digest != reserve.digests[name]
        ]

    def forget(self, key: str) -> None:
        """Free a reserve, if there is one."""
        if (result := self._reserves.pop(key, None)) is not None:
            self._driver.free(result.address)

    def forget_all(self) -> bool:
        """Free all, for want of memory; whether there were any."""
        keys = list(self._reserves)
        for key in keys:
            self.forget(key)
        return bool(keys)

    def _make(self, inputs: Mapping[str, BufferContents]) -> InputReserve:
        offsets, size = dict[str, int](), 0
        for name, contents in inputs.items():
            offsets[name] = size
            size += -(-max(1, contents.size) // _ALIGNMENT) * _ALIGNMENT
        while self._reserves and size + sum(r.size for r in self._reserves.values()) > _MOST_KEPT_BYTES:
            self.forget(next(iter(self._reserves)))
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
        """Send the contents' period once, and double it on the device."""
        filled = len(contents.data)
        self._driver.upload(address, contents.data)
        while filled < contents.size:
            count = min(filled, contents.size - filled)
            self._driver.copy(address + filled, address, count)
            filled += count

    def _digests(self, places: Mapping[str, int], inputs: Mapping[str, BufferContents]) -> dict[str, int]:
        buffers = [(places[name], contents.size) for name, contents in inputs.items()]
        return dict(zip(inputs, self._kernels.digests(buffers, self._key), strict=True))


_LEAST_RENEWED_BYTES = 64 << 10
"""An input of so many bytes or more is renewed in part: a smaller one is copied as soon, and has few sectors."""


class WorkInputs:
    """The inputs of one placement. Everything is queued."""

    def __init__(self, driver: CudaDriver, kernels: RunnerKernels) -> None:
        self._driver, self._kernels = driver, kernels
        self._chance = random.SystemRandom()
        self._work: Mapping[str, Placed] = {}
        self._copies: Mapping[str, int] = {}
        self._units: Mapping[str, int] = {}
        self._updates: Collection[str] = ()
        self._keys: dict[str, int] = {}
        self.rotation: dict[str, int] = {}
        """Bytes by which each input was rotated at its last copy, by name."""

    def place(
        self,
        work: Mapping[str, Placed],
        copies: Mapping[str, int],
        units: Mapping[str, int],
        updates: Collection[str],
    ) -> None:
        """Take these places, with unknown contents. `units`: those that may be rotated, by multiples of so many
        bytes; `updates`: those that launches write."""
        self._work, self._copies, self._units, self._updates = work, copies, units, updates
        self._keys, self.rotation = {}, {}

    def random_rotation(self) -> dict[str, int]:
        """Random rotations, in bytes, of all inputs that may be rotated."""
        return {name: self._random_turn(name, unit) for name, unit in self._units.items()}

    def copy(self, rotation: Mapping[str, int]) -> None:
        """Copy all inputs, each rotated by so many bytes."""
        for name in self._work:
            self._copy(name, rotation.get(name, 0))

    def renew(self, *, clean: bool) -> None:
        """Change inputs at a fraction of a copy's cost; or restore those of the call, where `clean`.

        A part of large ones is replaced by other elements of theirs, at places that nobody can predict: earlier
        results are wrong now, and a program has to read all of an input to know whether they are. Small ones are
        rotated. Inputs that are not updated are not copied again, as launches have to leave them alone.
        """
        for name, work in self._work.items():
            unit = self._units.get(name, 0)
            if name not in self._updates and (not unit or self._in_part(name)):
                if name not in self.rotation:
                    self._copy(name, 0)
                if unit:
                    turn = self._random_turn(name, math.lcm(unit, SECTOR_WORDS * WORD))
                    key = 0 if clean else self._chance.randrange(1, 1 << 64)
                    self._replace(name, work, turn, key)
            else:
                self._copy(name, self._random_turn(name, unit) if unit and not clean else 0)

    def restore(self) -> None:
        """Undo partial renewals: all inputs are copies, rotated by `rotation`, unless a launch has written them."""
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
        work, source = self._work[name], self._copies[name]
        self._driver.copy(work.address, source + turn, work.size - turn)
        self._driver.copy(work.address + work.size - turn, source, turn)
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
    bytes that it reads there are of no use, and bytes that it writes there show.
    """

    def __init__(self, driver: CudaDriver, kernels: RunnerKernels) -> None:
        self._driver, self._kernels = driver, kernels
        self._results: dict[str, _Results] = {}
        chance = random.SystemRandom()
        self._key, self._mask_keys = chance.getrandbits(64), (chance.getrandbits(64), chance.getrandbits(64))

    def __contains__(self, key: str) -> bool:
        return key in self._results

    def keep(self, key: str, buffers: Mapping[str, Placed], kinds: Mapping[str, ElementKind]) -> None:
        """Copy these buffers as they are now. Raises `DriverError` for want of memory."""
        self.forget(key)
        offsets, size = dict[str, int](), 0
        for name, buffer in buffers.items():
            offsets[name] = size
            size += -(-max(1, buffer.size) // _ALIGNMENT) * _ALIGNMENT
        size = max(size, _ALIGNMENT)
        address = self._driver.allocate(size)
        places = {n: Placed(address + offsets[n], buffer.size) for n, buffer in buffers.items()}
        for name, buffer in buffers.items():
            self._driver.copy(places[name].address, buffer.address, buffer.size)
        self._kernels.mask(address, size, self._mask_keys)
        digests = self._digests(places)
        self._results[key] = _Results(address, size, places, digests, {n: kinds[n] for n in buffers})

    def forget(self, key: str) -> None:
        """Free the results of a call, if there are any."""
        if (result := self._results.pop(key, None)) is not None:
            self._driver.free(result.address)

    def changed(self, key: str) -> bool:
        """Whether anything was written into the results of a call since they were kept; they are forgotten then."""
        if (result := self._results.get(key)) is None or self._digests(result.places) == result.digests:
            return False
        self.forget(key)
        return True

    def errors(self, key: str, places: Mapping[str, Placed]) -> dict[str, float]:
        """The largest error in each buffer, relative to the largest finite value of the right results."""
        result, results = {}, self._results[key]
        self._kernels.mask(results.address, results.size, self._mask_keys)
        for name, right in results.places.items():
            kind, output = results.kinds[name], places[name]
            result[name] = self._kernels.relative_error(
                output.address + kind.late, right.address + kind.late, right.size - kind.late, kind.dtype
            )
        self._kernels.mask(results.address, results.size, self._mask_keys)
        return result

    def _digests(self, places: Mapping[str, Placed]) -> dict[str, int]:
        buffers = [(place.address, place.size) for place in places.values()]
        return dict(zip(places, self._kernels.digests(buffers, self._key), strict=True))
