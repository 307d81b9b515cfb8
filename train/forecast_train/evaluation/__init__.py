"""How good is a surrogate on kernels it has never seen? Methods, runs and reports.

from forecast_train.evaluation import evaluate, summarize
result = evaluate(load(shipped()), leave_out="kernel", methods=["random", "analytic"], jobs=4)
print(summarize(result).to_json())
"""

from forecast_train.evaluation.methods import FitSurrogate, methods
from forecast_train.evaluation.run import Evaluation, evaluate
from forecast_train.evaluation.summary import Summary, summarize

__all__ = ["Evaluation", "FitSurrogate", "Summary", "evaluate", "methods", "summarize"]
