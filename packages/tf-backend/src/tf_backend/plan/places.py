"""Where things are in source, for people: the Python module and line of a class's forward, or of a node in it."""

from __future__ import annotations

import inspect
import linecache
from typing import Any

from torch import nn

from tf_backend.plan.schema import Place


def forward_of(cls: type[nn.Module]) -> Any:
    """The function that runs as `cls.forward`, without its decorators."""
    return inspect.unwrap(cls.forward)


def place_of_class(cls: type[nn.Module]) -> Place | None:
    """First line of the forward of `cls`."""
    function = forward_of(cls)
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    return Place(module=function.__module__ or cls.__module__, line=code.co_firstlineno)


def place_of_line(module: str, file: str, line: int) -> Place:
    """A line of `file`, with its text."""
    return Place(module=module, line=line, text=linecache.getline(file, line).strip())


def class_path(cls: type) -> str:
    """``module:qualname``."""
    return f"{cls.__module__}:{cls.__qualname__}"
