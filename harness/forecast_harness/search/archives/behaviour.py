"""What kind of kernel a node is: the axes of a map of elites, read off its text and config.

Coarse on purpose: two sources in one cell compete, two in different cells do not.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from forecast_autotune import python_parser
from forecast_harness.records import Node, NodeResult

BehaviourCell = tuple[str, int, int, int, int, int]
"""Language, loops, products of matrices, accesses or calls, size class, what is special."""

_MATMUL_CALLS = frozenset(
    ("dot", "dot_scaled", "matmul", "mm", "bmm", "einsum", "addmm", "baddbmm", "linear", "conv1d", "conv2d")
) | {"scaled_dot_product_attention"}
_MEMORY_CALLS = frozenset(("load", "store", "load_tensor_descriptor", "store_tensor_descriptor"))
_SPECIAL_PATTERNS = (
    re.compile(r"\batomic_?\w*|\batomicAdd\b|scatter_add|index_add"),
    re.compile(r"descriptor|\btma\b|cp\.async|memcpy_async|\bwgmma\b|\bmma_sync\b", re.IGNORECASE),
    re.compile(r"torch\.nn\.functional|\bout=|\b\w+_\("),
)
_C_LOOP, _C_PRODUCT = re.compile(r"\b(?:for|while)\s*\("), re.compile(r"\bmma|wmma|fma\b|__dp4a|cublas")
_C_ACCESS, _C_SIZE = re.compile(r"\w\["), re.compile(r"(?:#define\s+\w+|\bint\s+[A-Z_]+\s*=)\s+(\d+)")


def behaviour_cell(node: Node, judged: NodeResult | None = None) -> BehaviourCell:
    """The cell of a node; the best known config decides its size class where there is one."""
    language, loops, products, accesses, size, special = _cell_of_source(node.language, node.source)
    config = judged.config if judged is not None else {}
    return language, loops, products, accesses, _size_class(_tile_sizes(config)) or size, special


def _tile_sizes(config: Mapping[str, Any]) -> Iterable[int]:
    """Numbers of a config whose names are in upper case: tiles and chunks, not warps and stages."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _tile_sizes(value)
        elif name.isupper() and isinstance(value, int) and not isinstance(value, bool):
            yield value


def _size_class(sizes: Iterable[int]) -> int:
    """0 without a size, then 1 up to 32, 2 up to 128, 3 up to 1024, 4 beyond: of the geometric mean."""
    logs = [math.log2(s) for s in sizes if s > 1]
    if not logs:
        return 0
    mean = sum(logs) / len(logs)
    return 1 + sum(mean > edge for edge in (5.0, 7.0, 10.0))


@lru_cache(maxsize=4096)
def _cell_of_source(language: str, source: str) -> BehaviourCell:
    special = sum(1 << bit for bit, pattern in enumerate(_SPECIAL_PATTERNS) if pattern.search(source))
    try:
        tree = python_parser.parse_module(source)
    except (SyntaxError, ValueError, RecursionError):
        tree = ast.Module([], [])
    nodes = list(ast.walk(tree))
    if language == "cuda" or not tree.body:
        loops, products = len(_C_LOOP.findall(source)), len(_C_PRODUCT.findall(source))
        accesses, sizes = len(_C_ACCESS.findall(source)), [int(s) for s in _C_SIZE.findall(source)]
    else:
        called = [_called_name(n) for n in nodes if isinstance(n, ast.Call)]
        loops = sum(isinstance(n, ast.For | ast.While | ast.comprehension) for n in nodes)
        products = sum(name in _MATMUL_CALLS for name in called)
        products += sum(isinstance(n, ast.BinOp) and isinstance(n.op, ast.MatMult) for n in nodes)
        accesses = sum(name in _MEMORY_CALLS for name in called) if language == "triton" else len(called)
        sizes = [v for n in tree.body for v in _constant_values(n)]
    return language, min(loops, 2), min(products, 2), accesses.bit_length() // 2, _size_class(sizes), special


def _called_name(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _constant_values(node: ast.stmt) -> Iterable[int]:
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
        value = node.value.value
        upper = any(isinstance(t, ast.Name) and t.id.isupper() for t in node.targets)
        if upper and isinstance(value, int) and not isinstance(value, bool):
            yield value
