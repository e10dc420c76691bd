"""Experts over tensor-parallel and data-parallel ranks: what is divided by what, and which platforms and experts cannot."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any

import msgspec
import pytest
from moe_runner import ExpertsSpec
from rich.console import Console
from tf_backend import capabilities
from tf_backend.cli._render import render_plan
from tf_backend.plan import Parallel
from tf_backend.plan.planner import make_plan
from tf_backend.plan.schema import Plan
from transformers import PreTrainedModel

Models = Callable[..., PreTrainedModel]

ABLE = msgspec.structs.replace(capabilities.shipped(), moe_exchanges_tokens=True, moe_maps_experts=True)
UNMAPPED = msgspec.structs.replace(ABLE, moe_maps_experts=False)


def in_runner(plan: Plan) -> int:
    return sum(isinstance(layer, ExpertsSpec) for module in plan.modules for layer in module.layers)


def why_written(plan: Plan) -> str:
    (reason,) = {experts.why_written for experts in plan.experts}
    return reason


def test_replicas_share_the_parts_of_each_expert(model_of: Models) -> None:
    assert in_runner(make_plan(model_of("mixtral"), Parallel(tensor=2, data=2), ABLE).plan) == 2
    odd = make_plan(model_of("mixtral", intermediate_size=198), Parallel(tensor=2, data=2), ABLE).plan
    assert "4 ranks do not divide the 198 features" in why_written(odd)
    assert in_runner(make_plan(model_of("mixtral", intermediate_size=198), Parallel(tensor=2), ABLE).plan) == 2


def test_replicas_share_whole_experts_and_places_beyond_them(model_of: Models) -> None:
    model = model_of("mixtral")
    assert in_runner(make_plan(model, Parallel(tensor=2, data=2, experts=True), ABLE).plan) == 2
    few = make_plan(model_of("mixtral"), Parallel(tensor=2, data=4, experts=True), ABLE).plan
    assert "its 4 experts cannot be dealt out over 8 ranks" in why_written(few)
    enough = Parallel(tensor=2, data=4, experts=True, redundant=4)
    assert in_runner(make_plan(model_of("mixtral"), enough, ABLE).plan) == 2


@pytest.mark.parametrize(
    ("engine", "parallel", "said"),
    [
        (capabilities.shipped(), Parallel(data=2), "cannot give each other the tokens"),
        (UNMAPPED, Parallel(data=2, experts=True), "exchange the ids of experts"),
    ],
)
def test_what_a_platform_lacks_runs_as_it_is_written(
    engine: Any, parallel: Parallel, said: str, model_of: Models
) -> None:
    plan = make_plan(model_of("mixtral"), parallel, engine).plan
    assert plan.is_served
    assert in_runner(plan) == 0
    assert said in why_written(plan)
    assert not make_plan(model_of("mixtral"), parallel, msgspec.structs.replace(engine, platform="cuda")).plan.is_served


def test_experts_that_take_rows_are_not_for_ranks_that_exchange_tokens(model_of: Models) -> None:
    sizes = {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 192}
    plan = make_plan(model_of("llama4_text", **sizes), Parallel(data=2), ABLE).plan
    assert (
        "take 2 rows of each token, and data-parallel ranks exchange as many rows as there are tokens"
        in why_written(plan)
    )
    assert in_runner(make_plan(model_of("llama4_text", **sizes), Parallel(), ABLE).plan) > 0
    one = make_plan(model_of("llama4_text", **sizes | {"num_experts_per_tok": 1}), Parallel(data=2), ABLE).plan
    assert in_runner(one) > 0


def test_inspect_shows_the_replicas_and_why_experts_run_as_they_are_written(model_of: Models) -> None:
    shown = Console(width=400, record=True, file=StringIO())
    render_plan(shown, make_plan(model_of("mixtral"), Parallel(data=2, experts=True), capabilities.shipped()).plan)
    text = shown.export_text()
    assert "pipeline parallel 1, data parallel 2, whole experts dealt out" in text
    assert "as written: data-parallel ranks of this platform cannot give each other the tokens for its experts" in text
