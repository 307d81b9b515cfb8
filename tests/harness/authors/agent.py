"""A program that proposes sources over its stdin and stdout, well or badly: told by its arguments.

`agent.py MODE [COUNT_FILE]`; every start appends a line to the count file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def honest(asked: Any) -> dict[str, Any]:
    sources = [f"def run(x):\n    return x * {asked['seed'] + i}\n" for i in range(asked["n"])]
    nodes = [{"source": s, "note": f"times\n {i}", "author": "agent 7"} for i, s in enumerate(sources)]
    return {"nodes": nodes, "tokens": 11, "money": 0.25}


def cuda(asked: Any) -> dict[str, Any]:
    """A faster source in place of the one that is given, and a wrong one."""
    assert "/* launch" in asked["target"]["statement"]
    parent = asked["parents"][0]["source"]
    faster = {"source": f"{parent}#define FASTER 1  // 20000 ns\n", "note": "faster"}
    wrong = {"source": parent.replace("2 * x[", "3 * x["), "note": "wrong"}
    return {"nodes": [faster, wrong], "exhausted": True}


def echo(asked: Any) -> dict[str, Any]:
    return {"nodes": [{"source": json.dumps(asked), "origin": "hand", "language": "cuda"}]}


ANSWERS: dict[str, Any] = {
    "cuda": cuda,
    "echo": echo,
    "empty": lambda _: {"nodes": [], "exhausted": True},
    "other": lambda _: {"id": "another", "nodes": []},
    "problem": lambda _: {"problem": "no key was given"},
    "sourceless": lambda _: {"nodes": [{"note": "I forgot"}], "tokens": 5},
}


def main() -> None:
    mode, *files = sys.argv[1:]
    if files:
        count = Path(files[0])
        with count.open("a") as out:
            out.write(f"{os.getpid()}\n")
    if mode == "nested":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(files[0]).with_suffix(".child").write_text(str(child.pid))
    for line in sys.stdin:
        asked = json.loads(line)
        if mode == "dies":
            print("out of ideas", file=sys.stderr, flush=True)
            sys.exit(3)
        if mode == "sleeps":
            time.sleep(600)
        if mode == "garbage":
            print("I think that {", flush=True)
        elif mode == "list":
            say([1, 2])
        else:
            say({"id": asked["id"], **ANSWERS.get(mode, honest)(asked)})


main()
