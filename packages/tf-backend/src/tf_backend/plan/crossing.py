"""What crosses from one decoder layer to the next, read from a run on the meta device.

In: a model and its list of decoder layers. Out: a `Crossings`: how the hidden state goes in and out of a layer, and every other value
that a layer, or what follows the layers, computes from what was computed before. Nothing of that would be there on another stage.

Each tensor that depends on the tokens carries the index of the layer in which it was computed, by the storage it lies in: views and
in-place writes are seen. What depends on positions alone (rotary embeddings, masks) carries none, and is computed on every stage.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from vllm_layers_bridge.nested import tensors_in

from tf_backend.plan.mixing import running_line
from tf_backend.plan.observe import observing, observing_mask, token_counts, watching
from tf_backend.plan.schema import Place

BEFORE = -1
"""Made before the first layer."""

_OF_SHAPE_ALONE = frozenset(
    {
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros",
        "new_ones", "new_full", "new_empty_strided",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value made in layer `made` and read in layer `read`, beside the hidden state."""

    made: int
    read: int
    module: str
    what: str
    place: Place | None = None


@dataclass(slots=True)
class Crossings:
    """What one run showed of a list of `layers` layers.

    `argument` is where a layer takes its hidden state, `output` the entry of what it returns (None: all of it) out of `entries`,
    `after` the modules that run after the layers and at no other time. `problem` is why no stage can be cut out at all.
    """

    layers: int
    argument: int | str | None = None
    output: int | None = None
    entries: int = 0
    hidden: torch.Tensor | None = None
    found: list[Crossing] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    problem: str | None = None

    def over(self, boundary: int) -> Crossing | None:
        """The first value that a cut before layer `boundary` would lose."""
        return next((c for c in self.found if c.made < boundary <= c.read or c.made > c.read), None)


def crossings(model: PreTrainedModel, layers: str) -> Crossings:
    """Run `model` on meta and follow what passes between the modules of the list `layers`."""
    return _Follower(model, layers).run()


class _Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: PreTrainedModel, layers: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.listed = list(model.get_submodule(layers).children())
        self.names = {id(module): name for name, module in model.named_modules()}
        self.made: dict[int, int] = {}
        self.kept: list[Any] = []  # storages, so that no address is used again
        self.inside: int | None = None
        self.done = BEFORE
        self.returned: list[Any] = []
        self.is_tuple = False
        self.elsewhere: set[str] = set()
        self.stack: list[str] = []
        self.seen = Crossings(len(self.listed))
        self.forms: set[tuple[Any, ...]] = set()

    def run(self) -> Crossings:
        tokens = torch.zeros((1, token_counts(self.model)[0]), dtype=torch.long, device="meta")
        positions = torch.zeros_like(tokens)
        self._mark(tokens, BEFORE)
        with self._hooked(), observing(self.model, self._attention, observing_mask), torch.no_grad(), self:
            try:
                self.model(input_ids=tokens, position_ids=positions, use_cache=False)
            except Exception as error:  # the model's own code
                self.seen.problem = f"it cannot be followed without data: {type(error).__name__}"
        self.seen.after = [name for name in self.seen.after if name not in self.elsewhere]
        if self.done != len(self.listed) - 1:
            self.seen.problem = self.seen.problem or "it does not run each of its layers once"
        elif len(self.forms) == 1:
            self.seen.argument, self.seen.output, self.seen.entries = self.forms.pop()
        elif self.forms:
            self.seen.problem = self.seen.problem or "its layers take or return their hidden states in different ways"
        return self.seen

    # ---- operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in _OF_SHAPE_ALONE:
            self._follow(tensors_in((args, kwargs)), tensors_in(out), func.overloadpacket.__name__)
        return out

    def _follow(self, read: list[torch.Tensor], out: list[torch.Tensor], what: str) -> None:
        known = [made for tensor in read if (made := self._of(tensor)) is not None]
        if not known:
            return
        is_after = self.done == len(self.listed) - 1 and self.inside is None
        for made in set(known):
            if self.inside is not None and made != self.inside:
                self._cross(made, self.inside, what)
            elif is_after and made < self.done:
                self._cross(made, len(self.listed), what)
        for tensor in out:
            self._mark(tensor, max(known) if self.inside is None else self.inside)

    def _cross(self, made: int, read: int, what: str) -> None:
        if (made, read) not in {(c.made, c.read) for c in self.seen.found}:
            module = self.stack[-1] if self.stack else ""
            self.seen.found.append(Crossing(made, read, module, what, running_line()))

    def _attention(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        out = torch.empty(shape, dtype=query.dtype, device=query.device)
        self._follow([query, key, value], [out], "attention")
        return out, None

    # ---- layers

    def _hooked(self) -> AbstractContextManager[None]:
        numbers = {id(layer): at for at, layer in enumerate(self.listed)}

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            name = self.names[id(module)]
            if self.inside is not None or self.done < len(self.listed) - 1:
                self.elsewhere.add(name)
            elif name not in self.seen.after:
                self.seen.after.append(name)
            self.stack.append(name)
            if id(module) in numbers:
                self._enter(
                    numbers[id(module)], dict[int | str, Any](enumerate(args)) | dict[int | str, Any](kwargs.items())
                )

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.stack.pop()
            if id(module) in numbers:
                self.inside, self.done = None, numbers[id(module)]
                self.returned = list(output) if isinstance(output, tuple | list) else [output]
                self.is_tuple = isinstance(output, tuple | list)

        return watching(self.model, enter, leave)

    def _enter(self, at: int, given: dict[int | str, Any]) -> None:
        if at != self.done + 1 or self.inside is not None:
            self.seen.problem = "it does not run each of its layers once, in their order"
        self.inside = at
        if at == 0:
            return
        passed = [
            (argument, entry)
            for argument, value in given.items()
            for entry, back in enumerate(self.returned)
            if isinstance(value, torch.Tensor) and value is back
        ]
        if len(passed) != 1:
            what = (
                "is given nothing that it returns" if not passed else f"is given {len(passed)} values that it returns"
            )
            self.seen.found.append(Crossing(at - 1, at, self.stack[-1], f"the next layer {what}"))
            return
        ((argument, entry),) = passed
        hidden = given[argument]
        if hidden.ndim != 3 or hidden.shape[0] != 1:
            self.seen.problem = f"its hidden states are {tuple(hidden.shape)}, expected [1, tokens, features]"
        self.seen.hidden = hidden
        self._mark(hidden, at)
        self.forms.add((argument, entry if self.is_tuple else None, len(self.returned)))

    # ---- labels

    def _of(self, tensor: torch.Tensor) -> int | None:
        return self.made.get(tensor.untyped_storage()._cdata)

    def _mark(self, tensor: torch.Tensor, made: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.made:
            self.kept.append(storage)
        self.made[storage._cdata] = made
