"""The README's example runs as it is pasted, prints what it says, and leaves vLLM alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_example_prints_what_the_readme_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    code = "\n".join(blocks)
    file = tmp_path / "mymodel.py"
    file.write_text(code)
    exec(compile(code, str(file), "exec"), {"__name__": "mymodel"})
    said = re.findall(r"^# (.*)$", code, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said
    assert len(said) == 6


def test_neither_vllm_nor_transformers_is_imported() -> None:
    code = "import sys, moe_runner; print({'vllm', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
