"""Rotary position embedding with cosines and sines that the model computed.

In: a `RotarySpec`. Out: a module that is called with what is turned, one value or two, and with cosines and sines [1, tokens, width], and
returns what the call in the forward returned. Run eagerly it is one call of vLLM's kernel, which overwrites what it is given; under a
compiler, and where there is no kernel, it is the same arithmetic spelt in torch, for the compiler to fuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from vllm_layers_bridge.specs import RotarySpec

Kernel: TypeAlias = Callable[..., None]
"""``kernel(positions, query, key or None, head_dim, cos_sin, is_neox)`` over [tokens, heads * head_dim], in place."""

_KEPT = "_cos_sin_of_pairs"
"""Attribute of the tensor of cosines under which what the kernel reads is kept: layers of one step are given the same tensors."""

_LOADED = 8
"""Values of bfloat16 that the kernel for the CPU loads at once, from an address that must be a multiple of their size."""

_HALF_PRECISION = (torch.bfloat16, torch.float16)


class Rotary(nn.Module):
    """See the module.

    Args:
        kernel: None where there is none.
        devices: types of device on which it runs.
    """

    def __init__(self, spec: RotarySpec, kernel: Kernel | None = None, devices: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.spec = spec
        self.kernel = kernel
        self.devices = devices
        self.is_neox = spec.pairing == "halves"
        self.wants_alignment = "cpu" in devices

    def forward(self, *given: torch.Tensor) -> Any:
        """The turned values, a tuple where there are two.

        Args:
            given: one or two values to turn, heads as the spec has them, then cosines and sines.
        """
        *parts, cos, sin = given
        if self._takes(parts[0], cos):
            turned = self._by_kernel(parts, cos, sin)
        else:
            turned = [rotated(self.spec, part, cos, sin) for part in parts]
        return tuple(turned) if len(turned) > 1 else turned[0]

    def _takes(self, part: torch.Tensor, cos: torch.Tensor) -> bool:
        """Whether the kernel computes it, no less exactly: it takes cosines of the type of what it turns, and these may be wider."""
        if self.kernel is None or torch.compiler.is_compiling() or part.device.type not in self.devices:
            return False
        dtype, shape = cos.dtype, part.shape
        is_one_row = cos.shape[0] == 1 == shape[0] and cos.shape[1] == shape[self.spec.token_axis]
        return is_one_row and (dtype == part.dtype or dtype == torch.float32)

    def _by_kernel(self, parts: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        kernel = self.kernel
        assert kernel is not None
        cos_sin, positions = self._cos_sin(cos, sin, cos.dtype)
        if self.wants_alignment and cos.dtype == torch.bfloat16 and not self._is_aligned(parts, cos_sin):
            cos_sin, positions = self._cos_sin(cos, sin, torch.float32)
        laid = [self._laid_out(part, cos_sin.dtype) for part in parts]
        if len(laid) == 2 and self._fit_together(*parts):
            (query, _), (key, _) = laid
            kernel(positions, query, key, parts[0].shape[3], cos_sin, self.is_neox)
        else:
            for part, (flat, _) in zip(parts, laid, strict=True):
                kernel(positions, flat, None, part.shape[3], cos_sin, self.is_neox)
        return [
            whole if whole.dtype == part.dtype else whole.to(part.dtype)
            for part, (_, whole) in zip(parts, laid, strict=True)
        ]

    def _fit_together(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """One call of the kernel takes two values of heads of one width, the number of one a multiple of that of the other."""
        heads = 3 - self.spec.token_axis
        return query.shape[3] == key.shape[3] and query.shape[heads] % key.shape[heads] == 0

    def _is_aligned(self, parts: list[torch.Tensor], cos_sin: torch.Tensor) -> bool:
        """Whether each half of a head starts where vLLM's kernel for the CPU can load bfloat16: eight at a time, at multiples of eight."""
        if cos_sin.shape[1] % (2 * _LOADED):
            return False
        return all(
            part.shape[3] % _LOADED == 0 == part.stride(self.spec.token_axis) % _LOADED
            and part.data_ptr() % (2 * _LOADED) == 0
            for part in parts
        )

    def _laid_out(self, part: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, heads * head_dim] over the memory of the second value, which is `part` itself or a copy that may be overwritten."""
        tokens, heads = self.spec.token_axis, 3 - self.spec.token_axis
        count, width, stride = part.shape[heads], part.shape[3], part.stride()
        is_one_run = stride[3] == 1 and (stride[heads] == width or count == 1)
        is_apart = stride[tokens] >= count * width or part.shape[tokens] == 1
        if self.spec.in_place and part.dtype == dtype and is_one_run and is_apart:
            return part.as_strided((part.shape[tokens], count * width), (stride[tokens], 1)), part
        by_token = part.transpose(1, 2) if tokens == 2 else part
        copy = torch.empty(by_token.shape, dtype=dtype, device=part.device)
        copy.copy_(by_token)
        return copy.view(part.shape[tokens], count * width), copy.transpose(1, 2) if tokens == 2 else copy

    def _cos_sin(self, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of each pair, [tokens, 2 n], and the row of each token; made once for each tensor of cosines."""
        kept = getattr(cos, _KEPT, None)
        if kept is None or kept[0] is not sin or kept[1:4] != (self.spec.angles, self.spec.pairing, dtype):
            rows = torch.cat((once(self.spec, cos[0]), once(self.spec, sin[0])), dim=-1).to(dtype)
            positions = torch.arange(rows.shape[0], device=rows.device)
            kept = (sin, self.spec.angles, self.spec.pairing, dtype, rows, positions)
            setattr(cos, _KEPT, kept)
        return kept[4], kept[5]


def once(spec: RotarySpec, values: torch.Tensor) -> torch.Tensor:
    """Cosines or sines [..., n], one for each pair of entries."""
    if spec.angles == "once":
        return values
    if spec.angles == "twice" and spec.pairing == "adjacent":
        return values[..., ::2]
    return values[..., : values.shape[-1] // 2]


def rotated(spec: RotarySpec, part: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`part` turned, in torch; in float32 where it is of half precision, as the kernel computes. Entries beyond the pairs stay."""
    heads = 1 if spec.token_axis == 2 else 2
    if part.dtype in _HALF_PRECISION:
        cos, sin = cos.float(), sin.float()
    cosines, sines = once(spec, cos).unsqueeze(heads), once(spec, sin).unsqueeze(heads)
    width = 2 * cosines.shape[-1]
    turning = part if width == part.shape[-1] else part[..., :width]
    first, second = turning.chunk(2, dim=-1) if spec.pairing == "halves" else (turning[..., ::2], turning[..., 1::2])
    pair = (first * cosines - second * sines, second * cosines + first * sines)
    turned = torch.cat(pair, dim=-1) if spec.pairing == "halves" else torch.stack(pair, dim=-1).flatten(-2)
    turned = turned.to(part.dtype)
    return turned if width == part.shape[-1] else torch.cat((turned, part[..., width:]), dim=-1)


def build_rotary(spec: RotarySpec) -> Rotary:
    """The layer, with vLLM's kernel where the platform has it."""
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or current_platform.is_cuda()) or not hasattr(torch.ops._C, "rotary_embedding"):
        return Rotary(spec)
    return Rotary(spec, torch.ops._C.rotary_embedding, (current_platform.device_type,))
