"""A module for a lane's server that takes seconds to import, as on a machine under load."""

from __future__ import annotations

import time

time.sleep(3)
