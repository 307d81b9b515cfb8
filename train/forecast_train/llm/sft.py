"""Supervised training on measured distributions: exact bin loss, ranking term, LoRA or all weights.

`transformers.Trainer` does the loop: checkpoints that resume to the same numbers, several GPUs through
`accelerate launch`, logging. Ours are the sequences and the loss. An example is one sequence: the prefix once,
every candidate behind it, none seeing another. Training so reads as forecasting does: the same tokens, positions
that continue from the prefix for every suffix, and the labels' logits at each suffix' last token. A model that a
packed sequence tells something else (windows, recurrences) reads every candidate's prompt alone. At the end it is
written down how the model answers (`llm.probe`): whoever serves it has to answer alike.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as functional
import transformers
from torch import Tensor

from forecast_autotune.errors import ForecastAutotuneError, RecordError
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.probe import PROMPTS, TOLERANCE, Probe, ProbeQuestion, write_probe
from forecast_autotune.llm.providers import provider
from forecast_autotune.llm.tokenizer import ForecastTokenizer
from forecast_train.llm.data.examples import Example, read_examples
from forecast_train.llm.runs import (
    WEIGHTS_FOLDER,
    TrainingError,
    claim_run_folder,
    finished_run,
    require_positions,
    run_trainer,
    write_json,
)
from forecast_train.llm.settings import SftRun
from forecast_train.splits import rows_by_tool

_FAILURE_LOG2_RATIO = float(BINS.bounds[-1, 1] + 1.0)
"""log2 slowdown that a failure counts as in the ranking term: slower than the slowest bin."""

_TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackedSequence:
    """One sequence of `length` tokens with n candidates."""

    ids: _TokenIds
    """[length]"""
    positions: _TokenIds
    """[length]"""
    segment: _TokenIds
    """[length]: 0 for the prefix, k + 1 for candidate k."""
    last: _TokenIds
    """[n]: where each candidate's answer is read."""
    target: npt.NDArray[np.float64]
    """[n, bins + 1] soft targets."""
    log2_ratio: npt.NDArray[np.float64]
    """[n], NaN: failed."""

    def part(self, *candidates: int) -> PackedSequence:
        """The same with these candidates only."""
        rows = np.unique(np.arange(len(self.last))[list(candidates)])
        segments = np.concatenate([[0], rows + 1])
        is_kept = np.isin(self.segment, segments)
        return PackedSequence(
            self.ids[is_kept],
            self.positions[is_kept],
            np.searchsorted(segments, self.segment[is_kept]),
            is_kept.cumsum()[self.last[rows]] - 1,
            self.target[rows],
            self.log2_ratio[rows],
        )


def pack_example(
    example: Example, tokens: ForecastTokenizer, *, most: int, sigma: float, packed: bool = True
) -> list[PackedSequence]:
    """The example as sequences of at most `most` tokens; each repeats the prefix.

    `sigma` is the width of soft targets; where a measurement's own noise is larger, that is used. Without `packed`,
    the prefix counts for each candidate. Raises `RecordError` where the prefix and one candidate are longer than
    `most`.
    """
    prefix = tokens.prefix(example.prefix)
    suffixes = tokens.suffixes([a.suffix for a in example.candidates])
    if len(prefix) + max(map(len, suffixes)) > most:
        raise RecordError(
            f"an example of {example.origin.kernel} needs {len(prefix)} + {max(map(len, suffixes))} tokens, "
            f"more than steps.tokens = {most}: raise it"
        )
    common, each = (len(prefix), 0) if packed else (0, len(prefix))
    shares: list[list[int]] = [[]]
    for i in range(len(suffixes)):
        if common + sum(each + len(suffixes[k]) for k in [*shares[-1], i]) > most:
            shares.append([])
        shares[-1].append(i)
    return [_pack_candidates(example, prefix, suffixes, rows, sigma) for rows in shares]


def _pack_candidates(
    example: Example, prefix: _TokenIds, suffixes: Sequence[_TokenIds], rows: Sequence[int], sigma: float
) -> PackedSequence:
    parts = [suffixes[i] for i in rows]
    lengths = np.array([len(s) for s in parts])
    positions = [np.arange(len(s)) + len(prefix) for s in parts]
    candidates = [example.candidates[i] for i in rows]
    widths = [sigma if math.isnan(a.log2_sd) else max(sigma, a.log2_sd) for a in candidates]
    target = [BINS.soft_targets([a.log2_ratio], width) for a, width in zip(candidates, widths, strict=True)]
    return PackedSequence(
        np.concatenate([prefix, *parts]),
        np.concatenate([np.arange(len(prefix)), *positions]),
        np.repeat(np.arange(len(parts) + 1), [len(prefix), *lengths]),
        len(prefix) + lengths.cumsum() - 1,
        np.concatenate(target),
        np.array([a.log2_ratio for a in candidates]),
    )


