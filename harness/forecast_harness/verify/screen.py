"""Static screening: what a reader would want to look at twice. Hints, never the judge.

A name can be built from two strings, and an honest comment may name anything: textual rules fail both
ways, so nothing here rejects.
"""

from __future__ import annotations

import ast

from forecast_autotune import python_parser

_MODULES = {
    "gc": "walks all objects of the process",
    "inspect": "looks at its callers",
    "ctypes": "reads and writes arbitrary memory",
    "importlib": "imports by name",
    "subprocess": "starts programs",
    "socket": "uses the network",
    "threading": "starts threads",
    "multiprocessing": "starts processes",
    "pickle": "unpickles, which executes",
    "signal": "handles or sends signals",
    "atexit": "runs code at exit",
    "tempfile": "keeps files",
    "pathlib": "touches files",
    "sys": "reaches the interpreter",
    "os": "reaches the operating system",
}
_CALLS = {"exec", "eval", "compile", "__import__", "open", "globals", "vars", "setattr", "getattr"}
_ATTRIBUTES = {
    "data_ptr": "asks for addresses",
    "_version": "asks for version counters",
    "_getframe": "looks at its callers",
    "Stream": "makes streams",
    "CUDAGraph": "records graphs",
    "elapsed_time": "handles timing events",
    "perf_counter": "asks the clock",
    "allow_tf32": "changes precision",
    "_make_subclass": "makes tensor subclasses",
}


def static_hints(source: str) -> tuple[str, ...]:
    """One sentence per thing worth a look, in the order of lines; a syntax error is one, too."""
    try:
        tree = python_parser.parse_module(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        return (f"cannot be parsed: {error}",)
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            for name in names:
                if said := _MODULES.get(name.partition(".")[0]):
                    found.append((line, f"line {line}: imports {name}, which {said}"))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
            literal = len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
            if node.func.id != "getattr" or not literal:
                found.append((line, f"line {line}: calls {node.func.id}"))
        elif isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES:
            found.append((line, f"line {line}: {node.attr} {_ATTRIBUTES[node.attr]}"))
        elif isinstance(node, ast.Assign):
            found += [
                (line, f"line {line}: replaces {_dotted(t)}")
                for t in node.targets
                if _is_foreign_assignment(t)
            ]
        elif isinstance(node, ast.Try):
            found.append((line, f"line {line}: has a fallback for exceptions"))
    return tuple(dict.fromkeys(text for _, text in sorted(found)))


def _is_foreign_assignment(target: ast.expr) -> bool:
    root = target
    while isinstance(root, ast.Attribute):
        root = root.value
    return isinstance(target, ast.Attribute) and isinstance(root, ast.Name) and root.id in ("torch", "time")


def _dotted(target: ast.expr) -> str:
    return ast.unparse(target)
