"""Packs without the sizes that take a CPU milliseconds: the same questions, answered many times sooner."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from forecast_harness.records import Node, SearchTarget
from forecast_harness.targets import packs
from forecast_harness.targets.packs import Pack, load_pack
from forecast_harness.targets.search_target import open_target, pack_of


def checked_only(pack: Pack) -> Pack:
    """The pack with the workloads alone at which results are checked; they are then timed, too."""
    return pack.with_(workloads=pack.checked_workloads)


def small_folder(name: str, where: Path) -> str:
    """Such a pack as a folder, for commands: `where/name`."""
    folder = where / name
    shutil.copytree(Path(packs.__file__).parent / "builtin" / name, folder)
    works = [w.to_json() for w in load_pack(name).checked_workloads]
    (folder / "workloads.json").write_text(json.dumps(works))
    return str(folder)


def small_target(name: str) -> tuple[SearchTarget, Node]:
    """Such a pack as what is searched on a CPU, and its first seed."""
    target, (seed, *_) = open_target(name, device="cpu")
    pack = checked_only(pack_of(target))
    return replace(target, id=pack.id, payload={"pack": pack.to_json()}), seed
