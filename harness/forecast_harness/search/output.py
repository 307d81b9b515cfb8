"""Files of a search for its user: the best source, the sources measured, a summary; and variants."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from forecast_autotune.errors import StoreError
from forecast_autotune.records import Config, Outcome, codec
from forecast_autotune.store import Store
from forecast_autotune.store.files import write_atomically
from forecast_autotune.variants import Check, Variant
from forecast_autotune.variants.contract import read_contract
from forecast_harness.records import EVIDENCE_TEXTS, Node, TargetKind
from forecast_harness.search.plan import FINALISTS
from forecast_harness.search.state import SearchState
from forecast_harness.targets.search_target import is_cuda_kernel

_BEST_NAME = "best"
NODES_FOLDER = "nodes"
SUMMARY_FILE = "summary.json"
_COMMENT_MARKS = {"cuda": "//", "c++": "//", "cpp": "//", "hip": "//"}


def write_output(state: SearchState, folder: Path) -> None:
    """All files of a search; the variants of a kernel's finished search go into the default store as well.

    Raises `StoreError` where files cannot be written. A store that cannot be is told by its own warning.
    """
    write_best(state, folder)
    for node in state.judged:
        path = folder / NODES_FOLDER / f"{node}{_suffix(state, state.nodes[node])}"
        if not path.exists():
            _write(path, state.nodes[node].source)
    _write(folder / SUMMARY_FILE, json.dumps(summary(state), indent=1, allow_nan=False) + "\n")
    if state.target.kind is TargetKind.KERNEL and state.stopped is not None and not state.stopped.interrupted:
        store_variants(state, Store.default())


def store_variants(state: SearchState, store: Store) -> list[Variant]:
    """Put what a kernel's search found into a store, with the checks it passed; the decorator finds it there.

    These are the nodes confirmed to be faster than the first seed; the `FINALISTS` fastest that are verified in
    full where none was confirmed or refuted. The config that was best comes first among a variant's own.
    """
    first, confirmed = state.seeds[0], state.confirmed
    proven = {n: j.log2_ratio for n, j in confirmed.items() if j.evidence == "confirmed"}
    ratios = proven if confirmed else {n: s for n, s in state.scores.items() if state.judged[n].may_lead}
    faster = {n: r for n, r in ratios.items() if r is not None and r < 0.0 and n != first}
    variants: list[Variant] = []
    for node in sorted(faster, key=lambda n: faster[n])[:FINALISTS]:
        variant, result = _variant_of(state, state.nodes[node]), state.judged[node]
        results = (result, confirmed.get(node, result))
        checks = [Check.from_json(c) for j in results for c in j.facts.get("checks_passed", ())]
        store.put_variant(variant, dict.fromkeys(checks))
        variants.append(variant)
    return variants


def _variant_of(state: SearchState, node: Node) -> Variant:
    entry, own = state.target.entry, read_contract(node.source, state.target.entry).configs
    best = state.judged[node.id].config
    configs = dict.fromkeys([*([Config.from_json(best)] if best and own else []), *own])
    base = str(state.target.payload["source_sha256"])
    return Variant.of(entry, base, node.source, node.provenance, title="search", configs=tuple(configs))


def write_best(state: SearchState, folder: Path) -> None:
    """The best source so far, ready to import, replaced whole. Raises `StoreError`."""
    node = state.nodes[state.best]
    mark = _COMMENT_MARKS.get(node.language, "#")
    head = "\n".join(f"{mark} {line}".rstrip() for line in provenance_lines(state))
    _write(folder / best_file(state), f"{head}\n\n{node.source.lstrip()}")


def best_file(state: SearchState) -> str:
    """The name of the file that holds the best source."""
    return _BEST_NAME + _suffix(state, state.nodes[state.best])


def _suffix(state: SearchState, node: Node) -> str:
    """The suffix of a node's file: CUDA stands in Python modules where the target is no CUDA kernel."""
    return ".cu" if node.language == "cuda" and is_cuda_kernel(state.target) else ".py"


def provenance_lines(state: SearchState) -> list[str]:
    """The origin of the best source and the evidence for it, as lines of text."""
    node, origin = state.nodes[state.best], state.nodes[state.best].provenance
    result = state.confirmed.get(node.id) or state.judged.get(node.id)
    kind = "CUDA kernel" if is_cuda_kernel(state.target) else state.target.kind
    lines = [f"The fastest source found for {state.target.name} ({kind}).", f"id: {node.id}"]
    if node.id == state.seeds[0]:
        lines.append("speed: this is the first seed itself; nothing faster was found")
    elif result is not None and result.log2_ratio is not None:
        evidence = EVIDENCE_TEXTS[state.evidence(node.id)]
        spread = f", standard error {result.sd * math.log(2):.2%}" if node.id in state.confirmed else ""
        lines.append(f"speed: {2**-state.best_score:.3f} times the first seed, {evidence}{spread}")
        lines += [f"calls: {text}" for text in [result.other_calls_text] if text]
    if result is not None and result.config:
        lines.append(f"config: {json.dumps(codec.to_json(result.config))}")
    if result is not None and result.device:
        lines.append(f"measured on: {state.context.device} ({result.device})")
    lines.append(f"made by: {origin.origin} {origin.author}".rstrip() + (f", {node.arm}" if node.arm else ""))
    lines += [f"note: {' '.join(origin.note.split())}"] if origin.note else []
    lines += [f"parents: {', '.join(node.parents)}"] if node.parents else []
    lines.append(f"harness: {state.context.harness}")
    lines += [f"toolchain: {', '.join(f'{k} {v}' for k, v in sorted(state.context.toolchain.items()))}"]
    return lines


def summary(state: SearchState) -> dict[str, Any]:
    """The result of a search and its cost, as one JSON object.

    `per_percent` is each cost per per cent of the first seed's time that the best source saves; None while
    nothing is saved.
    """
    percent = 100.0 * (1.0 - 2**state.best_score)
    cost = codec.to_json(state.spent)
    return {
        "target": state.target.name,
        "stopped": state.stopped.reason if state.stopped is not None else "",
        "interrupted": state.stopped is not None and state.stopped.interrupted,
        "best": state.best,
        "speedup": 2**-state.best_score,
        "confirmed": state.evidence(state.best) == "confirmed",
        "evidence": EVIDENCE_TEXTS[state.evidence(state.best)],
        "percent_saved": percent,
        "slower_at": list(state.confirmed[state.best].facts.get("slower_at", ()))
        if state.best in state.confirmed
        else [],
        "batches": max(state.batches, default=0),
        "nodes": len(state.nodes),
        "refused": len(state.duplicates),
        "measured": len(state.judged),
        "failed": sum(j.outcome is not Outcome.OK for j in state.judged.values()),
        "spent": cost,
        "spent_on": {name: codec.to_json(s) for name, s in state.spent_on.items()},
        "per_percent": {k: v / percent for k, v in cost.items()} if percent > 0.0 else None,
    }


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text.encode("utf-8", "surrogatepass"))
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written ({error}); the log has everything: free space or make the folder "
            "writable, then start the search again"
        ) from error
