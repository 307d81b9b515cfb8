"""A decorated call on the null device leaves in the store what the learned surrogate can be refitted from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from forecast_autotune import autotune
from forecast_autotune.features import traced_texts
from forecast_autotune.store import Store
from forecast_autotune.surrogates.prior import formula_prior
from forecast_train.surrogate.fit import FitSettings, fit_model
from tests.integrations.null import binaries, blocks, double, fresh, launch


def test_a_live_store_can_be_learnt_from_without_the_kernel(device: Any, tmp_path: Path) -> None:
    listed = [c for size in (32, 128, 256, 512) for w in (2, 4, 8) for c in blocks(size, num_warps=w)]
    tuner = autotune(configs=listed, key=["n"], store=tmp_path / "store")(fresh(double))
    launch(tuner)
    assert tuner.decision.measured >= 3
    (table,) = Store(tmp_path / "store").tables()
    assert not table.problem.ttir
    candidates = list(table.by_candidate())
    before = formula_prior(table.problem, candidates, table.grids(), {})
    assert before.informed
    assert before.exact.all()
    # What a program loads is what its block says.
    facts = traced_texts.facts_by_unit(table.problem)
    assert {f.load_bytes for f in facts.values()} == {
        4.0 * dict(c.config.kwargs)["BLOCK"] for c in candidates
    }
    compiled = binaries()
    model = fit_model([table], recipe=FitSettings(trees=2, rounds=3, least=1, leaf=1, jobs=1))
    assert model.about is not None
    assert model.about["rows"] == len(candidates)
    assert np.isfinite(model.residual.value).all()
    assert binaries() == compiled
