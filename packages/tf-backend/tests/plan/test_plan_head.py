"""What lies between the last hidden state and the logits is read from the traced head, or refused with the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tf_backend.model.head import run_steps
from tf_backend.model.stage import absent_modules
from tf_backend.plan.planner import Planned
from tf_backend.plan.schema import HeadPlan, HeadStep, Parallel, Plan, Refusal
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

Plans = Callable[..., Plan]


def head(plan: Plan) -> HeadPlan:
    assert plan.refusals == ()
    assert plan.head is not None
    return plan.head


def test_untied(plan_of: Plans) -> None:
    found = head(plan_of("llama"))
    assert (found.before, found.after) == ((), ())
    linear = found.linear
    assert (linear.name, linear.num_embeddings, linear.embedding_dim, linear.bias) == ("lm_head", 384, 128, False)
    assert linear.tied_to is None
    assert found.place is not None
    assert found.place.module == "transformers.models.llama.modeling_llama"


@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "smollm3"])
def test_tied_heads_are_loaded_from_the_embedding(name: str, plan_of: Plans) -> None:
    plan = plan_of(name)
    assert head(plan).linear.tied_to == "model.embed_tokens"
    assert [rule.source for rule in plan.weights if rule.target == "lm_head.weight"] == ["model.embed_tokens.weight"]


def test_a_head_tied_to_a_scaled_embedding_gets_a_copy(plan_of: Plans) -> None:
    plan = plan_of("gemma2")
    assert head(plan).linear.tied_to is None
    targets = [rule.target for rule in plan.weights if rule.source == "model.embed_tokens.weight"]
    assert targets == ["model.embed_tokens.weight", "lm_head.weight"]


def test_soft_cap(plan_of: Plans) -> None:
    assert head(plan_of("gemma2")).after == (
        HeadStep("div", ("x", 12.0)),
        HeadStep("tanh", ("x",)),
        HeadStep("mul", ("x", 12.0)),
    )


def test_scale(plan_of: Plans) -> None:
    assert head(plan_of("granite")).after == (HeadStep("div", ("x", 0.5)),)
    assert head(plan_of("cohere", logit_scale=0.25)).after == (HeadStep("mul", ("x", 0.25)),)


def test_bias(plan_of: Plans) -> None:
    plan = plan_of("phi")
    assert head(plan).linear.bias
    assert head(plan).linear.tied_to is None
    assert "lm_head.bias" in {rule.target for rule in plan.weights}


def test_a_tied_head_keeps_its_bias(plan_of: Plans) -> None:
    plan = plan_of("phi", tie_word_embeddings=True)
    assert head(plan).linear.bias
    assert head(plan).linear.tied_to == "model.embed_tokens"
    targets = {rule.target for rule in plan.weights}
    assert {"lm_head.bias", "lm_head.weight"} <= targets


def test_the_decoder_is_what_the_head_calls(plan_of: Plans) -> None:
    plan = plan_of("opt", ffn_dim=192, word_embed_proj_dim=128)
    assert plan.refusals == ()
    assert (plan.base, plan.layers) == ("model.decoder", "model.decoder.layers")


class Head(LlamaForCausalLM):
    """A llama whose head does something more; `after` and `before` are what it does."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> CausalLMOutput:
        output = self.model(input_ids=input_ids, position_ids=position_ids, **self.passed(input_ids), **kwargs)
        return CausalLMOutput(logits=self.after(self.lm_head(self.before(self.picked(output)))))

    def passed(self, input_ids: torch.Tensor) -> dict[str, Any]:
        return {}

    def picked(self, output: Any) -> torch.Tensor:
        return output.last_hidden_state

    def before(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def after(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


class Normal(Head):
    def before(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 - (hidden * 3.0).contiguous()[:, 0:, :]

    def after(self, logits: torch.Tensor) -> torch.Tensor:
        return -logits.float()


class Sigmoid(Head):
    def after(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(logits)


class Flipped(Head):
    def after(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.flip(-1)


class SelfProduct(Head):
    def after(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * logits


class Residual(Head):
    def before(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.model.norm.weight


class Renormed(Head):
    def before(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.norm(hidden)


class Transform(nn.Module):
    """Dense, activation, norm."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(128, 128, device="meta")
        self.norm = nn.LayerNorm(128, device="meta")

    def forward(self, hidden: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        return self.norm(torch.tanh(self.dense(hidden)))


class Summing(Transform):
    def forward(self, hidden: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        return self.norm(self.dense(hidden)).cumsum(1)


class Flattening(Transform):
    def forward(self, hidden: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        return self.norm(self.dense(hidden)).flatten(0, 1)


class Transformed(Head):
    def before(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.transform(hidden * 2.0)


class TransformedWithMore(Head):
    def before(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.transform(hidden, other=hidden)


class TransformedAfter(Head):
    def after(self, logits: torch.Tensor) -> torch.Tensor:
        return self.transform(logits[..., :128])


class LowPrecision(Head):
    def after(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.to(torch.float16)


class InPlace(Head):
    def after(self, logits: torch.Tensor) -> torch.Tensor:
        logits[..., 0] = 0.0
        return logits


class Rebiased(Head):
    def after(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.add(logits, 1.0, alpha=2)


class FirstLayer(Head):
    def passed(self, input_ids: torch.Tensor) -> dict[str, Any]:
        return {"output_hidden_states": True}

    def picked(self, output: Any) -> torch.Tensor:
        return output.hidden_states[0]


class Masked(Head):
    def passed(self, input_ids: torch.Tensor) -> dict[str, Any]:
        return {"inputs_embeds": None, "attention_mask": torch.ones_like(input_ids)}


class Repeating(LlamaModel):
    """A decoder with an argument of its own."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, times: int = 2, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


class Twice(Head):
    def passed(self, input_ids: torch.Tensor) -> dict[str, Any]:
        return {"times": 2}


class Thrice(Head):
    def passed(self, input_ids: torch.Tensor) -> dict[str, Any]:
        return {"times": 3}


class TwiceAsFloat(Head):
    def passed(self, input_ids: torch.Tensor) -> dict[str, Any]:
        return {"times": 2.0}


class EmbedsFirst(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> CausalLMOutput:
        output = self.model(inputs_embeds=self.model.embed_tokens(input_ids) * 2, position_ids=position_ids)
        return CausalLMOutput(logits=self.lm_head(output.last_hidden_state))


class Shifted(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> CausalLMOutput:
        output = self.model(input_ids=input_ids, position_ids=position_ids + 1)
        return CausalLMOutput(logits=self.lm_head(output.last_hidden_state))


class NoLogits(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> tuple[torch.Tensor]:
        return (self.lm_head(self.model(input_ids=input_ids, position_ids=position_ids).last_hidden_state),)


def as_class(model: PreTrainedModel, cls: type[PreTrainedModel]) -> PreTrainedModel:
    model.__class__ = cls
    return model


def test_arithmetic_on_either_side_is_carried_over(
    model_of: Callable[..., PreTrainedModel], planned: Callable[..., Planned]
) -> None:
    found = head(planned(as_class(model_of("llama"), Normal)).plan)
    assert found.before == (HeadStep("mul", ("x", 3.0)), HeadStep("sub", (2, "x")))
    assert found.after == (HeadStep("cast_float32", ("x",)), HeadStep("neg", ("x",)))


@pytest.mark.parametrize(
    ("cls", "word", "text"),
    [
        (Sigmoid, "sigmoid", "self.lm_head("),
        (Flipped, "flip", "self.lm_head("),
        (SelfProduct, "mul", "self.lm_head("),
        (Residual, "add", "self.lm_head("),
        (Renormed, "`model.norm`", "self.lm_head("),
        (LowPrecision, "torch.float16", "self.lm_head("),
        (InPlace, "in place", None),
        (Rebiased, "add", "self.lm_head("),
        (FirstLayer, "hidden_states", None),
        (EmbedsFirst, "`inputs_embeds`", "self.model(inputs_embeds"),
        (Shifted, "`position_ids`", "position_ids + 1"),
        (Masked, "`attention_mask`", "self.model("),
        (NoLogits, "returns no `logits`", None),
    ],
)
def test_what_cannot_be_carried_over_is_refused_with_its_line(
    cls: type[PreTrainedModel],
    word: str,
    text: str | None,
    model_of: Callable[..., PreTrainedModel],
    planned: Callable[..., Planned],
) -> None:
    plan = planned(as_class(model_of("llama"), cls)).plan
    (refusal,) = plan.refusals
    assert isinstance(refusal, Refusal)
    assert word in refusal.reason
    assert cls.__name__ in refusal.reason
    assert plan.head is None
    assert refusal.place is not None
    if text is not None:
        assert text in refusal.place.text
    assert str(refusal).endswith("if vLLM has an implementation of its own.")


def test_a_head_that_is_no_linear(model_of: Callable[..., PreTrainedModel], planned: Callable[..., Planned]) -> None:
    model = model_of("llama")

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model.lm_head = Scaled(128, 384, bias=False, device="meta")
    (refusal,) = planned(model).plan.refusals
    assert "no plain linear" in refusal.reason


def _with_transform(model: PreTrainedModel, cls: type[PreTrainedModel], transform: nn.Module) -> PreTrainedModel:
    model.transform = transform
    return as_class(model, cls)


def test_modules_before_the_projection_are_called(
    model_of: Callable[..., PreTrainedModel], planned: Callable[..., Planned]
) -> None:
    plan = planned(_with_transform(model_of("llama"), Transformed, Transform())).plan
    found = head(plan)
    assert found.before == (HeadStep("mul", ("x", 2.0)), HeadStep("call", ("x",), "transform"))
    assert found.modules == ("transform",)
    assert [module.action for module in plan.modules if module.name == "transform.dense"] == ["replace"]
    targets = {rule.target for rule in plan.weights}
    assert {"transform.dense.weight", "transform.norm.weight", "transform.norm.bias"} <= targets
    module = Transform().to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    hidden = torch.randn(5, 128)
    assert torch.equal(run_steps(found.before, hidden, {"transform": module}), module(2 * hidden))


def test_modules_of_the_head_are_on_the_last_stage_alone(
    model_of: Callable[..., PreTrainedModel], planned: Callable[..., Planned]
) -> None:
    plan = planned(_with_transform(model_of("llama"), Transformed, Transform()), parallel=Parallel(pipeline=2)).plan
    assert plan.refusals == ()
    assert plan.stages is not None
    assert "transform" in absent_modules(plan.stages, plan.layers, 0)
    assert "transform" not in absent_modules(plan.stages, plan.layers, 1)


@pytest.mark.parametrize(
    ("cls", "transform", "words"),
    [
        (
            TransformedWithMore,
            Transform,
            "calls `transform` between the decoder and the logits, with more than one value",
        ),
        (TransformedAfter, Transform, "its logits come from `transform`"),
        (Transformed, Summing, "it is ordered along the token axis (`cumsum`)"),
        (Transformed, Flattening, "calls `transform` between the decoder and the logits, which gives no one value"),
    ],
)
def test_modules_that_cannot_be_carried_over(
    cls: type[PreTrainedModel],
    transform: type[nn.Module],
    words: str,
    model_of: Callable[..., PreTrainedModel],
    planned: Callable[..., Planned],
) -> None:
    (refusal,) = planned(_with_transform(model_of("llama"), cls, transform())).plan.refusals
    assert words in refusal.reason


@pytest.mark.parametrize(("cls", "is_served"), [(Twice, True), (Thrice, False), (TwiceAsFloat, False)])
def test_an_argument_may_be_passed_that_the_decoder_takes_by_default(
    cls: type[PreTrainedModel],
    is_served: bool,
    model_of: Callable[..., PreTrainedModel],
    planned: Callable[..., Planned],
) -> None:
    model = as_class(model_of("llama"), cls)
    model.model.__class__ = Repeating
    plan = planned(model).plan
    assert plan.is_served is is_served
    assert is_served or "it passes `times` to `model`" in plan.refusals[0].reason
