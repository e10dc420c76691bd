"""One run of the whole model on the meta device: what each module is called with, and each call of the attention interface.

In: a head model on meta. Out: an `Observation`. Nothing is computed; the run costs milliseconds per layer. What a module is called
with here is what it is traced with later, so that no input is ever guessed.
"""

from __future__ import annotations

import dis
import inspect
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm_layers_bridge.layers.position_table import PositionCall
from vllm_layers_bridge.seams.leaf import attention_leaf

from tf_backend.plan.borrowed import BorrowedParameters
from tf_backend.plan.masks import MaskKind, classify
from tf_backend.plan.mixing import Mixing, MixingDetector
from tf_backend.plan.position_rows import PositionFollower
from tf_backend.plan.schema import PositionRows

OBSERVER = "tf_backend_observe"
"""Name under which the observing attention function is registered with transformers."""

LONGEST = 1 << 20
"""Tokens up to which masks are looked at, whatever the config gives as its longest context: the engine may be asked for more."""

_NOT_MODELING = (
    *(str(Path(str(package.__file__)).parent) for package in (torch, transformers)),
    str(Path(__file__).parent),
)
_META = re.compile(r"\bmeta\b", re.IGNORECASE)
_MODELS = str(Path(str(transformers.__file__)).parent / "models")

_PRIMES = (37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113)


@dataclass(slots=True)
class ModuleCall:
    """The first call of a module: positional and keyword arguments, tensors on meta.

    `signatures` holds how it was called each time, without sizes: more than one if it was not called alike.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    signatures: set[tuple[Any, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.signatures.add(self.signature)

    @property
    def signature(self) -> tuple[Any, ...]:
        """How this call was made."""
        return call_signature(self.args, self.kwargs)

    @property
    def has_keywords(self) -> bool:
        """Whether it was ever given an argument by keyword."""
        return any(keywords != _shape_of({}) for _, keywords in self.signatures)


@dataclass(slots=True)
class AttentionCall:
    """One call of the attention interface. Shapes: query [1, heads, tokens, head_dim], key and value likewise.

    `run` counts from 0 how often its module had run before in the same forward of the model.
    """

    module: str
    query: torch.Size
    key: torch.Size
    value: torch.Size
    mask: MaskKind
    keywords: dict[str, Any]
    run: int = 0


@dataclass(slots=True)
class Failure:
    """Why the run ended early: the exception, the module that was running, and the innermost line of the model's own file."""

    error: Exception
    module: str
    file: str
    line: int
    python_module: str | None = None

    @property
    def lacks_data(self) -> bool:
        """Whether it is that tensors on meta hold nothing; else the model would fail with data too.

        Torch has a type for some of these errors alone; of the others it names the device. What the model itself raises is not of them.
        """
        named = isinstance(self.error, NotImplementedError) or _META.search(str(self.error)) is not None
        return named and not _is_raised_by_model(self.error)


@dataclass(slots=True)
class Made:
    """Tensors that a module without parameters made from positions, [1, tokens], in one of its calls."""

    module: str
    call: PositionCall
    tensors: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class Observation:
    """All that one run showed."""

    tokens: int
    calls: dict[str, ModuleCall] = field(default_factory=dict)
    attention: list[AttentionCall] = field(default_factory=list)
    mixing: list[Mixing] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    failure: Failure | None = None
    position_rows: tuple[PositionRows, ...] = ()
    borrowed: frozenset[str] = frozenset()
    """Modules whose parameters are read by others."""
    runs: Counter[str] = field(default_factory=Counter)
    """How often each module ran."""
    is_steady: bool = True
    """Whether modules that attend in several runs did so as often and in the same order when the model ran again, with other tokens."""


def is_modeling_code(file: str) -> bool:
    """Whether `file` is a model's own: one of transformers' models, or code from outside torch, transformers and this package."""
    return file.startswith(_MODELS) or not file.startswith((*_NOT_MODELING, "<"))


def observe(model: PreTrainedModel) -> Observation:
    """Run `model` on meta with one row of tokens and their positions; never raises for what the model does.

    Where tokens seem to mix, a second run with another number of them tells a token axis from a size that happens to look like one; where
    a module attends in several runs, it tells whether it always does.
    """
    first, second = token_counts(model)
    seen = _Observer(model, first).run()
    if seen.mixing or any(call.run for call in seen.attention):
        later = _Observer(model, second).run()
        again = {(mixing.op, mixing.module, mixing.why) for mixing in later.mixing}
        seen.mixing = [mixing for mixing in seen.mixing if (mixing.op, mixing.module, mixing.why) in again]
        order = [[(call.module, call.run) for call in run.attention] for run in (seen, later)]
        seen.is_steady = order[0] == order[1]
    return seen


