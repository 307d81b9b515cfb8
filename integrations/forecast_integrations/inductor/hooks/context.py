"""The state that Inductor's hooks share: the session that serves torch.compile, and each thread's progress."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakValueDictionary

from forecast_integrations.inductor.choice_timing import CallTiming, CollectedCalls
from forecast_integrations.inductor.descent import ConfigsAhead, LaunchShare
from forecast_integrations.inductor.harvest import PendingTimings
from forecast_integrations.inductor.operation_search import OperationSearch
from forecast_integrations.inductor.pruning import SelectionCall
from forecast_integrations.inductor.session import TuningSession
from forecast_integrations.triton.timer.timers import IDLE_S, warm_up_cuda

if TYPE_CHECKING:
    from torch._inductor.async_compile import AsyncCompile


class ThreadState(threading.local):
    """The state of one thread. Every thread begins with an empty one."""

    def __init__(self) -> None:
        self.selections: list[SelectionCall] = []
        """The selections it is in, innermost last: a choice may be a graph with its own operations."""
        self.widened = False
        """Templates are being listed from a larger space than the user's."""
        self.pending: PendingTimings = {}
        """Results of its current round's benchmarks that no saver has taken yet."""
        self.under_way: list[OperationSearch] = []
        """Operations whose rounds have begun and not ended, innermost last: one waits, others are tuned."""
        self.call_timing: CallTiming | CollectedCalls | None = None
        """The timing under way, where another clock than Inductor's is used, or calls are timed in turns."""
        self.paused = 0
        """Above zero while times are taken of sizes other than the operation's own."""


class HookContext:
    """Made when torch.compile is enabled, handed to every hook, closed when it is disabled.

    A wrapper of one of our hooks keeps it alive after `close`: it finds no session then, and does no
    more than what it stands for.
    """

    def __init__(self, session: TuningSession | None = None) -> None:
        self.session = session
        """The session in force; None before the first one and after `close`."""
        self.preprocessing: AnyFunction | None = None
        """Our entry in Inductor's list of functions that every list of choices goes through."""
        self.feedback: AnyFunction | None = None
        """Our entry in Inductor's list of functions that hear of times."""
        self._listeners = 0
        self._lock = threading.Lock()
        self.thread = ThreadState()
        self._patches: dict[str, PatchSet] = {}
        self.descending: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """Generated kernels whose coordinate descent goes on at their next launch, by identity."""
        self.launch_share = LaunchShare()
        self._busy_at = -math.inf
        """When a device was last seen at work."""
        self._ahead: tuple[int, ConfigsAhead] | None = None
        """With the process in which it was made: workers do not answer to a forked child."""

    def key_parts(self) -> tuple[TuningSession | None, str]:
        """The session that chooses in graphs compiled by this process, and what their keys name it; '' for nothing.

        Raises what the session's `identity` raises.
        """
        from torch._inductor import compile_fx

        session = self.session
        identity = "" if session is None else session.identity()
        if getattr(getattr(compile_fx, "fx_compile_mode", None), "name", "") != "SUBPROCESS" or not identity:
            return session, identity
        assert session is not None
        session.warn_once("serve what another process compiles", "TORCHINDUCTOR_FX_COMPILE_MODE")
        # By the environment that one has a service of its own, with the environment's settings.
        is_served = os.environ.get("FORECAST_AUTOTUNE", "") not in ("", "0")
        return None, f"{identity}:elsewhere" if is_served else ""

    def configs_ahead(self, make: Callable[[], ConfigsAhead | None]) -> ConfigsAhead | None:
        """Return the queue of configs to compile ahead, made once; None where `make` has nothing."""
        if self._ahead is None or self._ahead[0] != os.getpid():
            queue = make()
            self._ahead = None if queue is None else (os.getpid(), queue)
        return None if self._ahead is None else self._ahead[1]

    def wake_device(self) -> None:
        """Bring its clock up, if it may have fallen since it was last at work. Raises what that raises."""
        if time.perf_counter() - self._busy_at > IDLE_S:
            warm_up_cuda()

    def note_busy(self) -> None:
        """A device was at work until now."""
        self._busy_at = time.perf_counter()

    def install(self, name: str, make: Callable[[HookContext], PatchSet]) -> None:
        """Put a group of hooks in place, once; `make` does it and says how to take it back."""
        if name not in self._patches:
            self._patches[name] = make(self)

    def others_choose(self) -> bool:
        """Whether a setting by names, or a function that is neither Inductor's nor ours, chooses among choices.

        All choices are made for it then, as without us: we choose among what it leaves.
        """
        from torch._inductor import config
        from torch._inductor.select_algorithm import get_algorithm_selector_cache

        settings = config.test_configs
        if any(getattr(settings, f"autotune_choice_{text}_regex", None) for text in ("name", "desc")):
            return True
        functions = get_algorithm_selector_cache().preprocessing_fns
        foreign = (f for f in functions if f is not self.preprocessing)
        return any(not getattr(f, "__module__", "").startswith("torch._inductor.") for f in foreign)

    def choose_last(self, functions: list[AnyFunction]) -> None:
        """Put our entry behind all others: a user who adds one means to see every choice, and one who clears the list
        means their own."""
        if self.preprocessing is not None and functions[-1:] != [self.preprocessing]:
            functions[:] = [*(f for f in functions if f is not self.preprocessing), self.preprocessing]

    @contextlib.contextmanager
    def feedback_entry(self, cache: Any) -> Iterator[None]:
        """Put our entry into Inductor's list of feedback savers while it times; else the list is the user's, who may
        count and clear it."""
        entry, functions = self.feedback, cache.feedback_saver_fns
        with self._lock:
            self._listeners += 1
            if entry is not None and entry not in functions:
                functions.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._listeners -= 1
                if not self._listeners:
                    functions[:] = [function for function in functions if function is not entry]

    @property
    def missing(self) -> list[str]:
        """Names that this release of torch does not have, of those that were to be hooked."""
        return [name for patches in self._patches.values() for name in patches.missing]

    def close(self) -> None:
        """Put every attribute and list that was touched back, the latest group first.

        Descents end where they are: Inductor would begin its own at the next launch, long after the first.
        """
        self.session = None
        for kernel in list(self.descending.values()):
            for launcher in kernel.launchers:
                launcher.config.found_by_coordesc = True
        self.descending.clear()
        for patches in reversed(self._patches.values()):
            patches.restore()
        self._patches.clear()


