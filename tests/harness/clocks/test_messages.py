"""Outputs of launches go to the host once for each content."""

from __future__ import annotations

import json

import pytest

from forecast_harness.clocks.runner import messages
from forecast_harness.clocks.runner.messages import KnownOutputs, ObservedLaunch, encode_launches


def launch(*outputs: bytes, turn: int = 0) -> ObservedLaunch:
    return ObservedLaunch({"x": turn}, outputs)


def moved(
    known: KnownOutputs, launches: list[ObservedLaunch], call: str = "call"
) -> tuple[list[bytes], tuple]:
    """The bytes that were sent, and what the host makes of them."""
    have = known.of_call(call)
    data, arrays = encode_launches(launches, "0", list(have))
    data = json.loads(json.dumps(data))
    result = known.decode(call, have, data, arrays, "0")
    return [bytes(a.data) for a in arrays.values()], result


def test_equal_outputs_are_sent_once_and_never_again() -> None:
    known = KnownOutputs()
    launches = [launch(b"aa", b"b"), launch(b"aa", b"b"), launch(b"aa", b"c")]
    sent, result = moved(known, launches)
    assert sorted(sent) == [b"aa", b"b", b"c"]
    assert [one.outputs for one in result] == [(b"aa", b"b"), (b"aa", b"b"), (b"aa", b"c")]
    sent, result = moved(known, [launch(b"aa", b"d")])
    assert sent == [b"d"]
    assert result == (ObservedLaunch({"x": 0}, (b"aa", b"d")),)


def test_what_is_known_of_one_call_is_not_taken_for_another() -> None:
    known = KnownOutputs()
    moved(known, [launch(b"aa")])
    assert moved(known, [launch(b"aa")], "other")[0] == [b"aa"]


def test_outputs_on_rotated_inputs_are_told_but_not_kept() -> None:
    known = KnownOutputs()
    assert moved(known, [launch(b"aa", turn=4)]) == ([b"aa"], (ObservedLaunch({"x": 4}, (b"aa",)),))
    assert known.of_call("call") == {}


def test_the_oldest_are_forgotten_and_what_was_promised_to_the_runner_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "_MOST_KEPT_BYTES", 4)
    known = KnownOutputs()
    moved(known, [launch(b"aa"), launch(b"bb")])
    have = known.of_call("call")
    data, arrays = encode_launches([launch(b"aa")], "0", list(have))
    moved(known, [launch(b"cc")])  # another thread's
    assert list(known.of_call("call").values()) == [b"bb", b"cc"]
    assert known.decode("call", have, data, arrays, "0") == (ObservedLaunch({"x": 0}, (b"aa",)),)


def test_a_content_that_nobody_has_sent_is_an_error() -> None:
    data = {"launches": [{"rotation": {}, "outputs": ["ab"], "errors": {}}]}
    with pytest.raises(KeyError):
        KnownOutputs().decode("call", {}, data, {}, "0")


def test_what_is_large_is_sent_each_time_under_names_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_MOST_DIGESTED_BYTES", 2)
    known = KnownOutputs()
    launches = [launch(b"aaa", b"b"), launch(b"ccc", b"b")]
    for times in (1, 2):
        sent, result = moved(known, launches)
        assert sorted(sent) == ([b"aaa", b"b", b"ccc"] if times == 1 else [b"aaa", b"ccc"])
        assert [one.outputs for one in result] == [(b"aaa", b"b"), (b"ccc", b"b")]


def test_errors_arrive_as_they_are_whatever_their_size() -> None:
    one = ObservedLaunch({}, errors={"out": 0.5, "other": float("inf")})
    (result,) = moved(KnownOutputs(), [one])[1]
    assert result == ObservedLaunch({}, (), {"out": 0.5, "other": float("inf")})
