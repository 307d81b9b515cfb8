"""How good is a surrogate on kernels it has never seen? Metrics, splits, baselines, runs and reports.

from forecast_train.evaluation import evaluate, summarize
result = evaluate(load(shipped()), leave_out="kernel", methods=["random", "analytic"], jobs=4)
print(summarize(result).to_json())
"""

from forecast_train.evaluation.baselines import FitSurrogate, methods
from forecast_train.evaluation.run import Evaluation, evaluate
from forecast_train.evaluation.splits import Fold, LeakageError, check_leakage, make_folds
from forecast_train.evaluation.summary import Summary, summarize

__all__ = [
    "Evaluation",
    "FitSurrogate",
    "Fold",
    "LeakageError",
    "Summary",
    "check_leakage",
    "evaluate",
    "make_folds",
    "methods",
    "summarize",
]
