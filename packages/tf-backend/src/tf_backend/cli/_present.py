"""What is said of an exception: the message of the error that is ours, however deep the engine wrapped it.

In: an exception. Out: one line.
"""

from __future__ import annotations

from collections.abc import Iterator

from tf_backend.errors import TfBackendError


class EngineFailed(TfBackendError):
    """The engine raised. The message is that of its root cause, and `advice` for an error that is not ours."""

    def __init__(
        self,
        phase: str,
        error: BaseException,
        *,
        advice: str = "Its log may say more: run again with --verbose --debug.",
    ) -> None:
        super().__init__(phase)
        self.phase = phase
        self.error = error
        self.advice = advice

    def __str__(self) -> str:
        cause = root_cause(self.error)
        if isinstance(cause, TfBackendError):
            return str(cause)
        return f"the engine failed while {self.phase}: {_named(cause)}. {self.advice}"


def describe(error: BaseException) -> str:
    """One line: our own message as it is, anything else named as unexpected."""
    cause = root_cause(error)
    if isinstance(cause, TfBackendError):
        return _one_line(str(cause))
    return (
        f"unexpected {_named(error)}. This is a defect: please report it with the traceback that the same command "
        "gives with --debug."
    )


def root_cause(error: BaseException) -> BaseException:
    """The first error of ours in the chain of causes, else the innermost explicit cause."""
    chain = list(_chain(error))
    ours = next((one for one in chain if isinstance(one, TfBackendError) and not isinstance(one, EngineFailed)), None)
    if ours is not None:
        return ours
    while not isinstance(error, EngineFailed) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on; each once."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        if isinstance(current, EngineFailed):
            current = current.error
        else:
            current = current.__cause__ or current.__context__


def _named(error: BaseException) -> str:
    text = (fields_of(error) or _one_line(str(error))).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def fields_of(error: BaseException) -> str:
    """Of an error of pydantic's, each field with what is said of it: its own text is many lines, with addresses and types; else nothing."""
    if type(error).__module__.partition(".")[0] != "pydantic_core" or not hasattr(error, "errors"):
        return ""
    said = []
    for found in error.errors():
        text = _one_line(str(found["msg"])).removeprefix("Value error, ").rstrip(".")
        said.append(": ".join(part for part in (".".join(map(str, found["loc"])), text) if part))
    return "; ".join(said)


def _one_line(text: str) -> str:
    return " ".join(text.split())
