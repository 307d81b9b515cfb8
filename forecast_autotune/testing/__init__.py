"""Table-backed measurers, and the contract tests that every plug-in inherits.

`TableMeasurer` replays a recorded table through the real tuner. The contract classes hold pytest
tests; a plug-in's test subclasses one and says how to build the thing under test:

    class TestMine(SurrogateContract):
        def make(self):
            return MySurrogate()
"""

from forecast_autotune.testing.languages import LanguageContract
from forecast_autotune.testing.measurers import MeasurerContract
from forecast_autotune.testing.policies import PolicyContract
from forecast_autotune.testing.stores import StoreContract
from forecast_autotune.testing.surrogates import SurrogateContract
from forecast_autotune.testing.tables import example_table, query_of
from forecast_autotune.tuning.replays.table_measurer import TableMeasurer

__all__ = [
    "LanguageContract",
    "MeasurerContract",
    "PolicyContract",
    "StoreContract",
    "SurrogateContract",
    "TableMeasurer",
    "example_table",
    "query_of",
]
