"""The in-memory key of a call, element for element as `triton.autotune` builds it, but quicker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

from forecast_integrations.device import current_device, mixed_devices
from forecast_integrations.triton.problem.describe import line_bytes
from forecast_integrations.triton.problem.source import KernelText
from forecast_integrations.triton.protocols import KernelFunction, Key, NamedArguments, is_tensor

Bucket = str | Callable[[str, Any], Hashable]
"""`exact`, `pow2`, or a function (name, value) -> value."""

_PLAIN = frozenset({int, float, bool, str, type(None)})
"""Types that surely have no `.dtype`: asking them would raise and catch an AttributeError each time."""
_DTYPE_NAMES: dict[Hashable, str] = {}
_NO_DTYPE = object()


class InLine(NamedTuple):
    """The part of a key for a tensor that begins within a line of the cache."""

    name: str
    address: int
    """A power of two of bytes, 8 for all that is less than 16."""


class KeyMaker:
    """Builds keys of one tuner.

    A key has the values of the names in `key` that the call supplies, then the dtype of every argument that has
    one, positional arguments first; the device, but only where this process sees different models; and the name and
    address of each tensor that may feed a dot and begins within a line of the cache.
    """

    def __init__(self, arg_names: Sequence[str], bucket: Bucket) -> None:
        self._places = {name: i for i, name in enumerate(arg_names)}
        self._bucket = bucket if callable(bucket) else pow2 if bucket == "pow2" else None
        self._devices: bool | None = None
        self._address_places: tuple[int, ...] | None = None
        """Places of the tensors of a kernel with a dot; None before the first call."""
        self._tensors: tuple[int, ...] = ()
        self._line = 128

    def learn_addresses(
        self,
        text_of: Callable[[KernelFunction], KernelText],
        fn: KernelFunction,
        args: tuple[object, ...],
        kwargs: NamedArguments,
    ) -> bool:
        """Learn from a first call which addresses count; returns whether its key may have changed by that."""
        if self._address_places is not None:
            return False
        values = {**dict(zip(self._places, args, strict=False)), **kwargs}
        tensors = {n: value for n, value in values.items() if n in self._places and is_tensor(value)}
        self._line = max((line_bytes(value) for value in tensors.values()), default=self._line)
        dots = text_of(fn).has_dot
        self._address_places = self._tensors = tuple(self._places[name] for name in tensors) if dots else ()
        return dots

    @property
    def goes_by_form(self) -> bool:
        """Whether calls of one form have one key: neither addresses within a line nor devices have a part in it."""
        return self._devices is False and not self._address_places

    def narrow(self, dots: Collection[str]) -> None:
        """Let the addresses of these tensors alone count; those of all tensors where `dots` names none."""
        names = list(self._places)
        self._address_places = tuple(at for at in self._tensors if names[at] in dots) or self._tensors

    def __call__(self, names: Sequence[str], args: tuple[object, ...], kwargs: NamedArguments) -> Key:
        """The key of one call; `names` is the tuner's `keys`."""
        key: list[object] = []
        places, count, bucket = self._places, len(args), self._bucket
        for name in names:
            at = places.get(name)
            if at is None:
                continue
            if name in kwargs:
                value = kwargs[name]
            elif at < count:
                value = args[at]
            else:
                continue
            key.append(value if bucket is None else bucket(name, value))
        plain, dtype_names, none = _PLAIN, _DTYPE_NAMES, _NO_DTYPE
        for value in args:
            if type(value) not in plain and (dtype := getattr(value, "dtype", none)) is not none:
                try:
                    key.append(dtype_names[dtype])
                except (KeyError, TypeError):
                    key.append(_dtype_name(dtype))
        for name, value in kwargs.items():
            # An argument given twice counts once; the launch will complain of it.
            if type(value) not in plain and places.get(name, -1) >= count and hasattr(value, "dtype"):
                key.append(_dtype_name(value.dtype))
        if self._address_places:
            bits = 0
            try:
                for at in self._address_places:
                    bits |= args[at].data_ptr()  # type: ignore[attr-defined]
            except (IndexError, AttributeError):  # given by name, or no tensor
                bits = -1
            if bits & (self._line - 1):
                self._add_addresses(key, args, kwargs)
        if self._devices is not False:
            self._add_device(key)
        return tuple(key)

    def _add_addresses(self, key: list[object], args: tuple[object, ...], kwargs: NamedArguments) -> None:
        names = list(self._places)
        for at in self._address_places or ():
            value = args[at] if at < len(args) else kwargs.get(names[at])
            if is_tensor(value) and (low := value.data_ptr() & (self._line - 1)):
                key.append(InLine(names[at], max(low & -low, 8)))

    def _add_device(self, key: list[object]) -> None:
        self._devices = mixed_devices()
        if self._devices:
            key.append(current_device().slug)


def _dtype_name(dtype: Hashable) -> str:
    name = str(dtype)
    try:
        _DTYPE_NAMES[dtype] = name
    except TypeError:
        return name
    return name


def pow2(name: str, value: object) -> object:
    """Group integers by the next power of two; everything else stays as it is."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return 1 << (value - 1).bit_length()
    return value
