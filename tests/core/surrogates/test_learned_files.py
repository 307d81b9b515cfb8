"""Forests of the shipped model send every row where their nodes say."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from forecast_autotune.surrogates.forest import Forest
from forecast_autotune.surrogates.learned import shipped_model


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