def collate(batch: Sequence[PackedSequence], packed: bool = True) -> dict[str, Any]:
    """B sequences as tensors [B, length], padded behind; `tree_mask` makes their masks where the model is.

    The n candidates of all of them follow each other: `owner` [n] is a candidate's sequence, `row` where it is read,
    at position `kept[column]`. `kept` are the positions at which any row is read: the model's last layer, its widest,
    is asked for those alone. Without `packed`, every candidate has a row of its own, [n, length].
    """
    owner = np.repeat(np.arange(len(batch)), [len(p.last) for p in batch])
    if packed:
        inputs = {
            "input_ids": _pad([p.ids for p in batch], 0),
            "position_ids": _pad([p.positions for p in batch], 0),
            "segment": _pad([p.segment for p in batch], -1),
        }
        row, ends = owner, np.concatenate([p.last for p in batch])
    else:
        prompts = [p.ids[(p.segment == 0) | (p.segment == k + 1)] for p in batch for k in range(len(p.last))]
        inputs = {"input_ids": _pad(prompts, 0)}
        row, ends = np.arange(len(prompts)), np.array([len(ids) - 1 for ids in prompts])
    positions, column = np.unique(ends, return_inverse=True)
    return {
        **inputs,
        "kept": torch.as_tensor(positions),
        "column": torch.as_tensor(column),
        "row": torch.as_tensor(row),
        "owner": torch.as_tensor(owner),
        "target": torch.as_tensor(np.concatenate([p.target for p in batch]), dtype=torch.float32),
        "log2_ratio": torch.as_tensor(np.concatenate([p.log2_ratio for p in batch]), dtype=torch.float32),
    }


def _pad(rows: Sequence[Any], filler: int) -> Any:
    tensors = [torch.as_tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=filler)


def tree_mask(segment: Any, dtype: Any) -> Any:
    """The tokens that each token may attend to, as an additive mask [B, 1, length, length]; `segment` [B, length].

    The prefix sees what stands before; a candidate also itself. Padding, a segment of its own, is seen by nobody
    else. The mask has 10^7 entries and more: made on the host and sent over, it would take longer than a small
    model's pass.
    """
    order = torch.arange(segment.shape[1], device=segment.device)
    is_own = (segment[:, None, :] == 0) | (segment[:, None, :] == segment[:, :, None])
    is_hidden = ~((order[None, :] <= order[:, None]) & is_own)
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=segment.device)
    return mask.masked_fill_(is_hidden, torch.finfo(dtype).min)[:, None]


def bin_loss(log_p: Tensor, target: Tensor, rps_weight: float = 0.5) -> Tensor:
    """Cross-entropy with soft targets + `rps_weight` x ranked probability score, mean over the rows.

    `log_p`, among all tokens, and soft `target` are [n, labels], the bins in order and "fails" last. Cross-entropy
    charges what lies on other tokens, too: an answer with little on the labels is not heard. It is blind to the order
    of the bins; the second term charges by distance, among the labels.
    """
    entropy = -(target * log_p).sum(dim=-1)
    gap = (functional.softmax(log_p, dim=-1).cumsum(dim=-1) - target.cumsum(dim=-1))[:, :-1]
    return (entropy + rps_weight * gap.square().sum(dim=-1)).mean()


def _expected_log2_ratio(log_p: Tensor, centres: Tensor, failure: float) -> Tensor:
    """Expected log2(time / reference time) per row, [n]; `centres` [bins], a failure counts as `failure`."""
    values = torch.cat([centres, centres.new_tensor([failure])])
    return functional.softmax(log_p, dim=-1) @ values


def rank_loss(mean: Tensor, log2_ratio: Tensor, *, noise: float = 0.04) -> Tensor:
    """Pairwise logistic loss on candidates that are told apart by more than `noise` log2 units.

    `mean` [n] is what the model expects, `log2_ratio` [n] what was measured (NaN: failed, slower than all)
    (RankNet, Burges et al. 2005; the difference is in log2 units, scaled so that one `noise` apart is a logit
    of 1). 0 where there is no such pair.
    """
    truth = torch.where(torch.isnan(log2_ratio), torch.full_like(log2_ratio, 1e3), log2_ratio)
    faster = truth[None, :] - truth[:, None] > noise
    if not bool(faster.any()):
        return mean.sum() * 0.0
    gap = (mean[None, :] - mean[:, None]) / noise
    return functional.softplus(-gap)[faster].mean() * noise


