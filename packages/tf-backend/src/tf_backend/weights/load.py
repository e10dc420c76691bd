"""Loading: each checkpoint tensor goes to its place by its full name, is checked, and nothing is left out or left over.

In: the rules of a plan, the served model, a stream of (name, tensor). Out: the names of the parameters that were filled.
One tensor is held at a time: what arrives is copied into its shard and let go. Parts of a tensor that transformers converts are held until
they are complete, and the first of two copies of a tied tensor until the second has been held against it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import moe_runner
import torch
from torch import nn

from tf_backend.errors import CheckpointError
from tf_backend.plan.schema import WeightRule
from tf_backend.weights.conversion import Conversion
from tf_backend.weights.files import StoredTensor
from tf_backend.weights.names import Names
from tf_backend.weights.stream import converted, stored_as

_INDEX = re.compile(r"\.\d+(?=\.|$)")
_WRONG_CONFIG = "Check that config.json belongs to these weights."


class WeightLoader:
    """Loads one checkpoint into one served model.

    Args:
        rules: where each tensor goes, from the plan.
        base: full name of the decoder, e.g. ``model``.
        ignorable: names that a checkpoint may hold and the model does not want: recomputed buffers.
        ignorable_patterns: regular expressions for the same, from the transformers class.
        tied: other names of a tensor that has several -> the name in the rules.
        conversion: how transformers reads the checkpoint; by the names of the rules alone when None.
        stored: all names of the checkpoint, where they are known before its tensors are read.
    """

    def __init__(
        self,
        rules: Iterable[WeightRule],
        base: str,
        ignorable: Iterable[str] = (),
        ignorable_patterns: Iterable[str] = (),
        tied: Mapping[str, str] | None = None,
        conversion: Conversion | None = None,
        stored: Iterable[str] | None = None,
        integers: Iterable[str] = (),
    ) -> None:
        self.rules: dict[str, list[WeightRule]] = {}
        for rule in rules:
            self.rules.setdefault(rule.source, []).append(rule)
        self.ignorable = frozenset(ignorable)
        self.absent: frozenset[str] = frozenset()
        self.patterns = tuple(re.compile(pattern) for pattern in ignorable_patterns)
        self.tied = dict(tied or {})
        self.integers = frozenset(integers)
        if conversion is None:
            known = {source: rules[0].shape for source, rules in self.rules.items()}
            others = {name: known[source] for name, source in self.tied.items()}
            conversion = Conversion({**dict.fromkeys(self.ignorable, ()), **known, **others}, base)
        self.conversion = conversion
        self.names = Names(conversion, stored)

    def leave_out(self, targets: Iterable[str]) -> None:
        """Targets that are on another pipeline stage: their tensors are checked with the rest and go nowhere."""
        self.absent = frozenset(targets)

    def check(self, stored: Mapping[str, StoredTensor]) -> None:
        """Hold the headers of a checkpoint against the rules, before any tensor is read.

        Raises:
            CheckpointError: a tensor is missing, is of another shape or a type that is no number's, or is not the model's.
        """
        self.names = Names(self.conversion, stored)
        files = {name: tensor.file for name, tensor in stored.items()}
        self._check_stored(stored)
        headers = ((name, tensor.on_meta()) for name, tensor in stored.items())
        seen: dict[str, str] = {}
        for name, source, tensor in self._wanted(headers, files):
            self._check_shape(self.rules[source][0], name, tensor.shape, files.get(name))
            if source in seen:
                self._check_tied(source, seen[source], name)
            seen[source] = name
        self._check_complete(seen.keys())

    def load(
        self, weights: Iterable[tuple[str, torch.Tensor]], targets: Mapping[str, nn.Parameter | torch.Tensor]
    ) -> set[str]:
        """Copy `weights` into `targets` (full name -> parameter or buffer).

        Raises:
            CheckpointError: as `check`; or two copies of a tied tensor differ.
        """
        self._check_reload(targets)
        seen: dict[str, str] = {}
        copies: dict[str, torch.Tensor] = {}
        may_return = self._stored_twice()
        for name, source, tensor in self._wanted(weights):
            if source in seen:
                self._check_tied(source, seen[source], name)
                self._check_shape(self.rules[source][0], name, tuple(tensor.shape))
                target = targets.get(self.rules[source][0].target)
                dtype = tensor.dtype if target is None else target.dtype
                _check_equal(source, (seen[source], name), (copies[source].to(dtype), tensor.to(dtype)))
                del tensor
                continue
            seen[source] = name
            self._fill(self.rules[source], name, tensor, targets)
            if source in may_return:
                copies[source] = tensor
            del tensor  # not held while the next one is read
        self._check_complete(seen.keys())
        self.names = Names(self.conversion)  # a later load may be of another checkpoint, whose names are not known
        return {rule.target for rules in self.rules.values() for rule in rules} - self.absent

    def _fill(
        self,
        rules: Iterable[WeightRule],
        name: str,
        tensor: torch.Tensor,
        targets: Mapping[str, nn.Parameter | torch.Tensor],
    ) -> None:
        filled: set[tuple[object, ...]] = set()
        for rule in rules:
            self._check_shape(rule, name, tuple(tensor.shape))
            if rule.target in self.absent:
                continue
            target = targets[rule.target]
            _check_type(target, tensor, name)
            part = (id(target), rule.shard, rule.rows, rule.experts)
            if part not in filled:  # two places may hold one parameter
                filled.add(part)
                _copy(target, tensor, rule)

    def _wanted(
        self, weights: Iterable[tuple[str, torch.Tensor]], files: Mapping[str, object] | None = None
    ) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The tensors that the model wants, each with the name in the rules that it stands for."""
        for name, place, tensor in converted(weights, self.names):
            source = self.tied.get(place, place)
            if source in self.rules:
                yield name, source, tensor
            elif place not in self.ignorable and not any(p.search(name) or p.search(place) for p in self.patterns):
                raise CheckpointError(
                    "the checkpoint holds a tensor that the model has no place for",
                    tensor=name,
                    file=(files or {}).get(name),
                    remedy=_WRONG_CONFIG,
                )
            del tensor

    def _check_reload(self, targets: Mapping[str, nn.Parameter | torch.Tensor]) -> None:
        """vLLM puts layers on meta before it loads anew, and wraps their weight loaders; experts are not loaded by those."""
        for rules in self.rules.values():
            for rule in rules:
                if rule.experts is not None and rule.target not in self.absent and targets[rule.target].is_meta:
                    raise CheckpointError(
                        "weights are loaded anew into a model whose experts vLLM runs, which is not served yet",
                        tensor=rule.source,
                        remedy="Start the engine again with the other weights.",
                    )

    def _stored_twice(self) -> Set[str]:
        """Tied tensors of which a second copy may arrive: of those alone the first must be held."""
        tied = set(self.tied.values())
        if self.names.stored is None:
            return tied
        places = (self.names.place(name).name for name in self.names.stored)
        counts = Counter(self.tied.get(place, place) for place in places)
        return {source for source in tied if counts[source] > 1}

    def _check_shape(self, rule: WeightRule, name: str, shape: Sequence[int], file: object = None) -> None:
        if tuple(shape) != rule.shape:
            raise CheckpointError(
                "a tensor has another shape than the config says",
                tensor=name,
                file=file,
                found=tuple(shape),
                expected=rule.shape,
            )

    def _check_stored(self, stored: Mapping[str, StoredTensor]) -> None:
        """Each tensor as it is stored, before it is put together with others: of numbers, and of the shape of those it is stacked with."""
        stacks: dict[tuple[str, str], list[tuple[str, tuple[int, ...]]]] = {}
        for name, tensor in stored.items():
            place, header = self.names.place(name), tensor.on_meta()
            source = self.tied.get(place.name, place.name)
            if source not in self.rules:
                continue
            if source not in self.integers and not _is_number(header):
                raise _no_number(name, header.dtype, file=tensor.file)
            if self.names.is_stacked(place):
                stacks.setdefault((source, _INDEX.sub(".#.", name)), []).append((name, tuple(header.shape)))
        for stack in stacks.values():
            usual = Counter(shape for _, shape in stack).most_common(1)[0][0]
            for name, shape in stack:
                if shape != usual:
                    raise CheckpointError(
                        f"a tensor has another shape than most of the {len(stack)} that are stacked",
                        tensor=name,
                        file=stored[name].file,
                        found=shape,
                        expected=usual,
                    )

    def _check_tied(self, source: str, first: str, name: str) -> None:
        """Two names for one tensor are fine where they are two places of the model that the config ties."""
        places = {self.names.place(first).name, self.names.place(name).name}
        if len(places) == 1 or source not in self.tied.values():
            raise CheckpointError(
                f"the checkpoint holds one tensor under two names, `{first}` and `{name}`",
                tensor=source,
                remedy="Remove one of them: which is meant cannot be told.",
            )

    def _check_complete(self, seen: Set[str]) -> None:
        missing = sorted(self.rules.keys() - seen)
        if missing:
            shown = ", ".join(map(self._described, missing[:4])) + (" ..." if len(missing) > 4 else "")
            raise CheckpointError(f"the checkpoint lacks {len(missing)} of {len(self.rules)} tensors: {shown}")

    def _described(self, source: str) -> str:
        parts = stored_as(source, self.names)
        return f"`{source}`" + (f" (stored as `{parts[0]}` and {len(parts) - 1} more)" if parts else "")


