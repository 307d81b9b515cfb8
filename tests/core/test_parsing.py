"""Parsing where others parse too."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor

import pytest

from forecast_autotune import python_parser

TEXT = "\n".join(f"def f{i}(x):\n    return [x + {i} for _ in range({i})]" for i in range(60))


def test_threads_that_parse_at_once_all_get_their_trees() -> None:
    expected = ast.dump(ast.parse(TEXT))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: ast.dump(python_parser.parse_module(TEXT)), range(64)))
    assert set(found) == {expected}


def test_what_is_no_python_is_said() -> None:
    assert isinstance(python_parser.parse_expression("a + 1"), ast.BinOp)
    with pytest.raises(SyntaxError):
        python_parser.parse_module("def f(:")
    with pytest.raises(SyntaxError):
        python_parser.parse_expression("a = 1")
