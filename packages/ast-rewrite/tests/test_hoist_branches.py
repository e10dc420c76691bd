"""Computing expressions together where some lie in branches that the caller knows to be taken."""

import ast

import pytest
from ast_rewrite import Refused

BRANCHED = """
class C:
    def f(self, x, flag=None):
        y = self.a(x)
        if self.shared:
            return y
        else:
            z = x + 1
            w = self.b(x) if self.b_there else z
        return y + w
f = C.f
"""


def decided(*texts):
    return lambda test: ast.unparse(test) in texts


def hoist_decided(c, *texts):
    spans = [c.at("self.a(x)"), c.at("self.b(x)")]
    inputs = [c.within(span, "x") for span in spans]
    return c.patch.hoist(spans, "self.ab({0})", ["a", "b"], inputs, decided=decided(*texts))


def test_into_branches_that_are_always_taken(case):
    c = case(BRANCHED)
    hoist_decided(c, "self.shared", "self.b_there")
    body = c.body()
    assert body.startswith("a, b = self.ab(x)\ny = a\nif self.shared:")
    assert "w = b if self.b_there else z" in body


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ((), "do not lie in one block"),
        (("self.b_there",), "do not lie in one block"),
        (("self.shared",), "is not evaluated each time"),
    ],
)
def test_branches_that_may_not_be_taken_stay_apart(case, texts, reason):
    with pytest.raises(Refused, match=reason):
        hoist_decided(case(BRANCHED), *texts)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("if flag: return y", "can be left between"),
        ("x = x + 1", "may not have the same value"),
        ("self.b = flag", "may not have the same value"),
    ],
)
def test_what_lies_before_an_expression_in_its_branch_counts(case, line, reason):
    c = case(BRANCHED.replace("z = x + 1", f"z = x + 1\n            {line}"))
    with pytest.raises(Refused, match=reason):
        hoist_decided(c, "self.shared", "self.b_there")


def test_a_branch_in_a_loop_or_a_context_is_not_reached_by_deciding(case):
    loop = BRANCHED.replace("if self.shared:", "for i in flag:").replace(
        "return y\n        else:", "pass\n        else:"
    )
    with pytest.raises(Refused, match="do not lie in one block"):
        hoist_decided(case(loop), "self.shared", "self.b_there")


NAMED = """
class C:
    def f(self, x, other=None):
        y = self.a(x)
        z = other or x
        return y + self.b(z)
f = C.f
"""


def test_an_input_may_be_read_under_another_name_that_the_caller_knows(case):
    c = case(NAMED)
    spans = [c.at("self.a(x)"), c.at("self.b(z)")]
    x, z = c.within(spans[0], "x"), c.within(spans[1], "z")
    with pytest.raises(Refused, match="z is bound again"):
        c.patch.hoist(spans, "self.ab({0})", ["a", "b"], [x, z])
    with pytest.raises(ValueError, match="no input"):
        c.patch.hoist(spans, "self.ab({0})", ["a", "b"], [x], named={z: c.at("other")})
    c.patch.hoist(spans, "self.ab({0})", ["a", "b"], [x, x], named={z: x})
    assert c.body().strip() == "a, b = self.ab(x)\ny = a\nz = other or x\nreturn y + b"
    later = case(NAMED.replace("z = other or x", "z, x = x, x + 1"))
    spans = [later.at("self.a(x)"), later.at("self.b(z)")]
    x, z = later.within(spans[0], "x"), later.within(spans[1], "z")
    with pytest.raises(Refused, match="x is bound again"):
        later.patch.hoist(spans, "self.ab({0})", ["a", "b"], [x, x], named={z: x})
