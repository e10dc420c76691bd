"""The README's code runs, and prints what the README says."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs_and_prints_its_diff(tmp_path):
    text = README.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    (tmp_path / "example.py").write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (diff,) = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    printed = re.sub(r"^--- .*example\.py", "--- example.py", done.stdout, flags=re.MULTILINE)
    assert printed.startswith(diff)


def test_everything_public_is_documented_in_the_readme():
    import ast_rewrite

    text = README.read_text()
    assert sorted(ast_rewrite.__all__) == ast_rewrite.__all__
    for name in ast_rewrite.__all__:
        assert f"`{name}" in text
        assert getattr(ast_rewrite, name).__doc__
