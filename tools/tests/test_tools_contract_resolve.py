"""Paths lead through vLLM's source to what Python would find there."""

from __future__ import annotations

import textwrap

import pytest
from tf_tools.contract import CallShape, Tree
from tf_tools.contract._resolve import Resolver
from tf_tools.contract._signature import from_text, misfit, to_text

FILES = {
    "vllm/__init__.py": """
        import typing
        MODULE_ATTRS = {"Lazy": ".deep.mod:Real", "Gone": ".deep.mod:NotThere"}
        if typing.TYPE_CHECKING:
            from vllm.deep.mod import Real as Lazy
        else:
            def __getattr__(name): ...
        """,
    "vllm/deep/__init__.py": """
        from typing import TYPE_CHECKING
        from .mod import *
        from .mod import Real as Renamed, missing_name
        from . import mod as alias
        if TYPE_CHECKING:
            from .mod import Real as OnlyTyped
        try:
            from .fast import thing
        except ImportError:
            thing = None
        """,
    "vllm/deep/fast.py": "def thing(x): ...",
    "vllm/deep/mod.py": """
        from __future__ import annotations
        import enum
        from dataclasses import dataclass, field
        from typing import Any, Literal, NamedTuple, overload
        import torch
        from torch import nn
        from pydantic import BaseModel

        Alias = Literal["a", "b"]

        class Base:
            kept: int = 1
            def __init__(self, a, b=2, *args, c, **rest):
                self.a = a
                self.typed: Real | None = None
                self.inner = self.typed = make()
                self.later = None
                self.register_buffer("buffer", None)
            def start(self, x: int) -> "Real":
                self.later = Real()
            @property
            def prop(self) -> list[Real]: ...
            @prop.setter
            def prop(self, value): ...
            @classmethod
            def build(cls, n) -> Self: ...
            @staticmethod
            def fixed(n) -> dict[str, Real]: ...

        class Real(Base):
            color: Color
            def own(self): return self

        class Color(enum.Enum):
            RED = 1

        class Layer(nn.Module):
            def forward(self, x, *, scale=1.0) -> torch.Tensor: ...

        @dataclass
        class Data:
            one: int
            two: Real = field(default_factory=Real)
            three: int = field(init=False, default=1)
            four: list[Real] = field(kw_only=True)

        @dataclass(kw_only=True)
        class More(Data):
            five: Any = None

        class Row(NamedTuple):
            x: int
            y: int = 0

        class Model(BaseModel):
            x: int
            y: int = 0

        @overload
        def make(a: int) -> int: ...
        def make(a: int = 1) -> Real: ...

        def guess():
            made = Real(1, c=2)
            return made

        def loop(): return loop()

        def nothing() -> Any: ...

        made = make()
        typed: Base = Real()
        """,
    "vllm/_custom_ops.py": "def f():\n    return torch.ops._C.op(1)\n",
}


def read(name: str) -> bytes | None:
    return textwrap.dedent(FILES[name]).encode() if name in FILES else None


@pytest.fixture(scope="module")
def resolver() -> Resolver:
    return Resolver(Tree("vllm 1.0", read))


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("vllm.deep", "vllm.deep"),
        ("vllm:deep.mod.Real", "vllm.deep.mod:Real"),
        ("vllm:Lazy", "vllm.deep.mod:Real"),
        ("vllm.deep:Real", "vllm.deep.mod:Real"),
        ("vllm.deep:Renamed.start", "vllm.deep.mod:Base.start"),
        ("vllm.deep:alias.Data", "vllm.deep.mod:Data"),
        ("vllm.deep:thing", "vllm.deep.fast:thing"),
        ("vllm.deep.mod:Real().a", "vllm.deep.mod:Base.a"),
        ("vllm.deep.mod:Real().buffer", "vllm.deep.mod:Base.buffer"),
        ("vllm.deep.mod:Real().kept", "vllm.deep.mod:Base.kept"),
        ("vllm.deep.mod:Real().typed.own", "vllm.deep.mod:Real.own"),
        ("vllm.deep.mod:Real().inner.own", "vllm.deep.mod:Real.own"),
        ("vllm.deep.mod:Real().later.own", "vllm.deep.mod:Real.own"),
        ("vllm.deep.mod:Real().prop[].own", "vllm.deep.mod:Real.own"),
        ("vllm.deep.mod:Real().prop[*].own", "vllm.deep.mod:Real.own"),
        ("vllm.deep.mod:Real.build().own", "vllm.deep.mod:Real.own"),
        ("vllm.deep.mod:Real.fixed()[].own", "vllm.deep.mod:Real.own"),
        ("vllm.deep.mod:Real.fixed().get().own", "vllm.deep.mod:Real.own"),
        ("vllm.deep.mod:Real().own().own", "vllm.deep.mod:Real.own"),
        ("vllm.deep.mod:Real().color.value", "enum.Enum.value"),
        ("vllm.deep.mod:Color.RED", "vllm.deep.mod:Color.RED"),
        ("vllm.deep.mod:Color.RED.name", "enum.Enum.name"),
        ("vllm.deep.mod:Data().two.own", "vllm.deep.mod:Real.own"),
        ("vllm.deep.mod:More().four[].own", "vllm.deep.mod:Real.own"),
        ("vllm.deep.mod:make().own", "vllm.deep.mod:Real.own"),
        ("vllm.deep.mod:guess().own", "vllm.deep.mod:Real.own"),
        ("vllm.deep.mod:made.own", "vllm.deep.mod:Real.own"),
        ("vllm.deep.mod:typed.start", "vllm.deep.mod:Base.start"),
        ("vllm.deep.mod:Layer().named_children", "torch.nn.Module.named_children"),
        ("vllm.deep.mod:Layer().training", "torch.nn.Module.training"),
        ("vllm.deep.mod:Layer()().shape", "torch.Tensor.shape"),
        ("vllm.deep.mod:Alias", "vllm.deep.mod:Alias"),
        ("torch.ops._C:op", "torch.ops._C.op"),
    ],
)
def test_a_path_is_followed(resolver: Resolver, path: str, where: str) -> None:
    resolution = resolver.resolve(path)
    assert [one.where for one in resolution.found] == [where], resolution.missing


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("vllm.gone", "no module vllm.gone"),
        ("vllm.deep:gone", "vllm.deep has no `gone`"),
        ("vllm.deep:missing_name", "has no `missing_name`"),
        ("vllm:Gone", "vllm has no `Gone`"),
        ("vllm.deep:OnlyTyped", "vllm.deep has no `OnlyTyped`"),
        ("vllm.deep.mod:Real().gone", "vllm.deep.mod:Real has no `gone`"),
        ("vllm.deep.mod:Real().typed.gone.more", "vllm.deep.mod:Real has no `gone`"),
        ("vllm.deep.mod:Layer().gone", "vllm.deep.mod:Layer has no `gone`"),
        ("torch.ops._C:gone", "vllm._custom_ops calls no torch.ops._C.gone"),
    ],
)
def test_a_path_that_leads_nowhere_says_at_which_step(resolver: Resolver, path: str, why: str) -> None:
    resolution = resolver.resolve(path)
    assert resolution.found == ()
    assert why in resolution.missing


