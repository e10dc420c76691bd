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
        self.in_place = spec.in_place
        self.axes = (spec.token_axis, 3 - spec.token_axis)
        self.ways = (spec.angles, spec.pairing)
        self.wants_alignment = "cpu" in devices

    def forward(self, *given: torch.Tensor) -> Any:
        """The turned values, a tuple where there are two.

        Args:
            given: one or two values to turn, heads as the spec has them, then cosines and sines.
        """
        *parts, cos, sin = given
        if not self._takes(parts[0], cos):
            turned = [rotated(self.spec, part, cos, sin) for part in parts]
        elif self._overwrites(parts, cos, sin):
            turned = parts
        else:
            turned = self._by_kernel(parts, cos, sin)
        return tuple(turned) if len(turned) > 1 else turned[0]

    def _overwrites(self, parts: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Turn two values where they lie, in one call of the kernel; False, and nothing done, where it is not as simple as that."""
        if not self.in_place or len(parts) != 2:
            return False
        dtype = cos.dtype
        cos_sin, positions = self._cos_sin(cos, sin, dtype)
        loaded = _LOADED if self.wants_alignment and dtype is torch.bfloat16 else 1
        query, key = self._rows(parts[0], dtype, loaded), self._rows(parts[1], dtype, loaded)
        width = parts[0].shape[3]
        if query is None or key is None or width != parts[1].shape[3] or cos_sin.shape[1] % (2 * loaded):
            return False
        if query.shape[1] % key.shape[1]:
            return False
        assert self.kernel is not None
        self.kernel(positions, query, key, width, cos_sin, self.is_neox)
        return True

    def _rows(self, part: torch.Tensor, dtype: torch.dtype, loaded: int) -> torch.Tensor | None:
        """The memory of `part` as [tokens, heads * head_dim], where heads lie one after the other and the kernel can load them."""
        tokens, heads = self.axes
        shape, stride = part.shape, part.stride()
        width, step = shape[3], stride[tokens]
        length = shape[heads] * width
        if part.dtype is not dtype or stride[3] != 1 or (stride[heads] != width and length != width):
            return None
        if step < length and shape[tokens] != 1:
            return None
        if loaded != 1 and (width % loaded or step % loaded or part.data_ptr() % (2 * loaded)):
            return None
        return part.as_strided((shape[tokens], length), (step, 1))

    def _takes(self, part: torch.Tensor, cos: torch.Tensor) -> bool:
        """Whether the kernel computes it, no less exactly: it takes cosines of the type of what it turns, and these may be wider."""
        if self.kernel is None or torch.compiler.is_compiling() or part.device.type not in self.devices:
            return False
        dtype, shape, given = cos.dtype, part.shape, cos.shape
        is_one_row = given[0] == 1 == shape[0] and given[1] == shape[self.axes[0]]
        return is_one_row and (dtype is part.dtype or dtype is torch.float32)

    def _by_kernel(self, parts: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        """Each value by a call of its own, over a copy where it must not be overwritten or the kernel cannot load it."""
        kernel, dtype, loaded = self.kernel, cos.dtype, 1
        assert kernel is not None
        if self.wants_alignment and dtype is torch.bfloat16:
            is_aligned = self._cos_sin(cos, sin, dtype)[0].shape[1] % (2 * _LOADED) == 0
            is_aligned = is_aligned and all(part.shape[3] % _LOADED == 0 for part in parts)
            dtype, loaded = (dtype, _LOADED) if is_aligned else (torch.float32, 1)
        cos_sin, positions = self._cos_sin(cos, sin, dtype)
        turned = []
        for part in parts:
            whole, rows = part, self._rows(part, dtype, loaded) if self.in_place else None
            if rows is None:
                by_token = part.transpose(1, 2) if self.spec.token_axis == 2 else part
                copy = torch.empty(by_token.shape, dtype=dtype, device=part.device)
                copy.copy_(by_token)
                rows = copy.view(copy.shape[1], -1)
                whole = copy.transpose(1, 2) if self.spec.token_axis == 2 else copy
            kernel(positions, rows, None, part.shape[3], cos_sin, self.is_neox)
            turned.append(whole if whole.dtype == part.dtype else whole.to(part.dtype))
        return turned

    def _cos_sin(self, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of each pair, [tokens, 2 n], and the row of each token; made once for each tensor of cosines."""
        kept = getattr(cos, _KEPT, None)
        if kept is None or kept[0] is not sin or kept[1] is not dtype or kept[2] != self.ways:
            rows = torch.cat((once(self.spec, cos[0]), once(self.spec, sin[0])), dim=-1).to(dtype)
            positions = torch.arange(rows.shape[0], device=rows.device)
            kept = (sin, dtype, self.ways, rows, positions)
            setattr(cos, _KEPT, kept)
        return kept[3], kept[4]


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
    return Rotary(spec, vllm_kernel, (current_platform.device_type,))


def vllm_kernel(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_dim: int,
    cos_sin: torch.Tensor,
    is_neox: bool,
) -> None:
    """vLLM's kernel, as a function: an operator cannot be pickled, and a module that holds it could not be either."""
    torch.ops._C.rotary_embedding(positions, query, key, head_dim, cos_sin, is_neox)
