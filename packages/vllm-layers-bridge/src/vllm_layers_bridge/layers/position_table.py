"""Values that depend on a token's position alone, computed once for each position and looked up while serving.

In: a module that takes positions and gives values for them, such as a rotary embedding whose frequencies follow the length of the
sequence. Out: a module that is called in the same way and reads a table. No vLLM in it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from vllm_layers_bridge.errors import NotBuildable

Beyond: TypeAlias = Literal["same", "another", "each its own"]
"""How positions from `constant_below` on are treated: there are none, they share one other state, or each position changes the state."""

Key: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class PositionCall:
    """How a module of positions is called: arguments as they come, tensors on any device.

    Exactly one of the tensors holds whole numbers: the positions, [1, tokens]. The others lend their type and nothing else.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def key(self) -> Key:
        """All but the tensors: calls that differ in it read different tables."""
        return _key(self.args, self.kwargs)

    def positions(self) -> torch.Tensor | None:
        """The one integer tensor of two axes; None when there is none, or more."""
        found = [value for value in (*self.args, *self.kwargs.values()) if _is_positions(value)]
        return found[0] if len(found) == 1 and found[0].ndim == 2 else None

    def run(self, module: nn.Module, positions: torch.Tensor, fill: float = 0.0) -> tuple[torch.Tensor, ...]:
        """What `module` gives for `positions`, [1, n]; other tensors are replaced by [1, n, 1] of `fill`."""

        def at(value: Any) -> Any:
            if _is_positions(value):
                return positions
            if isinstance(value, torch.Tensor):
                shape = (1, positions.shape[-1], 1)
                return torch.full(shape, fill, dtype=value.dtype, device=positions.device)
            return value

        with torch.no_grad():
            out = module(*(at(value) for value in self.args), **{k: at(v) for k, v in self.kwargs.items()})
        return tuple(out) if isinstance(out, tuple | list) else (out,)


class PositionTable(nn.Module):
    """Stands where `module` stood; takes its calls and looks its values up, [1, tokens, width] each.

    Args:
        module: on the device to serve on, as it is before its first call. It is not changed.
        calls: one for each way in which it is called.
        length: positions are below it.
        constant_below: see `find_change`.
        beyond: see `Beyond`.

    Raises:
        NotBuildable: at positions looked at, the table is not what the module gives for a sequence that ends there.
    """

    def __init__(
        self, module: nn.Module, calls: Sequence[PositionCall], length: int, constant_below: int, beyond: Beyond
    ) -> None:
        super().__init__()
        self.keys: dict[Key, tuple[str, ...]] = {}
        for number, call in enumerate(calls):
            tables = _tables(module, call, length, constant_below, beyond)
            _check(module, call, tables, length, constant_below)
            names = tuple(f"table_{number}_{part}" for part in range(len(tables)))
            for name, table in zip(names, tables, strict=True):
                self.register_buffer(name, table, persistent=False)
            self.keys[call.key] = names

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """The values at the positions among the arguments."""
        positions = next(value for value in (*args, *kwargs.values()) if _is_positions(value))
        names = self.keys[_key(args, kwargs)]
        return tuple(nn.functional.embedding(positions, self.get_buffer(name)) for name in names)


def find_change(module: nn.Module, call: PositionCall, longest: int) -> tuple[int, Beyond]:
    """From which position on the module's own state is another than before, and how it goes on from there.

    The first is `longest` where it never changes below that.
    """
    device = _device(module)

    def state(position: int) -> tuple[Any, ...]:
        own = copy.deepcopy(module)
        call.run(own, torch.tensor([[position]], device=device))
        return _state(own)

    first, last = state(0), state(longest - 1)
    if _equal(first, last):
        return longest, "same"
    low, high = 0, longest - 1  # the state is the first one at `low` and another one at `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _equal(first, state(middle)) else (low, middle)
    return high, "another" if _equal(state(high), last) else "each its own"


def _tables(
    module: nn.Module, call: PositionCall, length: int, constant_below: int, beyond: Beyond
) -> tuple[torch.Tensor, ...]:
    device = _device(module)
    own = copy.deepcopy(module)
    first = min(length, constant_below)
    parts = [call.run(own, torch.arange(first, device=device)[None])]
    if first < length and beyond == "another":
        parts.append(call.run(own, torch.arange(first, length, device=device)[None]))
    elif first < length:
        parts += [call.run(own, torch.tensor([[position]], device=device)) for position in range(first, length)]
    return tuple(torch.cat([part[0] for part in column]).contiguous() for column in zip(*parts, strict=True))


def _check(
    module: nn.Module, call: PositionCall, tables: tuple[torch.Tensor, ...], length: int, constant_below: int
) -> None:
    """The last row of a sequence, run whole with other data beside it, is the row of the table."""
    device = _device(module)
    ends = {1, 2, length // 3, length, constant_below - 1, constant_below, constant_below + 1, constant_below + 9}
    for end in sorted(end for end in ends if 0 < end <= length):
        found = call.run(copy.deepcopy(module), torch.arange(end, device=device)[None], fill=2.0)
        if len(found) != len(tables) or not all(
            torch.equal(value[0, -1], table[end - 1]) for value, table in zip(found, tables, strict=True)
        ):
            raise NotBuildable(
                f"`{type(module).__name__}` gives other values for position {end - 1} at the end of a sequence than alone: "
                "it cannot be replaced by a table of positions"
            )


def _state(module: nn.Module) -> tuple[Any, ...]:
    """Tensors that the module holds, and what else of its own it may have changed that they are computed with."""
    return tuple(value for _, value in sorted(module.named_buffers()))


def _equal(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    return len(left) == len(right) and all(
        one.shape == other.shape and torch.equal(one, other) for one, other in zip(left, right, strict=True)
    )


def _device(module: nn.Module) -> torch.device:
    return next((buffer.device for buffer in module.buffers()), torch.get_default_device())


def _is_positions(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Key:
    plain = [value for value in args if not isinstance(value, torch.Tensor)]
    named = sorted((name, value) for name, value in kwargs.items() if not isinstance(value, torch.Tensor))
    return (*plain, *named)
