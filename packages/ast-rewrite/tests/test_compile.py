"""What a compiled rewrite keeps of the function it came from, and what debuggers see of it."""

import asyncio
import bdb
import hashlib
import inspect
import linecache
import os
import sys
import traceback
import types

import pytest
from ast_rewrite import FunctionSource, Patch, Refused, SourceSpan


def plus_one(c, text="x", nth=0):
    """Compile with the nth expression of this text replaced by itself plus one."""
    c.patch.replace(c.at(text, nth), "{it} + 1", it=c.at(text, nth))
    return c.patch.compile()


def test_names_defaults_annotations_and_attributes_are_kept(case):
    c = case(
        '''
        evaluated = []
        def note(value):
            evaluated.append(value)
            return value
        class C:
            def f(self, x: note("int") = note(1), *, y: "str" = note(2), **kw) -> note("out"):
                """What it does."""
                return x, y, kw
            f.mark = ["here"]
        f = C.f
        '''
    )
    made = plus_one(c).function
    assert c.module.evaluated == [1, 2, "int", "out"]
    for name in (
        "__name__",
        "__qualname__",
        "__module__",
        "__doc__",
        "__defaults__",
        "__kwdefaults__",
        "__annotations__",
    ):
        assert getattr(made, name) == getattr(c.fn, name)
    assert made.__qualname__ == "C.f"
    assert made.mark is c.fn.mark
    assert made.__kwdefaults__ is not c.fn.__kwdefaults__
    assert made(None, z=3) == (2, 2, {"z": 3})
    assert inspect.signature(made) == inspect.signature(c.fn)


def test_defaults_that_were_set_later_are_kept(case):
    c = case("def f(x=1):\n    return x\n")
    c.fn.__defaults__ = (40,)
    assert plus_one(c).function() == 41


def test_an_annotation_that_cannot_be_evaluated_again_does_no_harm(case):
    c = case("T = int\ndef f(x: T) -> T:\n    return x\ndel T\n")
    assert plus_one(c).function(1) == 2


def test_globals_are_the_very_same(case):
    c = case("n = 1\ndef f(x):\n    return x * n\n")
    made = plus_one(c)
    c.module.n = 10
    assert made.function(1) == 20
    assert made.inner.__globals__ is vars(c.module)


def test_zero_argument_super_works(case):
    c = case(
        """
        class A:
            def f(self, x):
                return x
        class B(A):
            def f(self, x):
                return super().f(x) * 2
        f = B.f
        """
    )
    made = plus_one(c)
    assert made.function(c.module.B(), 1) == 4
    assert made.inner.__closure__ == c.fn.__closure__


def test_a_new_super_works_where_there_is_a_class_cell(case):
    c = case(
        """
        class A:
            def f(self, x):
                return x
        class B(A):
            def f(self, x):
                assert __class__ is B
                return x
        f = B.f
        """
    )
    c.patch.replace(c.at("x"), "super().f({x}) * 3", x=c.at("x"))
    assert c.patch.compile().function(c.module.B(), 2) == 6


def test_closure_cells_are_mapped_by_name(case):
    c = case(
        """
        def make():
            zebra, apple, mango = 1, 2, 3
            def f(x):
                nonlocal mango
                mango += 1
                return [x, zebra, apple, mango]
            return f
        f = make()
        """
    )
    c.patch.replace(
        c.at("[x, zebra, apple, mango]"), "[{m}, {z}, {x}]", m=c.at("mango", 1), z=c.at("zebra"), x=c.at("x")
    )
    made = c.patch.compile().inner
    assert made("x") == [4, 1, "x"]
    assert c.fn("x") == ["x", 1, 2, 5]
    assert made("x") == [6, 1, "x"]
    assert made.__code__.co_freevars == ("mango", "zebra")


def test_a_name_of_the_enclosing_function_that_is_not_captured_cannot_be_read(case):
    c = case("def make():\n    a, b = 1, 2\n    def f(x):\n        return a + x\n    return f\nf = make()\n")
    c.patch.replace(c.at("a"), "b")
    with pytest.raises(Refused, match="reads b"):
        c.patch.compile()


def test_private_names_are_mangled_as_in_their_class(case):
    c = case(
        """
        class _Holder:
            def __init__(self):
                self.__x = 3
            def f(self):
                return self.__x
            def g(self):
                def inner(x):
                    return self.__x + x
                return inner
        f = _Holder.f
        g = _Holder().g()
        """
    )
    c.patch.replace(c.at("self.__x"), "{x} * self.__x", x=c.at("self.__x"))
    assert c.patch.compile().function(c.module._Holder()) == 9
    nested = Patch(FunctionSource.of(c.module.g))
    assert nested.compile().function(1) == 4


def test_private_names_outside_of_a_class_are_not_mangled(case):
    c = case("class C: pass\ndef f(x):\n    return x.__y\n")
    holder = types.SimpleNamespace(__y=1)
    assert plus_one(c, "x.__y").function(holder) == 2


def test_a_function_may_refer_to_itself_and_to_its_class(case):
    c = case(
        """
        def f(n):
            return n * f(n - 1) if n else 1
        class C:
            def g(self):
                return C
        """
    )
    made = plus_one(c, "n * f(n - 1)")
    assert made.function(3) == 3 * c.module.f(2) + 1
    assert Patch(FunctionSource.of(c.module.C.g)).compile().function(None) is c.module.C


def test_future_flags_are_kept(case):
    c = case("from __future__ import annotations\ndef f(x):\n    def g(y: nowhere): pass\n    return g, x\n")
    made = plus_one(c)
    assert made.function(1)[0].__annotations__ == {"y": "nowhere"}
    assert made.inner.__code__.co_flags == c.fn.__code__.co_flags


