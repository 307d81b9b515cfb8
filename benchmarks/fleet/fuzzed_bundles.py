"""Claim: a bundle that was changed is never accepted, and no change makes the reader crash.

    python -m benchmarks.fleet.fuzzed_bundles --out benchmarks/results/fuzzed_bundles.json

CPU only. Each case damages a copy of a sound bundle, compiled kernels included, in one to three random ways: bits,
bytes and lines turned, cut, repeated, swapped, added; files removed, renamed, added, made links, pipes or folders;
values of the manifest and of rows replaced by hostile ones. In two of three cases the manifest is then made to fit
the files, as somebody would who wants to be believed. A bundle is rightly accepted only if it is byte for byte what
was written or, with a manifest that fits, byte for byte what `store bundle` writes of the rows in it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import host_environment
from benchmarks.lib.fleet.stored_rows import decision, measurement, problem
from benchmarks.lib.result_files import write_result
from forecast_autotune.store import Store
from forecast_autotune.store.bundles import contents
from forecast_autotune.store.bundles.manifest import BundledFile, BundleError, Manifest
from forecast_autotune.store.bundles.reading import Bundle
from forecast_autotune.store.bundles.writing import BundleOptions, write_bundle
from forecast_autotune.store.files import MANIFEST
from forecast_autotune.store.merging.row_stores import StoreFolder

HOSTILE: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1e308,
        2**200,
        "",
        "x" * 10_000,
        "../../etc/passwd",
        "\u0000",
        "\ud800",
        [],
        {},
        [[]] * 50,
    ),
    *({"a": {"b": {"c": []}}}, "nan", "v1", 3.5, "9999-99-99", "sources", "<script>", "{", "\r\n"),
]


def sound_bundle(folder: Path) -> Path:
    """A bundle of sixteen problems, with compiled kernels."""
    store = Store(folder / "store")
    for number in range(16):
        p = problem(number)
        rows = [measurement(p, 100 * number + i, f"2026-01-01T00:{number:02}:{i:02}+00:00") for i in range(4)]
        for m in rows:
            store.add(p, m)
        if number % 3:
            store.put_decision(p, decision(p, rows[0]))
    cache = folder / "cache" / "ABCDEF"
    cache.mkdir(parents=True)
    (cache / "kernel.cubin").write_bytes(random.Random(0).randbytes(2000))
    (cache / "__grp__kernel.json").write_text('{"child_paths": {"kernel.cubin": "/x/ABCDEF/kernel.cubin"}}')
    write_bundle(StoreFolder(folder / "store"), folder / "bundle", BundleOptions(compiled=folder / "cache"))
    return folder / "bundle"


def some_file(bundle: Path, chance: random.Random) -> Path:
    files = sorted(p for p in bundle.rglob("*") if p.is_file() and not p.is_symlink())
    return chance.choice([*files, bundle / MANIFEST] if (bundle / MANIFEST).is_file() else files)


# --- ways to damage a bundle ---


def turn_bit(bundle: Path, chance: random.Random) -> None:
    path = some_file(bundle, chance)
    data = bytearray(path.read_bytes() or b"x")
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def splice_bytes(bundle: Path, chance: random.Random) -> None:
    path = some_file(bundle, chance)
    data = path.read_bytes()
    at, to = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    fill = chance.choice([b"", b"\n", b"\x00", data[at:to] * 2, chance.randbytes(8), b"[" * 5000])
    path.write_bytes(data[:at] + fill + data[to:])


def cut(bundle: Path, chance: random.Random) -> None:
    path = some_file(bundle, chance)
    os.truncate(path, chance.randrange(path.stat().st_size + 1))


def mix_lines(bundle: Path, chance: random.Random) -> None:
    path = some_file(bundle, chance)
    lines = path.read_bytes().splitlines(keepends=True)
    how = chance.randrange(4)
    if how == 0:
        chance.shuffle(lines)
    elif how == 1 and lines:
        lines.pop(chance.randrange(len(lines)))
    elif how == 2 and lines:
        lines.insert(chance.randrange(len(lines)), chance.choice(lines))
    else:
        lines += some_file(bundle, chance).read_bytes().splitlines(keepends=True)[-2:]
    path.write_bytes(b"".join(lines))


def remove_file(bundle: Path, chance: random.Random) -> None:
    some_file(bundle, chance).unlink()


def add_file(bundle: Path, chance: random.Random) -> None:
    names = [
        "setup.py",
        "rows/x.jsonl",
        "compiled/triton/A/b.so",
        ".x",
        "rows/d/k.jsonl",
        "a b",
        "compiled/x/y",
    ]
    name = chance.choice(names)
    path = bundle / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(chance.choice([b"", b"import os\n", some_file(bundle, chance).read_bytes()]))


def move_file(bundle: Path, chance: random.Random) -> None:
    path, other = some_file(bundle, chance), some_file(bundle, chance)
    path.rename(chance.choice([path.with_name("x" + path.name), other, path.with_suffix(".JSONL")]))


def make_strange(bundle: Path, chance: random.Random) -> None:
    path = some_file(bundle, chance)
    path.unlink()
    how = chance.randrange(5)
    if how == 0:
        os.mkfifo(path)
    elif how == 1:
        path.mkdir()
    elif how == 2:
        path.symlink_to("/dev/zero")
    elif how == 3:
        path.symlink_to(path.name)
    else:
        path.parent.rmdir() if not any(path.parent.iterdir()) else path.symlink_to("/etc/passwd")
        if not path.parent.exists():
            path.parent.symlink_to("/")


def change_value(bundle: Path, chance: random.Random) -> None:
    """Replace one value of one JSON line or of the manifest, as canonical JSON."""
    path = some_file(bundle, chance)
    try:
        if path.name == MANIFEST:
            path.write_bytes(
                (json.dumps(changed(json.loads(path.read_bytes()), chance), indent=1) + "\n").encode()
            )
            return
        lines = path.read_bytes().splitlines()
        at = chance.randrange(len(lines))
        data = changed(json.loads(lines[at]), chance)
        lines[at] = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def changed(data: Any, chance: random.Random) -> Any:
    if isinstance(data, dict) and data and chance.random() < 0.9:
        name = chance.choice(sorted(data))
        if chance.random() < 0.1:
            return {k: v for k, v in data.items() if k != name} | {
                chance.choice(["x", "type", "id"]): data[name]
            }
        return {**data, name: changed(data[name], chance)}
    if isinstance(data, list) and data and chance.random() < 0.8:
        at = chance.randrange(len(data))
        return [*data[:at], changed(data[at], chance), *data[at + 1 :]]
    return chance.choice(HOSTILE)


DAMAGE: list[Callable[[Path, random.Random], None]] = [
    *(turn_bit, splice_bytes, cut, mix_lines, remove_file, add_file, move_file, make_strange),
    *(change_value, change_value, change_value),
]


def reseal(bundle: Path, chance: random.Random) -> None:
    """Make the manifest fit the files, as far as it can be read, and in half of the cases what it covers, too."""
    if not (bundle / MANIFEST).is_file():
        return
    try:
        old = json.loads((bundle / MANIFEST).read_bytes())
        files = {
            p.relative_to(bundle).as_posix(): BundledFile.of(p.read_bytes())
            for p in sorted(bundle.rglob("*"))
            if p.is_file() and p.name != MANIFEST and p.stat().st_size < 10**6
        }
        made = Manifest.from_json({**old, "files": {n: f.to_json() for n, f in files.items()}})
        if chance.random() < 0.5:
            rows = [
                contents.from_bytes((bundle / n).read_bytes(), k)
                for n in files
                if (k := contents.kernel_at(n))
            ]
            covers = sorted(map(contents.coverage_of, rows), key=lambda c: (c.slug, c.kernel))
            carries = tuple(c for c in made.carries if c != "compiled")
            if any(name.startswith("compiled/") for name in files):
                carries = (*carries, "compiled")
            made = replace(made, covers=tuple(covers), newest=contents.newest(rows), carries=carries)
        (bundle / MANIFEST).write_bytes(made.sealed().to_bytes())
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        BundleError,
        RecursionError,
        IndexError,
    ):
        return


def tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def rightly_accepted(bundle: Path, opened: Bundle, original: dict[str, bytes], scratch: Path) -> bool:
    """Whether a changed one's rows are, byte for byte, what would be written of them; see the module."""
    held = tree(bundle)
    if held[MANIFEST] == original[MANIFEST]:
        return False
    target = scratch / "again"
    write_bundle(opened, target, BundleOptions(sources="sources" in opened.manifest.carries))
    again = {name: data for name, data in tree(target).items() if name != MANIFEST}
    shutil.rmtree(target)
    rows = {n: d for n, d in held.items() if n != MANIFEST and not n.startswith("compiled/")}
    return rows == again and set(opened.manifest.files) == set(held) - {MANIFEST}


