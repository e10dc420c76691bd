"""Converters of transformers applied to a stream of checkpoint tensors: parts are gathered until they are complete, then converted at once.

In: (stored name, tensor) in any order. Out: (stored name, name in the model, tensor). A tensor that no converter reads passes through. What
is held at any time are the parts of tensors that are not complete yet, and the one that is being made.

    ...experts.0.w1.weight, ...experts.0.w3.weight, ...experts.1.w1.weight, ...  ->  ...experts.gate_up_proj  [experts, 2 * inner, hidden]
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tf_backend.errors import CheckpointError
from tf_backend.weights.names import Names, natural_order


@dataclass(slots=True)
class _Group:
    """The parts of one tensor in memory, or of several that come from the same parts: stored name -> pattern, and -> tensor.

    `needed`: how many parts there are to come; None where that is not known before the end.
    """

    target: str
    needed: int | None
    patterns: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return self.needed is not None and len(self.patterns) >= self.needed


def converted(weights: Iterable[tuple[str, torch.Tensor]], names: Names) -> Iterator[tuple[str, str, torch.Tensor]]:
    """The tensors of a checkpoint as the model holds them; meta tensors give meta tensors.

    What is made of parts has its name in the model for its stored name.

    Raises:
        CheckpointError: parts are missing or too many, or an operation of transformers refuses them.
    """
    gathering: dict[str, _Group] = {}
    done: set[str] = set()
    for name, tensor in weights:
        target, pattern = names.place(name)
        if pattern is None or target not in names.conversion.shapes:
            yield name, target, tensor
            del tensor  # not held while the next one is read
            continue
        if target in done:
            raise CheckpointError(f"the checkpoint holds more parts of `{target}` than the config says", tensor=name)
        group = gathering.setdefault(target, _Group(target, _needed(target, names)))
        group.patterns[name], group.tensors[name] = pattern, tensor
        del tensor
        if group.is_complete:
            done.add(target)
            yield from _convert(gathering.pop(target), names)
        del group
    for target in list(gathering):
        yield from _convert(gathering.pop(target), names)


def stored_as(target: str, names: Names) -> list[str]:
    """The names under which transformers stores the parts of a tensor of the model today; empty where it stores the tensor itself."""
    return natural_order(names.saved.parts_of(target) or ())


def _needed(target: str, names: Names) -> int | None:
    parts = names.parts_of(target)
    return len(parts) if parts is not None else len(stored_as(target, names)) or None


def _convert(group: _Group, names: Names) -> Iterator[tuple[str, str, torch.Tensor]]:
    converters = [names.converter_of[pattern] for pattern in dict.fromkeys(group.patterns.values())]
    if any(other is not converters[0] for other in converters):
        raise CheckpointError(f"the checkpoint holds parts of `{group.target}` in two layouts", tensor=_shown(group))
    converter: Any = copy.deepcopy(converters[0])
    for name in natural_order(group.patterns):  # transformers stacks in this order
        converter.add_tensor(group.target, name, group.patterns[name], group.tensors.pop(name))
    try:
        made: dict[str, Any] = converter.convert(group.target, model=names.conversion, config=names.conversion.config)
    except Exception as error:  # of transformers' operations: each has its own
        _check_parts(group, names)
        operations = ", ".join(type(operation).__name__ for operation in converter.operations)
        raise CheckpointError(
            f"parts of `{group.target}` cannot be put together by transformers' {operations} ({error})",
            tensor=_shown(group),
        ) from error
    for name in list(made):
        value = made.pop(name)
        tensor: torch.Tensor = value[0] if isinstance(value, list) else value
        expected = names.conversion.shapes.get(name)
        if expected is not None and tuple(tensor.shape) != expected:
            _check_parts(group, names)
            raise CheckpointError(
                f"parts of `{name}` have other shapes, or are others in number, than the config says",
                tensor=_shown(group),
                found=tuple(tensor.shape),
                expected=expected,
            )
        yield name, name, tensor
        del value, tensor


def _check_parts(group: _Group, names: Names) -> None:
    """Tell which parts are missing, if any are."""
    there = {names.renamed(name) for name in group.patterns}
    wanted = stored_as(group.target, names)
    missing = [name for name in wanted if names.renamed(name) not in there]
    if missing:
        shown = ", ".join(f"`{name}`" for name in missing[:4]) + (" ..." if len(missing) > 4 else "")
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of the {len(wanted)} tensors that make `{group.target}`: {shown}"
        )


def _shown(group: _Group) -> str:
    first, *others = natural_order(group.patterns)
    return f"{first} and {len(others)} more" if others else first
