"""Replacing expressions: text before and after."""

import pytest
from ast_rewrite import Refused, SourceSpan


@pytest.mark.parametrize(
    ("before", "span", "template", "after"),
    [
        ("return a + b", "a + b", "g({a}, {b})", "return g(a, b)"),
        ("return g(a) * 2", "g(a)", "{a} + {b}", "return (a + b) * 2"),
        ("return g(a) + 2", "g(a)", "{a} * {b}", "return a * b + 2"),
        ("return 2 - g(a)", "g(a)", "{a} - {b}", "return 2 - (a - b)"),
        ("return g(a).b", "g(a)", "{a} if {b} else 0", "return (a if b else 0).b"),
        ("return g(a)[0]", "g(a)", "-{a}", "return (-a)[0]"),
        ("return g(a, b)", "a", "1, 2", "return g((1, 2), b)"),
        ("return g(a)", "a", "lambda: {a}", "return g(lambda: a)"),
        ("return [a, b]", "a", "(c := {a})", "return [(c := a), b]"),
        ("return not a", "a", "{a} and {b}", "return not (a and b)"),
        ("x = a\n    return x + b", "a", "{a}, {b}", "x = a, b\n    return x + b"),
        ("return g(t for t in a)", "(t for t in a)", "{a}", "return g(a)"),
        ("return a[b]", "b", "1, 2", "return a[1, 2]"),
        ("return a ** b", "a", "-{a}", "return (-a) ** b"),
        ("return {'k': a}", "a", "{{'n': {b}}}", "return {'k': {'n': b}}"),
        ("return -(a)", "a", "{a} ** 2", "return -(a ** 2)"),
        ("return (yield a)", "a", "(yield {b})", "return (yield (yield b))"),
        ("return g(*a, **b)", "a", "{a} or []", "return g(*a or [], **b)"),
    ],
)
def test_parentheses_are_put_where_precedence_needs_them(case, before, span, template, after):
    c = case(f"def f(a, b):\n    {before}\n")
    c.patch.replace(c.at(span), template.replace("{a}", "a").replace("{b}", "b"))
    assert c.patch.result() == f"def f(a, b):\n    {after}\n"


@pytest.mark.parametrize(
    ("inner", "template", "after"),
    [
        ("a + b", "{h} * 2", "(a + b) * 2"),
        ("a * b", "{h} + 2", "a * b + 2"),
        ("a + b", "{h}.real", "(a + b).real"),
        ("1", "{h}.real", "(1).real"),
        ("a.b", "{h}.real", "a.b.real"),
        ("a if b else 1", "g({h}, 2)", "g(a if b else 1, 2)"),
        ("a if b else 1", "{h} or 2", "(a if b else 1) or 2"),
        ("'x' 'y'", "{h} % 2", "'x' 'y' % 2"),
        ("lambda: a", "{h}()", "(lambda: a)()"),
        ("not a", "{h} == 2", "(not a) == 2"),
        ("a\n         + b", "{h}", "(a\n         + b)"),
        ("a\n         + b", "g({h})", "g(a\n         + b)"),
    ],
)
def test_placeholders_get_parentheses_where_they_need_them(case, inner, template, after):
    c = case(f"def f(a, b):\n    return h({inner})\n")
    c.patch.replace(c.at(f"h({inner})"), template, h=c.at(inner))
    assert c.patch.result() == f"def f(a, b):\n    return {after}\n"


