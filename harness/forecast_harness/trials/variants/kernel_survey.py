"""The calls that a base kernel accepts, found out by running it: see `KernelSurvey`. Runs in the judge."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Argument, Config, Device, Kernel, Problem
from forecast_autotune.variants.signature import in_size_class, pointees, signature_of
from forecast_harness.sandbox.jobs import TensorArrays
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.targets.kernels.sizes import CallSizes, SizeClass
from forecast_harness.trials.configs.source_configs import work_of_a_warp
from forecast_harness.trials.variants.base_runner import (
    BaseKernelError,
    BaseKernelRun,
    BaseKernelRunner,
    TensorMemory,
    call_to_compile,
    gap_mask,
    has_nonfinite,
    memory_bytes,
    raw_bits,
    surroundings_dependence,
)
from forecast_harness.trials.variants.call_sampling import (
    CAPTURED_VALUES,
    OTHER_SIZES,
    CallSource,
    CapturedCalls,
    DrawnCall,
    RecordedCalls,
    UserCalls,
    grid_programs,
    heuristics_of,
    index_tensors,
    scalar_value,
    unset_like,
    with_heuristics,
)
from forecast_harness.trials.variants.compilation import call_form
from forecast_harness.verify.cost_control import PhaseTimer
from forecast_harness.verify.tolerance import WIDER_DTYPE, results_agree

_CONFIGS_TRIED = 3
_CONFIG_TRIAL_DRAWS = 4
"""Calls that configs are tried on; the kernel may not accept the sizes of some."""
_ACCEPTANCE_DRAWS = 6
"""Draws that a set of classes is tried with."""
_MOST_QUIET_DRAWS = 16
"""Most draws while none made the base write anything: extents that are read from
drawn index pointers are often empty."""
_OBSERVED_CALLS = 32
"""Calls of the user's own `inputs` that are looked at."""
MULTIPLE_EVIDENCE = (3, 1)
"""Different cases in which a size must be a multiple of another to hang together with it: at first, and
where the base kernel accepts no independent sizes."""
_CHANCE_EQUAL_SIZE = 16
"""Sizes up to this are equal by chance often enough to be tried apart."""
_CAPTURED_DRAWS = 2
"""Draws that each kind of values of a captured call is tried with."""
_COVERED_SHARE = 0.99
"""Share of a written tensor that drawn sizes must have written, where the grid is a guess."""


def call_source(subject: BaseKernel, survey: KernelSurvey | None, device: str) -> CallSource:
    """The source of calls; with a survey, of calls as the survey accepted them."""
    if subject.inputs:
        return UserCalls(subject)
    result = CapturedCalls(subject, device) if subject.captured else RecordedCalls(subject, device)
    if survey is None:
        return result
    result.pace.most = survey.most
    if isinstance(result, CapturedCalls):
        result = result.with_values(survey.values)
        if not survey.words:
            return result.with_sizes(result.sizes.frozen())
    result.rows_of = survey.rows_of
    return result.with_sizes(survey.sizes(subject.calls))


