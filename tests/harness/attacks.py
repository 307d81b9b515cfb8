"""Candidates that misbehave, one function each. Given to lanes as text; no test ever calls them here.

A function returns what it managed to do (an empty list: nothing), or never returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path


def honest(x=20):
    return 2 * x


def raises():
    raise ValueError("no \x1b[31m colour")


def recurses():
    return recurses()


def crashes():
    ctypes.string_at(0)


def aborts():
    os.abort()


def leaves():
    os._exit(3)


def leaves_as_if_done():
    os._exit(0)


def says_exit():
    sys.exit(0)


def hangs():
    while True:
        time.sleep(60)


def hangs_deaf():
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    os.close(3)
    hangs()


def stops_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def kills_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def spins():
    while True:
        pass


def takes_memory():
    return len(bytearray(1 << 30))


def takes_memory_in_parts():
    """Each process stays below the limit, together they do not; POSIX shared memory counts too."""
    for _ in range(6):
        if os.fork() == 0:
            kept = bytearray(os.urandom(1 << 20)) * 60
            time.sleep(60 + len(kept) * 0)
    time.sleep(60)


def forks_without_end():
    made = 0
    while made < 400:
        try:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            made += 1
        except OSError:
            break
    time.sleep(1)
    return made


def threads_without_end():
    made = 0
    while made < 400:
        try:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            made += 1
        except RuntimeError:
            break
    time.sleep(1)
    return made


def floods_streams():
    for _ in range(1000):
        os.write(1, b"x" * 65536)
        os.write(2, b"y" * 65536)
    os.write(2, b"\x1b]0;title\x07the last words")
    return "wrote"


def floods_disk():
    """How many bytes could be written into scratch, in files of 1 MiB and one large file."""
    written = 0
    for i in range(64):
        try:
            Path(f"tmp/{i}").write_bytes(b"x" * (1 << 20))
            written += 1 << 20
        except OSError:
            break
    with contextlib.suppress(OSError), Path("tmp/one").open("wb") as file:
        for _ in range(64):
            written += file.write(b"x" * (1 << 20))
    time.sleep(1.5)
    return written


def leaves_a_daemon(mark):
    """A process in a session of its own, orphaned twice, that touches nothing and waits."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(15, mark.encode(), 0, 0, 0)  # its name, to be found by
            for fd in range(64):
                with contextlib.suppress(OSError):
                    os.close(fd)
            time.sleep(300)
        os._exit(0)
    time.sleep(0.1)
    return "left"


def watches_itself():
    """A thread and a child of a child that note the longest time during which they were kept from running."""

    def note(name):
        before = time.monotonic()
        longest = 0.0
        while True:
            time.sleep(0.001)
            now = time.monotonic()
            longest, before = max(longest, now - before), now
            Path(f"tmp/{name}.new").write_text(str(longest))
            Path(f"tmp/{name}.new").rename(f"tmp/{name}")

    threading.Thread(target=note, args=("thread",), daemon=True).start()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note("child")
        os._exit(0)
    time.sleep(0.2)


def longest_pauses():
    time.sleep(0.3)
    return [float(Path(f"tmp/{name}").read_text()) for name in ("thread", "child")]


def looks_for_secrets(token, folder):
    """Where the token can be read: own environment, other processes' environments, files."""
    found = [f"variable {name}" for name, value in os.environ.items() if token in value]
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if place.name.isdigit() and token.encode() in (place / "environ").read_bytes():
                found.append(str(place / "environ"))
    with contextlib.suppress(OSError):
        found += [str(p) for p in Path(folder).iterdir() if token in p.read_text()]
    return found


def writes_outside(folder):
    """What could be done to files elsewhere."""
    done = []
    victim = Path(folder, "victim")
    link = Path("tmp/link")
    link.symlink_to(victim)
    for name, act in {
        "write": lambda: victim.write_text("changed"),
        "append": lambda: victim.open("a").write("changed"),
        "create": lambda: Path(folder, "new").write_text("new"),
        "delete": victim.unlink,
        "rename": lambda: victim.rename(Path(folder, "renamed")),
        "through a link": lambda: link.write_text("changed"),
        "own files": lambda: Path("files/attacks.py").write_text("changed"),
        "interpreter": lambda: Path(os.__file__).open("a").close(),
        "truncate": lambda: os.truncate(victim, 0),
    }.items():
        with contextlib.suppress(OSError):
            act()
            done.append(name)
    return done


def opens_sockets(port, path, abstract):
    """Which ways out there are: `port` and the two local sockets have a listener outside."""
    done = []
    for family, kind, address in (
        (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port)),
        (socket.AF_INET6, socket.SOCK_STREAM, ("::1", port)),
        (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", port)),
        (socket.AF_UNIX, socket.SOCK_STREAM, path),
        (socket.AF_UNIX, socket.SOCK_STREAM, b"\0" + abstract.encode()),
    ):
        with contextlib.suppress(OSError), socket.socket(family, kind) as made:
            made.settimeout(2)
            made.connect(address)
            done.append(f"{family.name} {kind.name} {address}")
    for family in (socket.AF_NETLINK, socket.AF_PACKET):
        with contextlib.suppress(OSError):
            socket.socket(family, socket.SOCK_RAW).close()
            done.append(family.name)
    return done


def signals_others(pids):
    """Which of these processes of the user could be killed."""
    done = []
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            done.append(f"kill {pid}")
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL)
            done.append(f"pidfd {pid}")
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(ctypes.c_long(234), pid, pid, int(signal.SIGKILL)) == 0:  # tgkill, x86_64
            done.append(f"tgkill {pid}")
    return done


