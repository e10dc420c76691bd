"""Inserting and deleting statements: text before and after."""

import pytest
from ast_rewrite import Refused, SourceSpan


def test_a_statement_goes_before_the_one_that_contains_the_span(case):
    c = case(
        """
        def f(x):
            # about y
            y = g(
                x,
            )
            return y
        def g(x):
            return x
        """
    )
    c.patch.insert_before(c.at("x"), "z = {x}", x=c.at("x"))
    assert c.body() == "# about y\nz = x\ny = g(\n    x,\n)\nreturn y\n"


def test_several_lines_take_the_indentation_of_their_place(case):
    c = case("def f(x):\n\tif x:\n\t\treturn x\n\treturn 0\n")
    c.patch.insert_before(
        c.at("x", 1),
        """
        if {x} > 1:
            y = '''
        as it is'''
            return y
        """,
        x=c.at("x", 1),
    )
    assert c.patch.result() == (
        "def f(x):\n\tif x:\n\t\tif x > 1:\n\t\t    y = '''\n        as it is'''\n\t\t    return y\n\t\treturn x\n\treturn 0\n"
    )
    assert c.run(2) == "\n        as it is"


def test_statements_at_one_place_keep_the_order_in_which_they_came(case):
    c = case("def f(x):\n    return x\n")
    c.patch.insert_before(c.at("x"), "a = 1")
    c.patch.insert_before(c.at("x"), "b = a")
    assert c.body() == "a = 1\nb = a\nreturn x\n"


def test_a_body_on_the_line_of_the_def_takes_a_simple_statement(case):
    c = case("def f(x): return x\n")
    c.patch.insert_before(c.at("x"), "y = {x} + 1", x=c.at("x"))
    c.patch.replace(c.at("x"), "y")
    assert c.patch.result() == "def f(x): y = x + 1; return y\n"
    assert c.run(1) == 2


def test_statements_that_share_a_line(case):
    c = case("def f(x):\n    if x: y = x; z = y\n    return z\n")
    c.patch.insert_before(c.at("y", 1), "w = 1")
    assert c.body() == "if x: y = x; w = 1; z = y\nreturn z\n"


@pytest.mark.parametrize("template", ["if 1: pass", "a = 1\nb = 2", "for a in b: pass"])
def test_more_than_a_simple_statement_does_not_fit_on_a_shared_line(case, template):
    c = case("def f(x):\n    y = x; return y\n")
    with pytest.raises(Refused, match="shares its line"):
        c.patch.insert_before(c.at("y", 1), template)


def test_a_line_that_continues_another_is_no_line_of_its_own(case):
    c = case("def f(x):\n    y = x; \\\n    z = y\n    return z\n")
    c.patch.insert_before(c.at("y", 1), "w = 1")
    assert c.body() == "y = x; \\\nw = 1; z = y\nreturn z\n"
    assert c.run(3) == 3


def test_nothing_goes_before_an_elif(case):
    c = case("def f(x):\n    if x:\n        return 1\n    elif x + 1:\n        return 2\n")
    with pytest.raises(Refused, match="elif"):
        c.patch.insert_before(c.at("x + 1"), "a = 1")


def test_an_if_under_else_is_no_elif(case):
    c = case("def f(x):\n    if x:\n        return 1\n    else:\n        if x + 1:\n            return 2\n")
    c.patch.insert_before(c.at("x + 1"), "a = 1")
    assert "    else:\n        a = 1\n        if x + 1:" in c.patch.result()


def test_a_nested_decorated_function_is_preceded_as_a_whole(case):
    c = case("def f(x):\n    @g(x)\n    def h():\n        return x\n    return h\ng = lambda x: lambda f: f\n")
    c.patch.insert_before(c.at("g(x)"), "y = 1")
    assert c.body() == "y = 1\n@g(x)\ndef h():\n    return x\nreturn h\n"


def test_a_new_name_may_not_hide_one_that_is_read_from_outside(case):
    c = case("def f(x):\n    return abs(x)\n")
    with pytest.raises(Refused, match="binds abs"):
        c.patch.insert_before(c.at("x"), "abs = 1")


