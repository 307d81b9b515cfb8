"""Measurements and decisions in the formats of other tools: Kernel Tuner, vLLM, SGLang."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forecast_autotune.file_access import open_named_output
from forecast_autotune.records import (
    Argument,
    Candidate,
    Config,
    Decision,
    Measurement,
    Outcome,
    Problem,
    Scalar,
)
from forecast_autotune.records.table import Table
from forecast_autotune.store.formats.kernel_tuner import OWN

if TYPE_CHECKING:
    from forecast_autotune.records import Problem
    from forecast_autotune.records.table import Table


@dataclass(frozen=True)
class TunedProblem:
    """A problem, its latest measurements, and its decision where there is one."""

    problem: Problem
    rows: dict[Candidate, Measurement]
    decision: Decision | None = None

    @property
    def chosen(self) -> Candidate | None:
        """The decision's candidate, else the fastest that ran; None where that is none of the kernel's own source."""
        if self.decision is not None:
            result: Candidate | None = self.decision.chosen
        else:
            timings = [m for m in self.rows.values() if m.ok and m.candidate.is_base_variant]
            result = min(timings, key=lambda m: m.ms).candidate if timings else None
        return result if result is not None and result.is_base_variant else None


@dataclass
class ExportReport:
    """The files that an export wrote, and the problems it left out."""

    files: list[Path] = field(default_factory=list)
    problems: int = 0
    measurements: int = 0
    left_out: list[str] = field(default_factory=list)
    """A sentence for each problem that the format has no place for."""

    def write(self, path: Path, data: Any, indent: int | None = 4) -> None:
        """Write one JSON file, whole or not at all. Raises `OSError`."""
        self.write_text(path, json.dumps(data, indent=indent) + "\n")

    def write_text(self, path: Path, text: str) -> None:
        """Write one file, whole or not at all. Raises `OSError`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_named_output(path) as stream:
            stream.write(text.encode())
        self.files.append(path)


def tuned_problems(
    tables: Iterable[Table], decisions: Iterable[tuple[Problem, Decision]]
) -> list[TunedProblem]:
    """Every table with its decision, in order."""
    of = {problem.id: decision for problem, decision in decisions}
    return [TunedProblem(t.problem, t.by_candidate(), of.get(t.problem.id)) for t in tables]


def file_stem(problem: Problem) -> str:
    """A name for a problem's file: its kernel, device and id, in letters that every file system takes."""
    name = f"{problem.kernel.name}-{problem.device.slug}-{problem.id[:12]}"
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)


_FAILURES = {Outcome.COMPILE_ERROR: "CompilationFailedConfig"}
_OTHER_FAILURE = "RuntimeFailedConfig"
_INVALIDITY = {
    Outcome.OK: "correct",
    Outcome.COMPILE_ERROR: "compile",
    Outcome.INCORRECT: "correctness",
    Outcome.TIMEOUT: "timeout",
}
_T4_SCHEMA = "1.0.0"


def write_kernel_tuner(folder: Path, problems: Sequence[TunedProblem]) -> ExportReport:
    """Write a cache file for each problem into a folder. Raises `OSError`."""
    report = ExportReport()
    for entry, rows, parameters in _usable(problems, report):
        outcomes = {_key(v, parameters): str(row.outcome) for v, row in rows if _word(row) == _OTHER_FAILURE}
        bare = replace(entry.problem, kernel=replace(entry.problem.kernel, source=""), ttir={}, extra={})
        header = {
            OWN: {"problem": bare.to_json(), "outcomes": outcomes},
            "device_name": entry.problem.device.name,
            "kernel_name": entry.problem.kernel.name,
            "problem_size": _problem_size(entry.problem),
            "tune_params_keys": list(parameters),
            "tune_params": parameters,
            "objective": "time",
        }
        cache = {_key(values, parameters): _cache_row(values, row) for values, row in rows}
        report.write(folder / f"{file_stem(entry.problem)}.json", {**header, "cache": cache}, indent=0)
    return report


def write_kernel_tuner_t4(folder: Path, problems: Sequence[TunedProblem]) -> ExportReport:
    """Write T4 results for each problem into a folder. Raises `OSError`."""
    report = ExportReport()
    for entry, rows, _ in _usable(problems, report):
        results = [_t4_row(values, row) for values, row in rows]
        device = {"device_query": {"name": entry.problem.device.name, "kernel": entry.problem.kernel.name}}
        about = {"timeunit": "milliseconds", "environment": device}
        data = {"schema_version": _T4_SCHEMA, "metadata": about, "results": results}
        report.write(folder / f"{file_stem(entry.problem)}_T4.json", data)
    return report