AnyFunction: TypeAlias = Callable[..., Any]
"""A function of Inductor's: its arguments and results differ from release to release."""


class PatchSet:
    """Replaced attributes, in order.

    Replacements are class-level or module-level: in torch 2.13 the configuration and the handler of
    choices are thread-local, and a backward pass is compiled in a thread of its own.
    """

    def __init__(self) -> None:
        self.missing: list[str] = []
        """Names that this release of torch does not have."""
        self._replacements: list[tuple[type | ModuleType, str, object, object]] = []
        self._entries: list[tuple[list[AnyFunction], AnyFunction]] = []

    def replace(
        self, owner: type | ModuleType, name: str, wrap: Callable[[AnyFunction], AnyFunction]
    ) -> None:
        """Put `wrap(original)` in place of an attribute of a class or module, if it has it.

        For a class method the wrapper gets the class first, as the original does.
        """
        if name not in vars(owner):
            self.missing.append(f"{getattr(owner, '__name__', owner)}.{name}")
            return
        original = vars(owner)[name]
        kind = type(original) if isinstance(original, classmethod | staticmethod) else None
        function = original if kind is None else original.__func__
        wrapper: Any = functools.wraps(function)(wrap(function))
        replacement = wrapper if kind is None else kind(wrapper)
        setattr(owner, name, replacement)
        self._replacements.append((owner, name, original, replacement))

    def append(self, entries: list[AnyFunction], entry: AnyFunction) -> None:
        """Add an entry to a foreign list."""
        entries.append(entry)
        self._entries.append((entries, entry))

    def restore(self) -> None:
        """Undo everything, the latest first. Hooks that others have put on top of ours since stay."""
        for owner, name, original, replacement in reversed(self._replacements):
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)
        for entries, entry in reversed(self._entries):
            entries[:] = [e for e in entries if e is not entry]
        self._replacements.clear()
        self._entries.clear()


def behind_wait(
    original: AnyFunction,
    context: HookContext,
    act: Callable[[TuningSession, Sequence[Any]], None],
    task: str,
) -> AnyFunction:
    """`AsyncCompile.wait`, followed by `act` on all that a module holds: its kernels, before their first launches.

    A failure of `act` costs the `task` and one warning, never the compilation.
    """

    def wait(self: AsyncCompile, scope: dict[str, Any]) -> object:
        result = original(self, scope)
        session = context.session
        if session is not None and session.prunes:
            try:
                act(session, list(scope.values()))
            except Exception as error:
                session.warn_once(task, error)
        return result

    return wait
