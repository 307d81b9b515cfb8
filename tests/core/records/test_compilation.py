"""Which specializations of a kernel are still to come."""

from __future__ import annotations

from dataclasses import replace

from forecast_autotune.records.compilation import (
    LEAST_PROBABILITY,
    Compilation,
    probable_compilations,
)


def compiled(states: dict[str, str]) -> Compilation:
    signature = {name: "constexpr" if state == "1" else "i32" for name, state in states.items()}
    places = list(enumerate(states.values()))
    specialization = {
        "signature": signature,
        "constants": [[[n], 1] for n, state in places if state == "1"],
        "attributes": [
            [[n], [["tt.divisibility", 16]] if state == "divisible by 16" else []]
            for n, state in places
            if state != "1"
        ],
        "options": {},
    }
    types = {name: "" if state == "1" else "i32" for name, state in states.items()}
    return Compilation("m", "k", "0" * 64, "3.9.0", {}, specialization, states, types)


def test_an_argument_of_two_states_comes_in_the_third() -> None:
    known = [compiled({"n": s, "m": "neither"}) for s in ("divisible by 16", "neither")]
    (one,) = probable_compilations(known)
    assert dict(one.compilation.states) == {"n": "1", "m": "neither"}
    assert one.compilation.id == compiled({"n": "1", "m": "neither"}).id
    assert one.probability == 0.5 / 3.5 / 2


def test_many_arguments_that_vary_make_no_more_forecasts_than_are_probable() -> None:
    names = [f"n{number}" for number in range(30)]
    known = [compiled(dict.fromkeys(names, "neither"))] * 40 + [
        compiled(dict.fromkeys(names, "neither") | {name: "divisible by 16"}) for name in names
    ]
    forecasts = probable_compilations(known)
    assert len(forecasts) <= 64
    assert all(one.probability >= LEAST_PROBABILITY for one in forecasts)


def test_a_constant_of_two_powers_comes_in_those_between_and_the_next_with_options_of_the_nearest() -> None:
    def block(size: int, warps: int) -> Compilation:
        one = compiled({"n": "neither"})
        signature = {**one.specialization["signature"], "B": "constexpr"}
        changed = {"signature": signature, "constants": [[[1], size]], "options": {"num_warps": warps}}
        return replace(one, specialization={**one.specialization, **changed})

    forecast = [
        one.compilation.specialization for one in probable_compilations([block(64, 4), block(512, 8)])
    ]
    sizes = {(data["constants"][0][1], data["options"]["num_warps"]) for data in forecast}
    assert sizes == {(32, 4), (128, 4), (256, 8), (1024, 8)}
