"""A small parser for Triton IR text: lines -> operations, braces -> a tree of regions.

It reads both printed forms (`%a_ptr` names with `loc(...)` suffixes, and `%arg0` names without) and
knows only what every operation has: results, a name, operands, attributes and types. The *meaning* of an operation is
decided elsewhere, so operations this file never heard of parse like any other.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache

from forecast_autotune.errors import ForecastAutotuneError


class FeatureError(ForecastAutotuneError, ValueError):
    """A kernel about which nothing can be said before compiling it; the message says why."""


@dataclass(frozen=True, slots=True)
class Type:
    """The type of one SSA value. `shape` is () for scalars; `bits` is per element."""

    kind: str
    """`float`, `int`, `pointer`, `block` (a descriptor or block pointer) or `other`."""
    bits: int = 0
    shape: tuple[int, ...] = ()
    tensor: bool = False
    pointee: Type | None = None
    """Pointers: what they point at. Blocks: the tensor that one load gives."""
    elements: int = field(init=False, compare=False)
    """Number of elements; 1 for a scalar."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "elements", math.prod(self.shape))

    @property
    def nbytes(self) -> float:
        """Bytes of all elements as they lie in memory; a boolean takes one byte there."""
        return self.elements * max(self.bits, 8) / 8

    def loaded_type(self) -> Type:
        """The type of the value that `tt.load` gives for a pointer of this type."""
        if self.pointee is None:
            return _OTHER
        if self.kind == "block":
            return self.pointee
        return Type(self.pointee.kind, self.pointee.bits, self.shape, self.tensor, self.pointee.pointee)


@dataclass(slots=True)
class Block:
    """A straight run of operations with its arguments."""

    label: str
    arguments: list[str]
    types: list[Type]
    ops: list[Op] = field(default_factory=list)


@dataclass(slots=True)
class Op:
    """One operation. `text` is what stands between its name and its types, with strings emptied."""

    name: str
    results: list[str]
    operands: list[str]
    text: str
    inputs: tuple[Type, ...]
    outputs: tuple[Type, ...]
    inits: list[str] = field(default_factory=list)
    """`scf.for` and `scf.while`: the values that the carried arguments start with."""
    regions: list[list[Block]] = field(default_factory=list)


@dataclass(slots=True)
class TtirFunction:
    """One `tt.func`; its region's first block holds the function's arguments."""

    name: str
    public: bool
    blocks: list[Block]
    divisors: dict[str, int]
    """Parameters that the compiler is told to be multiples of a number (pointers: in bytes); the call's value may be
    one all the same, where the kernel asks not to be specialised on it."""


_OTHER = Type("other")
_BOOLEAN = Type("int", 1)
_VALUE = re.compile(r"%[\w$.\-]+(?:#\d+)?")
_HEAD = re.compile(r'(?:(%[^="]*?) = )?"?([A-Za-z_][\w.]*)"?(.*)', re.DOTALL)
_STRING = re.compile(r'(?<!@)"(?:[^"\\]|\\.)*"')
_LOCATION = re.compile(r' loc\((?:"(?:[^"\\]|\\.)*"|[^()"]|\((?:[^()"]|"(?:[^"\\]|\\.)*"|\([^()]*\))*\))*\)')
_FUNCTION = re.compile(r'(?:(\w+) )?@("[^"]*"|[\w.$\-]+)\((.*)')
_PARAMETER = re.compile(r"%([\w$.\-]+): ")
_DIVISIBLE_PARAMETER = re.compile(r"%([\w$.\-]+): [^%{]*\{[^}]*tt\.divisibility = (\d+)")
_FOR = re.compile(
    r"(?: unsigned)? %(\S+) = (\S+) to (\S+) step (\S+)"
    r"(?: iter_args\((.*?)\) -> \(?(.*?)\)?)?(?:\s+: (\S+))?$"
)
_CARRIED = re.compile(r"(%[\w$.\-]+) = (%[\w$.\-]+(?:#\d+)?)")
_FLOAT = re.compile(r"b?f(\d+)|tf32")
_SHAPE = re.compile(r"(?:\d+x)*")


def _split_top_level(text: str) -> list[str]:
    """Split at commas and `*` that stand outside of all brackets."""
    parts, depth, start = [], 0, 0
    for place, char in enumerate(text):
        if char in "<([{":
            depth += 1
        elif char in ">)]}" and text[place - 1 : place + 1] != "->":
            depth -= 1
        elif depth == 0 and (char == "," or (char == "*" and text[place - 1] == " ")):
            parts.append(text[start:place].strip())
            start = place + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


