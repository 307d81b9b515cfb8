"""The system-call filter, run by a small machine of our own: it covers the other architecture too."""

from __future__ import annotations

import errno
import signal
import socket
import struct

import pytest

from forecast_harness.sandbox.containment import filters, linux

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
    program = filters.filter_program(machine, signal_only=None, unix_sockets=False, memfd=True)
    assert decide(program, ARCHES[machine], x86 if machine == "x86_64" else arm, argument) == expected


@pytest.mark.parametrize("machine", ARCHES)
def test_the_filter_knows_its_options(machine: str) -> None:
    arch, column = ARCHES[machine], list(ARCHES).index(machine)
    strict = filters.filter_program(machine, signal_only=77, unix_sockets=False, memfd=False, connect=False)
    loose = filters.filter_program(machine, signal_only=None, unix_sockets=True, memfd=True)
    kill, tgkill, unix, memfd = (62, 129)[column], (234, 131)[column], (41, 198)[column], (319, 279)[column]
    assert [decide(strict, arch, kill, pid) for pid in (77, 78, 0, 1)] == [ALLOWED, REFUSED, REFUSED, REFUSED]
    assert [decide(strict, arch, tgkill, pid) for pid in (77, 78)] == [ALLOWED, REFUSED]
    assert decide(strict, arch, kill, (1 << 32) - 1) == REFUSED  # -1: everybody
    assert decide(loose, arch, kill, 78) == ALLOWED
    assert (decide(strict, arch, unix, 1), decide(loose, arch, unix, 1)) == (REFUSED, ALLOWED)
    assert (decide(strict, arch, memfd), decide(loose, arch, memfd)) == (REFUSED, ALLOWED)
    connect = (42, 203)[column]
    assert (decide(strict, arch, connect), decide(loose, arch, connect)) == (REFUSED, ALLOWED)
    bound = filters.filter_program(machine, signal_only=None, unix_sockets=True, memfd=True, affinity=False)
    affinity = (203, 122)[column]
    assert (decide(bound, arch, affinity), decide(loose, arch, affinity)) == (REFUSED, ALLOWED)


@pytest.mark.parametrize("machine", ARCHES)
def test_calls_by_another_architectures_numbers_are_killed(machine: str) -> None:
    program = filters.filter_program(machine, signal_only=None, unix_sockets=True, memfd=True)
    assert decide(program, 0x40000003, 11) == KILLED  # i386, whose execve would pass for munmap
    if machine == "x86_64":
        assert decide(program, ARCHES[machine], 0x40000000 | 101) == KILLED  # x32


def test_an_unknown_machine_has_no_filter() -> None:
    with pytest.raises(OSError, match="riscv64"):
        filters.filter_program("riscv64", signal_only=None, unix_sockets=False, memfd=False)
