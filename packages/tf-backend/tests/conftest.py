"""Shared by the tests of tf-backend: scaled tiny checkpoints, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tf_tools.checkpoints import make_checkpoint

torch.set_num_threads(1)  # before any other use: an OpenMP pool would not survive the fork of the engine tests


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a recipe's checkpoint; tests only read it."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp("checkpoints") / name)
        return made[name]

    return get


@pytest.fixture(autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("TF_TOOLS_CACHE", str(base / "reference-cache"))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(base / "vllm-cache"))