@pytest.mark.parametrize("path", ["vllm.deep.mod:nothing().x", "vllm.deep.mod:loop().x", "vllm.deep.mod:More().five.x"])
def test_what_the_source_does_not_say_is_unknown_and_not_found(resolver: Resolver, path: str) -> None:
    assert [one.kind for one in resolver.resolve(path).found] == ["unknown"]


@pytest.mark.parametrize(
    ("path", "signature"),
    [
        ("vllm.deep.mod:Real", "(a, b = 2, *args, c, **rest)"),
        ("vllm.deep.mod:Real().start", "(x: int)"),
        ("vllm.deep.mod:Real.start", "(self, x: int)"),
        ("vllm.deep.mod:Real.build", "(n)"),
        ("vllm.deep.mod:Real.fixed", "(n)"),
        ("vllm.deep.mod:Layer()", "(x, *, scale = 1.0)"),
        ("vllm.deep.mod:Data", "(one: int, two: Real = Real, *, four: list[Real])"),
        ("vllm.deep.mod:Row", "(x: int, y: int = 0)"),
        ("vllm.deep.mod:Model", "(*, x: int, y: int = 0)"),
        ("vllm.deep.mod:make", "(a: int = 1)"),
    ],
)
def test_signatures_are_those_that_a_caller_sees(resolver: Resolver, path: str, signature: str) -> None:
    (found,) = resolver.resolve(path).found
    answer = resolver.signature(found.things[0])
    assert answer is not None
    assert to_text(answer[0]) == signature


@pytest.mark.parametrize("text", ["()", "(a, /, b: int = 1, *, c, d = 'x')", "(a, /)", "(*args, c, **rest)", "(*, c)"])
def test_a_signature_is_read_back_as_written(text: str) -> None:
    assert to_text(from_text(text)) == text


@pytest.mark.parametrize(
    ("signature", "call", "reason"),
    [
        ("(a, b = 1)", CallShape(1), None),
        ("(a, b = 1)", CallShape(0, ("a", "b")), None),
        ("(a, *args)", CallShape(4), None),
        ("(a, *, c = 1)", CallShape(has_star=True), None),
        ("(a)", CallShape(has_double_star=True), None),
        ("(a, b)", CallShape(1, sometimes=("b",)), "`b` must be given"),
        ("(a)", CallShape(2), "2 positional arguments are given, and it takes 1"),
        ("(a, *, c)", CallShape(2, ("c",)), "takes 1"),
        ("(a)", CallShape(), "`a` must be given"),
        ("(a)", CallShape(1, ("b",)), "no parameter `b`"),
        ("(a, /)", CallShape(0, ("a",)), "no parameter `a`"),
        ("(a)", CallShape(1, ("a",)), "given twice"),
        ("(a, **rest)", CallShape(1, ("b",)), "would vanish in `**rest`"),
        ("(a)", CallShape(1, sometimes=("b",)), "no parameter `b`"),
    ],
)
def test_a_call_fits_or_the_reason_is_told(signature: str, call: CallShape, reason: str | None) -> None:
    found = misfit(call, from_text(signature))
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)
