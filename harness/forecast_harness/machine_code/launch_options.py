"""A source with other options at its launches, as text: what is verified has to be what was timed."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Options of Triton's that a launch may be given."""


def write_launch_options(source: str, options: Mapping[str, int]) -> str:
    """The source in which every `kernel[grid](...)` has these options; itself where there are none.

    Raises `RecordError` for text that is no Python, has no such launch, or options that are none of `OPTIONS`.
    """
    if not options:
        return source
    if strange := sorted(set(options) - set(OPTIONS)):
        raise RecordError(f"launch options must be of {', '.join(OPTIONS)}, not {', '.join(strange)}")
    try:
        tree = python_parser.parse_module(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RecordError(f"the source is not Python: {error}") from error
    launches = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    if not launches:
        raise RecordError("the source has no launch such as kernel[grid](...) that could be given options")
    for node in launches:
        kept = [k for k in node.keywords if k.arg not in options]
        node.keywords = [*kept, *(ast.keyword(n, ast.Constant(v)) for n, v in options.items())]
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"
