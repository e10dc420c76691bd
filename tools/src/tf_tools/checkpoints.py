"""Tiny checkpoints on disk, made from a recipe: same name, seed and versions in, same bytes out.

    folder = make_checkpoint("gemma2", tmp_path / "gemma2", seed=0)
    AutoModelForCausalLM.from_pretrained(folder)

Every parameter is drawn from its own generator, seeded by the run's seed and the parameter's name, so that neither the
order of modules nor a new parameter elsewhere changes a value.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from tf_tools._recipes import GROUPED, MATRIX_STD, RECIPES, SIZES, VECTOR_STD, Draw, Recipe

__all__ = [
    "GROUPED",
    "RECIPES",
    "SIZES",
    "CheckpointError",
    "Draw",
    "Recipe",
    "build_model",
    "make_checkpoint",
    "scale_weights",
]

T = TypeVar("T")

INDEX = "model.safetensors.index.json"

# Recurrent layers are stable only near their own initial values.
_LEFT_AS_INITIALISED = re.compile(r"(^|\.)(A_log|D|dt_bias)$")


class CheckpointError(ValueError):
    """A checkpoint that cannot be made: the recipe is unknown, or the variant does not exist for this model."""


def make_checkpoint(
    name: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    overrides: Mapping[str, object] | None = None,
    max_shard_size: str | int = "5GB",
    drop_base_prefix: bool = False,
) -> Path:
    """Write a tiny checkpoint and return its folder.

    Args:
        name: a key of `RECIPES`, or any model type of transformers, which is then built from the sizes in `SIZES`.
        folder: made if absent; must hold no other checkpoint.
        seed: two seeds give two checkpoints; one seed gives the same one always.
        dtype: of the stored weights.
        overrides: config values laid over the recipe's.
        max_shard_size: as in `save_pretrained`; "100KB" gives several shards and an index.
        drop_base_prefix: store `layers.0...` instead of `model.layers.0...`, as checkpoints of a bare base model do.

    Raises:
        CheckpointError: unknown name, a folder that is not empty, or a model without a base-model prefix.
    """
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty; give make_checkpoint a folder of its own")
    model = build_model(name, seed=seed, overrides=overrides).to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if drop_base_prefix:
        _drop_prefix(folder, f"{model.base_model_prefix}.")
    return folder


def build_model(name: str, *, seed: int = 0, overrides: Mapping[str, object] | None = None) -> PreTrainedModel:
    """The head model of a recipe in memory: float32, CPU, evaluation mode, weights drawn as the recipe says."""
    recipe = RECIPES.get(name)
    if recipe is None:
        if name not in CONFIG_MAPPING:
            known = ", ".join(sorted(RECIPES))
            raise CheckpointError(
                f"no recipe and no transformers model type named {name!r}; recipes are {known}; "
                "add one to tf_tools/_recipes.py"
            )
        recipe = Recipe(name, SIZES)
    config = CONFIG_MAPPING[recipe.model_type](**copy.deepcopy({**recipe.config, **(overrides or {})}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # what no draw touches (recurrent parameters) is still a function of the name alone
        model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    scale_weights(model, seed=seed, draws=recipe.draws)
    return model.eval()


@torch.no_grad()
def scale_weights(model: torch.nn.Module, *, seed: int, draws: tuple[Draw, ...] = ()) -> None:
    """Redraw every parameter in place: matrices N(0, 0.15), vectors and biases moved by N(0, 0.25).

    At transformers' initial values most mistakes are invisible: biases are zero, norms one, activations so small that
    no cap or clamp is reached. A tied parameter is drawn once. Buffers that a checkpoint holds and that are zero, as
    what a router adds to its scores for the choice, are drawn as vectors are.
    """
    for name, parameter in model.named_parameters():
        if _LEFT_AS_INITIALISED.search(name):
            continue
        is_vector = parameter.ndim < 2 or "bias" in name.rpartition(".")[2]
        draw = next((d for d in draws if re.search(d.pattern, name)), None)
        std = draw.std if draw else VECTOR_STD if is_vector else MATRIX_STD
        shift = draw.shift if draw else 0.0
        fresh = _normal(name, seed, parameter.shape) * std + shift
        parameter.copy_(parameter + fresh if is_vector else fresh)
    held = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in held and buffer.is_floating_point() and not bool(buffer.any()):
            buffer.copy_(_normal(name, seed, buffer.shape) * VECTOR_STD)


def _normal(name: str, seed: int, shape: torch.Size) -> Tensor:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def _drop_prefix(folder: Path, prefix: str) -> None:
    renamed = 0
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        renamed += sum(name.startswith(prefix) for name in tensors)
        save_file(dict(_without(prefix, tensors)), path, metadata={"format": "pt"})
    if not renamed:
        raise CheckpointError(f"no tensor in {folder} starts with {prefix!r}: there is no base-model prefix to drop")
    index_file = folder / INDEX
    if index_file.exists():
        index = json.loads(index_file.read_text())
        index["weight_map"] = dict(_without(prefix, index["weight_map"]))
        index_file.write_text(json.dumps(index, indent=2))


def _without(prefix: str, named: Mapping[str, T]) -> Iterator[tuple[str, T]]:
    for name, value in named.items():
        yield name.removeprefix(prefix), value
