"""Escape attempts, at every level of containment that this machine allows."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forecast_harness.sandbox.api import ContainmentLevel, Fault, JobStatus, SandboxLane, strongest_level
from tests.harness.lanes import SMALL, judge, lane, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
TOKEN = "token-" + secrets.token_hex(8)


@pytest.fixture(scope="module", params=list(ContainmentLevel), ids=lambda level: level.name)
def at_level(request: pytest.FixtureRequest) -> Iterator[SandboxLane]:
    level: ContainmentLevel = request.param
    if level > strongest_level():
        pytest.skip(f"this machine allows no more than {strongest_level().name}")
    os.environ["A_SECRET_TOKEN"] = TOKEN
    with lane(level) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the user's in which anybody may write, so that only containment protects it."""
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o777)
    (tmp_path / "victim").write_text(f"unchanged, and secret: {TOKEN}")
    (tmp_path / "victim").chmod(0o666)
    return tmp_path


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of the same user, with the secret in its environment."""
    process = subprocess.Popen(["sleep", "300"], env={"A_SECRET_TOKEN": TOKEN, "PATH": os.environ["PATH"]})
    yield process
    process.kill()
    process.wait()


def need(opened: SandboxLane, level: ContainmentLevel) -> None:
    if opened.level < level:
        pytest.skip(f"{opened.level.name} does not contain this, as its table says")


def test_the_own_environment_holds_no_secret(at_level: SandboxLane) -> None:
    result = run(at_level, "looks_for_secrets", TOKEN, "/nonexistent")
    assert result.status is JobStatus.OK
    assert not [matches for matches in result.value["returned"] if matches.startswith("variable")]


def test_secrets_elsewhere_stay_secret(
    at_level: SandboxLane, folder: Path, bystander: subprocess.Popen[bytes]
) -> None:
    need(at_level, ContainmentLevel.FILES)
    result = run(at_level, "looks_for_secrets", TOKEN, str(folder))
    assert (result.status, result.value["returned"]) == (JobStatus.OK, [])


def test_the_search_for_secrets_would_find_them(folder: Path, bystander: subprocess.Popen[bytes]) -> None:
    """A positive control: without a sandbox the same function finds all three."""
    script = (
        "import sys; sys.path[:0] = sys.argv[1:2]\n"
        "from tests.harness.attacks import looks_for_secrets as look\n"
        "print(len(look(*sys.argv[2:])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parents[3]), TOKEN, str(folder)],
        env={**os.environ, "A_SECRET_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) >= 3


def test_nothing_outside_can_be_written(at_level: SandboxLane, folder: Path) -> None:
    need(at_level, ContainmentLevel.FILES)
    result = run(at_level, "writes_outside", str(folder))
    assert (result.status, result.value["returned"]) == (JobStatus.OK, [])
    assert [p.name for p in folder.iterdir()] == ["victim"]
    assert (folder / "victim").read_text().startswith("unchanged")


def test_no_socket_reaches_anybody(at_level: SandboxLane, tmp_path: Path) -> None:
    need(at_level, ContainmentLevel.SYSCALLS)
    name, path = f"forecast-{secrets.token_hex(4)}", Path("/tmp", f"forecast-{secrets.token_hex(4)}")
    with (
        socket.create_server(("127.0.0.1", 0)) as inet,
        socket.socket(socket.AF_UNIX) as local,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        local.bind(str(path))
        path.chmod(0o777)
        abstract.bind(b"\0" + name.encode())
        local.listen()
        abstract.listen()
        try:
            result = run(at_level, "opens_sockets", inet.getsockname()[1], str(path), name)
        finally:
            path.unlink()
    assert (result.status, result.value["returned"]) == (JobStatus.OK, [])


def test_no_other_process_can_be_killed(at_level: SandboxLane, bystander: subprocess.Popen[bytes]) -> None:
    need(at_level, ContainmentLevel.SYSCALLS)
    result = run(at_level, "signals_others", [bystander.pid, at_level.server_pid])
    assert (result.status, result.value["returned"]) == (JobStatus.OK, [])
    assert bystander.poll() is None
    assert at_level.restarts == 0


def test_tracing_is_an_attack(at_level: SandboxLane, bystander: subprocess.Popen[bytes]) -> None:
    need(at_level, ContainmentLevel.SYSCALLS)
    result = run(at_level, "traces", bystander.pid)
    assert (result.status, result.fault) == (JobStatus.SUSPICIOUS, Fault.FORBIDDEN_CALL)
    assert result.canary == "ok"


def test_the_memory_of_the_server_cannot_be_read(at_level: SandboxLane) -> None:
    """Not even by a process of the same user at the weakest level, unless it kept a privilege."""
    result = run(at_level, "reads_memory", at_level.server_pid)
    assert (result.status, result.value["returned"]) == (JobStatus.OK, [])


def test_patched_clocks_change_no_time(at_level: SandboxLane) -> None:
    result = judge(at_level, "compare", "patches_clocks")
    assert result.status is JobStatus.OK
    assert result.value["correct"]
    assert min(result.value["seconds"]) >= 0.4


FORGERIES = {
    "forges_the_result": Fault.FORGED,
    "sends_nonsense": Fault.FORGED,
    "promises_much": Fault.FORGED,
    "nests_deeply": Fault.FORGED,
    "answers_early": Fault.FORGED,
}


@pytest.mark.parametrize("function", FORGERIES)
def test_forged_answers_are_noticed(at_level: SandboxLane, function: str) -> None:
    result = judge(at_level, "compare", function)
    assert (result.status, result.fault) == (JobStatus.SUSPICIOUS, FORGERIES[function])
    assert result.value is None


@pytest.mark.parametrize("function", ["steals_the_number", "breaks_the_encoder", "hunts_for_the_answer"])
def test_no_answer_is_right_without_the_work(at_level: SandboxLane, function: str) -> None:
    """The number of a question lets a candidate say what it likes, and nothing that it says is believed."""
    result = judge(at_level, "compare", function)
    assert result.status in (JobStatus.OK, JobStatus.SUSPICIOUS, JobStatus.CANDIDATE_ERROR)
    assert result.value is None or result.value["correct"] is False


def test_an_honest_candidate_passes(at_level: SandboxLane) -> None:
    result = judge(at_level, "compare", "honest")
    assert (result.status, result.fault, result.is_label) == (JobStatus.OK, Fault.NONE, True)
    assert result.value["correct"]


def test_the_judge_never_loads_the_candidate(at_level: SandboxLane) -> None:
    result = judge(at_level, "loaded")
    assert (result.status, result.value) == (JobStatus.OK, [])


def test_a_daemon_does_not_outlive_its_job(at_level: SandboxLane) -> None:
    mark = secrets.token_hex(6)
    result = run(at_level, "leaves_a_daemon", mark)
    assert result.value["returned"] == "left"
    names = [p.read_text() for p in Path("/proc").glob("[0-9]*/comm") if p.exists()]
    assert mark not in "".join(names)


def test_killing_the_server_costs_a_job_and_no_lane() -> None:
    """What a candidate at the weakest level can do, done from outside."""
    with lane(ContainmentLevel.PROCESS) as opened:
        os.kill(opened.server_pid, signal.SIGKILL)
        first, second = run(opened, "honest"), run(opened, "honest")
    assert (first.status, first.fault, first.is_label) == (JobStatus.INFRA_ERROR, Fault.SERVER_LOST, False)
    assert second.status is JobStatus.OK
    assert opened.restarts == 1


@pytest.mark.parametrize("level", [ContainmentLevel.PROCESS, ContainmentLevel.SYSCALLS])
def test_cells_of_root_have_users_of_their_own(level: ContainmentLevel, tmp_path: Path) -> None:
    """The harness itself, which root may write, is no exception."""
    with lane(level) as opened:
        if not opened.apart:
            pytest.skip("not root, or an interpreter that other users may not read")
        for parent in (tmp_path, *tmp_path.parents[:2]):
            parent.chmod(0o755)
        (tmp_path / "victim").write_text("unchanged")
        tried = [run(opened, "trespasses", str(tmp_path / "victim")).value["returned"] for _ in range(2)]
        hung = run(opened, "hangs", limits=replace(SMALL, wall_s=1))
        after = run(opened, "honest")
    assert (tmp_path / "victim").read_text() == "unchanged"
    assert [(t["write"], t["signal"]) for t in tried] == 2 * [("PermissionError", "PermissionError")]
    assert len({0, *(t["user"] for t in tried)}) == 3
    assert hung.fault is Fault.TIMEOUT  # who has another user can be killed all the same
    assert after.status is JobStatus.OK
