"""`improve` on a GPU: a user's script with a tuned kernel and a plain one, recorded sources of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.improve.test_improve import improve

PROGRAM = """
import torch, triton, triton.language as tl

@triton.autotune([triton.Config({"BLOCK": 1024}, num_warps=w) for w in (4, 8)], key=["N"])
@triton.jit
def tuned(X, Y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    high = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        high = tl.maximum(high, tl.load(X + row * N + i, mask=i < N, other=-float("inf")).to(tl.float32))
    top = tl.max(high, 0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(X + row * N + i, mask=i < N, other=-float("inf")).to(tl.float32) - top)
    whole = tl.sum(total, 0)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * N + i, mask=i < N, other=-float("inf")).to(tl.float32)
        tl.store(Y + row * N + i, tl.exp(x - top) / whole, mask=i < N)

@triton.jit
def plain(X, Y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + i, tl.load(X + i, mask=i < n) * 2, mask=i < n)

x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
y, z = torch.empty_like(x), torch.empty_like(x)
for _ in range(40):
    tuned[(8192,)](x, y, 8192)
    plain[(triton.cdiv(x.numel(), 32),)](y, z, x.numel(), BLOCK=32, num_warps=1)
torch.cuda.synchronize()
"""
WIDER = """# more elements a program
import triton
import triton.language as tl

CONFIGS = [{"TILE": t, "num_warps": 4} for t in (1024, 2048)]

def grid(meta, arguments, base):
    return (triton.cdiv(arguments["n"], meta["TILE"]),)

@triton.jit
def plain(X, Y, n, BLOCK: tl.constexpr, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(Y + i, tl.load(X + i, mask=i < n) * 2, mask=i < n)
"""


@pytest.mark.gpu
def test_a_script_of_two_kernels_is_improved_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "sources" / "plain").mkdir(parents=True)
    (tmp_path / "sources" / "plain" / "wider.py").write_text(WIDER)
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "store"))
    words = ["--json", "--seconds", "420", "--proposer", "recorded:sources", "--out", "out", "program.py"]
    status, output, errors = improve(tmp_path, *words)
    assert status == 0, errors
    told = json.loads(output)
    parts = {p["name"]: p for p in told["parts"]}
    assert told["steps"].endswith("launches that repeat"), told["steps"]
    assert (parts["tuned"]["calls"], parts["plain"]["calls"]) == (1.0, 1.0)
    assert "plain" in told["held"], (told["searches"], told["proof"])
    assert told["proof"]["step"]["high"] < 1.0
    assert told["variants"]
