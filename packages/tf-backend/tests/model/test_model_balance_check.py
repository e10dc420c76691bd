"""`--enable-eplb` is refused before an engine starts where vLLM's balancer could not do what it promises, with layer and remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from moe_runner import ExpertsSpec, ExpertTensor, Gate
from tf_backend.errors import OptionRefused
from tf_backend.model.balance_check import check_balance
from tf_backend.plan.schema import StagesPlan

PAIR = (ExpertTensor("a", ("gate", "up")), ExpertTensor("b", ("down",)))
SPEC = ExpertsSpec(8, 2, 64, 96, Gate("silu"), PAIR, (0, 1, 2), runs_as="silu")
WRITTEN = SimpleNamespace(
    runs="as written",
    experts="model.layers.0.mlp.experts",
    why_written="its experts compute relu, for which there is no kernel",
)


def parallel(**options: Any) -> Any:
    plain: dict[str, Any] = {"enable_eplb": True, "enable_elastic_ep": False, "prefill_context_parallel_size": 1}
    plain |= {"tensor_parallel_size": 2, "data_parallel_size": 2, "redundant": 0}
    values = plain | options
    return SimpleNamespace(**values, eplb_config=SimpleNamespace(num_redundant_experts=values["redundant"]))


def plan(*specs: ExpertsSpec | None, experts: tuple[Any, ...] = (), bounds: tuple[int, ...] | None = None) -> Any:
    """One decoder layer for each spec; None is a dense one."""
    modules = [
        SimpleNamespace(name=f"model.layers.{index}.mlp.experts", layers=() if spec is None else (spec,))
        for index, spec in enumerate(specs)
    ]
    stages = None
    if bounds is not None:
        stages = StagesPlan(bounds, 0, None, 1, 64, (), "model.embed_tokens", "lm_head", False)
    provenance = SimpleNamespace(architecture="ToyForCausalLM")
    return SimpleNamespace(
        modules=modules, experts=experts, provenance=provenance, stages=stages, layers="model.layers"
    )


MOE: Any = SimpleNamespace(is_moe=True)


@pytest.mark.parametrize(
    ("options", "planned"),
    [
        ({}, plan(SPEC, SPEC)),
        ({}, plan(msgspec.structs.replace(SPEC, arguments=(0,), top_k=1))),
        ({"redundant": 4}, plan(None, SPEC, experts=(WRITTEN,))),
        ({}, plan(SPEC, None, None, SPEC, bounds=(0, 2, 4))),
        ({"enable_eplb": False}, plan(None)),
    ],
)
def test_what_can_be_balanced_passes(options: dict[str, Any], planned: Any) -> None:
    check_balance(parallel(**options), MOE, planned)


BIASED = (*PAIR, ExpertTensor("c", ("gate", "up"), bias=True), ExpertTensor("d", ("down",), bias=True))


@pytest.mark.parametrize(
    ("options", "planned", "said"),
    [
        ({}, plan(None, None), "ToyForCausalLM has none. Leave out `--enable-eplb`"),
        ({}, plan(None, experts=(WRITTEN,)), "in `model.layers.0.mlp.experts`, its experts compute relu"),
        (
            {},
            plan(SPEC, None, msgspec.structs.replace(SPEC, num_experts=4)),
            "`model.layers.0.mlp.experts` has 8, `model.layers.2.mlp.experts` 4",
        ),
        (
            {},
            plan(SPEC, msgspec.structs.replace(SPEC, intermediate_size=64)),
            "those of `model.layers.1.mlp.experts` have other weights",
        ),
        ({}, plan(SPEC, msgspec.structs.replace(SPEC, tensors=BIASED)), "have other weights"),
        ({}, plan(msgspec.structs.replace(SPEC, arguments=(0,))), "take 2 rows of each"),
        ({"redundant": 3}, plan(SPEC), "Set `num_redundant_experts` of `--eplb-config` to 4"),
        (
            {"data_parallel_size": 3},
            plan(SPEC),
            "over 6 ranks evenly. Set `num_redundant_experts` of `--eplb-config` to 4",
        ),
        ({}, plan(None, None, SPEC, SPEC, bounds=(0, 2, 4)), "pipeline stage 0 hold no experts"),
        ({"enable_elastic_ep": True}, plan(SPEC), "Leave out `--enable-elastic-ep`"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], planned: Any, said: str) -> None:
    with pytest.raises(OptionRefused) as refused:
        check_balance(parallel(**options), MOE, planned)
    assert said in str(refused.value)


def test_a_model_that_the_engine_takes_for_dense_is_refused() -> None:
    dense: Any = SimpleNamespace(is_moe=False)
    with pytest.raises(OptionRefused, match="no number of experts in its config"):
        check_balance(parallel(), dense, plan(SPEC))
