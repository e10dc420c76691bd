"""Parameters that are read by other modules than the one that holds them: ``F.linear(x, self.classifier.weight)``.

An engine layer keeps its weight as its kernel wants it: packed, split over ranks, or gone after packing. In: a run on the meta device. Out:
the names of the modules whose parameters were read while they did not run themselves; these stay as transformers wrote them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_layers_bridge.nested import tensors_in


class BorrowedParameters(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the modules whose parameters others read, in `found`.

    Args:
        model: whose parameters are looked at. A parameter that several modules hold may be read by each of them.
        current_module: gives the full name of the module that is running.
    """

    def __init__(self, model: nn.Module, current_module: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_module = current_module
        self.holders: dict[int, set[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.holders.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in tensors_in((args, kwargs or {})):
            holders = self.holders.get(id(tensor))
            if holders is not None and self.current_module() not in holders:
                self.found |= holders
        return func(*args, **(kwargs or {}))
