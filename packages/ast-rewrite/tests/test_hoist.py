"""Computing several expressions together: when it is allowed, and every reason why it is not."""

import ast
import textwrap

import pytest
from ast_rewrite import Refused, SourceSpan

ATTENTION = """
class Attention:
    def f(self, hidden_states, mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, 4)

        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)  # queries
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        return query, key, value

f = Attention.f
"""


def hoist(c, *, names="ab", pure=None, template="self.ab({0})", arg="x"):
    spans = [c.at(f"self.a({arg})"), c.at(f"self.b({arg})")]
    inputs = [c.within(span, arg) for span in spans]
    return c.patch.hoist(spans, template, list(names), inputs, pure=pure)


def method(parameters, between):
    function = f"def f({parameters}):\n    y = self.a(x)\n    {between}\n    return y + self.b(x)\n"
    return "class C:\n" + textwrap.indent(function, "    ") + "\nf = C.f\n"


def test_three_projections_become_one(case):
    c = case(ATTENTION)
    spans = [c.at(f"self.{name}_proj(hidden_states)") for name in "qkv"]
    inputs = [c.at("hidden_states", at) for at in (1, 2, 3)]
    used = c.patch.hoist(spans, "self.qkv_proj({0}).split(self.sizes, dim=-1)", ["q", "k", "v"], inputs)
    assert used == ("q", "k", "v")
    assert c.body() == textwrap.dedent(
        """\
        shape = (*hidden_states.shape[:-1], -1, 4)

        q, k, v = self.qkv_proj(hidden_states).split(self.sizes, dim=-1)
        query = q.view(shape).transpose(1, 2)  # queries
        key = k.view(shape).transpose(1, 2)
        value = v.view(shape).transpose(1, 2)
        return query, key, value
        """
    )
    assert [edit.kind for edit in c.patch.edits] == ["insert", "replace", "replace", "replace"]


def test_one_expression_gets_one_name(case):
    c = case("def f(self, x):\n    return self.a(x) + 1\n")
    assert c.patch.hoist([c.at("self.a(x)")], "self.c({0})", ["y"], [c.at("x")]) == ("y",)
    assert c.body() == "y = self.c(x)\nreturn y + 1\n"


def test_names_are_new_in_function_module_and_builtins(case):
    c = case("k = 1\ndef f(self, x):\n    q = self.a(x)\n    return [q, self.b(x), v]\nv = 2\n")
    spans = [c.at("self.a(x)"), c.at("self.b(x)")]
    assert c.patch.hoist(spans, "self.ab({0})", ["q", "abs"], [c.at("x")]) == ("q_2", "abs_2")
    c = case("k = 1\ndef f(self, x):\n    return [self.a(x), self.b(x)]\n")
    assert hoist(c, names=["k", "k"]) == ("k_2", "k_3")


def test_the_same_statement_may_hold_all(case):
    c = case("def f(self, x):\n    return self.act(self.a(x)) * self.b(x)\n")
    hoist(c)
    assert c.body() == "a, b = self.ab(x)\nreturn self.act(a) * b\n"


def test_a_block_inside_a_loop_or_branch_is_a_block(case):
    c = case(
        """
        def f(self, x, n):
            for i in range(n):
                if n > 1:
                    y = self.a(x)
                    z = self.b(x)
                    x = y + z
            return x
        """
    )
    hoist(c)
    assert "            a, b = self.ab(x)\n            y = a\n            z = b\n" in c.patch.result()


def test_headers_of_the_block_count_to_it(case):
    c = case("def f(self, x):\n    y = self.a(x)\n    for i in self.b(x):\n        y = y + i\n    return y\n")
    hoist(c)
    assert c.body() == "a, b = self.ab(x)\ny = a\nfor i in b:\n    y = y + i\nreturn y\n"


def test_attributes_and_constants_are_inputs(case):
    c = case("def f(self, x):\n    y = self.a(x.data_)\n    return y + self.b(x.data_)\n")
    hoist(c, arg="x.data_")
    assert c.body() == "a, b = self.ab(x.data_)\ny = a\nreturn y + b\n"
    c = case("def f(self, x):\n    y = self.a(3)\n    x = y\n    return y + self.b(3)\n")
    hoist(c, arg="3")
    assert c.body().startswith("a, b = self.ab(3)\n")


