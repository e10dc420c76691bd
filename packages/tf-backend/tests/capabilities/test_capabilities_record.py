"""The installed engine is asked, and the answer is what is shipped for it."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
from tf_backend import capabilities
from tf_backend.capabilities import _check
from tf_backend.errors import CapabilityMismatch


def test_a_mismatch_names_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = capabilities.shipped()
    met = msgspec.structs.replace(planned, name="vllm 1 cuda", platform="cuda", attention_head_sizes=(64,))
    monkeypatch.setattr(_check, "record", lambda: met)
    with pytest.raises(CapabilityMismatch) as caught:
        capabilities.check(planned)
    assert set(caught.value.fields) == {"platform", "attention_head_sizes"}
    text = str(caught.value)
    assert "platform: planned 'cpu', met 'cuda'" in text
    assert "capabilities record" in text
    assert "\n" not in text


def test_the_same_engine_under_another_name_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = capabilities.shipped()
    monkeypatch.setattr(_check, "record", lambda: msgspec.structs.replace(planned, name="other"))
    capabilities.check(planned)
    assert planned.differences(_check.record()) == {}


@pytest.mark.engine
def test_recording_gives_the_shipped_bytes_and_leaves_the_environment() -> None:
    found = capabilities.installed()
    if found is None or f"{found.name}-{found.version}" not in capabilities.shipped_names():
        pytest.skip("no capabilities are shipped for the installed engine")
    # A configuration of vLLM sets these two for a single rank; recording makes one. An engine records with its model's type as the default.
    code = (
        "import os, sys, torch; from tf_backend import capabilities; torch.set_default_dtype(torch.bfloat16); "
        "sys.stdout.write(capabilities.record().to_json().decode()); "
        "assert not {'LOCAL_WORLD_SIZE', 'NUMEXPR_MAX_THREADS'} & set(os.environ)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={
            name: value for name, value in os.environ.items() if name not in ("LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS")
        }
        | {"VLLM_LOGGING_STREAM": "ext://sys.stderr"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.encode() == capabilities.shipped(f"{found.name}-{found.version}").to_json()
