"""Rotary position embedding of query and key: one call of vLLM's kernel in the place of the model's function.

    query, key = apply_rotary_pos_emb(query, key, cos, sin)   ->   query, key = self.rotary(query, key, cos, sin)

Which function of the model rotates, what it is given and in which order, and how, is found by what it computes: see
`rotary_forms`. Cosines and sines are arguments of the forward; where each stands twice in them, that must be known of the module
that made them. What is rotated is overwritten if nothing else reads it, which the memory of the trace tells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from ast_rewrite import Patch, Refused, RewriteError, SourceSpan
from fx_match import LeafCall, Match, Miss, Trace, any_value, call, canonical, find, find_all
from torch import fx, nn

from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions.children import is_any_linear, require_free_names
from vllm_layers_bridge.fusions.functions import FunctionCall, called_functions, written_arguments
from vllm_layers_bridge.fusions.memory import is_read_elsewhere
from vllm_layers_bridge.fusions.protocol import ModuleFacts
from vllm_layers_bridge.fusions.rotary_forms import Form, NoRotation, form_of
from vllm_layers_bridge.fusions.source import is_path_known, require_same_forward
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import LayerSpec, RotarySpec

NAME = "rotary"

PATTERN = call(attention_leaf)(any_value("module"), any_value("query"), any_value("key"), any_value("value"))

_SHAPE_READS = frozenset({"shape", "size"})


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor among the arguments of a forward: the argument, and the keys that lead to it inside."""

    name: str
    position: int | None
    keys: tuple[Any, ...]

    def find(self, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None) -> torch.Tensor | None:
        """The tensor in a call; None where that call has none there."""
        value: Any = (kwargs or {}).get(self.name)
        if value is None and self.position is not None and self.position < len(args or ()):
            value = (args or ())[self.position]
        for key in self.keys:
            try:
                value = value[key]
            except (LookupError, TypeError):
                return None
        return value if isinstance(value, torch.Tensor) else None

    def __str__(self) -> str:
        return self.name + "".join(f"[{key!r}]" for key in self.keys)


@dataclass(frozen=True, slots=True)
class Rotation:
    """One call in the forward that rotates: its form, where cosines and sines come from, and the layer that takes its place."""

    called: FunctionCall
    form: Form
    cos: Given
    sin: Given
    spec: RotarySpec


class Rotary:
    """See the module."""

    name = "rotary"
    replaces_module = False

    def is_candidate(self, trace: Trace) -> bool:
        """A module whose queries are computed with a tensor that it is given, beside what its linears read."""
        queries = _operands(trace, "query")
        return any(node.op == "placeholder" for node in _above(queries, trace) - set(queries))

    def match(self, trace: Trace) -> Match | Miss:
        """Every call of a function of the model between linears and attention that is a rotation."""
        found = find(PATTERN, trace)
        if isinstance(found, Miss):
            return dataclasses.replace(found, reason="the forward does not call the attention interface")
        if not is_path_known(trace):
            return _miss(found, found["query"], "the forward may take another path than the one that was traced")
        try:
            calls = called_functions(trace, _above(_operands(trace, "query", "key"), trace))
        except RewriteError as problem:
            return _miss(found, found["query"], f"the forward cannot be read: {problem}")
        again = trace.with_leaves([LeafCall(function) for function in {called.function for called in calls}])
        rotations: list[Rotation] = []
        near: list[tuple[fx.Node, str]] = []
        for called in calls:
            try:
                rotations.append(_rotation(called, trace, again, rotations))
            except NoRotation as problem:
                near.append((called.nodes[0], f"`{called.function.__name__}` {problem}"))
        if not rotations:
            return _miss(found, *(near or [(found["query"], "no function of the model rotates the query")])[0])
        nodes = tuple(node for rotation in rotations for node in rotation.called.nodes)
        return dataclasses.replace(found, captures={"rotations": tuple(rotations)}, nodes=nodes)

    def check(self, match: Match, module: nn.Module, facts: ModuleFacts) -> None:
        """What the instance is given must hold each cosine and sine twice where the layer reads it once; names must be free."""
        for rotation in match["rotations"]:
            for given in (rotation.cos, rotation.sin) if rotation.spec.angles == "twice" else ():
                tensor = given.find(facts.args, facts.kwargs)
                if tensor is None or facts.holds_twice is None or not facts.holds_twice(tensor, rotation.spec.pairing):
                    raise NotFusable(
                        f"`{given}` is not known to hold each value twice: no module was seen to make it from positions so that it does; "
                        "the engine's rotation reads the first of each two"
                    )
        require_free_names(module, tuple({rotation.spec.name for rotation in match["rotations"]}))

    def rewrite(self, match: Match, trace: Trace, patch: Patch) -> None:
        """The layer is called with what the function was given to rotate, cosines, sines."""
        require_same_forward(trace, patch)
        receiver = patch.source.receiver
        if receiver is None:
            raise Refused("the forward has no name for its module")
        for rotation in match["rotations"]:
            form = rotation.form
            names = (*form.rotated, form.cos, form.sin)
            written = written_arguments(patch, rotation.called, names)
            holes = {f"given_{at}": SourceSpan.of(written[name]) for at, name in enumerate(names)}
            template = f"{receiver}.{rotation.spec.name}({', '.join(f'{{{hole}}}' for hole in holes)})"
            patch.replace(rotation.called.span, template, dropping=(), **holes)

    def layers(self, match: Match, module: nn.Module, facts: ModuleFacts) -> tuple[LayerSpec, ...]:
        """A layer for each way in which the calls rotate."""
        return tuple(dict.fromkeys(rotation.spec for rotation in match["rotations"]))