def test_one_input_is_looked_at_for_every_span(case):
    c = case("def f(self, x):\n    y = self.a(x)\n    x = x + 1\n    return y + self.b(x)\n")
    with pytest.raises(Refused, match="x is bound again"):
        c.patch.hoist([c.at("self.a(x)"), c.at("self.b(x)")], "self.ab({0})", ["a", "b"], [c.at("x")])


def test_earlier_edits_in_the_input_are_seen(case):
    c = case("def f(self, x, y):\n    return self.a(x), self.b(x)\n")
    for at in (0, 1):
        c.patch.replace(c.at("x", at), "{x} + y", x=c.at("x", at))
    hoist(c, template="self.ab({0})")
    assert c.body() == "a, b = self.ab(x + y)\nreturn a, b\n"


@pytest.mark.parametrize(
    "between",
    [
        "y = y.view(2).float() * 2",
        "y += 1",
        "y.mul_(2)",
        "torch.cat([y, x], dim=0)",
        "z = self.norm(x)",
        "w = x.shape[0]; w += 1",
        "n = len(x); h(n)",
        "d = {}; d['k'] = 1",
        "kwargs['k'] = x",
        "kwargs.pop('k', None)",
        "cache.update(y, 1)",
        "self.calls = 3",
        "if z is None: raise ValueError(x)",
        "with self.context(): w = y",
        "for i in range(3): y = y + i",
        "isinstance(x, list)",
        "out = torch.zeros(3); out[0] = 1",
        "g = lambda t: t + 1; g2 = [t for t in z]",
    ],
)
def test_what_may_lie_between(case, between):
    c = case(method("self, x, z, cache, **kwargs", between))
    hoist(c)
    assert c.body().startswith("a, b = self.ab(x)\ny = a\n")
    assert c.body().endswith("return y + b\n")


@pytest.mark.parametrize(
    ("between", "why"),
    [
        # bound again
        ("x = z", "x is bound again"),
        ("x: int = z", "x is bound again"),
        ("x += 1", "x is bound again"),
        ("(x := z)", "x is bound again"),
        ("[y, *x] = z", "x is bound again"),
        ("for x in z: pass", "x is bound again"),
        ("for i in z:\n        x = i", "x is bound again"),
        ("if z:\n        x = z", "x is bound again"),
        ("with z as x: pass", "x is bound again"),
        ("import x", "x is bound again"),
        ("from z import y as x", "x is bound again"),
        ("def x(): pass", "x is bound again"),
        ("class x: pass", "x is bound again"),
        ("del x", "x is bound again"),
        ("try: pass\n    except E as x: pass", "x is bound again"),
        ("match z:\n        case [x, _]: pass", "x is bound again"),
        ("match z:\n        case {'k': 1, **x}: pass", "x is bound again"),
        # written to
        ("x[0] = 1", "x is changed in place"),
        ("x[0] += 1", "is changed in place"),
        ("del x[0]", "x is changed in place"),
        ("x.real = 1", "x.real is assigned"),
        ("x.mul_(2)", r"mul_\(\) works in place"),
        ("x.view(2).mul_(2)", r"mul_\(\) works in place"),
        ("torch.relu_(x)", r"relu_\(\) works in place"),
        ("torch.add(z, z, out=x)", "called with out="),
        ("F.relu(x, inplace=True)", "called with inplace="),
        ("x.append(1)", r"append\(\) changes an object"),
        ("setattr(x, 'y', 1)", r"setattr\(\) changes an object"),
        # by another name
        ("z.mul_(2)", "z may share memory with x"),
        ("z += 1", "z is changed in place"),
        ("w = x.view(2); w.mul_(2)", "w may share memory with x"),
        ("w = [x]; w[0] = 1", "w is changed in place"),
        ("w = {}; w['x'] = x; w['y'] += 1", "is changed in place"),
        ("w = []; w.append(x); h(w)", "w may share memory with x"),
        ("for w in x: w.mul_(2)", "w may share memory with x"),
        ("self.state.copy_(z)", "self.state may share memory with x"),
        ("w = self.act(x); w += 1", "w is changed in place"),
        # by a call that is not known
        ("h(x)", "h is not known to leave its arguments alone"),
        ("h(z)", "h is not known to leave its arguments alone"),
        ("h(k=[x])", "h is not known to leave its arguments alone"),
        ("h(h2)(x)", "the callee is not known"),
        ("fn = self.fn; fn(x)", "fn is not known"),
        ("def w(t): t.mul_(2)\n    w(x)", r"mul_\(\) works in place"),
        ("def w(): x.mul_(2)\n    w()", r"mul_\(\) works in place"),
        ("w = lambda: x.mul_(2)\n    self.run(w)", r"mul_\(\) works in place"),
        ("w = (x.mul_(i) for i in z)\n    list(w)", r"mul_\(\) works in place"),
        # another place in time
        ("yield z", "other code runs here"),
        ("return z", "can be left between"),
        ("if z: return z", "can be left between"),
        ("for i in z: break", "can be left between"),
        # the callee itself
        ("self.b = z", "self.b is assigned"),
        ("self = z", "self is bound again"),
        ("setattr(self, 'b', z)", r"setattr\(\) changes an object"),
        # the frame
        ("exec(z)", "can see or change its variables"),
        ("locals()", "can see or change its variables"),
    ],
)
def test_what_may_not_lie_between(case, between, why):
    c = case(method("self, x, z", between))
    with pytest.raises(Refused, match=why):
        hoist(c)
    assert c.patch.edits == ()
    assert c.patch.diff() == ""