def one_case(seed: int, sound: Path, original: dict[str, bytes], scratch: Path) -> dict[str, Any]:
    """What became of one damaged bundle."""
    chance = random.Random(seed)
    bundle = scratch / "bundle"
    shutil.copytree(sound, bundle)
    done = []
    try:
        for _ in range(chance.choice((1, 1, 2, 3))):
            damage = chance.choice(DAMAGE)
            done.append(damage.__name__)
            try:
                damage(bundle, chance)
            except (OSError, IndexError):
                continue  # it stumbled over what was damaged before
        sealed = chance.random() < 2 / 3
        if sealed:
            reseal(bundle, chance)
        begin = time.perf_counter()
        try:
            opened = Bundle.open(bundle)
        except BundleError as error:
            seconds = time.perf_counter() - begin
            crash = "" if "\n" not in str(error) and str(error).startswith("the bundle ") else "not one line"
            return {"refused": True, "crash": crash, "seconds": seconds, "sealed": sealed, "done": done}
        except Exception as error:
            return {
                "refused": False,
                "crash": repr(error)[:300],
                "seconds": 0.0,
                "sealed": sealed,
                "done": done,
            }
        seconds = time.perf_counter() - begin
        unchanged = tree(bundle) == original
        right = unchanged or (sealed and rightly_accepted(bundle, opened, original, scratch))
        return {
            "refused": False,
            "right": right,
            "unchanged": unchanged,
            "crash": "",
            "seconds": seconds,
            "sealed": sealed,
            "done": done,
        }
    finally:
        shutil.rmtree(bundle, ignore_errors=True)


