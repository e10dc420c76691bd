"""The README's example runs as it is pasted, prints what it says, and leaves vLLM alone."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import moe_runner
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
    assert len(said) == 11


def test_neither_vllm_nor_transformers_is_imported_before_a_layer_is_built() -> None:
    imported = set()
    for file in Path(moe_runner.__file__).parent.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"torch", "fx_match", "moe_runner", "msgspec"}
