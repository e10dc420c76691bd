"""Jobs in forked children of a warm parent, some at a time: a crash or a hang is an outcome, not the end.

In: jobs by name, each a function that returns bytes. Out: outcomes, as they come. Each child has a session of its own, which is killed as
a whole at the time limit. Forking is safe only while this process runs no other threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_OK, _RAISED = b"0", b"1"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one job: `value` is what the function returned; `failure` says in one line why there is none."""

    name: str
    value: bytes
    failure: str
    seconds: float


@dataclass(slots=True)
class _Child:
    name: str
    pid: int
    reader: int
    started: float
    data: bytearray


def run_forked(
    jobs: Iterable[tuple[str, Callable[[], bytes]]], *, at_once: int, timeout: float, log: Path | None = None
) -> Iterator[Outcome]:
    """Run `jobs`, at most `at_once` at a time, and give each outcome when it is there.

    Args:
        timeout: seconds for each job.
        log: file that what the jobs print is added to; dropped when None.
    """
    waiting = iter(jobs)
    running: dict[int, _Child] = {}
    with selectors.DefaultSelector() as selector:
        try:
            while True:
                while len(running) < at_once and (job := next(waiting, None)) is not None:
                    child = _start(*job, log)
                    running[child.reader] = child
                    selector.register(child.reader, selectors.EVENT_READ)
                if not running:
                    return
                oldest = min(child.started for child in running.values())
                ready = {key.fd for key, _ in selector.select(max(0.0, oldest + timeout - time.monotonic()))}
                for child in list(running.values()):
                    ended = child.reader in ready and _drain(child)
                    late = time.monotonic() - child.started > timeout
                    if ended or late:
                        selector.unregister(child.reader)
                        del running[child.reader]
                        yield _outcome(child, _end(child), "" if ended else f"no answer within {timeout:g} s")
        finally:
            for child in running.values():
                _end(child)


def _start(name: str, job: Callable[[], bytes], log: Path | None) -> _Child:
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            os.close(reader)
            os.setsid()
            target = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(target, 1)
            os.dup2(target, 2)
            sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
            faulthandler.enable(file=2)  # another's own would write a crash into its terminal
            status = _answer(writer, job)
        finally:
            os._exit(status)
    os.close(writer)
    os.set_blocking(reader, False)
    return _Child(name, pid, reader, time.monotonic(), bytearray())


def _answer(writer: int, job: Callable[[], bytes]) -> int:
    try:
        answer = _OK + job()
    except BaseException as error:
        traceback.print_exc()
        line = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(line.filename).name}, line {line.lineno}"
        answer = _RAISED + f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({where})".encode()
    with open(writer, "wb", closefd=True) as pipe:
        pipe.write(answer)
    return 0


def _drain(child: _Child) -> bool:
    """Take what the pipe holds; whether the child has closed it."""
    while True:
        try:
            chunk = os.read(child.reader, 1 << 20)
        except BlockingIOError:
            return False
        if not chunk:
            return True
        child.data += chunk


def _end(child: _Child) -> int:
    """Kill the child's session, whatever of it still runs; the exit status of the child."""
    with contextlib.suppress(OSError):
        os.close(child.reader)
    time.sleep(0)
    done, status = os.waitpid(child.pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    if not done:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
    return os.waitstatus_to_exitcode(status)


def _outcome(child: _Child, status: int, late: str) -> Outcome:
    seconds = time.monotonic() - child.started
    tag, value = bytes(child.data[:1]), bytes(child.data[1:])
    if late:
        return Outcome(child.name, b"", late, seconds)
    if tag == _OK:
        return Outcome(child.name, value, "", seconds)
    if tag == _RAISED:
        return Outcome(child.name, b"", value.decode(errors="replace"), seconds)
    ending = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return Outcome(child.name, b"", f"the process ended without an answer, {ending}", seconds)
