"""A tiny config of any model type, from its default config by the meaning of fields.

In: a model type. Out: a transformers config with two layers or one of each kind of layer, and the sizes in `tf_backend.zoo.sizes`. Only
what changes is given to the config's class, so that it derives the rest anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from tf_backend.zoo.sizes import (
    EPS,
    EPS_VALUE,
    EXCEPTIONS,
    GROUPS,
    HEAD_DIM,
    HEADS,
    KV_COUNTS,
    KV_HEADS,
    LAYER_COUNTS,
    LAYERS,
    ROPE_THETA,
    SIZES,
)
from tf_backend.zoo.types import Entry

MOST_LAYERS = 6
"""Layers that are kept where there are more kinds than that."""


def tiny_config(entry: Entry, *, layers_alone: bool = False) -> PreTrainedConfig:
    """The config of a tiny model of `entry`, its class named in it; raises what the config's class raises.

    Args:
        layers_alone: keep all sizes but the number of layers.
    """
    default: PreTrainedConfig = CONFIG_MAPPING[entry.model_type]()
    wanted = getattr(getattr(transformers, entry.architecture, None), "config_class", None)
    if wanted is not None and not isinstance(default, wanted) and isinstance(default.get_text_config(), wanted):
        default = default.get_text_config()  # the class is of the text part alone
    values = _shrunk(default, is_text=not layers_alone)
    values.pop("model_type", None)
    if entry.kind == "causal" and hasattr(default, "is_decoder"):
        values["is_decoder"] = True  # an encoder's class with a causal head sees later tokens unless it is told
    config: PreTrainedConfig = type(default)(**values)
    config.architectures = [entry.architecture]
    return config


def _shrunk(config: PreTrainedConfig, *, is_text: bool) -> dict[str, Any]:
    """The values that differ from those of `config`, with its parts as dicts."""
    parts = {key: part for key in config.sub_configs if (part := getattr(config, key, None)) is not None}
    text = config.get_text_config()
    values: dict[str, Any] = {"model_type": config.model_type}
    for key, part in parts.items():
        values[key] = _shrunk(part, is_text=is_text and (part is text or len(parts) == 1))
    values |= _of_text(config) if is_text else _layers_alone(config)
    for field, value in EXCEPTIONS.get(config.model_type, {}).items():
        values[field] = value
    return values


def _layers_alone(config: PreTrainedConfig) -> dict[str, Any]:
    """A part that takes no text keeps its sizes: they hang together in ways of their own."""
    return {
        field: min(value, LAYERS)
        for field, value in _given(config).items()
        if field in LAYER_COUNTS and isinstance(value, int)
    }


def _of_text(config: PreTrainedConfig) -> dict[str, Any]:
    given = _given(config)
    values = _layers(config, given)
    vocabulary = min(int(given.get("vocab_size") or SIZES["vocab_size"]), SIZES["vocab_size"])
    heads = _value(config, "num_attention_heads")
    for field, value in given.items():
        if isinstance(value, bool) or field in values:
            continue
        if isinstance(value, int):
            smaller = _smaller(field, value, heads, vocabulary)
            if smaller != value:
                values[field] = smaller
        elif isinstance(value, float) and field in EPS and value < EPS_VALUE:
            values[field] = EPS_VALUE
        elif isinstance(value, list | tuple) and field.endswith("_token_id"):
            values[field] = min(2, vocabulary - 1)
    rope = _value(config, "rope_parameters")
    if isinstance(rope, Mapping) and rope.get("rope_type") == "default":
        values["rope_parameters"] = {**rope, "rope_theta": ROPE_THETA}
        if "mrope_section" in rope:  # halves of a head that turn with time, height and width
            half = int(HEAD_DIM * float(rope.get("partial_rotary_factor", 1.0))) // 2
            values["rope_parameters"]["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return values


def _smaller(field: str, value: int, heads: int | None, vocabulary: int) -> int:
    if field in KV_COUNTS:
        return value if value <= 1 else HEADS if value == heads else KV_HEADS
    if field in GROUPS:
        return min(value, GROUPS[field])
    if field.endswith(("_token_id", "_token_index")) and value >= vocabulary:
        return 0 if field.startswith("pad") else 2 if field.startswith("eos") else 1
    size = SIZES.get(field)
    return value if size is None or value <= 0 else min(value, size)


def _given(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of the class with their values, without those that the class derives from others where nothing is given."""
    if not dataclasses.is_dataclass(config):
        return {name: value for name, value in vars(config).items() if not name.startswith("_")}
    found = {}
    for field in dataclasses.fields(config):
        value = _value(config, field.name)
        if field.default is None and not isinstance(value, list | tuple):
            continue
        found[field.name] = value
    return found


def _value(config: PreTrainedConfig, field: str) -> Any:
    """The value of a field; that of the whole model where layers have their own, None where there is none."""
    try:
        return getattr(config, field, None)
    except Exception:  # configs with values for each layer refuse to be asked for the whole
        return vars(config).get(field)


def _layers(config: PreTrainedConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """How many layers, and every list that says something of each layer, one layer kept of each kind."""
    counts = [field for field in given if field in LAYER_COUNTS and isinstance(given[field], int)]
    number = _value(config, "num_hidden_layers")
    values: dict[str, Any] = {field: min(given[field], LAYERS) for field in counts}
    if not isinstance(number, int) or number < 2:
        return values
    each = {f: v for f, v in given.items() if isinstance(v, list | tuple) and len(v) == number}
    among = {f: v for f, v in given.items() if f not in each and _lists_layers(v, number)}
    kinds: dict[str, int] = {}
    for layer in range(number):
        kind = [*(each[field][layer] for field in each), *(layer in among[field] for field in among)]
        kinds.setdefault(repr(kind), layer)
    kept = sorted(kinds.values())[:MOST_LAYERS]
    if len(kept) == 1:
        kept = list(range(min(LAYERS, number)))
    for field, value in each.items():
        values[field] = [value[layer] for layer in kept]
        smaller = SIZES.get(field)
        if smaller is not None:
            values[field] = [min(smaller, item) for item in values[field]]
    for field, value in among.items():
        values[field] = [new for new, old in enumerate(kept) if old in value]
    return {
        field: len(kept) if given[field] == number else size for field, size in values.items() if field in counts
    } | {field: value for field, value in values.items() if field not in counts}


def _lists_layers(value: Any, number: int) -> bool:
    """Whether a list names some layers by their index."""
    return (
        isinstance(value, list | tuple)
        and 0 < len(value) < number
        and all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < number for item in value)
        and len(set(value)) == len(value)
    )
