"""Two real processes give what transformers gives: heads and experts split, key-value heads repeated, sums over ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tf_tools.checkpoints import make_checkpoint

pytestmark = pytest.mark.engine

Check = Callable[..., None]


def test_one_key_value_head_on_two_ranks(assert_equal_on_two_ranks: Check, tmp_path: Path) -> None:
    folder = make_checkpoint("llama-biased", tmp_path / "model", overrides={"num_key_value_heads": 1})
    assert_equal_on_two_ranks(folder, tensor_parallel_size=2)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("phi", id="projections that are not fused"),
        pytest.param("phi3", id="several projections in one weight"),
    ],
)
def test_on_two_ranks(name: str, assert_equal_on_two_ranks: Check, checkpoint: Callable[[str], Path]) -> None:
    assert_equal_on_two_ranks(checkpoint(name), tensor_parallel_size=2)


def test_biases_of_experts_are_counted_once(assert_equal_on_two_ranks: Check, tmp_path: Path) -> None:
    folder = make_checkpoint("gpt_oss", tmp_path / "model", overrides={"swiglu_limit": 7.0})
    assert_equal_on_two_ranks(folder, tensor_parallel_size=2)


def test_experts_that_are_dealt_out(assert_equal_on_two_ranks: Check, checkpoint: Callable[[str], Path]) -> None:
    assert_equal_on_two_ranks(checkpoint("mixtral"), tensor_parallel_size=2, enable_expert_parallel=True)


def test_shared_experts_are_summed_once(assert_equal_on_two_ranks: Check, tmp_path: Path) -> None:
    sizes = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
    }
    assert_equal_on_two_ranks(make_checkpoint("qwen2_moe", tmp_path / "model", overrides=sizes), tensor_parallel_size=2)
