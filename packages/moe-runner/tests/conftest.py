"""Shared by the tests of moe-runner."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

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
