"""A kernel in a file that torch.compile has written: as a file of its own, with configs and its call.

Inductor writes the kernels of a graph as texts, under decorators that need a device, beside the code that calls
them. Read from such a file (`TORCH_LOGS=output_code` tells where they are) are the kernel's own text, the sizes and
strides of its call, and its kind of grid. The kernel's function and its imports are all of it that is ever run.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError

_MARKER = "async_compile.triton("
_DTYPES = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
    "i1": "bool",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "fp8e4nv": "float8_e4m3fn",
    "fp8e5": "float8_e5m2",
}
"""torch's names of Triton's types."""
_GRIDS = {
    "Grid1D": ("x",),
    "Grid2D": ("x", "y"),
    "Grid2DWithYZOverflow": ("x", "y"),
    "Grid3D": ("x", "y", "z"),
}
"""Launch grids by Inductor's names: one program per block of these axes."""
_MOST_PROGRAMS = 65535
"""Programs of a grid's second and third axis; Inductor folds more of them over both."""
_BLOCKS = {
    1: (128, 256, 512, 1024, 2048, 4096),
    2: (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    3: (1, 4, 16, 64, 256),
}
"""Sizes of a block along one axis, by the number of axes that are tiled."""
_REDUCED_BLOCKS = (128, 256, 512, 1024, 2048, 4096)
_TILE = (256, 16384)
"""Fewest and most elements of a tile."""
_WARPS = (2, 4, 8, 16)
_ELEMENTS_PER_THREAD = (1, 64)
_MOST_CONFIGS = 64


def is_inductor_output(text: str) -> bool:
    """Whether a file may be one that torch.compile has written."""
    return _MARKER in text


def standalone_file(text: str, name: str) -> str | None:
    """A Python file with this kernel of an output of Inductor's, `inputs(random)` for its call, and configs.

    None where the output has no kernel of this name. Raises `RecordError` for one whose call cannot be told:
    with symbolic sizes, with workspace of its own, or on a grid of another kind.
    """
    tree = _parse(text)
    texts = _kernel_texts(tree)
    if name not in texts:
        return None
    return _StandaloneKernel.read(tree, texts[name], name).text()


def kernel_names(text: str) -> list[str]:
    """The kernels of an output of Inductor's, in order."""
    return list(_kernel_texts(_parse(text)))


def _parse(text: str) -> ast.Module:
    """Raises `RecordError` for what is no Python, or no Python that can be parsed within limits."""
    try:
        return python_parser.parse_module(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RecordError(f"an output of torch.compile's cannot be read: {error}") from error


def _literal_value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise RecordError(f"{ast.unparse(node)[:80]} is no constant: compile with dynamic=False") from error


def _kernel_texts(tree: ast.Module) -> dict[str, str]:
    texts = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) != "async_compile.triton":
            continue
        values = [a.value for a in node.args[:2] if isinstance(a, ast.Constant)]
        if len(values) == 2 and all(isinstance(v, str) for v in values):
            texts[str(values[0])] = str(values[1])
    return texts


@dataclass(frozen=True)
class _Buffer:
    """A tensor of the graph."""

    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _StandaloneKernel:
    """The parts of a file of a kernel alone."""

    name: str
    imports: str
    function: str
    arguments: Mapping[str, _Buffer | int]
    dtypes: Mapping[str, str]
    """Data types of the tensors, as torch calls them."""
    blocks: Mapping[str, int]
    """Meta-parameters, with the size of the axis that each tiles."""
    axes: Sequence[str]
    """Axes of the grid."""

    @classmethod
    def read(cls, output: ast.Module, source: str, name: str) -> _StandaloneKernel:
        """Read a kernel's text and its call. Raises `RecordError`; see `standalone_file`."""
        tree = _parse(source)
        functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
        heuristics = [d for f in functions[:1] for d in f.decorator_list if isinstance(d, ast.Call)]
        if len(heuristics) != 1:
            raise RecordError(f"{name} is no kernel as Inductor writes them: a function under one heuristic")
        (function, *_), (heuristic,) = functions, heuristics
        options = {k.arg: k.value for k in heuristic.keywords if k.arg}
        if missing := [k for k in ("size_hints", "triton_meta", "inductor_meta") if k not in options]:
            raise RecordError(f"what Inductor wrote of {name} has no {missing[0]}")
        hints = _literal_value(options["size_hints"])
        signature = _literal(options["triton_meta"], "signature")
        grid = _literal(options["inductor_meta"], "grid_type")
        if not isinstance(hints, dict) or not isinstance(signature, dict) or not all(map(_is_name, hints)):
            raise RecordError(f"what Inductor wrote of {name} names neither sizes nor a signature")
        if not isinstance(grid, str) or grid not in _GRIDS:
            raise RecordError(f"{name} is launched on a {grid}: only {', '.join(_GRIDS)} can be told")
        meta = [a.arg for a in function.args.args if a.annotation is not None]
        block_axes = {f"{axis.upper()}BLOCK": axis for axis in hints}
        if unknown := [m for m in meta if m not in block_axes]:
            raise RecordError(f"{name} has meta-parameters that are no blocks: {', '.join(unknown)}")
        values = _call_of(output, name)
        buffers = _buffers_of(output)
        parameters = [a.arg for a in function.args.args if a.arg not in meta]
        arguments: dict[str, _Buffer | int] = {}
        for parameter, value in zip(parameters, values, strict=False):
            pointer = str(signature.get(parameter, "")).startswith("*")
            arguments[parameter] = _buffer(value, buffers, name) if pointer else _size(value, name)
        if len(arguments) != len(parameters) or any(n.startswith("ws_ptr") for n in parameters):
            raise RecordError(f"{name} is called with workspace, or in a way that cannot be told")
        for axis in _GRIDS[grid]:
            size = arguments.get(f"{axis}numel")
            if not isinstance(size, int) or (axis != "x" and size > _MOST_PROGRAMS):
                raise RecordError(
                    f"{name} is launched over {axis}numel={size}: a number, and of all axes but the first at most "
                    f"{_MOST_PROGRAMS}, is wanted"
                )
        dtypes = {n: _dtype(str(signature[n]), name) for n, v in arguments.items() if isinstance(v, _Buffer)}
        sizes = {m: arguments.get(f"{block_axes[m]}numel", hints[block_axes[m]]) for m in meta}
        function.decorator_list = [d for d in function.decorator_list if d is not heuristic]
        imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        return cls(
            name,
            "\n".join(_import_text(n) for n in imports if _import_text(n)),
            ast.unparse(function),
            arguments,
            dtypes,
            {m: n for m, n in sizes.items() if isinstance(n, int)},
            _GRIDS[grid],
        )

    def text(self) -> str:
        """The file."""
        configs = [
            f"    triton.Config({blocks!r}, num_warps={warps}, num_stages=1),"
            for blocks, warps in self.configs()
        ]
        kernel = [line for line in self.function.splitlines() if line.strip() != "@triton.jit"]
        lines = [
            f'"""{self.name}, as torch.compile wrote it."""',
            "import torch",
            self.imports,
            "",
            "CONFIGS = [",
            *configs,
            "]",
            "",
            "@triton.autotune(configs=CONFIGS, key=[])",
            "@triton.jit",
            *kernel,
            "",
            "def inputs(random):",
            "    generator = torch.Generator().manual_seed(random.getrandbits(63))",
            "    def tensor(size, stride, dtype):",
            f"        return drawn(size, stride, dtype, {self._least()}, generator)",
            "    return {",
            *(f"        {n!r}: {self._value(n, v)}," for n, v in self.arguments.items()),
            f"        'grid': lambda meta: {self._grid()},",
            "    }",
            "",
            _DRAWN,
        ]
        return "\n".join(lines)

    def configs(self) -> list[tuple[dict[str, int], int]]:
        """Tiles and warps to choose among, thinned evenly where there are many."""
        reductions = [m for m in self.blocks if m.startswith("R")]
        plain = [m for m in self.blocks if m not in reductions]
        # A reduction that is persistent holds all of the axes that it sums over.
        extents = [
            _power(n)
            for name, n in self.arguments.items()
            if isinstance(n, int)
            and name.startswith("r")
            and name.endswith("numel")
            and f"{name.removesuffix('numel').upper()}BLOCK" not in self.blocks
        ]
        size = math.prod(extents)
        rows = {m: _up_to(_BLOCKS[min(3, len(self.blocks) + len(extents))], self.blocks[m]) for m in plain}
        rows |= {m: _up_to(_REDUCED_BLOCKS, self.blocks[m]) for m in reductions}
        configs = []
        for values in itertools.product(*rows.values()):
            tile = math.prod(values) * size
            for warps in _WARPS:
                if _fits(tile, warps) or (size > 1 and max(values, default=1) == 1 and warps >= 4):
                    configs.append((dict(zip(rows, values, strict=True)), warps))
        configs = configs or [({m: v[0] for m, v in rows.items()}, 4)]
        step = math.ceil(len(configs) / _MOST_CONFIGS)
        return configs[:: step + (step % 2 == 0)]  # an odd step takes every number of warps

    def _value(self, name: str, value: _Buffer | int) -> str:
        if isinstance(value, int):
            return str(value)
        return f"tensor({value.size!r}, {value.stride!r}, torch.{self.dtypes[name]})"

    def _least(self) -> int:
        """Indices are drawn below it, so that they lie within whatever they point into."""
        sizes = [n for v in self.arguments.values() if isinstance(v, _Buffer) for n in v.size if n > 1]
        return min(sizes, default=1)

    def _grid(self) -> str:
        axes = []
        for axis in self.axes:
            size, block = self.arguments[f"{axis}numel"], f"{axis.upper()}BLOCK"
            axes.append(f"triton.cdiv({size}, meta[{block!r}])" if block in self.blocks else str(size))
        return f"({', '.join(axes)},)"


_DRAWN = '''
def drawn(size, stride, dtype, least, generator):
    """A tensor of random values: normal, true and false, or indices below `least`."""
    span = 1 + sum((n - 1) * s for n, s in zip(size, stride)) if 0 not in size else 0
    if dtype.is_floating_point:
        flat = torch.randn(span, generator=generator).to(dtype)
    else:
        flat = torch.randint(0, 2 if dtype == torch.bool else least, (span,), generator=generator).to(dtype)
    return flat.as_strided(size, stride)
'''


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier()


def _literal(node: ast.expr, key: str) -> Any:
    """The value of a key of a dictionary that may hold calls under other keys."""
    if isinstance(node, ast.Dict):
        for name, value in zip(node.keys, node.values, strict=True):
            if isinstance(name, ast.Constant) and name.value == key:
                return _literal_value(value)
    raise RecordError(f"what Inductor wrote of a kernel has no {key}: torch 2.7 and newer write it")


def _import_text(node: ast.Import | ast.ImportFrom) -> str:
    """An import, without what only Inductor's decorators need."""
    decorator_names = ("triton_heuristics", "AutotuneHint", "ReductionHint", "TileHint", "DeviceProperties")
    names = [a for a in node.names if a.name not in decorator_names]
    if not names:
        return ""
    if isinstance(node, ast.Import):
        return ast.unparse(ast.Import(names))
    return ast.unparse(ast.ImportFrom(node.module, names, node.level))


def _call_of(output: ast.Module, name: str) -> list[ast.expr]:
    """The positional arguments of the first `NAME.run(...)`. Raises `RecordError` where there is none."""
    for node in ast.walk(output):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{name}.run":
            return node.args
    raise RecordError(f"{name} is called nowhere in the file")


_SIZE_PLACES = {"rand_strided": 0, "reinterpret_tensor": 1, "assert_size_stride": 1}
"""Place of the size among a call's arguments, with the stride behind it; 0 in `empty_strided_cuda`."""


def _size_place(value: ast.expr) -> int | None:
    if not isinstance(value, ast.Call):
        return None
    function = ast.unparse(value.func)
    return 0 if function.startswith("empty_strided") else _SIZE_PLACES.get(function)


def _buffers_of(output: ast.Module) -> dict[str, ast.expr]:
    """The values of names of buffers: an allocation, a part of another buffer, or another name."""
    buffers: dict[str, ast.expr] = {}
    for node in ast.walk(output):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func) == "assert_size_stride":
            target, value = node.args[0], node
        else:
            continue
        if isinstance(target, ast.Name) and (isinstance(value, ast.Name) or _size_place(value) is not None):
            buffers.setdefault(target.id, value)
    return buffers


