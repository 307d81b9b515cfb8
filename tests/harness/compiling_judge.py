"""A judge that has a variant compiled in cells of its own, twice: what came of it first is known to the second."""

from __future__ import annotations

from forecast_harness.sandbox.api import CellAnswer, JobContext, TensorBytes
from forecast_harness.trials.variants.compilation import BESIDE_ENTRY, VariantCompiler
from forecast_harness.trials.variants.files import VARIANT_FILE, WRITE_ENTRY, binaries_as_arrays

MARK = b"not compiled anew"


def compile_twice(work: JobContext) -> CellAnswer:
    """The value has the names of all files; the arrays are the machine code, that of the first time marked."""
    calls = work.payload["calls"]
    files = dict(VariantCompiler(work, binaries_as_arrays(work.payload["binaries"])).compiled(calls).files)
    known = {
        name: TensorBytes("uint8", (len(MARK),), MARK) if name.endswith(".cubin") else array
        for name, array in files.items()
    }
    payload = {"file": VARIANT_FILE, "architecture": 90, "calls": calls, "launchers": True}
    with work.cell() as cell:
        cell.ask(WRITE_ENTRY, {}, known)
        again = cell.ask(BESIDE_ENTRY, payload).arrays if known else {}
    return CellAnswer(sorted(files), {n: a for n, a in again.items() if n.endswith(".cubin")})
