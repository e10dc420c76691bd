"""Why a model cannot be served: everything that would give wrong numbers if it ran, found before anything is built.

In: a model, its observation. Out: refusals. Each names what was found, the module, the line and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator

import moe_runner
from torch import nn
from transformers import PreTrainedModel

from tf_backend.plan.observe import Observation
from tf_backend.plan.places import place_of_class, place_of_line
from tf_backend.plan.schema import Parallel, Refusal

_REMEDY = "Serve it with `--model-impl vllm`, if vLLM has an implementation of its own."


def kind_refusals(model: PreTrainedModel, parallel: Parallel) -> Iterator[Refusal]:
    """Kinds of models and options that are not served yet, told by structure and config."""
    config = model.config
    name = type(model).__name__
    place = place_of_class(type(model))
    if getattr(config, "quantization_config", None) is not None:
        yield Refusal(
            f"`{name}` has a quantized checkpoint, which is not served yet", "", place, "Use one that is not quantized."
        )
    if config.get_text_config() is not config:
        yield Refusal(f"`{name}` is a multimodal model, which is not served yet", "", place, _REMEDY)
    if getattr(config, "is_encoder_decoder", False):
        yield Refusal(f"`{name}` is an encoder-decoder model, which is not served yet", "", place, _REMEDY)
    if model.get_output_embeddings() is None:
        yield Refusal(f"`{name}` has no language-model head: pooling models are not served yet", "", place, _REMEDY)
    if parallel != Parallel():
        found = f"tensor parallel {parallel.tensor}, pipeline parallel {parallel.pipeline}"
        yield Refusal(
            f"`{name}` is asked for on several ranks ({found}), which is not served yet", "", place, "Set both to 1."
        )


def expert_refusals(model: PreTrainedModel, seen: Observation) -> Iterator[Refusal]:
    """Sparse mixture-of-experts blocks, one refusal per class."""
    classes: set[type[nn.Module]] = set()
    for name, module in model.named_modules():
        call = seen.calls.get(name)
        block = moe_runner.recognize(module, call.args if call else (), call.kwargs if call else {})
        if block is None or type(module) in classes:
            continue
        classes.add(type(module))
        yield Refusal(
            f"`{type(module).__name__}` is a sparse mixture-of-experts block ({block.describe()}), which is not served yet",
            name,
            place_of_class(type(module)),
            _REMEDY,
        )


def run_refusals(model: PreTrainedModel, seen: Observation) -> Iterator[Refusal]:
    """What the run on meta showed: that it cannot be followed, or that tokens mix outside attention."""
    if seen.failure is not None:
        failure = seen.failure
        owner = model.get_submodule(failure.module)
        place = place_of_line(type(owner).__module__, failure.file, failure.line)
        first_line = str(failure.error).split("\n", 1)[0][:200]
        yield Refusal(
            f"`{type(owner).__name__}` cannot be followed without data: {type(failure.error).__name__}: {first_line}",
            failure.module,
            place,
            _REMEDY,
        )
    classes: set[type[nn.Module]] = set()
    for mixing in seen.mixing:
        cls = type(model.get_submodule(mixing.module))
        if cls in classes:
            continue
        classes.add(cls)
        yield Refusal(
            f"`{cls.__name__}` mixes tokens outside the attention interface: {mixing.why} (`{mixing.op}`). Run in the engine it "
            "would mix requests, or lose the state that it carries from token to token; recurrent layers and attention written "
            "out by hand are not served yet",
            mixing.module,
            place_of_class(cls),
            _REMEDY,
        )


def layer_refusals(model: PreTrainedModel, layers: str, seen: Observation) -> Iterator[Refusal]:
    """Decoder layers that never call the attention interface."""
    if not layers:
        if seen.failure is None:
            yield Refusal(
                f"`{type(model).__name__}` has no list of decoder layers that call the attention interface",
                "",
                place_of_class(type(model)),
                _REMEDY,
            )
        return
    calling = {call.module for call in seen.attention}
    for index, layer in enumerate(model.get_submodule(layers).children()):
        prefix = f"{layers}.{index}"
        if seen.failure is None and not any(name == prefix or name.startswith(f"{prefix}.") for name in calling):
            yield Refusal(
                f"`{type(layer).__name__}` {index} does not call the attention interface",
                prefix,
                place_of_class(type(layer)),
                _REMEDY,
            )
            return
