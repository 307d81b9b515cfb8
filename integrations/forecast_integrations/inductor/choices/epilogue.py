"""What a graph does with an operation's result, and what a kernel would save that does it at once."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

from forecast_autotune.features.devices import device_spec
from forecast_autotune.records import Device
from forecast_integrations.inductor.choices.records import size_hints

if TYPE_CHECKING:
    import torch
    from torch._inductor.ir import Layout

_MOST_NODES = 200
"""Nodes that are looked at behind one operation."""
_COPIES = ("_to_copy", "clone", "convert_element_type")
_REDUCTIONS = frozenset(
    ["softmax", "norm", "sum", "logsumexp", "mean", "var", "std", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "any", "all"]
)
"""Words in names of operations that read all of a row; not every release of torch marks them."""


def epilogue_ms(layout: Layout | None, device: Device) -> float:
    """Milliseconds that are saved where what follows the operation at hand is computed in its own kernel.

    Its result is then neither written nor read once more. 0 where nothing follows that is computed element by
    element, or where that goes into the kernel of a reduction, which reads the result anyway; inf where it is not
    known what follows.
    """
    from torch._inductor.virtualized import V

    node = getattr(V.graph, "current_node", None)
    if node is None or layout is None:
        return math.inf
    if not has_own_pass(node):
        return 0.0
    moved = 2.0 * layout.dtype.itemsize * math.prod(size_hints(layout.size))
    return moved / (device_spec(device).memory_gb_s * 1e6)


def has_own_pass(node: torch.fx.Node) -> bool:
    """Whether a kernel would follow that only computes element by element from the node's result."""
    place = {other: number for number, other in enumerate(node.graph.nodes)}
    known, waiting, found = {node}, [node], False
    while waiting and len(known) < _MOST_NODES:
        for user in waiting.pop().users:
            if user in known:
                continue
            if _is_pointwise(user.target):
                found = True
                # What needs a result that is computed later cannot be in the same kernel.
                if any(other not in known and place[other] > place[node] for other in user.all_input_nodes):
                    continue
            elif _is_reduction(user.target):
                return False
            elif not _is_view(user.target):
                continue
            known.add(user)
            waiting.append(user)
    return found


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
