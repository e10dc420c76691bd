"""Whether memory may be overwritten: who else reads it, from the views and storages of a trace.

In: nodes of a trace, and the node after which what they hold is to be another. Out: whether anything but that node would read the change.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from fx_match import Trace, canonical
from torch import fx

from vllm_layers_bridge.nested import tensors_in

_SHAPE_READS = frozenset({"shape", "size", "dim", "ndim", "dtype", "device", "numel", "stride"})


def is_read_elsewhere(overwritten: Sequence[fx.Node], by: fx.Node, trace: Trace) -> bool:
    """Whether an element of `overwritten` is an input's or the module's own, is read after `by`, is returned, or is in two of them."""
    order = {node: at for at, node in enumerate(trace.graph.nodes)}
    views = {node: tensors_in(trace.value(node)) for node in trace.graph.nodes}
    owned = {_storage(tensor) for tensor in (*trace.module.parameters(), *trace.module.buffers())}
    for at, node in enumerate(overwritten):
        value = trace.value(node)
        if not isinstance(value, torch.Tensor) or _storage(value) in owned:
            return True
        if any(_overlap(value, tensor) for other in overwritten[:at] for tensor in views[other]):
            return True
        for other, tensors in views.items():
            if not any(_overlap(value, tensor) for tensor in tensors):
                continue
            if other.op in {"placeholder", "get_attr", "output"}:
                return True
            if any(order[user] > order[by] and canonical(user) not in _SHAPE_READS for user in other.users):
                return True
    return False


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors share an element."""
    if _storage(left) != _storage(right) or left.numel() == 0 or right.numel() == 0:
        return False
    if left.dtype != right.dtype:
        return True
    end = max(_end(left), _end(right))
    touched = torch.zeros(end, dtype=torch.bool, device="cpu")
    _same_view(touched, left).fill_(True)
    return bool(_same_view(touched, right).any())


def _same_view(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return memory.as_strided(like.size(), like.stride(), int(like.storage_offset()))


def _end(tensor: torch.Tensor) -> int:
    steps = ((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return int(tensor.storage_offset() + sum(steps) + 1)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
