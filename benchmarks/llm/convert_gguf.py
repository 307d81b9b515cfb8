"""Make a folder of bfloat16 safetensors of a GGUF file: local models are read from safetensors only.

    python -m benchmarks.llm.convert_gguf FILE.gguf FOLDER

Needs transformers, accelerate and gguf, and about twice the model's bfloat16 size in memory. Dequantising
takes a minute or two for 1.5 billion weights; a folder that is there already is left as it is.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path


def convert(file: Path, folder: Path) -> None:
    """Write the folder, which appears whole. Nothing of the file is executed, and no network is asked."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent),
        gguf_file=file.name,
        dtype=torch.bfloat16,
        # Otherwise the model stays quantised, and cannot be saved.
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    part = folder.with_name(f".{folder.name}.part")
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.replace(folder)


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("file", type=Path)
    made.add_argument("folder", type=Path)
    a = made.parse_args()
    begin = time.monotonic()
    if not (a.folder / "config.json").is_file():
        convert(a.file, a.folder)
    print(f"{a.folder}: {time.monotonic() - begin:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
