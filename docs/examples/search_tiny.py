"""Search for a faster source of a tiny problem on a CPU: propose, verify, time, keep the best.

The folder `pack` holds what a search needs to know of a problem: its arguments, a reference, the sizes to
time, and a solution to start from. The proposer deals sources that were written before; `mechanical`
rewrites the start, and `llm:SPEC` asks a language model.

Output (numbers may differ):

    best    31.8x over the seed, 95 % interval 21.8x to 46.4x, confirmed in a fresh process ... vector_norm.py
    spent   2 measurements, 16.3 s of device time
    ended   finished: measurements 2 of 2 spent
    folder  .../search: best.py, report.html, log.jsonl
    status 0; best.py is the proposal: True
"""

import json
import tempfile
from pathlib import Path

from forecast_autotune.commands import main as forecast_autotune

DEFINITION = {
    "schema": 1,
    "name": "row_norms",
    "description": "Euclidean norm of every row.",
    "axes": {"M": {"low": 1, "high": 40}, "N": {"low": 1, "high": 90}},
    "inputs": {"x": {"shape": ["M", "N"], "dtype": "float32"}},
    "outputs": {"y": {"shape": ["M"], "dtype": "float32"}},
    "tolerance": {"compute": "float32", "reduction": "N"},
    "flops": "2 * M * N",
}
REFERENCE = """
import torch

def reference(x):
    return torch.sqrt((x * x).sum(-1))
"""
START = """
import torch

def run(x):
    return torch.stack([torch.sqrt((row * row).sum()) for row in x])
"""
PROPOSAL = """
import torch

def run(x):
    return torch.linalg.vector_norm(x, dim=-1)
"""


def write_pack(pack: Path) -> None:
    """A problem pack: definition, reference, the sizes to time and one solution."""
    (pack / "solutions").mkdir(parents=True)
    (pack / "definition.json").write_text(json.dumps(DEFINITION))
    (pack / "reference.py").write_text(REFERENCE)
    (pack / "workloads.json").write_text(json.dumps([{"name": "many_rows", "axes": {"M": 256, "N": 128}}]))
    (pack / "solutions" / "by_row.py").write_text(START)


def main() -> None:
    """Search with one proposal, and read what the search leaves behind."""
    with tempfile.TemporaryDirectory() as folder:
        write_pack(Path(folder, "pack"))
        Path(folder, "proposals").mkdir()
        Path(folder, "proposals", "vector_norm.py").write_text(PROPOSAL)
        out = Path(folder, "search")
        # As typed in a shell, without the program's name; --gpu-budget counts measured sources.
        status = forecast_autotune(
            f"search {folder}/pack --device cpu --proposer recorded:{folder}/proposals --surrogate none "
            f"--gpu-budget 2 --quiet --out {out}".split()
        )
        print(
            f"status {status}; best.py is the proposal: {PROPOSAL.strip() in (out / 'best.py').read_text()}"
        )


if __name__ == "__main__":
    main()
