"""Tables that are looked up by position, such as learned position embeddings: the first position for which they have no row.

In: a run on the meta device. Out: a `PositionRows` for each module that looks up such a table. Beside every tensor that is computed from
positions and constants alone goes the same tensor with numbers in it, on the CPU, so that an offset or a clamp is seen as it is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tf_backend.plan.schema import PositionRows

FAR = 1 << 30
"""The last of the positions that are followed: no table reaches it, so that a lookup which is clamped can be told."""

_LOOKUPS = frozenset({"embedding", "index_select", "index"})


class PositionFollower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the lookups by position.

    Args:
        positions: the tensor on meta, [1, tokens], that the run is given as its positions.
        current_module: gives the full name of the module that is running.
    """

    def __init__(self, positions: torch.Tensor, current_module: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_module = current_module
        numbers = torch.arange(positions.shape[1])[None]
        numbers[0, -1] = FAR
        self.numbers = numbers
        self.known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {id(positions): (positions, numbers)}
        self.found: dict[str, PositionRows] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _LOOKUPS:
            self._look_up(name, args)
        elif isinstance(out, torch.Tensor):
            self._follow(func, args, kwargs, out)
        return out

    def _number(self, value: Any) -> torch.Tensor | None:
        held = self.known.get(id(value))
        return None if held is None else held[1]

    def _numbered(self, value: Any) -> Any:
        numbers = self._number(value)
        return value if numbers is None else numbers

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if not given or any(self._number(value) is None for value in given):
            self.known.pop(id(out), None)  # written to with what is not known
            return
        on_cpu = {name: "cpu" if name == "device" else self._numbered(value) for name, value in kwargs.items()}
        try:
            result = func(*map(self._numbered, args), **on_cpu)
        except Exception:  # an operation without a form for the CPU: what comes of it is not followed
            return
        if isinstance(result, torch.Tensor):
            self.known[id(out)] = (out, result)

    def _look_up(self, name: str, args: tuple[Any, ...]) -> None:
        table, dim = args[0], (args[1] if name == "index_select" else 0)
        indices = args[2] if name == "index_select" else args[1]
        if isinstance(indices, tuple | list):
            dim = next((axis for axis, index in enumerate(indices) if index is not None), 0)
            indices = indices[dim] if indices else None
        numbers = self._number(indices)
        if numbers is None or numbers.shape != self.numbers.shape:
            return
        rows = int(table.shape[dim])
        end = _first_without_row(numbers[0], rows)
        module = self.current_module()
        if end is not None:
            self.found.setdefault(module, PositionRows(module, rows, end))


def _first_without_row(numbers: torch.Tensor, rows: int) -> int | None:
    """The first position whose index is no row; None where every position has one, as under a clamp."""
    if int(numbers[-1]) < rows:
        return None
    offset = int(numbers[0])
    near = torch.arange(len(numbers) - 1) + offset
    if torch.equal(numbers[:-1], near) and int(numbers[-1]) == FAR + offset:
        return rows - offset
    return next((at for at, index in enumerate(numbers[:-1].tolist()) if index >= rows), len(numbers) - 1)