def _check_equal(source: str, names: tuple[str, str], tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
    if not torch.equal(*tensors):
        raise CheckpointError(
            f"the config ties `{names[0]}` and `{names[1]}`, and the checkpoint holds another value for each",
            tensor=source,
            remedy='Set "tie_word_embeddings": false in config.json, if two tensors are meant: transformers then keeps them apart.',
        )


def _check_type(target: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
    """Numbers may be rounded to another float type; a quantized or integer tensor is not the number that it stands for."""
    if tensor.dtype is not target.dtype and not (_is_number(tensor) and target.is_floating_point()):
        raise _no_number(name, tensor.dtype, expected=target.dtype)


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def _no_number(
    name: str, found: torch.dtype, expected: torch.dtype | str = "a float of 16 bits or more", file: object = None
) -> CheckpointError:
    return CheckpointError(
        "a tensor has a type that cannot be converted without a scale",
        tensor=name,
        file=file,
        found=found,
        expected=expected,
        remedy="Use a checkpoint that is not quantized.",
    )


def _copy(target: nn.Parameter | torch.Tensor, tensor: torch.Tensor, rule: WeightRule) -> None:
    if rule.experts is not None:
        getattr(target, moe_runner.LOADER)(target, tensor, rule.experts)
        return
    tensor = _part(tensor, rule)
    loader = getattr(target, "weight_loader", None)
    if loader is None:
        target.data.copy_(tensor)
    elif rule.shard is None:
        loader(target, tensor)
    else:
        loader(target, tensor, rule.shard)


def _part(tensor: torch.Tensor, rule: WeightRule) -> torch.Tensor:
    """What of a checkpoint tensor goes to the target, in the target's layout; a view, but for runs that several ranks hold."""
    if rule.transposed:
        tensor = tensor.t()
    if rule.rows is not None:
        tensor = tensor[rule.rows[0] : rule.rows[1]]
    if rule.copies > 1:
        runs = tensor.reshape(rule.runs, -1, *tensor.shape[1:])
        tensor = runs.repeat_interleave(rule.copies, 0).flatten(0, 1)
    return tensor
