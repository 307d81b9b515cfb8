"""What nodes of a search are compiled to: which builds are under way, and programs that others are timed beside."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from forecast_harness.clocks.compilation.requests import BuildRequest, BuildResult
from forecast_harness.clocks.records import Program
from forecast_harness.records import Node
from forecast_harness.trials.machine_code.target_trials import SourceBuilder, TrialConfig

_PATIENCE_S, _PATIENCE, _LOOK_S = 4.0, 3.0, 0.5
"""Least seconds, and times what others of its source took, that a config may compile; how often that is looked at."""


class NodeBuilds:
    """Builds of nodes' configs. Any thread may ask."""

    def __init__(self, builder: SourceBuilder, request: Callable[[Node, TrialConfig], BuildRequest]) -> None:
        """`request`: how a node is compiled for all calls."""
        self._builder, self._request = builder, request
        self._lock = threading.RLock()
        self._under_way: set[Future[BuildResult]] = set()
        self._kept: dict[str, Future[BuildResult]] = {}

    @property
    def idle(self) -> int:
        """Workers that nobody has asked for."""
        return self._builder.idle

    def begin(
        self, node: Node, config: TrialConfig, began: float, cases: Sequence[int] = ()
    ) -> Future[BuildResult]:
        """Compile for the cases of these numbers, or for all. `began`: see `BuildRequest`."""
        if (kept := self._kept.get(node_key(node, config))) is not None and not cases:
            return kept
        request = self._request(node, config)
        built = self._builder.submit(replace(request.only(cases) if cases else request, began=began))
        with self._lock:
            self._under_way.add(built)
        built.add_done_callback(self._under_way.discard)
        return built

    def begin_once(self, node: Node, config: TrialConfig, began: float) -> Future[BuildResult]:
        """Compile a node that others are timed beside, unless that was done before."""
        key = node_key(node, config)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = self.begin(node, config, began)
            return self._kept[key]

    def keep(self, node: Node, config: TrialConfig, built: BuildResult) -> None:
        """What a node is compiled to is known already."""
        done: Future[BuildResult] = Future()
        done.set_result(built)
        with self._lock:
            self._kept[node_key(node, config)] = done

    def forget(self, node: Node, config: TrialConfig) -> None:
        """Have a node built anew for the next that asks."""
        with self._lock:
            self._kept.pop(node_key(node, config), None)

    def within_patience(
        self, building: Future[BuildResult], usual_s: float | None, check: Callable[[], None]
    ) -> BuildResult | None:
        """What a config is compiled to; None for one that compiles far longer than others of its source did.

        The search's next batches wait for all nodes of this one, and what takes so long to compile is rarely fast.
        `usual_s`: the longest that others took which run; where none does yet, any is waited for. `check` raises once
        nobody waits any more.
        """
        patience = math.inf if usual_s is None else max(_PATIENCE_S, _PATIENCE * usual_s)
        while True:
            with suppress(TimeoutError):
                return building.result(_LOOK_S)
            check()
            if self._builder.seconds_of(building) > patience and self._builder.end(building):
                return None

    def give_up(self) -> None:
        """Compile nothing more of what is under way."""
        with self._lock:
            under_way, self._under_way = list(self._under_way), set()
        for one in under_way:
            one.cancel()
        self._builder.give_up()
        with self._lock:
            self._kept = {key: built for key, built in self._kept.items() if not built.cancelled()}

    def end(self) -> None:
        """End whatever is compiled, for others too."""
        self._builder.give_up(0.0)


def node_key(node: Node, config: TrialConfig) -> str:
    """Names a node in one config."""
    return repr((node.id, sorted(config.items(), key=lambda item: item[0])))


def parts_by_code(programs: Sequence[Program]) -> tuple[Sequence[int], Sequence[int]]:
    """Numbers of the programs that have the code in common which most calls have, and of the others.

    `programs` are those of the small call and of every timed one, which count: to compile for the first part is to
    compile once for most of them.
    """
    alike: dict[tuple[bytes, ...], list[int]] = {}
    for number, program in enumerate(programs):
        alike.setdefault(tuple(k.image for k in program.kernels), []).append(number)
    first = max(alike.values(), key=lambda numbers: sum(n > 0 for n in numbers))
    return first, [n for n in range(len(programs)) if n not in first]
