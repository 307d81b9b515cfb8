"""Run by a python that has vLLM: asks a model in this process what stdin says, and prints the answers.

Needs nothing of ours that its environment lacks: PYTHONPATH names the checkout.
"""

from __future__ import annotations

import json
import sys

from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.bins import BINS
from forecast_integrations.models.vllm import VLLMBackend


def main() -> None:
    given = json.load(sys.stdin)
    it = VLLMBackend(given["model"], given["adapter"], dtype="float32", length=2048)
    told: dict[str, object] = {"ready_before": it.ready()}
    it.prepare()
    answers = []
    for _ in range(2):
        answer = it.forecast(given["prefix"], given["suffixes"], BINS.labels, timeout_s=300)
        answers.append(
            {
                "probabilities": answer.probabilities.tolist(),
                "mass": answer.mass.tolist(),
                "usage": vars(answer.usage),
                "trouble": answer.trouble,
            }
        )
    told |= {"ready": it.ready(), "answers": answers}
    try:
        it.forecast(given["prefix"], given["suffixes"], BINS.labels, timeout_s=0.0)
    except LLMError as error:
        told["late"] = str(error)
    it.close()
    told["ready_after"] = it.ready()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
