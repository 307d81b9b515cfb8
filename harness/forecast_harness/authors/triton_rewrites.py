"""Rewrites of Triton sources: those of `forecast_harness.authors.triton`, for kernels and for modules
that launch their own.

A kernel target is launched by others, so a variant may bring its own configs. A pack's solution launches its
kernels itself: there only rewrites count that leave a kernel's parameters as they are, and the numbers at its
launches vary.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError
from forecast_autotune.records import Config
from forecast_autotune.variants.records import Variant
from forecast_harness.authors.author import defined_names
from forecast_harness.authors.torch.registry import RewrittenSource, vary_constants
from forecast_harness.authors.torch.source_code import ParsedSource
from forecast_harness.authors.triton import variants_of
from forecast_harness.authors.triton.analysis.source_unit import MAX_EDITS
from forecast_harness.targets.kernels.base_kernel import BaseKernel

MAX_VARIANTS = 96
"""Most variants of one kernel."""
_KERNEL_ONLY_NAMES = frozenset(("CONFIGS", "RESET_TO_ZERO", "grid"))
_WARP_RANGE, _STAGE_RANGE = (1, 32), (1, 7)


def kernel_rewrites(source: str, entry: str, payload: Mapping[str, Any]) -> list[RewrittenSource]:
    """Variants of a kernel target's source, most promising first. Raises `RecordError` for no kernel."""
    subjects = [BaseKernel.from_json(s) for s in payload.get("subjects", ())]
    configs = subjects[0].configs if subjects else ()
    arguments = subjects[0].calls[0] if subjects and subjects[0].calls else ()
    base = str(payload.get("source_sha256", ""))
    variants = _variants(source, entry, base, configs=configs, arguments=arguments)
    return [_rewritten_source(v, _with_configs(v.source, v.configs)) for v in variants]


def module_rewrites(source: str, entry: str) -> list[RewrittenSource]:
    """Rewrites of a module with kernels and the function that launches them."""
    code = ParsedSource.parse(source, entry)
    rewrites = []
    for name, signature in _launched_kernels(source).items():
        for variant in _variants(source, name, ""):
            after = _launched_kernels(variant.source)
            if (
                after.get(name) == signature
                and not variant.configs
                and _KERNEL_ONLY_NAMES.isdisjoint(defined_names(variant.source))
            ):
                rewrites.append(_rewritten_source(variant, variant.source))
    rewrites += [
        RewrittenSource(("constants",), text, note)
        for text, note in itertools.islice(vary_constants(code), MAX_EDITS)
    ]
    rewrites += itertools.islice(_vary_launches(code), MAX_EDITS)
    return rewrites


def _variants(source: str, entry: str, base: str, **facts: Any) -> list[Variant]:
    try:
        return variants_of(source, entry, base, limit=MAX_VARIANTS, **facts)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"no rewrite can read {entry}: {error}") from error


def _rewritten_source(variant: Variant, source: str) -> RewrittenSource:
    names = tuple(str(n) for n in variant.extra.get("rewrites", ()))
    return RewrittenSource(names or ("rewrite",), source, variant.provenance.note)


def _with_configs(source: str, configs: tuple[Config, ...]) -> str:
    """A variant's configs as its source states them."""
    if not configs or "CONFIGS" in defined_names(source):
        return source
    text = ",\n    ".join(repr(_config_literal(c)) for c in configs)
    return f"{source.rstrip()}\n\nCONFIGS = [\n    {text},\n]\n"


def _config_literal(config: Config) -> dict[str, Any]:
    facts = {k: v for k, v in config.to_json().items() if v is not None and k != "num_ctas"}
    return facts if config.num_ctas == 1 else {**facts, "num_ctas": config.num_ctas}


def _launched_kernels(source: str) -> dict[str, str]:
    """Parameters of the kernels that a module launches, as text, by name."""
    tree = python_parser.parse_module(source)
    kernels = {
        n.func.value.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Subscript)
        and isinstance(n.func.value, ast.Name)
    }
    return {
        n.name: ast.unparse(n.args)
        for n in tree.body
        if isinstance(n, ast.FunctionDef) and n.name in kernels and n.decorator_list
    }


def _vary_launches(code: ParsedSource) -> Iterator[RewrittenSource]:
    """Other numbers at launches: warps, stages, and whatever is in upper case."""
    for function in code.functions:
        for node in ast.walk(function):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
                continue
            for keyword in node.keywords:
                value = keyword.value
                if keyword.arg and isinstance(value, ast.Constant) and type(value.value) is int:
                    for new in _other_values(keyword.arg, value.value):
                        draft = code.copy()
                        draft.twin(keyword).value = ast.Constant(new)
                        note = f"{keyword.arg} = {new} in place of {value.value}"
                        yield RewrittenSource(("constants",), draft.text(), note)
            keywords = {k.arg for k in node.keywords}
            for name, values in (("num_warps", (1, 2, 8, 16)), ("num_stages", (1, 2, 4, 5))):
                for new in values if name not in keywords else ():
                    draft = code.copy()
                    draft.twin(node).keywords.append(ast.keyword(name, ast.Constant(new)))
                    yield RewrittenSource(("constants",), draft.text(), f"launched with {name} = {new}")


def _other_values(name: str, value: int) -> list[int]:
    if name == "num_stages":
        return [v for v in (value - 1, value + 1) if _STAGE_RANGE[0] <= v <= _STAGE_RANGE[1]]
    if name == "num_warps":
        return [v for v in (value // 2, value * 2) if _WARP_RANGE[0] <= v <= _WARP_RANGE[1]]
    return [v for v in (value * 2, value // 2) if v >= 1 and name.isupper()]
