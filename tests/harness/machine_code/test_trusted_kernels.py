"""The runner's own kernels are programs that the assembler takes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from forecast_harness.machine_code.runner import trusted_kernels

triton = pytest.importorskip("triton")


@pytest.mark.parametrize("name", ["_ADD", "_PAUSE", "_OVERWRITE", "_COMPARE", "_DIGEST"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_assembler_takes_it(tmp_path: Path, name: str, arch: str) -> None:
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not assembler.exists():
        pytest.skip("this Triton has no ptxas")
    source = tmp_path / "kernel.ptx"
    source.write_text(trusted_kernels._HEADER + getattr(trusted_kernels, name))
    command = [str(assembler), f"--gpu-name={arch}", str(source), "-o", str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
