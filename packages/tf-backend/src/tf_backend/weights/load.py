"""Loading: each checkpoint tensor goes to its place by its full name, is checked, and nothing is left out or left over.

In: the rules of a plan, the served model, a stream of (name, tensor). Out: the names of the parameters that were filled.
One tensor is held at a time: what arrives is copied into its shard and let go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from torch import nn

from tf_backend.errors import CheckpointError
from tf_backend.plan.schema import WeightRule
from tf_backend.weights.files import StoredTensor
from tf_backend.weights.names import Renaming, planned_name, renamed


class WeightLoader:
    """Loads one checkpoint into one served model.

    Args:
        rules: where each tensor goes, from the plan.
        base_prefix: prefix of the decoder in full names, e.g. ``model``.
        ignorable: names that a checkpoint may hold and the model does not want: tied copies and recomputed buffers.
        ignorable_patterns: regular expressions for the same, from the transformers class.
        renamings: tried on a name that the model does not have, in order.
    """

    def __init__(
        self,
        rules: Iterable[WeightRule],
        base_prefix: str,
        ignorable: Iterable[str] = (),
        ignorable_patterns: Iterable[str] = (),
        renamings: Iterable[Renaming] = (),
    ) -> None:
        self.rules: dict[str, list[WeightRule]] = {}
        for rule in rules:
            self.rules.setdefault(rule.source, []).append(rule)
        self.base_prefix = base_prefix
        self.ignorable = frozenset(ignorable)
        self.renamings = tuple(renamings)
        self.patterns = tuple(re.compile(pattern) for pattern in ignorable_patterns)

    def check(self, stored: Mapping[str, StoredTensor]) -> None:
        """Hold the headers of a checkpoint against the rules, before any tensor is read.

        Raises:
            CheckpointError: a tensor is missing, is of another shape, or is not the model's.
        """
        seen: dict[str, str] = {}
        for name, tensor in stored.items():
            source = self._source(name, file=tensor.file)
            if source is not None:
                self._check_shape(self.rules[source][0], name, tensor.shape, file=tensor.file)
                self._check_once(seen, source, name)
        self._check_complete(seen.keys())

    def load(
        self, weights: Iterable[tuple[str, torch.Tensor]], targets: Mapping[str, nn.Parameter | torch.Tensor]
    ) -> set[str]:
        """Copy `weights` into `targets` (full name -> parameter or buffer).

        Raises:
            CheckpointError: as `check`.
        """
        seen: dict[str, str] = {}
        for name, tensor in weights:
            source = self._source(name)
            if source is not None:
                self._check_once(seen, source, name)
                for rule in self.rules[source]:
                    self._check_shape(rule, name, tuple(tensor.shape))
                    _check_type(targets[rule.target], tensor, name)
                    _copy(targets[rule.target], tensor, rule)
            del tensor  # not held while the next one is read
        self._check_complete(seen.keys())
        return {rule.target for rules in self.rules.values() for rule in rules}

    def _source(self, name: str, file: object = None) -> str | None:
        source = planned_name(name, self.rules, self.base_prefix)
        if source is None:
            source = planned_name(renamed(name, self.renamings), self.rules, self.base_prefix)
        if source is not None:
            return source
        if planned_name(name, self.ignorable, self.base_prefix) or any(p.search(name) for p in self.patterns):
            return None
        raise CheckpointError(
            "the checkpoint holds a tensor that the model has no place for",
            tensor=name,
            file=file,
            remedy="Check that config.json belongs to these weights.",
        )

    def _check_shape(self, rule: WeightRule, name: str, shape: Sequence[int], file: object = None) -> None:
        if tuple(shape) != rule.shape:
            raise CheckpointError(
                "a tensor has another shape than the config says",
                tensor=name,
                file=file,
                found=tuple(shape),
                expected=rule.shape,
            )

    def _check_once(self, seen: dict[str, str], source: str, name: str) -> None:
        if source in seen:
            raise CheckpointError(
                f"the checkpoint holds one tensor under two names, `{seen[source]}` and `{name}`",
                tensor=source,
                remedy="Remove one of them: which is meant cannot be told.",
            )
        seen[source] = name

    def _check_complete(self, seen: Set[str]) -> None:
        missing = sorted(self.rules.keys() - seen)
        if missing:
            shown = ", ".join(f"`{name}`" for name in missing[:4]) + (" ..." if len(missing) > 4 else "")
            raise CheckpointError(f"the checkpoint lacks {len(missing)} of {len(self.rules)} tensors: {shown}")


def _check_type(target: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
    """Numbers may be rounded to another float type; a quantized or integer tensor is not the number that it stands for."""
    is_number = tensor.is_floating_point() and tensor.element_size() > 1
    if tensor.dtype is not target.dtype and not (is_number and target.is_floating_point()):
        raise CheckpointError(
            "a tensor has a type that cannot be converted without a scale",
            tensor=name,
            found=tensor.dtype,
            expected=target.dtype,
            remedy="Use a checkpoint that is not quantized.",
        )


def _copy(target: nn.Parameter | torch.Tensor, tensor: torch.Tensor, rule: WeightRule) -> None:
    tensor = _part(tensor, rule)
    loader = getattr(target, "weight_loader", None)
    if loader is None:
        target.data.copy_(tensor)
    elif rule.shard is None:
        loader(target, tensor)
    else:
        loader(target, tensor, rule.shard)


def _part(tensor: torch.Tensor, rule: WeightRule) -> torch.Tensor:
    """What of a checkpoint tensor goes to the target, in the target's layout; a view."""
    if rule.transposed:
        tensor = tensor.t()
    return tensor if rule.rows is None else tensor[rule.rows[0] : rule.rows[1]]
