"""Tasks of a developer: `nox -l` lists them, `nox` runs the fast suite and lint.

Every session has an environment of its own below `.nox/`, which `-r` uses again; a `.venv` is never touched.
"""

from __future__ import annotations

import nox

nox.needs_version = ">=2024.10"
nox.options.sessions = ["fast", "lint"]
nox.options.default_venv_backend = "venv"
nox.options.error_on_external_run = True

CPU_WHEELS = "https://download.pytorch.org/whl/cpu"


@nox.session
def fast(session: nox.Session) -> None:
    """The suite without extras, in seconds; arguments go to pytest."""
    session.install("-e", ".", "pytest>=8", "hypothesis>=6")
    session.run("pytest", "-q", "-m", "fast", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The usual suite with all that it needs; arguments go to pytest."""
    session.install("-e", ".[test]")
    session.run("pytest", "-n", "3", "--dist", "loadfile", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """Tests of more than ten seconds, and like cases beyond samples; arguments go to pytest."""
    session.install("-e", ".[test]")
    session.run("pytest", "-n", "3", "--dist", "loadfile", "-m", "slow", *session.posargs)


@nox.session
def versions(session: nox.Session) -> None:
    """The usual suite with other versions: `nox -s versions -- TORCH TRITON`, as in 2.9 3.4."""
    if len(session.posargs) != 2:
        session.error("name two versions, torch's and Triton's, as in: nox -s versions -- 2.9 3.4")
    torch, triton = session.posargs
    # torch's own index has builds without CUDA, which do not pin a Triton.
    session.install(f"torch=={torch}.*", "--index-url", CPU_WHEELS)
    session.install("-e", ".[suite]", f"torch=={torch}.*", f"triton=={triton}.*")
    session.run("pytest", "-n", "3", "--dist", "loadfile")


@nox.session
def lint(session: nox.Session) -> None:
    """Lint, format, types and import contracts."""
    session.install("-e", ".[lint]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site, strictly; `nox -s docs -- serve` shows it instead."""
    session.install("-e", ".[docs]")
    if session.posargs:
        session.run("mkdocs", *session.posargs)
    else:
        session.run("mkdocs", "build", "--strict")


@nox.session
def bench_check(session: nox.Session) -> None:
    """Every figure that is shown has a claim, every claim a result; and the claims that are stale."""
    session.install("-e", ".")
    session.run("python", "-m", "benchmarks", "check")
    session.run("python", "-m", "benchmarks", "stale")


@nox.session
def coverage(session: nox.Session) -> None:
    """Share of lines and branches that the suite runs; arguments go to pytest."""
    session.install("-e", ".[test]", "coverage[toml]>=7.6")
    session.run("coverage", "run", "-m", "pytest", "-q", *session.posargs)
    session.run("coverage", "combine")
    session.run("coverage", "report")