def test_comments_and_layout_stay(case):
    c = case(
        """
        def f(self, x):
            # first
            y = self.act(self.gate(x)) * self.up(x)  # the product

            return (y,  # one
                    x)  # two
        """
    )
    c.patch.replace(c.at("self.act(self.gate(x)) * self.up(x)"), "self.act_and_mul(self.gate_up({x}))", x=c.at("x"))
    assert c.patch.result() == (
        "def f(self, x):\n"
        "    # first\n"
        "    y = self.act_and_mul(self.gate_up(x))  # the product\n"
        "\n"
        "    return (y,  # one\n"
        "            x)  # two\n"
    )
    assert c.patch.diff() == (
        f"--- {c.source.portable_filename}:2\n"
        "+++ rewritten\n"
        "@@ -1,6 +1,6 @@\n"
        " def f(self, x):\n"
        "     # first\n"
        "-    y = self.act(self.gate(x)) * self.up(x)  # the product\n"
        "+    y = self.act_and_mul(self.gate_up(x))  # the product\n"
        " \n"
        "     return (y,  # one\n"
        "             x)  # two\n"
    )


def test_calls_over_several_lines_and_continuations(case):
    c = case("def f(x, g=abs):\n    y = 1 + \\\n        g(\n            x,  # why\n        )\n    return y\n")
    c.patch.replace(c.at("x"), "{x} * 2", x=c.at("x"))
    assert c.patch.result() == (
        "def f(x, g=abs):\n    y = 1 + \\\n        g(\n            x * 2,  # why\n        )\n    return y\n"
    )
    assert c.run(-3) == 7


def test_other_letters_and_tabs(case):
    c = case("class C:\n\tdef f(self, größe):\n\t\tif größe:\n\t\t\treturn 'ä' + größe + 'ö'\n\nf = C.f\n")
    c.patch.replace(c.at("größe", 1), "{g}.upper()", g=c.at("größe", 1))
    assert c.patch.result() == "def f(self, größe):\n\tif größe:\n\t\treturn 'ä' + größe.upper() + 'ö'\n"
    assert c.run(None, "ü") == "äÜö"


def test_a_docstring_that_says_the_same_as_the_code_is_left_alone(case):
    c = case('def f(x):\n    """return g(x)"""\n    return g(x)\ng = abs\n')
    c.patch.replace(c.at("g(x)"), "{x}", x=c.at("x"))
    assert c.patch.result() == 'def f(x):\n    """return g(x)"""\n    return x\n'


def test_strings_over_several_lines_keep_their_value(case):
    c = case(
        "class C:\n    def f(self, x):\n        '''doc\n        more'''\n        return '''a\n        b''' + x\n\nf = C.f\n"
    )
    c.patch.replace(c.at("x"), "{x} * 2", x=c.at("x"))
    assert c.run(None, "!") == "a\n        b!!"
    assert c.patch.compile().inner.__doc__ == c.fn.__doc__


def test_a_body_on_the_line_of_the_def(case):
    c = case("class C:\n    def f(self, x): return self.a(x)\n\nf = C.f\n")
    c.patch.replace(c.at("self.a(x)"), "{x} + 1", x=c.at("x"))
    assert c.patch.result() == "def f(self, x): return x + 1\n"


def test_edits_with_disjoint_spans_compose_in_any_order(case):
    text = "def f(a, b):\n    return g(a) + h(b)\n"
    one, other = case(text), case(text)
    one.patch.replace(one.at("g(a)"), "G({a})", a=one.at("a"))
    one.patch.replace(one.at("h(b)"), "H")
    other.patch.replace(other.at("h(b)"), "H")
    other.patch.replace(other.at("g(a)"), "G({a})", a=other.at("a"))
    assert one.patch.result() == other.patch.result() == "def f(a, b):\n    return G(a) + H\n"


def test_a_larger_edit_sees_the_earlier_ones_through_placeholders(case):
    c = case("def f(a, b):\n    return g(a) + h(b)\n")
    c.patch.replace(c.at("a"), "{a} - 1", a=c.at("a"))
    c.patch.replace(c.at("g(a)"), "{a} * 2", a=c.at("a"))
    assert c.patch.text(c.at("g(a)")) == "(a - 1) * 2"
    c.patch.replace(c.at("g(a) + h(b)"), "[{left}, {right}]", left=c.at("g(a)"), right=c.at("h(b)"))
    assert c.body() == "return [(a - 1) * 2, h(b)]\n"
    assert [edit.kind for edit in c.patch.edits] == ["replace"] * 3


