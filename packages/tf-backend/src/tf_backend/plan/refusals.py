"""Why a model cannot be served: everything that would give wrong numbers if it ran, found before anything is built.

In: a model, its observation. Out: refusals, what matters most first. Each names what was found, the module, the line and what to do. What
only follows from another refusal is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from tf_backend.model.quantized import FIELDS, quantization_of
from tf_backend.plan.observe import Observation
from tf_backend.plan.places import place_of_class, place_of_line
from tf_backend.plan.schema import Refusal

REMEDY = "Serve it with `--model-impl vllm`, if vLLM has an implementation of its own."
FAILS = "Correct the values in config.json, if transformers fails with them too."


def kind_refusals(model: PreTrainedModel) -> Iterator[Refusal]:
    """Kinds of models that are not served yet, told by structure and config: they are not looked into any further."""
    config = model.config
    name = type(model).__name__
    place = place_of_class(type(model))
    parts = _parts(model)
    if parts and not _takes_text_alone(model):
        yield Refusal(f"`{name}` is a multimodal model ({parts}), which is not served yet", "", place, REMEDY)
    elif config.get_text_config() is not config:
        yield Refusal(f"`{name}` is made of several models ({parts}), which is not served yet", "", place, REMEDY)
    elif getattr(config, "is_encoder_decoder", False):
        yield Refusal(f"`{name}` is an encoder-decoder model, which is not served yet", "", place, REMEDY)
    elif model.get_output_embeddings() is None:
        yield Refusal(f"`{name}` has no language-model head: pooling models are not served yet", "", place, REMEDY)


def option_refusals(model: PreTrainedModel) -> Iterator[Refusal]:
    """How the checkpoint is stored, and what the engine takes the model for by its config."""
    name = type(model).__name__
    place = place_of_class(type(model))
    quantization = quantization_of({field: getattr(model.config, field, None) for field in FIELDS})
    if quantization is not None:
        yield quantization.refusal(name, place)
    positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < 1:
        yield Refusal(f"`{name}` takes sequences of at most {positions} tokens by its config", "", place, REMEDY)
    sections = _position_streams(getattr(model.config, "rope_parameters", None))
    if sections:
        yield Refusal(
            f"`{name}` has `{sections}` in its config, by which the engine counts positions in several streams; not served yet",
            "",
            place,
            REMEDY,
        )


_STREAMS = ("mrope_section", "xdrope_section")
"""Names by which the engine takes a rotary embedding to be one of several streams of positions."""


def _position_streams(parameters: object) -> str:
    """Which of `_STREAMS` the rotary parameters hold, of the model or of a kind of layers; "" for none."""
    if not isinstance(parameters, dict):
        return ""
    own = next((name for name in _STREAMS if name in parameters), "")
    return own or next((found for value in parameters.values() if (found := _position_streams(value))), "")


def _parts(model: PreTrainedModel) -> str:
    """Names of the configs within the config, such as ``text_config, vision_config``."""
    return ", ".join(key for key in model.config.sub_configs if getattr(model.config, key, None) is not None)


def _takes_text_alone(model: PreTrainedModel) -> bool:
    modalities = model.input_modalities
    return set([modalities] if isinstance(modalities, str) else modalities) <= {"text"}


def mixing_refusals(model: PreTrainedModel, seen: Observation, blocks: tuple[str, ...] = ()) -> Iterator[Refusal]:
    """Classes that mix tokens outside attention; not inside `blocks`, which are refused already."""
    classes: set[type[nn.Module]] = set()
    for mixing in seen.mixing:
        name = _owner(model, mixing.module)
        cls = type(model.get_submodule(name))
        if cls in classes or _is_inside(name, blocks):
            continue
        classes.add(cls)
        yield Refusal(
            f"`{cls.__name__}` mixes tokens outside the attention interface: {mixing.why} (`{mixing.op}`). Run in the engine it "
            "would mix requests, or lose the state that it carries from token to token; recurrent layers and attention written "
            "out by hand are not served yet",
            name,
            mixing.place or place_of_class(cls),
            REMEDY,
        )


def failure_refusals(model: PreTrainedModel, seen: Observation) -> Iterator[Refusal]:
    """That the run on meta ended early."""
    if seen.failure is None:
        return
    failure = seen.failure
    owner = model.get_submodule(failure.module)
    first_line = str(failure.error).split("\n", 1)[0][:200]
    fails = "cannot be followed without data" if failure.lacks_data else "fails when it runs"
    yield Refusal(
        f"`{type(owner).__name__}` {fails}: {type(failure.error).__name__}: {first_line}",
        failure.module,
        place_of_line(failure.python_module or type(owner).__module__, failure.file, failure.line),
        REMEDY if failure.lacks_data else FAILS,
    )


def layer_refusals(model: PreTrainedModel, layers: str, seen: Observation) -> Iterator[Refusal]:
    """Decoder layers that never call the attention interface."""
    if not layers:
        yield Refusal(
            f"`{type(model).__name__}` has no list of decoder layers that call the attention interface",
            "",
            place_of_class(type(model)),
            REMEDY,
        )
        return
    calling = {call.module for call in seen.attention}
    for index, layer in enumerate(model.get_submodule(layers).children()):
        prefix = f"{layers}.{index}"
        if not any(name == prefix or name.startswith(f"{prefix}.") for name in calling):
            yield Refusal(
                f"`{type(layer).__name__}` {index} does not call the attention interface",
                prefix,
                place_of_class(type(layer)),
                REMEDY,
            )
            return


def _owner(model: nn.Module, name: str) -> str:
    """The module itself, or the nearest above it that is not torch's own: the one whose author wrote the line."""
    while name and type(model.get_submodule(name)).__module__.startswith("torch."):
        name = name.rpartition(".")[0]
    return name


def _is_inside(name: str, blocks: tuple[str, ...]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in blocks)
