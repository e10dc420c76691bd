"""What a live model is made of, read from one run of it: where attention, norms, residual adds, caps and routers are.

Found by what happens (who calls the attention interface, which operand of an add is the residual stream, what a norm
does when its weight is zero), so that a mutation needs no list of model types.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from tf_tools.mutations._ops import NOT_HANDLED, Op, handling, is_scalar
from tf_tools.mutations._rotation import NONE, pairs_of

PROBE_TOKENS = 40
"""Longer than the sliding window of the recipes, so that a window shows in the mask."""

AttentionArguments = dict[str, Any]
AttentionChange = Callable[[nn.Module, AttentionArguments], Any]
"""Gets the module and {query, key, value, attention_mask, **keywords}; changes them in place."""


@dataclass(frozen=True, slots=True)
class Attention:
    """One module that called the attention interface. Heads and sizes are of the tensors it passed.

    `window` is how many keys the last query of the probe saw, None when it saw all of them; `rotation` is how
    rotary embeddings pair its channels: see `_rotation`.
    """

    name: str
    module: nn.Module
    query_heads: int
    key_heads: int
    head_dim: int
    scaling: float
    window: int | None
    rotation: str


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation with a weight vector. `offset` is 1 where the layer multiplies by 1 + weight, else 0."""

    name: str
    module: nn.Module
    weight: nn.Parameter
    eps_name: str | None
    offset: float
    in_attention: bool
    is_post_norm: bool


@dataclass(frozen=True, slots=True)
class ResidualAdd:
    """The `turn`-th add of a decoder layer, one operand of which (0 or 1) is the residual stream."""

    layer: str
    turn: int
    residual: int


@dataclass(frozen=True, slots=True)
class Router:
    """A module that returned expert indices with weights of the same shape, and logits over all experts.

    The positions are those in its output tuple.
    """

    name: str
    module: nn.Module
    logits: int
    weights: int
    indices: int


@dataclass(frozen=True, slots=True)
class Anatomy:
    """See the module's docstring. `scales` are ("embedding" | "logits" | "branch", op) for products with a number."""

    model: PreTrainedModel
    attentions: tuple[Attention, ...]
    norms: tuple[Norm, ...]
    residual_adds: tuple[ResidualAdd, ...]
    routers: tuple[Router, ...]
    experts: tuple[tuple[str, nn.Module], ...]
    rotaries: tuple[tuple[str, nn.Module], ...]
    ops: tuple[Op, ...]
    scales: tuple[tuple[str, Op], ...]

    @staticmethod
    def of(model: PreTrainedModel) -> Anatomy:
        """Run the model on a few tokens and read off its parts."""
        return _read(model)


@dataclass(slots=True)
class _Notes:
    calls: dict[nn.Module, AttentionArguments] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    adds: list[ResidualAdd] = field(default_factory=list)
    post_norms: set[str] = field(default_factory=set)
    outputs: dict[str, Any] = field(default_factory=dict)
    scales: list[tuple[str, Op]] = field(default_factory=list)


@contextlib.contextmanager
def changed_attention(change: AttentionChange) -> Iterator[None]:
    """While active, `change` sees the arguments of every call of the attention interface before the call is made.

    If it returns something other than None, that is called afterwards: a way to undo what it did to the module.
    """
    original = AttentionInterface.get_interface

    def get_interface(self: Any, implementation: Any, default: Any) -> Callable[..., Any]:
        function = original(self, implementation, default)

        def call(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **keywords: Any) -> Any:
            arguments = {"query": query, "key": key, "value": value, "attention_mask": mask, **keywords}
            undo = change(module, arguments)
            positional = [arguments.pop(k) for k in ("query", "key", "value", "attention_mask")]
            try:
                return function(module, *positional, **arguments)
            finally:
                if undo is not None:
                    undo()

        return call

    with mock.patch.object(AttentionInterface, "get_interface", get_interface):
        yield


@torch.no_grad()
def run(model: PreTrainedModel, length: int = PROBE_TOKENS) -> Tensor:
    """[length, vocab] logits for fixed tokens."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(3, 3 + 7 * length, 7) % vocabulary
    return model(input_ids=tokens[None], use_cache=False).logits[0]  # type: ignore[no-any-return]


def identity_rotation(embeddings: Any) -> Any:
    """Position embeddings (cos, sin) that rotate nothing."""
    cos, sin = embeddings
    return torch.ones_like(cos), torch.zeros_like(sin)


@contextlib.contextmanager
def changed_embeddings(module: nn.Module, change: Callable[[Any], Any]) -> Iterator[None]:
    """While active, the attention module gets `change(position_embeddings)`, however it is passed."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("position_embeddings") is not None:
            kwargs = {**kwargs, "position_embeddings": change(kwargs["position_embeddings"])}
        args = tuple(change(a) if _is_rotation(a) else a for a in args)
        return args, kwargs

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _is_rotation(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(v, Tensor) for v in value)


def _read(model: PreTrainedModel) -> Anatomy:
    names = {module: name for name, module in model.named_modules()}
    notes = _take_notes(model, names)
    attention_names = {names[m] for m in notes.calls}
    routers = tuple(r for n, o in notes.outputs.items() if (r := _router(n, model.get_submodule(n), o)))
    return Anatomy(
        model=model,
        attentions=tuple(_attention(model, names[m], m, a) for m, a in notes.calls.items()),
        norms=tuple(_norms(model, attention_names, notes.post_norms)),
        residual_adds=tuple(notes.adds),
        routers=routers,
        experts=tuple((n, m) for n, m in model.named_modules() if hasattr(m, "is_concatenated")),
        rotaries=tuple((n, m) for n, m in model.named_modules() if isinstance(getattr(m, "inv_freq", None), Tensor)),
        ops=tuple(notes.ops),
        scales=tuple(notes.scales),
    )