@dataclass
class KernelSurveyor:
    """One survey in the making."""

    subject: BaseKernel
    reference: BaseKernelRunner
    device: str
    generator: torch.Generator
    config: Config = field(init=False)
    writes: set[str] = field(default_factory=set)
    updates: set[str] = field(default_factory=set)
    deterministic: bool = True
    _nonfinite: bool = False
    """Whether the latest result had other numbers than finite ones."""
    _wants_finite: bool = False
    _contended: bool = False
    """Whether drawn indices gave one place to several programs."""
    _is_chosen: bool = False
    """Whether a config has run: where it does not fit, another one takes its place, as a tuner leaves it out."""
    _rejections: list[str] = field(default_factory=list)
    """Why the base kernel did not accept arguments, one sentence each."""

    def __post_init__(self) -> None:
        self._layers = heuristics_of(self.subject)

    def survey(self) -> KernelSurvey:
        """Survey the kernel. Raises `RecordError` for a base kernel that accepts nothing that can be drawn."""
        source = call_source(self.subject, None, self.device)
        self._pace = source.pace
        if isinstance(source, UserCalls):
            self._choose(source)
            return self._survey_user_calls(source)
        assert isinstance(source, RecordedCalls)
        self._choose(source)
        self.compile_for(source)
        outputs = sorted(self.writes)
        if not source.is_large:
            # Its behaviour on arguments that it does not accept is nothing to go by.
            self.writes, self.updates, self.deterministic = set(), set(), True
        if isinstance(source, CapturedCalls):
            return self._survey_captured_call(source)
        source, evidence = self._accepted_calls(source, outputs)
        sizes, untied = self._freeze_chance_scalars(source)
        return KernelSurvey(
            **self._fields(),
            words={s.places[0]: s.size_class for s in sizes.sizes},
            evidence=evidence,
            untied=untied,
            most=source.pace.most,
            signature=self._signature(sizes),
            grid=str(source.formula or "as recorded"),
            rows_of=source.rows_of,
        )

    def _survey_captured_call(self, source: CapturedCalls) -> KernelSurvey:
        """The survey of a captured call: which other values it accepts, and whether other sizes, too."""
        values: list[str] = []
        for kind in source.own_values:
            if self._accepts(source.with_values((kind,)), 1 if source.is_large else _CAPTURED_DRAWS):
                values.append(kind)
            elif not values:
                raise self._refusal("its captured call")
            self._wants_finite |= kind == CAPTURED_VALUES[0] and not self._nonfinite
        self._wants_finite = False
        words: Mapping[SizeClass, str | int] | None = None
        other_calls, evidence = source.with_values((OTHER_SIZES,)), 0
        if source.sizes.varied:
            model, words, evidence = self._first_accepted(other_calls)
            other_calls = other_calls.with_sizes(model.sizes.with_classes(words or {}))
        sizes = other_calls.sizes if words is not None else source.sizes.frozen()
        if words is not None:
            values.append(OTHER_SIZES)
        return KernelSurvey(
            **self._fields(),
            words={s.places[0]: s.size_class for s in sizes.sizes} if words is not None else {},
            evidence=evidence,
            most=source.pace.most,
            signature=self._signature(sizes),
            grid=str(source.formula or "as recorded"),
            values=tuple(values),
            unvaried=self._constants(source, sizes, values),
        )

    def _constants(self, source: CapturedCalls, sizes: CallSizes, values: Sequence[str]) -> tuple[str, ...]:
        """Parts of a captured call that are the same in every launch, a phrase each."""
        results = []
        if not sizes.varied:
            results.append(
                "sizes: "
                + (
                    "no other call of its form tells which hang together"
                    if not source.sizes.varied
                    else "none that were drawn are accepted"
                )
            )
        elif constant := [p for s in sizes.sizes if not s.varies for p in s.places]:
            results.append(f"sizes {', '.join(sorted(constant))}")
        if missing := [v for v in source.own_values if v not in values]:
            results.append(f"values: {' and '.join(missing)} ones are not accepted")
        tensors = [a for a in self.subject.calls[0] if a.kind == "tensor"]
        if indices := index_tensors(tensors):
            results.append(f"integers in {', '.join(indices)} at the recorded sizes")
        contents = source.record.contents
        if absent := [
            a.name for a in tensors if a.name in contents and not contents[a.name].digest and a.shape
        ]:
            results.append(f"contents of {', '.join(absent)}, of which their distribution alone was kept")
        for group in source.record.shared:
            results.append(f"memory: {', '.join(group)} overlap in the program, and lie apart here")
        return tuple(results)

    def compile_for(self, source: CallSource, *, wide: bool = False) -> None:
        """Have the base compiled side by side for what `source` draws; `wide`: also as it is compared with."""
        if self.device != "cpu":
            wide_on = self.device if wide else ""
            self.reference.compile_ahead(
                calls_to_compile(source, self.config, self._layers, self.generator, wide_on=wide_on)
            )

    def _fields(self) -> dict[str, Any]:
        return {
            "writes": tuple(sorted(self.writes)),
            "updates": tuple(sorted(self.updates)),
            "config": self.config,
            "deterministic": self.deterministic,
        }

    def _signature(self, sizes: CallSizes) -> str:
        if sizes.varied:
            return sizes.signature(self.writes)
        owners = pointees(sizes.arguments)
        return signature_of(
            Problem("", Kernel(self.subject.kernel), sizes.arguments, Device("")),
            {owners.get(name, name) for name in self.writes},
        )

    def _survey_user_calls(self, source: UserCalls) -> KernelSurvey:
        calls = [source.draw("normal", self.generator) for _ in range(_OBSERVED_CALLS)]
        for n, call in enumerate(calls):
            if n >= _ACCEPTANCE_DRAWS and self.writes:
                break
            try:
                is_accepted = self._depends_on_arguments_alone(call, self._learn_writes(call))
            except BaseKernelError as error:
                is_accepted = False
                self._rejections.append(f"{error} ({call.label})")
            if not is_accepted:
                raise self._refusal("")
        if not self.writes:
            self._rejections.append(f"it writes to no tensor in {len(calls)} calls")
            raise self._refusal("")
        sizes = CallSizes.observed([call.arguments for call in calls])
        return KernelSurvey(
            **self._fields(), signature=sizes.signature(self.writes), grid="of inputs(random)"
        )

    def _choose(self, source: CallSource) -> None:
        """The first config that works on something that was drawn, of few programs in an interpreter, else of many.

        An interpreter runs one program after the other; a device runs them all at once, and its compiler takes
        seconds for large tiles.
        """
        sign, is_unfit = 1 if self.device == "cpu" else -1, False
        for _ in range(_CONFIG_TRIAL_DRAWS):
            call = source.draw("normal", self.generator)
            grids = [(c, call.grid(c.parameters())) for c in self.subject.configs]
            able = sorted(((c, g) for c, g in grids if g), key=lambda x: sign * grid_programs(x[1] or ()))
            if not able:
                raise RecordError(
                    "the launch grid of no config is known: "
                    + (
                        f"inputs(random) of {self.subject.file} must give it under 'grid', as numbers or as a "
                        "function of the meta-parameters that fails on none of them"
                        if self.subject.inputs
                        else "let the kernel be tuned once, or give inputs(random)"
                    )
                )
            for n, (config, _) in enumerate(able):
                if n >= _CONFIGS_TRIED and not is_unfit:
                    break
                self.config = config
                try:
                    self._learn_writes(call)
                except BaseKernelError as error:
                    is_unfit = error.of_config
                    self._rejections.append(str(error))
                    continue
                if self.writes:
                    self._is_chosen = True
                    return
            self.config = able[0][0]

    def _accepted_calls(self, source: RecordedCalls, outputs: Sequence[str]) -> tuple[RecordedCalls, int]:
        """Calls with the classes of sizes that the base accepts, and the evidence that multiples of sizes needed.

        As many sizes as possible are varied, and as freely: all to any value; else without those that look
        like a constexpr; else with those that are multiples of another taken to hang together with it; else
        to multiples of 16, then of 128; then with the smallest frozen, one after another, as those are
        likeliest to be built into the kernel. Ties that are too tight are loosened again at the end.

        Where not all sizes vary with any indices, those come first that share out rows of `outputs`, and are
        the only ones where programs contended: sizes that hide it show little.
        """
        indices = index_tensors(source.sizes.arguments)
        rows = [name for name in outputs if name not in indices][:1] if indices else []
        first = self._first_accepted(source)
        for name in rows if rows and self._contended else (*rows, ""):
            model, words, evidence = first
            if words is None and name:
                by_rows = source.with_sizes(source.sizes)
                by_rows.rows_of = name
                model, words, evidence = self._first_accepted(by_rows)
            if words is None:
                words = self._accepted_words(model)
            for size in model.sizes.varied:
                for looser in ("any", "16", "128"):
                    if words.get(size, "any") == looser:
                        break
                    if _fits_class(size, looser) and self._accept(model, {**words, size: looser}):
                        words[size] = looser
                        break
            result = model.with_sizes(model.sizes.with_classes(words))
            if result.sizes.varied or self._accepts(result):
                return result, evidence
        raise self._refusal("drawn arguments, nor random values at the recorded sizes")

    def _first_accepted(
        self, source: RecordedCalls
    ) -> tuple[RecordedCalls, dict[SizeClass, str | int] | None, int]:
        """The first model of sizes that is accepted, with its frozen sizes; else the last, and None."""
        model, evidence = source, MULTIPLE_EVIDENCE[0]
        for evidence in MULTIPLE_EVIDENCE if source.sizes.varied else ():
            model = source.with_sizes(CallSizes.of(self.subject.calls, evidence=evidence))
            near: dict[SizeClass, str | int] = {s: s.recorded for s in model.sizes.near_constants}
            for words in ({}, near) if near else ({},):
                if self._accept(model, words):
                    return model, dict(words), evidence
        return model, None, evidence

    def _freeze_chance_scalars(self, source: RecordedCalls) -> tuple[CallSizes, tuple[str, ...]]:
        """Small scalars that equal a size by chance (a group of 4, a batch of 4) keep their value instead.

        Only where the base accepts that: a number of rows that did not follow its tensor would show.
        """
        results: list[str] = []
        for size in source.sizes.varied:
            scalars = [p for p in size.places if "." not in p]
            for place in (
                scalars if size.recorded <= _CHANCE_EQUAL_SIZE and len(scalars) < len(size.places) else ()
            ):
                loose = source.with_sizes(source.sizes.untied(place))
                if self._accepts(loose):
                    source = loose
                    results.append(place)
        return source.sizes, tuple(results)

    def _accepted_words(self, source: RecordedCalls) -> dict[SizeClass, str | int]:
        """Size classes that are accepted with some size varied; all sizes frozen, where none are accepted."""
        sizes = source.sizes.varied
        words: dict[SizeClass, str | int] = {}
        for word in ("16", "128"):
            words = {s: word if _fits_class(s, word) else words.get(s, "any") for s in sizes}
            if self._accept(source, words):
                return words
        for size in sorted(sizes, key=lambda s: s.recorded):
            words[size] = size.recorded
            if any(isinstance(w, str) for w in words.values()) and self._accept(source, words):
                break
        return words

    def _accept(self, source: RecordedCalls, words: Mapping[SizeClass, str | int]) -> bool:
        sizes = source.sizes.with_classes(words)
        return bool(sizes.varied) and self._accepts(source.with_sizes(sizes))

    def _accepts(self, source: RecordedCalls, draws: int = _ACCEPTANCE_DRAWS) -> bool:
        """Whether the base takes what is drawn; its effects are then added to those of earlier calls.

        The set of calls that it takes only grows, so its writes there include those seen before.
        """
        before = set(self.writes), set(self.updates), self.deterministic
        if not source.is_large:
            self.writes, self.updates, self.deterministic = set(), set(), True
        try:
            for n in range(1, _MOST_QUIET_DRAWS + 1):
                call = source.draw("normal", self.generator)
                repeat = self._launch_as_known(call) if source.is_large else None
                observation = repeat or self._learn_writes(call)
                is_guess = bool(source.sizes.varied) and call.arguments != self.subject.calls[0]
                updates = self.updates.difference(self.subject.zeroed if source.rows_of else ())
                outputs = self.writes - updates if is_guess or source.rows_of else ()
                if not self._depends_on_arguments_alone(call, observation, outputs):
                    break
                self._nonfinite = has_nonfinite(call.arguments, observation[1])
                if self._nonfinite and self._wants_finite:
                    self._rejections.append(f"its results are not finite ({call.label})")
                    break
                if n >= draws and self.writes:
                    self.writes |= before[0]
                    self.updates |= before[1]
                    self.deterministic &= before[2]
                    return True
            else:
                self._rejections.append(f"it writes to no tensor in {_MOST_QUIET_DRAWS} calls ({call.label})")
        except (BaseKernelError, RecordError) as error:
            self._rejections.append(str(error))
        self.writes, self.updates, self.deterministic = before
        return False

    def _launch_as_known(self, call: DrawnCall) -> tuple[set[str], BaseKernelRun] | None:
        """The result of `_learn_writes` where the call writes to the known tensors alone; else None."""
        if self.writes and set((run := self.launch(call, self.initial(call))).changed) == self.writes:
            return self.writes - self.updates, run
        return None

    def _learn_writes(self, call: DrawnCall) -> tuple[set[str], BaseKernelRun]:
        """Learn which tensors are written, and whose earlier contents matter. Raises `BaseKernelError`.

        Returns the tensors that held NaN before the last launch that showed it, and that launch.
        """
        first = self.launch(call, call.memory)
        if not first.changed:
            # A captured output may hold the result already, of an earlier call.
            for name in [n for n, memory in call.memory.items() if memory.is_floating_point()]:
                unset = {**call.memory, name: unset_like(call.memory[name])}
                if name in (unset_run := self.launch(call, unset)).changed:
                    call.memory[name].copy_(unset[name])
                    first = unset_run
        result = set[str](), first
        self.writes |= set(first.changed)
        for name in first.changed:
            if name in self.updates or name in self.subject.zeroed:
                self.updates.add(name)
                continue
            if not call.memory[name].is_floating_point():
                # A counter or a lock may be among them: integers keep what they are given.
                self.updates.add(name)
                continue
            other_run = self.launch(call, {**call.memory, name: unset_like(call.memory[name])})
            result = {name}, other_run
            fresh = ~other_run.memory[name].isnan()
            own = torch.where(fresh, raw_bits(other_run.memory[name]), raw_bits(call.memory[name]))
            if not torch.equal(raw_bits(first.memory[name]), own) and not (
                fresh.all() and results_agree(first.memory[name], other_run.memory[name])
            ):
                self.updates.add(name)
        return result

    def _depends_on_arguments_alone(
        self, call: DrawnCall, before: tuple[set[str], BaseKernelRun], outputs: Collection[str] = ()
    ) -> bool:
        """Whether the base's result depends on its arguments alone, and lies where it belongs.

        `before`: of `_learn_writes` for this call; its launch may be compared here. `outputs`: it must fill these.
        """
        memory = self.initial(call)
        unset, first = before
        if unset != self.writes - self.updates:
            first = self.launch(call, memory)
        second = self.launch(call, memory)
        problem = surroundings_dependence(first, second, self.writes, self.device)
        if not problem and (problem := order_dependence(self.launch, call, first, self.updates)):
            self._contended = True
        for name in outputs if not problem else ():
            values = first.memory[name][~gap_mask(tensor_argument(call.arguments, name))]
            missing = values == 0 if name in self.updates else values.isnan()
            missing_share = float(missing.double().mean()) if values.numel() else 0.0
            if missing_share > 1 - _COVERED_SHARE:
                problem = f"{missing_share:.0%} of {name} stays unwritten on a guessed grid"
        if problem:
            self._rejections.append(f"{problem} ({call.label})")
            return False
        if any(not torch.equal(raw_bits(first.memory[n]), raw_bits(second.memory[n])) for n in self.writes):
            self.deterministic = False
        return True

    def initial(self, call: DrawnCall) -> TensorMemory:
        """The memory with NaN in all that the base writes without reading."""
        fresh = self.writes - self.updates
        return {n: unset_like(t) if n in fresh else t for n, t in call.memory.items()}

    def launch(self, call: DrawnCall, memory: TensorMemory) -> BaseKernelRun:
        """Run the base with its chosen config. Raises `BaseKernelError`."""
        others = self.subject.configs if self._is_chosen else ()
        run = launch_base(self.reference, call, memory, self.config, self._layers, others)
        self._pace.note(call.arguments, run.seconds)
        return run

    def _refusal(self, what: str) -> RecordError:
        """`what` was drawn; calls of the user's own are theirs to mend."""
        problem = "; ".join(
            dict.fromkeys(text[:300] for text in (*self._rejections[:1], *self._rejections[-1:]))
        )
        where = " in Triton's interpreter" if self.device == "cpu" else ""
        if self.subject.inputs:
            return RecordError(
                f"{self.subject.kernel} does not run{where} on what inputs(random) of {self.subject.file} "
                f"gives: {problem}"
            )
        return RecordError(
            f"{self.subject.kernel} does not accept {what}{where}: {problem}. Define in the kernel's file a "
            "function inputs(random) that returns the arguments of one call by name (tensors on the CPU), "
            'and under "grid" what it is launched with; sizes and values should differ from call to call'
        )