def answer_log_p(model: Any, inputs: Mapping[str, Any], labels: Sequence[int]) -> Tensor:
    """The labels' log-probabilities among all tokens at the n candidates, float32 [n, labels]; `inputs` from `collate`.

    Their logits are made of the last hidden state in float32: a model's own head in bfloat16 has 8 bits, and labels
    tie.
    """
    extra: dict[str, Any] = {}
    if "segment" in inputs:
        extra = {
            "attention_mask": tree_mask(inputs["segment"], _attention_dtype(model)),
            "position_ids": inputs["position_ids"],
        }
    head = getattr(model, "module", model).get_output_embeddings()

    def answers(values: Tensor) -> Tensor:
        is_subset = values.shape[1] == len(inputs["kept"])  # some families give every position all the same
        return values[inputs["row"], inputs["column"] if is_subset else inputs["kept"][inputs["column"]]]

    def exact(states: Tensor) -> Tensor:
        own_states = answers(states)
        every = torch.nn.Linear.forward(head, own_states).float()
        with torch.autocast(own_states.device.type, enabled=False):
            bias = None if head.bias is None else head.bias[labels].float()
            own = functional.linear(own_states.float(), head.weight[labels].float(), bias)
        return every.index_copy(-1, torch.as_tensor(labels, device=own.device), own)[:, None]

    plain = type(head) is torch.nn.Linear
    if plain:
        head.forward = exact
    try:
        logits = model(
            input_ids=inputs["input_ids"], logits_to_keep=inputs["kept"], use_cache=False, **extra
        ).logits
    finally:
        if plain:
            del head.forward
    logits = logits[:, 0] if plain else answers(logits).float()
    return logits[:, labels] - logits.logsumexp(dim=-1, keepdim=True)


class BinTrainer(transformers.Trainer):
    """A `Trainer` whose batches are `PackedSequence`s and whose loss is ours."""

    def __init__(self, *, labels: Sequence[int], run: SftRun, **options: Any) -> None:
        super().__init__(**options)
        # The loss is a mean over candidates: steps with several examples average those means.
        self.model_accepts_loss_kwargs = False
        self.run, self.label_ids = run, list(labels)
        self.centres = torch.as_tensor(BINS.bounds.mean(axis=1), dtype=torch.float32)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Mean of the sequences' losses; `inputs` from `collate`."""
        log_p = answer_log_p(model, inputs, self.label_ids)
        losses = []
        for sequence in range(int(inputs["owner"][-1]) + 1):
            rows = inputs["owner"] == sequence
            losses.append(self._loss(log_p[rows], inputs["target"][rows], inputs["log2_ratio"][rows]))
        loss = torch.stack(losses).mean()
        return (loss, {"logits": log_p}) if return_outputs else loss

    def _loss(self, log_p: Any, target: Any, log2_ratio: Any) -> Any:
        settings = self.run.loss
        loss = bin_loss(log_p, target.to(log_p.device), settings.rps)
        if settings.rank:
            mean = _expected_log2_ratio(log_p, self.centres.to(log_p.device), _FAILURE_LOG2_RATIO)
            loss = loss + settings.rank * rank_loss(mean, log2_ratio)
        return loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, None, None]:
        """The loss alone: a model's statements are scored through the backends that serve it."""
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None


def _attention_dtype(model: Any) -> Any:
    """The dtype of the attention's inputs: that of autocast where it is on, else of the weights."""
    first = next(model.parameters())  # of the embedding; wrappers for several GPUs have no dtype
    if torch.is_autocast_enabled(first.device.type):
        return torch.get_autocast_dtype(first.device.type)
    return first.dtype


