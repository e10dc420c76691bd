"""The README's code runs, in order, as a newcomer would paste it."""

import re
from pathlib import Path


def test_the_readmes_code_runs(tmp_path, capsys) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 5
    file = tmp_path / "readme.py"
    file.write_text("\n".join(blocks))
    exec(compile(file.read_text(), str(file), "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "no match" in printed
    assert "self.act_fn(self.gate_proj(x)) + self.up_proj(x)" in printed
    assert "attention" in printed
