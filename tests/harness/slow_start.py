"""A module for a lane's server that makes its preparations take seconds, as on a machine under load."""

from __future__ import annotations

import time

from forecast_harness.sandbox import toolchain

toolchain.import_dispatch_modes = lambda: time.sleep(5)
