"""The packages of the zoo: read from `packages.toml`, fetched at their commits, packed into one archive.

A package's sources come from its public repository with `git`, its few pure Python needs with `pip`. Afterwards the
archive is all that a run takes: a machine without a network can be given it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ARCHIVE = "zoo.tar.xz"
"""The name of the archive in the folder that is fetched to."""
_HOST = "https://github.com/"
_WHEELS = "wheels"


@dataclass(frozen=True)
class Package:
    """One package; the fields are explained at the head of `packages.toml`."""

    name: str
    repository: str
    commit: str
    files: tuple[str, ...]
    roots: tuple[str, ...]
    tests: tuple[str, ...]
    scripts: tuple[str, ...] = ()
    wheels: tuple[str, ...] = ()
    binaries: dict[str, list[str]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    bare: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()
    null: dict[str, str] = field(default_factory=dict)
    weight: int = 1
    note: str = ""

    def search_path(self, top: Path) -> list[str]:
        """Folders to import from, of an archive unpacked into `top`."""
        folder = top / self.name
        return [str(path.resolve()) for path in (*(folder / root for root in self.roots), top / _WHEELS)]

    def test_files(self, top: Path) -> list[Path]:
        """Its test files and programs, sorted."""
        folder = top / self.name
        return sorted(path for glob in (*self.tests, *self.scripts) for path in folder.glob(glob))


def packages(only: Sequence[str] = ()) -> dict[str, Package]:
    """The packages by name; some of them where `only` names any. Raises `SystemExit` for a name that is none."""
    read = tomllib.loads(Path(__file__).with_name("packages.toml").read_text(encoding="utf-8"))
    result = {
        name: Package(name, **{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
        for name, fields in read.items()
    }
    if unknown := sorted(set(only) - set(result)):
        raise SystemExit(f"--only takes names of {', '.join(result)}, got {', '.join(unknown)}")
    return {name: package for name, package in result.items() if not only or name in only}


def fetch(to: Path, wanted: Sequence[Package]) -> Path:
    """Fetch packages at their commits and pack them; returns the archive. Raises `CalledProcessError` of git, pip."""
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        for package in wanted:
            _fetch_sources(package, top / package.name)
            for wheel, files in package.binaries.items():
                _fetch_binaries(wheel, files, top / package.name)
        needs = sorted({wheel for package in wanted for wheel in package.wheels})
        if needs:
            _pip("install", "--no-compile", "--target", str(top / _WHEELS), *needs)
        archive = to / ARCHIVE
        with tarfile.open(archive, "w:xz", preset=6) as tar:
            for path in sorted(top.iterdir()):
                tar.add(path, path.name)
    return archive


def unpack(archive: Path, top: Path) -> None:
    """Unpack what `fetch` packed; `archive` may be the folder that it is in."""
    with tarfile.open(archive / ARCHIVE if archive.is_dir() else archive) as tar:
        tar.extractall(top, filter="data")


def _fetch_sources(package: Package, folder: Path) -> None:
    folder.mkdir()
    git = ["git", "-C", str(folder)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "remote", "add", "origin", _HOST + package.repository], check=True)
    # Without file contents: the checkout brings those that it needs.
    fetched = ["fetch", "-q", "--depth", "1", "--filter=blob:none", "origin", package.commit]
    subprocess.run([*git, *fetched], check=True)
    paths = [f":(exclude,glob){p[1:]}" if p.startswith("-") else f":(glob){p}" for p in package.files]
    subprocess.run([*git, "checkout", "-q", "FETCH_HEAD", "--", *paths], check=True)
    shutil.rmtree(folder / ".git")


def _fetch_binaries(wheel: str, files: Sequence[str], folder: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        _pip("download", "-d", name, wheel)
        for path in Path(name).glob("*.whl"):
            with zipfile.ZipFile(path) as archive:
                for file in files:
                    archive.extract(file, folder)


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", arguments[0], "-q", "--no-deps", *arguments[1:]], check=True)
