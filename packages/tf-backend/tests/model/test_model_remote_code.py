"""A model that brings its own Python code: not imported without trust, planned with it, and fused like any other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tf_backend.cli import main
from tf_backend.errors import ConfigError
from tf_backend.model.config import read_config
from tf_backend.model.remote_code import TrustedCode
from tf_backend.model.skeleton import skeleton
from tf_backend.plan import plan_folder
from tf_tools.own_code import write_own_code


@pytest.fixture(scope="module", autouse=True)
def _own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """transformers copies trusted code into a folder of modules: one for this file, since Python remembers the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_own_code(tmp_path / "own")


def test_it_is_not_imported_without_trust(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "modeling_own.py").write_text("raise AssertionError('imported')")
    with pytest.raises(ConfigError, match="Read that code, then give --trust-remote-code"):
        plan_folder(folder)
    assert main(["inspect", str(folder)]) == 1
    assert "--trust-remote-code" in capsys.readouterr().err


def test_it_is_planned_with_trust(folder: Path) -> None:
    plan = plan_folder(folder, trust_remote_code=True)
    assert plan.refusals == ()
    assert plan.provenance.architecture == "OwnForCausalLM"
    counts = {(count.cls, count.fusion): count.count for count in plan.summary()}
    assert counts[("OwnMLP", "gated_mlp")] == 2
    assert counts[("OwnAttention", "qkv")] == 2
    assert len(plan.attention) == 2


def test_code_that_changed_is_another_plan(folder: Path) -> None:
    before = plan_folder(folder, trust_remote_code=True).provenance.sources_sha256
    file = folder / "modeling_own.py"
    file.write_text(file.read_text().replace("silu", "gelu"))
    after = plan_folder(folder, trust_remote_code=True).provenance.sources_sha256
    assert before != after


def test_code_that_fails_is_told(folder: Path) -> None:
    config = read_config(folder, trust_remote_code=True)
    (folder / "modeling_own.py").write_text("raise RuntimeError('no such thing')")
    with pytest.raises(ConfigError, match=r"modeling_own\.OwnForCausalLM` raises RuntimeError: no such thing"):
        skeleton(config, code=TrustedCode(str(folder)))


def test_code_that_names_no_model(folder: Path) -> None:
    config = read_config(folder, trust_remote_code=True)
    (folder / "modeling_own.py").write_text("class OwnForCausalLM: ...")
    with pytest.raises(ConfigError, match="is no `PreTrainedModel`"):
        skeleton(config, code=TrustedCode(str(folder)))


def test_a_config_whose_code_is_for_other_tasks(folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["auto_map"]["AutoModelForTokenClassification"] = config["auto_map"].pop("AutoModelForCausalLM")
    file.write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"`OwnForCausalLM` is no architecture of transformers .*`AutoModelForCausalLM`"
    ):
        plan_folder(folder, trust_remote_code=True)
