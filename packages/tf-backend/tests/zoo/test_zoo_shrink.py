"""Tiny configs by the meaning of fields."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tf_backend.zoo.plan_level import NotBuildable, tiny_skeleton
from tf_backend.zoo.shrink import tiny_config
from tf_backend.zoo.types import Entry

Get = Callable[[str], Entry]


def test_sizes_of_a_decoder(entry: Get) -> None:
    config = tiny_config(entry("causal/llama"))
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.vocab_size) == (
        128,
        2,
        4,
        384,
    )
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.rms_norm_eps == 0.2, "an eps that is read shows in the numbers"


@pytest.mark.parametrize(("name", "kv_heads"), [("causal/qwen3_moe", 2), ("causal/llama", 4), ("causal/gemma", 4)])
def test_key_value_heads_keep_their_relation_to_query_heads(entry: Get, name: str, kv_heads: int) -> None:
    assert tiny_config(entry(name)).num_key_value_heads == kv_heads


def test_one_layer_of_each_kind_stays(entry: Get) -> None:
    assert set(tiny_config(entry("causal/gemma3_text")).layer_types) == {"sliding_attention", "full_attention"}
    assert len(tiny_config(entry("causal/gemma3_text")).layer_types) == 2
    smollm3 = tiny_config(entry("causal/smollm3"))
    assert (sorted(smollm3.no_rope_layers), smollm3.num_hidden_layers) == ([0, 1], 2)


def test_the_text_part_alone_where_the_class_is_of_that(entry: Get) -> None:
    assert tiny_config(entry("causal/qwen3_5")).model_type == "qwen3_5_text"


def test_parts_are_shrunk_in_layers_and_the_text_part_in_sizes(entry: Get) -> None:
    config = tiny_config(entry("image-text/gemma3"))
    assert (config.text_config.hidden_size, config.text_config.vocab_size) == (128, 384)
    assert config.vision_config.num_hidden_layers == 2


def test_an_encoder_with_a_causal_head_is_told_so(entry: Get) -> None:
    assert tiny_config(entry("causal/bert")).is_decoder
    assert not tiny_config(entry("encoder/bert")).is_decoder


def test_a_type_without_a_default_config_is_not_buildable(entry: Get) -> None:
    with pytest.raises(NotBuildable, match="text_encoder"):
        tiny_skeleton(entry("causal/musicgen"))
