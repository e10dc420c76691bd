"""Run a function in a forked child and always get an answer: a value, or a row that says how the child ended.

An engine can raise, crash, call `os._exit`, hang, or leave workers behind. None of that may reach the test session:
the child has its own session, its output goes to files, its result comes back over a pipe, and at the end (result,
death or timeout) its whole process group is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import selectors
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, ParamSpec, TypeVar, cast

__all__ = ["ChildFailed", "Failure", "Outcome", "run_in_fork"]

P = ParamSpec("P")
R = TypeVar("R")

_HEADER = struct.Struct("<Q")
_LAST_LINES = 30


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no value.

    Attributes:
        kind: "raised" (an exception in the function), "died" (the process ended without a result), "timeout", or
            "unpicklable" (a value that cannot be sent or read).
        message: one line: the exception, or the exit status or signal.
        traceback: the child's traceback text; empty unless it raised.
        exception: qualified name of the exception's class; empty unless it raised.
    """

    kind: str
    message: str
    traceback: str = ""
    exception: str = ""


class ChildFailed(RuntimeError):
    """Raised by `Outcome.value` when the child gave none; the text holds the child's own traceback and last lines."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a child ended.

    Attributes:
        result: what the function returned; meaningless when there is a failure.
        failure: None, or why there is no result.
        exit_status: as a shell sees it: 0 to 255, or minus the signal's number.
        stdout, stderr: everything that the child and its own children wrote.
        seconds: wall time from fork to end.
    """

    result: object
    failure: Failure | None
    exit_status: int
    stdout: str
    stderr: str
    seconds: float

    def value(self) -> object:
        """The function's result.

        Raises:
            ChildFailed: there is none.
        """
        if self.failure is None:
            return self.result
        tail = "\n".join((self.stdout + self.stderr).splitlines()[-_LAST_LINES:])
        details = self.failure.traceback or f"last lines of its output:\n{tail}"
        raise ChildFailed(f"child {self.failure.kind}: {self.failure.message}\n{details}")


def run_in_fork(fn: Callable[P, object], timeout: float, *args: P.args, **kwargs: P.kwargs) -> Outcome:
    """Call `fn(*args, **kwargs)` in a forked child; nothing needs to be picklable but the result.

    Args:
        fn: runs in the child, on copies of everything in this process.
        timeout: seconds until the child and all that it started are killed.

    Forking is safe only while this process runs no other threads: see `tf_tools.engine.warm`.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tf-tools-fork-") as scratch:
        out, err = Path(scratch, "stdout"), Path(scratch, "stderr")
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _child(writer, out, err, lambda: fn(*args, **kwargs))
        os.close(writer)
        payload: bytes | None = None
        try:
            payload, timed_out = _receive(reader, pid, started + timeout)
        finally:
            os.close(reader)
            status = _end(pid, patience=2.0 if payload is not None else 0.0)
        result, failure = _decode(payload, timed_out, timeout, status)
        stdout, stderr = (p.read_text(errors="replace") if p.exists() else "" for p in (out, err))
    return Outcome(result, failure, status, stdout, stderr, time.monotonic() - started)


def _child(writer: int, out: Path, err: Path, call: Callable[[], object]) -> NoReturn:
    """Never returns into the parent's stack: whatever happens, the process ends here."""
    status = 70
    try:
        os.setsid()
        for path, descriptor in ((out, 1), (err, 2)):
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(opened, descriptor)
            os.close(opened)
        # A test runner may have replaced these with objects that buffer in memory.
        sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
        faulthandler.enable(file=2)  # a test runner's own would write a crash into the runner's terminal
        payload, status = _encode(call)
        _send(writer, payload)
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _encode(call: Callable[[], object]) -> tuple[bytes, int]:
    try:
        result = call()
    except BaseException as error:
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        text = "".join(traceback.format_exception(error))
        message = f"{type(error).__name__}: {error}"
        return pickle.dumps((None, Failure("raised", message, text, name))), 1
    try:
        return pickle.dumps((result, None)), 0
    except Exception as error:
        message = f"a {type(result).__qualname__} cannot be sent to the parent: {error}"
        return pickle.dumps((None, Failure("unpicklable", message))), 1


def _send(writer: int, payload: bytes) -> None:
    view = memoryview(_HEADER.pack(len(payload)) + payload)
    while view:
        view = view[os.write(writer, view) :]


def _receive(reader: int, pid: int, deadline: float) -> tuple[bytes | None, bool]:
    """The payload, or None; and whether time ran out.

    The end of the pipe is no sign of the child's end: workers that it started hold the pipe open as well. So its
    death is looked for separately.
    """
    os.set_blocking(reader, False)
    data = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            dead = _is_dead(pid)  # asked before the pipe is read: what a dead child wrote is there to be read
            selector.select(timeout=0.0 if dead else min(0.2, max(0.0, deadline - time.monotonic())))
            ended = _drain(reader, data)
            if len(data) >= _HEADER.size:
                (size,) = _HEADER.unpack_from(data)
                if len(data) - _HEADER.size >= size:
                    return bytes(data[_HEADER.size :]), False
            if ended or dead:
                return None, False
    return None, True


def _drain(reader: int, data: bytearray) -> bool:
    """Append what the pipe holds now; whether its last writer is gone."""
    while True:
        try:
            chunk = os.read(reader, 1 << 20)
        except BlockingIOError:
            return False
        if not chunk:
            return True
        data += chunk


def _is_dead(pid: int) -> bool:
    """Whether the child has ended; its status stays there for `_end` to collect."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(pid: int, patience: float) -> int:
    """Give the child some seconds to leave by itself, then kill its process group; its exit status."""
    until = time.monotonic() + patience
    while not _is_dead(pid) and time.monotonic() < until:
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # in case it was killed before it had a group of its own
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _decode(payload: bytes | None, timed_out: bool, timeout: float, status: int) -> tuple[object, Failure | None]:
    if payload is not None:
        try:
            return cast("tuple[object, Failure | None]", pickle.loads(payload))
        except Exception as error:
            return None, Failure("unpicklable", f"the result cannot be read here: {type(error).__name__}: {error}")
    if timed_out:
        return None, Failure("timeout", f"no result within {timeout:g} s")
    cause = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return None, Failure("died", f"ended without a result, {cause}")
