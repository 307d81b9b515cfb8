"""A measurer that leaves to other ranks what they have undertaken to measure, and hands on what they found."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.ranks.board import Board
from forecast_autotune.records import Candidate, Measurement, MeasuringCost, Outcome
from forecast_autotune.tuning.measurer import Measurer
from forecast_autotune.tuning.results import FINALIST_MARGIN, MAX_FINALISTS

_UNWANTED_S = 0.5
"""Seconds for which a plan may do without a candidate before it is left to others: plans waver."""
_MANY = 16
"""Compilations at a time beyond which a decision comes no sooner: more is measured, and the slowest is waited for."""
_READY = 2
"""Candidates that are compiled and wait for this rank's device: with so many it leaves others to other ranks."""
_DEVICE_FAULTS = (Outcome.TIMEOUT, Outcome.RUNTIME_ERROR)
"""After these a measurer looks whether the device still works, when it is asked for the next measurement."""


class DecidedByAnotherRankError(ForecastAutotuneError):
    """The job has its decision, so that nothing more needs to be measured; it is on the board."""


class SharedMeasurer:
    """A `Measurer` of which every rank of a job has one: together they measure each candidate once.

    It yields measurements of candidates that were not asked for where other ranks made them. `measure` and
    `compare` raise `DecidedByAnotherRankError` as soon as the job has a decision. What living ranks do not deliver
    within `wait_s` seconds, counted from the latest news of anybody, counts as a fault of the harness.
    """

    def __init__(self, local: Measurer, board: Board, wait_s: float) -> None:
        self._local, self._board, self._wait_s = local, board, wait_s
        self._clock, self._limits = board.job.clock, board.job.limits
        self._share: int | None = None
        self._told: set[Candidate] = set()
        """Measurements of others that were handed on."""
        self._timed: set[Candidate] = set()
        self._unwanted: dict[Candidate, float] = {}
        self._news_at = self._clock.now()

    @property
    def workers(self) -> int:
        """How many candidates the ranks that take part can compile at once, as far as a decision gains from more."""
        return max(self._local.workers, min(_MANY, self._local.workers * len(self._board.names)))

    @property
    def quiet(self) -> bool:
        """Whether candidates can be timed while others compile."""
        return self._local.quiet

    def ready(self) -> Collection[Candidate]:
        """What is compiled here and left to nobody else."""
        others = self._board.claimed_elsewhere()
        return {c: None for c in self._local.ready() if c not in others and c not in self._board.rows}.keys()

    def compiling(self) -> Mapping[Candidate, float]:
        """What compiles here, or is under way on another rank, with its seconds so far."""
        return {**self._board.claimed_elsewhere(), **self._local.compiling()}

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        """Undertake a fair share of these and start compiling it."""
        self._board.read()
        if self._board.decision is None:
            self._claim(candidates)
            self._local.prefetch(candidates if self._board.alone else self._claimed(candidates))

    def measure(
        self,
        candidates: Sequence[Candidate],
        *,
        prefetch: Sequence[Candidate] = (),
        within_s: float | None = None,
    ) -> Iterator[Measurement]:
        """Yield what this rank and the others measure; ends as any measurer's does.

        `prefetch` is compiled only where there is nobody to share with: another rank may want it more.
        """
        latest = self._clock.now()
        wanted = dict.fromkeys(c for c in candidates if c not in self._told)
        pause = self._limits.poll_s
        while True:
            self._release_unwanted(wanted)
            for m in self._news():
                wanted.pop(m.candidate, None)
                latest = self._clock.now()
                yield m
            if not wanted:
                return
            if self._board.alone:
                yield from self._local.measure(list(wanted), prefetch=prefetch, within_s=within_s)
                return
            self._claim(list(wanted))
            mine = self._claimed(wanted)
            left = None if within_s is None else within_s - (self._clock.now() - latest)
            if mine:
                step = self._limits.poll_s if left is None else max(0.0, min(left, self._limits.poll_s))
                for m in self._local.measure(mine, prefetch=self._finalists_elsewhere(), within_s=step):
                    del wanted[m.candidate]
                    self._timed.add(m.candidate)
                    self._news_at = self._clock.now()
                    yield m
                    latest = self._clock.now()
                    if m.outcome not in _DEVICE_FAULTS:
                        break  # look for news, and for more to do, before the next one
                pause = self._limits.poll_s
            elif self._clock.now() - self._news_at >= self._wait_s:
                yield from self._give_up(wanted)
            else:
                self._local.prefetch(self._finalists_elsewhere())
                self._clock.sleep(pause if left is None else max(0.0, min(left, pause)))
                pause = min(1.5 * pause, self._limits.idle_poll_s)
            if within_s is not None and self._clock.now() - latest >= within_s:
                return

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        """Time the fastest again side by side, on the one rank that decides; the others wait for its decision."""
        begin = self._clock.now()
        while not self._board.alone:
            self._board.read()
            self._raise_if_decided()
            self._board.find_dead()
            self._board.claim_finale()
            self._raise_if_decided()
            if self._board.holds_finale() or self._clock.now() - begin >= self._wait_s:
                break
            self._clock.sleep(self._limits.poll_s)
        self._compile_here(candidates)
        return self._local.compare(candidates)

    def spent(self) -> MeasuringCost:
        """What this rank has used so far."""
        return self._local.spent()

    def close(self) -> None:
        """Leave to others what was undertaken and not done, and free what is held."""
        try:
            self._board.release(self._board.claimed_here())
        finally:
            self._local.close()

    def _claimed(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        held = set(self._board.claimed_here())
        return [c for c in candidates if c in held]

    def _claim(self, wanted: Sequence[Candidate]) -> None:
        """Undertake more of what is wanted: at first a fair share, then twice as much at every look.

        Ranks that meet a problem at once so divide it evenly, and one that meets it by itself is not held up.
        """
        job, room = self._board.job, self._local.workers + 1
        if not self._local.quiet and self._board.claimed_here():
            return  # everything is compiled before anything is timed: more would hold up what there is
        if not wanted:
            return
        asked, claimed = set(wanted), self._board.claimed_here()
        held = [c for c in claimed if c in asked]
        if self._share is None:
            self._share = max(1, -(-len(wanted) // job.size))
        most = min(self._share, room) - len(held)
        self._share = min(2 * self._share, room)
        ready = self._local.ready()
        if most <= 0 or sum(c in ready for c in held) >= _READY:
            return
        taken = {*self._board.claimed_elsewhere(), *claimed, *self._board.rows}
        compiled = [c for c in ready if c in asked]
        # Ranks begin at different places, so that those that look at once do not want the same.
        order = dict.fromkeys([*compiled, *wanted[job.rank % job.size :: job.size], *wanted])
        if free := [c for c in order if c not in taken]:
            self._board.claim(free, most)

    def _release_unwanted(self, wanted: Collection[Candidate]) -> None:
        now = self._clock.now()
        self._unwanted = {
            c: self._unwanted.get(c, now) for c in self._board.claimed_here() if c not in wanted
        }
        if late := [c for c, since in self._unwanted.items() if now - since >= _UNWANTED_S]:
            self._board.release(late)

    def _news(self) -> Iterator[Measurement]:
        known = len(self._board.rows)
        self._board.read()
        if len(self._board.rows) > known:
            self._news_at = self._clock.now()
        self._board.find_dead()
        self._raise_if_decided()
        for candidate, m in list(self._board.rows.items()):
            if candidate not in self._told and candidate not in self._board.own:
                self._told.add(candidate)
                yield m

    def _raise_if_decided(self) -> None:
        if self._board.decision is not None:
            raise DecidedByAnotherRankError

    def _give_up(self, wanted: dict[Candidate, None]) -> Iterator[Measurement]:
        """Do without what others are late with; or, while nothing is known to run, do the first of it here."""
        late = list(wanted)
        if not self._board.works:
            for m in self._local.measure(late[:1]):
                self._timed.add(m.candidate)
                del wanted[m.candidate]
                yield m
            return
        why = f"undertaken by another rank, which did not deliver within {self._wait_s:g} s"
        for c in late:
            del wanted[c]
            self._told.add(c)
            yield Measurement(
                self._board.problem.id, c, Outcome.INFRASTRUCTURE, extra={"message": why, NOT_MEASURED: True}
            )

    def _finalists_elsewhere(self) -> list[Candidate]:
        """What others have timed and may be chosen: this rank will launch it, and perhaps time it beside others."""
        ran = sorted((m for m in self._board.rows.values() if m.ok), key=lambda m: m.ms)
        near = [m for m in ran if m.ms <= ran[0].ms * (1 + FINALIST_MARGIN)][:MAX_FINALISTS]
        return [m.candidate for m in near if m.candidate not in self._timed]

    def _compile_here(self, candidates: Sequence[Candidate]) -> None:
        """Wait for finalists that other ranks have timed: compiled one by one while timing, they take longer."""
        missing = [c for c in candidates if c not in self._timed]
        if not missing or not self._local.quiet:
            return
        self._local.prefetch(missing)
        until = self._clock.now() + self._limits.lease_s
        while self._clock.now() < until:
            going = self._local.compiling()
            if not any(c in going for c in missing):
                return
            self._clock.sleep(self._limits.poll_s)
            self._local.ready()


NOT_MEASURED = "not_measured"
"""In the extra of a measurement that stands for a missing one, and is not kept."""
