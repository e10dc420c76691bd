"""Logs and warnings of the engine that are held back until it is known whether they matter.

In: what is logged and warned of within a block. Out: the same, after it, in order. Nothing of it where an error of ours ends the block:
that says all by itself, and is then all that is seen.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator

from tf_backend.cli._present import EngineFailed, root_cause
from tf_backend.errors import TfBackendError


@contextlib.contextmanager
def held_logs(*, shown: bool = False) -> Iterator[None]:
    """Hold back what any logger and `warnings` would show; not where it is to be `shown` at once."""
    if shown:
        yield
        return
    held: list[Callable[[], object]] = []
    handle, show = logging.Handler.handle, warnings.showwarning

    # Not a filter on each handler: the engine makes handlers anew when it reads its options.
    def hold_record(handler: logging.Handler, record: logging.LogRecord) -> bool:
        held.append(lambda: handle(handler, record))
        return True

    def hold_warning(*said: object, **more: object) -> None:
        held.append(lambda: show(*said, **more))  # type: ignore[arg-type]

    logging.Handler.handle = hold_record  # type: ignore[method-assign, assignment]
    warnings.showwarning = hold_warning
    is_told = False
    try:
        yield
    except Exception as error:
        cause = root_cause(error)
        is_told = isinstance(cause, TfBackendError) and not isinstance(cause, EngineFailed)
        raise
    finally:
        logging.Handler.handle = handle  # type: ignore[method-assign]
        warnings.showwarning = show
        for release in () if is_told else held:
            release()