def reads_packed(model: Any, sequences: Sequence[PackedSequence], labels: Sequence[int]) -> bool:
    """Whether a packed sequence tells the model what each candidate's prompt alone tells it.

    Not so where a layer keeps anything but keys and values (candidates would see each other), has a window that is
    shorter than a prompt, or answers the last candidate of the longest sequence otherwise behind the first. Raises
    as the model does where it cannot even read a prompt alone.
    """
    longest_sequence = max(sequences, key=lambda p: int(p.positions.max()))
    alone_log_p = _log_p(model, collate([longest_sequence.part(-1)], False), labels)
    cache = transformers.DynamicCache(config=model.config.get_text_config())
    longest = max(int(p.positions.max()) + 1 for p in sequences)
    for layer in cache.layers:
        window = getattr(layer, "sliding_window", None) or longest
        if not hasattr(layer, "keys") or hasattr(layer, "conv_states") or window < longest:
            return False
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "position_ids" not in inspect.signature(base.forward).parameters:
        return False
    try:
        packed_log_p = _log_p(model, collate([longest_sequence.part(0, -1)]), labels)[-1:]
    except (TypeError, ValueError, RuntimeError, NotImplementedError):  # it takes no such mask or positions
        return False
    # Rounding takes other ways through the two: in bfloat16 an early look, and the probe has the last word.
    return float((packed_log_p - alone_log_p).abs().max()) <= (1e-4 if model.dtype == torch.float32 else 0.5)


def _log_p(model: Any, inputs: Mapping[str, Any], labels: Sequence[int]) -> Tensor:
    """Log-probabilities of the labels among themselves, [n, labels], without dropout and gradients."""
    was_training, device = model.training, next(model.parameters()).device
    on_device = {k: v.to(device) for k, v in inputs.items()}
    with torch.no_grad():
        result = functional.log_softmax(answer_log_p(model.eval(), on_device, labels), dim=-1)
    model.train(was_training)
    return result


