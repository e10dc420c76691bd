"""Pipeline stages: each has its own modules alone, together they are the whole, and what else would have to cross is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tf_backend.model import stage as stage_module
from tf_backend.model.stage import AbsentLayer, Passage, absent_modules, lies_in, make_stage, unmake_stage
from tf_backend.plan import Parallel
from tf_backend.plan.planner import Planned
from tf_backend.plan.schema import Plan, StagesPlan
from tf_backend.plan.stages import even_split
from tf_backend.weights.checkpoint import weight_loader
from tf_tools.checkpoints import build_model
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

Models = Callable[..., PreTrainedModel]
Plans = Callable[..., Planned]

THREE = Parallel(pipeline=3)
LAYERS: Mapping[str, Any] = {"num_hidden_layers": 3}
GPT2 = {**LAYERS, "n_embd": 128, "n_head": 4, "n_positions": 256}

# What each has of its own: a scale or a norm of the embeddings, position embeddings, tied heads, biases, several calls of attention.
KINDS: dict[str, Mapping[str, Any]] = {
    "llama": LAYERS,
    "llama-tied": LAYERS,
    "smollm3": {"num_hidden_layers": 4},
    "gemma": {**LAYERS, "head_dim": 32},
    "granite": LAYERS,
    "phi": LAYERS,
    "glm4": {**LAYERS, "head_dim": 32, "pad_token_id": 0},
    "gpt2": GPT2,
    "gpt_neox": LAYERS,
    "opt": LAYERS,
    "diffllama": LAYERS,
}


def run_stages(model: PreTrainedModel, plan: Plan, tokens: torch.Tensor) -> torch.Tensor:
    """The last hidden states, hidden states handed from stage to stage."""
    assert plan.stages is not None
    base = model.get_submodule(plan.base)
    positions = torch.arange(tokens.shape[1])[None]
    hidden: torch.Tensor | None = None
    for rank in range(len(plan.stages.bounds) - 1):
        passage = Passage()
        passage.received = hidden
        gone = make_stage(model, plan.stages, plan.layers, rank, passage)
        given = {"input_ids": tokens} if hidden is None else {"inputs_embeds": hidden}
        with torch.no_grad():
            output = base(**given, position_ids=positions, use_cache=False)
        is_last = rank == len(plan.stages.bounds) - 2
        hidden = output.last_hidden_state if is_last else passage.sent
        unmake_stage(model, gone)
    assert hidden is not None
    return hidden


def whole_and_staged(name: str, overrides: Mapping[str, Any], plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    model = build_model(name, overrides=overrides)
    tokens = torch.arange(5, 12)[None]
    with torch.no_grad():
        whole = model.get_submodule(plan.base)(
            input_ids=tokens, position_ids=torch.arange(7)[None], use_cache=False
        ).last_hidden_state
    return whole, run_stages(model, plan, tokens)


@pytest.mark.parametrize("name", KINDS)
def test_the_stages_together_are_the_whole(name: str, model_of: Models, planned: Plans) -> None:
    plan = planned(model_of(name, **KINDS[name]), parallel=THREE).plan
    assert plan.refusals == ()
    assert plan.stages is not None
    assert len(plan.stages.bounds) == 4
    whole, staged = whole_and_staged(name, KINDS[name], plan)
    torch.testing.assert_close(staged, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["granite", "gpt2"])
def test_embeddings_that_are_treated_twice_would_show(
    name: str, model_of: Models, planned: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale, or position embeddings, between what a stage receives and its first layer."""
    plan = planned(model_of(name, **KINDS[name]), parallel=THREE).plan
    monkeypatch.setattr(stage_module.LayerBefore, "forward", AbsentLayer.forward)
    whole, staged = whole_and_staged(name, KINDS[name], plan)
    assert float((staged - whole).abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("layers", "stages", "bounds"),
    [
        (4, 2, (0, 2, 4)),
        (5, 2, (0, 3, 5)),
        (10, 4, (0, 2, 5, 8, 10)),
        (7, 3, (0, 2, 5, 7)),
        (8, 3, (0, 3, 6, 8)),
        (1, 2, (0, 1, 1)),
    ],
)
def test_layers_are_dealt_out_as_vllm_does(layers: int, stages: int, bounds: tuple[int, ...]) -> None:
    assert even_split(layers, stages) == bounds


