"""Finding the source of a function, and refusing what is not its source."""

import ast
import functools
import importlib
import sys
import types

import pytest
from ast_rewrite import FunctionSource, Patch, Refused, SourceSpan, SourceUnavailable


def test_a_method_is_given_as_it_stands_in_its_file(case):
    c = case(
        """
        import functools

        def mark(fn):
            @functools.wraps(fn)
            def inner(*args):
                return fn(*args)
            return inner

        class C:
            @mark
            def f(self, x):  # a comment
                return x + 1  # the end

        f = C.f
        """
    )
    source = c.source
    assert source.text == "    def f(self, x):  # a comment\n        return x + 1  # the end\n"
    assert source.full_text == "    @mark\n" + source.text
    assert source.dedented == "def f(self, x):  # a comment\n    return x + 1  # the end\n"
    assert (source.name, source.qualname, source.lineno, source.class_name) == ("f", "C.f", 12, "C")
    assert source.filename == c.module.__file__
    assert source.function is c.module.C.f.__wrapped__
    assert source.receiver == "self"
    assert source.tree.body[0].lineno == 13


def test_the_hash_does_not_depend_on_indentation(case):
    one = case("def f(x):\n    return x\n").source
    other = case("class C:\n    def f(x):\n        return x\n\nf = C.f\n").source
    assert one.sha256 == other.sha256
    assert one.sha256 != case("def f(x):\n    return  x\n").source.sha256


def test_a_bound_method_stands_for_its_function(module):
    m = module("class C:\n    def f(self):\n        return 1\n")
    assert FunctionSource.of(m.C().f).function is m.C.f


def test_a_static_method_has_no_receiver(module):
    m = module("class C:\n    @staticmethod\n    def f(x):\n        return x\n")
    assert FunctionSource.of(m.C.f).receiver is None


def test_a_nested_function_of_a_method_has_no_receiver(module):
    m = module("class C:\n    def f(self):\n        def g(x):\n            return x\n        return g\n")
    source = FunctionSource.of(m.C().f())
    assert source.receiver is None
    assert source.class_name == "C"


def test_bytes_not_characters_count(case):
    c = case("def f(größe, b):\n    return größe + 'äöü' + b\n")
    span = SourceSpan(2, 32, 2, 33)
    assert c.source.segment(span) == "b"
    assert ast.unparse(c.source.expression_at(span)) == "b"


def test_windows_line_ends_are_read(case):
    c = case(b"def f(x):\r\n    y = x\r\n    return y\r\n")
    assert c.source.text == "def f(x):\n    y = x\n    return y\n"
    c.patch.replace(c.at("x"), "{x} * 2", x=c.at("x"))
    assert c.run(4) == 8


def test_segments_outside_of_the_function_are_an_error(case):
    c = case("a = 1\ndef f(x):\n    return x\n")
    for span in [SourceSpan(1, 0, 1, 1), SourceSpan(3, 0, 5, 0), SourceSpan(3, 0, 3, 99)]:
        with pytest.raises(ValueError, match="outside"):
            c.source.segment(span)


def test_an_expression_has_exactly_the_range_asked_for(case):
    c = case("def f(x):\n    return g(x) + 1\n")
    assert isinstance(c.source.expression_at(SourceSpan(2, 11, 2, 15)), ast.Call)
    with pytest.raises(Refused, match="exactly this range"):
        c.source.expression_at(SourceSpan(2, 11, 2, 14))


def test_expressions_of_the_signature_are_none_of_the_body(case):
    c = case("def f(x=1 + 1):\n    return x\n")
    with pytest.raises(Refused, match="no expression in the body"):
        c.source.expression_at(SourceSpan(1, 8, 1, 13))


def test_an_expression_inside_an_fstring_is_refused_and_the_fstring_is_not(case):
    c = case("def f(x):\n    return f'{x} and {x + 1}'\n")
    whole = SourceSpan(2, 11, 2, 29)
    assert isinstance(c.source.expression_at(whole), ast.JoinedStr)
    with pytest.raises(Refused, match="f-string"):
        c.source.expression_at(SourceSpan(2, 14, 2, 15))


def test_the_range_that_the_interpreter_gives_for_a_chained_call_finds_it(case):
    c = case("def f(x):\n    return (\n        x.strip()\n        .upper()\n    )\n")
    span = SourceSpan(4, 9, 4, 16)
    assert ast.unparse(c.source.expression_at(span)) == "x.strip().upper()"
    assert c.source.normalised(span) == SourceSpan(3, 8, 4, 16)
    assert c.source.normalised(SourceSpan(3, 8, 3, 9)) == SourceSpan(3, 8, 3, 9)