@lru_cache(maxsize=4096)
def parse_type(text: str) -> Type:
    """Read one type; an unknown one becomes kind `other` with no size."""
    text = text.strip()
    if text.startswith("tensor<"):
        inner = _split_top_level(text[7:-1])[0]
        sizes = _SHAPE.match(inner)
        digits = sizes.group() if sizes else ""
        element = parse_type(inner[len(digits) :])
        shape = tuple(int(n) for n in digits.split("x") if n)
        return Type(element.kind, element.bits, shape, True, element.pointee)
    if text.startswith("!tt.tensordesc<") or text.startswith("<"):
        inner = _split_top_level(text[text.index("<") + 1 : -1])[0]
        if inner[:1].isdigit():
            return Type("block", 64, pointee=parse_type(f"tensor<{inner}>"))
        return Type("block" if inner.startswith("tensor<") else "pointer", 64, pointee=parse_type(inner))
    if text.startswith("!tt.ptr<"):
        pointee = parse_type(_split_top_level(text[8:-1])[0])
        return Type("block" if pointee.tensor else "pointer", 64, pointee=pointee)
    if text.startswith("i") and text[1:].isdigit():
        return Type("int", int(text[1:]))
    if text == "index":
        return Type("int", 64)
    if match := _FLOAT.match(text):
        return Type("float", int(match.group(1) or 32))
    return _OTHER


@lru_cache(maxsize=4096)
def _signature(section: str) -> tuple[tuple[Type, ...], tuple[Type, ...] | None]:
    """Read a type section: input types, and output types where an arrow gives them."""
    arrow = " -> " if " -> " in section else " to "
    left, separator, right = section.rpartition(arrow)
    if not separator:
        left, right = section, ""
    sides = []
    for side in (left, right):
        side = side.strip()
        if side.startswith("(") and side.endswith(")"):
            side = side[1:-1]
        sides.append(tuple(parse_type(part) for part in _split_top_level(side)))
    return sides[0], sides[1] if separator else None


def _outputs(
    name: str, count: int, inputs: tuple[Type, ...], types: tuple[Type, ...] | None
) -> tuple[Type, ...]:
    """The types of an operation's results; omitted ones by the printer's rules."""
    if count == 0:
        return ()
    if types is not None:
        return (types + (types[-1:] or (_OTHER,)) * count)[:count]
    if not inputs:
        return (_BOOLEAN if name == "arith.constant" else _OTHER,) * count
    if name == "tt.load":
        return (inputs[0].loaded_type(),)
    if name in ("arith.cmpi", "arith.cmpf"):
        return (Type("int", 1, inputs[0].shape, inputs[0].tensor),)
    return (inputs[0] if name in ("tt.addptr", "tt.advance") else inputs[-1],) * count


def _names(text: str | None) -> list[str]:
    """Expand result names: `%a, %b` and `%47:3` (which is used as `%47#0`, `%47#1`, `%47#2`)."""
    if text is None:
        return []
    if "," not in text and ":" not in text:
        return [text.strip()]
    names: list[str] = []
    for part in text.split(","):
        name, _, count = part.strip().partition(":")
        if count:
            names += [f"{name}#{place}" for place in range(int(count))]
        elif name:
            names.append(name)
    return names


def _parameters(text: str) -> tuple[list[str], list[Type]]:
    """Read `%a: type {attributes}, %b: type` up to the bracket that closes the list."""
    names, types = [], []
    for match in _PARAMETER.finditer(text):
        depth, place = 0, match.end()
        while place < len(text) and (depth or text[place] not in " ,)"):
            depth += (text[place] == "<") - (text[place] == ">")
            place += 1
        names.append("%" + match.group(1))
        types.append(parse_type(text[match.end() : place]))
    return names, types


def _clean(line: str) -> str:
    """Drop source locations and trailing comments."""
    if " loc(" in line:
        line = line[: line.rfind(" loc(")] if line[-1] == ")" and line[0] != "^" else _LOCATION.sub("", line)
    if line[0] == "^" and " //" in line:
        line = line[: line.index(" //")]
    return line.rstrip()


def strip_locations(text: str) -> str:
    """The same module without `loc(...)` suffixes and location tables."""
    lines = (line.rstrip() for line in text.splitlines())
    code = [line for line in lines if line and not line.lstrip().startswith("#loc")]
    return "\n".join(line[: len(line) - len(line.lstrip())] + _clean(line.lstrip()) for line in code) + "\n"


def _type_section_start(text: str) -> int:
    """Where the type section starts: the last ` : ` that is not inside an attribute dictionary, or -1."""
    place = text.rfind(" : ")
    return -1 if place < 0 or text.count("}", place) > text.count("{", place) else place


def _operation(line: str) -> tuple[Op, Block | None]:
    """Read one operation; also the first block of its region, when the line opens one."""
    match = _HEAD.match(line)
    if match is None:
        raise FeatureError(f"not a line of Triton IR: {line!r:.80}; pass the text of a TTIR module")
    results, name, tail = _names(match.group(1)), match.group(2), match.group(3)
    if '"' in tail:
        tail = _STRING.sub('""', tail)
    if tail.endswith("{"):
        tail = tail[:-1].rstrip("( ")
        first = Block("", [], [])
    else:
        first = None
    if name == "scf.for" and first is not None:
        return _for(results, tail, first), first
    # Branches type their arguments inside the target list, and have no results.
    place = -1 if name.startswith("cf.") else _type_section_start(tail)
    inputs: tuple[Type, ...] = ()
    outputs: tuple[Type, ...] | None = None
    if place >= 0:
        inputs, outputs = _signature(tail[place + 3 :])
        tail = tail[:place]
    elif name == "scf.if" and " -> " in tail:
        tail, _, section = tail.partition(" -> ")
        outputs = _signature(f" -> {section}")[1]
    op = Op(name, results, _VALUE.findall(tail), tail, inputs, _outputs(name, len(results), inputs, outputs))
    if name == "scf.while" and first is not None:
        pairs = _CARRIED.findall(tail)
        op.inits, op.operands = [init for _, init in pairs], []
        first.arguments, first.types = [argument for argument, _ in pairs], list(inputs)
    return op, first


