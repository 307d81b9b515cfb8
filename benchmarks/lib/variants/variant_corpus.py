"""Variants of the benchmark kernels, written by a language model, each with what its author expected.

They lie in tables, `data/variants.jsonl.gz` and, by a later author, `data/variants_2.jsonl.gz`: a line that
says who wrote them, then one per file. Recorded results are of the first one, which is read unless others are
asked for. To read or change one as files:

    python -m benchmarks.lib.variants.variant_corpus --unpack DIRECTORY [--table TABLE]
    python -m benchmarks.lib.variants.variant_corpus --pack DIRECTORY [--table TABLE]

One variant a file: `<kernel>/<NN_short_name>.py`, where `<kernel>` is the part of a case's name before its
slash. The contract of the source is that of `forecast_autotune.variants.records`; on top of it, the first
line of the docstring says what was changed and why, and `EXPECT` says what the author expected before any
measurement. Both are taken out of the text that a forecast gets to see. `PROVENANCE.json` says who wrote;
`<kernel>/forecasts.json`, where there is one, what the author forecast in figures.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gzip
import hashlib
import importlib.util
import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import kernels
from forecast_autotune.records import digest
from forecast_autotune.variants.records import Origin, Provenance, Variant
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.source import innermost, source_of

TABLE = Path(__file__).parents[2] / "data" / "variants.jsonl.gz"
TABLES = (TABLE, TABLE.with_name("variants_2.jsonl.gz"))
"""All of them, of different kernels."""
EXPECTATIONS = ("faster", "similar", "slower", "wrong")
_NAME = re.compile(r"\d\d_[a-z0-9_]+")
_OPTIONAL = ("CONFIGS", "RESET_TO_ZERO")
_IMPORTS = ("triton", "triton.language")


@dataclass(frozen=True)
class VariantSource:
    """One file of this folder, read but not executed."""

    kernel: str
    """Name of the base kernel among the cases, as `matmul`."""
    path: Path = field(compare=False)
    summary: str
    """What is changed and why: first line of the docstring."""
    expect: str
    """One of `EXPECTATIONS`; compared with the base, under its best config."""
    text: str = field(repr=False)
    """The module without docstring and `EXPECT`: what a forecast may see."""
    form: str
    """Digest of the code of all functions but `grid`, whatever their local names: see `form_of`."""

    @property
    def name(self) -> str:
        """`<kernel>/<NN_short_name>`."""
        return f"{self.kernel}/{self.path.stem}"

    def record(self) -> Variant:
        """The variant, bound to the base kernel as it is now. Raises `RecordError` for a bad source."""
        base = describe.kernel_record(base_of(self.kernel))
        own = json.loads((self.path.parents[1] / "PROVENANCE.json").read_text(encoding="utf-8"))
        provenance = Provenance(Origin.LLM, author=own["author"], note=self.summary, at=own["date"])
        listed = tuple(describe.to_config(c) for c in load_variant(self).configs or ())
        return Variant.of(
            base.name,
            base.source_sha256,
            self.text,
            provenance,
            title=self.path.stem.replace("_", "-"),
            configs=listed,
        )


@dataclass(frozen=True)
class RunnableVariant:
    """A variant that is loaded and can be launched in place of its base kernel."""

    function: Any
    configs: list[triton.Config] | None
    """Its own list; none: that of the case."""
    grid: Callable[[Mapping[str, Any], Mapping[str, Any]], Sequence[int]] | None
    reset_to_zero: tuple[str, ...]

    def configs_for(self, case: kernels.Case) -> list[triton.Config]:
        """Its own configs or those of the case."""
        return self.configs if self.configs is not None else kernels.configs(case)

    def arguments(self, case: kernels.Case, data: kernels.Data) -> dict[str, Any]:
        """The call's arguments by name, without the constexprs that this variant has dropped."""
        named = {**dict(zip(case.kernel.arg_names, data["args"], strict=False)), **data["kwargs"]}
        return {name: value for name, value in named.items() if name in self.function.arg_names}

    def launch(self, case: kernels.Case, data: kernels.Data, config: triton.Config) -> Any:
        """Zero what must be zero, then launch once; returns what Triton returns."""
        named = self.arguments(case, data)
        for name in self.reset_to_zero:
            named[name].zero_()
        own = self.grid
        grid = data["grid"] if own is None else tuple(own(dict(config.kwargs), named))
        triton.set_allocator(_allocate_scratch)
        return self.function[grid](**named, **config.all_kwargs())