def _take_notes(model: PreTrainedModel, names: dict[nn.Module, str]) -> _Notes:
    notes = _Notes()
    vocabulary = model.get_input_embeddings().weight.shape[0]
    embedding = names[model.get_input_embeddings()]
    layers = {
        n for n, m in model.named_modules() if isinstance(model.get_submodule(n.rpartition(".")[0]), nn.ModuleList)
    }
    stream: dict[str, Tensor] = {}

    def note_call(module: nn.Module, arguments: AttentionArguments) -> None:
        notes.calls[module] = dict(arguments)

    def note_op(op: Op) -> Any:
        notes.ops.append(op)
        tensors = [a for a in op.args if isinstance(a, Tensor)]
        if op.kind == "add" and op.owner in stream and len(tensors) == 2:
            residual = next((i for i, t in enumerate(tensors) if t is stream[op.owner]), None)
            if residual is not None:
                notes.adds.append(ResidualAdd(op.owner, op.turn, residual))
                other = tensors[1 - residual]
                notes.post_norms |= {n for n, o in notes.outputs.items() if o is other}
                stream[op.owner] = op.run()
                return stream[op.owner]
        if op.kind in {"mul", "div"} and tensors and any(is_scalar(a) for a in op.args[1:]):
            if op.owner == embedding or tensors[0] is notes.outputs.get(embedding):
                notes.scales.append(("embedding", op))
            elif op.owner in layers:
                notes.scales.append(("branch", op))
            elif op.owner == "" and tensors[0].shape[-1] == vocabulary:
                notes.scales.append(("logits", op))
        return NOT_HANDLED

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            value = args[0] if args else kwargs.get("hidden_states")
            if isinstance(value, Tensor):
                stream[name] = value

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            notes.outputs[name] = output

        return hook

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            if name in layers:
                stack.callback(module.register_forward_pre_hook(before(name), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after(name)).remove)
        stack.enter_context(changed_attention(note_call))
        stack.enter_context(handling(model, note_op))
        run(model)
    return notes


def _attention(model: PreTrainedModel, name: str, module: nn.Module, arguments: AttentionArguments) -> Attention:
    query, key, mask = arguments["query"], arguments["key"], arguments["attention_mask"]
    visible = int((mask[0, 0, -1] > torch.finfo(mask.dtype).min / 2).sum()) if mask is not None else key.shape[2]
    head_dim = int(query.shape[-1])
    scaling = arguments.get("scaling")
    return Attention(
        name,
        module,
        int(query.shape[1]),
        int(key.shape[1]),
        head_dim,
        float(head_dim**-0.5 if scaling is None else scaling),
        visible if visible < key.shape[2] else None,
        _rotation(model, module, query),
    )


def _rotation(model: PreTrainedModel, module: nn.Module, query: Tensor) -> str:
    """Run once more with position embeddings that turn nothing, and see how the query differs."""
    seen: list[Any] = []
    plain: list[Tensor] = []

    def still(embeddings: Any) -> Any:
        seen[:] = [embeddings]
        return identity_rotation(embeddings)

    def note(called: nn.Module, arguments: AttentionArguments) -> None:
        if called is module:
            plain[:] = [arguments["query"]]

    with changed_embeddings(module, still), changed_attention(note):
        run(model)
    return pairs_of(plain[0], query, seen[0]) if seen else NONE


@torch.no_grad()
def _norms(model: PreTrainedModel, attentions: set[str], post_norms: set[str]) -> Iterator[Norm]:
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if "norm" not in type(module).__name__.lower() or not isinstance(weight, nn.Parameter) or weight.ndim != 1:
            continue
        eps = next(
            (n for n in ("variance_epsilon", "eps", "epsilon") if isinstance(getattr(module, n, None), float)), None
        )
        in_attention = any(name.startswith(f"{a}.") for a in attentions)
        yield Norm(name, module, weight, eps, _offset(module, weight), in_attention, name in post_norms)


def _offset(module: nn.Module, weight: nn.Parameter) -> float:
    kept = weight.detach().clone()
    bias = getattr(module, "bias", None)
    sample = torch.linspace(-1, 1, weight.numel())[None]
    weight.zero_()
    result = module(sample) - (bias if isinstance(bias, Tensor) else 0.0)
    weight.copy_(kept)
    return 1.0 if bool(result.abs().max() > 0.1) else 0.0


def _router(name: str, module: nn.Module, output: Any) -> Router | None:
    if not isinstance(output, tuple) or not all(isinstance(o, Tensor) for o in output) or len(output) < 3:
        return None
    indices = next((i for i, o in enumerate(output) if not o.is_floating_point()), None)
    if indices is None:
        return None
    weights = next((i for i, o in enumerate(output) if i != indices and o.shape == output[indices].shape), None)
    logits = next((i for i, o in enumerate(output) if o.shape[-1] > output[indices].shape[-1]), None)
    return None if weights is None or logits is None else Router(name, module, logits, weights, indices)
