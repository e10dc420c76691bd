"""One good checkpoint and its plan, for the tests that break it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tf_backend.plan import plan_folder
from tf_backend.plan.schema import Plan
from tf_tools.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def good_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("checkpoints") / "good")


@pytest.fixture(scope="session")
def good_plan(good_checkpoint: Path) -> Plan:
    return plan_folder(good_checkpoint)