def _for(results: list[str], tail: str, body: Block) -> Op:
    """Read the head of an `scf.for`: operands are lower bound, upper bound and step."""
    match = _FOR.match(tail)
    if match is None:
        raise FeatureError(
            f"an scf.for this parser cannot read: {tail!r:.120}; report it with the module's text"
        )
    variable, lower, upper, step, iter_args, types, index = match.groups()
    pairs = _CARRIED.findall(iter_args or "")
    outputs = tuple(parse_type(part) for part in _split_top_level(types or ""))
    body.arguments = ["%" + variable] + [argument for argument, _ in pairs]
    body.types = [parse_type(index or "index"), *outputs]
    return Op("scf.for", results, [lower, upper, step], "", (), outputs, [init for _, init in pairs])


def parse_ttir(text: str) -> dict[str, TtirFunction]:
    """Read a module: its functions by name, in order.

    Raises `FeatureError` when the text holds no function or its braces do not match.
    """
    functions: dict[str, TtirFunction] = {}
    open_ops: list[Op | None] = []
    blocks: list[Block] = []
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line[0] == "#" or line.startswith("//"):
            continue
        if line[0] == "^" or " loc(" in line:
            line = _clean(line)
        if line[0] == "%" and blocks:  # nearly every line, so first
            _add(line, open_ops, blocks)
        elif line[0] == "}":
            if not open_ops:
                raise FeatureError("unbalanced braces: this is not the text of one whole TTIR module")
            _close_region(line, open_ops, blocks)
        elif line[0] == "^" and blocks:
            label, _, parameters = line.partition("(")
            names, types = _parameters(parameters)
            _open_block(open_ops, blocks, Block(label.rstrip(":"), names, types))
        elif line.startswith(("module", "builtin.module")):
            open_ops.append(None)
        elif line.startswith("tt.func"):
            _open_function(line, functions, open_ops, blocks)
        elif blocks:
            _add(line, open_ops, blocks)
    if open_ops or not functions:
        what = "unbalanced braces" if open_ops else "no tt.func with a body"
        raise FeatureError(f"{what}: this is not the text of one whole TTIR module ({text!r:.60})")
    return functions


def _add(line: str, open_ops: list[Op | None], blocks: list[Block]) -> None:
    op, first = _operation(line)
    blocks[-1].ops.append(op)
    if first is not None:
        op.regions.append([first])
        open_ops.append(op)
        blocks.append(first)


def _open_function(
    line: str, functions: dict[str, TtirFunction], open_ops: list[Op | None], blocks: list[Block]
) -> None:
    match = _FUNCTION.search(line)
    if match is None or not line.endswith("{"):  # a declaration has no body and costs nothing
        return
    names, types = _parameters(match.group(3))
    first = Block("^bb0", names, types)
    name = match.group(2).strip('"')
    divisors = {"%" + m.group(1): int(m.group(2)) for m in _DIVISIBLE_PARAMETER.finditer(match.group(3))}
    functions[name] = TtirFunction(name, match.group(1) == "public", [first], divisors)
    holder = Op("tt.func", [], [], "", (), (), [], [functions[name].blocks])
    open_ops.append(holder)
    blocks.append(first)


def _open_block(open_ops: list[Op | None], blocks: list[Block], block: Block) -> None:
    """A `^bb0(...)` right after a region opens names its arguments; any other label starts a block."""
    current, owner = blocks[-1], open_ops[-1]
    if not current.ops and not current.label and owner is not None:
        current.label, current.arguments, current.types = block.label, block.arguments, block.types
    elif owner is not None:
        owner.regions[-1].append(block)
        blocks[-1] = block


def _close_region(line: str, open_ops: list[Op | None], blocks: list[Block]) -> None:
    """A closing brace ends a region; `} else {`, `} do {` and `}, {` open the next one of the same op."""
    op = open_ops[-1]
    if op is None:
        open_ops.pop()
        return
    blocks.pop()
    if line.endswith("{"):
        block = Block("", [], [])
        op.regions.append([block])
        blocks.append(block)
        return
    open_ops.pop()
    if line.startswith("} {"):  # attributes, which loops are printed with after their body
        op.text += line[1:]
    if line.startswith("}) ") and (place := _type_section_start(line)) >= 0:
        op.inputs, outputs = _signature(line[place + 3 :])
        op.outputs = _outputs(op.name, len(op.results), op.inputs, outputs)
