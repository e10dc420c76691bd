"""The attention seam: from a spec to the layer's arguments, and from transformers' layout to the engine's and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from vllm_layers_bridge.errors import NotBuildable, WrongLayout
from vllm_layers_bridge.seams.attention import (
    CHILD,
    INTERFACE,
    attach_attention,
    attention_interface,
    register_interface,
)
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import AttentionSpec

PREFIX = "model.layers.3.self_attn.engine_attention"
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, value_head_dim=32, scale=0.25)


class OverTokens(nn.Module):
    """Causal attention in the engine's layout: [tokens, heads * head_dim] in and out."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        tokens = query.shape[0]
        q, k, v = (part.view(tokens, -1, 8).transpose(0, 1) for part in (query, key, value))
        output = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5, enable_gqa=True)
        return output.transpose(0, 1).reshape(tokens, -1)


class Owner(nn.Module):
    pass


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_layouts_are_transformers_in_front_and_the_engines_behind() -> None:
    owner = Owner()
    owner.add_module(CHILD, OverTokens())
    query, key, value = drawn(1, 4, 6, 8, seed=0), drawn(1, 2, 6, 8, seed=1), drawn(1, 2, 6, 8, seed=2)
    output, weights = attention_interface(owner, query, key, value, None, scaling=0.5, sliding_window=None)
    expected = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.5, enable_gqa=True
    ).transpose(1, 2)
    assert weights is None
    assert output.shape == (1, 6, 4, 8)
    torch.testing.assert_close(output, expected)


def test_value_heads_may_have_a_width_of_their_own() -> None:
    class Values(nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            assert (query.shape, key.shape, value.shape) == ((6, 32), (6, 32), (6, 20))
            return value

    owner = Owner()
    owner.add_module(CHILD, Values())
    value = drawn(1, 4, 6, 5, seed=2)
    output, _ = attention_interface(owner, drawn(1, 4, 6, 8, seed=0), drawn(1, 4, 6, 8, seed=1), value)
    torch.testing.assert_close(output, value.transpose(1, 2))


@pytest.mark.parametrize(("head_dim", "value_head_dim"), [(8, 5), (5, 8), (6, 6)])
def test_heads_narrower_than_the_layers_are_padded_and_the_output_is_cut(head_dim: int, value_head_dim: int) -> None:
    layer = OverTokens()
    layer.head_size = 8
    owner = Owner()
    owner.add_module(CHILD, layer)
    query, key = drawn(1, 4, 6, head_dim, seed=0), drawn(1, 2, 6, head_dim, seed=1)
    value = drawn(1, 2, 6, value_head_dim, seed=2)
    output, _ = attention_interface(owner, query, key, value)
    expected = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.5, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(
    ("query", "key"),
    [((2, 4, 6, 8), (2, 4, 6, 8)), ((1, 4, 6, 8), (1, 4, 9, 8)), ((4, 6, 8), (4, 6, 8))],
    ids=["two-rows", "keys-of-a-cache", "without-rows"],
)
def test_another_layout_is_an_error_and_not_another_result(query: tuple[int, ...], key: tuple[int, ...]) -> None:
    owner = Owner()
    owner.add_module(CHILD, OverTokens())
    with pytest.raises(WrongLayout, match=r"`Owner` calls attention with query .* expected \[1, heads, tokens"):
        attention_interface(owner, torch.zeros(query), torch.zeros(key), torch.zeros(key))


def test_the_leaf_has_the_shapes_of_the_interface() -> None:
    output, weights = attention_leaf(
        Owner(), *(torch.empty(1, heads, 6, width, device="meta") for heads, width in ((4, 8), (2, 8), (2, 5)))
    )
    assert (output.shape, output.device.type, weights) == ((1, 6, 4, 5), "meta", None)


def test_the_interface_is_registered_with_transformers_and_gets_no_mask() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register_interface()
    assert ALL_ATTENTION_FUNCTIONS[INTERFACE] is attention_interface
    assert INTERFACE not in ALL_MASK_ATTENTION_FUNCTIONS


# With vLLM


class FakeAttention(nn.Module):
    """Keeps what it was built with."""

    def __init__(self, *, per_layer_sliding_window: int | None, cache_config: Any, **arguments: Any) -> None:
        super().__init__()
        self.sliding_window = per_layer_sliding_window
        if per_layer_sliding_window is None and cache_config is not None:
            self.sliding_window = cache_config.sliding_window
        self.arguments = arguments


@dataclasses.dataclass(frozen=True)
class FakeCacheConfig:
    sliding_window: int | None


def built(spec: AttentionSpec, layer: type[nn.Module], *, ranks: int = 1, window: int | None = None) -> dict[str, Any]:
    """What the layer was built with, as its arguments and its window."""
    import vllm.model_executor.layers.attention as module

    module.Attention = layer
    owner = Owner()
    made = attach_attention(
        owner, spec, PREFIX, tensor_parallel=ranks, cache_config=FakeCacheConfig(window), quant_config="quant"
    )
    assert getattr(owner, CHILD) is made
    return {**made.arguments, "window": made.sliding_window}


@pytest.mark.engine
def test_spec_becomes_the_layers_arguments(in_vllm: Callable[..., Any]) -> None:
    expected = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 32,
        "scale": 0.25,
        "logits_soft_cap": None,
        "quant_config": "quant",
        "prefix": PREFIX,
        "window": None,
    }
    assert in_vllm(built, SPEC, FakeAttention) == expected
    other = dataclasses_like(SPEC, value_head_dim=16, sliding_window=9, logits_soft_cap=30.0)
    changed = {"window": 9, "logits_soft_cap": 30.0}
    assert in_vllm(built, other, FakeAttention) == {**expected, **changed}


