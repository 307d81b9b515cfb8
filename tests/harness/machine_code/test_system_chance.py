"""Numbers that the system gives in blocks: each byte once, of every width, through all that `random` offers."""

from __future__ import annotations

import itertools
import os

import pytest

from forecast_harness.clocks.runner.system_chance import SystemChance


def test_every_byte_of_the_system_is_used_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    given = itertools.count()
    monkeypatch.setattr(os, "urandom", lambda size: bytes(next(given) % 251 for _ in range(size)))
    chance = SystemChance()
    found = [chance.getrandbits(8) for _ in range(5000)]
    assert found == [n % 251 for n in range(5000)]


@pytest.mark.parametrize("bits", [1, 7, 8, 9, 31, 32, 64, 100, 8 * 5000])
def test_numbers_have_as_many_bits_as_asked_for(bits: int) -> None:
    chance = SystemChance()
    found = [chance.getrandbits(bits) for _ in range(64)]
    assert all(0 <= n < 1 << bits for n in found)
    assert len(set(found)) > 1
    assert max(found) >= 1 << (bits - 1), "64 times less than half is one in 2**64"


def test_no_bits_are_nothing_and_fewer_an_error() -> None:
    assert SystemChance().getrandbits(0) == 0
    with pytest.raises(ValueError, match="non-negative"):
        SystemChance().getrandbits(-1)


def test_draws_rest_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = SystemChance()
    names = list("abcdef")
    chance.shuffle(names)
    assert sorted(names) == list("abcdef")
    assert {chance.randrange(3) for _ in range(200)} == {0, 1, 2}
    assert chance.choice("x") == "x"
    assert len(chance.sample(range(100), 10)) == 10
    monkeypatch.setattr(SystemChance, "getrandbits", lambda self, k: 0)
    assert [chance.randrange(1000) for _ in range(5)] == [0] * 5
