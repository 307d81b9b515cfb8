"""What is seen of a launch's framework operations, and what watching them loads."""

from __future__ import annotations

import subprocess
import sys

_WATCH = """
import sys
import torch
from forecast_harness.verify.launches.tracing import watch_launch
{before}
with watch_launch("operations", None) as seen:
    {launch}
print(sorted(seen.items()), "torch._dynamo" in sys.modules)
"""


def _watched(launch: str, before: str = "") -> str:
    text = _WATCH.format(launch=launch, before=before)
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=300
    ).stdout.strip()


def test_operations_are_seen_without_importing_dynamo() -> None:
    said = _watched("torch.zeros(5) + torch.ones(3, 1)")
    assert said.endswith("False")
    assert "('aten::add.Tensor', 15)" in said


def test_what_a_compiling_candidate_does_is_seen_and_the_watch_itself_is_not_compiled() -> None:
    before = """
compiled = []
def backend(graph, inputs):
    compiled.append(graph)
    return graph.forward
double = torch.compile(lambda x: x * 2, backend=backend)
double(torch.ones(7))
assert len(compiled) == 1
"""
    said = _watched("double(torch.ones(7)); assert len(compiled) == 1", before)
    assert said.endswith("True")
    assert "('aten::mul.Tensor', 7)" in said
