"""The libraries in a folder of their own, and the environment of a process that uses them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REQUIREMENTS = (
    "fla-core==0.6.0",
    "flash-linear-attention==0.6.0",
    "liger-kernel==0.8.5",
    "flag_gems==5.0.2",
    "einops",
    "sqlalchemy==2.0.48",
)
"""The libraries, and what they import that an environment with torch and transformers may lack."""

PACKAGE_FOLDERS = ("", "integrations", "harness", "train")
"""Folders of a checkout that hold its import packages."""


def install_libraries(site: Path, wheels: Path | None) -> Path:
    """The libraries in a folder of their own, by pip, once; from `wheels` if given. Returns the folder."""
    done = site / ".complete"
    if done.is_file():
        return site
    shutil.rmtree(site, ignore_errors=True)
    local = [] if wheels is None else ["--no-index", *map(str, sorted(wheels.glob("*.whl")))]
    what = local or list(REQUIREMENTS)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), *what]
    subprocess.run(command, check=True)
    done.touch()
    return site


def library_environment(site: Path, home: Path, checkouts: Sequence[Path]) -> dict[str, str]:
    """Variables of a process that finds the libraries in `site`, the packages of `checkouts`, and empty caches.

    Caches of the libraries lie below `home`; they tune anew in every process.
    """
    paths = [str(top / folder) for top in checkouts for folder in PACKAGE_FOLDERS if (top / folder).is_dir()]
    inherited = os.environ.get("PYTHONPATH", "")
    return {
        "PYTHONPATH": os.pathsep.join(p for p in (*paths, str(site), inherited) if p),
        "FLAGGEMS_CACHE_DIR": str(home / "flag_gems"),
        "FLA_CACHE_MODE": "disabled",
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",  # the libraries' own; thousands of lines
    }
