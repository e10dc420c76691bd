"""A module that attends in several runs of one forward: each run reaches its own layer, and no run more or less goes unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from vllm_layers_bridge.errors import WrongLayout
from vllm_layers_bridge.seams.attention import (
    CHILD,
    AttentionTurns,
    attach_attention,
    attention_interface,
)
from vllm_layers_bridge.specs import AttentionSpec

SPEC = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=8, value_head_dim=8, scale=1.0)


class Adds(nn.Module):
    """In the place of an attention layer: what it adds tells which layer it is."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query + self.number


class Attends(nn.Module):
    """A module whose layers are in turns."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        turns = AttentionTurns()
        for number in numbers:
            turns.add(Adds(number))
        self.add_module(CHILD, turns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attention_interface(self, x, x, x)[0].transpose(1, 2)


class Recurrent(nn.Module):
    """Runs its one module `times` times, and tells the layers when it begins and when it ends."""

    def __init__(self, times: int, *numbers: float) -> None:
        super().__init__()
        self.times = times
        self.layer = Attends(*numbers)
        self.turns = tuple(m.turns for m in self.layer.modules() if isinstance(m, AttentionTurns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for turns in self.turns:
            turns.start()
        for _ in range(self.times):
            x = self.layer(x * 2)
        for turns in self.turns:
            turns.finish()
        return x


X = torch.ones(1, 1, 3, 8)


def test_each_run_reaches_its_own_layer_every_time() -> None:
    model = Recurrent(3, 1.0, 10.0, 100.0)
    expected = ((2 + 1.0) * 2 + 10.0) * 2 + 100.0
    for _ in range(2):
        assert torch.equal(model(X), torch.full_like(X, expected))
    assert list(dict(model.named_modules()))[-3:] == [f"layer.{CHILD}.turn_{at}" for at in range(3)]


@pytest.mark.parametrize(
    ("times", "words"),
    [(3, "attends more than 2 times"), (1, "attends 1 times in one forward of the model, and not 2")],
)
def test_another_number_of_runs_is_an_error_and_not_another_result(times: int, words: str) -> None:
    model = Recurrent(times, 1.0, 10.0)
    for _ in range(2):  # and stays one
        with pytest.raises(WrongLayout, match=words):
            model(X)


def test_a_forward_that_failed_leaves_nothing_behind() -> None:
    model = Recurrent(2, 1.0, 10.0)
    expected = model(X)
    with pytest.raises(WrongLayout):
        model(X.expand(2, 1, 3, 8))
    assert torch.equal(model(X), expected)


def test_compiled_as_one_graph_that_is_not_compiled_again() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model = Recurrent(2, 1.0, 10.0)
    expected = model(X)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=keep, fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(X), expected)
    assert len(graphs) == 1


class FakeAttention(nn.Module):
    """Keeps the name that it was built with."""

    def __init__(self, *, prefix: str, **_: Any) -> None:
        super().__init__()
        self.prefix = prefix
        self.sliding_window = None


def attached(order: tuple[int, ...]) -> list[str]:
    import vllm.model_executor.layers.attention as module

    module.Attention = FakeAttention
    owner = nn.Module()
    for call in ("attention_call_0", "attention_call_1"):
        for turn in order:
            attach_attention(
                owner,
                SPEC,
                f"layers.3.{call}.{turn}",
                tensor_parallel=1,
                cache_config=None,
                quant_config=None,
                holder=call,
                turn=turn,
            )
    return [f"{name}={m.prefix}" for name, m in owner.named_modules() if isinstance(m, FakeAttention)]


@pytest.mark.engine
def test_layers_are_attached_in_the_order_of_their_turns(in_vllm: Callable[..., Any]) -> None:
    assert in_vllm(attached, (0, 1)) == [
        f"attention_call_{call}.{CHILD}.turn_{turn}=layers.3.attention_call_{call}.{turn}"
        for call in (0, 1)
        for turn in (0, 1)
    ]
    with pytest.raises(Exception, match="in the order of their turns"):
        in_vllm(attached, (0, 2))
