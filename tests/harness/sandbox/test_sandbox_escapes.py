"""Escape attempts, at every level of containment that this machine allows."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forecast_harness.sandbox.api import ContainmentLevel, Fault, JobStatus, SandboxLane, strongest_level
from forecast_harness.sandbox.containment import confine, linux
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


# --- the filter of system calls ---


KILLED, REFUSED, ABSENT, ALLOWED = "killed", errno.EPERM, errno.ENOSYS, "allowed"
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def decide(program: bytes, arch: int, number: int, argument: int = 0) -> str | int:
    """What the kernel would answer to a call, by the rules of classic BPF."""
    data = struct.pack("=iIQ6Q", number, arch, 0, argument, 0, 0, 0, 0, 0)
    held, at = 0, 0
    code = [struct.unpack_from("=HBBI", program, i) for i in range(0, len(program), 8)]
    while True:
        op, yes, no, k = code[at]
        at += 1
        if op == 0x20:
            held = struct.unpack_from("=I", data, k)[0]
        elif op in (0x15, 0x35, 0x45):
            at += yes if {0x15: held == k, 0x35: held >= k, 0x45: bool(held & k)}[op] else no
        else:
            assert op == 0x06
            if k == 0x80000000:
                return KILLED
            return ALLOWED if k == 0x7FFF0000 else k & 0xFFFF


CALLS = {
    "read": (0, 63, 0, ALLOWED),
    "openat": (257, 56, 0, ALLOWED),
    "execve": (59, 221, 0, ALLOWED),
    "futex": (202, 98, 0, ALLOWED),
    "ioctl": (16, 29, 0, ALLOWED),
    "clone of a thread": (56, 220, 0x3D0F00, ALLOWED),
    "clone of a process": (56, 220, signal.SIGCHLD, ALLOWED),
    "clone into a user namespace": (56, 220, linux.NEW_USER | signal.SIGCHLD, REFUSED),
    "clone3": (435, 435, 0, ABSENT),
    "io_uring_setup": (425, 425, 0, ABSENT),
    "unshare": (272, 97, linux.NEW_USER, REFUSED),
    "ptrace": (101, 117, 16, KILLED),
    "process_vm_writev": (311, 271, 1, KILLED),
    "mount": (165, 40, 0, KILLED),
    "clock_settime": (227, 112, 0, KILLED),
    "a socket to the internet": (41, 198, socket.AF_INET, REFUSED),
    "a packet socket": (41, 198, 17, REFUSED),
    "a pair of sockets": (53, 199, socket.AF_UNIX, ALLOWED),
}


@pytest.mark.parametrize("machine", ARCHES)
@pytest.mark.parametrize("call", CALLS)
def test_the_filter_decides(machine: str, call: str) -> None:
    x86, arm, argument, expected = CALLS[call]
    program = confine.filter_program(machine, signal_only=None, unix_sockets=False, memfd=True)
    assert decide(program, ARCHES[machine], x86 if machine == "x86_64" else arm, argument) == expected


@pytest.mark.parametrize("machine", ARCHES)
def test_the_filter_knows_its_options(machine: str) -> None:
    arch, column = ARCHES[machine], list(ARCHES).index(machine)
    strict = confine.filter_program(machine, signal_only=77, unix_sockets=False, memfd=False, connect=False)
    loose = confine.filter_program(machine, signal_only=None, unix_sockets=True, memfd=True)
    kill, tgkill, unix, memfd = (62, 129)[column], (234, 131)[column], (41, 198)[column], (319, 279)[column]
    assert [decide(strict, arch, kill, pid) for pid in (77, 78, 0, 1)] == [ALLOWED, REFUSED, REFUSED, REFUSED]
    assert [decide(strict, arch, tgkill, pid) for pid in (77, 78)] == [ALLOWED, REFUSED]
    assert decide(strict, arch, kill, (1 << 32) - 1) == REFUSED  # -1: everybody
    assert decide(loose, arch, kill, 78) == ALLOWED
    assert (decide(strict, arch, unix, 1), decide(loose, arch, unix, 1)) == (REFUSED, ALLOWED)
    assert (decide(strict, arch, memfd), decide(loose, arch, memfd)) == (REFUSED, ALLOWED)
    connect = (42, 203)[column]
    assert (decide(strict, arch, connect), decide(loose, arch, connect)) == (REFUSED, ALLOWED)
    bound = confine.filter_program(machine, signal_only=None, unix_sockets=True, memfd=True, affinity=False)
    affinity = (203, 122)[column]
    assert (decide(bound, arch, affinity), decide(loose, arch, affinity)) == (REFUSED, ALLOWED)


@pytest.mark.parametrize("machine", ARCHES)
def test_calls_by_another_architectures_numbers_are_killed(machine: str) -> None:
    program = confine.filter_program(machine, signal_only=None, unix_sockets=True, memfd=True)
    assert decide(program, 0x40000003, 11) == KILLED  # i386, whose execve would pass for munmap
    if machine == "x86_64":
        assert decide(program, ARCHES[machine], 0x40000000 | 101) == KILLED  # x32


def test_an_unknown_machine_has_no_filter() -> None:
    with pytest.raises(OSError, match="riscv64"):
        confine.filter_program("riscv64", signal_only=None, unix_sockets=False, memfd=False)