def _allocate_scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for tensor descriptors that a kernel makes itself; Triton asks for it at such a launch."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


@cache
def folder(table: Path = TABLE) -> Path:
    """A table as files, below the temporary directory; unpacked once per content of the table.

    Triton reads a kernel's source from its file, so each variant needs one.
    """
    mark = hashlib.sha256(table.read_bytes()).hexdigest()[:16]
    found = Path(tempfile.gettempdir()) / f"forecast-autotune-variants-{os.getuid()}-{mark}"
    if not found.is_dir():
        with tempfile.TemporaryDirectory(dir=found.parent) as part:
            unpack(Path(part) / "all", table)
            # In one step, as other processes may do the same; the first one's is as good.
            with contextlib.suppress(OSError):
                (Path(part) / "all").rename(found)
    return found


def unpack(to: Path, table: Path = TABLE) -> int:
    """Write a table's files into a new folder; returns how many."""
    with gzip.open(table, "rt", encoding="utf-8") as stream:
        lines = [json.loads(line) for line in stream]
    for line in lines:
        path = to / line["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line["text"], encoding="utf-8")
    return len(lines)


def pack(given: Path, table: Path = TABLE) -> int:
    """Replace a table by the files of a folder; returns how many."""
    forecasts = sorted(given.glob("*/forecasts.json"))
    paths = [given / "PROVENANCE.json", *sorted(given.glob("*/*.py")), *forecasts]
    lines = [
        json.dumps({"path": str(p.relative_to(given)), "text": p.read_text(encoding="utf-8")}) for p in paths
    ]
    # mtime=0: the same files give the same bytes.
    with table.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
        packed.write("".join(line + "\n" for line in lines).encode())
    return len(lines)


@cache
def base_of(kernel: str) -> Any:
    """The function of the kernel's cases. Raises `ValueError` for a kernel without cases."""
    return kernels.cases([kernel])[0].kernel


def variant_sources(
    names: Sequence[str] | None = None, tables: Sequence[Path] = (TABLE,)
) -> list[VariantSource]:
    """Every variant of these kernels, or those of these names (`kernel/NN_short_name`); all by default.

    Raises `ValueError` for a file that is no variant, and for a name that has none.
    """
    roots = [folder(table) for table in tables]
    folders = [p for r in roots for p in sorted(r.iterdir()) if p.is_dir() and any(p.glob("*.py"))]
    # Only what is asked for: a file that somebody has just begun must not stop others.
    asked = None if names is None else {n.partition("/")[0] for n in names}
    found = [
        _read(file)
        for folder in folders
        if asked is None or folder.name in asked
        for file in sorted(folder.glob("*.py"))
    ]
    if names is None:
        return found
    if unknown := [n for n in names if n not in {s.kernel for s in found} | {s.name for s in found}]:
        raise ValueError(
            f"no variant or kernel with variants is named {unknown}; there are variants of "
            f"{[f.name for f in folders]}"
        )
    return [s for s in found if s.name in names or s.kernel in names]


def _read(path: Path) -> VariantSource:
    where = f"{path.parent.name}/{path.name}"
    if not _NAME.fullmatch(path.stem):
        raise ValueError(f"{where}: a variant's file is named NN_short_name.py, in lower case")
    text = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{where}: not Python ({error})") from error
    said = (ast.get_docstring(tree) or "").partition("\n")[0].strip()
    told = [n for n in tree.body if isinstance(n, ast.Assign) and _assigned_names(n) == ["EXPECT"]]
    if not said or len(told) != 1 or not isinstance(told[0].value, ast.Constant):
        raise ValueError(f"{where}: a variant begins with a docstring and says EXPECT = {EXPECTATIONS}")
    if told[0].value.value not in EXPECTATIONS:
        raise ValueError(f"{where}: EXPECT is one of {EXPECTATIONS}, not {told[0].value.value!r}")
    lines = text.splitlines()
    for node in (told[0], tree.body[0]):
        lines[node.lineno - 1 : node.end_lineno] = []
    plain = re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines).strip() + "\n")
    return VariantSource(path.parent.name, path, said, told[0].value.value, plain, form_of(plain))


