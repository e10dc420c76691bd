from __future__ import annotations

import re
from pathlib import Path

import pytest

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)


def test_there_are_examples_of_both_kinds() -> None:
    assert {b.startswith("# engine") for b in BLOCKS} == {True, False}


@pytest.mark.parametrize("block", [b for b in BLOCKS if not b.startswith("# engine")])
def test_an_example_runs(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.engine
@pytest.mark.parametrize("block", [b for b in BLOCKS if b.startswith("# engine")])
def test_an_example_with_the_engine_runs(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
