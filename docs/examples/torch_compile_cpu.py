"""Let forecasts plan what torch.compile's max-autotune measures, here on a CPU.

On a CPU Inductor has few choices: for a frozen linear layer the library's kernel and a C++ template, both
of which are always measured. On a GPU the same call plans which of many Triton templates are compiled.
Needs a C++ compiler, as torch.compile does on a CPU.

Output (numbers may differ; Inductor reports on stderr as well):

    forecast_autotune packed_linear(64x128, 1459233x1, 256x128): 2 candidates, all forecast, 2 measured, ...
    result is right: True; choices measured so far: 2
    forecast_autotune packed_linear(64x128, 1459233x1, 256x128): 2 candidates; nothing timed; ...
    result is right: True; choices measured so far: 2
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a few small files: no pool of workers

import torch

from forecast_autotune import Store, enable_torch_compile

OPTIONS = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
# Weights are constants; and what is compiled again is not taken from Inductor's cache of graphs.
CONFIG = {"freezing": True, "fx_graph_cache": False}


def compile_and_run() -> bool:
    """Compile a linear layer, and compare its result with eager mode's."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(128, 256).eval(), torch.randn(64, 128)
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(CONFIG):
        return torch.allclose(torch.compile(layer, options=OPTIONS)(x), layer(x), atol=1e-3)


with tempfile.TemporaryDirectory() as folder:
    store = Store(Path(folder))
    with enable_torch_compile(store=store):
        for _ in range(2):
            right = compile_and_run()
            measured = sum(len(table.measurements) for table in store.tables())
            print(f"result is right: {right}; choices measured so far: {measured}")
