"""The position of an operation in its graph: the operations after it, and its share of the graph's work."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

from forecast_autotune.features.devices import DeviceSpec, device_spec, is_known_device
from forecast_autotune.records import Device
from forecast_integrations.inductor.choices.records import size_hints

if TYPE_CHECKING:
    import torch
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import Layout

_Kind: TypeAlias = "tuple[object, ...]"
_MOST_NODES = 200
"""Nodes that are looked at behind one operation."""
_COPIES = ("_to_copy", "clone", "convert_element_type")
_REDUCTIONS = frozenset(
    {"softmax", "norm", "sum", "logsumexp", "mean", "var", "std"}
    | {"amax", "amin", "max", "min", "argmax", "argmin", "prod"}
)
"""Words in names of operations that read all of a row; not every release of torch marks them."""
_PRODUCTS = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_int_mm",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_grouped_mm",
    }
)
_UPCAST = 0.6
"""Share of an operand's bytes up to which what it is computed from is worth to be read in its place."""
SMALL_SHARE, SMALL_SUM = 0.01, 0.05
"""Share of its graph's work below which an operation is small; and the most of all small ones together."""


@dataclass
class GraphProducts:
    """The products and convolutions of one graph."""

    least_ms: dict[_Kind, tuple[int, float]] = field(default_factory=dict)
    """By kind and sizes, how many there are, and the least milliseconds of one."""
    small: dict[_Kind, float] = field(default_factory=dict)
    """Shares of the graph's work that passed for small."""
    under_way: WeakValueDictionary[str, Any] = field(default_factory=WeakValueDictionary)
    """By problem id, the search of the first operation that is to be measured; it leads to all of the graph."""

    @property
    def ms(self) -> float:
        """The least milliseconds of all."""
        return sum(count * ms for count, ms in self.least_ms.values())


@dataclass(frozen=True)
class GraphPosition:
    """The place of an operation in its graph, and the worth of a decision on it."""

    fusion_ms: float = math.inf
    """Milliseconds saved where later operations are computed in the operation's own kernel, or an operand that is
    made of fewer bytes: it is then neither written nor read. 0 where nothing follows that is computed element by
    element, or where that goes into the kernel of a reduction, which reads the result anyway; inf where it is not
    known what follows."""
    kind: _Kind = ()
    products: GraphProducts = field(default_factory=GraphProducts)

    def share(self, ms: float) -> float:
        """The share of the graph's work that operations like this one take, of `ms` each; 1 where it is not known."""
        total, (alike, _) = self.products.ms, self.products.least_ms.get(self.kind, (0, 0.0))
        return min(1.0, alike * ms / total) if total > 0 and alike else 1.0

    def is_small(self, ms: float) -> bool:
        """Whether the graph hardly takes longer for operations like this one, and all others that are as small."""
        share = self.share(ms)
        small_sum = sum(count for kind, count in self.products.small.items() if kind != self.kind)
        if share >= SMALL_SHARE or share + small_sum > SMALL_SUM:
            return False
        self.products.small[self.kind] = share
        return True


_OF_GRAPHS: WeakKeyDictionary[GraphLowering, GraphProducts] = WeakKeyDictionary()


def graph_position(layout: Layout | None, device: Device) -> GraphPosition:
    """The position of the operation that is lowered just now, whose result has this layout."""
    from torch._inductor.virtualized import V

    node = getattr(V.graph, "current_node", None)
    if node is None or layout is None:
        return GraphPosition()
    spec = device_spec(device)
    products = _OF_GRAPHS.get(V.graph)
    if products is None:
        # Shares would be wrong by the error of the rates.
        nodes = node.graph.nodes if is_known_device(device) else ()
        products = _OF_GRAPHS[V.graph] = _products(nodes, spec)
    size = _upcast_bytes(node)
    if has_own_pass(node):
        size += layout.dtype.itemsize * math.prod(size_hints(layout.size))
    return GraphPosition(2.0 * size / (spec.memory_gb_s * 1e6), _kind(node), products)