def test_an_edit_inside_a_placeholder_after_the_larger_edit(case):
    c = case("def f(a, b):\n    return g(a) + h(b)\n")
    c.patch.replace(c.at("g(a) + h(b)"), "{h} * {a}", h=c.at("h(b)"), a=c.at("a"))
    c.patch.replace(c.at("a"), "{a} + 1", a=c.at("a"))
    c.patch.replace(c.at("h(b)"), "B")
    assert c.body() == "return B * (a + 1)\n"


def test_the_same_span_twice_wraps_what_is_there(case):
    c = case("def f(a):\n    return g(a)\n")
    c.patch.replace(c.at("g(a)"), "one({it})", it=c.at("g(a)"))
    c.patch.replace(c.at("g(a)"), "two({it})", it=c.at("g(a)"))
    assert c.body() == "return two(one(g(a)))\n"
    c.patch.replace(c.at("a"), "b")
    assert c.body() == "return two(one(g(b)))\n"


def test_losing_an_earlier_edit_must_be_asked_for(case):
    c = case("def f(a, b):\n    return g(a) + h(b)\n")
    c.patch.replace(c.at("a"), "A")
    with pytest.raises(Refused, match="would be lost"):
        c.patch.replace(c.at("g(a) + h(b)"), "{h}", h=c.at("h(b)"))
    assert c.body() == "return g(A) + h(b)\n"
    c.patch.replace(c.at("g(a) + h(b)"), "{h}", h=c.at("h(b)"), dropping=[c.at("g(a)")])
    assert c.body() == "return h(b)\n"


def test_an_edit_of_what_is_gone_is_refused(case):
    c = case("def f(a, b):\n    return g(a) + h(b)\n")
    c.patch.replace(c.at("g(a)"), "A")
    with pytest.raises(Refused, match="did not keep it"):
        c.patch.replace(c.at("a"), "b")


@pytest.mark.parametrize(
    ("text", "span", "why"),
    [
        ("x = a\n    return x", "x", "assigned to"),
        ("x = a\n    x += 1\n    return x", "x", "assigned to"),
        ("del a", "a", "assigned to"),
        ("return f'{a}'", "f-string", "f-string"),
    ],
)
def test_what_is_not_read_is_not_replaced(case, text, span, why):
    c = case(f"def f(a):\n    {text}\n")
    place = SourceSpan(2, 14, 2, 15) if span == "f-string" else c.at(span)
    with pytest.raises(Refused, match=why):
        c.patch.replace(place, "1")
    assert c.patch.edits == ()


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("1 +", "does not parse"),
        ("x = 1", "does not parse"),
        ("{a}.{a}", "does not stand for an expression"),
        ("g({a}=1)", "does not stand for an expression"),
        ("a) + (a", "does not parse"),
        ("a  # {a}", "does not stand for an expression"),
    ],
)
def test_templates_that_are_no_expression_are_refused(case, template, why):
    c = case("def f(a):\n    return g(a)\n")
    spans = {"a": c.at("a")} if "{a}" in template else {}
    with pytest.raises(Refused, match=why):
        c.patch.replace(c.at("g(a)"), template, **spans)


def test_a_comment_in_a_template_cannot_swallow_the_rest_of_the_line(case):
    c = case("def f(a):\n    return g(a) + 1\n")
    with pytest.raises(Refused, match="does not parse"):
        c.patch.replace(c.at("g(a)"), "a  # comment")


def test_placeholders_and_spans_must_match(case):
    c = case("def f(a):\n    return g(a)\n")
    with pytest.raises(ValueError, match="no span was given"):
        c.patch.replace(c.at("g(a)"), "{a}")
    with pytest.raises(ValueError, match="has no placeholder"):
        c.patch.replace(c.at("g(a)"), "1", a=c.at("a"))
    with pytest.raises(ValueError, match="bare name"):
        c.patch.replace(c.at("g(a)"), "{a!r}", a=c.at("a"))
    with pytest.raises(ValueError, match="bare name"):
        c.patch.replace(c.at("g(a)"), "{a.b}", a=c.at("a"))