@pytest.mark.parametrize(
    "body",
    [
        "return g(x := z, self.a(x), self.b(x))",
        "return [x.mul_(2), self.a(x), self.b(x)]",
        "y = self.a(x) + h(x) + self.b(x)\n    return y",
        "return self.a(x) + (x := z) + self.b(x)",
    ],
)
def test_what_is_evaluated_before_it_in_its_own_statement_counts(case, body):
    c = case(f"def f(self, x, z):\n    {body}\n")
    with pytest.raises(Refused, match="may not have the same value"):
        hoist(c)


@pytest.mark.parametrize(
    "body",
    [
        "return h(self.a(x) + self.b(x))",
        "x = self.a(x) + self.b(x)\n    return x",
        "x += self.a(x) + self.b(x)\n    return x",
        "x[0] = self.a(x) + self.b(x)\n    return x",
        "return (self.a(x) + self.b(x)).mul_(2)",
    ],
)
def test_what_is_done_with_the_result_does_not(case, body):
    c = case(f"def f(self, x):\n    {body}\n")
    hoist(c)
    assert c.body().startswith("a, b = self.ab(x)\n")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("y = self.a(x)\n    if z:\n        y = self.b(x)\n    return y", "do not lie in one block"),
        ("if z:\n        y = self.a(x)\n    else:\n        y = self.b(x)\n    return y", "do not lie in one block"),
        ("for i in z:\n        y = self.a(x)\n    return self.b(x)", "do not lie in one block"),
        ("with z:\n        y = self.a(x)\n    return self.b(x)", "do not lie in one block"),
        ("try:\n        y = self.a(x)\n        z = self.b(x)\n    except E:\n        pass", "lie in a try"),
        ("y = self.a(x)\n    while self.b(x):\n        y = y + 1\n    return y", "not evaluated each time"),
        ("return self.a(x) and self.b(x)", "not evaluated each time"),
        ("return self.a(x) if z else self.b(x)", "not evaluated each time"),
        ("return self.a(x) < z < self.b(x)", "not evaluated each time"),
        ("return [self.a(x) for _ in self.b(x)]", "not evaluated each time"),
        ("y = self.a(x)\n    assert self.b(x)\n    return y", "not evaluated each time"),
        ("y = self.a(x)\n    return lambda: self.b(x)", "nested function"),
        ("y = self.a(x)\n    def g():\n        return self.b(x)\n    return g", "nested function"),
        ("def g():\n        return self.a(x) + self.b(x)\n    return g", "nested function"),
        ("y = self.a(x)\n    with z as w, self.b(x):\n        pass", "not evaluated each time"),
        ("match self.a(x):\n        case 1 if self.b(x): pass", "not evaluated each time"),
        ("if z:\n        pass\n    elif self.a(x) + self.b(x):\n        pass", "elif"),
    ],
)
def test_expressions_that_can_run_one_without_the_other(case, body, why):
    c = case(f"def f(self, x, z):\n    {body}\n")
    with pytest.raises(Refused, match=why):
        hoist(c)
    assert c.patch.edits == ()


