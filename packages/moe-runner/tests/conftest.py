"""Shared by the tests of moe-runner."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_runner import ExpertsSpec, ExpertTensor, Gate, build_experts
from moe_runner._gates import gate_function
from tf_tools.expert_weights import fill_experts
from torch import Tensor

torch.set_num_threads(1)  # before any other use: an OpenMP pool would not survive the fork of the engine tests


@pytest.fixture
def in_vllm() -> Callable[..., Any]:
    """`in_vllm(function, *args)`: its result from a forked child in which vLLM is initialised for one rank."""
    from tf_tools.engine import warm
    from tf_tools.fork import run_in_fork

    warm()

    def run(function: Callable[..., Any], *args: Any) -> Any:
        return run_in_fork(_initialised, 120.0, function, *args).value()

    return run


def _initialised(function: Callable[..., Any], *args: Any) -> Any:
    os.environ["OMP_NUM_THREADS"] = "1"
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.forward_context import set_forward_context

    config = VllmConfig()
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config), torch.no_grad():
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1)
        with set_forward_context(None, config):
            return function(*args)


FEATURES = 64
"""Of the hidden state and within an expert: a multiple of what the kernels of the CPU build take."""


@pytest.fixture
def experts_spec() -> Callable[..., ExpertsSpec]:
    """`experts_spec(experts, top_k, **fields)`: the stacked weights of gated experts; `fields` are those of `ExpertsSpec`."""

    def spec(experts: int, top_k: int, **fields: Any) -> ExpertsSpec:
        weights = (ExpertTensor("gate_up", ("gate", "up")), ExpertTensor("down", ("down",)))
        defaults = {"gate": Gate("silu"), "tensors": weights, "arguments": (0, 1, "weights")}
        return ExpertsSpec(experts, top_k, FEATURES, FEATURES, **(defaults | fields))

    return spec


@pytest.fixture
def loaded_experts() -> Callable[..., tuple[Any, Callable[[Tensor, Tensor, Tensor], Tensor]]]:
    """`loaded_experts(spec, prefix, scale, correction)`: the layer that the spec becomes, and the formula of what it holds.

    The weights are random. The formula takes tokens [tokens, features], ids and shares [tokens, top k]. Call within `in_vllm`.
    """

    def load(spec: ExpertsSpec, prefix: str, scale: float, correction: Tensor | None = None) -> tuple[Any, Any]:
        layer = build_experts(spec, prefix, correction=correction)
        rows = {"gate_up": 2 * FEATURES, "down": FEATURES}
        values = {}
        for tensor in spec.tensors:
            shape = (spec.num_experts, rows[tensor.name.removesuffix("_bias")], *(() if tensor.bias else (FEATURES,)))
            values[tensor.name] = torch.randn(shape) * scale
        fill_experts(layer, spec, values)
        function, nothing = gate_function(spec.gate), torch.zeros(spec.num_experts, 1)

        def formula(x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for token in range(len(x)):
                for expert, share in zip(ids[token], shares[token], strict=True):
                    inner = x[token] @ values["gate_up"][expert].T + values.get("gate_up_bias", nothing)[expert]
                    hidden = function(*inner.chunk(2)) @ values["down"][expert].T
                    out[token] += share * (hidden + values.get("down_bias", nothing)[expert])
            return out

        return layer, formula

    return load
