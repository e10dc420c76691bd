"""Finding the function below its decorators, and columns where the interpreter keeps none."""

import functools
import subprocess
import sys
import textwrap

import torch
from fx_match._source import FrameReader, SourceSpan, undecorated


def plain(self, x):
    return x


def test_undecorated_follows_wrapped_partials_and_bound_methods() -> None:
    assert undecorated(plain, "plain") is plain
    assert undecorated(functools.partial(plain, None), "plain") is plain
    assert undecorated(torch.no_grad()(plain), "plain") is plain

    class C:
        method = plain

    assert undecorated(C().method, "method") is plain


def test_undecorated_finds_the_one_function_of_that_name_in_the_cells() -> None:
    def hide(function, other=None):
        def wrapper(*args):
            return function(*args) if other is None else other(*args)

        return wrapper

    assert undecorated(hide(plain), "plain") is plain
    assert undecorated(hide(hide(plain)), "plain") is plain
    outer = hide(hide(plain), hide(plain))
    assert undecorated(outer, "plain") is plain
    unrelated = hide(len)
    assert undecorated(unrelated, "plain") is unrelated


def test_undecorated_of_a_builtin_is_none() -> None:
    assert undecorated(len, "len") is None


def test_span_prints_and_orders() -> None:
    first, second = SourceSpan(1, 2, 1, 5), SourceSpan(1, 3, 1, 5)
    assert first < second
    assert str(first) == "1:2-1:5"


def test_an_instruction_outside_the_code_has_no_span() -> None:
    assert FrameReader(plain.__code__).span(plain.__code__, 10_000) is None


MODULE = """
import torch
from torch import nn

class M(nn.Module):
    def forward(self, x):
        return (x * 2) + x
"""
PROGRAM = """
import model, torch
from fx_match import trace

traced = trace(model.M(), (torch.zeros(2),))
print([str(traced.span(node)) for node in traced.graph.nodes if node.op == "call_method"])
"""


def run(folder, *options: str) -> str:
    (folder / "model.py").write_text(textwrap.dedent(MODULE))
    command = [sys.executable, *options, "-c", PROGRAM]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout.strip()


def test_without_columns_there_is_no_span_rather_than_a_wrong_one(tmp_path) -> None:
    assert run(tmp_path, "-X", "no_debug_ranges") == "['None', 'None']"


def test_code_that_was_compiled_without_columns_is_compiled_again(tmp_path) -> None:
    (tmp_path / "model.py").write_text(textwrap.dedent(MODULE))
    subprocess.run(
        [sys.executable, "-X", "no_debug_ranges", "-m", "compileall", "-q", "model.py"], cwd=tmp_path, check=True
    )
    code = "import model; print(next(iter(model.M.forward.__code__.co_positions()))[2])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path).stdout == "None\n"
    assert run(tmp_path) == "['7:16-7:21', '7:15-7:26']"