def traces(pid):
    ctypes.CDLL(None).ptrace(16, pid, 0, 0)  # PTRACE_ATTACH
    return "traced"


def reads_memory(pid):
    """Whether another process's memory opens as a file."""
    done = []
    for name in ("mem", "maps", "environ", "fd/3", "root/etc/passwd"):
        with contextlib.suppress(OSError):
            with Path(f"/proc/{pid}/{name}").open("rb") as file:
                file.read(1)
            done.append(name)
    return done


def patches_clocks(x=20):
    """Every clock of this process stands still; then it takes its time."""
    wait = time.sleep
    for name in ("time", "perf_counter", "monotonic", "perf_counter_ns", "process_time"):
        setattr(time, name, lambda: 0)
    wait(0.4)
    return 2 * x


def forges_the_result(x=20):
    """Claim success to every descriptor in every format it knows, then leave as if done."""
    said = {"fault": "", "value": {"correct": True}, "detail": "", "nonce": "", "event": "end", "code": 0}
    for wrapped in (said, {"value": said, "arrays": []}, {"nonce": "", "value": said}):
        text = json.dumps(wrapped).encode()
        for frame in (b"FAT1" + struct.pack(">I", len(text)) + text, text + b"\n", text):
            for fd in range(256):
                with contextlib.suppress(OSError):
                    os.write(fd, frame)
    os._exit(0)


def steals_the_number(x=20):
    """Find the question's number in memory and answer with a claim, before the work is done."""
    for thing in gc.get_objects():
        if isinstance(thing, dict) and "nonce" in thing and "entry" in thing:
            text = json.dumps(
                {"value": {"nonce": thing["nonce"], "value": True, "correct": True}, "arrays": []}
            ).encode()
            os.write(3, b"FAT1" + struct.pack(">I", len(text)) + text)
            os._exit(0)
    return 0


def hunts_for_the_answer(x=20):
    """Any integer that could be the expected one, anywhere in this process's objects."""
    wanted = 1 << 61
    for thing in gc.get_objects():
        values = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list) else ()
        for value in list(values):
            if isinstance(value, int) and value > wanted:
                return value
    return 0


def sends_nonsense(x=20):
    os.write(3, b"\xff" * 4096)
    time.sleep(30)


def promises_much(x=20):
    """A header that announces an array beyond any limit."""
    text = json.dumps(
        {"value": {"nonce": ""}, "arrays": [["a", "float64", [1 << 40]]]},
    ).encode()
    os.write(3, b"FAT1" + struct.pack(">I", len(text)) + text)
    time.sleep(30)


def nests_deeply(x=20):
    text = b'{"value": ' + b"[" * 500_000 + b"]" * 500_000 + b', "arrays": []}'
    with socket.socket(fileno=os.dup(3)) as channel:
        channel.sendall(b"FAT1" + struct.pack(">I", len(text)) + text)
    time.sleep(30)


def answers_early(x=20):
    """Leave a thread that answers questions which have not been asked."""
    text = json.dumps({"value": {"nonce": "", "value": 2 * x}, "arrays": []}).encode()
    frame = b"FAT1" + struct.pack(">I", len(text)) + text

    def later():
        time.sleep(0.02)
        os.write(3, frame)

    threading.Thread(target=later, daemon=True).start()
    return 2 * x


def breaks_the_encoder(x=20):
    json.dumps = lambda *a, **k: '{"value": {"correct": true}, "arrays": []}'
    return 2 * x


def trespasses(victim):
    """Who it is, and what comes of writing a file and of signalling the process above it."""
    found = {"user": os.getuid()}
    for name, act in (
        ("write", lambda: Path(victim).write_text("changed")),
        ("signal", lambda: os.kill(os.getppid(), 0)),
    ):
        try:
            act()
            found[name] = "done"
        except OSError as error:
            found[name] = type(error).__name__
    return found


def returns_late(seconds):
    time.sleep(seconds)
    return "late"


WOKEN = []


def wakes_itself():
    """Timers that send SIGCONT a hundred times a second, whatever the process is doing; it notes when it ran."""

    class Event(ctypes.Structure):
        _fields_ = (
            ("value", ctypes.c_void_p),
            ("signal", ctypes.c_int),
            ("notify", ctypes.c_int),
            ("rest", ctypes.c_char * 48),
        )

    library = ctypes.CDLL(None)
    signal.signal(signal.SIGCONT, lambda *_: WOKEN.append(time.monotonic()))
    for n in range(4):  # a stop takes a pending SIGCONT, and its timer, away
        timer, event = ctypes.c_void_p(), Event(None, signal.SIGCONT, 0, b"")
        library.timer_create(1, ctypes.byref(event), ctypes.byref(timer))
        library.timer_settime(
            timer, 0, (ctypes.c_long * 4)(0, 40_000_000, 0, 31_000_000 + 3_000_000 * n), None
        )
    return "armed"


def ran_between(begin, end):
    return any(begin < moment < end for moment in WOKEN)


def chooses_processors():
    before = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count()))
    ctypes.CDLL(None).sched_setaffinity(0, 128, (ctypes.c_ulong * 16)(*[2**64 - 1] * 16))
    return before, len(os.sched_getaffinity(0))


def forks_a_family():
    for _ in range(3):  # children of children that spin
        if os.fork() == 0:
            os.setsid()
            os.fork()
            while True:
                pass
    return "left"