def launch_base(
    reference: BaseKernelRunner,
    call: DrawnCall,
    memory: TensorMemory,
    config: Config,
    layers: Sequence[Mapping[str, Any]],
    others: Sequence[Config] = (),
) -> BaseKernelRun:
    """Run the base kernel with a config; where that does not fit, with the lightest of `others` that does.

    Raises `BaseKernelError` for the first one.
    """
    first: BaseKernelError | None = None
    for candidate in (config, *sorted((c for c in others if c != config), key=work_of_a_warp)):
        meta = candidate.parameters()
        scalars, grid = with_heuristics(call, layers, meta), call.grid(meta)
        form = candidate, call_form(call.arguments, scalars)
        try:
            if grid is None:
                raise BaseKernelError(f"the launch grid of {candidate} is not known")
            if form in reference.unable:
                raise reference.unable[form]
            return reference.run(call.arguments, scalars, memory, grid, candidate)
        except BaseKernelError as error:
            first = first or error
            if not error.of_config:
                break
            if grid is not None:
                reference.unable[form] = error
    assert first is not None
    raise first


def order_dependence(
    launch: Callable[..., BaseKernelRun], call: DrawnCall, first: BaseKernelRun, updates: Collection[str]
) -> str:
    """Why chance decides what the base leaves of drawn indices; empty if it does not. Raises `BaseKernelError`.

    Programs of one place, as of segments that overlap, race on a device, mostly with one end. Here the first half of
    each axis comes last: it is launched over what all left. Atomic sums are as right in any order; locks are let be.
    """
    indices = index_tensors(call.arguments)
    if call.is_own or not indices or not set(indices).isdisjoint(first.changed):
        return ""
    half = replace(call, grid=lambda meta: (full := call.grid(meta)) and tuple(-(-n // 2) for n in full))
    again = launch(half, first.memory).memory
    names = {n for n in first.changed if not results_agree(first.memory[n], again[n])}
    if sums := names.intersection(updates):
        again = launch(call, first.memory).memory
        names -= {n for n in sums if not results_agree(first.memory[n], again[n])}
    return f"programs write different results to one place of {min(names)}" if names else ""


def survey_kernel(
    work: Any, subject: BaseKernel, device: str, seed: int
) -> tuple[KernelSurvey, TensorArrays, dict[str, float]]:
    """Survey a base kernel in a cell of this work.

    Also its binaries for verifications to come, see `BaseBinaries`, and the seconds of the steps.
    """
    reference, steps = BaseKernelRunner(work, device, random.Random(seed)), PhaseTimer()
    try:
        surveyor = KernelSurveyor(subject, reference, device, torch.Generator().manual_seed(seed))
        with steps.phase("launches"):
            result = surveyor.survey()
        with steps.phase("binaries"):
            surveyor.compile_for(call_source(subject, result, device), wide=True)
            binaries = reference.compiled()
        return result, binaries, steps.to_json()
    finally:
        reference.close()


def _fits_class(size: SizeClass, word: str) -> bool:
    return in_size_class(size.recorded, word)


def tensor_argument(arguments: Sequence[Argument], name: str) -> Argument:
    """The argument of this name."""
    return next(a for a in arguments if a.name == name)


_ARGUMENT_DRAWS, _CALL_DRAWS = 40, 24
"""Draws among which forms are looked for: of sizes alone, and of calls with values, which take longer."""
_FEWEST_CALL_DRAWS, _MOST_DRAWN_BYTES = 6, 64 << 20
"""No more calls with values than the first number are drawn once their tensors have taken so much."""
_MOST_CALLS = 24


def calls_to_compile(
    source: CallSource,
    config: Config,
    layers: Sequence[Mapping[str, Any]],
    generator: torch.Generator,
    *,
    wide_on: str = "",
) -> list[dict[str, Any]]:
    """Calls as `compile_calls` takes them, one for each form; with `wide_on` a device, in its wider dtype, too.

    Where there are many, those that are drawn most often.
    """
    results: dict[Hashable, dict[str, Any]] = {}
    counts = Counter[Hashable]()
    for arguments, scalars, grid in _draw_calls(source, config, layers, generator):
        for typed_arguments in (arguments, *([widened_arguments(arguments, wide_on)] if wide_on else [])):
            form = call_form(typed_arguments, scalars)
            counts[form] += 1
            results.setdefault(form, call_to_compile(typed_arguments, scalars, grid, config))
    return [results[form] for form, _ in counts.most_common(_MOST_CALLS)]


def widened_arguments(arguments: Sequence[Argument], device: str) -> tuple[Argument, ...]:
    """The same arguments, with every floating tensor in the dtype of comparisons on this device."""
    wide = WIDER_DTYPE[device]
    if pointees(arguments):  # the kernel says what its addresses are of
        return tuple(arguments)

    def widened(a: Argument) -> Argument:
        dtype = getattr(torch, a.dtype)
        narrow = dtype.is_floating_point and dtype.itemsize < wide.itemsize
        return replace(a, dtype=str(wide).removeprefix("torch.")) if narrow else a

    return tuple(widened(a) if a.kind == "tensor" else a for a in arguments)


def _draw_calls(
    source: CallSource, config: Config, layers: Sequence[Mapping[str, Any]], generator: torch.Generator
) -> list[tuple[Sequence[Argument], Mapping[str, Any], Sequence[int]]]:
    """Arguments, scalars and grids of calls that may come."""
    results: list[tuple[Sequence[Argument], Mapping[str, Any], Sequence[int]]] = []
    meta = config.parameters()
    try:
        if isinstance(source, RecordedCalls) and not layers:
            own = source.with_sizes(source.sizes)  # its turns are for launches
            for _ in range(_ARGUMENT_DRAWS):
                arguments = own.draw_arguments(generator)
                scalars = {a.name: scalar_value(a) for a in arguments if a.kind != "tensor"}
                if (grid := own.grid_of(arguments, meta)) is not None:
                    results.append((arguments, scalars, grid))
            return results
        size = 0
        for number in range(_CALL_DRAWS):
            if number >= _FEWEST_CALL_DRAWS and size > _MOST_DRAWN_BYTES:
                break
            call = source.draw("normal", generator)
            size += memory_bytes(call.memory)
            if (grid := call.grid(meta)) is not None:
                results.append((call.arguments, with_heuristics(call, layers, meta), grid))
    except RecordError:
        return results  # a launch will raise it again
    return results
