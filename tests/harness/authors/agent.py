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
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def honest(asked: Any) -> None:
    nodes = [
        {
            "source": f"def run(x):\n    return x * {asked['seed'] + i}\n",
            "note": f"times\n {i}",
            "author": "agent 7",
        }
        for i in range(asked["n"])
    ]
    say({"id": asked["id"], "nodes": nodes, "tokens": 11, "money": 0.25})


def main() -> None:
    mode = sys.argv[1]
    starts = 0
    if len(sys.argv) > 2:
        count = Path(sys.argv[2])
        starts = len(count.read_text().splitlines()) if count.exists() else 0
        with count.open("a") as out:
            out.write(f"{os.getpid()}\n")
    if mode == "nested":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(sys.argv[2]).with_suffix(".child").write_text(str(child.pid))
    for line in sys.stdin:
        asked = json.loads(line)
        if mode == "dies":
            print("out of ideas", file=sys.stderr, flush=True)
            sys.exit(3)
        if mode == "once" and not starts:
            sys.exit(1)
        if mode == "sleeps":
            time.sleep(600)
        if mode == "garbage":
            sys.stdout.write("I think that {\n")
            sys.stdout.flush()
        elif mode == "list":
            say([1, 2])
        elif mode == "empty":
            say({"id": asked["id"], "nodes": [], "exhausted": True})
        elif mode == "problem":
            say({"id": asked["id"], "problem": "no key was given"})
        elif mode == "other":
            say({"id": "another", "nodes": []})
        elif mode == "sourceless":
            say({"id": asked["id"], "nodes": [{"note": "I forgot"}], "tokens": 5})
        elif mode == "chatty":
            honest(asked)
            say({"nodes": []})
        elif mode == "echo":
            said = {"source": json.dumps(asked), "origin": "hand", "language": "cuda"}
            say({"id": asked["id"], "nodes": [said]})
        else:
            honest(asked)


main()
