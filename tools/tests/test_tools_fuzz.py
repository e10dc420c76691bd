"""Generated modules: the property holds of a few hundred, and a wrong rewrite or placement is found."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tf_backend.plan.placement import operations
from tf_tools.fuzz import KINDS, Counterexample, Program, check, run_kind, shares
from tf_tools.fuzz.__main__ import main
from vllm_layers_bridge.fusions import QKV, GatedMLP, RMSNorm

EXAMPLES = 160


@pytest.fixture(autouse=True)
def _own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AST_REWRITE_CACHE", str(tmp_path_factory.getbasetemp() / "rewrites"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_rewritten_or_split_gives_what_was_written(kind: str) -> None:
    tally = run_kind(kind, shares(EXAMPLES)[kind], number=None)
    assert tally.counterexample is None, str(tally.counterexample)
    assert tally.ran > tally.examples // 2
    assert tally.split if kind == "pair" else tally.fused > tally.examples // 4


def test_shares_are_of_all_examples() -> None:
    assert sum(shares(3000).values()) == 3000
    assert shares(10, ("mlp",)) == {"mlp": 10}


# Planted faults: each must be seen


def _swapped(layers: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        merged, *others = layers(*arguments)
        first, second, *rest = merged.sources
        sources = (
            msgspec.structs.replace(second, shard=first.shard),
            msgspec.structs.replace(first, shard=second.shard),
            *rest,
        )
        return (msgspec.structs.replace(merged, sources=sources), *others)

    return run


def _without_eps(layers: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: tuple(msgspec.structs.replace(layer, eps=0.0) for layer in layers(*arguments))


def _without_offset(layers: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: tuple(msgspec.structs.replace(layer, offset=0.0) for layer in layers(*arguments))


FAULTS: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "gate in the place of up": ("mlp", GatedMLP, "layers", _swapped),
    "query in the place of key": ("qkv", QKV, "layers", _swapped),
    "no eps": ("norm", RMSNorm, "layers", _without_eps),
    "no offset": ("norm", RMSNorm, "layers", _without_offset),
    "a softmax of each rank's own": (
        "pair",
        operations,
        "_unless_over",
        lambda _: lambda axes, node, name, state: state,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, owner, name, broken = FAULTS[fault]
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    tally = run_kind(kind, 150, number=None, shrink=False)
    assert tally.counterexample is not None
    assert "differs by" in tally.counterexample.problem


def test_what_is_found_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RMSNorm, "layers", _without_eps(RMSNorm.layers))
    tally = run_kind("norm", 150, number=None)
    assert tally.counterexample is not None
    program = tally.counterexample.program
    (block,) = [node for node in ast.walk(ast.parse(program.text)) if isinstance(node, ast.ClassDef)]
    (forward,) = [node for node in block.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    assert len(forward.body) <= 3
    assert len(program.instances) == 1


def test_what_planning_raises_is_a_counterexample(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("gate")

    monkeypatch.setattr(GatedMLP, "match", broken)
    tally = run_kind("mlp", 3, number=None, shrink=False)
    assert tally.counterexample is not None
    assert "raised KeyError" in tally.counterexample.problem


def test_a_program_that_does_not_run_is_no_counterexample() -> None:
    text = (
        "from torch import nn\nclass Block(nn.Module):\n    def __init__(self, config):\n        super().__init__()\n"
        "    def forward(self, x):\n        return y\n"
    )
    verdict = check(Program("mlp", text))
    assert (verdict.compared, verdict.fused) == (0, 0)
    with pytest.raises(Counterexample):
        check(Program("mlp", "raise ValueError('text')"))


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--examples", "0"]) == 2
    assert main(["--examples", "6", "--kind", "norm"]) == 0
    assert "norm" in capsys.readouterr().out
    monkeypatch.setattr(RMSNorm, "layers", _without_eps(RMSNorm.layers))
    assert main(["--examples", "100", "--kind", "norm"]) == 1
    assert "class Block" in capsys.readouterr().out
