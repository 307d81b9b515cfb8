"""Rewrites of Triton sources: those of `forecast_harness.rewrites.triton`, for kernels and for modules
that launch their own.

A kernel target is launched by others, so a variant may bring its own configs. A pack's solution launches its
kernels itself: there only rewrites count that leave a kernel's parameters as they are, and the numbers at its
launches vary.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from forecast_autotune import parsing
from forecast_autotune.errors import RecordError
from forecast_autotune.records import Config
from forecast_autotune.variants.records import Variant
from forecast_harness.rewrites.torch.code import Code
from forecast_harness.rewrites.torch.constants import scatter
from forecast_harness.rewrites.torch.protocol import Facts
from forecast_harness.rewrites.torch.registry import Made
from forecast_harness.rewrites.triton import variants_of
from forecast_harness.variants.subject import Subject

LIMIT = 96
"""Most variants of one kernel."""
_OWN = ("CONFIGS", "RESET_TO_ZERO", "grid")
_WARPS, _STAGES = (1, 32), (1, 7)


def of_kernel(source: str, entry: str, payload: Mapping[str, Any]) -> list[Made]:
    """Variants of a kernel target's source, most promising first. Raises `RecordError` for no kernel."""
    subjects = [Subject.from_json(s) for s in payload.get("subjects", ())]
    configs = subjects[0].configs if subjects else ()
    arguments = subjects[0].calls[0] if subjects and subjects[0].calls else ()
    base = str(payload.get("source_sha256", ""))
    found = _variants(source, entry, base, configs=configs, arguments=arguments)
    return [_made(v, _with_configs(v.source, v.configs)) for v in found]


def of_module(source: str, entry: str) -> list[Made]:
    """What can be made of a module with kernels and the function that launches them."""
    code = Code.parse(source, entry)
    found = []
    for name, signature in _kernels(source).items():
        for variant in _variants(source, name, ""):
            after = _kernels(variant.source)
            if after.get(name) == signature and not variant.configs and not _defines(variant.source, _OWN):
                found.append(_made(variant, variant.source))
    found += [Made(("constants",), edit.text, edit.note) for edit in scatter(code, Facts())]
    found += _launches(code)
    return found


def _variants(source: str, entry: str, base: str, **known: Any) -> list[Variant]:
    try:
        return variants_of(source, entry, base, limit=LIMIT, **known)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"no rewrite can read {entry}: {error}") from error


def _made(variant: Variant, source: str) -> Made:
    names = tuple(str(n) for n in variant.extra.get("rewrites", ()))
    return Made(names or ("rewrite",), source, variant.provenance.note)


def _with_configs(source: str, configs: tuple[Config, ...]) -> str:
    """A variant's configs as its source states them."""
    if not configs or _defines(source, ("CONFIGS",)):
        return source
    listed = ",\n    ".join(repr(_stated(c)) for c in configs)
    return f"{source.rstrip()}\n\nCONFIGS = [\n    {listed},\n]\n"


def _stated(config: Config) -> dict[str, Any]:
    told = {k: v for k, v in config.to_json().items() if v is not None and k != "num_ctas"}
    return told if config.num_ctas == 1 else {**told, "num_ctas": config.num_ctas}


def _defines(source: str, names: tuple[str, ...]) -> bool:
    for node in parsing.module(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(t, ast.Name) and t.id in names for t in targets):
            return True
        if isinstance(node, ast.FunctionDef) and node.name in names:
            return True
    return False


def _kernels(source: str) -> dict[str, str]:
    """Parameters of the kernels that a module launches, as text, by name."""
    tree = parsing.module(source)
    launched = {
        n.func.value.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Subscript)
        and isinstance(n.func.value, ast.Name)
    }
    return {
        n.name: ast.unparse(n.args)
        for n in tree.body
        if isinstance(n, ast.FunctionDef) and n.name in launched and n.decorator_list
    }


def _launches(code: Code) -> Iterator[Made]:
    """Other numbers at launches: warps, stages, and whatever is in upper case."""
    for function in code.functions:
        for node in ast.walk(function):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
                continue
            for keyword in node.keywords:
                value = keyword.value
                if keyword.arg and isinstance(value, ast.Constant) and type(value.value) is int:
                    for new in _others(keyword.arg, value.value):
                        draft = code.copy()
                        draft.twin(keyword).value = ast.Constant(new)
                        note = f"{keyword.arg} = {new} in place of {value.value}"
                        yield Made(("constants",), draft.text(), note)
            given = {k.arg for k in node.keywords}
            for name, values in (("num_warps", (1, 2, 8, 16)), ("num_stages", (1, 2, 4, 5))):
                for new in values if name not in given else ():
                    draft = code.copy()
                    draft.twin(node).keywords.append(ast.keyword(name, ast.Constant(new)))
                    yield Made(("constants",), draft.text(), f"launched with {name} = {new}")


def _others(name: str, value: int) -> list[int]:
    if name == "num_stages":
        return [v for v in (value - 1, value + 1) if _STAGES[0] <= v <= _STAGES[1]]
    if name == "num_warps":
        return [v for v in (value // 2, value * 2) if _WARPS[0] <= v <= _WARPS[1]]
    return [v for v in (value * 2, value // 2) if v >= 1 and name.isupper()]
