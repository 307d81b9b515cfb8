"""The command line. `main` loads only the modules of the command at hand."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; without `argv`, that of this process.

    0: done; 1: failed, or its output was lost; 2: wrong usage or bad input; 129: hung up (SIGHUP);
    130: interrupted; 141: nobody reads the output; 143: asked to end (SIGTERM).
    `run` returns, or exits with, what the program it runs does.
    """
    if argv is not None:
        from forecast_autotune.commands.process import dispatch

        return dispatch(list(argv))
    from forecast_autotune.commands.interruption import die_by_default

    die_by_default()
    import sys

    from forecast_autotune.commands.process import dispatch

    try:
        return dispatch(sys.argv[1:])
    except KeyboardInterrupt as error:  # between two lines of `dispatch`
        return 128 + getattr(error, "number", 2)
    finally:
        if sys.argv[1:2] != ["run"]:
            die_by_default()