def test_the_innermost_statement_is_found(case):
    c = case("def f(x):\n    if x:\n        for y in x:\n            g(y)\n    return 1\n")
    assert isinstance(c.source.statement_at(SourceSpan(4, 14, 4, 15)), ast.Expr)
    assert isinstance(c.source.statement_at(SourceSpan(2, 7, 2, 8)), ast.If)
    with pytest.raises(Refused, match="no statement"):
        c.source.statement_at(SourceSpan(1, 4, 1, 5))


def test_names_assigned_between_two_spans(case):
    c = case("def f(x):\n    a = x\n    b = x\n    for d in x:\n        e = 1\n    c = x\n")
    assert c.source.names_assigned_between(SourceSpan(2, 8, 2, 9), SourceSpan(6, 8, 6, 9)) == {"b", "d", "e", "c"}


def test_a_file_that_changed_on_disk_is_refused(module):
    m = module("def f(x):\n    return x + 1\n")
    with open(m.__file__, "w") as file:
        file.write("def f(x):\n    return x + 22\n")
    with pytest.raises(SourceUnavailable, match="changed on disk"):
        FunctionSource.of(m.f)


def test_a_file_that_was_only_laid_out_anew_is_refused_since_spans_would_lie(module):
    m = module("def f(x):\n    return x + 1\n")
    with open(m.__file__, "w") as file:
        file.write("def f(x):\n    return (x +  1)\n")
    with pytest.raises(SourceUnavailable, match="layout"):
        FunctionSource.of(m.f)


def test_lines_put_before_the_function_are_noticed(module):
    m = module("def f(x):\n    return x + 1\n")
    with open(m.__file__, "w") as file:
        file.write("\n\ndef f(x):\n    return x + 1\n")
    with pytest.raises(SourceUnavailable, match="no such def"):
        FunctionSource.of(m.f)


def test_a_file_that_does_not_parse_any_more_is_refused(module):
    m = module("def f(x):\n    return x + 1\n")
    with open(m.__file__, "w") as file:
        file.write("def f(x:\n    '''")
    with pytest.raises(SourceUnavailable, match="does not parse"):
        FunctionSource.of(m.f)


@pytest.mark.parametrize("constants", [("1", "True"), ("0.0", "-0.0"), ("(1, 2)", "(1, 2.0)"), ("'a'", "b'a'")])
def test_constants_of_another_type_are_another_source(module, constants):
    old, new = constants
    m = module(f"def f(x):\n    return x, {old}\n")
    with open(m.__file__, "w") as file:
        file.write(f"def f(x):\n    return x, {new}\n")
    with pytest.raises(SourceUnavailable):
        FunctionSource.of(m.f)


def test_generated_code_has_no_source():
    scope = {}
    exec("def f(x):\n    return x\n", scope)
    with pytest.raises(SourceUnavailable, match="no source text"):
        FunctionSource.of(scope["f"])


@pytest.mark.parametrize("fn", [len, "".join, 3, functools.partial(print)])
def test_what_is_no_python_function_has_no_source(fn):
    with pytest.raises(SourceUnavailable, match="not a Python function"):
        FunctionSource.of(fn)


def test_lambdas_have_no_source(module):
    m = module("f = lambda x: x + 1\n")
    with pytest.raises(SourceUnavailable, match="lambda"):
        FunctionSource.of(m.f)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters came with Python 3.12")
def test_type_parameters_are_refused(module):
    m = module("def f[T](x: T) -> T:\n    return x\n")
    with pytest.raises(Refused, match="type parameters"):
        FunctionSource.of(m.f)


@pytest.mark.parametrize(
    "name",
    ["textwrap", "difflib", "inspect", "unittest.mock", "json.decoder"],
)
def test_functions_of_the_standard_library_come_back_equal(name):
    """Every plain function and method of a real module: found, not stale, and unchanged when nothing is edited."""
    module = importlib.import_module(name)
    seen = 0
    for holder in [module, *(v for v in vars(module).values() if isinstance(v, type) and v.__module__ == name)]:
        for value in list(vars(holder).values()):
            if not isinstance(value, types.FunctionType) or value.__name__ == "<lambda>":
                continue
            code = value.__code__
            if code.co_filename != module.__file__:
                continue
            if not hasattr(value, "__wrapped__") and not getattr(value, "__type_params__", ()):
                source = FunctionSource.of(value, unwrap=False)
                patch = Patch(source)
                assert patch.result() == source.dedented
                assert patch.diff() == ""
                assert patch.compile().inner.__code__.co_code == code.co_code
                seen += 1
    assert seen > 3
