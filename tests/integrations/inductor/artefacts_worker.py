"""Real compilations and what they leave for others, one step per process: `python artefacts_worker.py STEP FOLDER`.

`session` is of `worker.py`; `make` compiles with us, `load` runs a package where nobody has heard of us, and `reuse`
starts from what caches were told alone. Each prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

PACKAGE, CACHES, BUNDLE = "product.pt2", "caches.bin", "bundle"


def factors(rows: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """The same two matrices in every process."""
    values = torch.arange(max(rows, 64) * 256, dtype=torch.float32) % 13 - 6
    return values[: rows * 256].reshape(rows, 256), values[: 256 * 64].reshape(256, 64)


def close(found: torch.Tensor, rows: int = 32) -> bool:
    a, b = factors(rows)
    return bool(torch.allclose(found, torch.relu(a @ b), atol=1e-2))


def square(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ x)


def make(folder: Path) -> dict[str, Any]:
    """Tune by the clock, save all caches, and compile a package ahead of time by forecast alone."""
    from forecast_autotune import enable_torch_compile
    from forecast_autotune.store.bundles import BundleOptions, write_bundle
    from forecast_autotune.store.merging import StoreFolder
    from forecast_integrations.inductor.summary import LISTENERS
    from tests.integrations.inductor import worker

    class FourParts(worker.Scripted):
        def log2_ms(self, candidate: Any) -> float:
            return abs(float(dict(candidate.config.kwargs).get("s") or 30) - 4.0)

    chosen: list[str] = []
    with enable_torch_compile(surrogate=worker.Scripted(), store=folder / "store"):
        first, again = compiled_product(fullgraph=True), compiled_product(fullgraph=True)
        compiled_square()
        found = torch.compiler.save_cache_artifacts()
    (folder / CACHES).write_bytes(found[0])
    write_bundle(StoreFolder(folder / "store"), folder / BUNDLE, BundleOptions(graphs=folder / CACHES))
    exported = torch.export.export(Product(), factors())
    LISTENERS.append(lambda label, decision: chosen.append(str(decision.chosen)))
    with enable_torch_compile(surrogate=FourParts(), store=folder / "other", mode="skip"), torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(folder / PACKAGE),
            inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
        )
    return {"first": first, "again": again, "kinds": sorted(found[1].artifacts), "packaged": chosen}


def load(folder: Path) -> dict[str, Any]:
    """Run the package."""
    found = torch._inductor.aoti_load_package(str(folder / PACKAGE))(*factors())
    return {"right": close(found), "ours": sorted(m for m in sys.modules if m.startswith("forecast_"))}


def reuse(folder: Path) -> dict[str, Any]:
    """Give empty caches what was saved, and compile without us and with us, also as nobody has compiled yet."""
    from forecast_autotune import enable_torch_compile
    from forecast_autotune.store.bundles import Bundle
    from tests.integrations.inductor import worker

    graphs = Bundle.open(folder / BUNDLE).graphs()
    assert graphs is not None
    torch.compiler.load_cache_artifacts(graphs)
    plain = compiled_square()
    with enable_torch_compile(surrogate=worker.Scripted(), store=folder / "unused"):
        known = {"square": compiled_square(), "product": compiled_product(fullgraph=True)}
    with enable_torch_compile(surrogate=worker.Scripted(), store=folder / "store"):
        mode = compiled_product(mode="max-autotune", fullgraph=True)
        wide = compiled_product(dynamic=True, fullgraph=True, mode="max-autotune-no-cudagraphs")
    return {"plain": plain, "known": known, "mode": mode, "dynamic": wide}


def compiled_square() -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        torch.compile(square)(torch.ones(8, 8))
    return _lookups()


class Product(torch.nn.Module):
    """A product of which Inductor has several decompositions."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.ops.fatest.product(a, b))


def compiled_product(**options: Any) -> dict[str, Any]:
    """Compile and run the product anew; twice, for another size, where that is dynamic."""
    from tests.integrations.inductor import worker

    torch._dynamo.reset()
    counters.clear()
    worker.HEARD.clear()
    compiled = torch.compile(Product(), **options)
    sizes = (32, 48) if options.get("dynamic") else (32,)
    with torch.no_grad():
        right = [close(compiled(*factors(rows)), rows) for rows in sizes]
    return {**_lookups(), "right": all(right), "rounds": len(worker.HEARD)}


def _lookups() -> dict[str, Any]:
    graphs = counters["inductor"]
    return {
        "hit": graphs["fxgraph_cache_hit"],
        "miss": graphs["fxgraph_cache_miss"],
        "graphs": counters["stats"]["unique_graphs"],
    }


def main() -> None:
    step, folder, steps = sys.argv[1], Path(sys.argv[2]), {"make": make, "load": load, "reuse": reuse}
    if step != "load":
        from tests.integrations.inductor import worker

        worker.prepare()
        steps["session"] = worker.session
    print(json.dumps(steps[step](folder)))


if __name__ == "__main__":
    main()
