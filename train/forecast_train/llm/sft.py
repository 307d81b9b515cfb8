"""Supervised training on measured distributions: exact bin loss, ranking term, LoRA or all weights.

`transformers.Trainer` does the loop: checkpoints that resume to the same numbers, several GPUs through
`accelerate launch`, logging. Ours are the sequences (`packing`), the loss (`losses`) and the clock
(`timing`). Neither trl nor datasets nor pyarrow is needed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.tokenizer import ForecastTokenizer
from forecast_train.llm import losses
from forecast_train.llm.data.examples import Example, read_examples, side_path
from forecast_train.llm.data.packing import PackedSequence, pack_example
from forecast_train.llm.run_folder import (
    WEIGHTS_FOLDER,
    TrainingError,
    claim_run_folder,
    run_trainer,
    write_json,
)
from forecast_train.llm.settings import SftRun
from forecast_train.llm.training_clock import TrainingClock, peak_bytes, rate_schedule, reset_peak

FAILURE_LOG2_RATIO = float(BINS.bounds[-1, 1] + 1.0)
"""log2 slowdown that a failure counts as in the ranking term: slower than the slowest bin."""


class BinTrainer(transformers.Trainer):
    """A `Trainer` whose batches are `PackedSequence`s and whose loss is ours."""

    def __init__(self, *, labels: Sequence[int], run: SftRun, clock: TrainingClock, **options: Any) -> None:
        super().__init__(callbacks=[clock], **options)
        # The loss is a mean over candidates: steps with several examples average those means.
        self.model_accepts_loss_kwargs = False
        self.run, self.label_ids, self.clock = run, list(labels), clock
        self.centres = torch.as_tensor(BINS.bounds.mean(axis=1), dtype=torch.float32)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The cosine of `transformers`; under a time limit, one in the time that has passed."""
        if not self.run.steps.seconds:
            return super().create_scheduler(num_training_steps, optimizer)
        if getattr(self, "lr_scheduler", None) is None:
            clock, warmup = self.clock, self.run.steps.warmup

            def share(step: int) -> float:
                return rate_schedule(max(step / max(1, num_training_steps), clock.share()), warmup)

            chosen = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler: Any = torch.optim.lr_scheduler.LambdaLR(chosen, share)
        return self.lr_scheduler

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Mean of the sequences' losses; `inputs` from `collate`."""
        every = model(
            input_ids=inputs["input_ids"],
            attention_mask=tree_mask(inputs["segment"], _attention_dtype(model)),
            position_ids=inputs["position_ids"],
            logits_to_keep=inputs["kept"],
            use_cache=False,
        ).logits[:, :, self.label_ids]
        logits = every[inputs["row"], inputs["column"]]
        rows = [inputs["row"] == row for row in range(len(inputs["input_ids"]))]
        loss = torch.stack([self._loss(logits[mine], _of_sequence(inputs, mine)) for mine in rows]).mean()
        return (loss, {"logits": logits}) if return_outputs else loss

    def _loss(self, logits: Any, inputs: dict[str, Any]) -> Any:
        wanted = self.run.loss
        if wanted.reward:
            kind: Any = wanted.reward
            if wanted.replies:
                several = {"replies": wanted.replies, "draws": wanted.draws}
                return -losses.sampled_reward(logits, inputs["label"], kind, **several)
            return -losses.expected_reward(logits, inputs["label"], kind)
        loss = losses.bin_loss(logits, inputs["target"].to(logits.device), wanted.rps)
        if wanted.rank:
            mean = losses.expected_log2_ratio(logits, self.centres.to(logits.device), FAILURE_LOG2_RATIO)
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


_CANDIDATE_FIELDS = ("target", "log2_ratio", "label")


def _of_sequence(inputs: dict[str, Any], mine: Any) -> dict[str, Any]:
    """What belongs to the candidates of one sequence."""
    return {name: inputs[name][mine] for name in _CANDIDATE_FIELDS}


def collate(batch: Sequence[PackedSequence]) -> dict[str, Any]:
    """B sequences as tensors [B, length], padded behind; `tree_mask` makes their masks where the model is.

    The n candidates of all of them follow each other: `row` [n] is a candidate's sequence, and its answer is
    read at position `kept[column]`. `kept` are the positions at which any sequence is read: the model's last
    layer, its widest, is asked for those alone.
    """
    ends = np.concatenate([p.last for p in batch])
    kept, column = np.unique(ends, return_inverse=True)
    return {
        "input_ids": _padded([p.ids for p in batch], 0),
        "position_ids": _padded([p.positions for p in batch], 0),
        "segment": _padded([p.segment for p in batch], -1),
        "kept": torch.as_tensor(kept),
        "column": torch.as_tensor(column),
        "row": torch.as_tensor(np.repeat(np.arange(len(batch)), [len(p.last) for p in batch])),
        "target": torch.as_tensor(np.concatenate([p.target for p in batch]), dtype=torch.float32),
        "log2_ratio": torch.as_tensor(np.concatenate([p.log2_ratio for p in batch]), dtype=torch.float32),
        "label": torch.as_tensor(np.concatenate([p.label for p in batch])),
    }


