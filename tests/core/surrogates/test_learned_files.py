"""Files of learned models: arrays as numpy reads them, and forests that send every row where their nodes say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import pytest

from forecast_autotune.surrogates.forest import Forest
from forecast_autotune.surrogates.learned import read_arrays, shipped_model


def followed(forest: Forest, row: npt.NDArray[np.float32]) -> list[int]:
    """The leaf of each tree, one node at a time."""
    results = []
    for root in forest.roots.tolist():
        node = root
        while forest.feature[node] >= 0:
            above = row[forest.feature[node]] > forest.threshold[node]
            node = int(forest.right[node] if above else forest.left[node])
        results.append(node)
    return results


@pytest.mark.parametrize("rows", [1, 5, 200, 1200])
@pytest.mark.parametrize("name", ["residual", "kin"])
def test_every_way_of_walking_ends_in_the_same_leaves(name: str, rows: int) -> None:
    model = shipped_model()
    forest: Forest = getattr(model, name)
    width = len(model.names)
    features = np.random.default_rng(rows).normal(scale=4.0, size=(rows, width)).astype(np.float32)
    leaves = forest.leaves(features)
    assert leaves.shape == (rows, len(forest.roots))
    for row in {0, rows // 2, rows - 1}:
        assert leaves[row].tolist() == followed(forest, features[row])


ARRAYS: dict[str, npt.NDArray[Any]] = {
    "halves": np.arange(12, dtype=np.float16).reshape(3, 4),
    "none": np.zeros((0, 5), dtype=np.int32),
    "text": np.array("some text"),
    "one": np.array(7.5),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_what_was_saved(tmp_path: Path, save: Callable[..., None]) -> None:
    path = tmp_path / "arrays.npz"
    save(path, **ARRAYS)
    result = read_arrays(path)
    assert result.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert result[name].dtype == array.dtype
        np.testing.assert_array_equal(result[name], array)


def test_what_holds_no_plain_arrays_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "arrays.npz"
    path.write_bytes(b"no archive")
    with pytest.raises(BadZipFile):
        read_arrays(path)
    np.savez(path, objects=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="plain"):
        read_arrays(path)
    np.savez(path, turned=np.asfortranarray(np.ones((2, 3))))
    with pytest.raises(ValueError, match="row by row"):
        read_arrays(path)
    np.savez(path, long=np.arange(1000))
    whole = path.read_bytes()
    path.write_bytes(whole[:200] + whole[4200:])
    with pytest.raises((OSError, ValueError, BadZipFile)):
        read_arrays(path)
