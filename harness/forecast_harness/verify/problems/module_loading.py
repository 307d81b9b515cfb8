"""Imports text that is trusted: a pack's reference, say. Runs in the judge."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

from forecast_autotune.errors import RecordError

_MODULE_COUNTER = itertools.count()


def load_module(text: str, folder: Path, name: str) -> ModuleType:
    """Import trusted Python text from a file, so that tracebacks and Triton find its source.

    Text with `# --- file: NAME` lines is split into modules that can import each other.
    """
    parts = text.split("# --- file: ")
    named = [p.partition("\n")[::2] for p in parts[1:]] or [(f"{name}_{next(_MODULE_COUNTER)}", text)]
    module = ModuleType(name)
    for title, body in named:
        file = folder / f"{title.strip()}.py"
        file.write_text(body)
        spec = importlib.util.spec_from_file_location(title.strip(), file)
        if spec is None or spec.loader is None:
            raise RecordError(f"cannot import {file}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[title.strip()] = module
        spec.loader.exec_module(module)
    return module
