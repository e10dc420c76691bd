"""The environment of the engine: what is unset is set, what the user set stays."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator

import pytest
from tf_backend.demo import prepare_environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in ("vllm", "torch.utils.cpp_extension")}
    kept = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("VLLM_", "TORCH_", "OMP_", "TRANSFORMERS_")):
            del os.environ[name]
    with warnings.catch_warnings():
        yield
    os.environ.clear()
    os.environ.update(kept)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_cpu_engine_runs_in_one_process_with_little_memory() -> None:
    prepare_environment("vllm-cpu")
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert os.environ["VLLM_LOGGING_STREAM"] == "ext://sys.stderr"


def test_threads_leave_a_core_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    prepare_environment("vllm-cpu")
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_one_core_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    prepare_environment("vllm-cpu")
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_what_the_user_set_stays() -> None:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "40"
    os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG"
    os.environ["OMP_NUM_THREADS"] = "2"
    prepare_environment("vllm-cpu")
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "40"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["OMP_NUM_THREADS"] == "2"


def test_gpu_engine_gets_no_cpu_settings() -> None:
    prepare_environment("vllm")
    assert not {"VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"} & set(os.environ)


def test_quiet_unless_asked() -> None:
    prepare_environment("vllm-cpu", verbose=True)
    assert "VLLM_LOGGING_LEVEL" not in os.environ
    prepare_environment("vllm-cpu")
    assert os.environ["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"
    assert logging.getLogger("vllm").level == logging.ERROR
