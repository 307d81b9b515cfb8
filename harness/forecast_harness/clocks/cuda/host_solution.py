"""A compiled CUDA kernel as a solution of its pack: a module of ours around machine code.

Verification and confirmation launch solutions in sandboxed cells. This is what they get of a CUDA source: the
only code of it that runs there is on the device.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping

from forecast_harness.clocks.cuda.compilation import CompiledSource
from forecast_harness.targets.cuda.signature import KernelSignature
from forecast_harness.targets.packs.schema import Language, Solution

_TEMPLATE = '''"""Launches machine code that nvcc has made of a CUDA source."""

from forecast_harness.clocks.cuda.cubin_launcher import CubinLauncher

_LAUNCHER = CubinLauncher({facts!r}, {image!r})


def run(**arguments):
    _LAUNCHER.launch(arguments)
'''


def host_solution(
    name: str, compiled: CompiledSource, signature: KernelSignature, config: Mapping[str, int]
) -> Solution:
    """The solution that launches a source in one config. Raises `RecordError` for machine code too large to be sent."""
    launch = compiled.launch
    facts = {
        "signature": signature.to_json(),
        "grid": list(launch.grid),
        "block": list(launch.block),
        "shared_bytes": launch.shared_bytes,
        "macros": launch.with_defaults(config),
    }
    image = base64.b85encode(zlib.compress(compiled.image, 9)).decode()
    text = _TEMPLATE.format(facts=json.dumps(facts), image=image)
    return Solution(name, Language.CUDA, text)
