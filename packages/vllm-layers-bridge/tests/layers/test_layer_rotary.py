"""The rotary layer: vLLM's kernel and the arithmetic in torch agree, over each layout, type and width; only what may be overwritten is."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm_layers_bridge.layers.rotary import Rotary, rotated
from vllm_layers_bridge.specs import Angles, Pairing, RotarySpec

TOKENS = 11


def spec(
    pairing: Pairing = "halves", angles: Angles = "twice", axis: Any = 2, in_place: bool = True, name: str = "rotary"
) -> RotarySpec:
    return RotarySpec(name, pairing, angles, axis, in_place)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def given(kind: RotarySpec, width: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    phases = 3 * drawn(1, TOKENS, width, seed=5)
    if kind.angles != "once":
        phases = (
            phases.repeat_interleave(2, -1)
            if kind.pairing == "adjacent" and kind.angles == "twice"
            else torch.cat((phases,) * 2, -1)
        )
    return phases.cos().to(dtype), phases.sin().to(dtype)


def of_packed(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output of a merged projection, and query and key as views of it, heads first."""
    packed = drawn(1, TOKENS, (heads + 2 * kv_heads) * dim, dtype=dtype)
    query, key, _ = packed.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    return packed, *(part.view(1, TOKENS, -1, dim).transpose(1, 2) for part in (query, key))


def differences(dtype: torch.dtype, angle_dtype: torch.dtype) -> list[tuple[str, float, bool]]:
    """For each case, the norm of the difference to the arithmetic in float32, and whether what was given was overwritten."""
    from vllm_layers_bridge.layers import BuildContext, build

    found = []
    for pairing in ("halves", "adjacent"):
        for angles in ("twice", "first half", "once"):
            for axis in (1, 2):
                for in_place in (False, True):
                    for heads, dim, width in ((4, 32, 16), (3, 24, 8), (4, 20, 10), (1, 64, 4)):
                        kind = spec(pairing, angles, axis, in_place)
                        layer = build(kind, "model.layers.0.self_attn.rotary", BuildContext())
                        assert layer.kernel is not None
                        layer = pickle.loads(pickle.dumps(layer))  # as compiled artifacts are kept
                        cos, sin = given(kind, width, angle_dtype)
                        packed, query, key = of_packed(2 * heads, heads, dim, dtype)
                        if axis == 1:
                            query, key = query.transpose(1, 2), key.transpose(1, 2)
                        before = packed.clone()
                        wanted = [rotated(kind, part.float(), cos.float(), sin.float()) for part in (query, key)]
                        result = layer(query, key, cos, sin)
                        error = max(
                            float((one.float() - two).abs().max()) for one, two in zip(result, wanted, strict=True)
                        )
                        assert all(one.dtype == dtype for one in result)
                        value = packed[..., 3 * heads * dim :]
                        assert torch.equal(value, before[..., 3 * heads * dim :]), "the value beside was overwritten"
                        found.append((f"{kind} {heads} {dim} {width}", error, not torch.equal(packed, before)))
    return found


@pytest.mark.engine
def test_the_kernel_computes_what_torch_does(in_vllm: Callable[..., Any]) -> None:
    found = in_vllm(differences, torch.float32, torch.float32)
    assert len(found) == 96
    assert [name for name, error, _ in found if error > 1e-5] == []
    assert [name for name, _, overwritten in found if overwritten != ("in_place=True" in name)] == []


@pytest.mark.engine
def test_half_precision_is_rounded_once(in_vllm: Callable[..., Any]) -> None:
    for angle_dtype in (torch.bfloat16, torch.float32):
        found = in_vllm(differences, torch.bfloat16, angle_dtype)
        assert [name for name, error, _ in found if error > 2**-6] == [], (
            "values of up to 4 differ by half a last place"
        )


@pytest.mark.parametrize("pairing", ["halves", "adjacent"])
@pytest.mark.parametrize("angles", ["twice", "first half", "once"])
def test_without_a_kernel_torch_computes_it(pairing: Pairing, angles: Angles) -> None:
    kind = spec(pairing, angles)
    cos, sin = given(kind, 4)
    part = drawn(1, 3, TOKENS, 10)
    (single,) = (Rotary(kind)(part, cos, sin),)
    query, key = Rotary(kind)(part, 2 * part, cos, sin)
    c, s = (given(spec(pairing, "once"), 4)[at][0, :, None, :].transpose(0, 1) for at in (0, 1))
    first, second = (part[..., :4], part[..., 4:8]) if pairing == "halves" else (part[..., :8:2], part[..., 1:8:2])
    expected = torch.complex(first, second) * torch.complex(c, s)
    turned = (
        torch.cat((expected.real, expected.imag), -1)
        if pairing == "halves"
        else torch.view_as_real(expected).flatten(-2)
    )
    torch.testing.assert_close(single[0, ..., :8], turned[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(single[..., 8:], part[..., 8:])
    assert torch.equal(query, single)
    torch.testing.assert_close(key, 2 * single)


def test_what_the_kernel_reads_is_made_once_for_the_layers_of_a_step() -> None:
    seen: list[Any] = []

    def kernel(positions: Any, query: Any, key: Any, head_dim: int, cos_sin: Any, is_neox: bool) -> None:
        seen.append((positions, cos_sin))

    kind = spec()
    cos, sin = given(kind, 4)
    for layer in (Rotary(kind, kernel, ("cpu",)), Rotary(kind, kernel, ("cpu",))):
        layer(*of_packed(4, 2, 8, torch.float32)[1:], cos, sin)
    assert len(seen) == 2
    assert seen[0][0] is seen[1][0]
    assert seen[0][1] is seen[1][1]
    assert torch.equal(seen[0][1], torch.cat((cos[0, :, :4], sin[0, :, :4]), -1))
    other = Rotary(spec("adjacent"), kernel, ("cpu",))
    other(drawn(1, 2, TOKENS, 8), cos, sin)
    assert torch.equal(seen[2][1], torch.cat((cos[0, :, ::2], sin[0, :, ::2]), -1)), "of another pairing"
    other(drawn(1, 2, TOKENS, 8), cos, sin.clone())
    assert seen[3][1] is not seen[2][1], "of other sines"


def test_values_of_unlike_heads_are_turned_one_after_the_other() -> None:
    seen: list[Any] = []

    def kernel(positions: Any, query: Any, key: Any, head_dim: int, cos_sin: Any, is_neox: bool) -> None:
        seen.append((tuple(query.shape), key, head_dim))

    kind = spec()
    layer = Rotary(kind, kernel, ("cpu",))
    layer(drawn(1, 2, TOKENS, 8), drawn(1, 2, TOKENS, 12), *given(kind, 4))
    assert seen == [((TOKENS, 16), None, 8), ((TOKENS, 24), None, 12)]


def test_on_meta_it_gives_shapes() -> None:
    layer = Rotary(spec(), lambda *_: None, ("cpu",))
    part = torch.empty(1, 3, 5, 8, device="meta")
    angles = torch.empty(1, 5, 8, device="meta")
    query, key = layer(part, part, angles, angles)
    assert (query.shape, key.device.type) == (part.shape, "meta")


def test_compiled_it_is_torch_and_overwrites_nothing() -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("the kernel was called")

    kind = spec()
    layer = torch.compile(Rotary(kind, fail, ("cpu",)), backend="eager", fullgraph=True)
    part = drawn(1, 3, TOKENS, 8)
    before, (cos, sin) = part.clone(), given(kind, 4)
    found = layer(part, cos, sin)
    assert torch.equal(part, before)
    torch.testing.assert_close(found, rotated(kind, part, cos, sin))
