"""One pipeline stage of a decoder: the modules of other stages are gone, and hidden states come in and go out between layers.

In: a model and what planning found of its layers. Out: the same model with stand-ins, and the `Passage` through which hidden states pass.

The decoder's own forward runs on every stage. The stand-in before the first layer of a stage gives what was received, whatever the decoder
made of its embeddings on the way there: a scale, a norm or position embeddings were applied on the first stage and are not
applied again. The stand-in after its last layer keeps what is to be sent, whatever follows. Nothing here needs vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tf_backend.plan.schema import StagesPlan

_OF_MODULES = frozenset(vars(nn.Module()))
"""State of torch's own in every module."""


class Passage:
    """Where hidden states [1, tokens, width] wait: received before a stage runs, to be sent after it."""

    def __init__(self) -> None:
        self.received: torch.Tensor | None = None
        self.sent: torch.Tensor | None = None


class AbsentLayer(nn.Module):
    """In the place of a layer of another stage: returns its hidden state as the layer would, and keeps its plain attributes."""

    def __init__(self, layer: nn.Module, stages: StagesPlan) -> None:
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(layer).items() if name not in _OF_MODULES})
        self.absent_argument = stages.argument
        self.absent_output = (stages.output, stages.entries)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer was given, in the form of what it returns."""
        return self._returned(self._given(args, kwargs))

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        argument = self.absent_argument
        return kwargs[argument] if isinstance(argument, str) else args[argument]

    def _returned(self, hidden: Any) -> Any:
        output, entries = self.absent_output
        return hidden if output is None else tuple(hidden if at == output else None for at in range(entries))


class LayerBefore(AbsentLayer):
    """The layer before the first of a stage: gives what was received."""

    def __init__(self, layer: nn.Module, stages: StagesPlan, passage: Passage) -> None:
        super().__init__(layer, stages)
        self.passage = passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What was received, in the form of what the layer returns."""
        return self._returned(self.passage.received)


class LayerAfter(AbsentLayer):
    """The layer after the last of a stage: keeps what is to be sent."""

    def __init__(self, layer: nn.Module, stages: StagesPlan, passage: Passage) -> None:
        super().__init__(layer, stages)
        self.passage = passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What it was given, in the form of what the layer returns."""
        hidden = self._given(args, kwargs)
        self.passage.sent = hidden
        return self._returned(hidden)


class AbsentModule(nn.Module):
    """In the place of a module that runs after the layers, on the last stage alone: what is made of its output is thrown away."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Its first argument."""
        return args[0] if args else next(iter(kwargs.values()))


class AbsentEmbedding(nn.Module):
    """In the place of the token embedding on a stage that receives hidden states."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Never called: the decoder is given embeddings."""
        raise AssertionError("a stage that receives hidden states looks up no tokens")


def absent_modules(stages: StagesPlan, layers: str, rank: int) -> frozenset[str]:
    """Full names of the modules that stage `rank` does not hold."""
    first, last = stages.bounds[rank], stages.bounds[rank + 1]
    absent = {f"{layers}.{at}" for at in range(stages.bounds[-1]) if not first <= at < last}
    is_first, is_last = rank == 0, rank == len(stages.bounds) - 2
    if not is_last:
        absent.update((*stages.after, stages.head))
    if not is_first and not (is_last and stages.tied):
        absent.add(stages.embedding)
    return frozenset(absent)


def lies_in(name: str, absent: frozenset[str]) -> bool:
    """Whether a module, parameter or buffer is one of `absent` or within one."""
    parts = name.split(".")
    return bool(absent) and any(".".join(parts[:end]) in absent for end in range(1, len(parts) + 1))


def make_stage(model: nn.Module, stages: StagesPlan, layers: str, rank: int, passage: Passage) -> dict[str, nn.Module]:
    """Put stand-ins in the place of what stage `rank` does not hold; returns what was there, by full name."""
    first, last = stages.bounds[rank], stages.bounds[rank + 1]
    gone: dict[str, nn.Module] = {}
    for name in sorted(absent_modules(stages, layers, rank)):
        old = model.get_submodule(name)
        gone[name] = old
        owner, _, leaf = name.rpartition(".")
        new: nn.Module
        if owner == layers and leaf.isdigit():
            at = int(leaf)
            if at == first - 1:
                new = LayerBefore(old, stages, passage)
            elif at == last:
                new = LayerAfter(old, stages, passage)
            else:
                new = AbsentLayer(old, stages)
        else:
            new = AbsentEmbedding() if name == stages.embedding else AbsentModule()
        _set(model, name, new)
    return gone


def unmake_stage(model: nn.Module, gone: dict[str, nn.Module]) -> None:
    """The inverse of `make_stage`."""
    for name, module in gone.items():
        _set(model, name, module)


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._modules[leaf] = module.train(model.training)
