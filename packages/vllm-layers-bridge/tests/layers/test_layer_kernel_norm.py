"""A norm runs as one kernel on a CPU; what the kernel does not take is computed in torch, or by vLLM's own layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm_layers_bridge.layers import BuildContext, build, kernel_norm
from vllm_layers_bridge.specs import RMSNormSpec

pytestmark = pytest.mark.engine

EPS = 0.05
SPECS = {
    "plain": RMSNormSpec(48, EPS, 0.0, True),
    "weightless": RMSNormSpec(48, EPS, 0.0, False),
    "zero-centred": RMSNormSpec(48, EPS, 1.0, True),
}


def built(spec: RMSNormSpec) -> Any:
    """The layer as an eager engine builds it: vLLM has its layers' own kernels on."""
    from vllm.config import get_current_vllm_config

    get_current_vllm_config().compilation_config.custom_ops = ["all"]
    return build(spec, "model.norm", BuildContext())


def norm(x: torch.Tensor, weight: torch.Tensor | None, offset: float) -> torch.Tensor:
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return normed if weight is None else normed * (weight.double() + offset)


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 2


def counted() -> list[tuple[int, ...]]:
    """The shapes that the kernel is called with from now on, in this process."""
    calls, kernel = [], kernel_norm.rms_norm_kernel

    def spy(x: torch.Tensor, weight: Any, eps: float) -> torch.Tensor:
        calls.append(tuple(x.shape))
        return kernel(x, weight, eps)

    kernel_norm.rms_norm_kernel = spy
    return calls


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_norm(in_vllm: Callable[..., Any], kind: str, dtype: torch.dtype) -> None:
    spec = SPECS[kind]
    inputs = [values(5, 48), values(1, 3, 2, 48), values(1, 7, 96)[..., :48], values(1, 4, 3, 48).transpose(1, 2)]
    inputs = [x.to(dtype) for x in inputs]
    weight = values(48).to(dtype)

    def run() -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
        torch.set_default_dtype(dtype)
        layer = built(spec)
        if spec.has_weight:
            layer.weight.data.copy_(weight)
        calls = counted()
        return [layer(x) for x in inputs], calls

    outputs, calls = in_vllm(run)
    assert calls == [tuple(x.shape) for x in inputs]
    for x, output in zip(inputs, outputs, strict=True):
        assert output.dtype is dtype
        assert output.shape == x.shape
        expected = norm(x, weight if spec.has_weight else None, spec.offset)
        error = (output.double() - expected).norm() / expected.norm()
        assert error < (1e-6 if dtype is torch.float32 else 3e-3)
        if spec.has_weight:
            broken = norm(x, weight, 1.0 - spec.offset)
            assert (broken - expected).norm() / expected.norm() > 0.1, "an offset that is left out would not be seen"


def test_weights_that_come_later_are_the_ones_that_count(in_vllm: Callable[..., Any]) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        layer = built(SPECS["plain"])
        before = layer(values(2, 48))
        layer.weight = torch.nn.Parameter(torch.full((48,), 3.0))
        return before, layer(values(2, 48))

    before, after = in_vllm(run)
    torch.testing.assert_close(after, 3 * before)


def test_a_weight_of_another_type_is_multiplied_in_as_the_model_does(in_vllm: Callable[..., Any]) -> None:
    def run() -> tuple[list[torch.Tensor], int]:
        outputs, calls = [], counted()
        for scaled_in in ("wide", "input"):
            layer = built(RMSNormSpec(48, EPS, 0.0, True, scaled_in=scaled_in))
            layer.weight.data.copy_(values(48))
            outputs.append(layer(values(4, 48).bfloat16()))
        return outputs, calls

    (wide, narrow), calls = in_vllm(run)
    assert (4, 48) not in calls
    x = values(4, 48).bfloat16()
    torch.testing.assert_close(wide, norm(x, values(48), 0.0).bfloat16())
    torch.testing.assert_close(narrow, norm(x, None, 0.0).bfloat16() * values(48))


def test_a_type_that_the_kernel_is_not_known_to_compute_is_computed_in_torch(in_vllm: Callable[..., Any]) -> None:
    def run() -> tuple[torch.Tensor, list[tuple[int, ...]]]:
        layer = built(SPECS["plain"]).double()
        layer.weight.data.copy_(values(48))
        calls = counted()
        return layer(values(4, 48).double()), calls

    output, calls = in_vllm(run)
    assert (4, 48) not in calls
    assert output.dtype is torch.float64
    torch.testing.assert_close(output.float(), norm(values(4, 48), values(48), 0.0).float())


@pytest.mark.parametrize(
    "spec",
    [RMSNormSpec(12, EPS, 0.0, True), RMSNormSpec(48, EPS, 0.0, True, scaled_in=None)],
    ids=["width", "rounded first"],
)
def test_what_the_kernel_does_not_take_is_vllms_own_layer(in_vllm: Callable[..., Any], spec: RMSNormSpec) -> None:
    assert in_vllm(lambda: type(built(spec)).__name__) == "RMSNorm"


def test_with_vllms_kernels_off_the_layer_is_vllms(in_vllm: Callable[..., Any]) -> None:
    def run() -> list[str]:
        from vllm.config import get_current_vllm_config

        on = built(SPECS["plain"])
        get_current_vllm_config().compilation_config.custom_ops = ["none"]  # as with a compiler
        return [type(layer).__name__ for layer in (on, build(SPECS["plain"], "model.norm", BuildContext()))]

    assert in_vllm(run) == ["KernelRMSNorm", "RMSNorm"]


def test_a_kernel_that_computes_something_else_is_not_used(in_vllm: Callable[..., Any]) -> None:
    def run() -> tuple[bool, bool, bool]:
        right = kernel_norm.is_computed(48, torch.float32)
        kernel_norm.is_computed.cache_clear()
        kernel = kernel_norm.rms_norm_kernel
        kernel_norm.rms_norm_kernel = lambda x, weight, eps: kernel(x, weight, 0.0)
        return right, kernel_norm.is_computed(48, torch.float32), kernel_norm.is_computed(48, torch.int8)

    assert in_vllm(run) == (True, False, False)


def test_a_compiled_norm_is_the_same(in_vllm: Callable[..., Any]) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor, int]:
        layer = built(SPECS["plain"])
        eager = layer(values(3, 48))
        calls = counted()
        return eager, torch.compile(layer, backend="aot_eager", fullgraph=True)(values(3, 48)), len(calls)

    eager, compiled, calls = in_vllm(run)
    torch.testing.assert_close(compiled, eager)
    assert calls == 0