def test_a_placeholder_is_computed_earlier_only_if_nothing_in_between_can_matter(case):
    text = "def f(x, y):\n    return [y.append(1), g(x, y)]\ndef g(x, y):\n    return x\n"
    c = case(text)
    with pytest.raises(Refused, match=r"append\(\) changes an object"):
        c.patch.insert_before(c.at("g(x, y)"), "a = {y}", y=c.at("y", 1))
    c.patch.insert_before(c.at("g(x, y)"), "a = {x}", x=c.at("x"))
    assert c.body().startswith("a = x\n")


def test_a_statement_before_a_loop_may_not_read_what_the_loop_changes(case):
    c = case("def f(x):\n    while x:\n        x = x - 1\n    return x\n")
    with pytest.raises(Refused, match="x is bound again"):
        c.patch.insert_before(c.at("x"), "a = {x}", x=c.at("x"))


def test_a_call_copied_into_a_statement_must_leave_its_place(case):
    c = case("def f(x):\n    return abs(x) + 1\n")
    c.patch.insert_before(c.at("x"), "a = {call}", call=c.at("abs(x)"))
    with pytest.raises(Refused, match="evaluated twice"):
        c.patch.result()
    c.patch.replace(c.at("abs(x)"), "a")
    assert c.body() == "a = abs(x)\nreturn a + 1\n"


def test_an_expression_over_several_lines_is_parenthesised_in_a_statement(case):
    c = case("def f(x):\n    return abs(x +  # why\n               1)\n")
    c.patch.insert_before(c.at("x"), "a = {sum}", sum=c.at("x +  # why\n               1"))
    assert c.body() == "a = (x +  # why\n               1)\nreturn abs(x +  # why\n           1)\n"


@pytest.mark.parametrize("template", ["x = ", "return return", "  x = 1\n y = 2"])
def test_statements_that_do_not_parse_are_refused(case, template):
    c = case("def f(x):\n    return x\n")
    with pytest.raises(Refused, match="does not parse"):
        c.patch.insert_before(c.at("x"), template)


def test_reading_a_name_before_it_is_bound_is_refused(case):
    c = case("def f(x):\n    y = x\n    return y\n")
    c.patch.insert_before(c.at("x"), "z = y")
    with pytest.raises(Refused, match="reads y before anything binds it"):
        c.patch.compile()


# deleting


def test_a_statement_goes_with_its_line_and_comment(case):
    c = case("def f(x):\n    # about y\n    y = g(x)  # old\n    return x\ng = abs\n")
    c.patch.delete(c.at("g(x)"))
    assert c.body() == "# about y\nreturn x\n"
    assert c.run(-1) == -1


def test_a_statement_over_several_lines_goes_whole(case):
    c = case("def f(x):\n    y = g(\n        x\n    )\n    return x\n")
    c.patch.delete(c.at("g(\n        x\n    )"))
    assert c.body() == "return x\n"


def test_the_only_statement_of_a_block_becomes_pass(case):
    c = case("def f(x):\n    if x:\n        g(x)  # only\n    return x\n")
    c.patch.delete(c.at("g(x)"))
    assert c.body() == "if x:\n    pass  # only\nreturn x\n"


def test_all_statements_of_a_block_become_one_pass(case):
    c = case("def f(x):\n    if x:\n        g(x)\n        g(x)\n    return x\n")
    c.patch.delete(c.at("g(x)"))
    c.patch.delete(c.at("g(x)", 1))
    assert c.body() == "if x:\n    pass\nreturn x\n"


def test_a_statement_put_in_the_block_makes_pass_needless(case):
    c = case("def f(x):\n    if x:\n        g(x)\n    return x\n")
    c.patch.insert_before(c.at("g(x)"), "y = 1")
    c.patch.delete(c.at("g(x)"))
    assert c.body() == "if x:\n    y = 1\nreturn x\n"


def test_a_statement_that_shares_its_line_becomes_pass(case):
    c = case("def f(x):\n    g(x); y = x;\n    return y\n")
    c.patch.delete(c.at("g(x)"))
    assert c.body() == "pass; y = x;\nreturn y\n"


def test_a_name_that_is_read_later_keeps_its_statement(case):
    c = case("def f(x):\n    y = g(x)\n    return y\ng = abs\n")
    with pytest.raises(Refused, match="y, which the deleted statement binds, is still read") as error:
        c.patch.delete(c.at("g(x)"))
    assert error.value.span == c.at("y", 1)
    c.patch.replace(c.at("y", 1), "x")
    c.patch.delete(c.at("g(x)"))
    assert c.body() == "return x\n"


