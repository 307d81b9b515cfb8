"""How many batches of which size are under way."""

from __future__ import annotations

import pytest

from forecast_harness.records import SearchSettings
from forecast_harness.search.plan import NODES_AHEAD, paced_ahead, paced_as


@pytest.mark.parametrize(("k", "parents"), [(2, None), (4, None), (8, None), (4, 1), (4, 2), (3, 3)])
def test_as_many_measurements_are_under_way_whatever_the_size_of_a_batch(k: int, parents: int | None) -> None:
    found = paced_ahead(SearchSettings(k=k, parents=parents or 2), parents)
    assert found.parents == (parents or 1)
    batch = found.k * found.parents
    assert abs(found.depth * batch - NODES_AHEAD) <= batch / 2 or found.depth == SearchSettings().depth


def test_large_batches_are_no_fewer_than_elsewhere() -> None:
    usual = SearchSettings(k=100, parents=5)
    assert paced_ahead(usual, 5).depth == usual.depth


def test_smaller_batches_may_pass_in_vain_as_often_as_it_takes_for_as_many_measurements() -> None:
    usual = SearchSettings()
    found = paced_ahead(usual, None)
    assert found.k * found.parents * found.patience == usual.k * usual.parents * usual.patience
    assert paced_ahead(usual, 2).patience == usual.patience, "the user's batches are the usual ones"
    assert paced_ahead(usual, 1) == found, "it is the default"


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("parents", [None, 1, 2, 4])
def test_a_search_knows_results_before_it_may_end_without_new_nodes(k: int, parents: int | None) -> None:
    found = paced_ahead(SearchSettings(k=k), parents)
    assert found.depth < found.patience


def test_a_search_goes_on_as_it_began_except_for_what_an_option_says() -> None:
    begun = paced_ahead(SearchSettings(k=2), None)
    now = SearchSettings(k=3)
    assert paced_as(now, begun, None) == SearchSettings(
        k=3, parents=begun.parents, depth=begun.depth, patience=begun.patience
    )
    assert paced_as(now, begun, 5).parents == 5