def has_own_pass(node: torch.fx.Node) -> bool:
    """Whether a kernel would follow that only computes element by element from the node's result."""
    visited, queue = {node}, [node]
    follows = _name(node) == "convolution" and node.args[2] is not None  # its bias is added apart
    while queue and len(visited) < _MOST_NODES:
        for user in queue.pop().users:
            if user in visited:
                continue
            if _is_pointwise(user):
                follows = True
                # What needs a result that is computed later cannot be in the same kernel.
                if any(operand not in visited and operand > node for operand in user.all_input_nodes):
                    continue
            elif _is_reduction(user):
                return False
            elif not _is_view(user):
                continue
            visited.add(user)
            queue.append(user)
    return follows


def _upcast_bytes(node: torch.fx.Node) -> int:
    """Bytes of operands that are made for this operation alone, element by element, of far fewer bytes."""
    total = 0
    for operand in node.all_input_nodes:
        while _is_view(operand) and len(operand.users) == 1 and operand.all_input_nodes:
            operand = operand.all_input_nodes[0]
        if not _is_pointwise(operand) or len(operand.users) > 1:
            continue
        if sum(map(_bytes, operand.all_input_nodes)) <= _UPCAST * _bytes(operand):
            total += _bytes(operand)
    return total


def _products(nodes: Iterable[torch.fx.Node], spec: DeviceSpec) -> GraphProducts:
    products: dict[_Kind, tuple[int, float]] = {}
    for node in nodes:
        if _name(node) in _PRODUCTS:
            kind = _kind(node)
            count, ms = products.get(kind, (0, 0.0))
            products[kind] = (count + 1, ms or _least_ms(node, spec))
    return GraphProducts(products)


def _kind(node: torch.fx.Node) -> _Kind:
    """An operation's name, and the sizes of its operands."""
    return (_name(node), *map(_sizes, node.all_input_nodes))


def _least_ms(node: torch.fx.Node, spec: DeviceSpec) -> float:
    """Milliseconds of arithmetic on tensor cores or of bytes, whichever takes longer, by the datasheet."""
    inputs, results = node.all_input_nodes, math.prod(_sizes(node))
    if _name(node) == "convolution":
        depth = math.prod(_sizes(node.args[1])[1:])
        if len(node.args) > 6 and node.args[6]:
            results = math.prod(_sizes(node.args[0]))  # transposed: all of the input meets the whole kernel
    else:  # the first factor is [.., m, k]; what is added comes before it
        factor = inputs[1] if _name(node) in ("addmm", "baddbmm") and len(inputs) > 2 else inputs[0]
        depth = (_sizes(factor) or (1,))[-1]
    traffic = sum(map(_bytes, [*inputs, node]))
    return max(2.0 * results * depth / (spec.tensor_tflops * 1e9), traffic / (spec.memory_gb_s * 1e6))


def _sizes(node: Any) -> tuple[int, ...]:
    """A symbol counts as one: to ask for its value would be a guard."""
    value = getattr(node, "meta", {}).get("val")
    return tuple(n if isinstance(n, int) else 1 for n in getattr(value, "shape", ()))


def _bytes(node: torch.fx.Node) -> int:
    itemsize = getattr(getattr(node.meta.get("val"), "dtype", None), "itemsize", 0)
    return int(itemsize) * math.prod(_sizes(node))


def _is_view(node: torch.fx.Node) -> bool:
    return node.target is operator.getitem or bool(getattr(node.target, "is_view", False))


def _is_pointwise(node: torch.fx.Node) -> bool:
    import torch

    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or _name(node) in _COPIES


def _is_reduction(node: torch.fx.Node) -> bool:
    words = _name(node).split("_")
    # What is pooled has windows that overlap: Inductor computes it before.
    return bool(_REDUCTIONS.intersection(words)) and not any(word.startswith("pool") for word in words)


def _name(node: torch.fx.Node) -> str:
    """The name of an operation without its library and overload; "" of what computes nothing."""
    if node.op != "call_function":
        return ""
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]
