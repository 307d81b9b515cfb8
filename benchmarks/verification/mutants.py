"""Claim: how many wrong sources verification refuses, by the kind of the fault.

    python -m benchmarks.verification.mutants --device cpu --count 2000 --out benchmarks/results/mutants_cpu.json
    python -m benchmarks.verification.mutants --families precision synchronisation --lanes 12 --out FILE

A mutant is a right solution of a pack with one place changed by one rule. It counts once a witness tells it from its
base: cases of a generator of this file's own, ten times as many as `verify` varies, at which the base keeps the pack's
limits and the mutant does not. What raises at the first plain case is stillborn. Half of the rules, and half of the
bases, are held out: what is mended is mended by the survivors of the others.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import random
import re
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.lib import result_files
from benchmarks.lib.candidate_place import CandidatePlace
from benchmarks.lib.result_files import say
from benchmarks.verification.solutions import CORPORA, LanePool, Row
from forecast_autotune.records import digest
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.targets.packs import Language, Pack, Solution, builtin_names, load_pack
from forecast_harness.targets.packs.schema import PackFormat
from forecast_harness.trials.packs import first_plan
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problem import DrawSpec, LaunchCase, NativeProblem, load_module
from forecast_harness.verify.run import verify
from forecast_harness.verify.tolerance import same_bits, tensors_of
from tests.harness import corpus

FAMILIES = ("boundary", "precision", "semantics", "indexing", "synchronisation", "arithmetic")
WITNESS_FACTOR = 10
_WITNESS_S, _HUNG_S = 15.0, 60.0
"""Seconds after which no more cases are tried, and after which a launch counts as one that never ends."""


class Base(NamedTuple):
    """A right solution of a pack."""

    name: str
    pack: Pack
    solution: Solution


class Mutant(NamedTuple):
    """Its text with one place changed."""

    base: Base
    family: str
    rule: str
    line: int
    source: str

    @property
    def id(self) -> str:
        """A name that another run gives it, too."""
        return digest("mutant", self.base.name, self.source)[:12]

    @property
    def held_out(self) -> bool:
        """Whether its rule or its base is left alone until the end."""
        named = ("rule", self.rule), ("base", self.base.name)
        return any(int(digest("held out", *one)[:8], 16) % 2 for one in named)


def bases() -> list[Base]:
    """Solutions of the shipped packs, and those of the honest corpus that need no device and no compiler."""
    listed = [
        Base(f"{p.definition.name}/{s.name}", p, s)
        for p in map(load_pack, builtin_names())
        for s in p.solutions
    ]
    honest = [
        e for e in corpus.read_corpus(CORPORA / "honest") if e.backend == "cpu" and "compiled" not in e.name
    ]
    listed += [Base(f"honest/{e.name}", e.pack, e.solution) for e in honest]
    # Triton's interpreter cuts to bfloat16, so that no CPU finds the Triton solution of cross_entropy right.
    cut = ("cross_entropy", Language.TRITON)
    own = [b for b in listed if b.pack.definition.format is PackFormat.OWN]
    return [b for b in own if (b.pack.definition.name, b.solution.language) != cut]


# --- rules: (family, rule, the text that takes a node's place) of every change of a node ---

Change = tuple[str, str, str]
_INDEX_NAME = re.compile(r"off|idx|index|ptr|row|col|pid|start|inner|where|^[ijkmn]$|block|stride")
_MEMORY_CALLS = {"load", "store", "atomic_add", "make_block_ptr", "advance"}
_WAITS = {"debug_barrier", "synchronize", "join", "wait", "wait_stream", "result", "shutdown"}
# fmt: off
_FUNCTIONS = {
    "max": "min", "maximum": "minimum", "amax": "amin", "sum": "max", "mean": "sum", "exp": "exp2", "log": "log2",
    "rsqrt": "sqrt", "sqrt": "rsqrt", "sigmoid": "tanh", "softmax": "log_softmax", "silu": "gelu", "cumsum": "cumprod",
    "argmax": "argmin", "var": "std", "tril": "triu", "triu": "tril", "logsumexp": "amax", "abs": "square",
}
_NARROWER = {"float32": ("float16", "bfloat16"), "float64": ("float32",), "float": ("half", "bfloat16"), "double": ("float",)}  # noqa: E501
_SPECIAL = {"exp", "softmax", "sum", "mean", "dot", "matmul", "einsum", "rsqrt", "sigmoid", "bmm"}
_IN_PLACE = {"exp", "sub", "mul", "add", "div", "sqrt", "softmax"}
_EDGE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_TURNED = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
_OPERATORS = {ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div, ast.Add), ast.Div: (ast.Mult,)}
_SIGNS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}  # noqa: E501
text = ast.unparse


def changes(node: ast.AST, in_index: bool) -> Iterator[Change]:
    """The changes of one expression or statement; `in_index`: whether it is part of an address or of a size."""
    match node:
        case ast.Compare(left, [op], [right]):
            for table, named in ((_EDGE, ("boundary", "edge")), (_TURNED, ("semantics", "turned comparison"))):
                if new := table.get(type(op)):
                    yield *named, f"({text(ast.Compare(left, [new()], [right]))})"
            if type(op) in _EDGE:
                yield "boundary", "one less", f"({text(left)} {_SIGNS[type(op)]} {text(right)} - 1)"
                yield "boundary", "one more", f"({text(left)} {_SIGNS[type(op)]} {text(right)} + 1)"
        case ast.BinOp(left, ast.BitAnd(), right):
            yield from (("boundary", "half of a mask", text(half)) for half in (left, right))
        case ast.BinOp(left, (ast.FloorDiv() | ast.Mod()) as op, right):
            sign = "%" if isinstance(op, ast.FloorDiv) else "//"
            yield "indexing", "quotient and remainder", f"({text(left)} {sign} {text(right)})"
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            family = "indexing" if in_index else "arithmetic"
            for kind in _OPERATORS[type(op)]:
                yield family, "operator", f"({text(ast.BinOp(left, kind(), right))})"
            yield family, "operand left out", f"({text(left)})"
            if not in_index:
                yield "arithmetic", "operands of a quotient swapped", f"({text(right)} {_SIGNS[type(op)]} {text(left)})"
        case ast.UnaryOp(ast.USub(), operand):
            yield "arithmetic", "sign", text(operand)
        case ast.Constant(float(value)):
            if value not in (0.0, 1.0):
                yield "precision", "constant of two digits", f"{value * 1.01:.2g}"
                yield "arithmetic", "constant doubled", repr(2 * value)
            yield "boundary", "another fill", "1.0" if value == 0.0 else "0.0"
        case ast.Constant(int(value)) if in_index and type(value) is int and 0 <= value < 8:
            yield "indexing", "constant", str(value + 1)
            if value:
                yield "boundary", "constant", str(value - 1)
        case ast.Attribute(ast.Name("tl" | "torch" as module), name) if name in _NARROWER:
            yield from (("precision", f"{narrow} throughout", f"{module}.{narrow}") for narrow in _NARROWER[name])
        case ast.Subscript(value, ast.Tuple([one, two])):
            yield "indexing", "axes of an index swapped", f"{text(value)}[{text(two)}, {text(one)}]"
        case ast.Slice(lower, ast.expr() as upper):
            yield "boundary", "slice", f"{'' if lower is None else text(lower)}:({text(upper)}) - 1"
        case ast.AugAssign(target, _, value):
            yield "synchronisation", "accumulator overwritten", f"{text(target)} = {text(value)}"
            yield "arithmetic", "accumulated with the other sign", f"{text(target)} = {text(target)} - {text(value)}"
        case ast.Call():
            yield from _changed_calls(node)
        case ast.Expr(ast.Call(func)) if text(func).rpartition(".")[2] in _WAITS:
            yield "synchronisation", "wait left out", "pass"


def _changed_calls(node: ast.Call) -> Iterator[Change]:
    function, whole, given = text(node.func), text(node), [text(a) for a in node.args]
    named = {k.arg: text(k.value) for k in node.keywords if k.arg}
    name = function.rpartition(".")[2]
    head = function[: -len(name)]
    is_method = head not in ("", "tl.", "torch.")

    def call(function: str = function, args: Sequence[str] = given, keywords: Mapping[str, str] = named) -> str:
        return f"{function}({', '.join([*args, *(f'{k}={v}' for k, v in keywords.items())])})"

    def without(*names: str) -> dict[str, str]:
        return {k: v for k, v in named.items() if k not in names}

    if name in _FUNCTIONS:
        yield "semantics", "another function", call(head + _FUNCTIONS[name])
    if name in _NARROWER and head:
        yield from (("precision", "narrower cast", call(head + narrow)) for narrow in _NARROWER[name])
    if name in ("to", "float") and is_method:
        yield "precision", "cast left out", head[:-1]
    if name in _SPECIAL:
        for narrow in ("bfloat16", "float16"):
            back = f"(tl.{narrow}).to(tl.float32)" if head == "tl." else f"(torch.{narrow}).float()"
            yield "precision", f"intermediate in {narrow}", f"({whole}).to{back}"
    if name == "dot":
        yield from (("precision", f"product in {kind}", call(keywords={**named, "input_precision": repr(kind)}))
                    for kind in ("tf32", "bf16x3"))
    if "mask" in named:
        yield "boundary", "no mask", call(keywords=without("mask", "other"))
    if "other" in named:
        yield "boundary", "fill left out", call(keywords=without("other"))
    for axis in sorted({"dim", "axis"} & named.keys()):
        yield "indexing", "another axis", call(keywords={**named, axis: "0"})
    if name in _FUNCTIONS and len(given) == 2 and given[1] in ("-1", "0", "1"):
        yield "indexing", "another axis", call(args=[given[0], "1" if given[1] == "0" else "0"])
    if name == "program_id":
        yield "indexing", "another axis of the grid", call(args=["1" if given == ["0"] else "0"])
    if name == "cdiv" and len(given) == 2:
        yield "boundary", "last tile left out", f"(({given[0]}) // ({given[1]}))"
    if name == "range" and len(given) >= 2:
        yield "boundary", "first step left out", call(args=[f"{given[0]} + {(*given, 1)[2]}", *given[1:]])
        yield "boundary", "last step left out", call(args=[given[0], f"{given[1]} - 1", *given[2:]])
    if name in ("where", "gather", "sub", "div") and len(given) >= 2:
        yield "semantics", "operands swapped", call(args=[*given[:-2], given[-1], given[-2]])
    if name in ("transpose", "t", "permute", "trans", "flip") and head:
        yield "indexing", "not transposed", head[:-1] if is_method or not given else given[0]
    if name in ("clone", "contiguous") and head not in ("tl.", "torch."):
        yield "synchronisation", "copy left out", head[:-1]
    if name in _IN_PLACE and is_method:
        yield "synchronisation", "in place", call(f"{head}{name}_")
    if name in ("zeros", "zeros_like", "new_zeros") and head != "tl.":
        yield "synchronisation", "memory not cleared", call(head + name.replace("zeros", "empty"))
    if name == "atomic_add" and len(given) >= 2:
        masked = {k: v for k, v in named.items() if k == "mask"}
        yield "synchronisation", "not atomic", call("tl.store", [given[0], f"tl.load({given[0]}) + {given[1]}"], masked)
        yield "synchronisation", "overwritten", call("tl.store", given[:2], masked)
# fmt: on


def mutants_of(base: Base) -> Iterator[Mutant]:
    """All mutants of a solution, each text once."""
    tree = ast.parse(base.solution.source)
    seen = {text(tree)}
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    for parent in (p for f in functions for one in f.body for p in ast.walk(one)):
        for name, value in ast.iter_fields(parent):
            for number, node in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(node, ast.expr | ast.stmt) and name not in ("annotation", "decorator_list"):
                    for family, rule, new in changes(node, _is_index(parent, name)):
                        if (made := _replaced(tree, parent, name, number, node, new)) not in seen:
                            seen.add(made)
                            yield Mutant(base, family, rule, getattr(node, "lineno", 0), made)


def _is_index(parent: ast.AST, name: str) -> bool:
    match parent:
        case ast.Call(function):
            return name == "args" and text(function).rpartition(".")[2] in _MEMORY_CALLS
        case ast.Assign([target, *_]) | ast.AugAssign(target):
            return bool(_INDEX_NAME.search(text(target).lower()))
        case ast.BinOp():
            return bool(_INDEX_NAME.search(text(parent).lower().split("(")[0]))
    return isinstance(parent, ast.Subscript | ast.Slice | ast.Compare | ast.Tuple)


def _replaced(tree: ast.AST, parent: Any, name: str, number: int, node: ast.AST, new: str) -> str:
    """The whole text with `new` for a node; that of the tree where it is no Python."""
    field = getattr(parent, name)
    put = partial(field.__setitem__, number) if isinstance(field, list) else partial(setattr, parent, name)
    try:
        head, tail = (
            ("", "")
            if isinstance(node, ast.stmt)
            else ("x[", "]")
            if isinstance(node, ast.Slice)
            else ("(", ")")
        )
        made: Any = ast.parse(f"{head}{new}{tail}").body[0]
        put(made if not head else made.value if head == "(" else made.value.slice)
        result = text(tree)
        ast.parse(result)
    except (SyntaxError, ValueError):
        put(node)
        result = text(tree)
    put(node)
    return result


# --- witnesses: cases of their own ---

_SCALES = ("x1", "x3", "x0.01", "x10", "negative", "+3", "-3", "nan", "inf", "-inf")
_KINDS = (*_SCALES, "equal", "spike", "rising", "ties", "cancelling", "integers", "near_overflow")


def _values(kind: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Another draw of a floating tensor's values."""
    plain = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    flat, some = plain.reshape(-1), partial(torch.randint, 0, max(1, plain.numel()), generator=generator)
    if kind == "equal":
        flat[:] = flat[:1].clone()
    elif kind == "spike" and flat.numel():
        flat[some((1 + flat.numel() // 64,))] *= 40
    elif kind in ("nan", "inf", "-inf") and flat.numel():
        flat[some((1,))] = float(kind)
    made = {
        "x3": lambda: plain * 3, "x0.01": lambda: plain * 0.01, "x10": lambda: plain * 10, "+3": lambda: plain + 3,
        "-3": lambda: plain - 3, "negative": lambda: -plain.abs(), "rising": lambda: plain.sort(-1).values,
        "ties": plain.round, "cancelling": lambda: plain.sign() * (100 + plain / 16), "integers": (4 * plain).round,
        "near_overflow": lambda: plain.tanh() * min(torch.finfo(tensor.dtype).max / 8, 3e4),
    }.get(kind, lambda: plain)()  # fmt: skip
    return made.to(tensor.dtype)


def _size(low: int, high: int, multiple: int, rng: random.Random) -> int:
    """Mostly the least, the most, a power of two, or one beside these."""
    near = [low, low + multiple, high, high - multiple, *((1 << n) + d for n in range(9) for d in (-1, 0, 1))]
    able = [n for n in near if low <= n <= high and n % multiple == 0]
    any_size = rng.randrange(low // multiple or 1, high // multiple + 1) * multiple
    return rng.choice(able) if rng.random() < 0.7 else any_size


def witness_cases(
    base: Base, problem: NativeProblem, count: int, seed: int
) -> Iterator[tuple[str, LaunchCase]]:
    """Edges of sizes, other values, rows further apart. The first case is plain."""
    rng, definition, works = (
        random.Random(f"{base.name} {seed}"),
        base.pack.definition,
        base.pack.checked_workloads,
    )
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    how = DrawSpec("normal", "contiguous", generator)
    yield "plain", problem.case(works[0].axes, how)
    free = {n: a for n, a in definition.axes.items() if a.value is None}
    for n in range(1, count):
        sizes = {name: _size(max(1, a.low), a.high, a.multiple, rng) for name, a in free.items()}
        case = problem.case(sizes if n % 5 else works[rng.randrange(len(works))].axes, how)
        kind, tensors = _KINDS[n % len(_KINDS)], dict(case.tensors)
        for name in (name for name in definition.inputs if name in tensors):
            spec, value = definition.inputs[name], tensors[name]
            # Numbers of [0, 1) alone mean a mask, a gate or a decay: no other ones make sense.
            if value.is_floating_point() and "normal" in spec.values and not spec.static:
                value = _values(kind if rng.random() < 0.8 else "x1", value, generator)
            if "padded" in spec.layouts and rng.random() < 0.3 and value.dim() > 1:
                rest = torch.full((*value.shape[:-1], rng.randrange(1, 9)), 77).to(value.dtype)
                value = torch.cat([value, rest], -1)[..., : value.shape[-1]]
            tensors[name] = value
        yield f"{kind} {dict(case.sizes or {})}", replace(case, tensors=tensors)


def witness(mutant: Mutant, device: str, count: int, seed: int) -> Row:
    """`wrong`, with the case that tells; `within` the limits, but of other bits; `equal`; or `stillborn`.

    Beside it, whether comparing one plain case with usual tolerances finds the fault. Runs in a process of its own.
    """
    base, ends, seen = mutant.base, time.monotonic() + _WITNESS_S, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        problem, entry, one = NativeProblem(base.pack, Path(folder)), base.solution.entry, dict[str, Any]()
        right = getattr(load_module(base.solution.source, Path(folder), "base"), entry)
        try:
            wrong = getattr(load_module(mutant.source, Path(folder), "mutant"), entry)
            for label, case in witness_cases(base, problem, count, seed):
                expected, written = _launch(right, case, device)
                if written or case.judge(case.tensors, expected)[0]:
                    continue  # what the base does not do, nobody has to
                got, written = _launch(wrong, case, device)
                finding = case.judge(case.tensors, got)[0]
                one = one or {"allclose": _usual_finding(case, got)}
                if finding or written:
                    return {
                        "witness": "wrong",
                        "at": label,
                        "why": finding[1][:160] if finding else "writes inputs",
                        **one,
                    }
                seen["within"] += not all(map(same_bits, got, expected))
                seen["cases"] += 1
                if time.monotonic() > ends:
                    break
        except Exception as error:
            kind = "wrong" if seen["cases"] else "stillborn"
            return {"witness": kind, "at": "", "why": repr(error)[:160], **one}
        return {"witness": "within" if seen["within"] else "equal", "cases": seen["cases"], **one}


def _launch(entry: Callable[..., Any], case: LaunchCase, device: str) -> tuple[list[torch.Tensor], bool]:
    """The outputs of one call, and whether an input was written."""
    given = {
        n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for n, t in case.tensors.items()
    }
    given = {n: t.to(device) for n, t in given.items()}
    outputs = {n: t.clone().to(device) for n, t in case.outputs.items()}
    scalars = {n: one["v"] for n, one in case.call["kwargs"].items() if "v" in one}
    result = entry(**given, **outputs, **scalars)
    result = list(outputs.values()) or tensors_of(result)
    written = any(not same_bits(given[n].cpu(), t) for n, t in case.tensors.items())
    return [t.cpu().clone() for t in result], written


def _usual_finding(case: LaunchCase, got: Sequence[torch.Tensor]) -> bool:
    want = case.right() if case.right is not None else []
    if [t.shape for t in want] != [t.shape for t in got]:
        return True
    limits = [1e-4 if t.dtype.itemsize >= 4 else 1e-2 for t in want]
    pairs = zip(got, want, limits, strict=True)
    return not all(torch.allclose(a.double(), b.double(), rtol=limit, atol=limit) for a, b, limit in pairs)


def apart(function: Callable[[], Row], seconds: float) -> Row:
    """The result of a function in a forked process; a crash or too many seconds there is `wrong`."""
    read, write = os.pipe()
    if not (child := os.fork()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with os.fdopen(write, "w") as answer:
            answer.write(json.dumps(function()))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        words = answer.read() if select.select([answer], [], [], seconds)[0] else ""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return dict(json.loads(words)) if words else {"witness": "wrong", "at": "", "why": "crash or time-out"}


# --- judging ---


def drawn_mutants(listed: Sequence[Base], families: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Mutants of the families in turns, and of all rules in turns within each, as long as there are any."""
    heaps: dict[str, dict[str, list[Mutant]]] = {f: {} for f in FAMILIES}
    for mutant in itertools.chain.from_iterable(map(mutants_of, listed)):
        heaps[mutant.family].setdefault(mutant.rule, []).append(mutant)
    rng = random.Random(seed)
    for heap in (heap for rules in heaps.values() for heap in rules.values()):
        rng.shuffle(heap)
    rows = [
        [m for turn in itertools.zip_longest(*(heaps[f][r] for r in sorted(heaps[f]))) for m in turn]
        for f in families
    ]
    each = [[m for m in row if m is not None] for row in rows]
    return [m for turn in itertools.zip_longest(*each) for m in turn if m is not None][:count]


def judged(mutant: Mutant, place: CandidatePlace, seed: int, lane: SandboxLane) -> Row:
    """All that is said of one mutant."""
    base, cases = mutant.base, VerificationPlan().cases
    plan = replace(place.plan(Language.TORCH), cases=cases)
    row = {
        "base": base.name,
        "language": str(base.solution.language),
        **mutant._asdict(),
        "held_out": mutant.held_out,
    }
    row = {**row, "base": base.name, "source": mutant.id}
    row |= apart(lambda: witness(mutant, place.device, WITNESS_FACTOR * cases, seed), _HUNG_S)
    if row["witness"] != "stillborn":
        solution = replace(base.solution, source=mutant.source)
        for name, one in (("verify", plan), ("quick", first_plan(plan))):
            verdict = verify(place.sized(base.pack), solution, lane, plan=one)
            why = "; ".join(f"{r.code}: {r.detail}"[:120] for r in verdict.reasons)
            row |= {name: str(verdict.judgement), f"{name}_s": round(verdict.seconds, 3), f"{name}_why": why}
    return row


def summary(rows: Sequence[Row]) -> Row:
    """Counts and kill rates by family, of all mutants and of those held out."""
    of = {f: [r for r in rows if f in (r["family"], "all")] for f in (*FAMILIES, "all")}
    return {
        f: _counts(mine) | {"held_out": _counts([r for r in mine if r["held_out"]])}
        for f, mine in of.items()
        if mine
    }


def _counts(rows: Sequence[Row]) -> Row:
    kinds = Counter(r["witness"] for r in rows)
    wrong = [r for r in rows if r["witness"] == "wrong"]
    killed = {n: sum(r[n] != "accepted" for r in wrong) for n in ("verify", "quick")}
    killed["allclose"] = sum(bool(r.get("allclose", True)) for r in wrong)
    rate = {n: round(k / len(wrong), 4) if wrong else None for n, k in killed.items()}
    refused = sum(r["verify"] != "accepted" for r in rows if r["witness"] in ("equal", "within"))
    known = {"stillborn": kinds["stillborn"], "no_witness": kinds["equal"], "within_limits": kinds["within"]}
    return {"mutants": len(rows), **known, "witnessed": len(wrong), "killed": killed, "rate": rate,
            "refused_without_witness": refused}  # fmt: skip


def main() -> int:
    command_line = result_files.parser(__doc__)
    command_line.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    command_line.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    command_line.add_argument("--count", type=int, default=600)
    command_line.add_argument("--seed", type=int, default=1)
    command_line.add_argument("--lanes", type=int, default=1)
    command_line.add_argument("--seconds", type=float, default=1e9, help="no mutant is begun after so many")
    command_line.set_defaults(stub_only=command_line.parse_known_args()[0].device == "cpu")
    a = result_files.parse_arguments(command_line)
    torch.set_num_threads(1)
    os.environ |= {"TRITON_INTERPRET": "1"} if a.device == "cpu" else {}
    place, report = CandidatePlace.of(a.device), result_files.ResultFile(a, "mutants", a.seed)
    chosen = drawn_mutants(bases(), a.families, a.count, a.seed)
    tasks = [(m.id, partial(judged, m, place, a.seed)) for m in chosen]
    rows: list[Row] = []
    for row in LanePool(place, a.lanes, time.monotonic() + a.seconds).each(tasks):
        if "witness" not in row:
            say(f"not judged: {row}")
            continue
        rows.append(row)
        report.add("mutants", row)
        if row["witness"] == "wrong" and row["verify"] == "accepted":
            say(f"survives: {row}")
    report.finish({"device": place.name, "drawn": len(tasks), "judged": len(rows), "families": summary(rows)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
