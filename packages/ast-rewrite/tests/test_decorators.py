"""Decorator chains: the innermost function found, and the chain built again around another."""

import functools

import pytest
from ast_rewrite import FunctionSource, Patch, Refused

DECORATORS = """
import functools

log = []

def wrapping(fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        log.append("wrapping")
        return fn(*args, **kwargs)
    return inner

def hiding(fn):
    def inner(*args, **kwargs):
        log.append("hiding")
        return fn(*args, **kwargs)
    return inner

def naming(text):
    def decorator(fn):
        @functools.wraps(fn)
        def inner(*args):
            log.append(text)
            return fn(*args)
        return inner
    return decorator
"""


def doubled(case):
    case.patch.replace(case.at("x + 1"), "({one}) * 2", one=case.at("x + 1"))
    return case.patch.compile()


@pytest.mark.parametrize(
    ("decorators", "logged"),
    [
        ([], []),
        (["wrapping"], ["wrapping"]),
        (["hiding"], ["hiding"]),
        (["hiding", "wrapping"], ["hiding", "wrapping"]),
        (["wrapping", "hiding"], ["wrapping", "hiding"]),
        (["hiding", "hiding"], ["hiding", "hiding"]),
        (["naming('a')", "hiding", "naming('b')"], ["a", "hiding", "b"]),
    ],
)
def test_the_chain_runs_around_the_new_function(case, decorators, logged):
    c = case(DECORATORS + "".join(f"@{d}\n" for d in decorators) + "def f(x):\n    return x + 1\n")
    assert c.source.qualname == "f"
    assert c.source.text == "def f(x):\n    return x + 1\n"
    made = doubled(c)
    assert made.function(3) == 8
    assert c.module.log == logged
    assert made.inner(3) == 8
    assert c.module.log == logged


def test_the_original_and_its_wrappers_are_untouched(case):
    c = case(DECORATORS + "@hiding\n@wrapping\ndef f(x):\n    return x + 1\n")
    cells = [cell.cell_contents for function in c.source.chain for cell in function.__closure__ or ()]
    made = doubled(c)
    assert c.module.f(3) == 4
    assert [cell.cell_contents for function in c.source.chain for cell in function.__closure__ or ()] == cells
    assert made.function is not c.module.f
    assert made.function.__code__ is c.module.f.__code__


def test_wrapped_leads_to_the_new_function(case):
    c = case(DECORATORS + "@naming('a')\n@wrapping\ndef f(x):\n    return x + 1\n")
    made = doubled(c)
    assert made.function.__wrapped__ is not c.module.f.__wrapped__
    assert made.function.__wrapped__.__wrapped__ is made.inner
    assert made.function.__closure__[0].cell_contents is made.function.__wrapped__


def test_a_wrapper_that_remembers_the_innermost_function_gets_the_new_one(case):
    c = case(
        DECORATORS
        + """
def outer(fn):
    hidden = hiding(fn)
    @functools.wraps(fn)
    def inner(*args):
        return hidden(*args)
    return inner

@outer
def f(x):
    return x + 1
"""
    )
    made = doubled(c)
    assert made.function(3) == 8
    assert made.function.__wrapped__ is made.inner
    assert c.module.f(3) == 4


def test_a_closure_that_is_no_decorator_is_taken_as_it_is(case):
    c = case(
        """
        def make():
            def helper(x):
                return x
            def f(x):
                return helper(x) + 1
            return f
        f = make()
        """
    )
    assert c.source.name == "f"
    c.patch.replace(c.at("helper(x) + 1"), "{call} + 5", call=c.at("helper(x)"))
    assert c.run(1) == 6


def test_a_method_made_by_a_factory_is_taken_as_it_is(case):
    c = case(
        """
        def act(x):
            return -x
        def make(act):
            class C:
                def f(self, x):
                    return act(x)
            return C
        f = make(act).f
        """
    )
    assert c.source.qualname == "make.<locals>.C.f"