_Rows = list[tuple[dict[str, Scalar], Measurement]]


def _usable(
    problems: Sequence[TunedProblem], report: ExportReport
) -> list[tuple[TunedProblem, _Rows, dict[str, list[Scalar]]]]:
    """Each problem with its rows of the kernel's own source, and the values of each parameter."""
    results = []
    for entry in problems:
        rows = [
            (m.candidate.config.parameters(), m) for m in entry.rows.values() if m.candidate.is_base_variant
        ]
        if count := len(entry.rows) - len(rows):
            report.left_out.append(f"{entry.problem.kernel.name}: {count} of its rows are of other sources")
        if not rows:
            continue
        names = dict.fromkeys(name for values, _ in rows for name in values)
        # A config without an option has null there: the readers want one list of parameters for all.
        rows = [({name: values.get(name) for name in names}, row) for values, row in rows]
        values_of = {n: sorted({values[n] for values, _ in rows}, key=_order) for n in names}
        results.append((entry, rows, values_of))
        report.problems += 1
        report.measurements += len(rows)
    return results


def _order(value: Scalar) -> tuple[bool, float, str]:
    number = isinstance(value, int | float)
    return not number, float(value) if number else 0.0, str(value)  # type: ignore[arg-type]


def _key(values: dict[str, Scalar], parameters: dict[str, list[Scalar]]) -> str:
    return ",".join(str(values[name]) for name in parameters)


def _problem_size(problem: Problem) -> list[int | str]:
    return [int(k) if k.lstrip("-").isdigit() else k for k in problem.key]


def _stamp(row: Measurement) -> str:
    return row.at or datetime.fromtimestamp(0, UTC).isoformat(timespec="seconds")


def _compile_ms(row: Measurement) -> float:
    return 1000.0 * row.compile_s if row.compile_s is not None else 0.0


def _word(row: Measurement) -> str:
    """Kernel Tuner's word for a failure; empty for a config that ran."""
    return "" if row.ok else _FAILURES.get(row.outcome, _OTHER_FAILURE)


def _cache_row(values: dict[str, Scalar], row: Measurement) -> dict[str, Any]:
    times = {"times": [row.ms]} if row.ok else {}
    return {
        **values,
        # Releases of Kernel Tuner before 1.4 know the word here, and later ones as well.
        "time": row.ms if row.ok else _word(row),
        **times,
        "compile_time": _compile_ms(row),
        "verification_time": 0,
        "benchmark_time": 0.0,
        "strategy_time": 0,
        "framework_time": 0.0,
        "timestamp": _stamp(row),
    }


def _t4_row(values: dict[str, Scalar], row: Measurement) -> dict[str, Any]:
    return {
        "timestamp": _stamp(row),
        "configuration": values,
        "times": {
            "compilation": _compile_ms(row),
            "benchmark": row.ms * max(row.repeats, 1) if row.ok else 0.0,
            "framework": 0.0,
            "search_algorithm": 0.0,
            "validation": 0.0,
            "runtimes": [row.ms] if row.ok else [],
        },
        "invalidity": _INVALIDITY.get(row.outcome, "runtime"),
        "correctness": 0 if row.outcome is Outcome.INCORRECT else 1,
        "measurements": [{"name": "time", "value": row.ms, "unit": "ms"}] if row.ok else [],
        "objectives": ["time"],
    }