def test_a_call_that_the_caller_knows_to_be_pure_may_lie_between(case):
    text = "def f(self, x):\n    y = self.a(x)\n    y = rotate(y, x)\n    return y + self.b(x)\n"
    c = case(text)
    asked = []

    def pure(call):
        asked.append(c.source.segment(SourceSpan.of(call)))
        return isinstance(call.func, ast.Name) and call.func.id == "rotate"

    hoist(c, pure=pure)
    assert "rotate(y, x)" in asked
    assert c.body().startswith("a, b = self.ab(x)\n")


@pytest.mark.parametrize("call", ["self.h(x)", "x.h()", "self.table[0](x)", "write(0.5)"])
def test_a_call_that_the_caller_does_not_vouch_for_may_write_to_all_that_it_is_given(case, call):
    text = f"def f(self, x):\n    write = x.add\n    y = self.a(x)\n    {call}\n    return y + self.b(x)\n"
    hoist(case(text), pure=lambda call: True)
    with pytest.raises(Refused, match="not known to leave its arguments alone"):
        hoist(case(text), pure=lambda call: False)


def test_global_and_captured_inputs_can_change_in_any_call(case):
    c = case("x = 1\ndef f(self):\n    y = self.a(x)\n    self.h()\n    return y + self.b(x)\n")
    with pytest.raises(Refused, match="which the code called here can rebind"):
        hoist(c)
    c = case(
        """
        def make(x):
            def f(self):
                y = self.a(x)
                self.h()
                return y + self.b(x)
            return f
        f = make(1)
        """
    )
    with pytest.raises(Refused, match="which the code called here can rebind"):
        hoist(c)


def test_nonlocal_inputs_are_refused(case):
    c = case(
        """
        def f(self, x):
            def g():
                nonlocal x
                x = 1
            y = self.a(x)
            self.run(g)
            return y + self.b(x)
        """
    )
    with pytest.raises(Refused, match="global or nonlocal"):
        hoist(c)


def test_calls_are_no_inputs(case):
    c = case("def f(self, x):\n    return self.a(h(x)) + self.b(h(x))\n")
    with pytest.raises(Refused, match="an input must be a name"):
        hoist(c, arg="h(x)")


def test_an_expression_that_binds_is_not_hoisted(case):
    c = case("def f(self, x):\n    return self.a(y := x) + self.b(x)\n")
    with pytest.raises(Refused, match="binds a name"):
        c.patch.hoist([c.at("self.a(y := x)"), c.at("self.b(x)")], "self.ab({0})", ["a", "b"], [c.at("x")])


def test_what_earlier_edits_brought_counts(case):
    c = case("def f(self, x):\n    y = self.a(x)\n    z = y\n    return y + self.b(x)\n")
    c.patch.insert_before(c.at("y", 1), "x = x + 1")
    with pytest.raises(Refused, match="x is bound again"):
        hoist(c)


def test_what_earlier_edits_took_away_does_not(case):
    c = case("def f(self, x):\n    y = self.a(x)\n    z = h(x)\n    return y + self.b(x)\n")
    c.patch.delete(c.at("h(x)"))
    hoist(c)
    assert c.body() == "a, b = self.ab(x)\ny = a\nreturn y + b\n"


def test_names_and_spans_must_be_as_many(case):
    c = case("def f(self, x):\n    return self.a(x) + self.b(x)\n")
    with pytest.raises(ValueError, match="2 spans and 1 names"):
        hoist(c, names="a")
    with pytest.raises(ValueError, match="0 spans"):
        c.patch.hoist([], "1", [], [])


def test_a_template_that_does_not_parse_leaves_no_trace(case):
    c = case("def f(self, x):\n    return self.a(x) + self.b(x)\n")
    with pytest.raises(Refused, match="does not parse"):
        hoist(c, template="self.ab({0}")
    with pytest.raises(ValueError, match="no span was given"):
        hoist(c, template="self.ab({1}, {2})")
    assert c.patch.edits == ()
