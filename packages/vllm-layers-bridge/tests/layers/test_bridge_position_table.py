"""A table gives what the module gives at the end of a sequence, at every length."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from vllm_layers_bridge.errors import NotBuildable
from vllm_layers_bridge.layers.position_table import PositionCall, PositionTable, find_change

CONTEXT = 32
CALL = PositionCall((torch.zeros(1, 3, 16), torch.arange(3)[None]), {})
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "original_max_position_embeddings": 16,
    "factor": 2.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}


def rotary(parameters: dict[str, object]) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=16,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={**parameters},
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [(PLAIN, (500, "same")), (DYNAMIC, (CONTEXT, "each its own")), (LONG, (16, "another"))],
)
def test_where_the_state_changes(parameters: dict[str, object], expected: tuple[int, str]) -> None:
    assert find_change(rotary(parameters), CALL, 500) == expected


@pytest.mark.parametrize("parameters", [PLAIN, DYNAMIC, LONG])
@pytest.mark.parametrize("length", [9, CONTEXT, 70])
def test_each_row_is_that_of_a_sequence_which_ends_there(parameters: dict[str, object], length: int) -> None:
    table = PositionTable(rotary(parameters), [CALL], length, *find_change(rotary(parameters), CALL, 500))
    for end in range(1, length + 1):
        expected = rotary(parameters)(torch.zeros(1, 1, 16), torch.arange(end)[None])
        found = table(torch.ones(1, 2, 16), torch.tensor([[0, end - 1]]))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one[0, -1], other[0, -1])
    assert not table.state_dict()


def test_tokens_beside_others_keep_their_values() -> None:
    """What the module itself does not: a long sequence beside it changes its frequencies."""
    table = PositionTable(rotary(DYNAMIC), [CALL], 64, CONTEXT, "each its own")
    x = torch.zeros(1, 2, 16)
    beside, alone = torch.tensor([[5, 60]]), torch.tensor([[5]])
    assert torch.equal(table(x, beside)[1][:, :1], table(x, alone)[1])
    module = rotary(DYNAMIC)
    assert not torch.equal(module(x, beside)[1][:, :1], rotary(DYNAMIC)(x, alone)[1])


class ByKind(nn.Module):
    """Called once for each kind of layer, as models with two kinds of frequencies are."""

    def __init__(self) -> None:
        super().__init__()
        self.speed = nn.Buffer(torch.tensor([1.0]), persistent=False)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, kind: str = "fast"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angle = positions[..., None] * self.speed * (2.0 if kind == "fast" else 1.0)
        return angle.cos(), angle.sin()


def test_calls_of_each_kind_read_their_own_table() -> None:
    x, positions = torch.zeros(1, 3, 4), torch.tensor([[4, 0, 7]])
    calls = [PositionCall((x, positions, "slow"), {}), PositionCall((x, positions), {"kind": "fast"})]
    table = PositionTable(ByKind(), calls, 8, 8, "same")
    assert torch.equal(table(x, positions, "slow")[0], ByKind()(x, positions, "slow")[0])
    assert torch.equal(table(x, positions, kind="fast")[1], ByKind()(x, positions, "fast")[1])
    with pytest.raises(KeyError):
        table(x, positions, "other")


class Summing(ByKind):
    """Not of positions alone: gives the mean of what it is given."""

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, kind: str = "fast"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (positions[..., None].float() + x.mean(), positions[..., None].float())


def test_a_module_that_reads_its_other_input_cannot_be_built() -> None:
    with pytest.raises(NotBuildable, match="Summing"):
        PositionTable(Summing(), [CALL], 8, 8, "same")
