"""The path of nvcc, and its release."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

from forecast_autotune.errors import SettingsError

_WHEEL_PLACES = ("nvidia/cu*/bin/nvcc", "nvidia/cuda_nvcc/bin/nvcc")
_USUAL_PLACE = "/usr/local/cuda/bin/nvcc"
_RELEASE = re.compile(r"release ([\d.]+)")


@cache
def find_nvcc() -> str:
    """The compiler's path: in `CUDA_HOME` or `CUDA_PATH`, on `PATH`, in a wheel, or in the usual place.

    Raises `SettingsError` where there is none.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if (root := os.environ.get(name)) and _is_program(place := Path(root) / "bin" / "nvcc"):
            return str(place.absolute())
    if result := shutil.which("nvcc"):
        return str(Path(result).absolute())
    packages = Path(sysconfig.get_path("purelib"))
    wheels = [p for pattern in _WHEEL_PLACES for p in sorted(packages.glob(pattern), reverse=True)]
    for place in (*wheels, Path(_USUAL_PLACE)):
        if _is_program(place):
            return str(place)
    raise SettingsError(
        "CUDA C++ is compiled by nvcc, and there is none in CUDA_HOME or on PATH: install the CUDA toolkit, or "
        "pip install 'forecast-autotune[cuda]', and a C++ compiler for it to call"
    )


def _is_program(place: Path) -> bool:
    return place.is_file() and os.access(place, os.X_OK)


def header_roots() -> tuple[str, ...]:
    """Folders with headers of the toolkit and of the system, which everybody has."""
    toolkit = Path(find_nvcc()).parent.parent
    return str(toolkit), str(toolkit.resolve()), "/usr/local", "/usr/include", "/usr/lib/gcc"


@cache
def nvcc_release() -> str:
    """Its release, such as `13.0`; '' where it does not say. Raises `SettingsError` where there is no nvcc."""
    run = subprocess.run([find_nvcc(), "--version"], capture_output=True, text=True, check=False, timeout=60)
    result = _RELEASE.search(run.stdout)
    return result[1] if result else ""
