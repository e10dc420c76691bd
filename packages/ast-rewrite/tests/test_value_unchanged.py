"""The dataflow question by itself: one value at two places?"""

import pytest
from ast_rewrite import Refused, SourceSpan


@pytest.mark.parametrize(
    "body",
    [
        "y = h.g(1, x)\n    return x",
        "return [x, x]",
        "h.a(x)\n    y = h.b(x)\n    return y",
        "y = x\n    if y:\n        return x",
        "y = x\n    for i in y:\n        h.a(x)",
        "if x:\n        return x",
        "for i in x:\n        h.a(x)",
        "with h.open(x):\n        return x",
        "for i in h:\n        y = x\n        z = x\n        x = i",
        "y = x or x",
        "y = (x, 1) and (2, x)",
        "return x + 1 if x else 0",
        "y = 1 < x < x",
        "y = x\n    def k(): return h\n    return x",
    ],
)
def test_unchanged(case, body):
    c = case(f"def f(x, h):\n    {body}\n")
    last = 1
    while True:
        try:
            c.at("x", last + 1)
        except IndexError:
            break
        last += 1
    if "z = x\n" in body:
        c.patch.is_value_unchanged(c.at("x", 0), c.at("x", 1))
    else:
        c.patch.is_value_unchanged(c.at("x", 0), c.at("x", last))
        c.patch.is_value_unchanged(c.at("x", last), c.at("x", 0))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("y = [x]\n    x = h\n    return {x}", "bound again"),
        ("y = [x]\n    for i in h:\n        y = {x}\n        x = i", "bound again"),
        ("while [x]:\n        x = h\n        return {x}", "bound again"),
        ("y = [x]\n    g(x)\n    return {x}", "not known to leave"),
        ("g([x])\n    return {x}", "not known to leave"),
        ("if h:\n        y = [x]\n    return {x}", "not always evaluated"),
        ("if h:\n        y = [x]\n    else:\n        return {x}", "not always evaluated"),
        ("for i in h:\n        y = [x]\n    return {x}", "not always evaluated"),
        ("for i in h:\n        y = [x]\n    else:\n        return {x}", "not always evaluated"),
        ("try:\n        y = [x]\n    except E:\n        return {x}", "not always evaluated"),
        ("y = h and [x]\n    return {x}", "not always evaluated"),
        ("y = [x] if h else 0\n    return {x}", "not always evaluated"),
        ("y = [x] if h else {x}", "not always evaluated"),
        ("y = [x]\n    return lambda: {x}", "nested function"),
        ("y = [x]\n    return [{x} for _ in h]", "nested function or a comprehension"),
        ("y = [[x] for _ in h]\n    return {x}", "nested function or a comprehension"),
        ("match h:\n        case 1:\n            y = [x]\n    return {x}", "not always evaluated"),
        ("y = [x]\n    await g()\n    return {x}", "other code runs"),
        ("y = [x]\n    async for i in h: pass\n    return {x}", "other code runs"),
    ],
)
def test_perhaps_changed(case, body, why):
    kind = "async def" if "await" in body or "async" in body else "def"
    c = case(f"{kind} f(x, h):\n    {body}\n")
    inside = {name: c.at(text) for name, text in (("first", "[x]"), ("last", "{x}"))}
    first = next(s for s in all_of(c, "x") if inside["first"].contains(s))
    last = next(s for s in all_of(c, "x") if inside["last"].contains(s))
    with pytest.raises(Refused, match=why):
        c.patch.is_value_unchanged(first, last)


def all_of(c, text):
    found = []
    while True:
        try:
            found.append(c.at(text, len(found)))
        except IndexError:
            return found


def test_two_expressions_must_be_the_same(case):
    c = case("def f(x, y):\n    return x.a + y.a + x.a\n")
    c.patch.is_value_unchanged(c.at("x.a"), c.at("x.a", 1))
    with pytest.raises(Refused, match="not the same expression"):
        c.patch.is_value_unchanged(c.at("x.a"), c.at("y.a"))
    c.patch.replace(c.at("x.a", 1), "x.b")
    with pytest.raises(Refused, match="an edit changed"):
        c.patch.is_value_unchanged(c.at("x.a"), c.at("x.a", 1))


def test_what_is_not_simple_is_refused(case):
    c = case("def f(x):\n    return x[0] + x[0]\n")
    with pytest.raises(Refused, match="must be a name"):
        c.patch.is_value_unchanged(c.at("x[0]"), c.at("x[0]", 1))


@pytest.mark.parametrize(("stored", "same"), [("other", True), ("scale", False), ("scale.data", False)])
def test_attributes_of_self(case, stored, same):
    c = case(
        f"""
        class C:
            def f(self, x):
                y = self.scale * x
                self.{stored} = 1
                return -self.scale * y
        f = C.f
        """
    )
    last = c.source.expression_at(c.at("-self.scale")).operand
    span = SourceSpan.of(last)
    if same:
        c.patch.is_value_unchanged(c.at("self.scale"), span)
    else:
        with pytest.raises(Refused, match=rf"self\.{stored} is assigned"):
            c.patch.is_value_unchanged(c.at("self.scale"), span)


def test_an_expression_that_an_edit_took_away_is_refused(case):
    c = case("def f(x):\n    return g(x) + x\n")
    c.patch.replace(c.at("g(x)"), "1")
    with pytest.raises(Refused, match="took this expression away"):
        c.patch.is_value_unchanged(c.at("x"), c.at("x", 1))
