"""Supervised training on measured distributions: exact bin loss, ranking term, LoRA or all weights.

`transformers.Trainer` does the loop: checkpoints that resume to the same numbers, several GPUs through
`accelerate launch`, logging. Ours are the sequences (`packing`) and the loss (`losses`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from forecast_autotune.llm.backends.tokens import Tokens
from forecast_autotune.llm.bins import BINS
from forecast_train.llm import losses
from forecast_train.llm.examples import Example, read
from forecast_train.llm.packing import Packing, sequences
from forecast_train.llm.runs import WEIGHTS, TrainingError, claim, quiet, write_json
from forecast_train.llm.settings import Run

FAILURE = float(BINS.bounds[-1, 1] + 1.0)
"""log2 slowdown that a failure counts as in the ranking term: slower than the slowest bin."""


class BinTrainer(transformers.Trainer):
    """A `Trainer` whose batches are one `Packing` and whose loss is ours."""

    def __init__(self, *, labels: Sequence[int], run: Run, **options: Any) -> None:
        super().__init__(**options)
        # The loss is a mean over candidates: steps with several examples average those means.
        self.model_accepts_loss_kwargs = False
        self.run, self.label_ids = run, list(labels)
        self.centres = torch.as_tensor(BINS.bounds.mean(axis=1), dtype=torch.float32)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Loss of one sequence; `inputs` from `collate`."""
        logits = model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            position_ids=inputs["position_ids"],
            logits_to_keep=inputs["last"],
            use_cache=False,
        ).logits[0][:, self.label_ids]
        loss = self._loss(logits, inputs)
        return (loss, {"logits": logits}) if return_outputs else loss

    def _loss(self, logits: Any, inputs: dict[str, Any]) -> Any:
        wanted = self.run.loss
        if wanted.reward:
            return -losses.expected_reward(logits, inputs["label"], wanted.reward)  # type: ignore[arg-type]
        loss = losses.bin_loss(logits, inputs["target"].to(logits.device), wanted.rps)
        if wanted.rank:
            mean = losses.means(logits, self.centres.to(logits.device), FAILURE)
            group = torch.zeros_like(inputs["label"])
            loss = loss + wanted.rank * losses.rank_loss(mean, inputs["log2_ratio"], group)
        return loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, None, None]:
        """The loss alone: what a model states is scored through the backends that serve it."""
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None


def collate(batch: Sequence[Packing], dtype: Any) -> dict[str, Any]:
    """One sequence as tensors of batch size 1, with an additive tree mask."""
    (packed,) = batch
    allowed = torch.as_tensor(packed.seen())
    mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    return {
        "input_ids": torch.as_tensor(packed.ids)[None],
        "attention_mask": mask[None, None],
        "position_ids": torch.as_tensor(packed.positions)[None],
        "last": torch.as_tensor(packed.last),
        "target": torch.as_tensor(packed.target, dtype=torch.float32),
        "log2_ratio": torch.as_tensor(packed.log2_ratio, dtype=torch.float32),
        "label": torch.as_tensor(packed.label),
    }


def train(run: Run, *, resume: bool = False) -> dict[str, Any]:
    """Run it; writes checkpoints, `trained/` and `run.json` below `run.out`, and returns the latter.

    With `resume` the newest checkpoint there is taken up, if there is one. Raises `TrainingError` when
    `run.out` holds another run, `RecordError` for data that is none, `OSError` for a missing model.
    """
    out = Path(run.out)
    name = claim(out, asdict(run), resume)
    transformers.set_seed(run.seed)
    dtype = _dtype(run)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.model)
    tokens = Tokens(tokenizer)
    sides = {side: read(Path(run.data) / f"{side}.parquet") for side in ("train", "validation")}
    packed = {side: _packings(examples, tokens, run) for side, examples in sides.items()}
    if not packed["train"]:
        raise TrainingError(f"{run.data}: the training side is empty: build it from more tables")
    labels = tokens.labels([sides["train"][0].asked[0].suffix], BINS.labels)
    model = _model(run, dtype)
    trainer = BinTrainer(
        labels=labels,
        run=run,
        model=model,
        args=_arguments(run, out, dtype, bool(packed["validation"])),
        train_dataset=packed["train"],
        eval_dataset=packed["validation"] or None,
        data_collator=lambda batch: collate(batch, dtype),
    )
    quiet(trainer)
    newest = transformers.trainer_utils.get_last_checkpoint(str(out)) if resume else None
    found = trainer.train(resume_from_checkpoint=newest)
    trainer.save_model(str(out / WEIGHTS))
    tokenizer.save_pretrained(str(out / WEIGHTS))
    done = {
        "run": name,
        "settings": asdict(run),
        "steps": trainer.state.global_step,
        "resumed_from": newest,
        "train_loss": found.training_loss,
        "seconds": found.metrics.get("train_runtime", math.nan),
        "tokens": {side: int(sum(len(p.ids) for p in packs)) for side, packs in packed.items()},
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "log": trainer.state.log_history,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    if trainer.is_world_process_zero():
        write_json(out / "run.json", done)
    return done


def _packings(examples: Sequence[Example], tokens: Tokens, run: Run) -> list[Packing]:
    return [p for e in examples for p in sequences(e, tokens, most=run.steps.tokens, sigma=run.loss.sigma)]


def _dtype(run: Run) -> Any:
    if run.dtype:
        return getattr(torch, run.dtype)
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def _model(run: Run, dtype: Any) -> Any:
    # What trains does so in float32, as small steps vanish in bfloat16: all weights, or the adapters only.
    kept = dtype if run.lora.rank else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(
        run.model, dtype=kept, attn_implementation="sdpa"
    )
    model.config.use_cache = False
    if run.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if not run.lora.rank:
        return model
    import peft

    lora = peft.LoraConfig(
        r=run.lora.rank,
        lora_alpha=run.lora.alpha,
        lora_dropout=run.lora.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, lora)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


def _arguments(run: Run, out: Path, dtype: Any, validate: bool) -> Any:
    steps = run.steps
    cuda = torch.cuda.is_available()
    return transformers.TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=steps.examples,
        num_train_epochs=steps.epochs,
        max_steps=steps.most or -1,
        learning_rate=steps.rate,
        lr_scheduler_type="cosine",
        warmup_steps=steps.warmup,
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=steps.save,
        save_total_limit=2,
        eval_strategy="steps" if validate else "no",
        eval_steps=steps.validate,
        seed=run.seed,
        data_seed=run.seed,
        bf16=cuda and dtype == torch.bfloat16,
        use_cpu=not cuda,
        remove_unused_columns=False,
        label_names=["label"],
        report_to=list(_reporters()),
        dataloader_pin_memory=cuda,
        disable_tqdm=not os.isatty(2),
        ddp_find_unused_parameters=False,
    )


def _reporters() -> Iterator[str]:
    import importlib.util

    for name in ("tensorboard", "trackio"):
        if importlib.util.find_spec(name) is not None:
            yield name
