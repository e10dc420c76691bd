"""One run of the whole model on the meta device: what each module is called with, and each call of the attention interface.

In: a head model on meta. Out: an `Observation`. Nothing is computed; the run costs milliseconds per layer. What a module is called
with here is what it is traced with later, so that no input is ever guessed.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm_layers_bridge.seams.leaf import attention_leaf

from tf_backend.plan.masks import MaskKind, classify
from tf_backend.plan.mixing import Mixing, MixingDetector

OBSERVER = "tf_backend_observe"
"""Name under which the observing attention function is registered with transformers."""

_PRIMES = (37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113)


@dataclass(slots=True)
class ModuleCall:
    """The first call of a module: positional and keyword arguments, tensors on meta."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(slots=True)
class AttentionCall:
    """One call of the attention interface. Shapes: query [1, heads, tokens, head_dim], key and value likewise."""

    module: str
    query: torch.Size
    key: torch.Size
    value: torch.Size
    mask: MaskKind
    keywords: dict[str, Any]


@dataclass(slots=True)
class Failure:
    """Why the run ended early: the exception, the module that was running, and the innermost line of the model's own file."""

    error: Exception
    module: str
    file: str
    line: int


@dataclass(slots=True)
class Observation:
    """All that one run showed."""

    tokens: int
    calls: dict[str, ModuleCall] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    attention: list[AttentionCall] = field(default_factory=list)
    mixing: list[Mixing] = field(default_factory=list)
    failure: Failure | None = None


def observe(model: PreTrainedModel) -> Observation:
    """Run `model` once on meta with one row of tokens and their positions; never raises for what the model does."""
    return _Observer(model).run()


def token_count(model: nn.Module) -> int:
    """A prime that is no size in `model`, so that an axis of this length is the token axis."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    return next(p for p in _PRIMES if not any(size % p == 0 for size in sizes if size))


class _Observer:
    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.names = {id(module): name for name, module in model.named_modules()}
        self.stack: list[str] = []
        self.masks: dict[int, tuple[torch.Tensor, MaskKind]] = {}
        self.longest = 2 * int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 8192)
        self.longest = min(max(self.longest, 2048), 600_000)
        self.seen = Observation(tokens=token_count(model))

    def run(self) -> Observation:
        tokens = torch.zeros((1, self.seen.tokens), dtype=torch.long, device="meta")
        with self._hooked(), observing(self.model, self._attention, self._mask), torch.no_grad():
            detector = MixingDetector(self.seen.tokens, self._current)
            try:
                with detector:
                    self.model(input_ids=tokens, position_ids=tokens.clone(), use_cache=False)
            except Exception as error:  # the model's own failure is the answer, not ours to raise
                self.seen.failure = self._failure(error)
            self.seen.mixing = detector.found
        return self.seen

    def _current(self) -> str:
        return self.stack[-1] if self.stack else ""

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            name = self.names[id(module)]
            self.stack.append(name)
            self.seen.calls.setdefault(name, ModuleCall(args, dict(kwargs)))
            self.seen.order.append(name)

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.stack.pop()

        handles = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in self.model.modules()]
        handles += [m.register_forward_hook(leave) for m in self.model.modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _mask(self, *, mask_function: Callable[..., Any], kv_length: int, q_length: int, **_: Any) -> torch.Tensor:
        mask = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
        self.masks[id(mask)] = (mask, classify(mask_function, longest=self.longest))
        return mask

    def _attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **keywords: Any,
    ) -> tuple[torch.Tensor, None]:
        known = self.masks.get(id(attention_mask))
        if attention_mask is None:
            kind = MaskKind("unknown", reason="the model passes no mask to the attention interface")
        elif known is None:
            kind = MaskKind(
                "unknown", reason="the model changes its mask before it passes it to the attention interface"
            )
        else:
            kind = known[1]
        self.seen.attention.append(
            AttentionCall(self.names.get(id(module), ""), query.shape, key.shape, value.shape, kind, keywords)
        )
        return attention_leaf(module, query, key, value)

    def _failure(self, error: Exception) -> Failure:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "/models/" in f.filename and "transformers" in f.filename] or [
            f for f in frames if "transformers" in f.filename
        ]
        frame = (own or list(frames))[-1]
        return Failure(error, self._current(), frame.filename, frame.lineno or 0)


@contextmanager
def observing(model: PreTrainedModel, attention: Callable[..., Any], mask: Callable[..., Any]) -> Iterator[None]:
    """Have `model` call `attention` and `mask` where it would call transformers' attention and mask functions."""
    ALL_ATTENTION_FUNCTIONS.register(OBSERVER, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(OBSERVER, mask)
    before = model.config._attn_implementation
    model.config._attn_implementation = OBSERVER
    # The engine never packs sequences into one row for transformers: this check would read positions, which meta has not.
    packed = mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)
    try:
        with packed:
            yield
    finally:
        model.config._attn_implementation = before
        for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            type(registry)._global_mapping.pop(OBSERVER, None)


def observing_mask(*, q_length: int, kv_length: int, **_: Any) -> torch.Tensor:
    """Meta mask of [1, 1, queries, keys]; says nothing about who sees whom."""
    return torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
