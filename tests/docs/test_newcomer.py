"""The README's first commands in their order, by the built wheel, in an environment without the clone.

`.ci/run` executes this, so that a newcomer's path is walked before a change lands. Seconds are printed, not asserted.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from pathlib import Path

import pytest

from tests.browser import PageVisit, chromium

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"<!-- not run: CI runs it in a clean clone -->\n```bash\n(.*?)\n```", re.DOTALL)
_INSTALLS = re.compile(r"(?:python3 -m venv|\.venv/bin/pip install)[^&]*&& ")


@pytest.mark.slow
def test_the_wheel_does_all_that_the_readme_shows(tmp_path: Path) -> None:
    replay, decision, improve = _BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), folder=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [n for n in names if n.startswith(("tests/", "benchmarks/", "docs/"))]
    # Nothing of the clone but what the commands name can be imported or read; dependencies are the suite's own.
    work = tmp_path / "work"
    shutil.copytree(ROOT / "docs" / "examples", work / "docs" / "examples")
    venv.create(work / ".venv", with_pip=False)
    (packages,) = (work / ".venv" / "lib").glob("python*/site-packages")
    (packages / "zz_dependencies.pth").write_text(sysconfig.get_path("purelib"))
    target = ("--python", str(work / ".venv" / "bin" / "python"))
    run(sys.executable, "-m", "pip", *target, "install", "-q", "--no-deps", str(wheel), folder=work)

    said = shell(replay, work)
    assert "36 of 12 kernels" in said
    regret = re.search(r"regret +([\d.]+) % geometric mean", said)
    assert regret is not None
    assert float(regret[1]) < 5.0, "the main job got worse"

    said = shell(decision, work)
    assert re.search(
        r"row_maximum  8192 .*\n +chosen +BLOCK=.*(?:.*\n)*? +because +measured \d+ of 60;", said
    )
    with chromium() as browser:
        visit = PageVisit(browser, (work / "store.html").as_uri())
        visit.tab.locator("summary").first.click()
        assert "measured" in visit.tab.inner_text("#problems tbody tr")
        assert visit.messages == []

    said = shell(improve, work)
    faster = re.search(r"norms .* ([\d.]+)x, 95 % ", said)  # on a busy machine it may not be beyond doubt
    assert faster is not None, said
    assert float(faster[1]) > 1.0
    assert (work / "improved" / "improve.html").is_file()


def shell(commands: str, folder: Path) -> str:
    """Output of a block of the README, but for what it installs; its programs are those of the environment."""
    begun = time.monotonic()
    said = run("bash", "-euo", "pipefail", "-c", _INSTALLS.sub("", commands), folder=folder)
    print(f"{time.monotonic() - begun:.0f} s: {commands.splitlines()[-1].strip()}")
    return said


def run(*command: str, folder: Path) -> str:
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("FORECAST_AUTOTUNE", "PYTHON", "TRITON"))
    }
    kept |= {"HOME": str(folder.parent), "XDG_CACHE_HOME": str(folder.parent / "cache"), "COLUMNS": "120"}
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
