"""The card of a data set: what is in it, where it comes from and how it was split, written with it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from forecast_autotune.llm.bins import BINS
from forecast_train.llm.data.examples import Example


def dataset_summary(sides: Mapping[str, Sequence[Example]]) -> dict[str, Any]:
    """Counts by side: examples, rows, kernels, families, devices, rows per label, outcomes."""
    return {side: _counts(examples) for side, examples in sides.items()}


def _counts(examples: Sequence[Example]) -> dict[str, Any]:
    rows = [a for e in examples for a in e.candidates]
    labels = Counter(a.label for a in rows)
    return {
        "examples": len(examples),
        "rows": len(rows),
        "problems": len({e.origin.problem for e in examples}),
        "kernels": sorted({e.origin.kernel for e in examples}),
        "families": sorted({e.origin.family for e in examples}),
        "devices": sorted({e.origin.device for e in examples}),
        "labels": {BINS.labels[k].token: labels[k] for k in range(len(BINS) + 1)},
        "outcomes": dict(sorted(Counter(a.outcome for a in rows).items())),
        "measured references": sum(e.measured for e in examples),
        "versions": sorted({e.version for e in examples}),
    }


def dataset_card(sides: Mapping[str, Sequence[Example]], about: Mapping[str, Any]) -> str:
    """A data set card in Markdown, with the header that `datasets` reads.

    `about` says how the set was made: split, seed, recipe, releases, the digests of its tables.
    """
    counted = dataset_summary(sides)
    files = "\n".join(f"  - split: {side}\n    path: {side}.parquet" for side in sides)
    table = [
        "| side | examples | rows | problems | kernels | families | devices |",
        "|---|---|---|---|---|---|---|",
    ]
    for side, c in counted.items():
        shown = [
            c["examples"],
            c["rows"],
            c["problems"],
            *(len(c[n]) for n in ("kernels", "families", "devices")),
        ]
        table.append(f"| {side} | {' | '.join(map(str, shown))} |")
    bins = ["| label | meaning | " + " | ".join(sides) + " |", "|---|---|" + "---|" * len(sides)]
    for label in BINS.labels:
        found = " | ".join(str(c["labels"][label.token]) for c in counted.values())
        bins.append(f"| {label.token} | {label.meaning} | {found} |")
    held = "\n".join(
        f"- {side}: kernels {', '.join(c['kernels']) or 'none'}; devices {', '.join(c['devices']) or 'none'}"
        for side, c in counted.items()
    )
    return f"""---
configs:
- config_name: default
  data_files:
{files}
tags:
- gpu-kernels
- autotuning
---
# Kernel run times as questions to a language model

Each row is one candidate of a question: `prefix` + `suffix` is the prompt, `label` the index of the letter
that was right, `log2_ratio` the measured log2(time / reference time), null where the candidate failed.
Rows with the same `example` share their prefix. `propensity` is the probability with which an audit drew
the candidate; null where a policy chose it or where everything was measured. Failures of the harness are no
labels and are left out. Sides share no {about.get("by", "group")}: the writer refuses to write otherwise.

{chr(10).join(table)}

{chr(10).join(bins)}

{held}

Made with:

```json
{json.dumps(dict(about), indent=1, sort_keys=True)}
```
"""
