"""From running code to spans, with and without columns in the code."""

import dis
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from ast_rewrite import FunctionSource, SourceSpan, span_of_instruction

TEXT = """
import sys

seen = []

def note(x):
    frame = sys._getframe(1)
    seen.append((frame.f_code, frame.f_lasti))
    return x

class Box:
    def plus(self, n):
        seen.append((sys._getframe(1).f_code, sys._getframe(1).f_lasti))
        return self

def f(x, box):
    'ä'; note(x)
    y = note(x) + [note(t) for t in [x]][0]
    z = (
        box
        .plus(1)
        .plus(note(2))
    )
    return (lambda: note(y))()
"""

EXPECTED = [
    "note(x)",
    "note(x)",
    "note(t)",
    "box\n        .plus(1)",
    "note(2)",
    "box\n        .plus(1)\n        .plus(note(2))",
    "note(y)",
]


def test_a_frame_on_the_stack_leads_to_the_call_it_is_in(case):
    c = case(TEXT)
    c.fn(1, c.module.Box())
    spans = [span_of_instruction(c.source, code, lasti) for code, lasti in c.module.seen]
    assert [c.source.segment(span) for span in spans] == EXPECTED
    for span in spans:
        assert SourceSpan.of(c.source.expression_at(span)) == span


def test_a_copy_of_the_code_will_do(case):
    c = case(TEXT)
    c.fn(1, c.module.Box())
    code, lasti = c.module.seen[0]
    copy = code.replace(co_flags=code.co_flags, co_stacksize=code.co_stacksize + 3)
    assert copy is not code
    assert c.source.segment(span_of_instruction(c.source, copy, lasti)) == "note(x)"


def test_code_of_another_function_is_an_error(case):
    c = case(TEXT)
    with pytest.raises(ValueError, match="is not of f"):
        span_of_instruction(c.source, c.module.note.__code__, 0)


@pytest.mark.parametrize("lasti", [-2, 1, 10_000])
def test_no_instruction_is_an_error(case, lasti):
    c = case(TEXT)
    with pytest.raises(ValueError, match="no instruction"):
        span_of_instruction(c.source, c.fn.__code__, lasti)


def test_an_instruction_without_a_position_has_no_span(case):
    c = case("def f(x):\n    return x\n")
    code = c.fn.__code__
    no_location = bytes([0x80 | 15 << 3 | len(code.co_code) // 2 - 1])
    assert span_of_instruction(c.source, code.replace(co_linetable=no_location), 0) is None
    assert span_of_instruction(c.source, code.replace(co_linetable=b""), 0) is None


@pytest.mark.parametrize("option", [["-X", "no_debug_ranges"], ["-O", "-X", "no_debug_ranges"]])
def test_without_columns_the_file_is_compiled_again(module, option):
    m = module(TEXT)
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("plain", {m.__file__!r})
module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
from ast_rewrite import FunctionSource, span_of_instruction
source = FunctionSource.of(module.f)
assert all(p[2] is None for p in module.f.__code__.co_positions())
module.f(1, module.Box())
print([source.segment(span_of_instruction(source, code, lasti)) for code, lasti in module.seen])
"""
    environment = {**os.environ, "PYTHONNODEBUGRANGES": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *option, "-c", program], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout == f"{EXPECTED}\n", done.stderr


def test_every_call_instruction_of_a_real_module_lands_on_one_call():
    """Positions of the interpreter against ranges of the syntax tree, over a module of the standard library."""
    import difflib

    calls = missed = 0
    for holder in (difflib, difflib.SequenceMatcher, difflib.Differ, difflib.HtmlDiff):
        for fn in vars(holder).values():
            if not isinstance(fn, types.FunctionType) or fn.__code__.co_filename != difflib.__file__:
                continue
            source = FunctionSource.of(fn, unwrap=False)
            for instruction in dis.get_instructions(fn):
                if instruction.opname != "CALL":
                    continue
                span = span_of_instruction(source, fn.__code__, instruction.offset)
                text = source.segment(span)
                calls += 1
                missed += not text.endswith(")")
    assert calls > 100
    assert missed <= calls // 10  # comprehensions are calls too, with the range of the comprehension
    assert Path(difflib.__file__).name == "difflib.py"
