"""Rewritten classes: what they still are, and that a pickled fused module is fused where it is loaded."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import ast_rewrite
import pytest
import torch
from tf_backend import generated
from tf_backend.generated import derive
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

LOAD = """
import pickle, sys, torch
with open(sys.argv[1], "rb") as stream:
    module = pickle.load(stream)
kind = type(module)
assert kind.__name__ == "LlamaMLP", kind
assert kind.__module__ == "tf_backend.generated", kind.__module__
assert "gate_up_proj" in kind.forward.__code__.co_names
torch.save(module(torch.load(sys.argv[2])), sys.argv[3])
"""


class SwiGLU(nn.Module):
    """What vLLM's fused activation computes, for tests without vLLM."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


def fused_mlp() -> tuple[nn.Module, nn.Module]:
    """A LlamaMLP and the same weights fused, by the fusion's own rewrite."""
    from fx_match import Match, trace
    from vllm_layers_bridge.fusions import GatedMLP

    torch.manual_seed(0)
    original = LlamaMLP(LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2)).eval()
    traced = trace(original, (torch.empty(1, 3, 16, device="meta"),))
    match = GatedMLP().match(traced)
    assert isinstance(match, Match)
    patch = ast_rewrite.Patch(ast_rewrite.FunctionSource.of(LlamaMLP.forward))
    GatedMLP().rewrite(match, traced, patch)
    fused = copy.deepcopy(original)
    fused.gate_up_proj = nn.Linear(16, 48, bias=False)
    fused.gate_up_proj.weight = nn.Parameter(torch.cat([original.gate_proj.weight, original.up_proj.weight]))
    fused.act_and_mul = SwiGLU()
    del fused.gate_proj, fused.up_proj
    fused.__class__ = derive(LlamaMLP, patch.compile())
    return original, fused


def test_a_rewritten_class_is_still_what_it_was() -> None:
    original, fused = fused_mlp()
    assert isinstance(fused, LlamaMLP)
    assert type(fused).__name__ == "LlamaMLP"
    assert type(fused) is not LlamaMLP
    assert type(original) is LlamaMLP
    assert "gate_proj" in LlamaMLP.forward.__code__.co_names, "the original class was touched"
    x = torch.randn(2, 3, 16)
    expected, found = original(x), fused(x)
    assert (expected - found).norm() / expected.norm() < 1e-5


def test_the_class_lives_in_an_importable_namespace() -> None:
    _, fused = fused_mlp()
    kind = type(fused)
    assert getattr(generated, kind.__qualname__) is kind
    assert pickle.loads(pickle.dumps(kind)) is kind


def test_one_class_for_one_text() -> None:
    assert type(fused_mlp()[1]) is type(fused_mlp()[1])


def test_source_and_traceback_show_the_rewritten_lines() -> None:
    _, fused = fused_mlp()
    assert "self.act_and_mul(self.gate_up_proj(x))" in inspect.getsource(type(fused).forward)
    with pytest.raises(RuntimeError) as caught:
        fused(torch.randn(1, 5))
    assert "self.act_and_mul(self.gate_up_proj(x))" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_a_copy_is_fused() -> None:
    _, fused = fused_mlp()
    copied = copy.deepcopy(fused)
    assert type(copied) is type(fused)
    x = torch.randn(2, 16)
    assert torch.equal(copied(x), fused(x))


def test_a_pickled_module_is_fused_in_another_process(tmp_path: Path) -> None:
    _, fused = fused_mlp()
    fused.act_and_mul = nn.GLU()  # importable anywhere; what it computes does not matter here
    x = torch.randn(2, 16)
    (tmp_path / "module.pickle").write_bytes(pickle.dumps(fused))
    torch.save(x, tmp_path / "x.pt")
    paths = [str(tmp_path / name) for name in ("module.pickle", "x.pt", "y.pt")]
    done = subprocess.run([sys.executable, "-c", LOAD, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "y.pt"), fused(x))


def test_a_pickle_from_another_source_is_refused() -> None:
    _, fused = fused_mlp()
    rebuild, (module, qualname, edits, _, sha256), _ = fused.__reduce_ex__(2)
    with pytest.raises(ast_rewrite.Refused):
        rebuild(module, qualname, edits, "0" * 64, sha256)


def test_an_unknown_rewritten_class_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="was derived in this process"):
        generated.NoSuchClass_0123
