"""Parsing where others parse too."""

from __future__ import annotations

import ast
import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forecast_autotune import python_parser
from tests.core.hostile_sources import hostile_sources

TEXT = "\n".join(f"def f{i}(x):\n    return [x + {i} for _ in range({i})]" for i in range(60))


def test_threads_that_parse_at_once_all_get_their_trees() -> None:
    expected = ast.dump(ast.parse(TEXT))
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: ast.dump(python_parser.parse_module(TEXT)), range(64)))
    assert set(results) == {expected}


def test_what_is_no_python_is_said() -> None:
    assert isinstance(python_parser.parse_expression("a + 1"), ast.BinOp)
    with pytest.raises(SyntaxError):
        python_parser.parse_module("def f(:")
    with pytest.raises(SyntaxError):
        python_parser.parse_expression("a = 1")


HOSTILE = hostile_sources()


@pytest.mark.sampled(50)
@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_the_text_there_is_a_tree_that_can_be_visited_or_one_error(name: str) -> None:
    message = ""
    try:
        tree = python_parser.parse_module(HOSTILE[name])
    except python_parser.SourceTextError as error:
        message, tree = str(error), ast.Module([], [])
    assert len(message) < 1000
    compile(ast.unparse(tree), "<again>", "exec")
    assert ast.dump(copy.deepcopy(tree)) == ast.dump(tree)


@pytest.mark.parametrize(
    "name", ["chain of minus", "parentheses closed", "tower of elif", "NUL", "lone surrogate"]
)
def test_expressions_and_literals_are_read_within_the_same_limits(name: str) -> None:
    text = HOSTILE[name].removeprefix("x = ").rstrip("\n")
    for read in (python_parser.parse_expression, python_parser.parse_literal):
        with pytest.raises(python_parser.SourceTextError):
            read(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = " + "(" * 64 + "1" + ")" * 64, ""),
        ("x = " + "(" * 65 + "1" + ")" * 65, "64 brackets"),
        ("x = '" + "(" * 100 + "'  # " + "[" * 100, ""),
        ("x = " + "-" * 60 + "1", ""),
        ("x = " + "- " * 200 + "1", "prefix operators"),
        ("x = a" + " + a" * 100, ""),
        ("x = a" + " + a" * 200, "128 levels"),
        ("x = [" + "1," * 99_000 + "]", ""),
        ("x = [" + "1," * 101_000 + "]", "200000 tokens"),
        ("#" * (1 << 20), ""),
        ("#" * ((1 << 20) + 1), "1048577 characters"),
        ('x = f"' + "{a}" * 30_000 + '"', "f-string"),
    ],
)
def test_limits_are_said(text: str, said: str) -> None:
    if not said:
        python_parser.parse_module(text)
        return
    with pytest.raises(python_parser.SourceTextError, match=said):
        python_parser.parse_module(text)


@pytest.mark.slow
def test_this_project_is_within_the_limits() -> None:
    files = [f for f in Path(__file__).parents[2].rglob("*.py") if ".venv" not in f.parts]
    assert len(files) > 500
    for file in files:
        python_parser.parse_module(file.read_text())


def test_what_is_no_literal_is_said() -> None:
    assert python_parser.parse_literal(" {'a': [1, -2.5, None]}") == {"a": [1, -2.5, None]}
    for text in ("f()", "{[]: 1}", "a"):
        with pytest.raises(ValueError, match=r"literal|malformed|unhashable"):
            python_parser.parse_literal(text)
