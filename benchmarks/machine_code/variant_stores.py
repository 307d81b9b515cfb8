"""Claim: how long `variants KERNEL --mechanical` takes until all that it makes is verified and stored.

    python -m benchmarks.machine_code.variant_stores --out benchmarks/results/variant_stores.json \
        [--kernels FILE.py:FN ...] [--n 16] [--device 0]

Without `--kernels`, ten of our own. Each kernel goes through the command in a process and a store of its own. Told are
the seconds until its first line and its end, the longest time without a line, how many variants were judged right,
why others were refused, and where the seconds of a verification went.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.lib.processes.timed_lines import TimedLines
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say

_FOLDER = Path("benchmarks/kernels")
"""From the root of the checkout, where scripts run: results hold what was asked for as it was written."""
KERNELS = tuple(
    str(_FOLDER / name)
    for name in (
        "causal_conv1d.py:causal_conv1d_fwd",
        "cross_entropy.py:cross_entropy_fwd",
        "cumsum.py:row_cumsum",
        "layer_norm.py:_layer_norm_fwd_fused",
        "matmul.py:matmul_kernel",
        "rms_norm.py:add_rms_norm",
        "softmax.py:online_softmax",
        "swiglu.py:swiglu_kernel",
        "transpose.py:transpose_kernel",
        "w8a16_matmul.py:w8a16_matmul",
    )
)


def make_variants(kernel: str, options: Any) -> dict[str, Any]:
    """Run the command once; when it said what."""
    with tempfile.TemporaryDirectory() as store:
        command = [sys.executable, "-m", "forecast_autotune", "variants", kernel, "--mechanical", "--json"]
        command += ["--n", str(options.n), "--device", options.device, "--store", store]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        printed = TimedLines(process.stderr)
        text = process.stdout.read() if process.stdout else ""
        process.wait()
        lines, spent = printed.all(), printed.seconds
    result = json.loads(text) if text.strip() else {"new": [], "verified": []}
    verdicts = Counter(str(v["judgement"]) for v in result["verified"])
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(lines)]
    fields = {
        "kernel": kernel.rpartition("/")[2],
        "status": process.returncode,
        "new": len(result["new"]),
        "verdicts": dict(verdicts),
        "refused": [r for v in result["verified"] for r in v["reasons"][:1]],
        "spent": [
            {
                **v["facts"].get("steps", {}),
                **v["facts"].get("seconds", {}),
                "examine": v["facts"].get("examine", {}),
                "all": v["seconds"],
            }
            for v in result["verified"]
        ],
        "seconds": spent,
        "command_seconds": result.get("seconds", {}),
        "first_line_s": lines[0][0] if lines else None,
        "longest_silence_s": max(gaps, default=None),
        "told": [f"{second:.1f} s: {line[:120]}" for second, line in lines],
        "problem": "" if process.returncode == 0 else "\n".join(line for _, line in lines[-3:]),
    }
    say(f"{fields['kernel']}: {fields['new']} made, {dict(verdicts)} in {spent:.1f} s")
    return fields


def main() -> None:
    command_line = parser(__doc__)
    command_line.add_argument("--kernels", nargs="+", default=KERNELS, metavar="FILE.py:FN")
    command_line.add_argument("--n", type=int, default=16, help="variants asked for")
    command_line.add_argument(
        "--device", default="0", help="the driver's number, or cpu to try the script itself"
    )
    early, _ = command_line.parse_known_args()
    arguments = parse_arguments(command_line, on_host=early.device == "cpu")
    result = ResultFile(arguments, "seconds until a kernel's variants are verified and stored", 0)
    rows = []
    for kernel in arguments.kernels:
        rows.append(make_variants(kernel, arguments))
        result.add("kernels", rows[-1])
    result.finish(
        {
            "kernels": len(rows),
            "seconds_most": max(r["seconds"] for r in rows),
            "first_line_s_most": max(r["first_line_s"] or r["seconds"] for r in rows),
            "longest_silence_s": max(r["longest_silence_s"] or r["seconds"] for r in rows),
            "within_20_s": sum(r["seconds"] <= 20 and r["status"] == 0 for r in rows),
        }
    )


if __name__ == "__main__":
    main()
