"""The sandbox's parts that need no cell: wire format, records, process lists, levels."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecast_harness.sandbox import canary, toolchain, wire
from forecast_harness.sandbox.api import (
    ContainmentLevel,
    Fault,
    JobStatus,
    ResourceLimits,
    SandboxError,
    SandboxJob,
    TensorBytes,
    WireError,
    strongest_level,
)
from forecast_harness.sandbox.containment import confine, linux
from tests.harness.lanes import SMALL, lane, run
from tests.waiting import is_running, wait_until

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


# --- records ---


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        ("object", (1,), b"x"),
        ("float32", (2,), b"1234"),
        ("float32", (-1,), b""),
        ("float32", (True,), b"1234"),
        ("uint8", (1 << 62, 1 << 62), b""),
    ],
)
def test_impossible_arrays_cannot_be_built(dtype: str, shape: tuple[int, ...], data: bytes) -> None:
    with pytest.raises(WireError):
        TensorBytes(dtype, shape, data)


@pytest.mark.parametrize("name", ["../x.py", "/etc/passwd", "a//b.py", ".", "", "a/../../b", "a\0b"])
def test_files_stay_below_their_folder(name: str) -> None:
    with pytest.raises(SandboxError, match="relative path"):
        SandboxJob("m:f", files={name: ""})


@pytest.mark.parametrize("value", [float("nan"), object(), {1}])
def test_a_payload_is_json(value: object) -> None:
    with pytest.raises(SandboxError, match="JSON"):
        SandboxJob("m:f", {"x": value})


@pytest.mark.parametrize("entry", ["", "m", "m:", ":f", "m:f()", "a b:c", "m:f:g", "os.system('x'):f"])
def test_an_entry_is_a_module_and_a_function(entry: str) -> None:
    with pytest.raises(SandboxError, match="module:function"):
        SandboxJob(entry)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), True])
def test_limits_are_positive_and_finite(value: float) -> None:
    with pytest.raises(SandboxError, match="wall_s"):
        ResourceLimits(wall_s=value)


def test_every_fault_has_one_doer() -> None:
    doers = {fault: fault.status for fault in Fault}
    assert doers.pop(Fault.NONE) is JobStatus.OK
    assert JobStatus.OK not in doers.values()
    assert set(doers.values()) == set(JobStatus) - {JobStatus.OK}


# --- wire ---


def read(data: bytes, limit: int = 1 << 20) -> tuple[Any, dict[str, TensorBytes]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = threading.Thread(target=lambda: (theirs.sendall(data), theirs.shutdown(socket.SHUT_WR)))
        writer.start()
        try:
            return wire.receive(ours, limit)
        finally:
            ours.close()
            writer.join()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(value=JSON, names=st.lists(st.text(), unique=True, max_size=3), size=st.integers(0, 5))
def test_frames_survive_the_wire(value: Any, names: list[str], size: int) -> None:
    arrays = {name: TensorBytes("int16", (size, 2), os.urandom(4 * size)) for name in names}
    frame = wire.encode(value, arrays) + b"".join(a.data for a in arrays.values())
    assert read(frame) == (value, arrays)


def framed(header: object) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return b"FAT1" + struct.pack(">I", len(text)) + text


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK",
        b"FAT1" + struct.pack(">I", (1 << 32) - 1),
        framed(b"not json"),
        framed(b"\xff\xfe"),
        framed([]),
        framed({"value": 1}),
        framed({"value": 1, "arrays": [["a", "float32"]]}),
        framed({"value": 1, "arrays": [["a", "object", [1]]]}),
        framed({"value": 1, "arrays": [["a", "uint8", [1.5]]]}),
        framed({"value": 1, "arrays": [["a", "uint8", [0]], ["a", "uint8", [0]]]}),
        framed({"value": 1, "arrays": [["a", "uint8", [1 << 21]]]}),
        framed(b'{"value": NaN, "arrays": []}'),
        framed(b'{"value": ' + b"9" * 5000 + b', "arrays": []}'),
        framed(b"[" * 100_000),
        *(framed(b'{"value": ' + number + b"}") for number in (b"9" * 400, b"1e999", b"9" * 5000)),
        framed(b'{"value": ' + b"[" * 100_000 + b"]" * 100_000 + b', "arrays": []}'),
    ],
    ids=range(18),
)
def test_bytes_that_are_no_frame_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        read(data)


@pytest.mark.parametrize("cut", [0, 3, 8, 12, -1])
def test_a_frame_that_stops_is_an_end(cut: int) -> None:
    frame = wire.encode({"a": 1}, {"x": TensorBytes("uint8", (4,), b"1234")}) + b"1234"
    with pytest.raises(EOFError):
        read(frame[:cut])


def test_what_json_cannot_hold_is_refused_before_anything_is_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for value in (float("nan"), object(), {1, 2}):
            with pytest.raises(WireError, match="JSON"):
                wire.send(ours, value, {})
        ours.close()
        assert theirs.recv(1) == b""


# --- processes, places, levels ---


@on_linux
def test_children_are_found_in_two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    try:
        grandchild = int(process.stdout.readline())
        assert process.pid in linux.children(os.getpid())
        assert process.pid in linux.children_by_search(os.getpid())
        assert linux.children(process.pid) == linux.children_by_search(process.pid) == [grandchild]
        assert grandchild in linux.descendants(os.getpid())
        tree, looks, look = set(linux.descendants(process.pid)), list[int](), linux._families
        monkeypatch.setattr(linux, "_LISTS_CHILDREN", False)
        monkeypatch.setattr(linux, "_families", lambda: looks.append(1) or look())
        assert set(linux.descendants(process.pid)) == tree == {grandchild}
        assert len(looks) == 1, "how long it takes must not grow with the tree times all processes"
    finally:
        os.kill(grandchild, signal.SIGKILL)
        process.wait()
    assert linux.children(process.pid) == linux.descendants(process.pid) == []
    assert linux.memory_and_threads(process.pid) == (0, 0)


def test_roots_cover_what_is_loaded_and_no_folder_around_it() -> None:
    roots = [Path(root) for root in confine.interpreter_roots()]
    for module in (os, pytest, wire):
        assert any(Path(str(module.__file__)).is_relative_to(root) for root in roots)
    repository = Path(__file__).parents[3]
    assert not any(repository.is_relative_to(root) for root in roots)


def test_a_cell_sees_no_node_of_another_device(tmp_path: Path) -> None:
    for minor, uuid in enumerate(("GPU-a", "GPU-b", "GPU-c")):
        (tmp_path / f"0000:0{minor}:00.0").mkdir()
        data = f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        (tmp_path / f"0000:0{minor}:00.0" / "information").write_text(data)
    assert confine.other_devices("GPU-b", tmp_path) == {"/dev/nvidia0", "/dev/nvidia2"}
    assert confine.other_devices("GPU-d", tmp_path) == set(), "a device that is not listed may be any of them"
    assert confine.other_devices("1", tmp_path) == set(), "a number is CUDA's, not the driver's"
    assert confine.other_devices(None, tmp_path) == set()


def test_the_canary_knows_its_song() -> None:
    assert canary.check_device(None) == "ok"


@on_linux
def test_an_interrupted_job_is_ended_and_the_lane_goes_on() -> None:
    # A shell starts background jobs with this signal ignored, and Python then leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted() -> None:
    with lane() as opened:
        server = opened.server_pid
        timer = threading.Timer(1.0, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            run(opened, "hangs")
        assert not is_running(server)
        assert run(opened, "honest").status is JobStatus.OK
    with pytest.raises(SandboxError, match="not open"):
        run(opened, "honest")


@on_linux
def test_a_server_that_still_owes_an_answer_when_it_is_stopped_leaves_the_lanes_files() -> None:
    with lane() as opened:
        server = opened.server_pid
        os.kill(server, signal.SIGSTOP)  # it finds the ping and the end together
        opened._tell({"op": "ping"})
        timer = threading.Timer(0.2, os.kill, [server, signal.SIGCONT])
        timer.start()
        opened._stop()
        timer.join()
        assert not is_running(server)
        assert run(opened, "honest").status is JobStatus.OK


@on_linux
def test_the_strongest_level_is_found_by_trying() -> None:
    assert strongest_level() in ContainmentLevel
    with lane() as opened:
        assert opened.level is strongest_level()
        assert set(opened.refused) == {level.name for level in ContainmentLevel if level > opened.level}


@on_linux
def test_a_module_that_cannot_be_imported_is_told_with_its_log() -> None:
    with (
        pytest.raises(SandboxError, match="no_such_module_anywhere"),
        lane(warm=("no_such_module_anywhere",)),
    ):
        raise AssertionError("the lane opened")


@on_linux
def test_nothing_is_left_of_a_closed_lane(tmp_path: Path) -> None:
    with lane(scratch=tmp_path) as opened:
        pid = opened.server_pid
        assert run(opened, "honest").status is JobStatus.OK
        assert len(list(tmp_path.iterdir())) == 1
        assert sorted(p.name for p in next(tmp_path.iterdir()).iterdir()) == ["root", "server.log"]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@on_linux
def test_two_lanes_and_two_threads_do_not_mix() -> None:
    with lane() as one, lane() as two:
        results: dict[int, Any] = {}

        def ask(number: int) -> None:
            results[number] = run((one, two)[number % 2], "honest", number).value["returned"]

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {n: 2 * n for n in range(6)}


@on_linux
def test_a_job_that_is_given_up_ends_with_its_processes_and_the_lane_goes_on() -> None:
    with lane() as opened, ThreadPoolExecutor(1) as pool:
        opened.give_up()
        assert run(opened, "honest").status is JobStatus.OK, "there was nothing to give up"
        hanging = pool.submit(run, opened, "hangs", limits=replace(SMALL, wall_s=120))
        server = opened.server_pid
        wait_until(lambda: bool(linux.children(server)))
        started = linux.children(server)
        opened.give_up()
        with pytest.raises(SandboxError, match="given up"):
            hanging.result(60)
        wait_until(lambda: not any(is_running(pid) for pid in (server, *started)))
        assert run(opened, "honest").status is JobStatus.OK
        with opened._run_lock:  # as between a job's answer and the end of its `run`
            opened.give_up()
        assert run(opened, "honest").status is JobStatus.OK, "the next job is another one"


@on_linux
def test_a_server_that_does_not_answer_is_replaced_within_ten_seconds() -> None:
    with lane() as opened:
        os.kill(opened.server_pid, signal.SIGSTOP)
        began = time.monotonic()
        lost, then = run(opened, "honest"), run(opened, "honest")
        spent = time.monotonic() - began
    assert (lost.fault, then.status, opened.restarts) == (Fault.SERVER_LOST, JobStatus.OK, 1)
    assert spent < 10


@on_linux
def test_a_killed_parent_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from tests.harness.lanes import lane, run\n"
        "with lane(scratch=sys.argv[1]) as opened:\n"
        "    print(opened.server_pid, flush=True)\n"
        "    run(opened, 'hangs')\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    try:
        server = int(parent.stdout.readline())
        wait_until(lambda: len(linux.descendants(server)) >= 3, "judge, keeper and cell")
        tree = linux.descendants(server)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(is_running(pid) for pid in (server, *tree)), "their end")
    assert list(tmp_path.iterdir()) == []


@on_linux
def test_a_server_keeps_nothing_of_its_jobs() -> None:
    with lane() as opened:
        place = Path(f"/proc/{opened.server_pid}/fd")
        run(opened, "honest")
        try:
            before = len(list(place.iterdir()))
        except PermissionError:
            pytest.skip("only root may look into a server")
        for function in ("honest", "crashes", "leaves_as_if_done", "raises"):
            run(opened, function)
        assert len(list(place.iterdir())) == before
        assert linux.children(opened.server_pid) == []


@on_linux
def test_modules_below_the_temporary_directory_stay_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment may lie in /tmp, which is another place for a cell with its own root."""
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    package = tmp_path / "in_tmp_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "late.py").write_text("def entry(payload, arrays, state):\n    return 'found'\n")
    body = "    with work.cell() as cell:\n        return cell.ask('in_tmp_package.late:entry').value\n"
    (package / "judge.py").write_text(f"def main(work):\n{body}")
    monkeypatch.syspath_prepend(tmp_path)
    with lane(warm=("in_tmp_package.judge",)) as opened:
        result = opened.run(SandboxJob("in_tmp_package.judge:main"))
    assert (result.status, result.value) == (JobStatus.OK, "found"), result.detail


def test_cells_get_copies_of_the_toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_cache", {})
    (tmp_path / "server" / "AB").mkdir(parents=True)
    (tmp_path / "server" / "AB" / "cuda_utils.so").write_bytes(b"built")
    toolchain.keep_cache_files(tmp_path / "server")
    for cell in ("one", "two"):
        toolchain.restore_cache_files(tmp_path / cell)
        (tmp_path / cell / "AB" / "cuda_utils.so").write_bytes(b"overwritten by a candidate")
    toolchain.restore_cache_files(tmp_path / "three")
    assert (tmp_path / "three" / "AB" / "cuda_utils.so").read_bytes() == b"built"


def test_without_a_driver_the_toolchain_is_left_to_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_cache", {})
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", None)
    monkeypatch.setenv("TRITON_CACHE_DIR", "as it was")
    toolchain.build_driver_module()
    assert os.environ["TRITON_CACHE_DIR"] == "as it was"
    assert not toolchain._cache
