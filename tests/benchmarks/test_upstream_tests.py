"""How PyTorch's own tests are run with us and without: what counts as a difference."""

from __future__ import annotations

from benchmarks.inductor import upstream_tests as upstream


def test_a_difference_that_turns_round_is_chance() -> None:
    def arms(plain: dict[str, str], ours: dict[str, str]) -> upstream.Outcomes:
        return {"plain": _told(plain), "ours": _told(ours)}

    first = arms(
        {"stays": "passed", "turns": "passed", "goes": "passed", "comes": "failed", "waits": "passed"},
        {"stays": "failed", "turns": "failed", "goes": "failed", "comes": "passed", "waits": "failed"},
    )
    again = arms(
        {"stays": "passed", "turns": "failed", "goes": "passed", "comes": "failed", "waits": "passed"},
        {"stays": "died", "turns": "passed", "goes": "passed", "comes": "passed"},
    )
    assert upstream.standing(first, again) == {
        "lost": ["stays"],
        "gained": ["comes"],
        "chance": ["goes", "turns"],
        "open": ["waits"],  # no time was left for it with us
    }


def _told(words: dict[str, str]) -> dict[str, dict[str, str]]:
    return {test: {"outcome": word} for test, word in words.items()}


def test_only_what_both_came_to_is_compared() -> None:
    def said(*outcomes: str) -> dict[str, dict[str, str]]:
        return {f"t{i}": {"outcome": outcome} for i, outcome in enumerate(outcomes)}

    outcomes = {
        "plain": said("passed", "passed", "failed", "passed"),
        "ours": said("passed", "died", "passed"),
    }
    assert upstream.differences(outcomes) == (["t1"], ["t2"])
    assert upstream.compared(outcomes) == ["t0", "t1", "t2"]
    result = upstream.counts(outcomes)
    assert (result["passed"], result["died"]) == ({"plain": 2, "ours": 2}, {"plain": 0, "ours": 1})
