"""Whose turn it is to use a device."""

from __future__ import annotations

import threading

from forecast_harness.clocks.devices import DeviceTurns


def test_of_those_that_wait_the_job_that_began_first_comes_next() -> None:
    turns, order = DeviceTurns(), list[float]()
    waiting = threading.Semaphore(0)

    def use(began: float) -> None:
        waiting.release()
        with turns.turn(began):
            order.append(began)

    with turns.turn(0.0):
        threads = [threading.Thread(target=use, args=(began,)) for began in (3.0, 1.0, 4.0, 2.0)]
        for one in threads:
            one.start()
        for _ in threads:
            waiting.acquire()
        while len(turns._waiting) < len(threads):
            pass
        with turns.turn(9.0):  # who holds it may take it again
            assert order == []
        assert order == []
    for one in threads:
        one.join()
    assert order == [1.0, 2.0, 3.0, 4.0]