def test_qualified_names_inside_are_kept(case):
    c = case(
        "class C:\n    def f(self, x):\n        class D:\n            def g(self): pass\n        return x, D, lambda: 1\nf = C.f\n"
    )
    _, d, g = plus_one(c).function(None, 1)
    assert (d.__qualname__, d.g.__qualname__, g.__qualname__) == (
        "C.f.<locals>.D",
        "C.f.<locals>.D.g",
        "C.f.<locals>.<lambda>",
    )


def test_generators_coroutines_and_async_generators(case):
    c = case("def f(x):\n    yield x\n    return 5\n")
    assert list(plus_one(c).function(1)) == [2]
    c = case("async def f(x):\n    return x\n")
    assert asyncio.run(plus_one(c).function(1)) == 2
    c = case("async def f(x):\n    async for y in x:\n        yield y\n")
    assert inspect.isasyncgenfunction(plus_one(c, "y", 1).function)
    assert "async def f" in c.patch.result()


def test_global_statements_are_kept(case):
    c = case("total = 0\ndef f(x):\n    global total\n    total += x\n    return total\n")
    assert plus_one(c).function(4) == 5
    assert c.module.total == 5


def test_a_rewrite_can_be_rewritten(case):
    c = case(
        """
        import math
        class A:
            def f(self, x):
                return x
        class B(A):
            __bias = 100
            def f(self, x):
                '''Two
                lines'''
                return x + math.floor(0.5) + self.__bias + super().f(0)
        f = B.f
        """
    )
    again = FunctionSource.of(plus_one(c).function)
    assert (again.qualname, again.class_name, again.receiver) == ("B.f", "B", "self")
    patch = Patch(again)
    span = SourceSpan.of(again.tree.body[1].value)
    patch.replace(span, "({it}) * 10", it=span)
    made = patch.compile()
    assert made.function(c.module.B(), 1) == 1020
    assert FunctionSource.of(made.function).text == patch.result()


def test_the_source_of_a_rewrite_is_its_text(case):
    c = case(
        """
        import functools
        def d(fn):
            @functools.wraps(fn)
            def w(x): return fn(x)
            return w
        @d
        def f(x):
            return x  # c
        """
    )
    made = plus_one(c)
    expected = "def f(x):\n    return x + 1  # c\n"
    assert inspect.getsource(made.function) == inspect.getsource(made.inner) == expected
    assert inspect.getsourcefile(made.inner) == made.filename
    assert made.text.endswith(expected)
    assert made.text.startswith("# Made by ast_rewrite from ")
    assert f":{c.source.lineno}, f\n" in made.text
    assert hashlib.sha256(made.text.encode()).hexdigest() == made.sha256
    assert made.sha256[:16] in made.filename
    assert made.source_sha256 == c.source.sha256
    assert made.edits == c.patch.edits


def test_a_traceback_shows_the_rewritten_line(case):
    c = case("def f(x):\n    y = x\n    return y / 1\n")
    c.patch.replace(c.at("y / 1"), "{y} / 0", y=c.at("y", 1))
    made = c.patch.compile()
    with pytest.raises(ZeroDivisionError) as caught:
        made.function(1)
    frame = traceback.extract_tb(caught.tb)[-1]
    assert (frame.filename, frame.name, frame.line) == (made.filename, "f", "return y / 0")
    assert made.text.split("\n")[frame.lineno - 1] == "    return y / 0"


def test_a_breakpoint_stops_in_the_rewritten_file(case):
    made = plus_one(case("def f(x):\n    y = 2\n    return x * y\n"))
    line = made.text.split("\n").index("    y = 2") + 1
    stops = []

    class Debugger(bdb.Bdb):
        def user_line(self, frame):
            stops.append((frame.f_code.co_filename, frame.f_lineno, dict(frame.f_locals)))
            self.set_continue()

    debugger = Debugger()
    assert debugger.set_break(made.filename, line) is None
    tracing = sys.gettrace()
    try:
        debugger.runcall(made.function, 1)
    finally:
        sys.settrace(tracing)
    assert (debugger.canonic(made.filename), line, {"x": 1}) in [(debugger.canonic(f), n, v) for f, n, v in stops]


def test_line_events_name_the_file_and_its_lines(case):
    made = plus_one(case("def f(x):\n    y = x\n    return y\n"))
    events = []

    def trace(frame, event, argument):
        if frame.f_code is made.inner.__code__ and event == "line":
            events.append((frame.f_code.co_filename, made.text.split("\n")[frame.f_lineno - 1].strip()))
        return trace

    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        made.function(1)
    finally:
        sys.settrace(tracing)
    assert events == [(made.filename, "y = x + 1"), (made.filename, "return y")]


def test_the_original_is_untouched(case):
    c = case("def f(x):\n    return x\n")
    before = (c.fn.__code__, c.fn.__dict__, linecache.getlines(c.module.__file__))
    plus_one(c)
    assert (c.fn.__code__, c.fn.__dict__, linecache.getlines(c.module.__file__)) == before
    assert c.fn(1) == 1


def test_two_patches_of_one_function_are_apart(case):
    c = case("def f(x):\n    return x\n")
    other = Patch(c.source)
    assert plus_one(c).function(1) == 2
    assert other.compile().function(1) == 1


def test_the_text_does_not_say_where_the_package_lies():
    made = Patch(FunctionSource.of(bdb.Bdb.canonic)).compile()
    assert made.text.startswith("# Made by ast_rewrite from bdb.py:")
    assert os.path.dirname(bdb.__file__) not in made.text
