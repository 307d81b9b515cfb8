"""Where an operation stands in its graph: what follows it, and how much of the graph's work it is."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from forecast_autotune.features.devices import DeviceSpec, device_spec
from forecast_autotune.records import Device
from forecast_integrations.inductor.choices.records import size_hints

if TYPE_CHECKING:
    import torch
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import Layout

_MOST_NODES = 200
"""Nodes that are looked at behind one operation."""
_COPIES = ("_to_copy", "clone", "convert_element_type")
_REDUCTIONS = frozenset(
    {"softmax", "norm", "sum", "logsumexp", "mean", "var", "std"}
    | {"amax", "amin", "max", "min", "argmax", "argmin", "prod", "any", "all"}
)
"""Words in names of operations that read all of a row; not every release of torch marks them."""
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")


@dataclass(frozen=True)
class GraphPosition:
    """What a decision on one operation is worth to its graph."""

    epilogue_ms: float = math.inf
    """Milliseconds that are saved where what follows is computed in the operation's own kernel: its result is then
    neither written nor read once more. 0 where nothing follows that is computed element by element, or where that
    goes into the kernel of a reduction, which reads the result anyway; inf where it is not known what follows."""
    products_ms: float = 0.0
    """Least milliseconds of all products and convolutions of the graph; 0 where it is not known."""
    alike: int = 1
    """Operations of the graph that compute the same from tensors of the same sizes."""

    def share(self, ms: float) -> float:
        """The share of the graph's products that operations like this one take, of `ms` each; at most 1."""
        return min(1.0, self.alike * ms / self.products_ms) if self.products_ms > 0 else 1.0


_LEAST_MS: WeakKeyDictionary[GraphLowering, dict[tuple[object, ...], tuple[int, float]]] = WeakKeyDictionary()
"""Per graph: by kind and sizes, how many products there are, and the least milliseconds of one."""


def graph_position(layout: Layout | None, device: Device) -> GraphPosition:
    """Of the operation that is lowered just now, whose result has this layout."""
    from torch._inductor.virtualized import V

    node = getattr(V.graph, "current_node", None)
    if node is None or layout is None:
        return GraphPosition()
    spec = device_spec(device)
    products = _LEAST_MS.get(V.graph)
    if products is None:
        products = _LEAST_MS[V.graph] = _products(node.graph.nodes, spec)
    alike, _ = products.get(_kind(node), (1, 0.0))
    moved = 2.0 * layout.dtype.itemsize * math.prod(size_hints(layout.size))
    return GraphPosition(
        moved / (spec.memory_gb_s * 1e6) if has_own_pass(node) else 0.0,
        sum(count * ms for count, ms in products.values()),
        alike,
    )


def has_own_pass(node: torch.fx.Node) -> bool:
    """Whether a kernel would follow that only computes element by element from the node's result."""
    known, waiting, found = {node}, [node], False
    while waiting and len(known) < _MOST_NODES:
        for user in waiting.pop().users:
            if user in known:
                continue
            if _is_pointwise(user.target):
                found = True
                # What needs a result that is computed later cannot be in the same kernel.
                if any(other not in known and other > node for other in user.all_input_nodes):
                    continue
            elif _is_reduction(user.target):
                return False
            elif not _is_view(user.target):
                continue
            known.add(user)
            waiting.append(user)
    return found


def _products(
    nodes: Sequence[torch.fx.Node], spec: DeviceSpec
) -> dict[tuple[object, ...], tuple[int, float]]:
    found: dict[tuple[object, ...], tuple[int, float]] = {}
    for node in nodes:
        if _name(node.target) in _PRODUCTS:
            kind = _kind(node)
            count, ms = found.get(kind, (0, 0.0))
            found[kind] = (count + 1, ms or _least_ms(node, spec))
    return found


def _kind(node: torch.fx.Node) -> tuple[object, ...]:
    """What an operation computes, and from tensors of which sizes."""
    return (_name(node.target), *map(_sizes, node.all_input_nodes))


def _least_ms(node: torch.fx.Node, spec: DeviceSpec) -> float:
    """Milliseconds of arithmetic on tensor cores or of bytes, whichever takes longer, by the datasheet."""
    tensors = [*node.all_input_nodes, node]
    moved = sum(_itemsize(tensor) * math.prod(_sizes(tensor)) for tensor in tensors)
    depth = 1
    if _name(node.target) == "convolution":
        depth = math.prod(_sizes(node.args[1])[1:])
    elif tensors[:-1]:  # the last factor but one is [.., m, k]
        depth = (_sizes(tensors[-3] if len(tensors) > 2 else tensors[0]) or (1,))[-1]
    flops = 2.0 * math.prod(_sizes(node)) * depth
    return max(flops / (spec.tensor_tflops * 1e9), moved / (spec.memory_gb_s * 1e6))


def _sizes(node: Any) -> tuple[int, ...]:
    """A symbol counts as one: to ask for its value would be a guard."""
    value = getattr(node, "meta", {}).get("val")
    return tuple(n if isinstance(n, int) else 1 for n in getattr(value, "shape", ()))


def _itemsize(node: Any) -> int:
    return int(getattr(getattr(node.meta.get("val"), "dtype", None), "itemsize", 0))


def _is_view(target: Any) -> bool:
    return target is operator.getitem or bool(getattr(target, "is_view", False))


def _is_pointwise(target: Any) -> bool:
    import torch

    return torch.Tag.pointwise in getattr(target, "tags", ()) or _name(target) in _COPIES


def _is_reduction(target: Any) -> bool:
    return bool(_REDUCTIONS.intersection(_name(target).split("_")))


def _name(target: Any) -> str:
    """The name of an operation without its library and overload."""
    return str(getattr(target, "__name__", target)).partition(".")[0]
