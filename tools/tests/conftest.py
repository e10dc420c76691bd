"""Shared by the tests of the tools: one process-wide torch setting, one cache folder per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tf_tools.checkpoints import make_checkpoint

torch.set_num_threads(1)  # before any other use: an OpenMP pool would not survive the fork of the engine tests


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a recipe's checkpoint, made once per session; tests only read it."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp("checkpoints") / name)
        return made[name]

    return get


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_TOOLS_CACHE", str(tmp_path_factory.getbasetemp() / "reference-cache"))
