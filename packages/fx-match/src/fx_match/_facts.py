"""What a trace says besides its graph: guards, the stop of a partial trace, and the sentinels for what is not known."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fx_match._source import Location, SourceSpan


class Unknown(enum.Enum):
    """The value of a node that could not be computed; use `UNKNOWN`."""

    UNKNOWN = "unknown"

    def __repr__(self) -> str:
        return "UNKNOWN"

    def __bool__(self) -> bool:
        return False


class Missing(enum.Enum):
    """Stands in `Trace.reads` for an attribute that the forward asked for and the module does not have; use `MISSING`."""

    MISSING = "missing"

    def __repr__(self) -> str:
        return "MISSING"

    def __bool__(self) -> bool:
        return False


UNKNOWN = Unknown.UNKNOWN
MISSING = Missing.MISSING


@dataclass(frozen=True, slots=True)
class Guard:
    """One thing that the path of the traced forward hung, or may have hung, on.

    - "attribute": the forward read a plain attribute; `expr` is `self.name`. A fact about the module.
    - "size": a comparison, truth test, loop count or conversion to a plain number of something computed from a tensor's
      shape. A fact about the sample inputs only.
    - "value": a property of a tensor other than its shape was read as a plain Python value (dtype, device, ndim ...).

    `outcome` is the result of a comparison or truth test, and None where the value itself went on into the forward.
    """

    kind: Literal["attribute", "size", "value"]
    name: str
    expr: str
    value: object
    span: SourceSpan | None
    outcome: bool | None


@dataclass(frozen=True, slots=True)
class Stop:
    """Where and why a partial trace ended."""

    reason: str
    span: SourceSpan | None
    exception: str
    """Name of the exception's type."""
    location: Location

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}"


@dataclass(frozen=True, slots=True)
class LeafCall:
    """A callable that becomes one node.

    function: a Python function, a torch function, or a subclass of `nn.Module` (then each child of that class).
    meta: called with the arguments of the call (for a module class: with the child first), tensors on meta, returns what
        the call would return, tensors on meta. None: the function itself is run on meta.
    """

    function: Callable[..., Any]
    meta: Callable[..., Any] | None = None
