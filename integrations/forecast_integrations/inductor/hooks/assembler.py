"""One assembler for all processes of a compilation.

torch's compile workers assemble with the ptxas of torch's wheel, the process that times the choices with the
one of Triton's. Where these are of different releases (torch 2.11 for CUDA 13: 13.0 and 12.8), nothing that
the workers compiled is found in Triton's cache: the parent compiles every choice once more, alone and one
after the other, 0.3 to 0.4 s each instead of 0.02 s, and times other binaries than those that will run.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from forecast_autotune.settings import Mode
from forecast_integrations.inductor.hooks.context import AnyFunction, HookContext, PatchSet
from forecast_integrations.triton.problem.compilations import ASSEMBLER_VARIABLES, forget_assembler

VARIABLE = ASSEMBLER_VARIABLES[0]


class SharedAssembler(PatchSet):
    """The workers' assembler in this process, until it is restored; none where the user has named one."""

    def __init__(self) -> None:
        super().__init__()
        self._path = ""

    def share(self) -> None:
        """Do as the workers do. No assembler is named where this torch brings none, or somebody has named one."""
        from torch._inductor.runtime import compile_tasks

        choose: Any = getattr(compile_tasks, "_set_triton_ptxas_path", None)
        if choose is None:
            self.missing.append("compile_tasks._set_triton_ptxas_path")
        elif VARIABLE not in os.environ:
            getattr(choose, "cache_clear", lambda: None)()  # torch 2.9 does it once in a process
            choose()
            self._path = os.environ.get(VARIABLE, "")
        # Also where torch itself has named its own before, as it does when it compiles in this process: Triton may
        # have told the other's release by then, and its keys would be of neither.
        forget_assembler()

    def restore(self) -> None:
        """Back to Triton's own, unless somebody has named another since."""
        if self._path and os.environ.get(VARIABLE) == self._path:
            del os.environ[VARIABLE]
            forget_assembler()
        self._path = ""
        super().restore()


def install(context: HookContext) -> SharedAssembler:
    """Share the workers' assembler while the hooks are in place."""
    shared = SharedAssembler()
    shared.share()
    return shared


def install_later(context: HookContext) -> SharedAssembler:
    """Share it from the first graph on: a program that compiles none finds its kernels where they were without us."""
    from torch._inductor import compile_fx

    shared = SharedAssembler()
    share = cache(shared.share)

    def sharing(original: AnyFunction) -> AnyFunction:
        def compile_graph(*args: object, **kwargs: object) -> object:
            if context.session is not None and context.session.settings.mode is not Mode.LISTEN:
                share()
            return original(*args, **kwargs)

        return compile_graph

    shared.replace(compile_fx, "compile_fx", sharing)
    return shared