def _padded(rows: Sequence[Any], filler: int) -> Any:
    tensors = [torch.as_tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=filler)


def tree_mask(segment: Any, dtype: Any) -> Any:
    """What each token may attend to, as an additive mask [B, 1, length, length]; `segment` [B, length].

    As `PackedSequence.seen`; padding, a segment of its own, is seen by nobody else. It has 10^7 entries and more:
    made on the host and sent over, it would take longer than a small model's pass.
    """
    order = torch.arange(segment.shape[1], device=segment.device)
    mine = (segment[:, None, :] == 0) | (segment[:, None, :] == segment[:, :, None])
    hidden = ~((order[None, :] <= order[:, None]) & mine)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=segment.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


def _attention_dtype(model: Any) -> Any:
    """The dtype of the attention's inputs: that of autocast where it is on, else of the weights."""
    first = next(model.parameters())  # of the embedding; wrappers for several GPUs have no dtype
    if torch.is_autocast_enabled(first.device.type):
        return torch.get_autocast_dtype(first.device.type)
    return first.dtype


def train(run: SftRun, *, resume: bool = False, say: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Run it; writes checkpoints, `trained/` and `run.json` below `run.out`, and returns the latter.

    With `resume` the newest checkpoint there is taken up, if there is one. `say` hears a line of progress
    every few seconds. Raises `TrainingError` when `run.out` holds another run or the loss is no number any
    more, `RecordError` for data that is none, `OSError` for a missing model.
    """
    out = Path(run.out)
    name = claim_run_folder(out, asdict(run), resume)
    transformers.set_seed(run.seed)
    dtype = _dtype(run)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.model)
    tokens = ForecastTokenizer(tokenizer)
    sides = {side: read_examples(side_path(Path(run.data), side)) for side in ("train", "validation")}
    begin = time.perf_counter()
    packed = {side: _packed_examples(examples, tokens, run) for side, examples in sides.items()}
    if not packed["train"]:
        raise TrainingError(f"{run.data}: the training side is empty: build it from more tables")
    packed["validation"] = _spread_evenly(packed["validation"], run.steps.checked)
    labels = tokens.labels([sides["train"][0].candidates[0].suffix], BINS.labels)
    counts = {side: int(sum(len(p.ids) for p in packs)) for side, packs in packed.items()}
    per_step = run.steps.examples * counts["train"] / len(packed["train"])
    tell = say or (lambda line: None)
    tell(
        f"{len(packed['train'])} sequences, {counts['train']} tokens, in {time.perf_counter() - begin:.0f} s"
    )
    model = _model(run, dtype)
    reset_peak()
    clock = TrainingClock(run.steps.seconds, per_step, tell)
    trainer = BinTrainer(
        labels=labels,
        run=run,
        clock=clock,
        model=model,
        args=_arguments(run, out, dtype, bool(packed["validation"])),
        train_dataset=packed["train"],
        eval_dataset=packed["validation"] or None,
        data_collator=collate,
    )
    newest, found = run_trainer(trainer, out, resume=resume)
    trainer.save_model(str(out / WEIGHTS_FOLDER))
    tokenizer.save_pretrained(str(out / WEIGHTS_FOLDER))
    done = {
        "run": name,
        "settings": asdict(run),
        "steps": trainer.state.global_step,
        "resumed_from": newest,
        "train_loss": found.training_loss,
        "seconds": found.metrics.get("train_runtime", 0.0),
        "tokens": counts,
        "seconds_per_step": clock.pace(),
        "tokens_per_s": per_step / clock.pace() if clock.pace() else 0.0,
        "peak_bytes": peak_bytes(),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "log": trainer.state.log_history,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    if trainer.is_world_process_zero():
        write_json(out / "run.json", done)
    return done


def _spread_evenly(packs: list[PackedSequence], most: int) -> list[PackedSequence]:
    """At most so many, evenly from first to last; 0: all."""
    if not most or len(packs) <= most:
        return packs
    return [packs[i * len(packs) // most] for i in range(most)]


def _packed_examples(
    examples: Sequence[Example], tokens: ForecastTokenizer, run: SftRun
) -> list[PackedSequence]:
    return [p for e in examples for p in pack_example(e, tokens, most=run.steps.tokens, sigma=run.loss.sigma)]


def _dtype(run: SftRun) -> Any:
    if run.dtype:
        return getattr(torch, run.dtype)
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def _model(run: SftRun, dtype: Any) -> Any:
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

    if run.adapter:
        return _trainable_in_float32(peft.PeftModel.from_pretrained(model, run.adapter, is_trainable=True))
    lora = peft.LoraConfig(
        r=run.lora.rank,
        lora_alpha=run.lora.alpha,
        lora_dropout=run.lora.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return _trainable_in_float32(peft.get_peft_model(model, lora))


def _trainable_in_float32(adapted: Any) -> Any:
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


def _arguments(run: SftRun, out: Path, dtype: Any, validate: bool) -> Any:
    steps = run.steps
    cuda = torch.cuda.is_available()
    return transformers.TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=steps.batch,
        per_device_eval_batch_size=steps.batch,
        gradient_accumulation_steps=steps.examples // steps.batch,
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