def _buffer(value: ast.expr, buffers: Mapping[str, ast.expr], kernel: str) -> _Buffer:
    """The size and stride of an argument. Raises `RecordError` where they are not told as numbers."""
    for _ in range(len(buffers) + 1):
        if not isinstance(value, ast.Name):
            break
        value = buffers.get(value.id, value)
    at = _size_place(value)
    if isinstance(value, ast.Call) and at is not None and len(value.args) > at + 1:
        size, stride = (_numbers(a) for a in value.args[at : at + 2])
        if size is not None and stride is not None and len(size) == len(stride):
            return _Buffer(size, stride)
    raise RecordError(
        f"the size of {ast.unparse(value)}, an argument of {kernel}, is not told in numbers: compile with "
        "dynamic=False"
    )


def _numbers(node: ast.expr) -> tuple[int, ...] | None:
    if not isinstance(node, ast.Tuple):
        return None
    values = [e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, int)]
    return tuple(values) if len(values) == len(node.elts) else None


def _size(value: ast.expr, kernel: str) -> int:
    if isinstance(value, ast.Constant) and isinstance(value.value, int):
        return value.value
    raise RecordError(
        f"{ast.unparse(value)}, an argument of {kernel}, is no number: compile with dynamic=False"
    )


def _dtype(pointer: str, kernel: str) -> str:
    if (dtype := _DTYPES.get(pointer.lstrip("*"))) is None:
        raise RecordError(f"{kernel} takes a pointer of an unknown type, {pointer}")
    return dtype


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()


def _up_to(sizes: Sequence[int], axis: int) -> tuple[int, ...]:
    """Sizes of blocks that are no longer than the axis; its own power of two where all are."""
    return tuple(n for n in sizes if n <= _power(axis)) or (_power(axis),)


def _fits(tile: int, warps: int) -> bool:
    low, high = _ELEMENTS_PER_THREAD
    return _TILE[0] <= tile <= _TILE[1] and low <= tile / (32 * warps) <= high
