"""The grammar of `train` and `eval`."""

from __future__ import annotations

from forecast_autotune.commands.registry import (
    COUNT,
    SEED,
    WORKERS,
    Commands,
    IntegerRange,
    store_option,
)


def train(commands: Commands) -> None:
    """Add `train`."""
    kinds = commands.group("train", "turn measurements into better surrogates", "what to train", "WHAT")
    forest = kinds.add(
        "surrogate",
        "forecast_train.commands.models:surrogate",
        "fit the learned surrogate to recorded tables, in seconds",
        examples=("train surrogate table.jsonl --out forest.npz",),
    )
    forest.add_argument("tables", nargs="*", metavar="TABLE", help="table files (default: the shipped ones)")
    forest.add_argument("--out", required=True, metavar="FILE", help="the model, one .npz file")
    forest.add_argument("--seed", type=SEED, default=0, metavar="N", help="seed of the forests")
    forest.add_argument(
        "--trees",
        type=IntegerRange(1, 10_000),
        default=64,
        metavar="N",
        help="trees of a forest (default: 64)",
    )
    honest = kinds.add(
        "calibrate-llm",
        "forecast_train.commands.calibrate_llm:calibrate",
        "find out what a language model's forecasts are worth: until then it is not asked",
        examples=("train calibrate-llm --llm transformers:/models/small",),
    )
    honest.add_argument("tables", nargs="*", metavar="TABLE", help="table files (default: the shipped ones)")
    honest.add_argument("--llm", required=True, metavar="SPEC", help="as in FORECAST_AUTOTUNE_LLM")
    honest.add_argument(
        "--out", metavar="FILE", help="default: beside the adapter, else in the cache directory"
    )
    honest.add_argument(
        "--answers", metavar="FILE", help="keep its answers in this .jsonl file; a second run takes them up"
    )
    honest.add_argument(
        "--seeds", type=IntegerRange(1, 1000), default=2, metavar="N", help="replays (default: 2)"
    )
    _models(kinds)


def evaluate(commands: Commands) -> None:
    """Add `eval`."""
    evaluation = commands.add(
        "eval",
        "forecast_train.commands.evaluate:evaluate",
        "score surrogates on kernels they have not seen, from tables",
        examples=("eval --leave-out family --seeds 1",),
    )
    evaluation.add_argument(
        "tables", nargs="*", metavar="TABLE", help="table files (default: the shipped ones)"
    )
    evaluation.add_argument(
        "--leave-out",
        choices=("family", "hand", "kernel", "shape", "device"),
        default="kernel",
        help="the part that a surrogate has not learnt from when it is tested (default: kernel)",
    )
    evaluation.add_argument("--methods", metavar="A,B", help="surrogates and baselines (default: all)")
    evaluation.add_argument(
        "--subject", metavar="NAME", help="the method under test (default: learned, else analytic)"
    )
    evaluation.add_argument(
        "--llm",
        metavar="SPEC",
        help="also a language model, alone and beside the learned surrogate; as in FORECAST_AUTOTUNE_LLM",
    )
    evaluation.add_argument(
        "--seeds", type=IntegerRange(1, 1000), default=3, metavar="N", help="repetitions (default: 3)"
    )
    evaluation.add_argument("--jobs", type=WORKERS, default=1, metavar="N", help="processes (default: 1)")
    evaluation.add_argument(
        "--limit", type=COUNT, metavar="N", help="only so many problems, in turn from each kernel"
    )
    evaluation.add_argument(
        "--out",
        metavar="DIR",
        help="write rows and summary.json there; a second run takes up the rows found there",
    )


def _models(kinds: Commands) -> None:
    data = kinds.add(
        "data",
        "forecast_train.commands.models:data",
        "turn measurements into a data set for language models",
        examples=("train data table.jsonl --out data",),
    )
    data.add_argument(
        "tables",
        nargs="*",
        metavar="TABLE",
        help="tables, or what `import` takes from other tuners (default: the shipped tables)",
    )
    data.add_argument("--device-name", metavar="NAME", help="the device of files that name none")
    data.add_argument("--from-store", action="store_true", help="use what the store holds instead")
    data.add_argument("--out", required=True, metavar="DIR", help="three Parquet files and a card go there")
    data.add_argument(
        "--hold-out", metavar="A,B", help="these families of kernels are the test side (default: drawn)"
    )
    data.add_argument(
        "--moments",
        type=IntegerRange(1, 10_000),
        default=6,
        metavar="N",
        help="examples per problem (default: 6)",
    )
    data.add_argument(
        "--most",
        type=IntegerRange(1, 100_000),
        default=64,
        metavar="N",
        help="candidates per example (default: 64)",
    )
    data.add_argument(
        "--guess",
        choices=("learned", "formula"),
        default="learned",
        help="whose guesses a model is shown: the learned surrogate's, fitted without the family asked about "
        "(some minutes), or the cost formula's",
    )
    data.add_argument("--seed", type=SEED, default=0, metavar="N", help="seed of the split and the examples")
    store_option(data)

    for name, answer in (
        ("llm", "train a language model on a data set, supervised"),
        ("grpo", "train a model that speaks, by rewards"),
    ):
        run = kinds.add(
            name,
            f"forecast_train.commands.models:{name}",
            answer,
            examples=(f"train {name} run.toml", f"train {name} run.toml --resume"),
        )
        run.add_argument(
            "config",
            metavar="RUN.toml",
            help="model, data, folder and settings of the run; docs/how_to/train_language_model.md has examples",
        )
        for option, what in (("model", "to start from"), ("data", "of `train data`"), ("out", "of the run")):
            run.add_argument(f"--{option}", metavar="DIR", help=f"instead of the file's: folder {what}")
        run.add_argument("--seed", type=SEED, metavar="N", help="instead of the file's")
        run.add_argument(
            "--resume", action="store_true", help="take up the newest checkpoint, if there is one"
        )

    export = kinds.add(
        "export",
        "forecast_train.commands.models:export",
        "write a finished run's adapter, with a card",
        examples=("train export run --out adapter",),
    )
    export.add_argument("run", metavar="DIR", help="the run's folder")
    export.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    export.add_argument("--calibration", metavar="FILE", help="of `train calibrate-llm`, to go with it")