def test_a_call_is_not_evaluated_twice(case):
    c = case("def f(a):\n    return g(h(a))\n")
    c.patch.replace(c.at("g(h(a))"), "{h} + {h}", h=c.at("h(a)"))
    with pytest.raises(Refused, match=r"h\(a\) was copied and would be evaluated twice"):
        c.patch.result()


def test_a_name_may_be_read_twice(case):
    c = case("def f(a):\n    return abs(a)\n")
    c.patch.replace(c.at("abs(a)"), "{a} * {a}", a=c.at("a"))
    assert c.run(3) == 9


def test_a_placeholder_from_elsewhere_must_have_the_same_value_here(case):
    text = "def f(a):\n    x = a.real\n    {}\n    return g(x)\ng = abs\n"
    c = case(text.format("pass"))
    c.patch.replace(c.at("g(x)"), "{a} + {x}", a=c.at("a"), x=c.at("x", 1))
    assert c.run(-3) == -6
    c = case(text.format("a = 4"))
    with pytest.raises(Refused, match="a is bound again"):
        c.patch.replace(c.at("g(x)"), "{a} + {x}", a=c.at("a"), x=c.at("x", 1))


def test_a_placeholder_for_an_assignment_target_is_refused(case):
    c = case("def f(a):\n    x = a\n    return x\n")
    with pytest.raises(Refused, match="x is assigned to"):
        c.patch.replace(c.at("x", 1), "{x}", x=c.at("x"))


def test_a_copy_keeps_what_stood_there_when_it_was_made(case):
    c = case("def f(a, b):\n    x = a\n    return g(x) + b\ng = abs\n")
    c.patch.replace(c.at("g(x)"), "{a}", a=c.at("a"))
    c.patch.replace(c.at("a"), "b")
    assert c.body() == "x = b\nreturn a + b\n"


def test_templates_do_not_capture_names_of_placeholders(case):
    c = case("def f(x, xs):\n    return g(x, xs)\n")
    with pytest.raises(Refused, match="x of the placeholder would be that of"):
        c.patch.replace(c.at("g(x, xs)"), "[x + {x} for x in {xs}]", x=c.at("x"), xs=c.at("xs"))


def test_names_that_nobody_knows_are_refused(case):
    c = case("def f(a):\n    return abs(a)\n")
    c.patch.replace(c.at("abs(a)"), "nowhere({a})", a=c.at("a"))
    with pytest.raises(Refused, match="reads nowhere"):
        c.patch.compile()


def test_a_walrus_may_not_take_a_name_that_means_something_outside(case):
    c = case("def f(a):\n    return abs(a)\n")
    with pytest.raises(Refused, match="binds abs"):
        c.patch.replace(c.at("a"), "(abs := {a})", a=c.at("a"))


def test_yield_makes_another_kind_of_function_and_is_refused(case):
    c = case("def f(a):\n    return abs(a)\n")
    c.patch.replace(c.at("a"), "(yield {a})", a=c.at("a"))
    with pytest.raises(Refused, match="another kind of function"):
        c.patch.compile()


def test_await_outside_of_a_coroutine_is_refused(case):
    c = case("def f(a):\n    return abs(a)\n")
    c.patch.replace(c.at("a"), "(await {a})", a=c.at("a"))
    with pytest.raises(Refused, match="does not compile"):
        c.patch.compile()


def test_super_where_there_is_no_class_cell_is_refused(case):
    c = case("class C:\n    def f(self):\n        return self.a\n\nf = C.f\n")
    c.patch.replace(c.at("self.a"), "super().a")
    with pytest.raises(Refused, match="closure variable __class__"):
        c.patch.compile()
