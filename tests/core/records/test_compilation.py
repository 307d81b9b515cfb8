"""Which specializations of a kernel are still to come."""

from __future__ import annotations

from dataclasses import replace

from forecast_autotune.records.compilation import (
    LEAST_PROBABILITY,
    Compilation,
    probable_compilations,
)


def compiled(
    states: dict[str, str], sizes: dict[str, int] | None = None, constant: int | None = None
) -> Compilation:
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
    if constant is not None:
        for name, value in {"DTYPE": {"dtype": "bf16"}, "B": constant}.items():
            specialization["constants"].append([[len(signature)], value])
            signature[name] = "constexpr"
    return Compilation("m", "k", "0" * 64, "3.9.0", {}, specialization, states, types, sizes or {})


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


def test_a_constant_that_follows_a_size_comes_down_to_1_with_the_states_of_such_sizes() -> None:
    def launch(n: int) -> Compilation:
        sizes = {"rows": 8 * n, "n": n}
        states = {
            name: "1" if s == 1 else "neither" if s % 16 else "divisible by 16" for name, s in sizes.items()
        }
        return compiled(states, sizes, min(1 << (n - 1).bit_length(), 64))

    known = [launch(n) for n in (7, 10, 16, 33, 80, 1000)]
    forecast = {one.compilation.id for one in probable_compilations(known)}
    assert forecast | {one.id for one in known} == {launch(n).id for n in range(1, 2000)}
    few = [one.compilation.specialization["constants"] for one in probable_compilations(known[:2])]
    assert {constants[-1][1] for constants in few} == {4, 8, 16, 32}, "two launches show no rule"
