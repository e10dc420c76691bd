"""Functions made from text, so that a test shows what goes in and what comes out."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ast_rewrite import FunctionSource, Patch, SourceSpan

_number = itertools.count()


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("AST_REWRITE_CACHE", str(folder))
    return folder


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Callable[..., types.ModuleType]]:
    """Import a module made of the given text (bytes are written as they are)."""
    made: list[str] = []

    def build(text: str | bytes) -> types.ModuleType:
        name = f"ast_rewrite_case_{next(_number)}"
        path = tmp_path / f"{name}.py"
        path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[name] = loaded
        made.append(name)
        spec.loader.exec_module(loaded)
        return loaded

    yield build
    for name in made:
        del sys.modules[name]


class Case:
    """A patch of the function `f` of a text, with spans looked up by what they say."""

    def __init__(self, loaded: types.ModuleType, name: str = "f") -> None:
        self.module = loaded
        target: object = loaded
        for part in name.split("."):
            target = getattr(target, part)
        self.fn = target
        self.source = FunctionSource.of(target)  # type: ignore[arg-type]
        self.patch = Patch(self.source)

    def at(self, text: str, nth: int = 0) -> SourceSpan:
        """The span of the nth expression whose exact text is this."""
        return self._spans(text)[nth]

    def within(self, outer: SourceSpan, text: str) -> SourceSpan:
        """The first expression in `outer` whose exact text is this."""
        return next(span for span in self._spans(text) if outer.contains(span))

    def _spans(self, text: str) -> list[SourceSpan]:
        spans = {
            SourceSpan.of(node)
            for statement in self.source.tree.body
            for node in ast.walk(statement)
            if isinstance(node, ast.expr) and self.source.segment(SourceSpan.of(node)) == text
        }
        return sorted(spans)

    def body(self) -> str:
        """The result without its first line."""
        return textwrap.dedent(self.patch.result().split("\n", 1)[1])

    def run(self, *args: object, **kwargs: object) -> object:
        return self.patch.compile().function(*args, **kwargs)


@pytest.fixture
def case(module: Callable[..., types.ModuleType]) -> Callable[..., Case]:
    def build(text: str | bytes, name: str = "f") -> Case:
        return Case(module(text), name)

    return build
