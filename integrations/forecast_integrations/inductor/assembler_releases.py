"""Which assembler torch's compile workers use, and whether its release is the one of Triton's own."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

VARIABLE = "TRITON_PTXAS_PATH"
"""Where Triton looks for an assembler first; compile workers set it for themselves."""
_VERSION_S = 5.0
"""Seconds within which an assembler has to name its release."""


def inductor_compiles_twice() -> bool:
    """Whether Inductor without us would compile each choice in a worker, and in this process once more."""
    from torch._inductor.runtime import compile_tasks

    named = os.environ.get(VARIABLE, "")
    # Up to torch 2.11 it is in torch/bin, later one folder further down.
    above = Path(compile_tasks.__file__).absolute().parents[1:3]
    return named in [str(folder / "bin" / "ptxas") for folder in above] and _releases_differ(named)


@functools.cache
def _releases_differ(path: str) -> bool:
    try:
        from triton.backends import nvidia

        bundled = str(Path(nvidia.__file__ or "").parent / "bin" / "ptxas")
        said = [
            subprocess.check_output([each, "--version"], timeout=_VERSION_S, stderr=subprocess.DEVNULL)
            for each in (path, bundled)
        ]
    except (ImportError, OSError, subprocess.SubprocessError):
        return False
    return said[0] != said[1]
