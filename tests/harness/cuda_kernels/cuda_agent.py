"""A program that proposes two sources in place of the one it is given: a faster one, and a wrong one."""

from __future__ import annotations

import json
import sys


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        parent = asked["parents"][0]["source"]
        nodes = [
            {"source": f"{parent}#define FASTER 1  // 20000 ns\n", "note": "faster"},
            {"source": parent.replace("2 * x[", "3 * x["), "note": "wrong"},
        ]
        assert "/* launch" in asked["target"]["statement"]
        print(json.dumps({"id": asked["id"], "nodes": nodes, "exhausted": True}), flush=True)


if __name__ == "__main__":
    main()
