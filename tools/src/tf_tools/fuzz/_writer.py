"""Writes the body of a forward, statement by statement, as draws of hypothesis decide.

In: a `draw` function. Out: lines of Python. What a kind of block computes is told by its own file; here is how anything may be spelled
(in one expression or over several statements, under one name or another), and what may stand between.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

from tf_tools.fuzz._decoys import disturb

T = TypeVar("T")


class Writer:
    """A forward in the making.

    x: the name that holds the input now. scope: names that hold tensors of any shape. layers: children that a disturbance may use.
    """

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], *, x: str, receiver: str, calm: bool) -> None:
        self._draw = draw
        self.x = x
        self.me = receiver
        self.is_calm = calm
        self.statements: list[str] = []
        self.scope: list[str] = [x]
        self.extras: list[str] = []
        self.layers: list[str] = []
        self.methods: dict[str, str] = {}
        self._names: set[str] = {x}

    # ---- draws; the first option is the plainest, to which an example shrinks

    def draw(self, strategy: st.SearchStrategy[T]) -> T:
        value: T = self._draw(strategy)
        return value

    def pick(self, *options: T) -> T:
        return self.draw(st.sampled_from(options))

    def rarely(self, one_in: int) -> bool:
        """True once in so many times."""
        return self.draw(st.integers(0, one_in - 1)) == one_in - 1

    # ---- statements

    def put(self, statement: str) -> None:
        self.statements.append(textwrap.dedent(statement).strip("\n"))

    def name(self, wanted: str) -> str:
        """A new name, or rarely one that a fusion would like to use, or one in use."""
        if self.rarely(24):
            wanted = self.pick("gate_output", "gated_output", "query_output", "up_output", "act_and_mul", "größe", "_")
        elif self.rarely(30):
            wanted = self.pick(*self.scope)
        self._names.add(wanted)
        return wanted

    def bind(self, expression: str, wanted: str) -> str:
        """The expression itself, or a name that now holds it."""
        form = self.pick("inline", "name", "name", "name", "walrus", "typed", "tuple", "lines", "semicolon")
        if form == "inline":
            return expression
        name = self.name(wanted)
        if form == "walrus":
            self.scope.append(name)
            return f"({name} := {expression})"
        if form == "typed":
            self.put(f"{name}: torch.Tensor = {expression}")
        elif form == "tuple":
            self.put(f"{name}, spare = {expression}, 0")
        elif form == "lines":
            self.put(f"{name} = (  # é\n    {expression}\n)")
        elif form == "semicolon":
            self.put(f"spare = 0; {name} = {expression}")
        else:
            self.put(f"{name} = {expression}")
        self.scope.append(name)
        return name

    # ---- calls of layers

    def layer(self, name: str, given: str) -> str:
        """A call of the linear `name`."""
        if name not in self.layers:
            self.layers.append(name)
        if self.is_calm or not self.rarely(5):
            return f"{self.me}.{name}({given})"
        form = self.draw(st.sampled_from(("keyword", "lines", "cast", "helper", "method", "alias", "other")))
        if form == "keyword":
            return f"{self.me}.{name}(input={given})"
        if form == "lines":
            return f"{self.me}.{name}(\n        {given},  # größe\n    )"
        if form == "cast":
            return f"{self.me}.{name}({given}).to({self.x}.dtype)"
        if form == "helper":
            return f"_call({self.me}.{name}, {given})"
        if form == "method":
            self.methods[f"run_{name}"] = f"def run_{name}(self, given):\n    return self.{name}(given)"
            return f"{self.me}.run_{name}({given})"
        if form == "alias":
            self.put(f"layer_{name} = {self.me}.{name}")
            return f"layer_{name}({given})"
        path = f"{self.me}.{name}"
        return self.pick(
            f"({path})({given})",
            f"{path}({given},)",
            f"{path}(*({given},))",
            f"{path}.forward({given})",
            f"getattr({self.me}, '{name}')({given})",
            f"[layer({given}) for layer in ({path},)][0]",
            f"(lambda given: {path}(given))({given})",
            f"F.linear({given}, {path}.weight, {path}.bias)",
            f"({path}({given}) if {self.me}.flag else {path}({given}) * 2.0)",
            f"({path}({given}) if {self.x}.shape[1] > 4 else {path}({given}) * 2.0)",
            f"({self.me}.flag and {path}({given}))",
            f"{path}({given}).contiguous()",
            f"torch.clone({path}({given}))",
            f"{path}.__call__({given})",
            f"next(iter(({path}({given}),)))",
            f"{path}({given} if {self.me}.flag else {given} * 2.0)",
            f"{path}({given} * 1.0)",
        )

    def source(self) -> str:
        """The input of a projection: the same name each time, as a rule."""
        if self.is_calm or not self.rarely(12):
            return self.x
        return self.pick(
            *self.scope,
            f"{self.x}.contiguous()",
            f"{self.x}[:]",
            f"({self.x})",
            f"(given := {self.x})",
            f"{self.x} + 0.5",
        )

    # ---- what stands between

    def gap(self) -> None:
        """A place between two statements, where something else may stand."""
        if self.rarely(10):
            self.put(self.pick("# größe", '"""é"""', "pass", f"assert {self.x} is not None", "spare = 1.0"))
        if not self.is_calm and self.rarely(5):
            disturb(self, self.pick(*self.scope))

    def result(self, expression: str) -> str:
        """What is returned: the expression, with all that was computed beside it."""
        return " + ".join([expression, *self.extras])

    def body(self) -> str:
        """The statements, some of them perhaps inside of others."""
        statements = self.statements
        if not self.is_calm and len(statements) > 1 and self.rarely(6):
            first = self.draw(st.integers(0, len(statements) - 1))
            last = self.draw(st.integers(first, len(statements) - 1))
            statements = [*statements[:first], self._wrapped(statements[first : last + 1]), *statements[last + 1 :]]
        return "\n".join(statements)

    def _wrapped(self, statements: Sequence[str]) -> str:
        inner = textwrap.indent("\n".join([*statements, "pass"]), "    ")
        me, x = self.me, self.x
        form = self.pick(
            "if True:\n{inner}",
            "with torch.no_grad():\n{inner}",
            "with contextlib.nullcontext() as spare:\n{inner}",
            "if {me}.flag:\n{inner}\nelse:\n{inner}",
            "if {me}.flag:\n{inner}",
            "if {x}.shape[1] > 4:\n{inner}\nelse:\n{inner}",
            "if {x}.shape[1] > 4:\n{inner}\nelse:\n{inner}\n    {x} = {x} * 2.0",
            "for _ in range(1):\n{inner}",
            "for spare in range({me}.times):\n{inner}",
            "try:\n{inner}\nfinally:\n    spare = 1",
            "try:\n{inner}\nexcept ValueError:\n    raise",
            "while True:\n{inner}\n    break",
        )
        return form.format(me=me, x=x, inner=inner)
