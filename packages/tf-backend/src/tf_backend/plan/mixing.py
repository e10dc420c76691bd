"""Operations that mix tokens outside the attention interface, found while a model runs on the meta device.

The engine hands the decoder one flat row of tokens that belong to many requests. All that happens outside attention must treat
each token alone; a convolution over time, a cumulative sum, a shift or a contraction over the token axis would leak one
request into another. Which operations do is in `tokenwise`; this file listens.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tf_backend.plan.schema import Place
from tf_backend.plan.tokenwise import Operation, why_not_tokenwise

_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True, slots=True)
class Mixing:
    """One operation that is not alone with its token: the aten op, the module that was running, and the line."""

    op: str
    module: str
    why: str
    place: Place | None = None


class MixingDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations that are not alone with their token.

    Args:
        tokens: length of the token axis, a prime that divides no other size in the model.
        current_module: gives the full name of the module that is running.

    """

    def __init__(self, tokens: int, current_module: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tokens = tokens
        self.current_module = current_module
        self.found: list[Mixing] = []
        self.is_paused = False
        """True while something that is not the model runs within it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.is_paused:
            return out
        operation = Operation.of(func, args, kwargs or {}, out)
        why = why_not_tokenwise(operation, self.tokens)
        if why:
            self.found.append(Mixing(operation.name, self.current_module(), why, running_line()))
        return out


def running_line() -> Place | None:
    """The innermost line that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_MODEL):
            line = frame.f_lineno
            return Place(str(frame.f_globals.get("__name__", file)), line, linecache.getline(file, line).strip())
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
