"""Messages of the errors: one paragraph, with what was found, what was expected and a remedy."""

from __future__ import annotations

import pickle

import pytest
from tf_backend import errors
from tf_backend.plan.schema import Place, Refusal

FIRST = Refusal(
    "experts drop tokens", "model.layers.0.mlp", Place("transformers.models.toy.modeling_toy", 9), "Ask us."
)
SECOND = Refusal("no state is kept", "model.layers.1.mixer", None, "Use vLLM's own model.")


def test_refused_model_lists_every_reason() -> None:
    text = str(errors.ModelRefused([FIRST, SECOND], architecture="ToyForCausalLM"))
    assert text == (
        "ToyForCausalLM cannot be served, for 2 reasons: (1) experts drop tokens in `model.layers.0.mlp` "
        "(transformers.models.toy.modeling_toy, line 9). Ask us. (2) no state is kept in `model.layers.1.mixer`. "
        "Use vLLM's own model."
    )


def test_one_reason_is_not_numbered() -> None:
    assert str(errors.ModelRefused([SECOND])).startswith("the model cannot be served: no state is kept in")


def test_a_refusal_without_a_reason_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="at least one refusal"):
        errors.ModelRefused([])


def test_checkpoint_error_names_file_tensor_and_shapes() -> None:
    error = errors.CheckpointError(
        "wrong shape", file="model.safetensors", tensor="lm_head.weight", found=(8, 4), expected=(16, 4)
    )
    assert str(error) == (
        "checkpoint: wrong shape, tensor `lm_head.weight`, file model.safetensors, found [8, 4], expected [16, 4]. "
        "Download the checkpoint again, or check that config.json belongs to these weights."
    )


def test_capability_mismatch_names_the_fields() -> None:
    text = str(errors.CapabilityMismatch("a", "b", {"vllm_version": ("1", "2")}))
    assert "vllm_version: planned '1', met '2'" in text


def test_missing_engine_names_both_builds() -> None:
    text = str(errors.EngineMissing("serving"))
    for part in ("serving needs", "tf-backend[cuda]", "uv sync", "tf-backend[cpu]", "CPU wheels"):
        assert part in text


@pytest.mark.parametrize(
    "error",
    [
        errors.ModelRefused([FIRST], architecture="Toy"),
        errors.CheckpointError("cut short", file="a", tensor="b", found=3, expected=4, remedy="Again."),
        errors.ConfigError("no config."),
        errors.EngineMissing("the demo"),
        errors.WeightsMissing("gguf"),
        errors.CapabilityMismatch("a", "b", {"platform": ("cpu", "cuda")}),
        errors.OptionRefused("no."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_processes_and_are_one_paragraph(error: errors.TfBackendError) -> None:
    assert isinstance(error, errors.TfBackendError)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert "\n" not in str(error)


def test_every_error_is_public() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == set(errors.__all__)
