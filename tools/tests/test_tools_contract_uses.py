"""Uses of vLLM are found in source, however they are written."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest
from tf_tools.contract import Typed, collect, sources
from tf_tools.contract._collect import Collector
from tf_tools.contract._data import private_part, split


def found(source: str, rows: tuple[Typed, ...] = ()) -> list[tuple[str, str, str]]:
    collector = Collector("a.py", rows)
    collector.visit(ast.parse(textwrap.dedent(source)))
    return [(use.kind, use.path, str(use.call) if use.call else "") for use in collector.uses]


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("import vllm.a.b", ("import", "vllm.a.b", "")),
        ("import vllm.a.b\nvllm.a.b.f", ("attribute", "vllm:a.b.f", "")),
        ("import vllm.a as m\nm.f(1)", ("call", "vllm.a:f", "(_)")),
        ("from vllm.a import B as C\nC.x", ("attribute", "vllm.a:B.x", "")),
        ("def f():\n from vllm.a import B\n B(1, x=2)", ("call", "vllm.a:B", "(_, x=)")),
        ("from vllm.a import B\ndef f(b: B): b.x.y", ("attribute", "vllm.a:B().x.y", "")),
        ("from vllm.a import B\ndef f(b: 'B | None'): b.x", ("attribute", "vllm.a:B().x", "")),
        ("from vllm.a import B\ndef f(b: Optional[B]): b.x", ("attribute", "vllm.a:B().x", "")),
        ("from vllm.a import B\ndef f(b: type[B]): b.x", ("attribute", "vllm.a:B.x", "")),
        ("from vllm.a import B\nb = B()\nb.f()[0].x", ("attribute", "vllm.a:B().f()[].x", "")),
        ("from vllm.a import B\nfor b in B().all(): b.x", ("attribute", "vllm.a:B().all()[*].x", "")),
        ("from vllm.a import B\n[b.x for b in B.all]", ("attribute", "vllm.a:B.all[*].x", "")),
        ("from vllm.a import B\n(b,) = B.all\nb.x", ("attribute", "vllm.a:B.all[*].x", "")),
        ("from vllm.a import B, C\n(B if y else C)(z=1)", ("call", "vllm.a:C", "(z=)")),
        ("from vllm.a import B, C\n{'b': B, 'c': C}[k](z=1)", ("call", "vllm.a:B", "(z=)")),
        ("from vllm.a import B\nkinds = {'b': B}\nkinds[k](z=1)", ("call", "vllm.a:B", "(z=)")),
        ("from vllm.a import B\nb = None\nif y:\n b = B()\nb.x", ("attribute", "vllm.a:B().x", "")),
        ("from vllm.a import B\ngetattr(B(), 'x', None)", ("attribute", "vllm.a:B().x", "")),
        ("from vllm.a import B\nb = getattr(B, 'x')\nb.y", ("attribute", "vllm.a:B.x.y", "")),
        ("from vllm.a import B\nhasattr(B, 'x')", ("attribute", "vllm.a:B.x", "")),
        ("from vllm.a import B\ngetattr(B, name)", ("dynamic", "vllm.a:B", "")),
        ("from vllm.a import *", ("dynamic", "vllm.a:*", "")),
        ("import importlib\nimportlib.import_module('vllm.a')", ("import", "vllm.a", "")),
        ("from vllm.a import B\nclass C(B): ...", ("subclass", "vllm.a:B", "")),
        ("from vllm.a import B\ntype('C', (B,), {})", ("subclass", "vllm.a:B", "")),
        ("from vllm.a import d\n@d(dims={})\nclass C: ...", ("call", "vllm.a:d", "(dims=)")),
        ("from vllm.a import d\n@d\ndef f(): ...", ("call", "vllm.a:d", "(_)")),
        ("from vllm.a import B\nB.x = 1", ("write", "vllm.a:B.x", "")),
        ("from vllm.a import B\nB.x += 1", ("write", "vllm.a:B.x", "")),
        ("from vllm.a import B\ndel B.x", ("write", "vllm.a:B.x", "")),
        ("from vllm.a import B\nsetattr(B, 'x', 1)", ("write", "vllm.a:B.x", "")),
        ("from vllm.a import T\nT['x'] = 1", ("write", "vllm.a:T", "")),
        ("from vllm.a import T\nT.update(x=1)", ("write", "vllm.a:T", "")),
        ("import sys\nsys.modules['vllm.a'] = None", ("write", "vllm.a", "")),
        ("import vllm.a\nvllm.a.f = g", ("write", "vllm:a.f", "")),
        (
            "from vllm.a import B\nimport dataclasses\ndataclasses.replace(B(), x=1).y",
            ("attribute", "vllm.a:B().y", ""),
        ),
        ("from vllm.a import B\nimport dataclasses\ndataclasses.replace(B(), x=1)", ("attribute", "vllm.a:B().x", "")),
        ("import os\nos.environ.get('VLLM_PLUGINS')", ("environment", "vllm.envs:VLLM_PLUGINS", "")),
        ("import torch\ntorch.ops._C.f(1)", ("operator", "torch.ops._C:f", "")),
        ("raise ValueError(f'set `--max-num-seqs` to {n}')", ("option", "vllm-serve:max_num_seqs", "")),
        ("from vllm.a import f\nwith f() as g: g.x", ("untyped", "f() as g", "")),
        ("def f(vllm_config): vllm_config.x", ("untyped", "vllm_config.x", "")),
        ("from vllm.a import f\nf(*a, **k)", ("call", "vllm.a:f", "(*_, **_)")),
        ("from vllm.a import f\nf(**{'x': 1})", ("call", "vllm.a:f", "([x=])")),
        ("from vllm.a import f\ndef g():\n k = {} if y else {'x': 1}\n f(**k)", ("call", "vllm.a:f", "([x=])")),
        ("from vllm.a import f\ndef g():\n k = {'x': 1}\n k[n] = 2\n f(**k)", ("call", "vllm.a:f", "(**_)")),
        (
            "from vllm.a import B\nclass C:\n def f(self): self.b.x\n def __init__(self): self.b = B()",
            ("attribute", "vllm.a:B().x", ""),
        ),
    ],
)
def test_a_use_is_found(source: str, use: tuple[str, str, str]) -> None:
    assert use in found(source)


@pytest.mark.parametrize(
    "source",
    [
        "from vllm_layers_bridge import build\nbuild(1)",
        "import torch\ntorch.nn.Linear(1, 2)",
        "from vllm.a import B\nB = own()\nB.x",
        "class C:\n def f(self): self.x",
        "x = 'VLLM_ in a sentence'",
        "x = 'a--b and ---c'",
        "with open(p) as f: f.x",
    ],
)
def test_what_is_not_vllms_is_left_alone(source: str) -> None:
    assert [use for use in found(source) if use[0] != "import"] == []


def test_a_row_says_what_an_expression_stands_for() -> None:
    rows = (Typed("a.py", "C.f", "layer", "vllm.a:L()"),)
    source = "class C:\n def f(self, layer): layer.x\n def g(self, layer): layer.y"
    assert ("attribute", "vllm.a:L().x", "") in found(source, rows)
    assert not any(path.endswith("y") for _, path, _ in found(source, rows))


def test_a_row_for_a_whole_call_says_what_is_called() -> None:
    rows = (Typed("a.py", "f", "load(t, w)", "vllm.a:L().weight_loader"),)
    assert ("call", "vllm.a:L().weight_loader", "(_, _)") in found("def f(load): load(t, w)", rows)


def test_a_row_without_a_path_says_that_it_is_not_vllms() -> None:
    source = "from vllm.a import B\ndef f(): getattr(B, 'x', 1)"
    assert ("attribute", "vllm.a:B.x", "") in found(source)
    assert ("attribute", "vllm.a:B.x", "") not in found(source, (Typed("a.py", "f", "getattr(B, 'x', 1)", ""),))


def test_a_row_says_what_entering_a_context_gives() -> None:
    rows = (Typed("a.py", "f", "g", "vllm.a:G()"),)
    uses = found("from vllm.a import c\ndef f():\n with c() as g: g.x", rows)
    assert ("attribute", "vllm.a:G().x", "") in uses
    assert not any(kind == "untyped" for kind, _, _ in uses)


def test_rows_that_match_nothing_are_stale(tmp_path: Path) -> None:
    package = tmp_path / "p" / "src" / "p"
    package.mkdir(parents=True)
    (package / "m.py").write_text("import vllm\n\ndef f(a): return a.x\n")
    used, stale = Typed("p/m.py", "f", "a", "vllm.a:A()"), Typed("p/m.py", "f", "b", "vllm.a:A()")
    uses = collect(sources(tmp_path), (used, stale))
    assert uses.stale == (stale,)
    assert {str(use.place) for use in uses.uses} == {"p/m.py:1", "p/m.py:3"}


def test_options_of_our_own_command_are_not_vllms(tmp_path: Path) -> None:
    package = tmp_path / "p" / "src" / "p"
    package.mkdir(parents=True)
    (package / "m.py").write_text("parser.add_argument('--own-thing')\nx = 'give --own-thing or --dtype'\n")
    assert [use.path for use in collect(sources(tmp_path), ()).uses] == ["vllm-serve:dtype"]


@pytest.mark.parametrize(
    ("path", "steps"),
    [
        ("vllm.a", ("vllm.a", ())),
        ("vllm.a:B().c[].d[*]", ("vllm.a", ("B", "()", "c", "[]", "d", "[*]"))),
    ],
)
def test_paths_are_split_into_steps(path: str, steps: tuple[str, tuple[str, ...]]) -> None:
    assert split(path) == steps


@pytest.mark.parametrize(
    ("path", "private"),
    [
        ("vllm.a:B._x.y", "vllm.a:B._x"),
        ("vllm._a:f", "vllm._a"),
        ("vllm:_a.f", "vllm:_a"),
        ("vllm.a:B.__init__", None),
        ("vllm.a:B().x", None),
        ("torch.ops._C:f", None),
    ],
)
def test_private_names_are_told(path: str, private: str | None) -> None:
    assert private_part(path) == private
