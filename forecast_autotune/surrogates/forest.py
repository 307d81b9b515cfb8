"""A regression forest as plain arrays: fitted elsewhere, shipped as npz, evaluated with numpy alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.errors import RecordError
from forecast_autotune.surrogates.protocol import Array

_ROWS = 128
"""Rows at a time: their lookups stay in the cache."""
_UNCHECKED_STEPS = 3
"""Steps of all walks before the first check which of them have reached a leaf."""


@dataclass(frozen=True)
class Forest:
    """Binary trees side by side. A node sends `x[feature] <= threshold` left; leaves have feature -1."""

    feature: npt.NDArray[np.int16]
    """[nodes]"""
    threshold: npt.NDArray[np.float32]
    left: npt.NDArray[np.int32]
    right: npt.NDArray[np.int32]
    value: npt.NDArray[np.float32]
    roots: npt.NDArray[np.int32]
    """[trees], the node at which each tree begins."""

    def __post_init__(self) -> None:
        nodes = len(self.feature)
        same = all(len(a) == nodes for a in (self.threshold, self.left, self.right, self.value))
        has_roots = len(self.roots) and ((self.roots >= 0) & (self.roots < nodes)).all()
        if not same or not has_roots or not self._children_follow_parents():
            raise RecordError(
                f"a forest needs arrays of one length with children after their parents, got {nodes} nodes, "
                f"{len(self.roots)} trees"
            )

    def _children_follow_parents(self) -> bool:
        """Whether children come after their parents, so that a walk from a root always ends."""
        own = np.arange(len(self.feature), dtype=np.int32)
        good = self.feature < 0
        later = (self.left > own) & (self.right > own)
        later &= self.left < len(own)
        later &= self.right < len(own)
        good |= later
        return bool(good.all())

    def __call__(self, features: Array) -> Array:
        """Predictions of every tree, [n, trees], for features [n, width]."""
        return np.asarray(self.value[self.leaves(features)], dtype=float)

    def leaves(self, features: Array) -> npt.NDArray[np.int32]:
        """The node in which each row ends, per tree, [n, trees]."""
        x = np.ascontiguousarray(features, dtype=np.float32)
        result = np.empty((len(x), len(self.roots)), dtype=np.int32)
        # Looking at every node once costs less than walking past those that send all rows the same way.
        roots, onward = (
            self._pruned_for(x)
            if result.size >= len(self.feature)
            else (self.roots, self._with_leaf_loops[2])
        )
        for first in range(0, len(x), _ROWS):
            result[first : first + _ROWS] = self._walk(x[first : first + _ROWS], roots, onward)
        return result

    def _walk(
        self, x: npt.NDArray[np.float32], roots: npt.NDArray[np.int32], onward: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        feature, threshold, _ = self._with_leaf_loops
        flat, trees = x.ravel(), len(roots)
        at = np.tile(roots, len(x))
        row = np.repeat(np.arange(len(x), dtype=np.int32) * np.int32(x.shape[1]), trees)
        for _ in range(_UNCHECKED_STEPS):
            above = flat.take(row + feature.take(at)) > threshold.take(at)
            at = onward.take(2 * at + above)
        active = np.flatnonzero(self.feature.take(at) >= 0)
        while len(active):  # only those still on their way
            node = at.take(active)
            above = flat.take(row.take(active) + feature.take(node)) > threshold.take(node)
            node = onward.take(2 * node + above)
            at[active] = node
            active = active.compress(self.feature.take(node) >= 0)
        return at.reshape(len(x), trees)

    def _pruned_for(self, x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Roots and children without the nodes that send all of these rows to one side."""
        feature, threshold, onward = self._with_leaf_loops
        own = np.arange(len(feature), dtype=np.int32)
        least, most = x.min(axis=0).take(feature), x.max(axis=0).take(feature)
        goes = np.where(least > threshold, onward[1::2], np.where(most <= threshold, onward[::2], own))
        while not np.array_equal(further := goes.take(goes), goes):
            goes = further
        return goes.take(self.roots), goes.take(onward)

    @cached_property
    def _with_leaf_loops(
        self,
    ) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Feature, threshold and both children side by side, where a leaf leads to itself."""
        leaf, own = self.feature < 0, np.arange(len(self.feature), dtype=np.int32)
        children = np.empty((len(own), 2), dtype=np.int32)
        children[:, 0], children[:, 1] = np.where(leaf, own, self.left), np.where(leaf, own, self.right)
        return np.maximum(self.feature, 0), self.threshold, children.ravel()

    def arrays(self, prefix: str) -> dict[str, npt.NDArray[Any]]:
        """Its arrays by name, for `numpy.savez`.

        A new process waits for the reading, and children are a third of a file, so redundant arrays are left out:
        the children of trees in depth-first order, and all but one of equal values.
        """
        results = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if np.array_equal(self.left, _implied_left_children(self.feature)):
            del results["left"]
            if np.array_equal(self.right, _implied_right_children(self.feature)):
                del results["right"]
        if len(self.value) and (self.value == self.value[0]).all():
            results["value"] = self.value[:1]
        return {f"{prefix}_{name}": array for name, array in results.items()}

    @classmethod
    def of(cls, arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> Forest:
        """The forest that `arrays` wrote. Raises `RecordError` for arrays that make no forest."""
        rules = {"left": _implied_left_children, "right": _implied_right_children}
        names = [
            name for name in cls.__dataclass_fields__ if f"{prefix}_{name}" in arrays or name not in rules
        ]
        try:
            results = {name: arrays[f"{prefix}_{name}"] for name in names}
        except KeyError as missing:
            raise RecordError(f"a forest needs the array {missing}") from missing
        for name in rules.keys() - results.keys():
            results[name] = rules[name](results["feature"])
        if len(results["value"]) == 1:
            results["value"] = np.broadcast_to(results["value"], results["feature"].shape)
        return cls(**results)


def _implied_left_children(feature: npt.NDArray[np.int16]) -> npt.NDArray[np.int32]:
    """Left children of trees in depth-first order: the next node, 0 for leaves."""
    result = np.arange(1, len(feature) + 1, dtype=np.int32)
    result *= feature >= 0
    return result


def _implied_right_children(feature: npt.NDArray[np.int16]) -> npt.NDArray[np.int32]:
    """Right children of trees in depth-first order, 0 for leaves.

    Between a node and its right child lies its left subtree. On its way through the list a walk owes one subtree more
    after each inner node and one fewer after each leaf; the right child is the next node at which it owes as many.
    """
    inner = feature >= 0
    owed = np.zeros(len(feature) + 1, dtype=np.int8)
    np.cumsum(np.where(inner, np.int8(1), np.int8(-1)), dtype=np.int8, out=owed[1:])
    order = np.argsort(owed[:-1], kind="stable")  # by radix, in one pass: no walk owes 256
    right = np.zeros(len(feature), dtype=np.int32)
    right[order[:-1]] = order[1:]
    right *= inner
    return right