def test_a_function_made_from_another_can_be_taken_as_it_is_on_request(module):
    m = module(
        """
        def helper(x):
            return x
        def make(helper):
            def f(x):
                return helper(x) + 1
            return f
        f = make(helper)
        """
    )
    assert FunctionSource.of(m.f).name == "helper"
    source = FunctionSource.of(m.f, unwrap=False)
    assert source.name == "f"
    assert source.decorated is source.function is m.f


def test_a_function_made_from_several_is_refused(module):
    m = module(
        DECORATORS
        + """
def both(fn, other):
    def inner(*args):
        return fn(*args), other(*args)
    return inner

f = both(log.append, print)
g = both(hiding, wrapping)
"""
    )
    assert FunctionSource.of(m.f).name == "inner"  # no Python functions are held
    with pytest.raises(Refused, match="captures several functions"):
        FunctionSource.of(m.g)


def test_a_partial_in_the_chain_is_refused(module):
    m = module(
        DECORATORS
        + """
def outer(fn):
    held = functools.partial(fn)
    @functools.wraps(fn)
    def inner(*args):
        return held(*args)
    return inner

@outer
def f(x):
    return x + 1
"""
    )
    with pytest.raises(Refused, match="none of its closure cells"):
        FunctionSource.of(m.f)


def test_an_instance_that_wraps_is_refused(module):
    m = module(
        """
        import functools
        class Wrapper:
            def __init__(self, fn):
                functools.update_wrapper(self, fn)
            def __call__(self, x):
                return self.__wrapped__(x)
        @Wrapper
        def f(x):
            return x
        """
    )
    with pytest.raises(Refused, match="not a plain function"):
        FunctionSource.of(m.f)


def test_a_c_wrapper_is_refused(module):
    m = module("import functools\n@functools.lru_cache\ndef f(x):\n    return x\n")
    with pytest.raises(Refused, match="not a plain function"):
        FunctionSource.of(m.f)


def test_a_static_method_object_is_refused():
    with pytest.raises(Refused, match="not a plain function"):
        FunctionSource.of(staticmethod(doubled))


def test_two_cells_with_the_function_are_refused(module):
    m = module(
        """
        import functools
        def twice(fn):
            again = fn
            @functools.wraps(fn)
            def inner(x):
                return fn(again(x))
            return inner
        @twice
        def f(x):
            return x
        """
    )
    with pytest.raises(Refused, match="2 of its closure cells"):
        FunctionSource.of(m.f)


def test_a_wrapper_that_also_holds_the_function_in_an_attribute_is_refused(module):
    m = module(DECORATORS + "@wrapping\ndef f(x):\n    return x\nf.again = f.__wrapped__\n")
    with pytest.raises(Refused, match="a default or an attribute"):
        FunctionSource.of(m.f)


def test_a_borrowed_signature_is_no_decorator(module):
    m = module(DECORATORS + "def g(x):\n    return x\ndef f(x):\n    return 1\nfunctools.update_wrapper(f, g)\n")
    with pytest.raises(Refused, match="none of its closure cells"):
        FunctionSource.of(m.f)
    assert FunctionSource.of(m.f, unwrap=False).name == "f"


def test_wrapping_oneself_is_refused(module):
    m = module("def f(x):\n    return x\nf.__wrapped__ = f\n")
    with pytest.raises(Refused, match="wraps itself"):
        FunctionSource.of(m.f)


def test_context_managers_as_decorators_work(case):
    c = case(
        """
        import contextlib
        seen = []
        @contextlib.contextmanager
        def noted():
            seen.append("in")
            yield
        @noted()
        def f(x):
            return x + 1
        """
    )
    assert doubled(c).function(1) == 4
    assert c.module.seen == ["in"]


def test_attributes_of_a_wrapper_are_copied(case):
    c = case(DECORATORS + "@wrapping\ndef f(x):\n    return x + 1\nf.mark = [1]\n")
    made = doubled(c)
    assert made.function.mark is c.module.f.mark
    assert functools.WRAPPER_ASSIGNMENTS
    assert made.function.__name__ == "f"


def test_nothing_edited_gives_the_same_text(case):
    c = case(DECORATORS + "@hiding\ndef f(x):\n    return x + 1\n")
    assert Patch(c.source).compile().function(1) == 2
