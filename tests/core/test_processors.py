"""The processors that a process may keep busy: files of control groups as containers, pods and services have them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from forecast_autotune import processors
from forecast_autotune.processors import processor_share, usable_processors

V1 = "4:memory:/pod/a\n3:cpu,cpuacct:/pod/a\n2:cpuset:/pod/a\n"
QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("groups", "files", "share"),
    [
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4.0),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n", "cpu.max": "300000 100000\n"}, 0.5),
        ("0::/host/pod\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/../../other\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("1:name=systemd:/\n0::/a\n", {"unified/a/cpu.max": "100000 50000\n"}, 2.0),
        (V1, {f"cpu/pod/a/{QUOTA}": "-1\n", f"cpu/pod/a/{PERIOD}": "100000\n"}, math.inf),
        (V1, {f"cpu/pod/{QUOTA}": "350000\n", f"cpu/pod/{PERIOD}": "100000\n"}, 3.5),
        (V1, {f"cpu/{QUOTA}": "100000\n", f"cpu/{PERIOD}": "100000\n"}, 1.0),
        (V1, {}, math.inf),
        ("no control groups\n", {}, math.inf),
        ("0::/\n", {"cpu.max": "400000"}, math.inf),
        ("0::/\n", {"cpu.max": "400000 0\n"}, math.inf),
    ],
)
def test_the_least_limit_of_all_groups_counts(
    tmp_path: Path, groups: str, files: dict[str, str], share: float
) -> None:
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    assert processor_share(tmp_path / "groups", tmp_path / "root") == share


@pytest.mark.parametrize(
    ("bound", "share", "usable"),
    [(16, math.inf, 16), (16, 4.0, 4), (16, 1.5, 2), (16, 0.25, 1), (2, 64.0, 2)],
)
def test_the_share_counts_where_it_is_less_than_all(
    monkeypatch: pytest.MonkeyPatch, bound: int, share: float, usable: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound)), raising=False)
    monkeypatch.setattr(processors, "processor_share", lambda: share)
    assert usable_processors() == usable


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert processor_share(tmp_path / "groups", tmp_path) == math.inf