def dataclasses_like(spec: AttentionSpec, **changes: Any) -> AttentionSpec:
    import msgspec

    return msgspec.structs.replace(spec, **changes)


@pytest.mark.engine
def test_heads_are_those_of_one_rank(in_vllm: Callable[..., Any]) -> None:
    def heads(ranks: int) -> tuple[int, int]:
        arguments = built(SPEC, FakeAttention, ranks=ranks)
        return arguments["num_heads"], arguments["num_kv_heads"]

    assert [in_vllm(heads, ranks) for ranks in (1, 2, 4)] == [(4, 2), (2, 1), (1, 1)]
    with pytest.raises(Exception, match="4 heads cannot be split over 3 ranks"):
        in_vllm(heads, 3)


@pytest.mark.engine
@pytest.mark.parametrize(("head_dim", "value_head_dim", "kept"), [(64, 32, 64), (32, 64, 64)])
def test_keys_and_values_are_kept_at_the_width_of_the_wider(
    in_vllm: Callable[..., Any], head_dim: int, value_head_dim: int, kept: int
) -> None:
    spec = dataclasses_like(SPEC, head_dim=head_dim, value_head_dim=value_head_dim)
    assert in_vllm(built, spec, FakeAttention)["head_size"] == kept


def with_sinks(ranks: int) -> tuple[Any, ...]:
    import vllm.distributed
    import vllm.model_executor.layers.attention as module

    module.Attention = FakeAttention
    owner = Owner()
    owner.register_parameter("sink", nn.Parameter(torch.empty(4, device="meta")))
    spec = dataclasses_like(SPEC, sinks="sink")
    layer = attach_attention(owner, spec, PREFIX, tensor_parallel=ranks, cache_config=None, quant_config=None)
    vllm.distributed.get_tensor_model_parallel_rank = lambda: ranks - 1
    owner.sink.weight_loader(owner.sink, torch.arange(4.0))
    return layer.arguments["sinks"] is owner.sink, owner.sink.tolist(), [name for name, _ in owner.named_parameters()]


@pytest.mark.engine
def test_sinks_are_the_modules_own_parameter_for_the_heads_of_this_rank(in_vllm: Callable[..., Any]) -> None:
    assert in_vllm(with_sinks, 1) == (True, [0.0, 1.0, 2.0, 3.0], ["sink"])
    assert in_vllm(with_sinks, 2) == (True, [2.0, 3.0], ["sink"])


@pytest.mark.engine
def test_a_window_of_the_whole_model_gives_way_to_the_layers_own(in_vllm: Callable[..., Any]) -> None:
    assert in_vllm(lambda: built(SPEC, FakeAttention, window=64))["window"] is None
    windowed = dataclasses_like(SPEC, sliding_window=16)
    assert in_vllm(lambda: built(windowed, FakeAttention, window=64))["window"] == 16


class IgnoresWindow(FakeAttention):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.sliding_window = None


class TakesNothing(FakeAttention):
    def __init__(self, **arguments: Any) -> None:
        raise ValueError("no backend takes a head size of 32")


def refusal(spec: AttentionSpec, layer: type[nn.Module]) -> str:
    try:
        built(spec, layer)
    except NotBuildable as error:
        return str(error)
    return ""


@pytest.mark.engine
def test_a_layer_with_another_window_is_refused(in_vllm: Callable[..., Any]) -> None:
    windowed = dataclasses_like(SPEC, sliding_window=16)
    assert in_vllm(refusal, windowed, IgnoresWindow) == (
        f"vLLM gave `{PREFIX}` a window of None; the model's own is 16."
    )
    reason = in_vllm(refusal, SPEC, TakesNothing)
    assert PREFIX in reason
    assert "no backend takes a head size of 32" in reason


class PlainModel:
    """A model config of which the layer learns the type, and that nothing is special."""

    dtype = torch.float32

    def __getattr__(self, name: str) -> None:
        return None


def real(spec: AttentionSpec, window: int | None) -> tuple[Any, ...]:
    from vllm.config import CacheConfig, get_current_vllm_config

    config = get_current_vllm_config()
    config.model_config = PlainModel()
    cache = CacheConfig(block_size=16)
    cache.sliding_window = window
    layer = attach_attention(Owner(), spec, PREFIX, tensor_parallel=1, cache_config=cache, quant_config=None)
    return (
        type(layer).__name__,
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_size,
        layer.sliding_window,
        layer.impl.scale,
        layer.impl.logits_soft_cap,
        cache.sliding_window,
    )


@pytest.mark.engine
def test_vllms_own_layer_holds_what_the_spec_says(in_vllm: Callable[..., Any]) -> None:
    assert in_vllm(real, SPEC, 64) == ("Attention", 4, 2, 32, None, 0.25, 0, 64)
    other = dataclasses_like(SPEC, sliding_window=16, logits_soft_cap=30.0)
    assert in_vllm(real, other, 64) == ("Attention", 4, 2, 32, 16, 0.25, 30.0, 64)


@pytest.mark.engine
def test_head_sizes_that_the_platform_has_no_kernel_for_are_refused(in_vllm: Callable[..., Any]) -> None:
    odd = dataclasses_like(SPEC, head_dim=33, value_head_dim=33)

    def refused() -> str:
        try:
            real(odd, None)
        except NotBuildable as error:
            return str(error)
        return ""

    assert in_vllm(refused) == f"vLLM's CPU_ATTN attention, given to `{PREFIX}`, takes no heads of 33."
