"""Random functions: replacing an expression by itself changes neither the tree nor what the function does."""

import ast
import itertools

import pytest
from ast_rewrite import FunctionSource, Patch, Refused, SourceSpan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")
_number = itertools.count()
_names = st.sampled_from(["a", "b", "größe"])
_atoms = st.one_of(_names, st.integers(0, 9).map(str), st.sampled_from(["(a)", "'é'", "1.5", "[]", "()", "a.real"]))


def _grown(inner):
    binary = st.sampled_from(["+", "-", "*", "**", "@", "%", "<", "and", "or", "==", "is not", "if a else", ","])
    return st.one_of(
        st.tuples(inner, binary, inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(["+", "*", "-", "or", "<"]), inner).map(lambda t: f"{t[0]} {t[1]} {t[2]}"),
        st.tuples(inner, inner).map(lambda t: f"rec({t[0]},\n        {t[1]})"),
        inner.map(lambda t: f"rec(*[{t}], k={t})"),
        inner.map(lambda t: f"-{t}" if not t.startswith("-") else f"not {t}"),
        inner.map(lambda t: f"[{t} for b in rec({t})]"),
        inner.map(lambda t: f"(lambda b: {t})"),
        inner.map(lambda t: f"({t})[{t}:, {t}]"),
        inner.map(lambda t: f"({t}).real.imag"),
        inner.map(lambda t: f"{{'k': {t}, **{{}}}}"),
        inner.map(lambda t: f"f'{{a}} {{{t!s:.0}}}' 'x'" if "'" not in t and "\n" not in t and ":" not in t else t),
        inner.map(lambda t: f"rec({t} for b in a)"),
        inner.map(lambda t: f"(w := {t})"),
    )


_expressions = st.recursive(_atoms, _grown, max_leaves=8)
_statements = st.one_of(
    _expressions.map(lambda t: f"c = {t}"),
    _expressions.map(lambda t: f"rec({t})  # {t}".replace("\n", " ")),
    _expressions.map(lambda t: f"if {t}: rec(1); rec(2)"),
    _expressions.map(lambda t: f"c = 1; \\\n    a += {t}"),
    _expressions.map(lambda t: f"for i in rec({t}):\n\t\trec({t})"),
)


def _functions():
    def text(parts):
        statements, value = parts
        body = "".join(f"    {statement}\n" for statement in statements) + f"    return {value}\n"
        return "def f(a, b, größe, c=0, w=0):\n" + body.replace("\t\t", "        ")

    return st.tuples(st.lists(_statements, max_size=3), _expressions).map(text)


def _outcome(function):
    log = []

    def rec(*args, **kwargs):
        log.append(repr((args, kwargs)) if not any(" at 0x" in repr(x) for x in args) else "object")
        return list(args)[:2]

    function.__globals__["rec"] = rec
    try:
        value = repr(function(1, [2], "x"))
    except Exception as error:
        value = f"{type(error).__name__}"
    return log, value if " at 0x" not in value else "object"


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(_functions(), st.data())
def test_an_expression_replaced_by_itself(tmp_path_factory, text, data):
    try:
        ast.parse(text)
        path = tmp_path_factory.mktemp("random") / f"random_{next(_number)}.py"
        path.write_text(text)
        scope = {"__name__": "random_case"}
        exec(compile(text, str(path), "exec"), scope)
    except SyntaxError:
        return
    source = FunctionSource.of(scope["f"])
    patch = Patch(source)
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.expr):
            try:
                if source.read_at(SourceSpan.of(node)) is node:
                    found.append(SourceSpan.of(node))
            except Refused:
                continue
    for span in data.draw(st.lists(st.sampled_from(found), min_size=1, max_size=2, unique=True)):
        patch.replace(span, "({it})", it=span)
        assert ast.dump(ast.parse(patch.result())) == ast.dump(ast.parse(text))
    made = patch.compile()
    assert _outcome(made.function) == _outcome(scope["f"])
    assert ast.dump(ast.parse(made.text)) == ast.dump(ast.parse(text))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(_functions(), _expressions, st.data())
def test_any_expression_in_the_place_of_any_other_is_what_was_meant_or_refused(tmp_path_factory, text, new, data):
    try:
        ast.parse(text)
        meant = ast.parse(new.strip(), mode="eval").body
        path = tmp_path_factory.mktemp("random") / f"random_{next(_number)}.py"
        path.write_text(text)
        scope = {"__name__": "random_case"}
        exec(compile(text, str(path), "exec"), scope)
    except SyntaxError:
        return
    source = FunctionSource.of(scope["f"])
    nodes = [node for node in ast.walk(source.tree) if isinstance(node, ast.expr)]
    span = SourceSpan.of(data.draw(st.sampled_from(nodes)))
    patch = Patch(source)
    try:
        old = source.read_at(span)
        patch.replace(span, new.replace("{", "{{").replace("}", "}}"))
    except Refused:
        assert patch.edits == ()
        return

    class Swap(ast.NodeTransformer):
        def visit(self, node):
            return meant if node is old else self.generic_visit(node)

    assert ast.dump(ast.parse(patch.result())) == ast.dump(ast.Module([Swap().visit(source.tree)], []))