@cache
def load_variant(source: VariantSource) -> RunnableVariant:
    """Import a variant. Raises what its module raises, and `AttributeError` without the entry."""
    name = f"benchmarks.lib.variants.variant_corpus.{source.kernel}.{source.path.stem}"
    spec = importlib.util.spec_from_file_location(name, source.path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    listed = getattr(module, "CONFIGS", None)
    return RunnableVariant(
        getattr(module, describe.kernel_record(base_of(source.kernel)).name),
        None if listed is None else [_config(c) for c in listed],
        getattr(module, "grid", None),
        tuple(getattr(module, "RESET_TO_ZERO", ())),
    )


def _config(given: Mapping[str, Any]) -> triton.Config:
    rest = {name: value for name, value in given.items() if name != "kwargs"}
    return triton.Config(dict(given["kwargs"]), **rest)


def broken_rules(source: VariantSource) -> list[str]:
    """What in a variant's text goes against the contract; empty for a sound one. Imports the module."""
    found = []
    for node in ast.parse(source.text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            found += [
                f"imports {m}, but only triton and its language may be imported"
                for m in modules
                if m not in _IMPORTS and not f"{m}.".startswith("triton.language.extra.")
            ]
        elif isinstance(node, ast.FunctionDef):
            if not node.decorator_list and node.name != "grid":
                found.append(f"{node.name} is neither a @triton.jit function nor grid")
        elif not (isinstance(node, ast.Assign) and _is_allowed_assignment(node)):
            found.append(f"line {node.lineno} is neither import, function nor {' or '.join(_OPTIONAL)}")
    function, base = load_variant(source).function, base_of(source.kernel)
    own, given = _runtime_parameters(function), _runtime_parameters(base)
    if own != given:
        found.append(f"runtime parameters are {own}, those of the base {given}")
    return found


def _assigned_names(node: ast.Assign) -> list[str]:
    return [t.id for t in node.targets if isinstance(t, ast.Name)]


def _is_allowed_assignment(node: ast.Assign) -> bool:
    """One of the optional names, or a module-level `tl.constexpr`."""
    call = node.value
    constant = isinstance(call, ast.Call) and ast.unparse(call.func) == "tl.constexpr"
    return constant or all(name in _OPTIONAL for name in _assigned_names(node))


def _runtime_parameters(function: Any) -> list[str]:
    given = inspect.signature(innermost(function).fn).parameters.values()
    return [p.name for p in given if "constexpr" not in str(p.annotation)]


def form_of(text: str) -> str:
    """Digest of the functions in a text but `grid`, with identifiers numbered as they appear.

    Two texts have one form if they differ in names, comments, docstrings, configs and the order of
    functions only.
    """
    parts = []
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef) or node.name == "grid":
            continue
        numbers: dict[str, str] = {}
        if ast.get_docstring(node) is not None:
            del node.body[0]
        node.decorator_list = []
        for inner in ast.walk(node):
            for attribute in ("id", "arg", "name"):
                if isinstance(inner, ast.Name | ast.arg | ast.FunctionDef) and hasattr(inner, attribute):
                    old = getattr(inner, attribute)
                    setattr(inner, attribute, numbers.setdefault(old, f"v{len(numbers)}"))
        parts.append(ast.dump(node))
    return digest(sorted(parts))


@cache
def base_form(kernel: str) -> str:
    """`form_of` the base kernel and the functions it reaches by name."""
    left, found = [innermost(base_of(kernel))], {}
    while left:
        function = left.pop()
        if function.__name__ in found:
            continue
        found[function.__name__] = source_of(function)
        scope = function.fn.__globals__
        for node in ast.walk(ast.parse(found[function.__name__])):
            inner = innermost(scope.get(getattr(node, "id", ""), None))
            if type(inner).__name__ in ("JITFunction", "InterpretedFunction"):
                left.append(inner)
    return form_of("\n".join(found.values()))


def main() -> int:
    """Unpack the table into a folder, or pack a folder into the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--unpack", type=Path, metavar="DIRECTORY")
    chosen.add_argument("--pack", type=Path, metavar="DIRECTORY")
    parser.add_argument("--table", type=Path, default=TABLE, help="which one; the first by default")
    a = parser.parse_args()
    count = pack(a.pack, a.table) if a.pack else unpack(a.unpack, a.table)
    print(f"{count} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
