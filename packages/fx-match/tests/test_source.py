"""Finding the function below its decorators, and columns where the interpreter keeps none."""

import functools
import importlib
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from fx_match import trace
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


@pytest.fixture
def module_without_columns(tmp_path, monkeypatch):
    """A module whose cached code was written by an interpreter that keeps no columns."""
    (tmp_path / "columnless.py").write_text(textwrap.dedent(MODULE))
    command = [sys.executable, "-S", "-X", "no_debug_ranges", "-m", "py_compile", "columnless.py"]
    subprocess.run(command, cwd=tmp_path, check=True)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("columnless")
    assert {column for _, _, column, _ in module.M.forward.__code__.co_positions()} == {None}
    yield module
    del sys.modules["columnless"]


def spans(module) -> list[str]:
    traced = trace(module.M(), (torch.zeros(2),))
    return [str(traced.span(node)) for node in traced.graph.nodes if node.op == "call_method"]


def test_code_that_was_compiled_without_columns_is_compiled_again(module_without_columns) -> None:
    assert spans(module_without_columns) == ["7:16-7:21", "7:15-7:26"]


def test_without_columns_and_source_there_is_no_span_rather_than_a_wrong_one(module_without_columns) -> None:
    os.truncate(module_without_columns.__file__, 0)
    assert spans(module_without_columns) == ["None", "None"]


def test_columns_of_a_source_that_has_changed_are_not_taken(module_without_columns) -> None:
    with open(module_without_columns.__file__, "w") as file:
        file.write(textwrap.dedent(MODULE).replace("* 2", "* x * 3"))
    assert spans(module_without_columns) == ["None", "None"]
