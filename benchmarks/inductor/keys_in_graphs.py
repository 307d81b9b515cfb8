"""A user's kernel with several key values in one compiled dynamic graph: each decision against the one outside.

    python -m benchmarks.inductor.keys_in_graphs --out FILE [--rounds N]

Both tuners begin with empty stores. What each chose for a key is timed in turns by Triton's do_bench, for
medians: single launches of 5 us take up to 15.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch._inductor.utils import fresh_cache

from benchmarks.lib import result_files
from forecast_autotune import autotune, enable_torch_compile

CONFIGS = [triton.Config({"BLOCK": b}, num_warps=w) for b in (128, 512, 1024, 4096) for w in (1, 4, 8)]
SIZES = (1 << 12, 1 << 18, 1 << 24)


@triton.jit
def _scaled(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2.0 * tl.load(x + at, mask=at < n), mask=at < n)


def launched(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    """Twice the tensor."""
    out, n = torch.empty_like(x), x.numel()
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
    return out


def chosen(tuner: Any, n: int) -> Any:
    """The config that a tuner keeps for a size."""
    return next(config for key, config in tuner.cache.items() if n in key)


def main() -> None:
    """Decide inside and outside, time both, print one line a key."""
    command_line = result_files.parser(__doc__)
    command_line.add_argument("--rounds", type=int, default=40)
    options = result_files.parse_arguments(command_line)
    report, rounds = result_files.ResultFile(options, "keys in graphs"), options.rounds
    folder = Path(tempfile.mkdtemp())
    inside = autotune(configs=CONFIGS, key=["n"], store=folder / "inside")(_scaled)
    outside = autotune(configs=CONFIGS, key=["n"], store=folder / "outside")(_scaled)
    with fresh_cache(), enable_torch_compile(store=folder / "inside") as handle:
        graph = torch.compile(lambda x: launched(inside, x), dynamic=True, fullgraph=True)
        for n in SIZES:
            x = torch.randn(n, device="cuda")
            torch._dynamo.mark_dynamic(x, 0)
            graph(x)
            launched(outside, x)
    warned, ratios = handle.session.warn_once.messages, {}
    for n in SIZES:
        x, out = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
        times: list[list[float]] = [[], []]
        configs = [chosen(tuner, n) for tuner in (inside, outside)]
        for _ in range(rounds):
            for config, samples in zip(configs, times, strict=True):
                block = config.kwargs["BLOCK"]

                def call(
                    block: int = block, warps: int = config.num_warps, x: Any = x, out: Any = out, n: int = n
                ) -> None:
                    _scaled[(triton.cdiv(n, block),)](x, out, n, BLOCK=block, num_warps=warps)

                samples.append(triton.testing.do_bench(call, rep=40, return_mode="median"))
        medians = [statistics.median(samples) for samples in times]
        ratios[n] = medians[0] / medians[1]
        report.add("keys", {"n": n, "inside": str(configs[0]), "outside": str(configs[1]), "ms": times})
        result_files.say(f"{n}: {configs[0]} inside, {configs[1]} outside, {ratios[n]:.3f}")
    report.finish({"inside_over_outside": ratios, "keys": len(inside.cache), "warnings": warned})


if __name__ == "__main__":
    main()
