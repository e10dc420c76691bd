"""A refusal that comes of a number in config.json that is no size says which; any other is left as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tf_backend.plan import Plan, plan_folder
from tf_tools.checkpoints import GROUPED
from transformers import PreTrainedConfig


@pytest.fixture
def plan_with(
    config_of: Callable[..., PreTrainedConfig], tmp_path: Path, platform: Any
) -> Callable[[str, dict[str, Any]], Plan]:
    """The plan of a recipe's config, written to a folder, with other values."""

    def make(recipe: str, wrong: dict[str, Any]) -> Plan:
        sizes = GROUPED if recipe == "deepseek_v3" else {}
        values = config_of(recipe, **sizes).to_diff_dict() | wrong
        (tmp_path / "config.json").write_text(json.dumps(values))
        return plan_folder(tmp_path, capabilities=platform)

    return make


@pytest.mark.parametrize(
    ("recipe", "wrong", "reason"),
    [
        ("mistral", {"sliding_window": -1}, "under a mask"),
        ("mistral", {"sliding_window": 0}, "under a mask"),
        ("mixtral", {"num_experts_per_tok": 0}, "top 0"),
        ("llama", {"max_position_embeddings": 0}, "sequences of at most 0 tokens"),
    ],
)
def test_the_number_is_named(
    recipe: str, wrong: dict[str, Any], reason: str, plan_with: Callable[[str, dict[str, Any]], Plan]
) -> None:
    (refusal,) = plan_with(recipe, wrong).refusals
    assert reason in refusal.reason
    ((field, value),) = wrong.items()
    assert refusal.remedy == f'Correct "{field}": {value} in config.json.'


@pytest.mark.parametrize(
    ("recipe", "wrong", "fails", "blamed"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "MixtralTopKRouter", '"num_experts_per_tok": 9'),
        ("deepseek_v3", {"topk_group": 5}, "DeepseekV3TopkRouter", '"topk_group": 5'),
        ("deepseek_v3", {"n_group": 3}, "DeepseekV3TopkRouter", '"n_group": 3 and "topk_group": 2'),
    ],
)
def test_numbers_by_which_the_model_itself_fails_are_named_with_what_it_raises(
    recipe: str,
    wrong: dict[str, Any],
    fails: str,
    blamed: str,
    plan_with: Callable[[str, dict[str, Any]], Plan],
) -> None:
    (refusal,) = plan_with(recipe, wrong).refusals
    assert refusal.reason.startswith(f"`{fails}")
    assert " fails when it runs: RuntimeError: " in refusal.reason
    assert refusal.remedy == f"Correct {blamed} in config.json."


def test_a_number_that_changes_nothing_is_not_named(plan_with: Callable[[str, dict[str, Any]], Plan]) -> None:
    wrong = {"pad_token_id": 0, "num_key_value_heads": 3}
    (refusal,) = plan_with("llama", wrong).refusals
    assert "no equal groups of heads" in refusal.reason
    assert "--model-impl vllm" in refusal.remedy


def test_a_model_that_is_served_is_planned_once(
    plan_with: Callable[[str, dict[str, Any]], Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("looked for a field to blame")

    monkeypatch.setattr("tf_backend.plan.sizes_to_blame.find_size_to_blame", fail)
    assert plan_with("llama", {"pad_token_id": 0}).is_served
    with pytest.raises(AssertionError, match="looked for"):
        plan_with("llama", {"num_key_value_heads": 3})