def token_counts(model: nn.Module) -> tuple[int, int]:
    """Two primes that divide no size in `model`, so that an axis whose length is a multiple of one is the token axis."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    free = (p for p in _PRIMES if not any(size % p == 0 for size in sizes if size))
    return next(free), next(free)


def call_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """How a module was called, without sizes: tensors by rank and type, plain values by value, objects by class."""
    return (_shape_of(args), _shape_of(dict(sorted(kwargs.items()))))


def _shape_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", value.ndim, str(value.dtype))
    if isinstance(value, tuple | list):
        return (type(value).__name__, *(_shape_of(item) for item in value))
    if isinstance(value, dict):
        return ("dict", *((key, _shape_of(item)) for key, item in value.items()))
    if isinstance(value, bool | int | float | str | type(None)):
        return value
    return type(value).__qualname__


class _Observer:
    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        self.model = model
        self.names = {id(module): name for name, module in model.named_modules()}
        self.stack: list[str] = []
        self.masks: dict[int, tuple[torch.Tensor, MaskKind]] = {}
        self.seen = Observation(tokens=tokens)
        self.detector = MixingDetector(tokens, self._current)

    def run(self) -> Observation:
        tokens = torch.zeros((1, self.seen.tokens), dtype=torch.long, device="meta")
        positions = tokens.clone()
        follower = PositionFollower(positions, self._current)
        borrowed = BorrowedParameters(self.model, self._current)
        with self._hooked(), observing(self.model, self._attention, self._mask), torch.no_grad():
            try:
                with borrowed, follower, self.detector:  # what the follower computes is not the model's
                    self.model(input_ids=tokens, position_ids=positions, use_cache=False)
            except Exception as error:  # the model's own failure is the answer, not ours to raise
                self.seen.failure = self._failure(error)
            self.seen.mixing = self.detector.found
            self.seen.position_rows = tuple(follower.found.values())
            self.seen.borrowed = frozenset(borrowed.found)
        return self.seen

    def _current(self) -> str:
        return self.stack[-1] if self.stack else ""

    def _hooked(self) -> AbstractContextManager[None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            name = self.names[id(module)]
            self.stack.append(name)
            self.seen.runs[name] += 1
            call = ModuleCall(args, dict(kwargs))
            self.seen.calls.setdefault(name, call).signatures.add(call.signature)

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            name = self.stack.pop()
            call = PositionCall(args, dict(kwargs))
            if isinstance(output, tuple) and id(module) in without_parameters and call.positions() is not None:
                self.seen.made.append(Made(name, call, tuple(t for t in output if isinstance(t, torch.Tensor))))

        without_parameters = {id(m) for m in self.model.modules() if not any(True for _ in m.parameters())}
        return watching(self.model, enter, leave)

    def _mask(self, *, mask_function: Callable[..., Any], kv_length: int, q_length: int, **_: Any) -> torch.Tensor:
        mask = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
        self.detector.is_paused = True  # the model does not run what is run to look at its mask
        self.masks[id(mask)] = (mask, classify(mask_function, longest=LONGEST))
        self.detector.is_paused = False
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
        name = self.names.get(id(module), "")
        run = max(self.seen.runs[name] - 1, 0)
        self.seen.attention.append(AttentionCall(name, query.shape, key.shape, value.shape, kind, keywords, run))
        return attention_leaf(module, query, key, value)

    def _failure(self, error: Exception) -> Failure:
        frames = list(traceback.walk_tb(error.__traceback__))
        modeling = [(frame, line) for frame, line in frames if is_modeling_code(frame.f_code.co_filename)]
        frame, line = (modeling or frames)[-1]
        return Failure(error, self._current(), frame.f_code.co_filename, line, frame.f_globals.get("__name__"))


def takes(module: nn.Module, call: ModuleCall) -> bool:
    """Whether the forward of `module` takes the arguments of `call` at all."""
    try:
        inspect.signature(module.forward).bind(*call.args, **call.kwargs)
    except TypeError:
        return False
    return True


def _is_raised_by_model(error: Exception) -> bool:
    """Whether it comes of a `raise` that a modeling file holds, and not of what torch or Python was asked to do there."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None or not is_modeling_code(innermost.tb_frame.f_code.co_filename):
        return False
    return innermost.tb_frame.f_code.co_code[innermost.tb_lasti] == dis.opmap["RAISE_VARARGS"]


@contextmanager
def watching(model: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Call ``enter(module, args, kwargs)`` before each module of `model` runs and ``leave(module, args, kwargs, output)`` after it."""
    handles = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in model.modules()]
    handles += [m.register_forward_hook(leave, with_kwargs=True) for m in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def observing(model: PreTrainedModel, attention: Callable[..., Any], mask: Callable[..., Any]) -> Iterator[None]:
    """Have `model` call `attention` and `mask` where it would call transformers' attention and mask functions."""
    ALL_ATTENTION_FUNCTIONS.register(OBSERVER, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(OBSERVER, mask)
    before = model.config._attn_implementation
    model.config._attn_implementation = OBSERVER
    try:
        with _unpadded():
            yield
    finally:
        model.config._attn_implementation = before
        for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            type(registry)._global_mapping.pop(OBSERVER, None)


@contextmanager
def _unpadded() -> Iterator[None]:
    """What transformers would learn from the data of the one row that it is given: it is not packed, and nothing is padding."""
    overlay = masking_utils.chunked_overlay
    with (
        mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None),
        mock.patch.object(
            masking_utils, "chunked_overlay", lambda size, _: overlay(size, torch.zeros(1, dtype=torch.int))
        ),
        mock.patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", return_value=None),
    ):
        yield


def observing_mask(*, q_length: int, kv_length: int, **_: Any) -> torch.Tensor:
    """Meta mask of [1, 1, queries, keys]; says nothing about who sees whom."""
    return torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
