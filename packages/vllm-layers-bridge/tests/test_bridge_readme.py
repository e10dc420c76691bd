"""The README's code runs as it stands, in order, without vLLM, and prints what the README says it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_code_blocks_run_and_print_what_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "from_readme.py"
    without_vllm = "import sys\nsys.modules['vllm'] = None\n"
    script.write_text(without_vllm + "\n".join(blocks("python")))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in blocks("diff")[0].splitlines():
        assert line[1:].strip() in done.stdout
    for expected in (
        "Source(child='w1', shard=0, size=256), Source(child='w3', shard=1, size=256)",
        "ActivationAndMulSpec(name='act_and_mul', activation='silu')",
        "from_readme.py:",
        "`clamp` stands between `w1` and its activation; the fused layer has nothing there",
        "+    left_output, right_output = self.both_proj(x).chunk(2, dim=-1)",
        "+    return self.w2(left_output * right_output)",
    ):
        assert expected in done.stdout, done.stdout


def test_what_the_readme_names_exists() -> None:
    import importlib

    for module, names in {
        "vllm_layers_bridge": ("FUSIONS", "Fusion", "ModuleFacts", "BridgeError", "NotFusable", "NotBuildable", "WrongLayout"),
        "vllm_layers_bridge.fusions": ("GatedMLP", "QKV", "RMSNorm", "children", "source"),
        "vllm_layers_bridge.layers": ("build", "BuildContext", "FUSED_ACTIVATIONS", "linear"),
        "vllm_layers_bridge.seams.leaf": ("attention_leaf",),
        "vllm_layers_bridge.seams.attention": ("register_interface", "attach_attention", "attention_interface"),
        "vllm_layers_bridge.specs": tuple(re.findall(r"`(\w+Spec)`", README.read_text())),
    }.items():  # fmt: skip
        loaded = importlib.import_module(module)
        assert names
        assert [name for name in names if not hasattr(loaded, name)] == [], module