BLOCKS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
"""Parameters that a config of the kernel must have."""
DEVICE_OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack", "grf_mode")
"""Options of AMD's devices, and of Intel's; either reader passes them on to the launch."""
SGLANG_OPTIONS = ("USE_TMA",)
_PRECISIONS = ("use_fp8_w8a8", "use_fp8_w8a16", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16")
_INT4 = "int4_w4a16"
_H200 = "NVIDIA_H200"


@dataclass(frozen=True)
class ExpertLayer:
    """The properties that name a file; `triton` is the release."""

    experts: int
    inner: int
    device: str
    dtype: str
    block: tuple[int, int] | None
    triton: str
    per_channel: bool = False


def vllm_file_name(layer: ExpertLayer) -> str:
    """The name that vLLM's `get_config_file_name` gives: all variants of the H200 share a file."""
    device = re.sub(r"[\s/]+", "_", layer.device)
    device = _H200 if "H200" in device.split("_") else device
    block = f",block_shape=[{layer.block[0]},{layer.block[1]}]" if layer.block else ""
    return f"E={layer.experts},N={layer.inner},device_name={device}{_selector(layer)}{block}.json"


def sglang_file_name(layer: ExpertLayer) -> str:
    """The name that SGLang's gives: a space within the block's shape, and packed int4 weights counted in bytes."""
    inner, device = layer.inner // 2 if layer.dtype == _INT4 else layer.inner, layer.device.replace(" ", "_")
    block = f",block_shape=[{layer.block[0]}, {layer.block[1]}]" if layer.block else ""
    channel = ",per_channel_quant=True" if layer.per_channel else ""
    return f"E={layer.experts},N={inner},device_name={device}{_selector(layer)}{block}{channel}.json"


def _selector(layer: ExpertLayer) -> str:
    return f",dtype={layer.dtype}" if layer.dtype else ""


@dataclass(frozen=True)
class _TunedProduct:
    """One tuned product of a layer."""

    layer: ExpertLayer
    tokens: int
    tuned: TunedProblem


def write_vllm_moe(folder: Path, problems: Sequence[TunedProblem]) -> ExportReport:
    """Write the files that vLLM reads into a folder. Raises `OSError`."""
    return _write(folder, problems, for_sglang=False)


def write_sglang_moe(folder: Path, problems: Sequence[TunedProblem]) -> ExportReport:
    """The same for SGLang: in a folder for each release of Triton, without its version in the file."""
    return _write(folder, problems, for_sglang=True)


def _write(folder: Path, problems: Sequence[TunedProblem], *, for_sglang: bool) -> ExportReport:
    report = ExportReport()
    layers: dict[ExpertLayer, dict[int, list[_TunedProduct]]] = defaultdict(lambda: defaultdict(list))
    for product in _products(problems, report):
        layers[product.layer][product.tokens].append(product)
    for layer, batches in layers.items():
        entries: dict[str, Any] = {}
        for tokens in sorted(batches):
            config = _best_of_both([p.tuned for p in batches[tokens]])
            entries[str(tokens)] = _entry(
                config, (*DEVICE_OPTIONS, *SGLANG_OPTIONS) if for_sglang else DEVICE_OPTIONS
            )
            report.problems += len(batches[tokens])
            report.measurements += sum(len(p.tuned.rows) for p in batches[tokens])
        if for_sglang:
            release = f"triton_{layer.triton.partition('+')[0].replace('.', '_')}"
            report.write(folder / "configs" / release / sglang_file_name(layer), entries)
        else:
            report.write(folder / vllm_file_name(layer), {"triton_version": layer.triton, **entries})
    return report


def _products(problems: Sequence[TunedProblem], report: ExportReport) -> list[_TunedProduct]:
    """The products of layers that the problems are; the second of a layer takes its tokens from the first."""
    first: list[_TunedProduct] = []
    second: list[tuple[TunedProblem, dict[str, Argument]]] = []
    for entry in problems:
        args = {a.name: a for a in entry.problem.arguments}
        if why := _refusal(entry, args):
            report.left_out.append(f"{entry.problem.kernel.name} {' '.join(entry.problem.key)}: {why}")
            continue
        experts, columns, _ = _weights(args)
        top_k, valid = _number(args, "top_k"), _number(args, "num_valid_tokens")
        if top_k == 1 and _has_first(problems, args):
            second.append((entry, args))
            continue
        first.append(_TunedProduct(_layer(entry.problem, args, experts, columns // 2), valid // top_k, entry))
    for entry, args in second:
        experts, _, inner = _weights(args)
        layer = _layer(entry.problem, args, experts, inner)
        valid = _number(args, "num_valid_tokens")
        for product in list(first):
            same = _number({a.name: a for a in product.tuned.problem.arguments}, "num_valid_tokens")
            if product.layer == layer and same == valid:
                first.append(_TunedProduct(layer, product.tokens, entry))
                break
        else:
            report.left_out.append(
                f"{entry.problem.kernel.name}: the layer's first product was not tuned as well"
            )
    return first


def _has_first(problems: Sequence[TunedProblem], second: dict[str, Argument]) -> bool:
    """Whether any problem is the first product of a layer whose second these arguments are of."""
    experts, hidden, inner = _weights(second)
    for entry in problems:
        args = {a.name: a for a in entry.problem.arguments}
        tensor = "b_ptr" in args and len(args["b_ptr"].shape) == 3
        if tensor and _weights(args) == (experts, 2 * inner, hidden):
            return True
    return False


def _weights(args: dict[str, Argument]) -> tuple[int, int, int]:
    """Experts, columns and rows of the weights; of those in 4 bits, two share a byte of a row."""
    experts, columns, rows = args["b_ptr"].shape
    return experts, columns, rows * 2 if _precision(args) == _INT4 else rows


def _refusal(entry: TunedProblem, args: dict[str, Argument]) -> str:
    """Why a problem is none of the kernel's, or has no config for it; empty if it is one."""
    if missing := [n for n in ("b_ptr", "num_valid_tokens", "top_k") if n not in args]:
        return f"it has no argument {missing[0]}: no fused_moe_kernel"
    if len(args["b_ptr"].shape) != 3:
        return "b_ptr must be [experts, columns, rows]"
    if _number(args, "top_k") < 1:
        return "top_k must be a number"
    if entry.chosen is None:
        return "none of its configs ran"
    if missing := [n for n in BLOCKS if n not in dict(entry.chosen.config.kwargs)]:
        return f"its configs have no {missing[0]}"
    return ""


def _number(args: dict[str, Argument], name: str) -> int:
    """An integer argument; 0 where it is not there, or is none."""
    value = args[name].value if name in args else None
    return value if isinstance(value, int) else 0


def _layer(problem: Problem, args: dict[str, Argument], experts: int, inner: int) -> ExpertLayer:
    dtype = _precision(args)
    if not dtype and args["b_ptr"].dtype in ("float32", "fp32"):
        dtype = "float32"
    sizes = [n for n in (_number(args, "group_n"), _number(args, "group_k")) if n]
    block = (sizes[0], sizes[1]) if len(sizes) == 2 else None
    triton = dict(problem.toolchain).get("triton", "")
    return ExpertLayer(
        experts, inner, problem.device.name, dtype, block, triton, _is_set(args, "per_channel_quant")
    )


def _precision(args: dict[str, Argument]) -> str:
    """How weights and activations are quantized, in the words of the kernel's own flags; empty if they are not."""
    flags = [name for name in _PRECISIONS if _is_set(args, name)]
    return flags[0].removeprefix("use_") if flags else ""


def _is_set(args: dict[str, Argument], flag: str) -> bool:
    return flag in args and bool(args[flag].value)


def _best_of_both(entries: Sequence[TunedProblem]) -> Config:
    """The config of the least time of all products that tried it; without a common one, the slowest product's."""
    common: set[Candidate] = set.intersection(*({c for c, m in t.rows.items() if m.ok} for t in entries))
    common = {c for c in common if c.is_base_variant}
    if len(entries) > 1 and common:
        return min(common, key=lambda c: (sum(t.rows[c].ms for t in entries), str(c))).config

    def time_of(entry: TunedProblem) -> float:
        row = entry.rows.get(entry.chosen) if entry.chosen else None
        return row.ms if row is not None and row.ok else 0.0

    slowest = max(entries, key=time_of).chosen
    assert slowest is not None  # by `_refusal`
    return slowest.config


def _entry(config: Config, options: Sequence[str]) -> dict[str, Any]:
    """A config by the names that the readers know, in their order."""
    values = dict(config.kwargs)
    entry = {name: values[name] for name in BLOCKS}
    if "SPLIT_K" in values:
        entry["SPLIT_K"] = values["SPLIT_K"]
    entry["num_warps"] = config.num_warps
    if config.num_ctas != 1:
        entry["num_ctas"] = config.num_ctas
    entry["num_stages"] = config.num_stages
    return {**entry, **{name: values[name] for name in options if name in values}}


EXPORT_FORMATS: dict[str, Callable[[Path, Sequence[TunedProblem]], ExportReport]] = {
    "kernel-tuner": write_kernel_tuner,
    "kernel-tuner-t4": write_kernel_tuner_t4,
    "sglang-moe": write_sglang_moe,
    "vllm-moe": write_vllm_moe,
}


def write_export(
    form: str,
    folder: Path,
    tables: Iterable[Table],
    decisions: Iterable[tuple[Problem, Decision]],
) -> ExportReport:
    """Write tables and decisions in one of `EXPORT_FORMATS` into a folder. Raises `OSError`."""
    return EXPORT_FORMATS[form](folder, tuned_problems(tables, decisions))