def run(cases: int, seed: int) -> dict[str, Any]:
    """All cases; see the module."""
    counts: Counter[str] = Counter()
    wrong: list[Any] = []
    longest = 0.0
    with tempfile.TemporaryDirectory(prefix="fuzzed-bundles-") as name:
        scratch = Path(name)
        sound = sound_bundle(scratch / "sound")
        original = tree(sound)
        for number in range(cases):
            found = one_case(seed + number, sound, original, scratch)
            longest = max(longest, found["seconds"])
            counts["sealed"] += found["sealed"]
            counts["refused"] += found["refused"]
            counts["crashes"] += bool(found["crash"])
            accepted = not found["refused"] and not found["crash"]
            counts["accepted_unchanged"] += accepted and found["unchanged"]
            counts["accepted_made_anew"] += accepted and found["right"] and not found["unchanged"]
            counts["accepted_wrongly"] += accepted and not found["right"]
            if found["crash"] or (accepted and not found["right"]):
                wrong.append({"seed": seed + number, **found})
    named = ("sealed", "refused", "accepted_unchanged", "accepted_made_anew", "accepted_wrongly", "crashes")
    return {
        "cases": cases,
        **{n: counts[n] for n in named},
        "longest_s": round(longest, 3),
        "wrong": wrong[:20],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="the result file (JSON)")
    arguments = parser.parse_args()
    found = run(arguments.cases, arguments.seed)
    result = {"claim": "fuzzed_bundles", "environment": host_environment(arguments.seed), "summary": found}
    print(json.dumps(result, indent=1))
    write_result(arguments.out, result)
    return int(bool(found["crashes"] or found["accepted_wrongly"]))


if __name__ == "__main__":
    sys.exit(main())
