"""The measurement store: JSON Lines that only grow, shared by processes and hosts.

Layout below the root: `v1/<device>/<kernel>/` holds one `log-<host>.jsonl` per host with its lock,
`decisions/<problem id>.json`, and `tuning-<problem id>.lock`; `variants/` holds other sources of kernels.
Loading executes nothing.
"""

from forecast_autotune.store.files import StoreWarning
from forecast_autotune.store.store import Store

__all__ = ["Store", "StoreWarning"]
