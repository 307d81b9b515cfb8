"""Verification of a variant as a problem for the judge: drawn calls, and the base kernel as the reference."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from forecast_autotune.records import Argument, Config
from forecast_harness.sandbox.api import SandboxError
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.targets.kernels.sizes import largest_tensor
from forecast_harness.trials.configs.source_configs import work_of_a_warp
from forecast_harness.trials.variants.base_runner import (
    BaseKernelError,
    BaseKernelRun,
    BaseKernelRunner,
    TensorMemory,
    call_arguments,
    call_to_compile,
    gap_mask,
    has_nonfinite,
    memory_bytes,
    surroundings_dependence,
    tensor_view,
)
from forecast_harness.trials.variants.call_sampling import (
    HUGE_REGIME,
    CapturedCalls,
    DrawnCall,
    UserCalls,
    heuristics_of,
    unset_like,
    with_heuristics,
)
from forecast_harness.trials.variants.compilation import CompiledForms, call_form
from forecast_harness.trials.variants.kernel_survey import (
    call_source,
    launch_base,
    tensor_argument,
    widened_arguments,
)
from forecast_harness.verify.problem import (
    OUTSIDE_DOMAIN,
    CheckFinding,
    DrawSpec,
    LaunchCase,
)
from forecast_harness.verify.tolerance import compare_with_base, same_bits, widened
from forecast_harness.verify.verdict import ReasonCode

if TYPE_CHECKING:
    import torch

_OTHER_CONFIGS = 4
"""Configs of the base, about, that are tried where a variant differs from it."""
_OWN_CONFIG_WORK = 16.0
"""Times the work of a warp that the variant's own config may have more than another of the base's that is tried before
it."""
_MOST_REFUSED_DRAWS = 8
"""Draws that the base may refuse in a row."""


class ProposedCall(NamedTuple):
    """How a variant will be called, unless the base refuses what was drawn."""

    call: dict[str, Any]
    """As `compile_calls` takes it."""
    config: Config
    bytes: int
    """Held for it from now on."""
    work: float
    """The work of a warp, which tells about how long it takes to compile."""


@dataclass(frozen=True)
class _Proposal:
    """A call that was drawn and is yet to be shown to the base."""

    drawn: DrawnCall
    wanted: Config
    """The config that its sizes were drawn for."""
    config: Config
    """The config that it is launched with."""


class VariantProblem:
    """Cases of one variant; each is launched with the next of its configs."""

    def __init__(
        self,
        subject: BaseKernel,
        survey: KernelSurvey,
        reference: BaseKernelRunner,
        configs: Sequence[Config],
        device: str,
        deterministic: bool,
        takes: Collection[str],
    ) -> None:
        """`takes` are the variant's parameters."""
        self.deterministic = deterministic
        self.configs = list(configs)
        self._subject, self._survey, self._reference = subject, survey, reference
        self._device, self._takes = device, frozenset(takes)
        self._layers = heuristics_of(subject)
        self._turn = itertools.count()
        self._arguments: dict[str, tuple[Argument, ...]] = {}
        self._kept: dict[str, deque[LaunchCase]] = {}
        self._proposals: dict[tuple[int | None, str], deque[_Proposal]] = {}
        self._configs_of: dict[str, tuple[Config, Hashable]] = {}
        """By a case's label, with the part of the call that decides how it is compiled."""
        self._unfit: set[tuple[Config, Hashable]] = set()
        """Those that did not run."""
        self._latest: tuple[Config, Hashable] | None = None
        self._held: dict[int, tuple[DrawnCall, TensorMemory, BaseKernelRun]] = {}
        """Results of the base for large calls, which the source gives again."""
        self._wide: dict[int, TensorMemory | None] = {}
        self._slow = False
        """Whether the variant took long for something: what was drawn before may be too large."""
        self._differing: Config | None = None
        """Under which the base itself gave another result, the last time that it did."""
        self._compiled = CompiledForms()
        self._source = call_source(subject, survey, device)

    def open_base(self) -> None:
        """Have the base kernel's cell opened, which the first `case` would wait for."""
        self._reference.open()

    def case(self, axes: Mapping[str, Any] | None, how: DrawSpec) -> LaunchCase:
        """A fresh call. `axes` may name a `config` by its number; otherwise the next one is taken, or a kept case.

        On a device the next one gives way to another that was compiled for such a call already, where there is one:
        a verification launches many calls, and compiling each anew would take most of its time.
        """
        number = _config_number(axes)
        kept = self._kept.get(how.regime) if number is None else None
        while kept:
            case = kept.popleft()
            self._latest = self._configs_of[case.label]
            if self.fits(case) and self._latest[0] in self.configs and self._latest not in self._unfit:
                return case
        proposal = self._next_proposal(number, how.regime)
        wanted = proposal.wanted if proposal else self._next_config(number)
        drawn, outputs, known = self._draw_accepted(how, wanted, proposal.drawn if proposal else None)
        arguments = drawn.arguments
        if proposal is not None and drawn is proposal.drawn:
            config = proposal.config
        else:
            config = self._compiled_config(drawn, wanted, number)
        if number is None and self._unfit:
            fitting = (c for c in (config, *self.configs) if (c, self._form(drawn, c)) not in self._unfit)
            config = next(fitting, config)
        tensors = {n: t for n, t in drawn.memory.items() if n not in outputs}
        meta = config.parameters()
        grid = drawn.grid(meta)
        scalars = with_heuristics(drawn, self._layers, meta, self._takes)
        unchanged = _contents(tensors)
        # On a device it is worked out while the variant compiles; an interpreter would only wait for it sooner.
        ahead = None if self._device == "cpu" else self._widened(drawn, {**tensors, **outputs})

        def judge(
            given: Mapping[str, torch.Tensor], written: Sequence[torch.Tensor], *, asks_domain: bool = True
        ) -> tuple[CheckFinding, float]:
            memory, same = {**given, **outputs}, _contents(given) == unchanged
            try:
                plain = known if same else self._launch_base(drawn, memory)
            except BaseKernelError as error:
                raise SandboxError(f"the base kernel failed on {drawn.label}: {error}") from error
            given_again = self._widened if same else self._run_widened
            wide = ahead if same and self._device != "cpu" else given_again(drawn, memory)
            named = dict(zip(outputs, written, strict=True))
            return self._compare_outputs(drawn, memory, plain, wide, named, config if asks_domain else None)

        label = f"{drawn.label}, {config}"
        self._arguments[label] = arguments
        self._latest = self._configs_of[label] = config, self._form(drawn, config)
        return LaunchCase(
            label,
            call_arguments(arguments, scalars, grid, config),
            tensors,
            judge,
            outputs,
            {a.name: "offset" for a in arguments if a.kind == "tensor" and not a.aligned},
            output_bytes=memory_bytes(outputs),
            # Values of a user's own function may hang together: they are not changed one by one.
            vary=(lambda generator: tensors) if isinstance(self._source, UserCalls | CapturedCalls) else None,
            matches=lambda given, written: judge(given, written, asks_domain=False)[0] is None,
        )

    def propose(self, axes: Mapping[str, Any] | None, how: DrawSpec) -> ProposedCall:
        """Draw what `case` will give when it is next asked so, unless the base refuses it."""
        number = _config_number(axes)
        wanted = self._next_config(number)
        drawn = self._source.draw(how.regime, how.generator, wanted)
        config = self._compiled_config(drawn, wanted, number)
        proposal = _Proposal(drawn, wanted, config)
        self._proposals.setdefault((number, how.regime), deque()).append(proposal)
        call, size = self._compiled_call(drawn, config, self._takes), memory_bytes(drawn.memory)
        return ProposedCall(call, config, size, work_of_a_warp(config))

    def _next_proposal(self, number: int | None, regime: str) -> _Proposal | None:
        """The next that was drawn for such a case, and is launched with a config that can run."""
        waiting = self._proposals.get((number, regime))
        while waiting:
            proposal = waiting.popleft()
            if proposal.config in self.configs:
                return proposal
        return None

    def _next_config(self, number: int | None) -> Config:
        turn = next(self._turn)
        return self.configs[(turn if number is None else number) % len(self.configs)]

    def _compiled_config(self, drawn: DrawnCall, config: Config, number: int | None) -> Config:
        """The config to launch a call with that was drawn for this one: it is compiled for it from now on."""
        if number is None and self._device != "cpu":  # an interpreter compiles nothing
            config = self._compiled.instead_of(config, self.configs, lambda c: self._form(drawn, c))
        self._compiled.note(config, self._form(drawn, config))
        return config

    def _compiled_call(
        self, drawn: DrawnCall, config: Config, takes: Collection[str] | None = None
    ) -> dict[str, Any]:
        """A call as `compile_calls` takes it; `takes`: a variant's parameters, None for the base."""
        meta = config.parameters()
        scalars = with_heuristics(drawn, self._layers, meta, takes)
        return call_to_compile(drawn.arguments, scalars, drawn.grid(meta), config)

    def _form(self, drawn: DrawnCall, config: Config) -> Hashable | None:
        """The part of a call that decides how the variant is compiled with a config; None where it has no grid."""
        meta = config.parameters()
        if drawn.grid(meta) is None:
            return None
        return call_form(drawn.arguments, with_heuristics(drawn, self._layers, meta, self._takes))

    def keep(self, regime: str, case: LaunchCase) -> None:
        """Give this case, once, to who next asks for one of its regime and for no config."""
        self._kept.setdefault(regime, deque()).append(case)

    def config_of(self, case: LaunchCase) -> Config:
        """The config that a case of this problem is launched with."""
        return self._configs_of[case.label][0]

    def leave_out(self) -> bool:
        """Launch calls like the latest case with other configs, as a tuner does; whether one of them may run."""
        assert self._latest is not None
        self._unfit.add(self._latest)
        return not self._unfit.issuperset((c, self._latest[1]) for c in self.configs)

    def note_launch(self, case: LaunchCase, seconds: float) -> None:
        """Draw smaller calls from now on, if the variant took long for this one."""
        before = self._source.pace.most
        self._source.pace.note(self._arguments[case.label], seconds)
        self._slow = self._slow or self._source.pace.most < before

    def fits(self, case: LaunchCase) -> bool:
        """Whether a case that was drawn earlier is no larger than those that are drawn now."""
        return not self._slow or largest_tensor(self._arguments[case.label]) <= self._source.pace.most

    def _draw_accepted(
        self, how: DrawSpec, config: Config, proposed: DrawnCall | None = None
    ) -> tuple[DrawnCall, TensorMemory, BaseKernelRun]:
        """A call that the base accepts, what its outputs hold before, and all memory after the base ran.

        The one that was `proposed`, if it is accepted.

        A survey tries a few calls, and may have missed what goes wrong on one in ten. Raises `SandboxError`
        when nothing that is drawn is accepted.
        """
        for _ in range(_MOST_REFUSED_DRAWS):
            drawn = proposed or self._source.draw(how.regime, how.generator, config)
            proposed = None
            if id(drawn) in self._held:
                return self._held[id(drawn)]
            fresh = set(self._survey.writes) - set(self._survey.updates)
            outputs = {n: _initial_memory(drawn, n, n in fresh) for n in self._survey.writes}
            memory = {**drawn.memory, **outputs}
            try:
                one, two = self._launch_base(drawn, memory), self._launch_base(drawn, memory)
            except BaseKernelError as error:
                problem = str(error)
                continue
            problem = surroundings_dependence(one, two, self._survey.writes, self._device)
            if how.regime == HUGE_REGIME and has_nonfinite(drawn.arguments, one):
                # It does not handle such values, and how it does not is nothing to go by.
                how = replace(how, regime="normal")
                proposed = self._source.redraw(drawn, how.regime, how.generator)
            elif not problem:
                if not (unseen := sorted(set(one.changed) - set(outputs))):
                    if isinstance(self._source, CapturedCalls) and self._source.holds(drawn):
                        self._held[id(drawn)] = drawn, outputs, one
                    return drawn, outputs, one
                problem = f"it writes to {', '.join(unseen)}, which it never did when it was surveyed"
        raise SandboxError(f"the base kernel does not accept what is drawn: {problem} ({drawn.label})")

    def _launch_base(self, drawn: DrawnCall, memory: TensorMemory) -> BaseKernelRun:
        others = self._subject.configs
        ran = launch_base(self._reference, drawn, memory, self._survey.config, self._layers, others)
        self._source.pace.note(drawn.arguments, ran.seconds)
        return ran

    def _finding_by_configs(
        self,
        drawn: DrawnCall,
        memory: TensorMemory,
        plain: BaseKernelRun,
        wide: TensorMemory | None,
        written: Mapping[str, torch.Tensor],
        config: Config,
    ) -> float | None:
        """None where outputs that differ from the base's are wrong; else the error, or `OUTSIDE_DOMAIN`.

        The base itself may give another result under this config, or under another of its own. What is drawn may then
        be no call that it is made for, a top 16 of 5 columns, and its result says nothing. A call of the program's is
        one: there outputs must be the base's under the same config or, where that is none of its own, under one.
        """
        for group in self._other_configs(config):
            able = [c for c in group if drawn.grid(c.parameters()) is not None]
            if len(able) > 1:  # alone it is compiled as soon by its launch
                self._reference.compile_ahead([self._compiled_call(drawn, c) for c in able])
            for one in able:
                try:
                    other = launch_base(self._reference, drawn, memory, one, self._layers)
                except BaseKernelError:
                    continue
                if not self._errors(drawn, other.memory, plain, wide)[0]:
                    continue
                self._differing = one
                if not drawn.is_own:
                    return OUTSIDE_DOMAIN
                problem, error = self._errors(drawn, written, other, None)
                if not problem:
                    return error
                if one == config:
                    return None
        return None

    def _errors(
        self,
        drawn: DrawnCall,
        got: TensorMemory,
        plain: BaseKernelRun,
        wide: TensorMemory | None,
    ) -> tuple[bool, float]:
        """Whether any output is wrong, and the largest error over its limit."""
        found = [self._output_error(drawn, n, got[n], plain, wide) for n in self._survey.writes]
        return any(problem for problem, _ in found), max((error for _, error in found), default=0.0)

    def _other_configs(self, own: Config) -> list[list[Config]]:
        """Configs that the base is asked under to see whether it differs from itself, those of a group side by side.

        One that differed mostly does again, and is compiled. Next, the variant's own says most. The others come by
        how long they take to compile, as one that differs is enough: a tile that spills takes a minute, and so the own
        one waits for its turn where it is far larger than they are.
        """
        listed = self._subject.configs
        known = [] if self._differing is None else [self._differing]
        left = dict.fromkeys((own, *listed[:: max(1, len(listed) // _OTHER_CONFIGS)]))
        rest = sorted((c for c in left if c != self._survey.config and c not in known), key=work_of_a_warp)
        groups = [known]
        if own in rest and work_of_a_warp(own) <= _OWN_CONFIG_WORK * work_of_a_warp(rest[0]):
            rest.remove(own)
            groups.append([own])
        return groups + [rest[i : i + 2] for i in range(0, len(rest), 2)]

    def _output_error(
        self, drawn: DrawnCall, name: str, got: torch.Tensor, plain: BaseKernelRun, wide: TensorMemory | None
    ) -> tuple[str, float]:
        """See `compare_with_base`; of one output, whose memory is `got`."""
        argument = tensor_argument(drawn.arguments, name)
        base = tensor_view(plain.memory[name], argument)
        return compare_with_base(
            tensor_view(got, argument), base, None if wide is None else tensor_view(wide[name], argument)
        )

    def _widened(self, drawn: DrawnCall, memory: TensorMemory) -> TensorMemory | None:
        if id(drawn) not in self._held:
            return self._run_widened(drawn, memory)
        if id(drawn) not in self._wide:
            self._wide[id(drawn)] = self._run_widened(drawn, memory)
        return self._wide[id(drawn)]

    def _run_widened(self, drawn: DrawnCall, memory: TensorMemory) -> TensorMemory | None:
        arguments = widened_arguments(drawn.arguments, self._device)
        if arguments == drawn.arguments:
            return None
        wide = {n: widened(t, self._device) for n, t in memory.items()}
        try:
            return launch_base(
                self._reference,
                replace(drawn, arguments=arguments),
                wide,
                self._survey.config,
                self._layers,
            ).memory
        except BaseKernelError:
            return None  # it insists on its dtypes

    def _compare_outputs(
        self,
        drawn: DrawnCall,
        memory: TensorMemory,
        plain: BaseKernelRun,
        wide: TensorMemory | None,
        written: Mapping[str, torch.Tensor],
        config: Config | None,
    ) -> tuple[CheckFinding, float]:
        """`wide`: of `_run_widened`; `config`: under which the base is asked, too, where outputs differ; None: none."""
        worst = 0.0
        for name, flat in written.items():
            if same_bits(flat, plain.memory[name]):
                continue  # what the base itself gives is right
            argument = tensor_argument(drawn.arguments, name)
            if finding := _restore_gaps(argument, flat, plain.memory[name]):
                return finding, 0.0
            problem, ratio = self._output_error(drawn, name, flat, plain, wide)
            worst = max(worst, ratio)
            if not problem:
                continue
            if config is not None:
                error = self._finding_by_configs(drawn, memory, plain, wide, written, config)
                if error is not None:
                    return None, error
            return (ReasonCode.WRONG_VALUES, f"{name}: {problem} ({drawn.label})"), worst
        return None, worst


def _config_number(axes: Mapping[str, Any] | None) -> int | None:
    return None if axes is None else axes.get("config")


def _contents(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Equal as long as they are the same tensors, and nothing was written into them."""
    return {name: (id(t), t._version) for name, t in tensors.items()}


def _initial_memory(drawn: DrawnCall, name: str, fresh: bool) -> torch.Tensor:
    return unset_like(drawn.memory[name]) if fresh else drawn.memory[name]


def _restore_gaps(argument: Argument, got: torch.Tensor, want: torch.Tensor) -> CheckFinding:
    """The gaps between the rows of a strided tensor are nobody's to write, unless the base does."""
    free = gap_mask(argument)
    if free.any() and not same_bits(got[free], want[free]):
        return ReasonCode.OUT_OF_BOUNDS, f"wrote between the rows of {argument.name}"
    return None
