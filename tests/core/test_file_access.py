"""What is no regular file is refused at once, and results go to what a path is."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from forecast_autotune import file_access
from forecast_autotune.file_access import (
    misplaced_file,
    open_named_input,
    open_named_output,
    open_regular,
    read_regular,
    space_remedy,
)
from tests.core.special_files import SPECIAL_FILES


def irregular(folder: Path) -> dict[str, Path]:
    """One of each kind, by what an error calls it."""
    for kind in ("folder", "pipe", "endless", "socket"):
        SPECIAL_FILES[kind](folder / kind)
    (folder / "to pipe").symlink_to("pipe")
    return {
        "folder": folder / "folder",
        "named pipe": folder / "to pipe",
        "device": folder / "endless",
        "socket": folder / "socket",
    }


@pytest.mark.parametrize("mode", ["rb", "rb+", "ab+"])
@pytest.mark.parametrize("kind", ["folder", "named pipe", "device", "socket"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str, mode: str) -> None:
    path = irregular(tmp_path)[kind]
    with pytest.raises(OSError, match=kind) as caught:
        open_regular(path, mode)
    assert caught.value.filename == str(path)
    assert kind in misplaced_file(path) or kind == "folder"


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"text"
    assert misplaced_file(tmp_path / "link") == "a file"
    assert misplaced_file(tmp_path) == misplaced_file(tmp_path / "missing") == ""


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_regular(path, 100) == b"x" * 100
    with pytest.raises(OSError, match="more than 99 bytes"):
        read_regular(path, 99)
    with path.open("rb+") as stream:
        stream.truncate(1 << 40)  # a terabyte that takes no room
    with pytest.raises(OSError, match="more than"):
        read_regular(path)


def test_a_pipe_that_nobody_writes_to_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_access, "PIPE_WAIT_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="nobody wrote to"), open_named_input(tmp_path / "pipe"):
        pass
    with pytest.raises(OSError, match="nobody read from"), open_named_output(tmp_path / "pipe"):
        pass
    with pytest.raises(OSError, match="device"), open_named_input(Path("/dev/zero")):
        pass


def test_an_output_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with pytest.raises(TypeError), open_named_output(path) as stream:
        stream.writelines([b"new", "text"])  # type: ignore[list-item]
    assert path.read_bytes() == b"old"
    with open_named_output(path) as stream:
        stream.write(b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path, there: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "file", tmp_path / "link"
    if there:
        target.write_bytes(b"old")
    link.symlink_to(Path("elsewhere") / "file")
    with open_named_output(link) as stream:
        stream.write(b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert [f.name for f in target.parent.iterdir()] == ["file"]


def test_devices_and_pipes_are_written_to(tmp_path: Path) -> None:
    (tmp_path / "null").symlink_to("/dev/null")
    with open_named_output(tmp_path / "null") as stream:
        stream.write(b"nothing")
    assert (tmp_path / "null").is_symlink()
    with (
        pytest.raises(OSError, match=r"No space left.*'/dev/full'"),
        open_named_output(Path("/dev/full")) as stream,
    ):
        stream.write(b"nothing")
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)

    pipe, seen = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: seen.append(pipe.read_bytes()))
    reader.start()
    with open_named_output(pipe) as stream:
        stream.write(b"through")
    reader.join()
    assert seen == [b"through"]
    assert pipe.is_fifo()


def test_a_name_of_an_open_file_is_added_to(tmp_path: Path) -> None:
    """`export /dev/stdout >> log` must not take the log's earlier lines."""
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    with path.open("ab") as log, open_named_output(Path(f"/proc/self/fd/{log.fileno()}")) as stream:
        stream.write(b"after\n")
    assert path.read_bytes() == b"before\nafter\n"


def test_a_folder_is_no_output(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder"), open_named_output(tmp_path):
        pass


def test_room_is_the_remedy_of_a_full_disk_alone() -> None:
    assert space_remedy(OSError(errno.ENOSPC, "full")).startswith("free space there, or name a writable")
    assert space_remedy(OSError(errno.EROFS, "read-only")).startswith("name a writable directory in FORECAST")
