"""What is ours of what vLLM would serve, and what one option gives back."""

from __future__ import annotations

import os

import pytest
from tf_backend.errors import OptionRefused
from tf_backend.plugin import AUTO, COMPILE_AHEAD, keep_compiled_code, takes_auto
from tf_tools.engine import warm
from tf_tools.fork import run_in_fork


@pytest.mark.parametrize(("value", "ours"), [(None, True), ("1", True), ("0", False)])
def test_what_is_sent_by_name(value: str | None, ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AUTO, raising=False)
    if value is not None:
        monkeypatch.setenv(AUTO, value)
    assert takes_auto() is ours


@pytest.mark.parametrize("value", ["", "no", "true", "2"])
def test_a_value_of_no_meaning(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTO, value)
    with pytest.raises(OptionRefused, match=f"TF_BACKEND_AUTO is '{value}', expected 1, or 0"):
        takes_auto()


def _owners(value: str) -> dict[str, str]:
    os.environ[AUTO] = value
    from tf_backend.plugin import _sent_by_architecture, register
    from vllm.model_executor.models import ModelRegistry  # noqa: TID251  what the plugin writes into

    register()
    register()
    names = ["TransformersForCausalLM", *_sent_by_architecture()]
    known = {name: ModelRegistry.models[name] for name in names}
    return {name: str(getattr(getattr(model, "model_cls", model), "__module__", "")) for name, model in known.items()}


@pytest.mark.engine
@pytest.mark.parametrize("value", ["0", "1"])
def test_the_registry(value: str) -> None:
    warm()
    owners = run_in_fork(_owners, 120.0, value).value()
    assert owners.pop("TransformersForCausalLM") == "tf_backend.model.served"
    assert len(owners) > 10
    assert "Olmo2ForCausalLM" in owners
    is_ours = {owner.startswith("tf_backend.") for owner in owners.values()}
    assert is_ours == {value == "1"}


def _kept(given: str | None, is_cpu: bool) -> str | None:
    from vllm.platforms import current_platform

    os.environ.pop(COMPILE_AHEAD, None)
    if given is not None:
        os.environ[COMPILE_AHEAD] = given
    type(current_platform).is_cpu = lambda self: is_cpu
    keep_compiled_code()
    return os.environ.get(COMPILE_AHEAD)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("given", "is_cpu", "kept"), [(None, True, "0"), ("1", True, "1"), (None, False, None), ("0", False, "0")]
)
def test_where_artifacts_do_not_load_there_are_none(given: str | None, is_cpu: bool, kept: str | None) -> None:
    warm()
    assert run_in_fork(_kept, 120.0, given, is_cpu).value() == kept
