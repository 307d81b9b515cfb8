"""`python -m forecast_autotune`: the command line without its console script."""

import sys

from forecast_autotune.commands import main

if __name__ == "__main__":
    sys.exit(main())
