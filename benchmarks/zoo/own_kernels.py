"""A program to capture: the first case of each family of `benchmarks.kernels`, small, with a tuner over its kernel.

    export FORECAST_AUTOTUNE=1 FORECAST_AUTOTUNE_CAPTURE=values FORECAST_AUTOTUNE_CACHE_DIR=/tmp/own
    FORECAST_AUTOTUNE_MAX_MEASUREMENTS=1 python -m benchmarks.zoo.own_kernels
    python -m benchmarks.zoo.targets judge /tmp/own --out FILE

With TRITON_INTERPRET=1 it runs without a GPU. What fails is printed, and is none of the targets then.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import triton

from benchmarks.kernels import cases, thinned

_CONFIGS = 4
"""Configs of each tuner."""


def main() -> int:
    """Launch one case of every family."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    families = {case.name.partition("/")[0]: case for case in reversed(cases())}
    for name, case in sorted(families.items()):
        began = time.monotonic()
        try:
            tuner = triton.autotune(
                configs=thinned(case, _CONFIGS),
                key=list(case.key),
                reset_to_zero=list(case.reset_to_zero) or None,
            )(case.kernel)
            data = case.make(device, small=True)
            tuner[data["grid"]](*data["args"], **data["kwargs"])
        except Exception as error:  # of any kernel, for any reason: the others are launched all the same
            print(f"{name}: {error!r:.200}", flush=True)
        else:
            print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