def _rotation(called: FunctionCall, trace: Trace, again: Trace, known: list[Rotation]) -> Rotation:
    """The call as a rotation; NoRotation with what follows the name of the function."""
    node = called.leaf(again)
    if node is None:
        raise NoRotation("is called several times at one place, or not by the forward itself")
    form = form_of(called, node, again, trace)
    cos, sin = (_given(form.arguments[name], name, again) for name in (form.cos, form.sin))
    # what a forward leaves in its module is read by whoever looks there, and no graph shows it
    in_place = not again.changes and not is_read_elsewhere([form.arguments[name] for name in form.rotated], node, again)
    specs = list(dict.fromkeys(rotation.spec for rotation in known))
    for name in (*(spec.name for spec in specs), NAME if not specs else f"{NAME}_{len(specs)}"):
        spec = RotarySpec(name, form.pairing, form.angles, form.token_axis, in_place)
        if spec in specs:
            break
    return Rotation(called, form, cos, sin, spec)


def _given(node: fx.Node, name: str, trace: Trace) -> Given:
    keys: list[Any] = []
    current = node
    while (
        canonical(current) == "getitem"
        and isinstance(current.args[0], fx.Node)
        and isinstance(current.args[1], int | str)
    ):
        keys.insert(0, current.args[1])
        current = current.args[0]
    if current.op != "placeholder" or (isinstance(trace.value(current), torch.Tensor) and keys):
        raise NoRotation(f"is given `{name}` that the forward computes; expected an argument of the forward")
    for read in (node, current):
        if writers := trace.written_by(read):
            raise NoRotation(f"is given `{name}` that `{writers[0].name}` writes to in place")
    argument, code = str(current.target), trace.code
    names = code.co_varnames[1 : code.co_argcount]
    return Given(argument, names.index(argument) if argument in names else None, tuple(keys))


def _operands(trace: Trace, *parts: str) -> list[fx.Node]:
    """What all calls of attention are given as `parts`."""
    given = [match[part] for match in find_all(PATTERN, trace) for part in parts]
    return [node for node in given if isinstance(node, fx.Node)]


def _above(nodes: list[fx.Node], trace: Trace) -> set[fx.Node]:
    """`nodes`, and all that they are computed from, up to the linears; a shape that is read is no number."""
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in seen or canonical(node) in _SHAPE_READS:
            continue
        seen.add(node)
        if node.op != "call_module" or not is_any_linear(trace.module.get_submodule(str(node.target))):
            stack.extend(node.all_input_nodes)
    return seen


def _miss(found: Match, node: fx.Node, reason: str) -> Miss:
    return Miss(reason, node, found.captures, found.nodes, found.subject)
