"""Planning works without vLLM: nothing in this package imports it before a layer is built."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = """
import sys

class NoVllm:
    def find_spec(self, name, path=None, target=None):
        if name == "vllm" or name.startswith("vllm."):
            raise ImportError("vLLM is not installed")

sys.meta_path.insert(0, NoVllm())
import importlib, pkgutil
import vllm_layers_bridge
names = [m.name for m in pkgutil.walk_packages(vllm_layers_bridge.__path__, "vllm_layers_bridge.")]
for name in names:
    importlib.import_module(name)
assert not [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]
print(len(names))
"""


def test_every_module_imports_without_vllm() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 18
