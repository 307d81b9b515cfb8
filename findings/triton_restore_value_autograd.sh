#!/usr/bin/env bash
# Triton 3.9.0 with torch 2.13.0: `restore_value` makes the backward pass of the step that tunes fail, and of no other.
#
# Guess: a tensor that is restored after each timed launch is as it was, so that autograd goes on.
# Seen: its values are, but each restoring is an in-place write to autograd. Where an earlier operation has saved the
# tensor, `backward` raises in the step in which the kernel is tuned; from the second step on (or with one config) it
# passes.
# The interpreter stands for the GPU: the hooks around timed launches are the same.
# Fails (status 1) where a release behaves otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q --no-deps triton==3.9.0  # torch may ask for an earlier one
cd "$folder"
cat > run.py <<'PYTHON'
import sys

import torch
import triton
import triton.language as tl


def once(call, quantiles):
    call()
    return [1.0, 1.0, 1.0]


def kernel(configs):
    @triton.autotune(configs, key=["n"], restore_value=["x"], do_bench=once)
    @triton.jit
    def double(x, out, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

    return double


def step(double):
    weight = torch.ones(64, requires_grad=True)
    x = weight + 1
    y = x.pow(2)  # its backward pass needs x
    with torch.no_grad():
        double[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, torch.empty(64), 64)
    assert bool((x == 2).all())
    try:
        y.sum().backward()
    except RuntimeError:
        return f"raises, the tensor is at version {x._version}"
    return f"passes, the tensor is at version {x._version}"


print("torch", torch.__version__, "triton", triton.__version__)
two = kernel([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})])
seen = [step(two), step(two), step(kernel([triton.Config({"BLOCK": 16})]))]
for name, what in zip(("the step that tunes", "the next step", "with one config"), seen):
    print(f"{name}: backward {what}")
sys.exit([s.split(",")[0] for s in seen] != ["raises", "passes", "passes"])
PYTHON
TRITON_INTERPRET=1 PYTHONWARNINGS=ignore "$folder/venv/bin/python" run.py