def test_reading_a_deleted_name_in_a_later_edit_is_refused(case):
    c = case("def f(x):\n    y = g(x)\n    return x\ng = abs\n")
    c.patch.delete(c.at("g(x)"))
    with pytest.raises(Refused, match="still read"):
        c.patch.replace(c.at("x", 1), "y")


def test_a_parameter_bound_anew_is_read_later(case):
    c = case("def f(x):\n    x = g(x)\n    return x\n")
    with pytest.raises(Refused, match="still read"):
        c.patch.delete(c.at("g(x)"))


def test_a_name_bound_anew_before_it_is_read_lets_the_statement_go(case):
    c = case("def f(x):\n    y = g(x)\n    y = x\n    return y\n")
    c.patch.delete(c.at("g(x)"))
    assert c.body() == "y = x\nreturn y\n"


def test_an_addition_to_a_name_goes_and_the_name_stays(case):
    c = case("def f(x):\n    y = x\n    y += g(x)\n    return y\ng = abs\n")
    statement = c.source.tree.body[1]
    c.patch.delete(SourceSpan.of(statement))
    assert c.body() == "y = x\nreturn y\n"
    assert c.run(-1) == -1


def test_an_addition_to_an_object_stays(case):
    c = case("def f(x):\n    x.y += g(x)\n    return x\n")
    with pytest.raises(Refused, match="stores into an object"):
        c.patch.delete(SourceSpan.of(c.source.tree.body[0]))


@pytest.mark.parametrize(
    "body",
    [
        "y = g(x)\n    if x:\n        y = 1\n    return y",
        "y = g(x)\n    y += 1\n    return x",
        "y = g(x)\n    del y",
        "y = g(x)\n    return lambda: y",
        "y = 0\n    for i in x:\n        h(y)\n        y = g(x)\n    return x",
        "y = g(x)\n    try:\n        y = h(x)\n    finally:\n        return y",
        "for i in x:\n        y = g(x)\n        if i:\n            continue\n        y = 2\n    return y",
        "(y := g(x))\n    return y",
        "y, z = g(x)\n    return z",
    ],
)
def test_a_value_that_may_still_be_read_keeps_its_statement(case, body):
    c = case(f"def f(x):\n    {body}\n")
    with pytest.raises(Refused, match="still read"):
        c.patch.delete(c.at("g(x)"))


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("y = g(x) + h(x)", r"h\(x\) lies outside of the span"),
        ("self.y = g(x)", "stores into an object"),
        ("y[0] = g(x)", "stores into an object"),
        ("return g(x)", "a Return statement cannot be deleted"),
        ("assert g(x)", "a Assert statement cannot be deleted"),
        ("y += g(x)", "a AugAssign statement cannot be deleted"),
        ("if g(x): pass", "a If statement cannot be deleted"),
    ],
)
def test_statements_that_do_more_stay(case, statement, why):
    c = case(f"def f(self, x, y):\n    {statement}\n")
    with pytest.raises(Refused, match=why):
        c.patch.delete(c.at("g(x)"))


def test_global_names_stay(case):
    c = case("def f(x):\n    global y\n    y = g(x)\n    return x\n")
    with pytest.raises(Refused, match="global or nonlocal"):
        c.patch.delete(c.at("g(x)"))


def test_a_deleted_statement_takes_no_more_edits(case):
    c = case("def f(x):\n    y = g(x)\n    return x\n")
    c.patch.delete(c.at("g(x)"))
    with pytest.raises(Refused, match="deleted by an earlier edit"):
        c.patch.replace(c.at("x"), "1")
    with pytest.raises(Refused, match="deleted by an earlier edit"):
        c.patch.delete(c.at("g(x)"))


def test_an_earlier_edit_outside_of_the_span_keeps_its_statement(case):
    c = case("def f(x):\n    y = g(x) + x\n    return x\n")
    c.patch.replace(c.at("x", 1), "2")
    with pytest.raises(Refused, match="would be lost"):
        c.patch.delete(c.at("g(x)"))
    c.patch.delete(c.at("g(x) + x"))
    assert c.body() == "return x\n"
