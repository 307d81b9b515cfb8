"""The grammar of `train data`, `train llm`, `train grpo`, `train export`, `train traces`, `train online`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[[Any, str, str, str, str], argparse.ArgumentParser]
"""(subparsers, name, module, function, help) -> the parser of one command."""


def training(kinds: Any, command: Command, store: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add these commands to `train`; `store` adds the option that names a store."""
    data = command(kinds, "data", "training", "data", "turn measurements into a data set for language models")
    data.add_argument(
        "tables",
        nargs="*",
        metavar="TABLE",
        help="tables, or what `import` takes from other tuners (default: the shipped tables)",
    )
    data.add_argument("--device-name", metavar="NAME", help="where those were measured, if they do not say")
    data.add_argument("--from-store", action="store_true", help="use what the store holds instead")
    data.add_argument("--out", required=True, metavar="DIR", help="three Parquet files and a card go there")
    data.add_argument(
        "--by",
        choices=("family", "device", "time"),
        default="family",
        help="what training, validation and test must not share (default: family)",
    )
    data.add_argument("--hold-out", metavar="A,B", help="these families or devices are the test side")
    data.add_argument("--moments", type=int, default=6, metavar="N", help="examples per problem (default: 6)")
    data.add_argument("--most", type=int, default=64, metavar="N", help="candidates of one (default: 64)")
    data.add_argument(
        "--per-bin", type=int, default=0, metavar="N", help="training rows per bin at the most (default: all)"
    )
    data.add_argument(
        "--guess",
        choices=("learned", "formula"),
        default="learned",
        help="whose guesses a model is shown: the learned surrogate's, fitted without the family asked about "
        "(some minutes), or the cost formula's",
    )
    data.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the split and the examples")
    store(data)

    for name, said in (
        ("llm", "train a language model on a data set, supervised"),
        ("grpo", "train a model that speaks, by rewards"),
    ):
        run = command(kinds, name, "training", name, said)
        run.add_argument("config", metavar="RUN.toml", help="what reproduces the run; see the README")
        for option, what in (("model", "to start from"), ("data", "of `train data`"), ("out", "of the run")):
            run.add_argument(f"--{option}", metavar="DIR", help=f"instead of the file's: folder {what}")
        run.add_argument("--seed", type=int, metavar="N", help="instead of the file's")
        run.add_argument(
            "--resume", action="store_true", help="take up the newest checkpoint, if there is one"
        )

    export = command(kinds, "export", "training", "export", "write a finished run's adapter, with a card")
    export.add_argument("run", metavar="DIR", help="the run's folder")
    export.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    export.add_argument("--half", action="store_true", help="store the weights as bfloat16: half the size")
    export.add_argument("--calibration", metavar="FILE", help="of `train calibrate-llm`, to go with it")

    traces = command(
        kinds, "traces", "training", "traces", "keep the shortest correct trace per problem, for writers"
    )
    traces.add_argument("files", nargs="+", metavar="FILE", help="JSON Lines with traces")
    traces.add_argument("--out", required=True, metavar="FILE", help="dialogues as JSON Lines")
    traces.add_argument("--keep", type=int, default=1, metavar="N", help="traces per problem (default: 1)")
    traces.add_argument(
        "--slack",
        type=float,
        default=0.05,
        metavar="X",
        help="slower than the fastest by at most (default: 0.05)",
    )

    online = command(
        kinds, "online", "training", "online", "refit the learned surrogate whenever the store has grown"
    )
    online.add_argument(
        "--every", type=int, default=1000, metavar="N", help="after so many measurements (default: 1000)"
    )
    online.add_argument("--out", metavar="FILE", help="the model, one .npz (default: beside the store)")
    online.add_argument("--once", action="store_true", help="look once, and end")
    online.add_argument(
        "--wait", type=float, default=60.0, metavar="S", help="seconds between looks (default: 60)"
    )
    online.add_argument("--roll-back", action="store_true", help="put the model before the last one back")
    online.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the forests")
    store(online)