def record_probe(
    model: Any,
    examples: Sequence[Example],
    tokens: ForecastTokenizer,
    most: int = 1 << 20,
    packed: bool | None = None,
) -> Probe:
    """Return the model's answers to up to `PROMPTS` prompts in float32, of the longest examples, which try it most.

    The model is left in bfloat16, to see whether that answers alike. `packed` is found out where it is not given.
    """
    by_length = sorted(examples, key=lambda e: -len(e.prefix))
    labels = tokens.labels([by_length[0].candidates[0].suffix], BINS.labels)
    model.float()
    questions: list[ProbeQuestion] = []
    sequences: list[PackedSequence] = []
    for e in by_length:
        room = PROMPTS - sum(len(q.suffixes) for q in questions)
        if not room:
            break
        sample = replace(e, candidates=e.candidates[:: -(-len(e.candidates) // room)])
        parts = pack_example(sample, tokens, most=most, sigma=1.0, packed=packed is not False)
        if packed is None:
            packed = reads_packed(model, parts, labels)
        log_p = torch.cat([_log_p(model, collate([p], packed), labels) for p in parts]).cpu()
        sequences += parts
        suffixes = [a.suffix for a in sample.candidates]
        prefix_ids, suffix_ids = tokens.prefix(e.prefix), tokens.suffixes(suffixes)
        questions.append(
            ProbeQuestion(
                e.prefix,
                tuple(suffixes),
                tuple(map(int, prefix_ids)),
                tuple(tuple(map(int, ids)) for ids in suffix_ids),
                tuple(tuple(round(x, 6) for x in row) for row in log_p.tolist()),
            )
        )
    error = math.inf
    with contextlib.suppress(RuntimeError):  # some families compute in float32 alone
        model.bfloat16()
        rounded = torch.cat([_log_p(model, collate([p], bool(packed)), labels) for p in sequences]).cpu()
        error = float((rounded - torch.tensor([row for q in questions for row in q.log_p])).abs().max())
    dtype = "bfloat16" if error <= TOLERANCE["bfloat16"] else "float32"
    return Probe(dtype, tuple(labels), tuple(questions))


def serve(model: str, trained: Path, probe: Probe) -> None:
    """Keep the probe, and answer it as the forecaster does, who on this machine then need not answer it again.

    `model` is the one that an adapter in `trained` is for. Raises `TrainingError` where it is refused.
    """
    write_probe(trained, probe)
    adapter = (trained / "adapter_config.json").is_file()
    spec = f"transformers:{model}?adapter={quote(str(trained))}" if adapter else f"transformers:{trained}"
    try:
        backend = provider().backend(spec)
        backend.prepare()
        backend.close()
    except ForecastAutotuneError as error:
        raise TrainingError(f"{trained} is not served as it was trained: {error}") from error


def train(run: SftRun, *, resume: bool = False) -> dict[str, Any]:
    """Run it; writes checkpoints, `trained/` and `run.json` below `run.out`, and returns the latter.

    With `resume` the newest checkpoint there is taken up, if there is one. Raises `TrainingError` when `run.out`
    holds another run, the model cannot be served as it is trained, or the loss is no number any more; `RecordError`
    for data that is none, `OSError` for a missing model.
    """
    out = Path(run.out)
    name = claim_run_folder(out, asdict(run), resume)
    if earlier_run := finished_run(out, name, resume):
        return earlier_run
    transformers.set_seed(run.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.model)
    tokens = ForecastTokenizer(tokenizer)
    sides = {side: read_examples(Path(run.data) / f"{side}.parquet") for side in ("train", "validation")}
    if not sides["train"]:
        raise TrainingError(f"{run.data}: the training side is empty: build it from more tables")

    def pack(examples: Sequence[Example], packed: bool) -> list[PackedSequence]:
        options = {"most": run.steps.tokens, "sigma": run.loss.sigma, "packed": packed}
        return [sequence for e in examples for sequence in pack_example(e, tokens, **options)]  # type: ignore[arg-type]

    packs = {side: pack(examples, True) for side, examples in sides.items()}
    model = _model(run)
    longest = max(int(p.positions.max()) + 1 for part in packs.values() for p in part)
    require_positions(model.config, longest, "build the data from shorter sources")
    labels = tokens.labels([sides["train"][0].candidates[0].suffix], BINS.labels)
    try:
        packed = reads_packed(model, packs["train"], labels)
    except Exception as error:  # a model may have any structure
        raise TrainingError(
            f"a {model.config.model_type} must read a prompt before it is trained, and fails "
            f"({type(error).__name__}: {str(error)[:300]}): "
            + ("train all weights with lora.rank = 0, or " if run.lora.rank else "")
            + "take another model"
        ) from error
    if not packed:
        packs = {side: pack(examples, False) for side, examples in sides.items()}
    validation = packs["validation"]
    if 0 < run.steps.checked < len(validation):
        validation = [validation[i * len(validation) // run.steps.checked] for i in range(run.steps.checked)]
    trainer = BinTrainer(
        labels=labels,
        run=run,
        model=model,
        args=_arguments(run, out, bool(validation)),
        train_dataset=packs["train"],
        eval_dataset=validation or None,
        data_collator=partial(collate, packed=packed),
    )
    newest, loss = run_trainer(trainer, out, resume=resume, remedy="lower steps.rate, or train in float32")
    trainer.save_model(str(out / WEIGHTS_FOLDER))
    tokenizer.save_pretrained(str(out / WEIGHTS_FOLDER))
    probe = record_probe(model, sides["validation"] or sides["train"], tokens, run.steps.tokens, packed)
    summary = {
        "run": name,
        "tools": rows_by_tool(e.origin.hand for e in sides["train"] for _ in e.candidates),
        "settings": asdict(run),
        "steps": trainer.state.global_step,
        "resumed_from": newest,
        "train_loss": loss,
        "packed": packed,
        "seconds": next(
            (r["train_runtime"] for r in trainer.state.log_history[::-1] if "train_runtime" in r), 0.0
        ),
        "tokens": {side: int(sum(len(p.ids) for p in part)) for side, part in packs.items()},
        "log": trainer.state.log_history,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    first = trainer.is_world_process_zero()
    del trainer, model
    gc.collect()  # room for the model as it is served
    if first:
        serve(run.model, out / WEIGHTS_FOLDER, probe)
        write_json(out / "run.json", summary)
    return summary


def _dtype(run: SftRun) -> Any:
    if run.dtype:
        return getattr(torch, run.dtype)
    # A CPU without instructions for it converts back and forth: slower than float32.
    probes = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    native = torch.cuda.is_available() or any(ask is not None and ask() for ask in probes)
    return torch.bfloat16 if native else torch.float32


def _model(run: SftRun) -> Any:
    # What trains does so in float32, as small steps vanish in bfloat16: all weights, or the adapters only.
    dtype = _dtype(run) if run.lora.rank else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(run.model, dtype=dtype)
    model.config.use_cache = False
    if run.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if not run.lora.rank:
        return model
    import peft

    try:
        adapter_model = peft.get_peft_model(model, run.lora.config())
    except ValueError as error:
        raise TrainingError(
            f"an adapter must fit every linear layer, and not so of {model.config.model_type} ({error}): train all "
            "weights with lora.rank = 0"
        ) from error
    for parameter in adapter_model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapter_model


def _arguments(run: SftRun, out: Path, validate: bool) -> Any:
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
        bf16=cuda and _dtype(run) == torch.bfloat16,
        use_cpu=not cuda,
        remove_unused_columns=False,
        label_names=["target"],
        report_to=[],
        dataloader_pin_memory=cuda,
        disable_tqdm=not os.isatty(2),
        ddp_find_unused_parameters=False,
    )