def stages_of(name: str, planned: Plans, model_of: Models, **overrides: Any) -> StagesPlan:
    stages = planned(model_of(name, **overrides), parallel=THREE).plan.stages
    assert stages is not None
    return stages


def test_what_each_stage_does_not_hold(model_of: Models, planned: Plans) -> None:
    stages = stages_of("llama", planned, model_of, num_hidden_layers=3)
    layers = [f"model.layers.{at}" for at in range(3)]
    assert absent_modules(stages, "model.layers", 0) == {*layers[1:], "model.norm", "lm_head"}
    assert absent_modules(stages, "model.layers", 1) == {
        layers[0],
        layers[2],
        "model.norm",
        "lm_head",
        "model.embed_tokens",
    }
    assert absent_modules(stages, "model.layers", 2) == {*layers[:2], "model.embed_tokens"}
    assert (stages.argument, stages.output, stages.width) == (0, None, 128)


def test_a_tied_head_keeps_the_embedding_on_the_last_stage(model_of: Models, planned: Plans) -> None:
    stages = stages_of("llama-tied", planned, model_of, num_hidden_layers=3)
    assert [stages.embedding in absent_modules(stages, "model.layers", rank) for rank in range(3)] == [
        False,
        True,
        False,
    ]


def test_a_stage_has_no_parameters_of_another(model_of: Models, planned: Plans) -> None:
    model = model_of("llama", num_hidden_layers=3)
    stages = planned(model, parallel=THREE).plan.stages
    assert stages is not None
    before = {name for name, _ in model.named_parameters()}
    gone = make_stage(model, stages, "model.layers", 1, Passage())
    held = {name for name, _ in model.named_parameters()}
    assert held == {name for name in before if name.startswith("model.layers.1.")}
    unmake_stage(model, gone)
    assert {name for name, _ in model.named_parameters()} == before


def test_names_that_only_begin_alike_are_not_absent() -> None:
    absent = frozenset({"model.layers.1"})
    assert lies_in("model.layers.1", absent)
    assert lies_in("model.layers.1.mlp.up_proj.weight", absent)
    assert not lies_in("model.layers.11.mlp", absent)
    assert not lies_in("model.layers", absent)


def test_tensors_of_other_stages_are_checked_and_go_nowhere(model_of: Models, planned: Plans) -> None:
    model = model_of("llama", num_hidden_layers=3)
    made = planned(model, parallel=THREE)
    stages = made.plan.stages
    assert stages is not None
    absent = absent_modules(stages, "model.layers", 0)
    loader = weight_loader(made)
    loader.leave_out(rule.target for rule in made.plan.weights if lies_in(rule.target, absent))
    weights = [(rule.source, torch.ones(rule.shape)) for rule in made.plan.weights]
    here = {
        rule.target: torch.nn.Parameter(torch.zeros(rule.shape))
        for rule in made.plan.weights
        if rule.target not in loader.absent
    }
    for target in here.values():
        target.weight_loader = lambda parameter, tensor, *shard: parameter.data.fill_(1)
    loaded = loader.load(weights, here)
    assert loaded == set(here)
    assert not any(name.startswith(("model.layers.1", "model.layers.2", "lm_head", "model.norm")) for name in loaded)
    assert all(float(parameter.detach().min()) == 1 for parameter in here.values())
    with pytest.raises(Exception, match="lacks 1 of"):
        loader.load(weights[:-1], here)


# What else crosses


def reason(model: PreTrainedModel, planned: Plans, **options: Any) -> str:
    (refusal,) = planned(model, parallel=Parallel(pipeline=2), **options).plan.refusals
    return str(refusal)


