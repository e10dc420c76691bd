"""The README's example runs as it is pasted, prints what it says, and leaves vLLM alone."""

from __future__ import annotations

import ast
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import moe_runner
import msgspec
import pytest
import torch
from torch import Tensor

README = Path(__file__).parents[1] / "README.md"


def test_the_example_prints_what_the_readme_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    code = "\n".join(blocks)
    file = tmp_path / "mymodel.py"
    file.write_text(code)
    exec(compile(code, str(file), "exec"), {"__name__": "mymodel"})
    said = re.findall(r"^# (.*)$", code, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said
    assert len(said) == 12


def test_neither_vllm_nor_transformers_is_imported_before_a_layer_is_built() -> None:
    imported = set()
    for file in Path(moe_runner.__file__).parent.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"torch", "fx_match", "moe_runner", "msgspec"}


def test_the_api_names_all_that_there_is() -> None:
    api = README.read_text().partition("\n## API\n")[2]
    assert set(moe_runner.__all__) - set(re.findall(r"\w+", api)) == set()


def _run_as_the_readme_says() -> tuple[Tensor, Tensor]:
    """What the layer gives that the steps make of the experts of the example, called with random tokens, and what those give."""
    text = README.read_text()
    example = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    steps = re.search(r"```text\n(spec = .*?)```", text, re.DOTALL)
    assert steps is not None
    names: dict[str, Any] = {"__name__": "mymodel", "msgspec": msgspec}
    torch.manual_seed(0)
    file = Path(tempfile.mkdtemp()) / "mymodel.py"
    file.write_text(example)
    exec(compile(example, str(file), "exec"), names)
    written = names["GatedWorkers"](8, 64, 96)
    for parameter in written.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    names |= {"checkpoint": dict(written.named_parameters()), "block": SimpleNamespace()}
    exec(steps[1], names)
    x, weights = torch.randn(5, 64), torch.rand(5, 2)
    chosen = torch.rand(5, 8).topk(2).indices
    return names["block"].workers(x, chosen, weights), written(x, chosen, weights)


@pytest.mark.engine
def test_the_steps_lead_to_a_layer_that_runs(in_vllm: Callable[..., Any]) -> None:
    found, wanted = in_vllm(_run_as_the_readme_says)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