def share_first_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer adds what the first one made, kept outside of the arguments: a value residual."""
    forward = LlamaDecoderLayer.forward
    kept: dict[str, torch.Tensor] = {}

    def shared(self: LlamaDecoderLayer, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        out = forward(self, hidden_states, **kwargs)
        if self.self_attn.layer_idx == 0:
            kept["first"] = out * 2
        return out + kept["first"]

    monkeypatch.setattr(LlamaDecoderLayer, "forward", shared)


def test_a_value_of_an_earlier_layer(model_of: Models, planned: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    share_first_value(monkeypatch)
    text = reason(model_of("llama"), planned)
    assert "`LlamaDecoderLayer` reads in layer 1 what was made in layer 0 and is not the hidden state (add)" in text
    assert "VLLM_PP_LAYER_PARTITION" in text
    assert "test_plan_stages, line" in text


def test_a_value_that_no_boundary_lies_before(
    model_of: Models, planned: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers 0 and 1 on one stage share what they like."""
    forward = LlamaDecoderLayer.forward
    kept: dict[str, torch.Tensor] = {}

    def shared(self: LlamaDecoderLayer, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        out = forward(self, hidden_states, **kwargs)
        if self.self_attn.layer_idx == 0:
            kept["first"] = out * 2
        return out + kept["first"] if self.self_attn.layer_idx == 1 else out

    monkeypatch.setattr(LlamaDecoderLayer, "forward", shared)
    model = model_of("llama", num_hidden_layers=4)
    assert planned(model, parallel=Parallel(pipeline=2)).plan.refusals == ()
    text = reason(model, planned, split=lambda layers, stages: (0, 1, layers))
    assert "a pipeline boundary before layer 1 would lie between them" in text


def test_embeddings_that_are_read_again(model_of: Models, planned: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaDecoderLayer.forward
    kept: dict[str, torch.Tensor] = {}

    def again(self: LlamaDecoderLayer, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.self_attn.layer_idx == 0:
            kept["embedded"] = hidden_states
        return forward(self, hidden_states, **kwargs) + kept["embedded"]

    monkeypatch.setattr(LlamaDecoderLayer, "forward", again)
    assert "reads in layer 1 what was made before the first layer" in reason(model_of("llama"), planned)


def test_embeddings_that_are_read_after_the_layers(
    model_of: Models, planned: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    embed, norm = LlamaModel.forward, LlamaRMSNorm.forward
    kept: dict[str, Any] = {}

    def forward(self: LlamaModel, input_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        kept["final"] = self.norm
        kwargs["inputs_embeds"] = kept["embedded"] = (
            self.embed_tokens(input_ids) if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
        )
        return embed(self, **kwargs)

    def normed(self: LlamaRMSNorm, hidden_states: torch.Tensor) -> torch.Tensor:
        is_final = self is kept.get("final")
        return norm(self, hidden_states + kept["embedded"] if is_final else hidden_states)

    monkeypatch.setattr(LlamaModel, "forward", forward)
    monkeypatch.setattr(LlamaRMSNorm, "forward", normed)
    assert "reads after the last what was made before the first layer" in reason(model_of("llama"), planned)


def test_streams_beside_the_hidden_state(model_of: Models, planned: Plans) -> None:
    model = model_of(
        "gemma3n_text",
        head_dim=32,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=384,
        num_kv_shared_layers=0,
        laurel_rank=8,
        num_hidden_layers=4,
        intermediate_size=[192] * 4,
        activation_sparsity_pattern=[0.0] * 4,
    )
    assert "its hidden states are (4, 1," in reason(model, planned)


def test_a_decoder_that_changes_what_passes_between_layers(
    model_of: Models, planned: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the second layer is given is not what the first returned."""
    forward = LlamaDecoderLayer.__call__

    def scaled(self: LlamaDecoderLayer, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return forward(self, hidden_states * 2, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "__call__", scaled)
    assert "the next layer is given nothing that it returns" in reason(model_of("llama"), planned)


def test_a_stage_without_a_layer(model_of: Models, planned: Plans) -> None:
    assert "none of its 2 layers" in reason(model_of("llama"), planned, split=lambda *_: (0, 0, 2))


def test_a_stage_that_does_not_run_alone(model_of: Models, planned: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaModel.forward

    def reads_layers(self: LlamaModel, *args: Any, **kwargs: Any) -> Any:
        assert self.layers[1].mlp.training is False
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", reads_layers)
    text = reason(model_of("llama"), planned)
    assert "stage 0 does not run alone: AttributeError" in text
    assert "`mlp`" in text or "'mlp'" in text
